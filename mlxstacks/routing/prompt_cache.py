"""The state of a model after a conversation so far, kept as long as it is right.

A cache holds what the model computed for some tokens under some weights of stacks. It is continued
only for a prompt that begins with exactly those tokens, under exactly those weights. Otherwise it
goes back to its mark, the end of the part of the last prompt that no later turn can change, if the
new prompt begins with that; else everything is computed again. So an answer never depends on what
was asked before in another form: a template that drops earlier thoughts, another route, an answer
that was broken off.

States of recurrent layers cannot be shortened, so the mark keeps them: one a layer, whatever the
length, for they are replaced and never written into. Keys and values are written into, but only
behind the mark; going back there is a number. Other kinds of cache are copied as a whole.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

# mlx-lm's caches that only write behind their offset, and whose `trim` only moves it.
_APPENDED = ("KVCache", "QuantizedKVCache")


@dataclass(frozen=True, eq=False)
class _Mark:
    """tokens: how many there were. states: an offset, or a whole state, for each entry."""

    tokens: int
    states: tuple[Any, ...]


class PromptCache:
    """One sequence's cache. make: builds the empty entries of the model.

    tokens: those that the entries hold, in order. key: under which weights they were computed.
    """

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.entries = self._make()
        self.tokens: list[int] = []
        self.key: Hashable = None
        self._mark: _Mark | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states; of the mark only what it does not share with them."""
        states = [entry.state for entry in self.entries] if self.tokens else []
        marked = self._mark.states if self._mark else ()
        return sum(a.nbytes for _, a in tree_flatten([states, marked]) if isinstance(a, mx.array))

    def reuse(self, prompt: Sequence[int], key: Hashable) -> int:
        """Make the cache one that `prompt` can go on from; how many of its tokens are in it.

        Fewer than the prompt has: the last token must be computed to say what follows.
        """
        if key == self.key:
            if _begins(prompt, self.tokens):
                return len(self.tokens)
            if self._mark and _begins(prompt, self.tokens[: self._mark.tokens]) and self.rewind():
                return len(self.tokens)
        self.clear()
        self.key = key
        return 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Say that the entries hold these tokens too, now."""
        self.tokens.extend(tokens)

    def mark(self) -> None:
        """Come back here when what follows does not go on in the next prompt, or is broken off."""
        self._mark = _Mark(len(self.tokens), tuple(_state(entry) for entry in self.entries))

    def rewind(self) -> bool:
        """Back to the mark; to nothing, and False, where there is none or it is not whole."""
        mark = self._mark
        if mark is not None:
            try:
                for entry, state in zip(self.entries, mark.states, strict=True):
                    _restore(entry, state)
                mx.eval([entry.state for entry in self.entries])
            except (RuntimeError, ValueError):  # of a step that failed, and whose results are here
                mark = None
        if mark is None:
            self.clear()
            return False
        del self.tokens[mark.tokens :]
        # States that are written into were given back: they must be copied again.
        self.mark()
        return True


def _begins(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether `tokens` are a proper beginning of `prompt`."""
    return len(tokens) < len(prompt) and list(prompt[: len(tokens)]) == list(tokens)


def _state(entry: Any) -> Any:
    if type(entry).__name__ in _APPENDED:
        return entry.offset
    # New handles of the same arrays: where one is written into, MLX copies it first.
    return tree_map(lambda value: mx.array(value) if isinstance(value, mx.array) else value,
                    _lists(entry.state))  # fmt: skip


def _lists(state: Any) -> Any:
    """Lists and tuples of their own, so that a state put back is not the one that is kept."""
    if isinstance(state, list | tuple):
        return type(state)(_lists(part) for part in state)
    return state


def _restore(entry: Any, state: Any) -> None:
    if type(entry).__name__ not in _APPENDED:
        entry.state = _lists(state)
        return
    if entry.keys is None or state == 0:  # broken off in the very first step
        entry.keys = entry.values = None
        entry.offset = 0
        return
    shapes = [value.shape for _, value in tree_flatten([entry.keys, entry.values])]
    if any(shape[2] != shapes[0][2] or shape[2] < state for shape in shapes):
        raise ValueError("keys and values of a step that was broken off in the middle")
    entry.offset = state
