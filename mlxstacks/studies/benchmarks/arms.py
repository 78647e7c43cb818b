"""The modes that benchmarks compare: a model in one of them scores candidates and answers prompts.

    for arm in open_arms(("base", "routed", "fused"), settings):
        scored = arm.score(items)

base, ungated, routed, oracle and random are one model with every stack of the store in it: a mode
is a selection among them. adapter and fused are another one: the LoRA beside the packed weights is
taken off again, then fused in memory.

What it reads are tokens: special tokens at the start alone, long prompts cut from the left, a chat
template where it is asked for. Which domains answer an item in each mode of a store is decided on
its prompt alone:

    base        none
    ungated     all at 1
    routed      those above the router's threshold, by their score (1 where hard)
    oracle      the item's own domain at 1; the base where it has none, or one without stacks
    random      random stacks of equal norm in the place of oracle's
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxstacks import base_model
from mlxstacks.arms.scoring import (
    Pair,
    PairScorer,
    Tokens,
    pair_scorer,
    selection_of,
)
from mlxstacks.data import Rendering
from mlxstacks.data.special_text import SignedMarkers, encode_text, end_of
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.store import Store, find_base
from mlxstacks.fuse.in_memory import attach_adapters, fuse_in_memory
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.selection import Selection, base
from mlxstacks.layers.stacked import set_mode
from mlxstacks.processes import dealing, gathered
from mlxstacks.routing.candidate_losses import Weights
from mlxstacks.routing.engine import begins_in_thought, context_tokens, split_thoughts
from mlxstacks.routing.generation import Prompt, PromptCache, Sampling, encode_prompt, generate
from mlxstacks.routing.router import PromptRouter, load_prompt_router
from mlxstacks.studies.benchmarks.settings import (
    ADAPTER_ARMS,
    ARMS,
    NEED_LABELS,
    STORE_ARMS,
    ArmName,
    ArmSettings,
)
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied, Scored
from mlxstacks.studies.route.data import stack_hashes
from mlxstacks.studies.route.served import open_served, random_name, with_controls
from mlxstacks.study.document import counted
from mlxstacks.training.modes import evaluating, prepare_base


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
        # What the tokenizer puts before a text of its own accord.
        plain = list(tokenizer.encode("a", add_special_tokens=False))
        whole = list(tokenizer.encode("a"))
        starts = range(len(whole) - len(plain) + 1)
        start = next((n for n in starts if whole[n : n + len(plain)] == plain), 0)
        self._begin = whole[:start]

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
        most = self._most()
        return prompt if most is None else end_of(prompt, self.encode, most + 1)

    def context_and_candidates(
        self, prompt: str, texts: Sequence[str]
    ) -> tuple[Tokens, list[Tokens]]:
        """A prompt, and the continuations that are scored behind it.

        As lm-evaluation-harness does it: blanks at the prompt's end go to the continuations, and a
        continuation has the tokens that prompt and continuation together have more than the prompt.
        Behind a chat template each is tokenised by itself, without its leading blank: an
        assistant's turn does not begin with one.

        Raises: InputError: the prompt is empty, or a continuation has no tokens.
        """
        chat = self._settings.chat == "all"
        if chat and self._has_template:
            context = self._prompt(prompt, self.rendering.before_answer()).tokens
            continuations = [tuple(self.encode(text.lstrip(" "))) for text in texts]
        else:
            prompt = self.end_of(prompt)
            before = prompt.rstrip() or prompt
            context = self._prompt(before, None).tokens
            blanks = prompt[len(before) :]
            whole = [self.text(f"{before}{blanks}{text}") for text in texts]
            # Joined, the two may have no more tokens than the prompt alone.
            continuations = [
                tokens[len(context) :] or tuple(self.encode(blanks + text))
                for tokens, text in zip(whole, texts, strict=True)
            ]
        for text, tokens in zip(texts, continuations, strict=True):
            if not tokens:
                raise InputError(f"candidate {text[:40]!r} has no tokens; a candidate is some text")
        return context, continuations

    def question(self, prompt: str) -> Prompt:
        """The tokens of a prompt that is answered in text. Raises: InputError: there are none."""
        return self._prompt(prompt, self.rendering if self._settings.chat != "none" else None)

    def _prompt(self, prompt: str, rendering: Rendering | None) -> Prompt:
        """rendering: of the chat template, where there is one; None: the prompt as it is."""
        prompt, system = self.end_of(prompt), self._settings.system_prompt
        if rendering is not None and self._has_template:
            messages = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            return encode_prompt(self.tokenizer, messages, rendering)
        before = system if rendering is not None else None
        tokens = self.text("\n".join(filter(None, (before, prompt))))
        if not tokens:
            raise InputError("an item has an empty prompt; there is nothing to answer")
        return Prompt(tokens, len(tokens) - 1)

    def before_candidates(self, context: Tokens, candidates: Sequence[Tokens]) -> Tokens:
        """The context, cut from the left so that the longest candidate fits behind it: one cut for
        all candidates of an item. Raises: InputError: no token of it would be left.
        """
        most, longest = self._most(), max(map(len, candidates))
        return context if most is None else self._cut(context, most - longest, f"{longest} tokens")

    def before_answer(self, prompt: Prompt, max_tokens: int) -> Prompt:
        """The prompt, cut from the left so that an answer fits. Raises: as above."""
        most = self._most(max_tokens)
        if most is None or len(prompt.tokens) <= most:
            return prompt
        tokens = self._cut(prompt.tokens, most, f"an answer of {max_tokens} tokens")
        gone = len(prompt.tokens) - len(tokens)
        return Prompt(tokens, max(0, prompt.stable - gone))

    def _most(self, answer_tokens: int = 0) -> int | None:
        """Most tokens of a prompt, so that an answer fits into what the model was made for."""
        room = None if self._limit is None else self._limit - answer_tokens
        limits = [n for n in (self._settings.max_context_tokens, room) if n is not None]
        return min(limits, default=None)

    def _cut(self, tokens: Tokens, room: int, what: str) -> Tokens:
        if room < 1:
            raise InputError(
                f"{what} leave no room for a prompt: the model's context is "
                f"{self._limit or 'not known'}, max_context_tokens "
                f"{self._settings.max_context_tokens or 'not set'}"
            )
        return tokens[-room:]


class Routes:
    """Weights of prompts in one mode. domains: that can answer. router: of the mode routed.

    A prompt is routed once, and what was decided is kept, whatever asks for it again.
    """

    def __init__(
        self,
        mode: ArmName,
        domains: Sequence[str] = (),
        router: PromptRouter | None = None,
        hard: bool = False,
    ) -> None:
        self.mode, self._domains, self._router, self._hard = mode, tuple(domains), router, hard
        self._routed: dict[str, Weights] = {}
        self._gaps: dict[str, bool] = {}
        self._without: dict[str, str] = {}  # prompt -> why the base answered it
        self._unserved: dict[str, str] = {}  # prompt -> its domain, which has no stacks

    def of(self, prompt: str, domain: str | None = None) -> Weights:
        """(domain, weight) of those that answer; none for the base. domain: the item's label.

        Raises: InputError: a prompt that has no tokens cannot be routed.
        """
        if self.mode == "ungated":
            return tuple((name, 1.0) for name in self._domains)
        if self.mode in NEED_LABELS:
            if domain is None:
                self._without[prompt] = "without a label"
                return ()
            if domain not in self._domains:
                self._unserved[prompt] = domain
                return ()
            return ((random_name(domain) if self.mode == "random" else domain, 1.0),)
        if self.mode != "routed":
            return ()
        if not prompt.strip():
            self._without[prompt] = "without a prompt to route on"
            return ()
        if prompt not in self._routed:
            assert self._router is not None, "mode routed needs a router"
            # One prompt at a time: its scores then have the same bits whatever else is asked.
            (route,) = self._router.routes([prompt], hard=self._hard, routable=self._domains)
            self._gaps[prompt] = route.gap
            self._routed[prompt] = tuple(route.weights.items())
        return self._routed[prompt]

    def notes(self) -> list[str]:
        """Prompts that the base answered in the place of stacks, by the reason."""
        counts = Counter(self._without.values())
        if self._unserved:
            domains = ", ".join(sorted(set(self._unserved.values())))
            counts[f"of domains without stacks ({domains})"] = len(self._unserved)
        return [
            f"{self.mode}: answered by the base: {counted(count, 'prompt')} {why}."
            for why, count in counts.items()
        ]

    def details(self) -> dict[str, Any]:
        """Of mode routed: prompts that were routed, those of them that no domain fits."""
        if self.mode != "routed":
            return {}
        active = [len(weights) for weights in self._routed.values()]
        mean = sum(active) / len(active) if active else None
        gaps = sum(self._gaps.values())
        return {"prompts_routed": len(active), "gaps": gaps, "mean_active_domains": mean}

    def gather(self) -> None:
        """Take in what other processes of the group have routed."""
        own = self._routed, self._gaps, self._without, self._unserved
        for routed, gaps, without, unserved in gathered(own, dealing()):
            for prompt, weights in routed.items():  # JSON has no tuples
                self._routed[prompt] = tuple((domain, weight) for domain, weight in weights)
            self._gaps |= gaps
            self._without |= without
            self._unserved |= unserved


Candidates = Literal["texts", "letters"]


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model that several arms share. dtype: that stacks compute in, as in `set_mode`."""

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    settings: ArmSettings
    dtype: mx.Dtype | None = None
    notes: list[str] = field(default_factory=list)

    def select(self, selection: Selection) -> None:
        set_mode(self.model, selection, self.dtype)

    def scorer(self) -> PairScorer:
        return pair_scorer(self.model, self.config, self.settings.batch_size, self.select)


class ModelArm:
    """A model in one mode. An item is routed once, on its prompt, never on a candidate. After each
    call the model is in the mode base: no weights stay set.

    limit: most tokens the model was made for. details: JSON; of fused the figures of its fuse.
    notes: they grow while items are asked.
    """

    def __init__(
        self,
        name: ArmName,
        loaded: Loaded,
        routes: Routes,
        notes: Sequence[str] = (),
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: ArmName = name
        self.settings, self.tokenizer = loaded.settings, loaded.tokenizer
        self.limit = context_tokens(loaded.config, loaded.tokenizer)
        self.prompts = PromptEncoder(loaded.tokenizer, loaded.settings, self.limit)
        self._first_notes = [*loaded.notes, *notes, *self.prompts.notes()]
        self.notes: Sequence[str] = list(self._first_notes)
        self.details: dict[str, Any] = dict(details or {})
        self._loaded: Loaded | None = loaded
        self._routes = routes
        self._scorer: PairScorer | None = loaded.scorer()

    def close(self) -> None:
        """Let go of the model; what is asked afterwards is an error."""
        self._loaded = self._scorer = None
        self._routes = Routes("base")  # a router holds the model too

    def gather(self) -> None:
        """Count the prompts of other processes of the group too."""
        self._routes.gather()
        self._tell()

    def _tell(self) -> None:
        self.notes = [*self._first_notes, *self._routes.notes()]
        self.details |= self._routes.details()

    @contextmanager
    def _in_use(self) -> Iterator[tuple[Loaded, PairScorer]]:
        if self._loaded is None or self._scorer is None:
            raise RuntimeError(f"arm {self.name} is closed: use it before the next is asked for")
        try:
            yield self._loaded, self._scorer
        finally:
            self._loaded.select(base())
            self._tell()

    def score(
        self,
        items: Sequence[BenchItem],
        candidates: Candidates = "texts",
        as_reference: bool = False,
    ) -> list[Scored]:
        """Candidates (or letters) of each item.

        as_reference: by the published defect: the first token of a candidate is not scored, one of
        one token gets 0; tokens: those scored, 1 where there is none. characters: of each candidate
        without its leading blank.
        Raises: InputError: an item without candidates, an empty prompt, a candidate that fills the
            model's context.
        """
        asked = [self._pairs(item, candidates) for item in items]
        flat = [pair for pairs, _ in asked for pair in pairs]
        with self._scoring() as scorer:
            sums = iter((scorer.reference_sums if as_reference else scorer.sums)(flat))
        scored = []
        for item, (pairs, cut) in zip(items, asked, strict=True):
            lengths = [len(pair.continuation) for pair in pairs]
            scored.append(
                Scored(
                    tuple(next(sums) for _ in pairs),
                    tuple(max(1, n - 1) if as_reference else n for n in lengths),
                    tuple(max(1, len(text.lstrip())) for text in _options(item, candidates)),
                    cut,
                    dict(pairs[0].weights),
                )
            )
        return scored

    def _pairs(self, item: BenchItem, candidates: Candidates) -> tuple[list[Pair], bool]:
        """The item's pairs, and whether its context was cut."""
        whole, continuations = self.prompts.context_and_candidates(
            item.prompt, _options(item, candidates)
        )
        try:
            context = self.prompts.before_candidates(whole, continuations)
        except InputError as error:
            raise InputError(f"item {item.item_id}: {error}") from None
        weights = self._routes.of(item.prompt, item.domain)
        return [Pair(context, c, weights) for c in continuations], len(context) < len(whole)

    @contextmanager
    def _scoring(self) -> Iterator[PairScorer]:
        with (
            self._in_use() as (loaded, scorer),
            evaluating(loaded.model),
            base_model.gated_delta_installed(),
        ):
            yield scorer

    def score_tokens(
        self,
        pairs: Sequence[tuple[Tokens, Tokens]],
        prompts: Sequence[tuple[str, str | None]],
        with_greedy: bool = False,
    ) -> tuple[list[float], list[bool]]:
        """(sums of (context, continuation) tokens, whether greedy decoding would say each
        continuation: False where that is not asked). prompts: text to route by, and label, of each.

        Too long contexts are cut from the left.
        """
        rows = [
            Pair(
                self.prompts.before_candidates(context, [continuation]),
                continuation,
                self._routes.of(self.prompts.signed.unsigned(text), domain),
            )
            for (context, continuation), (text, domain) in zip(pairs, prompts, strict=True)
        ]
        with self._scoring() as scorer:
            greedy = scorer.are_greedy(rows) if with_greedy else [False] * len(rows)
            return scorer.sums(rows), greedy

    def reply(self, items: Sequence[BenchItem], max_tokens: int) -> list[Replied]:
        """The greedy answer to each prompt, without a model's thoughts.

        truncated: the prompt lost its beginning. Raises: InputError: an empty prompt; no room for
            an answer of max_tokens.
        """
        asked = [
            (self.prompts.question(item.prompt), self._routes.of(item.prompt, item.domain))
            for item in items
        ]
        replies = []
        for (prompt, _), reply in zip(asked, self._replies(asked, max_tokens), strict=True):
            inside = begins_in_thought(self.tokenizer, prompt.tokens[prompt.stable :])
            text, *_ = split_thoughts(reply.text, self.tokenizer, inside)
            replies.append(replace(reply, text=text))
        return replies

    def reply_to_texts(
        self,
        texts: Sequence[str],
        max_tokens: int,
        until: Sequence[str] = (),
        domains: Sequence[str | None] | None = None,
    ) -> list[Replied]:
        """The same for texts that go in as they are, up to the first of the strings `until`."""
        asked = []
        for text, label in zip(texts, domains or [None] * len(texts), strict=True):
            tokens = self.prompts.text(self.prompts.end_of(text))
            weights = self._routes.of(self.prompts.signed.unsigned(text), label)
            asked.append((Prompt(tokens, max(0, len(tokens) - 1)), weights))
        return self._replies(asked, max_tokens, until)

    def _replies(
        self, asked: Sequence[tuple[Prompt, Weights]], max_tokens: int, until: Sequence[str] = ()
    ) -> list[Replied]:
        replies: dict[int, Replied] = {}
        with self._in_use() as (loaded, _):
            # Those of one route after each other, so that stacks are packed once for all of them.
            for number in sorted(range(len(asked)), key=lambda n: (asked[n][1], n)):
                prompt, weights = asked[number]
                cut = self.prompts.before_answer(prompt, max_tokens)
                loaded.select(selection_of([weights]))
                text, tokens, finish = self._generate(loaded, cut, max_tokens, until)
                truncated = len(cut.tokens) < len(prompt.tokens)
                replies[number] = Replied(text, tokens, finish, truncated, dict(weights))
        return [replies[number] for number in range(len(asked))]

    def _generate(
        self, loaded: Loaded, prompt: Prompt, max_tokens: int, until: Sequence[str]
    ) -> tuple[str, int, str]:
        """(text, tokens without the end mark, "stop" or "length")."""
        pieces = generate(
            loaded.model, loaded.tokenizer, prompt,
            PromptCache(lambda: base_model.make_prompt_cache(loaded.model)),
            Sampling(
                max_tokens=max_tokens, repetition_penalty=self.settings.repetition_penalty
            ),
        )  # fmt: skip
        text, tokens, finish = "", 0, "length"
        with closing(pieces):
            for piece in pieces:
                text += piece.text
                tokens += piece.finish != "stop"
                finish = piece.finish or finish
                places = [place for mark in until if (place := text.find(mark)) >= 0]
                if places:
                    return text[: min(places)], tokens, "stop"
        return text, tokens, finish


def _options(item: BenchItem, candidates: Candidates) -> tuple[str, ...]:
    options = item.letters if candidates == "letters" else item.candidates
    if not options:
        what = "letters" if candidates == "letters" else "candidates"
        raise InputError(f"item {item.item_id} has no {what} to score")
    return options


# --- opened one after the other -------------------------------------------------------------------


def choose_arms(settings: ArmSettings, names: Sequence[ArmName], labelled: bool) -> list[ArmName]:
    """The arms asked for (names), else all that these settings have what they need for, in the
    order of ARMS.

    labelled: whether items name a domain, which oracle and random need. Loads nothing; whether the
    store has a router is seen when it is opened.
    Raises: InputError for an arm that lacks its adapter or store.
    """
    lacking = dict.fromkeys(() if settings.adapter_path else ADAPTER_ARMS, "an adapter_path")
    lacking |= dict.fromkeys(() if settings.store_path else STORE_ARMS, "a store_path of stacks")
    for name in names:
        if name in lacking:
            raise InputError(f"arm {name} needs {lacking[name]}")
    if settings.model is None and settings.store_path is None:
        raise InputError("give a model, or a store, whose base is taken")
    if names:
        return [name for name in ARMS if name in names]
    return [n for n in ARMS if n not in lacking and (labelled or n not in NEED_LABELS)]


def open_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    """The arms, each ready to be asked, one after the other.

    In this order, whatever that of `names`: base, ungated, routed, oracle, random (one model),
    adapter, fused (another one). An arm is closed when the next one is asked for, and a model is
    let go before the next one is loaded.

    Raises: InputError: whatever of model, adapter, store or router cannot be used. StoreError: the
        store is of another base, or damaged.
    """
    for group, opened in ((("base", *STORE_ARMS), _store_arms), (ADAPTER_ARMS, _adapter_arms)):
        if of_group := [name for name in ARMS if name in group and name in names]:
            yield from opened(of_group, settings)
            mx.clear_cache()


def _store_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    if settings.store_path is None or names == ["base"]:
        loaded = _load(base_of(settings), settings)
        with closing(ModelArm("base", loaded, Routes("base"))) as arm:
            yield arm
        return
    store = Store.open(settings.store_path)
    served = open_served(store, settings.model, settings.base)
    set_mode(served.model, base(), served.dtype)
    config = dict(base_of(settings).config)
    loaded = Loaded(served.model, served.tokenizer, config, settings, served.dtype, served.notes)
    router = None
    if "routed" in names:
        router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
        served.notes.extend(router.notes)
    if "random" in names:
        with_controls(served, stack_hashes(store, served.domains), settings.seed)
        set_mode(served.model, base(), served.dtype)
    for name in names:
        routes = Routes(name, served.domains, router, settings.hard)
        with closing(ModelArm(name, loaded, routes)) as arm:
            yield arm


def base_of(settings: ArmSettings) -> Checkpoint:
    """Of the model named, else of the store's base. Raises: InputError: it is not here."""
    if settings.model is not None:
        return open_checkpoint(resolve_model(settings.model))
    assert settings.store_path is not None
    return find_base(Store.open(settings.store_path), None)


def _load(checkpoint: Checkpoint, settings: ArmSettings) -> Loaded:
    model, tokenizer, config = base_model.load(checkpoint.directory, lazy=True)
    notes: list[str] = []
    in_float32 = prepare_base(model, settings.base, notes)
    model.eval()
    dtype = mx.float32 if in_float32 else None
    return Loaded(model, tokenizer, config, settings, dtype, notes)


def _adapter_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    assert settings.adapter_path is not None
    checkpoint = base_of(settings)
    model = str(checkpoint.directory)
    fuse = FuseSettings(
        model=model, adapter_path=(settings.adapter_path,),
        requant=settings.requant, seed=settings.seed,
    )  # fmt: skip
    loaded = _load(checkpoint, settings)
    if "adapter" in names:
        attach_adapters(loaded.model, checkpoint, fuse, loaded.dtype)
        with closing(ModelArm("adapter", loaded, Routes("adapter"))) as arm:
            yield arm
        _take_off(loaded.model)
    if "fused" in names:
        fused = fuse_in_memory(loaded.model, fuse)
        notes = [f"fused ({settings.requant}): {fused.verdict}", *fused.notes]
        details = {"requant": settings.requant, "fuse": fused.as_json()}
        with closing(ModelArm("fused", loaded, Routes("fused"), notes, details)) as arm:
            yield arm


def _take_off(model: nn.Module) -> None:
    """Put the projections that mlx-lm's LoRA layers wrap back in their places."""
    inner = [
        (path, module[name])
        for path, module in model.named_modules()
        if "lora_a" in module
        for name in ("linear", "embedding")
        if name in module
    ]
    model.update_modules(tree_unflatten(inner))
