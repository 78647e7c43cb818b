"""`mlxstacks route evaluate`: does routing pay, and is it the domains that make the difference?

Held-out rows of the store's domains, mixed ones, prompts of nobody and unseen domains; each prompt
is routed once, on its raw text, never on its answer. All modes see the same tokens. Of several
routers each is measured on the rows that it was not trained on; they are compared by differences
between modes, on the same rows each.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.data.settings import Template
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.files.store import Store
from mlxstacks.routing.gaps import is_loss_gap
from mlxstacks.routing.outcome_settings import OutcomeSettings
from mlxstacks.routing.outcomes import Rules
from mlxstacks.routing.route import Route
from mlxstacks.routing.router import PromptRouter, load_prompt_router
from mlxstacks.routing.router_examples import group_key
from mlxstacks.studies.route.data import template_of
from mlxstacks.studies.route.evaluate_gaps import gap_summary
from mlxstacks.studies.route.evaluate_losses import RowLosses
from mlxstacks.studies.route.evaluate_matrix import Estimate, loss_differences, loss_matrix
from mlxstacks.studies.route.evaluate_metrics import over_routers, router_metrics
from mlxstacks.studies.route.evaluate_modes import (
    AGAINST,
    COMPARED,
    MODES,
    ROUTED,
    Losses,
    fixed_losses,
    grouped,
    routed_losses,
)
from mlxstacks.studies.route.evaluate_panels import answer_samples, panels_json
from mlxstacks.studies.route.evaluate_report import (
    PAGE,
    REPORT,
    ROWS,
    Evaluation,
    RouteEvaluateReport,
    markdown,
)
from mlxstacks.studies.route.evaluate_rows import (
    EvaluatedRow,
    by_group,
    domain_groups,
    held_out_rows,
    read_all,
)
from mlxstacks.studies.route.evaluate_served import Served, open_served
from mlxstacks.studies.route.evaluate_settings import RouteEvaluateSettings
from mlxstacks.studies.route.evaluate_split import RouterSplit, split_of

Progress = Callable[..., None]
_NOT_OF_THE_RESULT = {"force", "save_path"}
STORES_OWN = "the store's own"


Matrix = dict[str, dict[str, Estimate]]


@dataclass(frozen=True, eq=False)
class _Case:
    """One router on the rows it was not trained on. losses: by mode, of the rows with answers;
    table: what makes more of them.
    """

    name: str
    router: PromptRouter
    rows: list[EvaluatedRow]
    scores: list[dict[str, float]]
    routes: list[Route]
    losses: Losses
    table: RowLosses
    matrix: Matrix
    differences: dict[str, Matrix]

    @property
    def answered(self) -> list[EvaluatedRow]:
        return [row for row in self.rows if row.row is not None]


def run(
    settings: RouteEvaluateSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> RouteEvaluateReport:
    """Measure, and write report, page and rows to `settings.save_path`.

    Raises: InputError: no store, model, router, target or held-out row. StoreError: a damaged file,
        another base, a router of other stacks.
    """
    if settings.store_path is None or settings.save_path is None:
        raise InputError("route evaluate needs store_path and save_path")
    store = Store.open(settings.store_path)
    target = user_path(settings.save_path)
    check_target(target, force=settings.force, inputs=[store.path])
    template = template_of(OutcomeSettings(template=settings.template), store)
    shown = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    about = (str(store.path), str(target), shown)
    if dry_run:
        return RouteEvaluateReport("planned", *about)
    started = time.monotonic()
    served = open_served(store, settings.model, settings.base)
    notes = [*served.notes]
    tell = _steps(settings, progress)
    cases = _cases(settings, served, template, notes, tell)
    evaluation = _evaluation(settings, served, cases, tell)
    with staged_directory(target, force=settings.force, inputs=[store.path]) as directory:
        seconds = time.monotonic() - started
        said = list(dict.fromkeys(notes))
        report = RouteEvaluateReport("done", *about, template, evaluation, said, seconds)
        write_json(directory / REPORT, report.as_json())
        (directory / PAGE).write_text(markdown(report), encoding="utf-8", errors="replace")
        _write_rows(directory / ROWS, cases[0])
    return report


def _cases(
    settings: RouteEvaluateSettings,
    served: Served,
    template: Template,
    notes: list[str],
    tell: Callable[[str], None],
) -> list[_Case]:
    """Every router on its rows; the first one in all modes, the others in those they differ by."""
    examples, unseen = read_all(settings, served.store, served.tokenizer, notes)
    cases: list[_Case] = []
    for path in settings.routers or (None,):
        router = load_prompt_router(served.store, served.model, served.tokenizer, path)
        notes += router.notes
        name = path or STORES_OWN
        split = split_of(router, path, examples, settings.targets)
        rows = held_out_rows(
            settings, examples, unseen, split.training if split else (), served.tokenizer,
            template, notes,
        )  # fmt: skip
        notes += _split_notes(name, split, rows)
        there = {row.group for row in rows if row.row is not None}
        if absent := [domain for domain in served.domains if domain not in there]:
            notes.append(
                f"{name}: no held-out row of {', '.join(absent)} has an answer; the mean over "
                "domains is of the others."
            )
        modes = COMPARED if cases else _modes(settings)
        cases.append(_case(settings, served, name, router, rows, modes, tell))
    return cases


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
            f"{chose} of {len(rows)} rows are held out from the training of {name}, but chose its "
            "best epoch: its figures may be a little too good."
        )


def _modes(settings: RouteEvaluateSettings) -> tuple[str, ...]:
    return tuple(m for m in MODES if m != "random_stack" or settings.random_control)


def _case(
    settings: RouteEvaluateSettings,
    served: Served,
    name: str,
    router: PromptRouter,
    rows: list[EvaluatedRow],
    modes: Sequence[str],
    tell: Callable[[str], None],
) -> _Case:
    answered = [row for row in rows if row.row is not None]
    if not domain_groups(row.group for row in answered):
        raise InputError(
            f"{name}: no held-out row of a single domain has an answer to measure "
            f"(groups here: {', '.join(by_group(rows))}); give --data with answers in NAME.jsonl "
            f"for {', '.join(served.domains)}"
        )
    scores = router.scores([row.example.prompt for row in rows])
    routes = [router.decide(one, routable=served.domains) for one in scores]
    tell("routes")
    control = settings.seed if "random_stack" in modes else None
    table = RowLosses(
        served, [row.row for row in answered if row.row], router.header.input_dims, control
    )
    fixed = [mode for mode in modes if mode not in ROUTED]
    losses = fixed_losses(answered, table, served.domains, fixed, tell)
    of_answered = [route for route, row in zip(routes, rows, strict=True) if row.row is not None]
    losses |= routed_losses(of_answered, table, tell)
    groups = grouped(answered, losses)
    drawn = (domain_groups(groups), settings.draws, settings.seed)
    return _Case(
        name, router, rows, scores, routes, losses, table,
        loss_matrix(groups, modes, *drawn),
        {to: loss_differences(groups, modes, to, *drawn) for to in AGAINST if to in modes},
    )  # fmt: skip


def _evaluation(
    settings: RouteEvaluateSettings,
    served: Served,
    cases: Sequence[_Case],
    tell: Callable[[str], None],
) -> Evaluation:
    first = cases[0]
    groups = by_group(first.answered)
    samples = answer_samples(
        served, first.rows, first.routes, settings.sample_prompts, settings.sample_tokens
    )
    tell("samples")
    routers = [_router_json(case) for case in cases]
    return Evaluation(
        served.domains,
        {group: len(places) for group, places in groups.items()},
        first.matrix,
        first.differences,
        routers,
        over_routers(routers),
        _gaps(settings, served, first),
        panels_json(first.matrix, samples),
        samples,
    )


def _router_json(case: _Case) -> dict[str, Any]:
    """Metrics, losses, differences and gaps of one router."""
    header = case.router.header
    active = [len(route.weights) for route in case.routes]
    return {
        "name": case.name,
        "threshold": header.threshold,
        "rows": len(case.rows),
        "metrics": router_metrics(case.rows, case.scores, header.domains, header.threshold),
        "losses": {
            mode: {group: e.value for group, e in case.matrix[mode].items()} for mode in ROUTED
        },
        "differences": {
            to: {mode: {g: e.as_json() for g, e in matrix[mode].items()} for mode in ROUTED}
            for to, matrix in case.differences.items()
        },
        "mean_active_domains": sum(active) / len(active),
        "gaps_by_scores": gap_summary(_score_flags(case)),
    }


def _score_flags(case: _Case) -> dict[str, list[bool]]:
    groups = by_group(case.rows).items()
    return {group: [case.routes[place].gap for place in places] for group, places in groups}


def _gaps(settings: RouteEvaluateSettings, served: Served, case: _Case) -> dict[str, Any]:
    """Both tests; loss: None where it was not asked for."""
    found: dict[str, Any] = {"scores": gap_summary(_score_flags(case)), "loss": None}
    if settings.gap_rows:
        header = case.router.header
        chat = header.chat_domain if header.chat_domain in served.domains else None
        rules = Rules(served.domains, settings.threshold, chat, header.chat_floor)
        flags = {}
        for group, places in by_group(case.answered).items():
            outcomes = case.table.search(rules, places[: settings.gap_rows])
            flags[group] = [
                is_loss_gap(o.base_loss, o.best_loss, settings.threshold) for o in outcomes
            ]
        found["loss"] = gap_summary(flags)
    return found


def _steps(settings: RouteEvaluateSettings, progress: Progress | None) -> Callable[[str], None]:
    """`tell(what)` counts a step: routes and modes of each router, then the samples."""
    others = max(len(settings.routers), 1) - 1
    total = len(_modes(settings)) + 1 + others * (len(COMPARED) + 1) + 1
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, total, what)

    return tell


def _write_rows(path: Path, case: _Case) -> None:
    """One row a line: what it is, its route, its loss in every mode."""
    numbers = iter(range(len(case.rows)))
    with path.open("w", encoding="ascii") as lines:
        for row, route in zip(case.rows, case.routes, strict=True):
            losses = None
            if row.row is not None:
                number = next(numbers)
                losses = {mode: values[number] for mode, values in case.losses.items()}
            line = {
                "row_id": row.example.row_id,
                "group": row.group,
                "label": list(row.example.label),
                "answer_tokens": sum(w > 0 for w in row.row.weights) if row.row else 0,
                "scores": dict(route.scores),
                "weights": dict(route.weights),
                "gap": route.gap,
                "losses": losses,
            }
            lines.write(json.dumps(line, allow_nan=False) + "\n")
