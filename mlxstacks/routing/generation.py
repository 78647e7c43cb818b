"""From tokens of a prompt to pieces of an answer, on a cache that outlives the answer.

A prompt is read in pieces of PREFILL_TOKENS, then mlx-lm's `stream_generate` goes on, a token at a
time. Where recurrent layers have no kernel (anywhere but on Metal) mlx-lm reads a prompt by a loop
over tokens; pieces of at least CHUNKED_FROM tokens take the chunked recurrence of `ops.gated_delta`
instead, the same numbers to rounding. Rounding is all that a cached beginning changes too: a prompt
is then cut into other pieces.
"""

import math
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxstacks import base_model
from mlxstacks.data.chat import open_chat
from mlxstacks.data.encode import begin_mark
from mlxstacks.data.special_text import encode_text
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError
from mlxstacks.training.modes import evaluating

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


# --- answers --------------------------------------------------------------------------------------


# Between two pieces an answer can be broken off, and progress is told.
PREFILL_TOKENS = 512
# Below, setting up the chunks takes longer than the loop.
CHUNKED_FROM = 32
# Next to nothing: what is not the likeliest is never drawn. Float32 divides by it without overflow.
LEAST_TEMP = 1e-30
# Tokens that the repetition penalty looks back on, as in mlx-lm.
PENALTY_TOKENS = 20


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temp 0: the likeliest one. top_p: of the likeliest tokens that share
    so much probability; 1 for all. repetition_penalty: 1 for none. min_p: least probability, in
    shares of the likeliest token's. top_k: of so many likeliest tokens; 0 for all. schema: JSON
    text that the answer has to be an instance of; for `Schemas`, not for `generate`.
    """

    temp: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    repetition_penalty: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    top_k: int = 0
    schema: str | None = None


@dataclass(frozen=True)
class Prompt:
    """tokens: what the model reads. stable: how many of them the prompt of any later turn begins
    with (what a template puts behind the last message to begin the answer may change).
    """

    tokens: tuple[int, ...]
    stable: int


class Piece(NamedTuple):
    """What one token adds to the answer. finish: "stop", "length", or None before the end."""

    text: str
    finish: str | None


def encode_prompt(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    rendering: Rendering = PLAIN,
    limit: int | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> Prompt:
    """A conversation as the model's chat template writes it, up to where the answer begins.

    Without a template the texts go in as they are, a line break between them. limit: no more than
    so many tokens are made, the first ones. tools: as templates take them.
    Raises: InputError: the template refuses the messages, or nothing is left of them; a text with
    half a character (what is not UTF-8 becomes that on a command line).
    """
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError as error:
            character = message["content"][error.start]
            raise InputError(
                f"the prompt is no text: its character {error.start + 1} is {character!a}, half of "
                "one; give UTF-8"
            ) from None
    if not getattr(tokenizer, "has_chat_template", True):
        text = "\n".join(str(message["content"]) for message in messages)
        plain = encode_text(text, tokenizer, rendering.allow_special, limit)
        tokens = [*begin_mark(tokenizer), *plain][:limit]
        closed = tokens
    else:
        chat = open_chat(messages, tokenizer, rendering, tools)
        if tools and chat.text() == open_chat(messages, tokenizer, rendering).text():
            raise InputError("tools: the model's chat template has no place for them")
        tokens = chat.encode(chat.prompt(enable_thinking=rendering.enable_thinking), limit)
        closed = chat.encode(chat.text(enable_thinking=rendering.enable_thinking), limit)
    if not tokens:
        raise InputError("the prompt is empty: it has no tokens")
    pairs = enumerate(zip(tokens, closed, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(closed)))
    return Prompt(tuple(tokens), min(same, len(tokens) - 1))


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    cache: PromptCache,
    sampling: Sampling,
    *,
    key: Hashable = None,
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
    activate: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Generator[Piece, None, None]:
    """The answer, piece by piece; the cache holds prompt and answer afterwards.

    key: of the weights the model answers with (see `PromptCache`); processors: as mlx-lm takes them
    of logits, behind the repetition penalty; activate: makes it answer with
    them, called before every step, since others may have used it since. stop: asked before every
    step; True ends the answer. progress: (tokens of the prompt in the cache, tokens in all).
    An exception inside a step, Ctrl-C too, leaves the cache at its mark, or empty.
    """
    tokens, last = prompt.tokens, len(prompt.tokens) - 1
    try:
        # All of the prompt but its last token goes into the cache first.
        done = cache.reuse(tokens, key)
        if done == prompt.stable:
            cache.mark()
        while done < last:
            if stop():
                return
            progress(done, last)
            # A piece ends at the mark, for nothing can be taken back from a state behind it.
            end = prompt.stable if done < prompt.stable else last
            piece = tokens[done : min(done + PREFILL_TOKENS, end)]
            activate()
            _prefill(model, piece, cache.entries)
            cache.extend(piece)
            done += len(piece)
            if done == prompt.stable:
                cache.mark()
        progress(last, last)
        before = cache.tokens[-PENALTY_TOKENS:]
        steps = base_model.stream_tokens(
            model, tokenizer, tokens[last], cache.entries, sampling.max_tokens,
            sampler_of(sampling), [*_processors(sampling, before), *processors],
        )  # fmt: skip
        new = [tokens[last]]
        with closing(steps):
            while not stop():
                activate()
                step = next(steps, None)
                if step is None:
                    return
                text, token, finish = step
                cache.extend([*new, token])
                new = []
                yield Piece(text, finish)
    except GeneratorExit:  # between two steps, where everything is whole
        raise
    except BaseException:
        cache.rewind()
        raise


def _prefill(model: nn.Module, tokens: Sequence[int], entries: list[Any]) -> None:
    """Compute the states behind these tokens; logits are never made."""
    ids = mx.array([tokens])
    if len(tokens) < CHUNKED_FROM:
        model(ids, cache=entries)
    else:
        with evaluating(model), base_model.gated_delta_installed():
            model(ids, cache=entries)
    mx.eval([entry.state for entry in entries])
    mx.clear_cache()


def sampler_of(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """log probabilities (1, V) -> token (1,). Draws come from the seed alone, not from MLX's
    global state: two runs of a conversation are equal, whatever else the process draws.
    """
    if sampling.temp == 0:
        return lambda log_p: mx.argmax(log_p, axis=-1)
    key = mx.random.key(sampling.seed)

    def sample(log_p: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        log_p = log_p.astype(mx.float32)
        if sampling.top_p < 1:
            log_p = likeliest(log_p, sampling.top_p)
        if sampling.min_p > 0:
            least = mx.max(log_p, axis=-1, keepdims=True) + math.log(sampling.min_p)
            log_p = mx.where(log_p < least, -mx.inf, log_p)
        if 0 < sampling.top_k < log_p.shape[-1]:
            least = mx.topk(log_p, sampling.top_k, axis=-1).min(axis=-1, keepdims=True)
            log_p = mx.where(log_p < least, -mx.inf, log_p)
        # the likeliest stays 0 however small the temperature is
        below = log_p - mx.max(log_p, axis=-1, keepdims=True)
        return mx.random.categorical(below / max(sampling.temp, LEAST_TEMP), key=now)

    return sample


def likeliest(log_p: mx.array, top_p: float) -> mx.array:
    """log p (1, V) float32 with -inf outside the smallest set of likeliest tokens that has
    probability `top_p`; ties with its least likely one stay. Before the temperature, as in mlx-lm.
    """
    falling = -mx.sort(-log_p, axis=-1)
    above = mx.cumsum(mx.exp(falling), axis=-1, inclusive=False)
    kept = mx.sum(above < top_p, axis=-1, keepdims=True)  # at least one: nothing is above the first
    least = mx.take_along_axis(falling, kept - 1, axis=-1)
    return mx.where(log_p < least, -mx.inf, log_p)


def _processors(
    sampling: Sampling, before: Sequence[int]
) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """The repetition penalty, which sees the end of the prompt too."""
    if sampling.repetition_penalty == 1:
        return []
    penalise = base_model.repetition_penalty(sampling.repetition_penalty, PENALTY_TOKENS)
    seen = mx.array(list(before), mx.int32)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return penalise(mx.concatenate([seen, tokens.astype(mx.int32)]), logits)

    return [process]
