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
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model, memory
from mlxstacks.data.text_settings import Rendering, ThinkingMode
from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.store import Store, find_base
from mlxstacks.fuse.in_memory import attach_adapters
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.sharded import shard
from mlxstacks.processes import current_group, size_and_rank
from mlxstacks.routing.blocks import PlainLease, ResidentBlocks
from mlxstacks.routing.gaps import GapLog
from mlxstacks.routing.generation import (
    Piece,
    Prompt,
    PromptCache,
    Sampling,
    encode_prompt,
    generate,
)
from mlxstacks.routing.resident import Lease, Resident
from mlxstacks.routing.router import (
    PromptRouter,
    Route,
    load_prompt_router,
    pinned,
)
from mlxstacks.routing.schemas import Schemas
from mlxstacks.routing.settings import NO_GAP_LOG, AnswerSettings, BaseSettings
from mlxstacks.training.modes import prepare_base

# stop: the model ended it. length: max_tokens. context: the model's context is full. stopped: by
# whoever asked, in the middle.
Finish = Literal["stop", "length", "context", "stopped"]


@dataclass(frozen=True)
class Answer:
    """text: without thoughts; thoughts: None where there were none.

    weights: of the domains that answered. loaded, resident: domains read from disk for it, and
    those that were there.
    cached_tokens: of the prompt, that were not computed again. tokens: said, without the end mark.
    prompt_seconds: until the first token; seconds: from there to the last. adapters: names of those
    next to the base.
    """

    text: str
    thoughts: str | None
    finish: Finish
    route: Route
    weights: Mapping[str, float]
    loaded: tuple[str, ...]
    resident: tuple[str, ...]
    load_seconds: float
    bytes_read: int
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    prompt_seconds: float
    seconds: float
    adapters: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding, the first token left out; None for fewer than two."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else None

    @property
    def marks(self) -> tuple[str, ...]:
        """What a reader should know about it: a gap, where it was cut off."""
        strange = "unlike the domains' prompts" if self.route.weights else "no domain fits"
        gap = f"gap: {strange}" if self.route.gap else ""
        words = {
            "length": "cut off at max_tokens", "context": "cut off: the context is full",
            "stopped": "stopped", "stop": "",
        }  # fmt: skip
        return tuple(filter(None, [gap, words[self.finish]]))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def begins_in_thought(tokenizer: Any, opening: Sequence[int]) -> bool:
    """Whether the tokens that begin an answer leave the model inside its thoughts."""
    if not getattr(tokenizer, "has_thinking", False):
        return False
    tokens = list(opening)
    return bool(tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens))


def split_thoughts(text: str, tokenizer: Any, inside: bool) -> tuple[str, str | None]:
    """(answer, thoughts or None) of what a model said. inside: it began in its thoughts.

    Thoughts that were cut off have no end mark: then all is thought, and the answer is empty.
    """
    start = getattr(tokenizer, "think_start", None)
    end = getattr(tokenizer, "think_end", None)
    if not start or not end:
        return text, None
    if not inside:
        if not text.lstrip().startswith(start):
            return text, None
        text = text.lstrip().removeprefix(start)
    thoughts, _, answer = text.partition(end)
    return answer.lstrip("\n"), thoughts.strip("\n")


Mode = Literal["base", "ungated", "routed"]
Progress = Callable[[int, int], None]


@dataclass(eq=False, repr=False)
class RoutedModel:
    """A model, and, where there is a store, its stacks and its router.

    resident: the owner of what is loaded; None without a store. open_router: opens the router when
    it is first needed; None where there is none. context_tokens: most tokens of prompt and answer,
    None where the model does not say. allow_special: as in `Rendering`. notes: what is worth saying
    to the user; it grows. adapters: names of those next to the base, whatever the mode.
    mode, pins: how a conversation answers that names neither.
    It answers in the thread that made it: MLX's arrays and streams belong to their thread.
    """

    model: nn.Module
    tokenizer: Any
    _: KW_ONLY
    store: Store | None = None
    resident: Resident | ResidentBlocks | None = None
    open_router: Callable[[], PromptRouter] | None = None
    context_tokens: int | None = None
    hard: bool = False
    gap_log: GapLog | None = None
    allow_special: bool = False
    notes: list[str] = field(default_factory=list)
    adapters: tuple[str, ...] = ()
    mode: Mode = "base"
    pins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._thread = threading.current_thread()

    @property
    def alone(self) -> bool:
        """Whether the model has neither stacks nor adapters beside it."""
        return self.store is None and not self.adapters

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that can answer, in the order of the store."""
        return self.resident.domains if self.resident is not None else ()

    @cached_property
    def schemas(self) -> Schemas:
        """Raises: InputError: as `Schemas`."""
        return Schemas(self.tokenizer)

    @cached_property
    def router(self) -> PromptRouter:
        """Raises: InputError: there is none. StoreError: it does not fit the store."""
        if self.open_router is None:
            raise InputError("there is no store, so no router; give --store-path")
        return self.open_router()

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
            return Route("base")
        self._need_stacks()
        if mode == "ungated":
            return Route("ungated")
        (reading,) = self.router.read([text])
        route = self.router.decide(reading, hard=self.hard, routable=self.domains)
        if route.gap and self.gap_log is not None:
            try:
                self.gap_log.add(text, reading.scores, reading.feature, self.router.digest)
            except TargetError as error:  # the answer matters more than its note
                self.notes.append(f"The gap is not logged: {error}")
                self.gap_log = None
        return route

    def check_domains(self, names: Sequence[str]) -> None:
        """Raises: InputError naming domains that cannot answer, and the nearest that can."""
        self._need_stacks()
        for name in names:
            if name not in self.domains:
                close = difflib.get_close_matches(name, self.domains, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                hint = "; name each domain by itself" if "," in name else hint
                known = ", ".join(self.domains) or "none"
                record = self.store and self.store.manifest.domain_named(name)
                if record:
                    why = "no stack" if record.enabled else "been disabled"
                    raise InputError(f"domain {name} has {why}; those that answer: {known}")
                raise InputError(f"no domain {name[:100]!a} to answer{hint} (there are: {known})")

    def weights(self, route: Route) -> dict[str, float]:
        """Domain -> weight that a route asks for."""
        if route.mode == "ungated":
            return dict.fromkeys(self.domains, 1.0)
        return dict(route.weights)

    @contextmanager
    def lease(self, route: Route) -> Iterator[Lease | PlainLease]:
        """Hold the stacks of a route.

        Raises: InputError: they are too large for the budget. StoreError: one cannot be read; an
            answer without it would be another model's. RuntimeError: as `route`.
        """
        self.check_thread()
        if self.resident is None:
            yield PlainLease()
        else:
            with self.resident.lease(self.weights(route)) as lease:
                yield lease

    def prompt(self, messages: Sequence[dict[str, Any]], thinking: ThinkingMode = "auto") -> Prompt:
        """What the model reads of these messages.

        Raises: InputError: nothing, or more than the model's context holds next to an answer; the
            chat template refuses them; they are no text.
        """
        rendering = Rendering(thinking, self.allow_special)
        prompt = encode_prompt(self.tokenizer, messages, rendering, self.context_tokens)
        if self.room(prompt) < 1:
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
        return AnswerStream(self, prompt, route, sampling, cache, stop, progress)

    def room(self, prompt: Prompt) -> float:
        """Tokens of the context that the prompt leaves to an answer."""
        limit = math.inf if self.context_tokens is None else self.context_tokens
        return limit - len(prompt.tokens)

    def check_thread(self) -> None:
        """Raises: RuntimeError in another thread than the one that made the engine."""
        if threading.current_thread() is not self._thread:
            raise RuntimeError(
                f"thread {threading.current_thread().name}: this model answers in thread "
                f"{self._thread.name}, which loaded it. Ask there (a ThreadPoolExecutor(1) that "
                "loads and asks is one way), or load a model of its own in this thread"
            )

    def _need_stacks(self) -> None:
        if self.resident is None:
            raise InputError("there is no store, so no stacks; give --store-path")


@dataclass(eq=False, repr=False)
class AnswerStream:
    """Iterate over it once for pieces of text; `answer` is there when it ends, however it ends."""

    engine: RoutedModel
    prompt: Prompt
    route: Route
    sampling: Sampling
    cache: PromptCache
    stop: Callable[[], bool]
    progress: Progress
    answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        engine, room = self.engine, self.engine.room(self.prompt)
        sampling = replace(self.sampling, max_tokens=int(min(self.sampling.max_tokens, room)))
        masks = []
        if sampling.schema is not None:
            masks = [engine.schemas.mask(sampling.schema, self._inside)]
        cached: list[int] = []  # tokens in the cache, at each call; the first counts
        pieces: list[tuple[float, Piece]] = []  # each with the time it came at

        def read(done: int, total: int) -> None:
            cached.append(done)
            self.progress(done, total)

        with engine.lease(self.route) as lease:
            began = time.perf_counter()

            def activate() -> None:
                engine.check_thread()
                lease.activate()

            stream = generate(
                engine.model, engine.tokenizer, self.prompt, self.cache, sampling,
                key=tuple(sorted(lease.weights.items())), processors=masks, activate=activate,
                stop=self.stop, progress=read,
            )  # fmt: skip
            try:
                with closing(stream):
                    for piece in stream:
                        pieces.append((time.perf_counter(), piece))
                        if piece.text:
                            yield piece.text
                        if masks and masks[0].error:
                            raise InputError(f"the JSON schema: {masks[0].error}")
            finally:
                self.answer = self._answer(lease, began, pieces, cached[0] if cached else 0)

    @property
    def _inside(self) -> bool:
        return begins_in_thought(self.engine.tokenizer, self.prompt.tokens[self.prompt.stable :])

    def _answer(
        self,
        lease: Lease | PlainLease,
        began: float,
        pieces: Sequence[tuple[float, Piece]],
        cached_tokens: int,
    ) -> Answer:
        tokenizer, prompt = self.engine.tokenizer, self.prompt
        output = "".join(piece.text for _, piece in pieces)
        text, thoughts = split_thoughts(output, tokenizer, self._inside)
        finish: Any = (pieces[-1][1].finish if pieces else None) or "stopped"
        if finish == "length" and self.engine.room(prompt) < self.sampling.max_tokens:
            finish = "context"
        first, last = (pieces[place][0] if pieces else began for place in (0, -1))
        return Answer(
            text, thoughts, finish, self.route, dict(lease.weights),
            tuple(lease.loaded), tuple(lease.hits), lease.seconds, lease.bytes_read,
            len(prompt.tokens), cached_tokens,
            sum(piece.finish != "stop" for _, piece in pieces),
            first - began, last - first, self.engine.adapters,
        )  # fmt: skip


# Longer contexts are what tokenizers say that know none: transformers writes 1e30.
_MOST_CONTEXT = 2**31


@dataclass(frozen=True, eq=False)
class OpenBase:
    """A base as it answers. dtype: that it was widened to, and what stands beside it has to be
    widened to; None: as stored. context_tokens: as in `RoutedModel`.
    """

    checkpoint: Checkpoint
    model: nn.Module
    tokenizer: Any
    store: Store | None
    dtype: mx.Dtype | None
    context_tokens: int | None
    config: dict[str, Any]


def open_base(settings: BaseSettings, notes: list[str]) -> OpenBase:
    """The model of the settings, without stacks, and the store that it is the base of.

    Raises: as `open_routed`.
    """
    store = None
    if settings.store_path is not None:
        store = Store.open(settings.store_path, blocks=True)
    if store is not None:
        checkpoint = find_base(store, settings.model, notes)
    elif settings.model is not None:
        checkpoint = open_checkpoint(resolve_model(settings.model))
    else:
        raise InputError("give a model")
    model, tokenizer, config = base_model.load(checkpoint.directory, lazy=True)
    dtype = mx.float32 if prepare_base(model, settings.base, notes) else None
    model.eval()
    context = context_tokens(config, tokenizer)
    return OpenBase(checkpoint, model, tokenizer, store, dtype, context, config)


def default_budget() -> int | None:
    """A quarter of the memory, so that a store of any size can be served; None: not known."""
    device = memory.device()
    whole = device.working_set_bytes or device.memory_bytes
    return None if whole is None else whole // 4


def open_routed(settings: AnswerSettings) -> RoutedModel:
    """The model of the settings with its stacks; the router too, where they ask for it.

    Raises: InputError: model, store or router cannot be used, an unknown domain is pinned.
        StoreError: the store is of another base, or damaged.
    """
    if settings.wants_store and settings.store_path is None:
        raise InputError(
            "routed, ungated, pin and compare need stacks; give --store-path, a store that "
            "`mlxstacks stack` made for this model"
        )
    notes: list[str] = []
    group = current_group()
    base = open_base(settings, notes)
    checkpoint, store, dtype = base.checkpoint, base.store, base.dtype
    model, tokenizer = base.model, base.tokenizer
    if settings.adapter_path:
        adapters = FuseSettings(
            model=settings.model, adapter_path=settings.adapter_path,
            peft_layout=settings.peft_layout, allow_base=settings.allow_base,
        )  # fmt: skip
        notes += attach_adapters(model, checkpoint, adapters, dtype)
    resident: Resident | ResidentBlocks | None = None
    budget = settings.budget or default_budget()
    if store is not None and store.manifest.holds_blocks:
        if group is not None:
            raise InputError(f"{store.path}: capability blocks are not split over processes")
        resident = ResidentBlocks(model, store, base.config, budget)
    elif store is not None:
        resident = Resident(model, store, budget_bytes=budget, dtype=dtype)

    # Of several processes, which all route alike, the first one.
    logs_gaps = settings.gap_log != NO_GAP_LOG and size_and_rank(group)[1] == 0

    def open_router() -> PromptRouter:
        if store is None:
            raise InputError("there is no store, so no router; give --store-path")
        router = load_prompt_router(store, model, tokenizer, settings.router_path)
        notes.extend(router.notes)
        return router

    engine = RoutedModel(
        model, tokenizer, store=store, resident=resident, open_router=open_router,
        context_tokens=base.context_tokens, hard=settings.hard,
        allow_special=settings.allow_special, mode=settings.mode, pins=settings.pin, notes=notes,
        gap_log=GapLog(settings.gap_log) if logs_gaps else None,
        adapters=tuple(user_path(path).resolve().name for path in settings.adapter_path),
    )  # fmt: skip
    if group is not None:
        shard(model, group)
        mx.eval(model.parameters())
    if settings.pin:
        engine.check_domains(settings.pin)
    if settings.routed or settings.compare:
        _ = engine.router  # a router that does not fit is bad input now, not at the first prompt
    return engine


def context_tokens(config: dict[str, Any], tokenizer: Any) -> int | None:
    """Most tokens a model was made for: of its config, else of its tokenizer; None where neither
    says. A rope that is stretched in the config raises it to factor times the original.
    """
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        limit = _count(part.get("max_position_embeddings"))
        if limit is None:
            continue
        rope = part.get("rope_scaling") or part.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(original, int | float):
            limit = max(limit, int(factor * original))
        return limit
    return _count(getattr(tokenizer, "model_max_length", None))


def _count(value: Any) -> int | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if usable and 0 < value < _MOST_CONTEXT else None


def sampling_of(settings: AnswerSettings) -> Sampling:
    """How the settings choose tokens. Raises: InputError: the file of a schema cannot be read."""
    names = [part.name for part in fields(Sampling) if part.name != "schema"]
    schema = None
    if isinstance(settings.json_schema, dict):
        schema = json.dumps(settings.json_schema)
    elif settings.json_schema is not None:
        path = user_path(settings.json_schema)
        try:
            schema = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            is_schema = settings.json_schema.lstrip().startswith("{")
            instead = "this is a schema itself; write it to a file (in Python, give a dict)"
            why = instead if is_schema else error
            raise InputError(f"{path}: no JSON schema can be read: {why}") from None
    return Sampling(**{name: getattr(settings, name) for name in names}, schema=schema)
