"""Prints what `mlxstacks profile` found, or what it would measure."""

from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.experiments.profile.report import ProfileReport

# A model of 40 layers has 40 rows: those of highest divergence are shown, all are in the report.
_MOST_LAYERS = 12
_ABOUT_GROUPS = (
    "KL: how far a group's shares of the experts are from the mean of all groups; 0: the same. Top "
    "layers: where it is largest. By excess: where it exceeds that of shuffled labels most.\n"
)
_ABOUT_JACCARD = (
    "Jaccard: layers that two groups both have on top, of those that either has; 1: the same, 0: "
    "none. p: how often chance gives as much or more.\n"
)
_ABOUT_LAYERS = (
    "JS: mean divergence of the groups at a layer; shuffled: the same when prompts are dealt to "
    "the groups by chance. Jaccard: of the groups' most chosen experts; p: of so little.\n"
)


def render(console: "Console", report: "ProfileReport") -> None:
    """The plan; then groups with their layers, Jaccard by k, layers, the verdict."""
    if report.status == "planned":
        _render_plan(console, report)
        return
    console.print(_group_table(report))
    console.print(_ABOUT_GROUPS, markup=False, style="dim")
    console.print(_jaccard_table(report.tables))
    console.print(_ABOUT_JACCARD, markup=False, style="dim")
    console.print(_layer_table(report))
    console.print(_ABOUT_LAYERS, markup=False, style="dim")
    for note in (*report.power, *report.notes):
        console.print(note, markup=False, style="dim")
    plots = f", plots {', '.join(report.plots)}" if report.plots else ""
    size = output.bytes_text(report.peak_bytes)
    console.print(
        f"Plan {str(report.plan_sha256)[:16]}, {report.seconds:.0f} s, peak {size}. Wrote "
        f"{report.save_path}: profile_report.json, profile.md{plots}.",
        markup=False,
    )
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _render_plan(console: "Console", report: "ProfileReport") -> None:
    plan = report.plan
    if plan is not None:
        layers = plan["layers"]
        facts: dict[str, output.Cell] = {
            "hypothesis": plan["hypothesis"],
            "model": f"{len(layers)} layers with {plan['experts']} experts each",
            "prompts": ", ".join(f"{name} {n}" for name, n in plan["prompts"].items()),
            "tokens": f"{plan['tokens_per_group']:,} of each group",
            "test": plan["test"],
            "smallest p": f"{plan['least_p']:.4f}",
            "bias": f"about {plan['expected_bias_nats']:.4f} nats at least, if nothing differs",
        }
        console.print(output.details(facts))
    for line in report.power:
        console.print(line, markup=False, style="dim")
    for note in report.notes:
        console.print(note, markup=False)
    name = f"Plan {str(report.plan_sha256)[:16]}. " if plan else ""
    console.print(f"{name}Planned only: would write {report.save_path}.", markup=False)


def _group_table(report: "ProfileReport") -> object:
    tables = report.tables
    tops, kl = tables["top_layers"], tables["divergence"]["kl_nats"]
    rows: list[list[output.Cell]] = []
    for group in report.groups:
        name = group["name"]
        mean = sum(kl[name]) / len(kl[name])
        rows.append([
            name, group["prompts"], group["tokens"], f"{mean:.4f}", _listed(tops["by_kl"][name]),
            _listed(tops["by_excess"][name]),
        ])  # fmt: skip
    columns = ["group", "prompts", "tokens", "KL, nats", f"top {tops['k']} layers", "by excess"]
    title = "divergence from the pooled routing, mean over layers"
    return output.table(columns, rows, title=title)


def _jaccard_table(tables: dict[str, Any]) -> object:
    keys = ("mean", "chance", "p_random_layers", "shuffled", "p_shuffled")
    rows: list[list[output.Cell]] = [
        [f"top {k}", *(f"{row[key]:.4f}" for key in keys)] for k, row in tables["jaccard"].items()
    ]
    columns = ["", "groups", "random layers", "p", "shuffled labels", "p"]
    return output.table(columns, rows, title="mean Jaccard of the groups' top layers")


def _layer_table(report: "ProfileReport") -> object:
    rows: list[list[output.Cell]] = []
    pairs = zip(report.tables["layers"], report.about_layers, strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[0]["jensen_shannon_nats"])[:_MOST_LAYERS]
    for row, about in sorted(ordered, key=lambda pair: int(pair[0]["layer"])):
        rows.append([
            row["layer"], about["attention"], f"{row['jensen_shannon_nats']:.4f}",
            f"{row['shuffled_nats']:.4f}", f"{row['p_adjusted']:.3f}",
            f"{row['expert_overlap']:.3f}", f"{row['shuffled_expert_overlap']:.3f}",
            f"{row['expert_overlap_p']:.3f}",
        ])  # fmt: skip
    columns = ["layer", "attention", "JS, nats", "shuffled", "p", "Jaccard",
               "shuffled", "p"]  # fmt: skip
    more = len(report.about_layers) - len(rows)
    title = "divergence (p adjusted) and Jaccard of top experts (p plain)"
    if more:
        title += f"; {more} lower ones left out"
    return output.table(columns, rows, title=title)


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
