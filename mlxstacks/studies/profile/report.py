"""What `mlxstacks profile` found, as a result: tables and plots for people, all figures as data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxstacks.studies.profile.analysis import verdict
from mlxstacks.studies.profile.routing_profile import shares
from mlxstacks.study.document import Block, Column, Plot, Series, Table

COUNTS = "routing_counts.safetensors"
# More groups, or more layers with a map of their experts, make a plot that no reader takes in.
MOST_SHOWN, MOST_EXPERT_MAPS = 40, 4
# KL is drawn in thousandths of a nat.
_SCALE = 1000.0


def outcome(tables: Mapping[str, Any], alpha: float) -> str:
    p = tables["divergence"]["p"]
    return f"{'routing differs' if p < alpha else 'no difference shown'}, p = {p:.2g}"


def verdict_of(tables: Mapping[str, Any], alpha: float) -> str:
    return " ".join(verdict(tables, alpha))


def plan_table(plan: Mapping[str, Any]) -> Table:
    """What is fixed before the first prompt."""
    rows = {
        "hypothesis": plan["hypothesis"],
        "model": f"{len(plan['layers'])} layers with {plan['experts']} experts each",
        "prompts": ", ".join(f"{name} {count}" for name, count in plan["prompts"].items()),
        "tokens": f"{plan['tokens_per_group']:,} of each group",
        "test": plan["test"],
        "smallest p": f"{plan['least_p']:.4f}",
        "bias": f"about {plan['expected_bias_nats']:.4f} nats at least, if nothing differs",
    }
    columns = (Column(name="what"), Column(name="value"))
    return Table(id="plan", title="The plan", columns=columns, rows=tuple(rows.items()))


def blocks(
    tables: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    about_layers: Sequence[Mapping[str, Any]],
    counts: np.ndarray,
) -> tuple[Block, ...]:
    """Plots, then tables. counts: choices (S, L, E) of the groups."""
    names = [group["name"] for group in groups][:MOST_SHOWN]
    layers = [row["layer"] for row in tables["layers"]]
    return (
        _divergence_map(tables, names, layers),
        _layer_lines(tables, layers),
        _jaccard_map(tables, names),
        *_expert_maps(tables, names, layers, counts),
        _group_table(tables, groups),
        _jaccard_table(tables),
        _layer_table(tables, about_layers),
        _overlap_table(tables["expert_overlap"]),
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _divergence_map(tables: Mapping[str, Any], names: list[str], layers: list[int]) -> Plot:
    kl, top = tables["divergence"]["kl_nats"], tables["top_layers"]["by_kl"]
    highest = ", ".join(f"{name}: layers {_listed(top[name])}" for name in names)
    title = "Routing by group and layer: divergence from the pooled routing"
    return Plot(
        id="divergence", title=title, kind="heat map",
        series=tuple(Series(label=n, y=tuple(_SCALE * value for value in kl[n])) for n in names),
        categories=tuple(map(str, layers)), x_label="layer", y_label="group",
        unit="KL, nats / 1000", form="{:.1f}", limits=(0.0, None),
        alt=f"{title}, {len(names)} groups by {len(layers)} layers. Highest in {highest}.",
    )  # fmt: skip


def _layer_lines(tables: Mapping[str, Any], layers: list[int]) -> Plot:
    keys = {"groups (mean)": "jensen_shannon_nats", "shuffled labels": "shuffled_nats"}
    lines = tuple(
        Series(label=label, x=tuple(layers), y=tuple(_SCALE * row[key] for row in tables["layers"]))
        for label, key in keys.items()
    )
    spans = ", ".join(
        f"{s.label} {min(y for y in s.y if y is not None):.3g} to "
        f"{max(y for y in s.y if y is not None):.3g}"
        for s in lines
    )
    title = "Divergence by layer, beside shuffled labels"
    return Plot(
        id="layers", title=title, kind="lines", series=lines, x_label="layer",
        y_label="nats / 1000", alt=f"{title}, thousandths of a nat: {spans}.",
    )  # fmt: skip


def _jaccard_map(tables: Mapping[str, Any], names: list[str]) -> Plot:
    k, matrix = tables["top_layers"]["k"], tables["jaccard_matrix"]
    jaccard = tables["jaccard"][str(k)]
    title = f"Do groups share their top {k} layers? Jaccard of the sets"
    series = tuple(
        Series(label=name, y=tuple(row[: len(names)]))
        for name, row in zip(names, matrix, strict=False)
    )
    return Plot(
        id="jaccard", title=title, kind="heat map", series=series, categories=tuple(names),
        x_label="group", y_label="group", unit="Jaccard", form="{:.2f}", limits=(0.0, 1.0),
        alt=f"{title}. Mean {jaccard['mean']:.3f}, random layers {jaccard['chance']:.3f}, shuffled "
        f"labels {jaccard['shuffled']:.3f}.",
    )  # fmt: skip


def _expert_maps(
    tables: Mapping[str, Any], names: list[str], layers: list[int], counts: np.ndarray
) -> list[Plot]:
    """Shares of experts at the layers whose experts are compared; experts by their pooled share."""
    p, maps = shares(counts), []
    for layer in tables["expert_overlap"]["layers"][:MOST_EXPERT_MAPS]:
        own = p[:, layers.index(layer)]  # (S, E)
        order = np.argsort(-own.mean(axis=0), kind="stable")
        percent = 100 * own[: len(names), order]
        title = f"Experts of layer {layer}, by their pooled share"
        maps.append(Plot(
            id=f"experts-{layer}", title=title, kind="heat map",
            series=tuple(
                Series(label=name, y=tuple(row.tolist()))
                for name, row in zip(names, percent, strict=True)
            ),
            categories=tuple(map(str, order)), x_label="expert", y_label="group", unit="percent",
            form="{:.0f}", limits=(0.0, None),
            alt=f"{title}: the first is {order[0]}, with {percent[:, 0].mean():.1f} percent.",
        ))  # fmt: skip
    return maps


def _group_table(tables: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Table:
    top, kl = tables["top_layers"], tables["divergence"]["kl_nats"]
    rows = tuple(
        (g["name"], g["prompts"], g["tokens"], float(np.mean(kl[g["name"]])),
         _listed(top["by_kl"][g["name"]]), _listed(top["by_excess"][g["name"]]))
        for g in groups
    )  # fmt: skip
    return Table(
        id="groups", title="Groups", rows=rows,
        columns=(
            Column(name="group"), Column(name="prompts", kind="count"),
            Column(name="tokens", kind="count"),
            Column(name="mean KL, nats", kind="number", digits=4),
            Column(name=f"top {top['k']} layers"), Column(name=f"top {top['k']} by excess"),
        ),
        caption="KL: how far a group's shares of the experts are from the mean of all groups; 0: "
        "the same. Top layers: where it is largest. By excess: where it exceeds that of shuffled "
        "labels most.",
    )  # fmt: skip


def _jaccard_table(tables: Mapping[str, Any]) -> Table:
    keys = ("mean", "chance", "p_random_layers", "shuffled", "p_shuffled")
    rows = tuple((k, *(row[key] for key in keys)) for k, row in tables["jaccard"].items())
    return Table(
        id="jaccard-table", title="Shared layers, by how many are taken", rows=rows,
        columns=(
            Column(name="top layers"), Column(name="mean Jaccard", kind="number", digits=4),
            Column(name="random layers", kind="number", digits=4),
            Column(name="p, random", kind="p"),
            Column(name="shuffled labels", kind="number", digits=4),
            Column(name="p, shuffled", kind="p"),
        ),
        caption="Jaccard: layers that two groups both have on top, of those that either has; 1: "
        "the same, 0: none. p: how often chance gives as much or more.",
    )  # fmt: skip


def _layer_table(tables: Mapping[str, Any], about_layers: Sequence[Mapping[str, Any]]) -> Table:
    bits = [about["expert_bits"] or "float" for about in about_layers]
    differ = len(set(bits)) > 1
    rows = tuple(
        (
            row["layer"], about["attention"], *([width] if differ else []),
            row["jensen_shannon_nats"], row["shuffled_nats"], row["p_adjusted"],
            row["expert_overlap"], row["shuffled_expert_overlap"], row["expert_overlap_p"],
        )
        for row, about, width in zip(tables["layers"], about_layers, bits, strict=True)
    )  # fmt: skip
    return Table(
        id="layer-table", title="Layers", rows=rows,
        columns=(
            Column(name="layer", kind="count"), Column(name="kind"),
            *([Column(name="bits of experts")] if differ else []),
            Column(name="JS, nats", kind="number", digits=4),
            Column(name="JS shuffled", kind="number", digits=4),
            Column(name="adjusted p", kind="p"),
            Column(name="Jaccard of top experts", kind="number", digits=3),
            Column(name="Jaccard shuffled", kind="number", digits=3),
            Column(name="Jaccard p", kind="p"),
        ),
        caption="Kind: of attention. JS: mean divergence of the groups at a layer; shuffled: the "
        "same when prompts are dealt to the groups by chance; adjusted p: how often chance gives "
        "as much, for so many layers. Jaccard of the groups' most chosen experts; its p: how often "
        "chance gives so little.",
    )  # fmt: skip


def _overlap_table(found: Mapping[str, Any]) -> Table:
    kind = "shared layers" if found["layers_are_shared"] else "layers of highest divergence"
    rows = (
        (f"in the {kind}", _listed(found["layers"])),
        ("experts that are compared", str(found["top_experts"])),
        ("mean Jaccard of their sets", f"{found['mean']:.3f}"),
        ("with shuffled labels", f"{found['shuffled']:.3f}"),
        ("p", f"{found['p']:.2g}"),
        ("of random experts", f"{found['chance_of_random_experts']:.3f}"),
    )
    return Table(
        id="experts", title="Do groups go to other experts?", rows=rows,
        columns=(Column(name="what"), Column(name="value")),
        caption="p: how often shuffled labels give so little in common.",
    )  # fmt: skip


def differing_bits(about_layers: Sequence[Mapping[str, Any]]) -> str | None:
    """A note where layers are not stored alike: a pattern of depth may then be one of bits."""
    for what, key in (("experts", "expert_bits"), ("routers", "router_bits")):
        by_bits: dict[Any, list[int]] = {}
        for about in about_layers:
            by_bits.setdefault(about[key], []).append(about["layer"])
        if len(by_bits) > 1:
            listed = "; ".join(f"{b or 'float'}: {_listed(n)}" for b, n in by_bits.items())
            return (
                f"The {what} have different bits in different layers ({listed}): a pattern over "
                "layers may come from that."
            )
    return None
