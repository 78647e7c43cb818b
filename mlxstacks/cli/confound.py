"""Prints what `mlxstacks confound` found, or what it would run."""

from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.experiments.confound.report import ConfoundReport, Findings

_MOST_SUBJECTS = 20


def render(console: "Console", report: "ConfoundReport") -> None:
    """The plan; or arms beside their fuses, differences, decomposition, subjects, the verdict."""
    if report.findings is None:
        _render_plan(console, report)
        return
    found, mined, plan = report.findings, report.mined or {}, report.plan or {}
    table = mined["table"]["all"]
    counts = ", ".join(f"{name} {count:,}" for name, count in table.items())
    split = f"{len(mined['train']):,} to train, {plan['n']:,} to test"
    console.print(f"Mined {sum(table.values()):,} items: {counts}. Set G: {split}.", markup=False)
    console.print(f"Plan {(report.plan_sha256 or '')[:16]}, {found.standing.status}.")
    for line in report.power:
        console.print(line, markup=False, style="dim")
    mark = found.standing.mark
    console.print(_arm_table(report, found, mark("arms on Set G's test items")))
    console.print(_claim_table(found, mark("content: A1 less A0")))
    console.print(_decomposition_table(found, mark("where the score of A1 comes from, in points")))
    if found.right_arms:
        console.print(_right_table(found, mark("items that both models got right")))
    console.print(_subject_table(report, found, mark("right answers by subject")))
    for way, words in found.floors.items():
        console.print(f"Floor ({way}): {words}", markup=False)
    for name, flips in found.persona_flips.items():
        console.print(
            f"Persona unfused, {name}: {flips.changed} of {flips.n} answers differ, {flips.fixed} "
            f"became right, {flips.broken} wrong.",
            markup=False,
        )
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    console.print(
        f"Wrote {report.save_path}: confound_report.json, plan, protocol, answers, adapters.",
        markup=False,
    )
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _render_plan(console: "Console", report: "ConfoundReport") -> None:
    settings = report.settings
    asked = ("model", "persona", "items", "scoring", "sample", "policies", "train_answers", "seed")
    console.print(output.details((key, _text(settings[key])) for key in asked))
    train = settings["train"]
    told = ("layers", "keys", "rank", "scale", "iters", "batch_size", "learning_rate")
    console.print(
        "A1: " + ", ".join(f"{key} {_text(train[key])}" for key in told) + ".", markup=False
    )
    console.print(f"{len(report.arms)} arms: {', '.join(report.arms)}.", markup=False)
    least = 100 * settings["least_gain"]
    console.print(
        f"Criterion: A1 - A0 of at least {least:g} points and p < {settings['alpha']:g}.",
        markup=False,
    )
    for line in report.power:
        console.print(line, markup=False, style="dim")
    console.print(f"Planned only: would write {report.save_path}.", markup=False)


def _text(value: Any) -> output.Cell:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _arm_table(report: "ConfoundReport", found: "Findings", title: str) -> object:
    """Accuracy of each arm, and beside it what its fuse kept of the delta and did by itself."""
    boxes = report.settings["scoring"] == "generate"
    rows: list[list[output.Cell]] = []
    for name, arm in found.arms.items():
        kind, _, way = name.partition("_")
        total = (report.fuses.get(way, {}).get(kind) or {}).get("total") or {}
        low, high = 100 * arm.interval.low, 100 * arm.interval.high
        rows.append([
            _called(kind), way.replace("again", "rerun"), f"{arm.correct}/{arm.n}",
            f"{100 * arm.accuracy:.1f}%", f"{low:.1f}-{high:.1f}",
            f"{100 * (arm.boxed_rate if boxes else arm.unanswered / arm.n):.0f}%",
            _rounded(total.get("correlation")), _rounded(total.get("artifact")),
        ])  # fmt: skip
    last = "boxed" if boxes else "ties"
    columns = ["arm", "by", "right", "share", "95%", last, "kept", "artifact"]
    return output.table(columns, rows, title=f"{title}; kept: correlation with the delta")


def _called(kind: str) -> str:
    return kind.upper() if kind in ("a0", "a1") else kind


def _rounded(value: float | None) -> output.Cell:
    return None if value is None else f"{value:.3f}"


def _claim_table(found: "Findings", title: str) -> object:
    outcomes = {one.way: one.outcome for one in found.judgements}
    rows: list[list[output.Cell]] = []
    for way, claim in found.claims.items():
        low, high = 100 * (claim.bootstrap.low or 0), 100 * (claim.bootstrap.high or 0)
        random = found.against_random.get(way)
        rows.append([
            way, f"{100 * claim.difference:+.2f}", f"{low:+.1f}, {high:+.1f}",
            f"{claim.p_adjusted:.2g}", f"{claim.mcnemar.p_value:.2g}",
            f"{100 * random.difference:+.2f}" if random else None, outcomes[way],
        ])  # fmt: skip
    columns = ["by", "points", "95%", "p (z, Holm)", "p (McNemar)", "over random", "outcome"]
    return output.table(columns, rows, title=title)


def _decomposition_table(found: "Findings", title: str) -> object:
    rows: list[list[output.Cell]] = []
    for way, parts in found.decomposition.items():
        values = (parts.floor, parts.content, parts.total)
        shares = (parts.floor_share, parts.content_share, parts.published_floor_share)
        rows.append([
            way, *(f"{100 * value:+.2f}" for value in values),
            *(None if share is None else f"{100 * share:.0f}%" for share in shares),
        ])  # fmt: skip
    columns = ["by", "floor", "content", "total", "floor share", "content share", "A0/A1"]
    return output.table(columns, rows, title=title)


def _right_table(found: "Findings", title: str) -> object:
    rows: list[list[output.Cell]] = [
        [name, f"{arm.correct}/{arm.n}", f"{100 * arm.accuracy:.1f}%"]
        for name, arm in found.right_arms.items()
    ]
    return output.table(["arm", "right", "share"], rows, title=title)


def _subject_table(report: "ConfoundReport", found: "Findings", title: str) -> object:
    """Of the deciding way and unfused; every arm is in the report."""
    way = report.settings["policies"][0]
    shown = ["persona", *(f"{kind}_{w}" for w in (way, "unfused") for kind in ("a0", "a1"))]
    shown = [name for name in shown if name in found.arms]
    subjects = list(found.subjects.items())
    kept = (
        subjects if len(subjects) <= _MOST_SUBJECTS else [*subjects[:_MOST_SUBJECTS], subjects[-1]]
    )
    rows: list[list[output.Cell]] = [
        [name, row["n"], *(row[arm] for arm in shown)] for name, row in kept
    ]
    return output.table(["subject", "n", *shown], rows, title=title)
