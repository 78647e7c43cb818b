"""A model in one mode that scores candidates and answers prompts: what `open_arms` gives.

Which domains answer an item in each mode of a store is decided on its prompt alone:

    base        none
    ungated     all at 1
    routed      those above the router's threshold, by their score (1 where hard)
    oracle      the item's own domain at 1; the base where it has none, or one without stacks
    random      random stacks of equal norm in the place of oracle's
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.selection import Selection, base
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.candidate_losses import Weights, choose_batch_tokens
from mlxstacks.routing.engine import begins_in_thought, context_tokens, split_thoughts
from mlxstacks.routing.generation import Prompt, PromptCache, Sampling, generate
from mlxstacks.routing.router import PromptRouter
from mlxstacks.studies.benchmarks.arm_prompts import PromptEncoder, Tokens
from mlxstacks.studies.benchmarks.scoring import Pair, PairScorer, find_cached_model, selection_of
from mlxstacks.studies.benchmarks.settings import ArmName, ArmSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied, Scored
from mlxstacks.studies.route.served import random_name
from mlxstacks.training.modes import evaluating


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
        self._gaps = 0
        self._without: dict[str, str] = {}  # prompt -> why the base answered it
        self._unserved: dict[str, str] = {}  # prompt -> its domain, which has no stacks

    def of(self, prompt: str, domain: str | None = None) -> Weights:
        """(domain, weight) of those that answer; none for the base. domain: the item's label.

        Raises: InputError: a prompt that has no tokens cannot be routed.
        """
        if self.mode == "ungated":
            return tuple((name, 1.0) for name in self._domains)
        if self.mode in ("oracle", "random"):
            return self._labelled(prompt, domain)
        if self.mode != "routed":
            return ()
        if not prompt.strip():
            self._without[prompt] = "without a prompt to route on"
            return ()
        if prompt not in self._routed:
            self._routed[prompt] = self._route(prompt)
        return self._routed[prompt]

    def _route(self, prompt: str) -> Weights:
        assert self._router is not None, "mode routed needs a router"
        # One prompt at a time: its scores then have the same bits whatever else is asked.
        scores = self._router.score(prompt)
        route = self._router.decide(scores, hard=self._hard, routable=self._domains)
        self._gaps += route.gap
        return tuple(route.weights.items())

    def _labelled(self, prompt: str, domain: str | None) -> Weights:
        if domain in self._domains:
            assert domain is not None
            return ((random_name(domain) if self.mode == "random" else domain, 1.0),)
        if domain is None:
            self._without[prompt] = "without a label"
        else:
            self._unserved[prompt] = domain
        return ()

    def notes(self) -> list[str]:
        """Prompts that the base answered in the place of stacks, by the reason."""
        counts = Counter(self._without.values())
        if self._unserved:
            domains = ", ".join(sorted(set(self._unserved.values())))
            counts[f"of domains without stacks ({domains})"] = len(self._unserved)
        return [
            f"{self.mode}: {count} prompts {why} were answered by the base."
            for why, count in counts.items()
        ]

    def details(self) -> dict[str, Any]:
        """Of mode routed: prompts that were routed, those of them that no domain fits."""
        if self.mode != "routed":
            return {}
        active = [len(weights) for weights in self._routed.values()]
        mean = sum(active) / len(active) if active else None
        return {"prompts_routed": len(active), "gaps": self._gaps, "mean_active_domains": mean}


# --- the arm --------------------------------------------------------------------------------------


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

    @property
    def limit(self) -> int | None:
        """Most tokens the model was made for."""
        return context_tokens(self.config, self.tokenizer)

    def select(self, selection: Selection) -> None:
        set_mode(self.model, selection, self.dtype)

    def scorer(self) -> PairScorer:
        """Of the model as it is now: a head is found anew after modules were replaced."""
        self.model.freeze()  # what trains is no head that could be left out
        text = self.config.get("text_config") or self.config
        width = text.get("hidden_size") or text.get("n_embd") or 1
        return PairScorer(
            self.model, self.select, find_output_head(self.model)[0], self.settings.batch_size,
            choose_batch_tokens(int(width)), find_cached_model(self.model),
        )  # fmt: skip


class ModelArm:
    """A model in one mode. An item is routed once, on its prompt, never on a candidate. After each
    call the model is in the mode base: no weights stay set.

    details: JSON; of fused the figures of its fuse. notes: they grow while items are asked.
    """

    def __init__(
        self,
        name: ArmName,
        loaded: Loaded,
        routes: Routes,
        notes: Sequence[str] = (),
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = name
        self.settings = loaded.settings
        self.tokenizer = loaded.tokenizer
        self.prompts = PromptEncoder(loaded.tokenizer, loaded.settings, loaded.limit)
        self._first_notes = [*loaded.notes, *notes, *self.prompts.notes()]
        self.notes: Sequence[str] = list(self._first_notes)
        self.details: dict[str, Any] = dict(details or {})
        self.limit = loaded.limit
        self._loaded: Loaded | None = loaded
        self._routes = routes
        self._scorer: PairScorer | None = loaded.scorer()

    def close(self) -> None:
        """Let go of the model; what is asked afterwards is an error."""
        self._loaded = self._scorer = None
        self._routes = Routes("base")  # a router holds the model too

    # --- candidates -------------------------------------------------------------------------------

    def score(self, items: Sequence[BenchItem], candidates: Candidates = "texts") -> list[Scored]:
        """Candidates (or letters) of each item; with `reference_offset` by the published defect.

        characters: of each candidate without its leading blank.
        Raises: InputError: an item without candidates, an empty prompt, a candidate that fills the
            model's context.
        """
        return self._score(items, candidates, self.settings.reference_offset)

    def score_as_reference(
        self, items: Sequence[BenchItem], candidates: Candidates = "texts"
    ) -> list[Scored]:
        """The same by the published defect, whatever the settings: the first token of a candidate
        is not scored, one of one token gets 0. tokens: those scored, 1 where there is none.
        """
        return self._score(items, candidates, True)

    def _score(
        self, items: Sequence[BenchItem], candidates: Candidates, as_reference: bool
    ) -> list[Scored]:
        texts = [_options(item, candidates) for item in items]
        pairs, cuts = [], []
        for item, options in zip(items, texts, strict=True):
            of_pairs, cut = self._pairs(item, options)
            pairs.append(of_pairs)
            cuts.append(cut)
        flat = [pair for of_item in pairs for pair in of_item]
        sums = iter(self._sums(flat, as_reference))
        scored = []
        for options, of_item, cut in zip(texts, pairs, cuts, strict=True):
            lengths = [len(pair.continuation) for pair in of_item]
            scored.append(
                Scored(
                    tuple(next(sums) for _ in of_item),
                    tuple(max(1, n - 1) if as_reference else n for n in lengths),
                    tuple(max(1, len(text.lstrip())) for text in options),
                    cut,
                    dict(of_item[0].weights),
                )
            )
        return scored

    def _pairs(self, item: BenchItem, options: Sequence[str]) -> tuple[list[Pair], bool]:
        """The item's pairs, and whether its context was cut."""
        whole = self.prompts.context(item.prompt)
        continuations = [self.prompts.candidate(text) for text in options]
        try:
            context = self.prompts.before_candidates(whole, continuations)
        except InputError as error:
            raise InputError(f"item {item.item_id}: {error}") from None
        weights = self._routes.of(item.prompt, item.domain)
        return [Pair(context, c, weights) for c in continuations], len(context) < len(whole)

    def score_tokens(
        self, pairs: Sequence[tuple[Tokens, Tokens]], prompts: Sequence[tuple[str, str | None]]
    ) -> list[float]:
        """Sums of (context, continuation) tokens; prompts: text to route by, and label, of each.

        Too long contexts are cut from the left.
        """
        return self._sums(self._given(pairs, prompts), self.settings.reference_offset)

    def are_greedy(
        self, pairs: Sequence[tuple[Tokens, Tokens]], prompts: Sequence[tuple[str, str | None]]
    ) -> list[bool]:
        """Whether greedy decoding would say each continuation."""
        loaded, scorer = self._open()
        given = self._given(pairs, prompts)
        try:
            with evaluating(loaded.model), base_model.gated_delta_installed():
                return scorer.are_greedy(given)
        finally:
            loaded.select(base())

    def _given(
        self, pairs: Sequence[tuple[Tokens, Tokens]], prompts: Sequence[tuple[str, str | None]]
    ) -> list[Pair]:
        texts = [self.prompts.signed.unsigned(text) for text, _ in prompts]
        return [
            Pair(self.prompts.before_candidates(c, [a]), a, self._routes.of(text, domain))
            for (c, a), (_, domain), text in zip(pairs, prompts, texts, strict=True)
        ]

    def _sums(self, pairs: Sequence[Pair], as_reference: bool) -> list[float]:
        loaded, scorer = self._open()
        try:
            with evaluating(loaded.model), base_model.gated_delta_installed():
                return (scorer.reference_sums if as_reference else scorer.sums)(pairs)
        finally:
            loaded.select(base())
            self._note()

    # --- answers ----------------------------------------------------------------------------------

    def reply(self, items: Sequence[BenchItem], max_tokens: int) -> list[Replied]:
        """The greedy answer to each prompt, without a model's thoughts.

        truncated: the prompt lost its beginning. Raises: InputError: an empty prompt; no room for
            an answer of max_tokens.
        """
        asked = [
            (self.prompts.question(item.prompt), self._routes.of(item.prompt, item.domain))
            for item in items
        ]
        replies = self._replies(asked, max_tokens)
        return [
            replace(reply, text=self._without_thoughts(prompt, reply.text))
            for (prompt, _), reply in zip(asked, replies, strict=True)
        ]

    def _without_thoughts(self, prompt: Prompt, text: str) -> str:
        inside = begins_in_thought(self.tokenizer, prompt.tokens[prompt.stable :])
        return split_thoughts(text, self.tokenizer, inside)[0]

    def reply_to_texts(
        self,
        texts: Sequence[str],
        max_tokens: int,
        until: Sequence[str] = (),
        domains: Sequence[str | None] | None = None,
    ) -> list[Replied]:
        """The same for texts that go in as they are, up to the first of the strings `until`."""
        labels = [None] * len(texts) if domains is None else domains
        asked = []
        for text, label in zip(texts, labels, strict=True):
            tokens = self.prompts.text(self.prompts.end_of(text))
            weights = self._routes.of(self.prompts.signed.unsigned(text), label)
            asked.append((Prompt(tokens, max(0, len(tokens) - 1)), weights))
        return self._replies(asked, max_tokens, until)

    def _replies(
        self, asked: Sequence[tuple[Prompt, Weights]], max_tokens: int, until: Sequence[str] = ()
    ) -> list[Replied]:
        loaded, _ = self._open()
        replies: dict[int, Replied] = {}
        try:
            # Those of one route after each other, so that stacks are packed once for all of them.
            for number in sorted(range(len(asked)), key=lambda n: (asked[n][1], n)):
                prompt, weights = asked[number]
                cut = self.prompts.before_answer(prompt, max_tokens)
                loaded.select(selection_of([weights]))
                text, tokens, finish = self._generate(loaded, cut, max_tokens, until)
                truncated = len(cut.tokens) < len(prompt.tokens)
                replies[number] = Replied(text, tokens, finish, truncated, dict(weights))
        finally:
            loaded.select(base())
            self._note()
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

    # ----------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Loaded, PairScorer]:
        if self._loaded is None or self._scorer is None:
            raise RuntimeError(f"arm {self.name} is closed: use it before the next is asked for")
        return self._loaded, self._scorer

    def _note(self) -> None:
        self.notes = [*self._first_notes, *self._routes.notes()]
        self.details |= self._routes.details()


def _options(item: BenchItem, candidates: Candidates) -> tuple[str, ...]:
    options = item.letters if candidates == "letters" else item.candidates
    if not options:
        what = "letters" if candidates == "letters" else "candidates"
        raise InputError(f"item {item.item_id} has no {what} to score")
    return options
