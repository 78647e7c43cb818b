"""Prompts and candidates as tokens: special tokens at the start alone, long prompts cut from the
left, a chat template where it is asked for.
"""

from collections.abc import Sequence
from typing import Any

from mlxstacks.data import Rendering
from mlxstacks.data.special_text import SignedMarkers, encode_text, end_of
from mlxstacks.errors import InputError
from mlxstacks.routing.generation import Prompt, encode_prompt
from mlxstacks.studies.benchmarks.settings import ArmSettings

Tokens = tuple[int, ...]


class PromptEncoder:
    """What a model reads of an item.

    limit: most tokens the model was made for, None where it does not say. signed: tells the markers
    of a template from those in an item, where both come as one text.
    """

    def __init__(self, tokenizer: Any, settings: ArmSettings, limit: int | None) -> None:
        self.tokenizer, self._settings, self._limit = tokenizer, settings, limit
        self._has_template = bool(getattr(tokenizer, "has_chat_template", True))
        self.rendering = Rendering.of(settings)
        self.signed = SignedMarkers(tokenizer)
        self._begin = _begin_tokens(tokenizer)

    def notes(self) -> list[str]:
        """What a reader of the results should know of the prompts."""
        if self._settings.chat != "none" and not self._has_template:
            return ["The model has no chat template; prompts went in as they are."]
        return []

    def text(self, text: str) -> Tokens:
        """A text behind the tokenizer's special tokens of a beginning, none at its end."""
        return (*self._begin, *self.encode(text))

    def encode(self, text: str) -> list[int]:
        """A text without special tokens but signed ones (`signed`) and those that `allow_special`
        lets in.
        """
        if self._settings.allow_special:
            return encode_text(text, self.tokenizer, allow_special=True)
        return self.signed.encode(text)

    def end_of(self, prompt: str) -> str:
        """The prompt, or of a long one an end with one token more than can be kept of it: that one
        says that it was cut.
        """
        most = self._least(self._settings.max_context_tokens, self._limit)
        return prompt if most is None else end_of(prompt, self.encode, most + 1)

    def candidate(self, text: str) -> Tokens:
        """A continuation, tokenised by itself; behind a chat template without its leading blank:
        an assistant's turn does not begin with one. Raises: InputError: it has no tokens.
        """
        if self._settings.chat == "all" and self._has_template:
            text = text.lstrip(" ")
        tokens = tuple(self.encode(text))
        if not tokens:
            raise InputError(f"candidate {text[:40]!r} has no tokens; a candidate is some text")
        return tokens

    def context(self, prompt: str) -> Tokens:
        """The tokens that candidates follow. Raises: InputError: there are none."""
        prompt = self.end_of(prompt)
        if self._settings.chat == "all":
            tokens = self._chat(prompt, self.rendering.before_answer()).tokens
        else:
            tokens = self.text(prompt)
        if not tokens:
            raise InputError("an item has an empty prompt; there is nothing a candidate follows")
        return tokens

    def question(self, prompt: str) -> Prompt:
        """The tokens of a prompt that is answered in text. Raises: InputError: there are none."""
        prompt = self.end_of(prompt)
        if self._settings.chat != "none":
            return self._chat(prompt, self.rendering)
        tokens = self.text(prompt)
        if not tokens:
            raise InputError("an item has an empty prompt; there is nothing to answer")
        return Prompt(tokens, len(tokens) - 1)

    def _chat(self, prompt: str, rendering: Rendering) -> Prompt:
        if not self._has_template:
            tokens = self.text("\n".join(filter(None, (self._settings.system_prompt, prompt))))
            return Prompt(tokens, max(0, len(tokens) - 1))
        messages = [{"role": "user", "content": prompt}]
        if self._settings.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._settings.system_prompt})
        return encode_prompt(self.tokenizer, messages, rendering)

    def before_candidates(self, context: Tokens, candidates: Sequence[Tokens]) -> Tokens:
        """The context, cut from the left so that the longest candidate fits behind it: one cut for
        all candidates of an item. Raises: InputError: no token of it would be left.
        """
        most = self._least(self._settings.max_context_tokens, self._limit)
        longest = max(map(len, candidates))
        return context if most is None else self._cut(context, most - longest, f"{longest} tokens")

    def before_answer(self, prompt: Prompt, max_tokens: int) -> Prompt:
        """The prompt, cut from the left so that an answer fits. Raises: as above."""
        room = None if self._limit is None else self._limit - max_tokens
        most = self._least(self._settings.max_context_tokens, room)
        if most is None or len(prompt.tokens) <= most:
            return prompt
        tokens = self._cut(prompt.tokens, most, f"an answer of {max_tokens} tokens")
        gone = len(prompt.tokens) - len(tokens)
        return Prompt(tokens, max(0, prompt.stable - gone))

    def _cut(self, tokens: Tokens, room: int, what: str) -> Tokens:
        if room < 1:
            raise InputError(
                f"{what} leave no room for a prompt: the model's context is "
                f"{self._limit or 'not known'}, max_context_tokens "
                f"{self._settings.max_context_tokens or 'not set'}"
            )
        return tokens[-room:]

    @staticmethod
    def _least(*limits: int | None) -> int | None:
        return min((limit for limit in limits if limit is not None), default=None)


def _begin_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text of its own accord."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = list(tokenizer.encode("a"))
    places = range(len(whole) - len(plain) + 1)
    return next((whole[:n] for n in places if whole[n : n + len(plain)] == list(plain)), [])
