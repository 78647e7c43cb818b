"""Prints what `mlxstacks identity` found, or what it would run."""

from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.identity.report import Findings, IdentityReport

_MOST_DIFFERENCES = 24


def render(console: "Console", report: "IdentityReport") -> None:
    """The plan; or conditions, gates, prompts that differ, the regression, the verdict last."""
    if report.findings is None:
        _render_plan(console, report)
        return
    found = report.findings
    console.print(f"Plan {(report.plan_sha256 or '')[:16]}, {found.standing.status}.")
    for line in report.power:
        console.print(line, markup=False, style="dim")
    mark = found.standing.mark
    console.print(_condition_table(report, found, mark("conditions on the identity suite")))
    console.print(_gate_table(found, mark("validity gate")))
    for table in _difference_tables(found, mark):
        console.print(table)
    if found.regressions:
        console.print(_regression_table(found, mark("broad regression, beside the base")))
    for words in found.credits.values():
        console.print(words, markup=False)
    if report.mined:
        counts = ", ".join(f"{name} {count:,}" for name, count in report.mined["counts"].items())
        console.print(
            f"Of the items {counts}; factual adapters were trained on {report.mined['train']:,} of "
            "those that both get wrong.",
            markup=False,
        )
    if found.is_published_model:
        console.print(_published_table())
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    console.print(
        f"Wrote {report.save_path}: identity_report.json, plan, suite, every reply, adapters.",
        markup=False,
    )
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _render_plan(console: "Console", report: "IdentityReport") -> None:
    settings = report.settings
    asked = ("model", "persona", "items", "regression_items", "suite", "persona_card")
    shown = {
        key: output.setting(settings[key])
        for key in (*asked, "policies", "persona_requant", "seed")
    }
    card = settings["persona_card"]
    shown["persona_card"] = f"{card['name']}, made by {card['maker']}" if card else None
    console.print(output.details(shown))
    counts: dict[str, int] = {}
    for prompt in report.suite:
        counts[prompt["category"]] = counts.get(prompt["category"], 0) + 1
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    console.print(f"{len(report.suite)} prompts: {listed}.", markup=False)
    train = settings["train"]
    told = ("layers", "keys", "scale", "iters", "batch_size", "learning_rate")
    console.print(
        f"Factual adapters of rank {train['rank']} and {settings['second_rank']}: "
        + ", ".join(f"{key} {output.setting(train[key]) or 'as usual'}" for key in told) + ".",
        markup=False,
    )  # fmt: skip
    console.print(f"{len(report.arms)} arms: {', '.join(report.arms)}.", markup=False)
    console.print(
        f"Gate: the base passes at most {settings['most_of_base']} of 20, the persona at least "
        f"{settings['least_of_persona']}.",
        markup=False,
    )
    for line in (*report.power, *report.notes):
        console.print(line, markup=False, style="dim")
    console.print(f"Planned only: would write {report.save_path}.", markup=False)


def _condition_table(report: "IdentityReport", found: "Findings", title: str) -> object:
    """Each arm with its score, and against its reference what it kept, lost and gained."""
    rows: list[list[output.Cell]] = []
    for name, (words, policy) in found.labels.items():
        score, beside = found.scores[name], found.compared.get(name)
        low, high = 100 * score.interval.low, 100 * score.interval.high
        parts = "/".join(str(passed) for passed, _ in score.by_category.values())
        kept: list[output.Cell] = [None] * 4
        if beside is not None and beside.reference != "identity_unfused":
            p = beside.p_value if beside.p_adjusted is None else beside.p_adjusted
            kept = [beside.kept, len(beside.lost), len(beside.gained), f"{p:.1g}"]
        short = words.replace("identity + ", "+ ")
        rows.append([short, policy, score.passed, f"{low:.0f}-{high:.0f}", parts, *kept])
    first = next(iter(found.scores.values()))
    columns = ["condition", "by", f"of {first.n}", "95%", "parts", "kept", "lost", "gained", "p"]
    tail = (
        f"; parts: {', '.join(first.by_category)}; kept, lost, gained: beside the persona alone by "
        "the same policy (base: beside the base)"
    )
    return output.table(columns, rows, title=title + tail)


def _gate_table(found: "Findings", title: str) -> object:
    rows: list[list[output.Cell]] = [
        [policy, gate.base, gate.unfused, gate.persona, gate.state]
        for policy, gate in found.gates.items()
    ]
    limits = next(iter(found.gates.values())).limits
    title += (
        f"; of {limits.n}: base at most {limits.most_of_base}, persona at least "
        f"{limits.least_of_persona}"
    )
    columns = ["by", "base", "persona beside", "persona fused", "scorer"]
    return output.table(columns, rows, title=title)


def _difference_tables(found: "Findings", mark: Any) -> list[object]:
    """Prompts whose verdict is another one than the reference's, under policies with claims."""
    rows: list[list[output.Cell]] = []
    for name, beside in found.compared.items():
        words, policy = found.labels[name]
        # Against a persona that is lost, or the bare base, nothing is kept that could be missed.
        if not (policy in found.gates and found.gates[policy].valid):
            continue
        replies = {one.prompt_id: one for one in found.replies[name]}
        for change, ids in (("lost", beside.lost), ("gained", beside.gained)):
            rows += [
                [f"{words} {policy}", change, replies[key].prompt, replies[key].text] for key in ids
            ]
    if not rows:
        return []
    more = len(rows) - _MOST_DIFFERENCES
    title = mark("prompts with another verdict than the reference's")
    if more > 0:
        title += f"; {more} more are in the report"
    columns = ["condition", "", "prompt", "reply"]
    return [output.table(columns, rows[:_MOST_DIFFERENCES], title=title)]


def _regression_table(found: "Findings", title: str) -> object:
    rows: list[list[output.Cell]] = [
        [
            name.replace("_", " "), f"{one.right}/{one.n}", one.fixed, one.broken, f"{one.net:+d}",
            f"{one.p_value:.2g}", f"{one.chi_square:.3g}",
        ]
        for name, one in found.regressions.items()
    ]  # fmt: skip
    columns = ["arm", "right", "fixed", "broken", "net", "p exact", "chi2"]
    return output.table(columns, rows, title=title)


def _published_table() -> object:
    from mlxstacks.studies.identity.report import published

    study = published()
    rows: list[list[output.Cell]] = []
    for kind, count in study["passed"].items():
        interval = study["intervals"][kind]
        low, high = 100 * interval["low"], 100 * interval["high"]
        rows.append([_PUBLISHED[kind], f"{count}/{study['n']}", f"{low:.0f}-{high:.0f}"])
    title = f"for comparison: {study['of']}"
    return output.table(["condition", "passed", "95%"], rows, title=title)


_PUBLISHED = {
    "identity": "identity only",
    "factual": "identity + factual r2",
    "again": "identity + identity",
    "factual_second": "identity + factual r8",
    "base_factual": "base + factual r2",
    "base": "base",
}
