"""A model with stacks that come and go: route, lease the stacks, stream the answer.

    prompt = engine.prompt([{"role": "user", "content": "Who rules Tolu?"}])
    stream = engine.stream(prompt, engine.route("Who rules Tolu?", "routed"), Sampling(), cache)
    for text in stream:
        print(text, end="")
    stream.answer                                       # weights, loads, tokens

A running answer holds a lease on its stacks, so nothing that others ask for takes them away, and it
makes the model answer with them before every step: several answers may run by turns, in one thread.
"""

import difflib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data.text_settings import Rendering, ThinkingMode
from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.store import Store
from mlxstacks.routing.answer import Answer, Finish, begins_in_thought, split_thoughts
from mlxstacks.routing.gaps import GapLog
from mlxstacks.routing.generation import Prompt, Sampling, encode_prompt, generate
from mlxstacks.routing.prompt_cache import PromptCache
from mlxstacks.routing.route import Route, base_route, pinned, ungated_route
from mlxstacks.routing.router import PromptRouter

if TYPE_CHECKING:
    from mlxstacks.routing.resident import Lease, Resident

Mode = Literal["base", "ungated", "routed"]
Progress = Callable[[int, int], None]


class RoutedModel:
    """A model, and, where there is a store, its stacks and its router.

    resident: the owner of what is loaded; None without a store. router: None where there is none;
    open_router: opens it when it is first needed. context_tokens: most tokens of prompt and answer,
    None where the model does not say. allow_special: as in `Rendering`. notes: what is worth saying
    to the user; it grows. adapters: names of those that are beside the base, whatever the mode.
    mode, pins: how a conversation answers that names neither.
    It answers in the thread that made it: MLX's arrays and streams belong to their thread.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        store: Store | None = None,
        resident: "Resident | None" = None,
        router: PromptRouter | None = None,
        open_router: Callable[[], PromptRouter] | None = None,
        context_tokens: int | None = None,
        hard: bool = False,
        gap_log: GapLog | None = None,
        allow_special: bool = False,
        notes: list[str] | None = None,
        adapters: Sequence[str] = (),
        mode: Mode = "base",
        pins: Sequence[str] = (),
    ) -> None:
        self._thread = threading.current_thread()
        self.mode, self.pins = mode, tuple(pins)
        self.model, self.tokenizer = model, tokenizer
        self.store, self.resident = store, resident
        self.context_tokens, self.hard, self.adapters = context_tokens, hard, tuple(adapters)
        self.allow_special = allow_special
        self.notes: list[str] = [] if notes is None else notes
        self._router, self._open_router, self._gap_log = router, open_router, gap_log

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that can answer, in the order of the store."""
        return self.resident.domains if self.resident is not None else ()

    @property
    def router(self) -> PromptRouter:
        """Raises: InputError: there is none. StoreError: it does not fit the store."""
        if self._router is None:
            if self._open_router is None:
                raise InputError("there is no store, so no router; give --store-path")
            self._router = self._open_router()
        return self._router

    def new_cache(self) -> PromptCache:
        """An empty cache for one conversation."""
        return PromptCache(lambda: base_model.make_prompt_cache(self.model))

    def route(self, text: str, mode: Mode, pins: Sequence[str] = ()) -> Route:
        """How a prompt is to be answered. pins: domains that go before the mode.

        A routed prompt that no domain fits is written to the gap log.
        Raises: InputError: an empty prompt, an unknown domain, no stacks, no router.
            RuntimeError: another thread than the one that made the engine.
        """
        self.check_thread()
        if pins:
            self.check_domains(pins)
            return pinned(pins)
        if mode == "base":
            return base_route()
        self._need_stacks()
        if mode == "ungated":
            return ungated_route()
        scores, feature = self.router.score_with_feature(text)
        route = self.router.decide(scores, hard=self.hard, routable=self.domains)
        if route.gap and self._gap_log is not None:
            try:
                self._gap_log.add(text, scores, feature)
            except TargetError as error:  # the answer matters more than its note
                self.notes.append(f"The gap is not logged: {error}")
                self._gap_log = None
        return route

    def check_domains(self, names: Sequence[str]) -> None:
        """Raises: InputError naming domains that cannot answer, and the nearest that can."""
        self._need_stacks()
        for name in names:
            if name not in self.domains:
                close = difflib.get_close_matches(name, self.domains, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                there = ", ".join(self.domains) or "none"
                raise InputError(f"no domain {name[:100]!a} to answer{hint} (there are: {there})")

    def weights(self, route: Route) -> dict[str, float]:
        """Domain -> weight that a route asks for."""
        if route.mode == "ungated":
            return dict.fromkeys(self.domains, 1.0)
        return dict(route.weights)

    @contextmanager
    def lease(self, route: Route) -> "Iterator[Lease | _NoStacks]":
        """Hold the stacks of a route.

        Raises: InputError: they are too large for the budget. StoreError: one cannot be read; an
            answer without it would be another model's. RuntimeError: as `route`.
        """
        self.check_thread()
        if self.resident is None:
            yield _NoStacks()
        else:
            with self.resident.lease(self.weights(route)) as lease:
                if lease.missing:
                    raise StoreError("\n".join(lease.missing.values()))
                yield lease

    def prompt(self, messages: Sequence[dict[str, Any]], thinking: ThinkingMode = "auto") -> Prompt:
        """What the model reads of these messages.

        Raises: InputError: nothing, or more than the model's context holds beside an answer; the
            chat template refuses them; they are no text.
        """
        rendering = Rendering(thinking, self.allow_special)
        prompt = encode_prompt(self.tokenizer, messages, rendering, self.context_tokens)
        if self._room(prompt) < 1:
            raise InputError(
                f"the prompt has at least {len(prompt.tokens):,} tokens with all that was said "
                f"before; the model's context is {self.context_tokens:,} and has to hold the "
                "answer too; shorten it, or begin a new conversation (/new in a chat)"
            )
        return prompt

    def stream(
        self,
        prompt: Prompt,
        route: Route,
        sampling: Sampling,
        cache: PromptCache,
        *,
        stop: Callable[[], bool] = lambda: False,
        progress: Progress = lambda done, total: None,
    ) -> "AnswerStream":
        """An answer, not begun; of no more tokens than the context has room for.

        stop: asked before every step; True ends the answer. progress: tokens of the prompt.
        """
        fitted = replace(sampling, max_tokens=int(min(sampling.max_tokens, self._room(prompt))))
        return AnswerStream(self, prompt, route, fitted, sampling.max_tokens, cache, stop, progress)

    def check_thread(self) -> None:
        """Raises: RuntimeError in another thread than the one that made the engine."""
        if threading.current_thread() is not self._thread:
            raise RuntimeError(
                f"thread {threading.current_thread().name}: this model answers in thread "
                f"{self._thread.name}, which loaded it; send questions there, or load it here too"
            )

    def _room(self, prompt: Prompt) -> float:
        """Tokens of the context that the prompt leaves to an answer."""
        limit = math.inf if self.context_tokens is None else self.context_tokens
        return limit - len(prompt.tokens)

    def _need_stacks(self) -> None:
        if self.resident is None:
            raise InputError("there is no store, so no stacks; give --store-path")


class AnswerStream:
    """Iterate over it once for pieces of text; `answer` is there when it ends, however it ends."""

    def __init__(
        self,
        engine: RoutedModel,
        prompt: Prompt,
        route: Route,
        sampling: Sampling,
        asked_tokens: int,
        cache: PromptCache,
        stop: Callable[[], bool],
        progress: Progress,
    ) -> None:
        self.prompt, self.route = prompt, route
        self.answer: Answer | None = None
        self._engine, self._cache = engine, cache
        self._sampling, self._asked_tokens = sampling, asked_tokens
        self._stop, self._progress = stop, progress

    def __iter__(self) -> Iterator[str]:
        engine = self._engine
        with engine.lease(self.route) as lease:
            said = _Said(time.perf_counter())

            def told(done: int, total: int) -> None:
                said.cached = done if said.cached is None else said.cached  # at the first call
                self._progress(done, total)

            def activate() -> None:
                engine.check_thread()
                lease.activate()

            pieces = generate(
                engine.model, engine.tokenizer, self.prompt, self._cache, self._sampling,
                key=tuple(sorted(lease.weights.items())), activate=activate,
                stop=self._stop, progress=told,
            )  # fmt: skip
            try:
                with closing(pieces):
                    for text, finish in pieces:
                        said.add(text, finish)
                        if text:
                            yield text
            finally:
                self.answer = self._ended(said, lease)

    def _ended(self, said: "_Said", lease: "Lease | _NoStacks") -> Answer:
        tokenizer = self._engine.tokenizer
        inside = begins_in_thought(tokenizer, self.prompt.tokens[self.prompt.stable :])
        text, thoughts = split_thoughts("".join(said.texts), tokenizer, inside)
        finish: Finish = said.finish or "stopped"
        if finish == "length" and self._sampling.max_tokens < self._asked_tokens:
            finish = "context"
        first, last = said.first or said.began, said.last or said.began
        return Answer(
            text, thoughts, finish, self.route, dict(lease.weights),
            tuple(lease.loaded), tuple(lease.hits), lease.seconds, lease.bytes_read,
            len(self.prompt.tokens), said.cached or 0, said.tokens, first - said.began,
            last - first, self._engine.adapters,
        )  # fmt: skip


@dataclass
class _Said:
    """What came so far. Times in seconds of `perf_counter`."""

    began: float
    cached: int | None = None
    texts: list[str] = field(default_factory=list)
    tokens: int = 0
    finish: Finish | None = None
    first: float | None = None
    last: float | None = None

    def add(self, text: str, finish: Any) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.texts.append(text)
        self.finish = finish
        self.tokens += finish != "stop"


@dataclass(frozen=True)
class _NoStacks:
    """The lease of a model without a store."""

    weights: Mapping[str, float] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    hits: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes_read: int = 0

    def activate(self) -> None:
        """Nothing to do: the model is its base."""
