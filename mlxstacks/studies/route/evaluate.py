"""`mlxstacks route evaluate`: does routing pay, and is it the domains that make the difference?

Held-out rows of the store's domains, mixed ones, prompts of nobody and unseen domains; each prompt
is routed once, on its raw text, never on its answer. Of several routers each is measured on the
rows that it was not trained on; they are compared by differences between modes, on the same rows
each. The modes, as weights of domains for each row:

base            none
ungated         all at 1
routed          those above the threshold, by their score (chat at its floor at least)
routed_hard     the same at 1
oracle_domain   those of the row's label at 1; for a row without a label the base
random_stack    random stacks of equal norm in the place of oracle_domain's; one draw of them, so
                intervals are over rows, not over such stacks
prefix          the first domain at 1, as it is after one domain was trained

Losses are kept in `.NAME.work` next to the target as they are made, so that a killed run resumes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import PLACES, write_json
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import read_object
from mlxstacks.routing.arrow import ArrowRouter
from mlxstacks.routing.candidate_losses import LossCache, choose_batch_tokens
from mlxstacks.routing.gaps import is_loss_gap
from mlxstacks.routing.outcomes import LOSSES, RouterExample
from mlxstacks.routing.router import PromptRouter, Route, load_prompt_router
from mlxstacks.routing.router_metrics import rate_json
from mlxstacks.routing.router_training import group_key
from mlxstacks.studies.route.data import (
    UNSEEN,
    EvaluatedRow,
    RouterSplit,
    by_group,
    domain_groups,
    held_out_rows,
    read_all,
    split_of,
    template_of,
)
from mlxstacks.studies.route.evaluate_figures import (
    DomainLosses,
    Matrix,
    blocks,
    difference_json,
    gap_summary,
    loss_matrix,
    outcome,
    over_routers,
    router_metrics,
    verdict,
)
from mlxstacks.studies.route.served import (
    RowLosses,
    Served,
    open_served,
    random_name,
    rules_for,
    weighted,
)
from mlxstacks.studies.route.settings import RouteEvaluateSettings
from mlxstacks.study.document import counted
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.result import Result

ABOUT = {
    "kind": "route evaluate",
    "title": "Evaluation of routing",
    "question": "Is a routed model better than the base and than all stacks at once, and are the "
    "domains the reason?",
}
ROWS, FIGURES = "rows.jsonl", "figures.json"
ROUTED = ("routed", "routed_hard")
MODES = ("base", "ungated", *ROUTED, "oracle_domain", "random_stack", "prefix")
# What the others are compared with, row by row.
AGAINST = ("base", "ungated", "random_stack")
# Enough to compare routers by.
COMPARED = ("base", "ungated", *ROUTED)
# What was published as pictures of one prompt each: an answer that was good after the first domain,
# broken when all stacks are on, and good again when they are routed.
PANELS = {"after one domain": "prefix", "all, ungated": "ungated", "all, routed": "routed"}
# The routers without training; no file is called so.
SIMILARITY, ARROW = "similarity (no training)", "Arrow (no training)"
Progress = Callable[..., None]


def run(
    settings: RouteEvaluateSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Measure, and write result and rows to `settings.save_path`.

    Raises: InputError: no store, model, router, target or held-out row. StoreError: a damaged file,
        another base, a router of other stacks.
    """
    if settings.store_path is None:
        raise InputError("route evaluate needs store_path and save_path")
    return run_study(_Evaluation(settings, progress, dry_run), dry_run=dry_run, progress=progress)


@dataclass(frozen=True, eq=False)
class _Case:
    """One router on the rows it was not trained on."""

    name: str
    router: PromptRouter
    rows: list[EvaluatedRow]
    modes: tuple[str, ...]

    @cached_property
    def answered(self) -> list[EvaluatedRow]:
        return [row for row in self.rows if row.row is not None]


@dataclass(frozen=True, eq=False)
class _Measured:
    """losses: by mode, of rows with answers; table: what makes more of them. gaps: by the router's
    detector, if it has one, and by low scores.
    """

    routes: list[Route]
    losses: dict[str, list[float]]
    table: RowLosses
    matrix: Matrix
    differences: dict[str, Matrix]
    gaps: dict[str, dict[str, Any]]


class _Evaluation(Study):
    artifacts = provenance = (ROWS,)
    settings: RouteEvaluateSettings

    def __init__(
        self, settings: RouteEvaluateSettings, progress: Progress | None, dry_run: bool
    ) -> None:
        self.settings, self.progress, self.dry_run = settings, progress, dry_run
        self.inputs, self.done = (settings.store_path,), 0

    def planned(self) -> Result:
        settings, store = self.settings, Store.open(str(self.settings.store_path))
        shown = settings.model_dump(mode="json", exclude=PLACES)
        self.template = template_of(settings.template, store)
        head = Result(**ABOUT, status="planned", settings=shown)
        if self.dry_run:
            return head.model_copy(update={"notes": (f"{store.path} would be evaluated.",)})
        self.served = open_served(store, settings.model, settings.base)
        notes = [*self.served.notes]
        self.cases = list(self._cases(notes))
        # Routes and modes of each router, then the samples.
        self.total = sum(len(case.modes) + 1 for case in self.cases) + 1
        return head.model_copy(update={"notes": tuple(dict.fromkeys(notes))})

    def steps(self, work: Path) -> Iterator[Step]:
        # No outputs of the engine's: the losses are what is kept, whatever is made of them.
        yield Step("measure", self._measure_all)

    def conclude(self, work: Path) -> Result:
        data = read_object((work / FIGURES).read_bytes())
        return Result(
            **ABOUT, status="done", data=data, outcome=outcome(data), verdict=verdict(data),
            blocks=tuple(blocks(data)),
        )  # fmt: skip

    def _cases(self, notes: list[str]) -> Iterator[_Case]:
        """Every router on its rows; the first one in all modes, the others in those they differ
        by. Raises: InputError: no row with an answer.
        """
        settings, served = self.settings, self.served
        examples, unseen = read_all(settings, served.store, served.tokenizer, notes)
        modes = tuple(m for m in MODES if m != "random_stack" or settings.random_control)
        first: _Case | None = None
        for path in settings.routers or (None,):
            router = load_prompt_router(served.store, served.model, served.tokenizer, path)
            notes += router.notes
            name = path or "the store's own"
            split = split_of(router, path, examples, settings.targets)
            rows = held_out_rows(
                settings, examples, unseen, split.training if split else (), served.tokenizer,
                self.template, notes,
            )  # fmt: skip
            notes += _split_notes(path or "the store's own router", split, rows)
            case = _Case(name, router, rows, modes)
            groups = {row.group for row in case.answered}
            if not domain_groups(groups):
                raise InputError(
                    f"{name}: no held-out row of a single domain has an answer to measure "
                    f"within max_tokens {settings.max_tokens}, prompt and answer together (groups "
                    f"here: {', '.join(by_group(rows))}); raise it, or give --data with answers in "
                    f"NAME.jsonl for {', '.join(served.domains)}"
                )
            if absent := [domain for domain in served.domains if domain not in groups]:
                notes.append(
                    f"{name}: no held-out row of {', '.join(absent)} has an answer; the mean over "
                    "domains is of the others."
                )
            yield case
            first = first or case
            modes = COMPARED
        assert first is not None
        if settings.similarity:
            yield _Case(SIMILARITY, _similarity_router(first, examples), first.rows, modes)
        if settings.arrow:
            yield _Case(ARROW, ArrowRouter(first.router, served.model), first.rows, modes)

    # --- figures ----------------------------------------------------------------------------------

    def _measure_all(self, work: Path) -> None:
        """Write the rows and FIGURES, with the first router's losses."""
        with closing(LossCache(work / LOSSES)) as cache:
            measured = [self._measure(case, cache) for case in self.cases]
            case, first = self.cases[0], measured[0]
            samples = _answer_samples(self.served, case.rows, first.routes, self.settings)
            self._step_done("samples")
            routers = [_router_json(*pair) for pair in zip(self.cases, measured, strict=True)]
            drawn = (self.settings.draws, self.settings.seed)
            for router, other, own in zip(routers[1:], self.cases[1:], measured[1:], strict=True):
                router["to_first"] = _against((case, first), (other, own), *drawn)
            groups = by_group(case.answered)
            figures = {
                "template": self.template,
                "domains": list(self.served.domains),
                "rows": {group: len(places) for group, places in groups.items()},
                "matrix": first.matrix,
                "differences": first.differences,
                "routers": routers,
                "over_routers": over_routers(
                    [r for r in routers if r["name"] not in (SIMILARITY, ARROW)]
                ),
                "gaps": {**first.gaps, "loss": self._loss_gaps(case, first.table)},
                "panels": {
                    panel: {
                        "mode": mode,
                        "losses": _values(first.matrix[mode]),
                        "exactly_right": sum(s["answers"][panel]["right"] for s in samples),
                        "samples": len(samples),
                    }
                    for panel, mode in PANELS.items()
                },
                "samples": samples,
            }
        write_json(work / FIGURES, figures)
        _write_rows(work / ROWS, case, first)

    def _measure(self, case: _Case, cache: LossCache) -> _Measured:
        settings, answered, domains = self.settings, case.answered, self.served.domains
        routes = case.router.routes([row.example.prompt for row in case.rows], routable=domains)
        self._step_done("routes")
        table = RowLosses(
            self.served, [row.row for row in answered if row.row], cache,
            settings.seed if "random_stack" in case.modes else None,
            choose_batch_tokens(case.router.header.input_dims),
        )  # fmt: skip
        routed = [route for route, row in zip(routes, case.rows, strict=True) if row.row]
        losses: dict[str, list[float]] = {}
        # Modes that ask no router first.
        for mode in sorted(case.modes, key=lambda mode: mode in ROUTED):
            weights = [
                weights_of(mode, row.example.label, domains, route)
                for row, route in zip(answered, routed, strict=True)
            ]
            losses[mode] = table.of(list(enumerate(weights)))
            self._step_done(mode)
        counts = np.array([row.answer_tokens for row in answered], dtype=float)
        sums = {mode: np.array(values) * counts for mode, values in losses.items()}
        groups = {
            group: DomainLosses(counts[places], {mode: s[places] for mode, s in sums.items()})
            for group, places in by_group(answered).items()
        }
        drawn = (domain_groups(groups), settings.draws, settings.seed)
        differences = {
            to: loss_matrix(groups, case.modes, *drawn, against=to)
            for to in AGAINST
            if to in case.modes
        }
        threshold = case.router.header.threshold
        tests = {"scores": [all(s < threshold for s in route.scores.values()) for route in routes]}
        if case.router.detector is not None:
            tests = {"detector": [route.gap for route in routes], **tests}
        rows = by_group(case.rows)
        gaps = {
            test: gap_summary({group: [flags[i] for i in places] for group, places in rows.items()})
            for test, flags in tests.items()
        }
        matrix = loss_matrix(groups, case.modes, *drawn)
        return _Measured(routes, losses, table, matrix, differences, gaps)

    def _loss_gaps(self, case: _Case, table: RowLosses) -> dict[str, Any] | None:
        """The test for gaps by losses; None where it was not asked for."""
        if not self.settings.gap_rows:
            return None
        threshold = self.settings.threshold
        rules = rules_for(case.router.header, self.served.domains, threshold)
        flags = {}
        for group, places in by_group(case.answered).items():
            searches = table.search(rules, places[: self.settings.gap_rows])
            flags[group] = [is_loss_gap(s.base_loss, s.best_loss, threshold) for s in searches]
        return gap_summary(flags)

    def _step_done(self, what: str) -> None:
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total, what)


def _split_notes(name: str, split: RouterSplit | None, rows: list[EvaluatedRow]) -> Iterator[str]:
    """What the rows have to do with the router's training."""
    if split is None:
        yield (
            f"Which prompts {name} was trained on is not known here; it may know those it is "
            "judged by (--targets, the directory that `route discover` wrote for it, tells)."
        )
        return
    if split.extended:
        yield (
            f"{name} was extended; which prompts the router before it was trained on is not known "
            "here: it may know those it is judged by."
        )
    if chose := sum(group_key(row.example.prompt) in split.validation for row in rows):
        yield (
            f"{chose} of {counted(len(rows), 'row')} held out from the training of {name} chose "
            "its best epoch: its figures may be a little too good."
        )


def weights_of(
    mode: str, label: Sequence[str], domains: Sequence[str], route: Route
) -> dict[str, float]:
    """Weights of the domains that are on in a mode, for a row of this label and (soft) route."""
    if mode == "routed":
        return dict(route.weights)
    chosen: Mapping[str, Sequence[str]] = {
        "base": (),
        "ungated": domains,
        "routed_hard": tuple(route.weights),
        "oracle_domain": label,
        "random_stack": [random_name(name) for name in label],
        "prefix": domains[:1],
    }
    return dict.fromkeys(chosen[mode], 1.0)


def _values(estimates: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    return {group: estimate["value"] for group, estimate in estimates.items()}


def _similarity_router(case: _Case, examples: Sequence[RouterExample]) -> PromptRouter:
    """By the prompts of one domain that are in no row that is measured on.

    Raises: InputError: a domain has none.
    """
    measured = {group_key(row.example.prompt) for row in case.rows}
    prompts: dict[str, list[str]] = {name: [] for name in case.router.domains}
    for example in examples:
        if len(example.label) == 1 and group_key(example.prompt) not in measured:
            prompts.setdefault(example.label[0], []).append(example.prompt)
    if lacking := [name for name in case.router.domains if not prompts[name]]:
        raise InputError(
            f"similarity needs prompts of {', '.join(lacking)} that are not measured on; give "
            "--data with more rows, or a lower --rows-per-group"
        )
    return case.router.by_similarity(prompts)


def _against(
    first: tuple[_Case, _Measured], other: tuple[_Case, _Measured], draws: int, seed: int
) -> dict[str, Any] | None:
    """A router less the first one, on the rows that both were measured on; None without any.

    rows: how many, those with an answer. Losses as `differences` has them. set: of all common rows,
    how many more have exactly the domains of their label, as a share. single_top1, mixed_set: of
    all common rows, the first router's rate and this one's.
    """
    (base_case, base), (case, own) = first, other
    places = {row.example.row_id: place for place, row in enumerate(base_case.answered)}
    pairs = [
        (places[row.example.row_id], place)
        for place, row in enumerate(case.answered)
        if row.example.row_id in places
    ]
    hits, base_hits = exact_sets(case, own), exact_sets(base_case, base)
    common = hits.keys() & base_hits.keys()
    if not (pairs and common):
        return None
    rows = [case.answered[place] for _, place in pairs]
    groups = by_group(rows)
    matrix: Matrix = {}
    for mode in ROUTED:
        losses = {}
        for group, members in groups.items():
            counts = np.array([rows[i].answer_tokens for i in members], dtype=float)
            ours, theirs = (
                np.array([of_router[pairs[i][side]] for i in members]) * counts
                for side, of_router in ((1, own.losses[mode]), (0, base.losses[mode]))
            )
            losses[group] = DomainLosses(counts, {mode: ours, "first": theirs})
        averaged = domain_groups(losses)
        matrix |= loss_matrix(losses, (mode,), averaged, draws, seed, against="first")
    metrics = []
    for of_router, measured in (first, other):
        at = [i for i, row in enumerate(of_router.rows) if row.example.row_id in common]
        metrics.append(_metrics(of_router, at, measured))
    return {
        "rows": len(pairs),
        "losses": matrix,
        "set": difference_json([(base_hits[row], hits[row]) for row in sorted(common)]),
        **{name: [m[name] for m in metrics] for name in ("single_top1", "mixed_set")},
    }


def _metrics(case: _Case, places: Sequence[int], measured: _Measured) -> dict[str, Any]:
    """Of the rows at these places."""
    header = case.router.header
    scores = [measured.routes[place].scores for place in places]
    rows = [case.rows[place] for place in places]
    return router_metrics(rows, scores, header.domains, header.threshold)


def exact_sets(case: _Case, measured: _Measured) -> dict[str, bool]:
    """Row id -> whether just the domains of its label are on, a domain with a floor aside; rows of
    unseen domains are left out.
    """
    chat = {case.router.header.chat_domain}
    return {
        row.example.row_id: {*route.weights} - chat == {*row.example.label} - chat
        for row, route in zip(case.rows, measured.routes, strict=True)
        if not row.group.startswith(UNSEEN)
    }


def _router_json(case: _Case, measured: _Measured) -> dict[str, Any]:
    """Metrics, losses, differences and gaps of one router."""
    header, exact = case.router.header, exact_sets(case, measured).values()
    active = [len(route.weights) for route in measured.routes]
    return {
        "name": case.name,
        "threshold": header.threshold,
        "rows": len(case.rows),
        "exact_set": rate_json(sum(exact), len(exact)),
        "metrics": _metrics(case, range(len(case.rows)), measured),
        "losses": {mode: _values(measured.matrix[mode]) for mode in ROUTED},
        "differences": {
            to: {mode: matrix[mode] for mode in ROUTED}
            for to, matrix in measured.differences.items()
        },
        "mean_active_domains": sum(active) / len(active),
        "gaps": measured.gaps,
    }


def _answer_samples(
    served: Served,
    rows: Sequence[EvaluatedRow],
    routes: Sequence[Route],
    settings: RouteEvaluateSettings,
) -> list[dict[str, Any]]:
    """The first rows of each group, answered greedily by the base and in every panel."""
    samples = []
    first = [places[: settings.sample_prompts] for places in by_group(rows).values()]
    for place in chain.from_iterable(first):
        example, route = rows[place].example, routes[place]
        answers = {}
        for panel, mode in {"base": "base", **PANELS}.items():
            weights = weights_of(mode, example.label, served.domains, route)
            text = served.answer(example.prompt, weighted(weights), settings.sample_tokens)
            right = example.answer is not None and text.split() == example.answer.split()
            answers[panel] = {"text": text, "right": right}
        samples.append({
            "group": rows[place].group, "prompt": example.prompt, "expected": example.answer,
            "weights": dict(route.weights), "answers": answers,
        })  # fmt: skip
    return samples


def _write_rows(path: Path, case: _Case, measured: _Measured) -> None:
    """One row a line: what it is, its route, its loss in every mode."""
    by_row = iter(zip(*measured.losses.values(), strict=True))
    with path.open("w", encoding="ascii") as lines:
        for row, route in zip(case.rows, measured.routes, strict=True):
            losses = zip(measured.losses, next(by_row), strict=True) if row.row else None
            line = {
                "row_id": row.example.row_id,
                "group": row.group,
                "label": list(row.example.label),
                "answer_tokens": row.answer_tokens,
                "scores": dict(route.scores),
                "weights": dict(route.weights),
                "gap": route.gap,
                "losses": losses and dict(losses),
            }
            lines.write(json.dumps(line, allow_nan=False) + "\n")
