"""What a routing profile says: divergence by group and layer beside shuffled labels."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.plots import draw_curves, draw_heat_map
from mlxstacks.report.values import Value
from mlxstacks.report.words import fixed, listed, number, p_value

_SCALE = 1000.0
_ABOUT_GROUPS = (
    "KL: how far a group's shares of the experts are from the mean of all groups; 0: the same. Top "
    "layers: where it is largest. By excess: where it exceeds that of shuffled labels most."
)
_ABOUT_JACCARD = (
    "Jaccard: layers that two groups both have on top, of those that either has; 1: the same, 0: "
    "none. p: how often chance gives as much or more."
)
_ABOUT_LAYERS = (
    "JS: mean divergence of the groups at a layer; shuffled: the same when prompts are dealt to "
    "the groups by chance; p (adjusted): how often chance gives as much, for so many layers. "
    "Jaccard of the groups' most chosen experts; the last p: how often chance gives so little."
)
_ABOUT_OVERLAP = "p: how often shuffled labels give so little in common."


def profile_content(document: Value, mark: Mark) -> Content:
    tables = document["tables"]
    if not tables:
        return Content("planned", document["verdict"].text or "")
    layers = [number(row["layer"].number) or "?" for row in tables["layers"].each()]
    groups = tables["divergence"]["kl_nats"].names()
    blocks: list[Block] = []
    if groups and layers:
        blocks += [
            _heat_map(tables, groups, layers, mark), _layer_plot(tables, mark),
            _jaccard_map(tables, groups, mark),
        ]  # fmt: skip
    blocks += [
        _group_table(document, groups, mark), _jaccard_table(tables, mark),
        _layer_table(tables, mark), _overlap_table(tables, mark),
    ]  # fmt: skip
    found = tables["divergence"]
    told = "routing differs" if _differs(document) else "no difference shown"
    outcome = f"{told}, p = {p_value(_p(found)) or 'not measured'}"
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _p(divergence: Value) -> float | None:
    return divergence["p"].number


def _differs(document: Value) -> bool:
    p, alpha = _p(document["tables"]["divergence"]), document["settings"]["alpha"].number
    return p is not None and alpha is not None and p < alpha


def _scaled(values: list[float | None]) -> list[float | None]:
    return [None if value is None else _SCALE * value for value in values]


def _heat_map(tables: Value, groups: list[str], layers: list[str], mark: Mark) -> Plot:
    by_group = tables["divergence"]["kl_nats"]
    values = [_scaled(by_group[name].numbers()) for name in groups]
    values = [(row + [None] * len(layers))[: len(layers)] for row in values]
    title = mark("Routing by group and layer: divergence from the pooled routing")
    tops = tables["top_layers"]["by_kl"]
    alt = f"{title}, {len(groups)} groups by {len(layers)} layers. Highest in " + listed(
        f"{name}: layers {listed(number(layer) or '?' for layer in tops[name].numbers())}"
        for name in groups
    )
    draw = partial(
        draw_heat_map, rows=groups, columns=layers, values=values, title=title, xlabel="layer",
        ylabel="group", unit="KL, nats / 1000", form="{:.1f}", limits=(0.0, None),
    )  # fmt: skip
    return Plot("divergence", title, f"{alt}.", draw)


def _layer_plot(tables: Value, mark: Mark) -> Plot:
    title = mark("Divergence by layer, beside shuffled labels")
    keys = {"groups (mean)": "jensen_shannon_nats", "shuffled labels": "shuffled_nats"}
    curves = {}
    for said, key in keys.items():
        pairs = [(row["layer"].number, row[key].number) for row in tables["layers"].each()]
        curves[said] = [(x, _SCALE * y) for x, y in pairs if x is not None and y is not None]
    spans = listed(
        f"{said} {number(min(y for _, y in points), 3)} to {number(max(y for _, y in points), 3)}"
        for said, points in curves.items()
        if points
    )
    draw = partial(draw_curves, curves=curves, xlabel="layer", ylabel="nats / 1000", title=title)
    return Plot("layers", title, f"{title}, thousandths of a nat: {spans}.", draw)


def _jaccard_map(tables: Value, groups: list[str], mark: Mark) -> Plot:
    k = tables["top_layers"]["k"].count
    values = [row.numbers() for row in tables["jaccard_matrix"].each()]
    found = tables["jaccard"][str(k)]
    title = mark(f"Do groups share their top {k} layers? Jaccard of the sets")
    alt = (
        f"{title}. Mean {number(found['mean'].number, 3)}, random layers "
        f"{number(found['chance'].number, 3)}, shuffled labels "
        f"{number(found['shuffled'].number, 3)}."
    )
    draw = partial(
        draw_heat_map, rows=groups, columns=groups, values=values, title=title, xlabel="group",
        ylabel="group", unit="Jaccard", limits=(0.0, 1.0),
    )  # fmt: skip
    return Plot("jaccard", title, alt, draw)


def _group_table(document: Value, groups: list[str], mark: Mark) -> Block:
    tables = document["tables"]
    about = {one["name"].text: one for one in document["groups"].each()}
    rows: list[list[Cell]] = []
    for name in groups:
        one = about.get(name, document["groups of another report"])
        kl = [v for v in tables["divergence"]["kl_nats"][name].numbers() if v is not None]
        tops = tables["top_layers"]
        rows.append([
            name, number(one["prompts"].number), number(one["tokens"].number),
            fixed(sum(kl) / len(kl) if kl else None, 4),
            listed(number(layer) or "?" for layer in tops["by_kl"][name].numbers()),
            listed(number(layer) or "?" for layer in tops["by_excess"][name].numbers()),
        ])  # fmt: skip
    k = tables["top_layers"]["k"].count
    columns = ("group", "prompts", "tokens", "mean KL, nats", f"top {k} layers",
               f"top {k} by excess")  # fmt: skip
    return table(mark("Groups"), columns, rows, note=_ABOUT_GROUPS)


def _jaccard_table(tables: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            k, fixed(row["mean"].number), fixed(row["chance"].number),
            p_value(row["p_random_layers"].number), fixed(row["shuffled"].number),
            p_value(row["p_shuffled"].number),
        ]
        for k, row in tables["jaccard"].items()
    ]  # fmt: skip
    columns = ("top layers", "mean Jaccard", "random layers", "p", "shuffled labels", "p")
    title = mark("Shared layers, by how many are taken")
    return table(title, columns, rows, note=_ABOUT_JACCARD)


def _layer_table(tables: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            number(row["layer"].number), fixed(row["jensen_shannon_nats"].number, 4),
            fixed(row["shuffled_nats"].number, 4), p_value(row["p_adjusted"].number),
            fixed(row["expert_overlap"].number), fixed(row["shuffled_expert_overlap"].number),
            p_value(row["expert_overlap_p"].number),
        ]
        for row in tables["layers"].each()
    ]  # fmt: skip
    columns = ("layer", "JS, nats", "shuffled", "p (adjusted)", "Jaccard of top experts",
               "shuffled", "p")  # fmt: skip
    return table(mark("Layers"), columns, rows, note=_ABOUT_LAYERS)


def _overlap_table(tables: Value, mark: Mark) -> Block:
    found = tables["expert_overlap"]
    layers = listed(number(layer) or "?" for layer in found["layers"].numbers())
    kind = "shared layers" if found["layers_are_shared"].flag else "layers of highest divergence"
    rows: list[list[Cell]] = [
        [f"in the {kind}", layers],
        ["experts that are compared", number(found["top_experts"].number)],
        ["mean Jaccard of their sets", fixed(found["mean"].number)],
        ["with shuffled labels", fixed(found["shuffled"].number)],
        ["p", p_value(found["p"].number)],
        ["of random experts", fixed(found["chance_of_random_experts"].number)],
    ]
    title = mark("Do groups go to other experts?")
    return table(title, ("what", "value"), rows, note=_ABOUT_OVERLAP)
