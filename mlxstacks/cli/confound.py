"""Prints what `mlxstacks confound` found, or what it would run."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.stats import share_note

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.confound.report import ConfoundReport, Findings

_MOST_SUBJECTS = 20


def render(console: "Console", report: "ConfoundReport") -> None:
    """The plan; or arms beside their fuses, differences, decomposition, subjects, positions, the
    verdict.
    """
    if report.findings is None:
        _render_plan(console, report)
        return
    found, mined, plan = report.findings, report.mined or {}, report.plan or {}
    table = mined["table"]["all"]
    counts = ", ".join(f"{name} {count:,}" for name, count in table.items())
    split = f"{len(mined['train']):,} to train, {plan['n']:,} to test"
    console.print(f"Mined {sum(table.values()):,} items: {counts}. Set G: {split}.", markup=False)
    standing = found.standing
    console.print(f"Plan {(report.plan_sha256 or '')[:16]}, {standing.status}.")
    for reason in standing.reasons:
        console.print(f"EXPLORATORY: {reason}", markup=False, style="bold")
    for line in report.power:
        console.print(line, markup=False, style="dim")
    mark = standing.mark
    console.print(_arm_table(report, found, mark("arms on Set G's test items")))
    console.print(_claim_table(found, mark("content: A1 less A0")))
    console.print(_decomposition_table(found, mark("where the score of A1 comes from, in points")))
    if found.right_arms:
        console.print(_right_table(found, mark("items that both models got right")))
    console.print(_subject_table(report, found, mark("right answers by subject")))
    console.print(_position_table(report, found, mark("which options are picked, percent")))
    n = next(iter(found.arms.values())).n
    console.print(f"Of arms and picks {share_note(n)}.", markup=False, style="dim")
    for line in _code_lines(report):
        console.print(line, markup=False)
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
    plots = f", plots {', '.join(report.plots)}" if report.plots else ""
    parts = f"confound_report.json, plan, protocol, answers, adapters{plots}"
    console.print(f"Wrote {report.save_path}: {parts}.", markup=False)
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _render_plan(console: "Console", report: "ConfoundReport") -> None:
    settings = report.settings
    asked = ("model", "persona", "items", "scoring", "sample", "policies", "train_answers", "seed")
    console.print(output.details((key, output.setting(settings[key])) for key in asked))
    train = settings["train"]
    told = ("layers", "keys", "rank", "scale", "iters", "batch_size", "learning_rate")
    console.print(
        "A1: "
        + ", ".join(f"{key} {output.setting(train[key]) or 'as usual'}" for key in told)
        + ".",
        markup=False,
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


def _arm_table(report: "ConfoundReport", found: "Findings", title: str) -> object:
    """Accuracy of each arm; the correlation of its fuse, and what that did by itself."""
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
    columns = ["arm", "by", "right", "share", "95%", last, "correlation", "artifact"]
    return output.table(
        columns, rows,
        title=f"{title}; guessing {found.guess_rate:.1%}\n"
        "correlation: of the fuse with the delta; artifact: what the fuse does to the weights by "
        "itself",
    )  # fmt: skip


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
            way, f"{100 * claim.difference:+.2f}", f"{low:+.1f} {high:+.1f}",
            f"{claim.p_adjusted:.2g}", f"{claim.mcnemar.p_value:.2g}",
            f"{100 * random.difference:+.2f}" if random else None, outcomes[way],
        ])  # fmt: skip
    columns = ["by", "points", "95%", "p", "McNemar", "over random", "outcome"]
    title += "; p of the z-test by Holm's rule"
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
        [
            name, f"{arm.correct}/{arm.n}", f"{100 * arm.accuracy:.1f}%",
            f"{100 * arm.interval.low:.1f}-{100 * arm.interval.high:.1f}",
        ]
        for name, arm in found.right_arms.items()
    ]  # fmt: skip
    return output.table(["arm", "right", "share", "95%"], rows, title=title)


def _position_table(report: "ConfoundReport", found: "Findings", title: str) -> object:
    """Where the right option stands, and which places the arms prefer: a guess has a place, too."""
    shown = {name: found.arms[name] for name in _shown_arms(report, found)}
    letters = sorted({*found.right_positions, *(p for arm in shown.values() for p in arm.picks)})

    def shares(of: dict[str, float]) -> list[output.Cell]:
        return [round(100 * of.get(letter, 0.0)) for letter in letters]

    rows: list[list[output.Cell]] = [["right option", *shares(found.right_positions), None]]
    for name, arm in shown.items():
        rows.append([name, *shares(arm.picks), f"{100 * arm.by_position:.1f}%"])
    title += "; by place: what these picks score at random"
    return output.table(["", *letters, "by place"], rows, title=title)


def _code_lines(report: "ConfoundReport") -> list[str]:
    """Of each policy: how many packed codes its fuses leave different."""
    lines = []
    for way, figures in report.fuses.items():
        codes = figures["codes_that_differ"]
        a1, a0 = (
            "at other bits" if codes[key] is None else f"{codes[key]:.2%} of the codes"
            for key in ("a1_and_a0", "a0_and_unfused")
        )
        lines.append(f"Fused by {way}, A1 differs from A0: {a1}; A0 from the unfused model: {a0}.")
    return lines


def _shown_arms(report: "ConfoundReport", found: "Findings") -> list[str]:
    """Of the deciding way and unfused; every arm is in the report."""
    way = report.settings["policies"][0]
    shown = ["persona", *(f"{kind}_{w}" for w in (way, "unfused") for kind in ("a0", "a1"))]
    return [name for name in shown if name in found.arms]


def _subject_table(report: "ConfoundReport", found: "Findings", title: str) -> object:
    shown = _shown_arms(report, found)
    subjects = list(found.subjects.items())
    kept = (
        subjects if len(subjects) <= _MOST_SUBJECTS else [*subjects[:_MOST_SUBJECTS], subjects[-1]]
    )
    rows: list[list[output.Cell]] = [
        [name, row["n"], *(row[arm] for arm in shown)] for name, row in kept
    ]
    return output.table(["subject", "n", *shown], rows, title=title)
