"""`mlxstacks route discover`: by the loss of their answers, which stacks prompts should go to.

All losses are kept in `.NAME.work` next to the target as they are made. Killed at any moment, the
same command resumes there, and ends with the same examples, outcomes and losses. Losses of an
earlier discovery in the target are used too, so after a change of threshold, or with a domain more
in the store, only what is new is measured.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks import base_model, memory
from mlxstacks.command_line import command_line
from mlxstacks.data import Rendering, Row
from mlxstacks.data.settings import Template
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import write_json
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.strict_json import read_object
from mlxstacks.routing.candidate_losses import LossCache
from mlxstacks.routing.outcome_files import (
    EXAMPLES,
    LOSSES,
    OUTCOMES,
    Outcome,
    RouterExample,
    config_text,
    read_discovered_outcomes,
    write_lines,
)
from mlxstacks.routing.outcomes import Found, Rules, blended, targets_of
from mlxstacks.routing.random_stack import random_name
from mlxstacks.routing.settings import MOST_EXHAUSTIVE, OutcomeSettings
from mlxstacks.studies.route.data import (
    encode_pair,
    read_examples,
    routed_domains,
    stack_hashes,
    template_of,
)
from mlxstacks.studies.route.discover_tables import (
    FLOOR,
    WITH_BEST,
    blocks,
    control_table,
    count_table,
    counts_of,
    greedy_gap,
    oracle_table,
    verdict,
)
from mlxstacks.studies.route.served import RowLosses, Served, open_served
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.result import Result

ABOUT = {
    "kind": "route discover",
    "title": "Discovery of outcomes",
    "question": "Which stacks lower the loss of which prompts, measured instead of assumed?",
}
# What the search took, of this run; not kept in the target by itself.
FIGURES = "figures.json"
Progress = Callable[..., None]


def run(
    settings: OutcomeSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Search, and write examples, outcomes, losses and result to `settings.save_path`.

    Raises: InputError: no store, model, data or target; a setting that does not fit the store.
        StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError(
            "route discover needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("route discover needs save_path")
    return run_study(_Discovery(settings, progress, dry_run), dry_run=dry_run)


@dataclass(frozen=True, eq=False)
class Samples:
    """Examples whose outcome is searched, each with its tokens. dropped: without answer tokens."""

    examples: list[RouterExample]
    rows: list[Row]
    dropped: int


class _Discovery(Study):
    artifacts = provenance = (EXAMPLES, OUTCOMES, LOSSES)
    settings: OutcomeSettings
    served: Served

    def __init__(self, settings: OutcomeSettings, progress: Progress | None, dry_run: bool) -> None:
        self.settings, self.progress, self.dry_run = settings, progress, dry_run
        self.inputs, self.done = (settings.store_path,), 0

    def planned(self) -> Result:
        settings, store = self.settings, Store.open(str(self.settings.store_path))
        notes: list[str] = []
        self.rules = rules_of(settings, routed_domains(store), notes)
        template = template_of(settings, store)
        if self.dry_run:
            checkpoint = find_base(store, settings.model, notes)
            tokenizer = base_model.load(checkpoint.directory, lazy=True)[1]
        else:
            self.served = open_served(store, settings.model, settings.base)
            tokenizer, notes = self.served.tokenizer, [*self.served.notes, *notes]
        self.examples = read_examples(settings, store, tokenizer, notes)
        self.samples = choose_samples(settings, self.examples, tokenizer, template)
        counts = counts_of(
            self.examples, self.samples.examples, self.samples.dropped, self.rules,
            settings.random_control,
        )  # fmt: skip
        self.expected = max(1, counts["passes_expected"])
        if dropped := self.samples.dropped:
            notes.append(f"{dropped} pairs have no answer token within max_tokens; dropped.")
        if self.dry_run:
            most = counts["passes_at_most"]
            notes.append(f"{self.expected:,} to {most:,} losses would be measured.")
        self.data = {
            "base_fingerprint": store.manifest.base_fingerprint,
            "domains": list(self.rules.domains),
            "stacks": stack_hashes(store, self.rules.domains),
            "chat_domain": self.rules.chat_domain,
            "chat_floor": self.rules.chat_floor if self.rules.chat_domain else 0.0,
            "template": template,
            "counts": counts,
        }
        return Result(
            **ABOUT, status="planned", settings=settings.model_dump(mode="json"), data=self.data,
            blocks=(count_table(counts),), notes=tuple(notes),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        # No outputs of the engine's: the losses are what is kept, and they outlive a change of
        # settings. All else follows from them.
        yield Step("search", self._search)

    def conclude(self, work: Path) -> Result:
        settings, rules = self.settings, self.rules
        outcomes = read_discovered_outcomes(work)
        figures = read_object((work / FIGURES).read_bytes())
        speed = figures["figures"]["pairs_per_second"]
        speed_note = (f"{speed:.2f} pairs a second.",) if speed else ()
        data = {
            **self.data,
            "oracle": oracle_table(rules, outcomes),
            "greedy_gap": greedy_gap(rules, outcomes) if settings.search == "exhaustive" else None,
            "control": (
                control_table(rules, outcomes) if settings.random_control and outcomes else None
            ),
            "figures": figures["figures"],
        }
        train = command_line(
            "mlxstacks route train", settings.store_path,
            targets=str(user_path(str(settings.save_path))), model=settings.model,
        )  # fmt: skip
        return Result(
            **ABOUT, status="done", data=data, blocks=blocks(data),
            outcome=f"{100 * data['counts']['discovered_share']:.0f}% of targets discovered",
            verdict=verdict(data, outcomes), notes=(*figures["notes"], *speed_note),
            next_steps={"Next": train},
        )  # fmt: skip

    def _search(self, work: Path) -> None:
        """Write what the target gets, and FIGURES."""
        target = user_path(str(self.settings.save_path))
        known = [target / LOSSES] if self.settings.resume else []
        with closing(LossCache(work / LOSSES, known)) as cache, ExitStack() as stack:
            stack.callback(base_model.install_gated_delta())
            outcomes, figures, notes = self._outcomes(cache)
            cache.write(work / f"{LOSSES}.sorted")
        os.replace(work / f"{LOSSES}.sorted", work / LOSSES)
        write_lines(work / EXAMPLES, self.examples)
        write_lines(work / OUTCOMES, outcomes)
        write_json(work / FIGURES, {"figures": figures, "notes": [*notes, *cache.notes]})

    def _outcomes(self, cache: LossCache) -> tuple[list[Outcome], dict[str, Any], list[str]]:
        settings, rules = self.settings, self.rules
        started, cpu = time.monotonic(), time.process_time()
        control = settings.seed if settings.random_control else None
        losses = RowLosses(
            self.served, self.samples.rows, cache, control, settings.batch_tokens, self._tell
        )
        searches = losses.search(rules, range(len(self.samples.rows)))
        seconds, recalled = time.monotonic() - started, losses.losses.recalled
        controls = _controls(rules, searches, losses) if settings.random_control else []
        asked = sum(len(search.losses) for search in searches)
        figures = {
            "cpu_seconds": round(time.process_time() - cpu, 3),
            "passes_made": losses.losses.made,
            "passes_recalled": losses.losses.recalled,
            "passes_per_pair": round(asked / max(1, len(searches)), 2),
            "tokens": losses.losses.tokens,
            # of the search alone, where nothing came from the cache
            "pairs_per_second": None if recalled else round(len(searches) / seconds, 3),
            "batch_tokens": losses.losses.batch_tokens,
            "peak_bytes": memory.counters().peak_bytes,
        }
        pairs = zip(self.samples.examples, searches, controls or [{}] * len(searches), strict=True)
        return [_outcome(rules, *pair) for pair in pairs], figures, losses.notes

    def _tell(self, made: int) -> None:
        self.done += made
        if self.progress:
            # how many passes the searches will ask for is an estimate
            done = min(self.done, 0.99 * self.expected)
            self.progress(done, self.expected, f"{self.done} losses")


def rules_of(settings: OutcomeSettings, domains: tuple[str, ...], notes: list[str]) -> Rules:
    """The rules of a search among these domains. Raises: InputError for what does not fit them."""
    chat = settings.chat_domain or ("chat" if "chat" in domains else None)
    if chat is not None and chat not in domains:
        raise InputError(
            f"chat_domain {chat!r} is no domain to route to (there are {', '.join(domains)})"
        )
    if settings.search == "exhaustive" and len(domains) > MOST_EXHAUSTIVE:
        raise InputError(
            f"search exhaustive takes up to {MOST_EXHAUSTIVE} domains, the store has "
            f"{len(domains)}; use greedy, or disable domains"
        )
    absent = [name for name in settings.soft if name not in domains]
    if absent and "soft" in settings.model_fields_set:
        notes.append(f"soft: no domain {', '.join(absent)} to route to.")
    return Rules(
        domains,
        threshold=settings.threshold,
        chat_domain=chat,
        chat_floor=settings.chat_floor,
        soft=tuple(name for name in settings.soft if name in domains),
        label_share=settings.label_share,
        search=settings.search,
    )


def choose_samples(
    settings: OutcomeSettings, examples: Sequence[RouterExample], tokenizer: Any, template: Template
) -> Samples:
    """The first examples of each label that have answer tokens."""
    limits = {
        "single": settings.samples_per_domain,
        "mixed": settings.mixed_samples,
        "other": settings.other_samples,
    }
    chosen: list[RouterExample] = []
    rows: list[Row] = []
    taken: dict[tuple[str, ...], int] = {}
    dropped = 0
    for example in examples:
        if example.answer is None or taken.get(example.label, 0) >= limits[example.kind]:
            continue
        row = encode_pair(
            example.prompt, example.answer, tokenizer, template, settings.max_tokens,
            Rendering.of(settings),
        )  # fmt: skip
        if row is None:
            dropped += 1
            continue
        taken[example.label] = taken.get(example.label, 0) + 1
        chosen.append(example)
        rows.append(row)
    return Samples(chosen, rows, dropped)


def _controls(rules: Rules, searches: Sequence[Found], losses: RowLosses) -> list[dict[str, float]]:
    """What random stacks would have done: for each search the loss with each random domain alone
    (by `random_name`), with it on top of the best set (WITH_BEST and its name) and, where there is
    a floor, with that alone (FLOOR). Every run has the chat floor, as those of the search have.

    losses: on a model that has the random stacks.
    """
    floor, asked = rules.floor_alone(), list[tuple[int, str, dict[str, float]]]()
    for number, search in enumerate(searches):
        best = rules.weights(search.best)
        asked += [(number, FLOOR, floor)] if floor else []
        for name in map(random_name, rules.domains):
            asked.append((number, name, {**floor, name: 1.0}))
            asked += [(number, f"{WITH_BEST}{name}", {**best, name: 1.0})] if best else []
    controls: list[dict[str, float]] = [{} for _ in searches]
    values = losses.of([(number, weights) for number, _, weights in asked])
    for (number, key, _), loss in zip(asked, values, strict=True):
        controls[number][key] = loss
    return controls


def _outcome(
    rules: Rules, example: RouterExample, search: Found, control: dict[str, float]
) -> Outcome:
    targets = targets_of(rules, search)
    return Outcome(
        row_id=example.row_id,
        label=example.label,
        kind=example.kind,
        base_loss=search.base_loss,
        best_loss=search.best_loss,
        best=rules.ordered(search.best),
        soft=rules.ordered(search.soft),
        targets=targets,
        final=blended(rules, targets, example.label),
        losses={config_text(rules.ordered(on)): loss for on, loss in search.losses.items()},
        path=tuple(config_text(rules.ordered(on)) for on in search.path),
        trained_on=example.trained_on,
        control=control,
    )
