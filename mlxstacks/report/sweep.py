"""What a sweep over ranks says: losses, what each fuse would keep, live buffers."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.train import curve, loss_plot
from mlxstacks.report.values import Value, estimate
from mlxstacks.study.render.drawings import Dot, draw_heat_map, draw_intervals
from mlxstacks.study.render.words import listed, nbytes, number, percent


def sweep_content(document: Value, mark: Mark) -> Content:
    if document["status"].text == "planned":
        return Content("planned", document["verdict"].text or "")
    rows = document["matrix"].each()
    policies = list(dict.fromkeys(name for row in rows for name in row["survival"].names()))
    labels = _labels(rows)
    blocks: list[Block] = []
    if rows and policies:
        blocks.append(_survival_plot(rows, labels, policies, mark))
    curves = {}
    one_point = labels == [f"rank {row['rank'].count}" for row in rows]
    for cell in document["cells"].each():
        found = curve(cell["figures"]["validation"], "validation_loss")
        if found:
            curves[_cell_name(cell, one_point)] = found
    if curves:
        blocks.append(loss_plot("losses", mark("Validation loss of the cells"), curves))
    blocks += [
        _survival_table(rows, labels, policies, mark), _means_table(rows, labels, mark),
        _difference_table(document, mark), _cell_table(document, mark),
    ]  # fmt: skip
    return Content(_outcome(document), document["verdict"].text or "", tuple(blocks))


def _labels(rows: list[Value]) -> list[str]:
    """Rank alone where all else is equal."""
    points = {(r["layers"].text, r["projections"].text, r["bits"].count) for r in rows}
    if len(points) < 2:
        return [f"rank {row['rank'].count}" for row in rows]
    return [
        f"rank {row['rank'].count}, {row['layers'].text}, {row['projections'].text}"
        + (f", {row['bits'].count} bits" if row["bits"] else "")
        for row in rows
    ]


def _cell_name(cell: Value, one_point: bool) -> str:
    about = cell["cell"]
    if one_point and about["rank"]:
        return f"rank {about['rank'].count}, seed {about['seed'].count}"
    return cell["name"].text or "?"


def _outcome(document: Value) -> str:
    found = [
        one for one in document["differences"].each() if one["what"].text == "last_validation_loss"
    ]
    said = list(dict.fromkeys(one["finding"].text or "not judged" for one in found))
    return f"effect of rank on loss: {listed(said)}" if said else "no two ranks to compare"


def _survival_plot(rows: list[Value], labels: list[str], policies: list[str], mark: Mark) -> Plot:
    values = [
        [_percent(row["survival"][policy]["mean"].number) for policy in policies] for row in rows
    ]
    title = mark("Survival of the adapter in a fuse, <F,D>/<D,D>")
    known = [v for line in values for v in line if v is not None]
    span = f"{min(known):.0f} to {max(known):.0f}%" if known else "nothing measured"
    alt = f"{title}. Rows: {listed(labels)}; columns: {listed(policies)}; {span}."
    draw = partial(
        draw_heat_map, rows=labels, columns=policies, values=values, title=title,
        xlabel="policy of the fuse", ylabel="", unit="survival, %",
        form="{:.0f}%", limits=(0, 100),
    )  # fmt: skip
    return Plot("survival", title, alt, draw)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _survival_table(rows: list[Value], labels: list[str], policies: list[str], mark: Mark) -> Block:
    cells: list[list[Cell]] = [
        [
            label, policy, estimate(row["correlation"][policy]),
            estimate(row["survival"][policy], digits=1, scale=100),
            nbytes(row["extra_bytes"][policy].number),
        ]
        for label, row in zip(labels, rows, strict=True)
        for policy in policies
    ]  # fmt: skip
    columns = ("rank", "policy", "correlation", "survival, %", "more bytes")
    note = f"Means over seeds{_seed_counts(rows)}, 95% intervals. Survival: <F,D>/<D,D>."
    return table(mark("Correlation and survival of a fuse"), columns, cells, note=note)


def _seed_counts(rows: list[Value]) -> str:
    counts = {
        number(interval["n"].number)
        for row in rows
        for _, interval in row["survival"].items()
        if interval["n"]
    }
    return f" (n = {listed(sorted(filter(None, counts)))})" if counts else ""


def _means_table(rows: list[Value], labels: list[str], mark: Mark) -> Block:
    measures = list(dict.fromkeys(name for row in rows for name in row["means"].names()))
    cells: list[list[Cell]] = [
        [name, *(_mean(name, row["means"][name]) for row in rows)] for name in measures
    ]
    return table(mark("Means over seeds"), ("measure", *labels), cells,
                 note="Losses in nats a token.")  # fmt: skip


def _mean(name: str, found: Value) -> Cell:
    if name.endswith(("_bytes", "buffers")):
        value = found["mean"].number
        return nbytes(value) if name.endswith("_bytes") else number(value, 6)
    return estimate(found)


def _difference_table(document: Value, mark: Mark) -> Block:
    cells: list[list[Cell]] = [
        [
            one["what"].text, number(one["low_rank"].number), number(one["high_rank"].number),
            estimate(one["difference"], digits=4, sign=True), one["finding"].text,
        ]
        for one in document["differences"].each()
    ]  # fmt: skip
    columns = ("measure", "low rank", "high rank", "high less low", "an effect is")
    return table(mark("Highest rank less lowest, seed by seed"), columns, cells)


def _cell_table(document: Value, mark: Mark) -> Block:
    cells: list[list[Cell]] = [
        [cell["name"].text, cell["status"].text, cell["reason"].text or ""]
        for cell in document["cells"].each()
    ]
    return table(mark("Cells"), ("cell", "status", "why"), cells, folded=True)


def buffers_content(document: Value, mark: Mark) -> Content:
    """Of `sweep buffers`: does rank move the number of live buffers?"""
    analysis = document["analysis"]
    found = analysis["comparisons"].each()
    margin = document["settings"]["margin"].number
    dots = [
        Dot(
            f"rank {one['rank'].count}, {_condition(one)}",
            _percent(one["equivalence"]["mean"].number),
            _percent(one["equivalence"]["low"].number), _percent(one["equivalence"]["high"].number),
        )
        for one in found
    ]  # fmt: skip
    blocks: list[Block] = []
    if dots:
        title = mark("Live buffers by rank")
        references = {"no difference": 0.0}
        if margin is not None:
            references |= {"margin below": -100 * margin, "margin above": 100 * margin}
        said = listed(f"{dot.label} {number(dot.value) or 'not measured'}%" for dot in dots)
        draw = partial(
            draw_intervals, dots=dots, xlabel="difference to the lowest rank, %", title=title,
            references=references, form="{:+.2f}",
        )  # fmt: skip
        blocks.append(Plot("buffers", title, f"{title}, less the lowest rank: {said}.", draw))
    cells: list[list[Cell]] = [
        [
            _condition(one), number(one["rank"].number),
            estimate(one["equivalence"], digits=3, scale=100, sign=True),
            estimate(one["difference"], digits=3, scale=100, sign=True),
            percent(one["largest"].number, 3),
        ]
        for one in found
    ]  # fmt: skip
    columns = ("condition", "rank", "90% interval, %", "family's interval, %", "largest of a step")
    blocks.append(table(mark("Difference to the lowest rank"), columns, cells))
    controls: list[list[Cell]] = [
        [name, percent(effect.number)] for name, effect in analysis["controls"].items()
    ]
    blocks.append(
        table(mark("Positive control: what row length does"), ("runs", "effect"), controls)
    )
    outcome = analysis["outcome"].text or "planned"
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _condition(one: Value) -> str:
    return listed(one["condition"].texts())
