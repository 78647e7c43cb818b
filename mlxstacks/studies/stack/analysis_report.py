"""What `mlxstacks stacks analyse` shows of its figures: tables, plots, a verdict."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxstacks.studies.stack.report import matrix_blocks
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Table

Figures = Mapping[str, Any]
ABOUT = {
    "kind": "stacks analyse",
    "title": "Analysis of stacks",
    "question": "Do the stacks of different domains share directions, and does their routing tell "
    "domains apart?",
}
# Of plots that there is one of for each stack or projection; all their figures are data.
MOST_PLOTS = 9
_ENDS = ("low", "high")
_LOADS = {"gate": "mean gate weight", "dispatch": "share of tokens that choose it"}


def blocks(data: Figures) -> tuple[Block, ...]:
    """Every table and plot that there are numbers for, questions between domains first."""
    geometry, routing = data["geometry"], data["routing"]
    sources = {name: geometry[name] for name in ("weights", "data") if geometry[name]}
    shared = {name: table for name, table in sources.items() if table["pairs"]}
    stacks = routing["stacks"] if routing else {}
    points = routing["points"] if routing else None
    return (
        *_cosine_blocks(shared),
        *_separation_blocks(points),
        *([_distance_table(stacks)] if any(s["domain_distance"] for s in stacks.values()) else []),
        *([_load_table(what, stacks) for what in _LOADS] if stacks else []),
        *_load_plots(stacks),
        _spectrum_table(geometry["spectra"]),
        *_spectrum_plots(geometry["spectra"]),
        domain_table(data["domains"]),
        *_loss_plots(data["domains"]),
        *matrix_blocks(data["matrix"]),
    )


def left_out(data: Figures) -> list[str]:
    """Notes on the plots that are not drawn."""
    spectra, routing = data["geometry"]["spectra"].values(), data["routing"]
    counts = {
        "stacks": len(routing["stacks"]) if routing else 0,
        "projections": len({kind for stack in spectra for kind in stack["by_projection"]}),
    }
    return [
        f"Plots show the first {MOST_PLOTS} of {count} {things}."
        for things, count in counts.items()
        if count > MOST_PLOTS
    ]


def domain_table(domains: Sequence[Figures]) -> Table:
    rows = tuple(
        (domain["name"], domain["enabled"], len(domain["stacks"]), domain["bytes"],
         " -> ".join(f"{loss:.3f}" for loss in domain["losses"]) or None,
         (domain["protected"] or {}).get("captured_energy_mean"),
         (domain["protected"] or {}).get("capacity_used_highest"))
        for domain in domains
    )  # fmt: skip
    return Table(
        id="domains", title="Domains, in the order of training", rows=rows,
        columns=(
            Column(name="domain"), Column(name="served"), Column(name="stacks", kind="count"),
            Column(name="size", kind="bytes"), Column(name="validation loss"),
            Column(name="energy held", kind="share", digits=0),
            Column(name="capacity used", kind="share", digits=0),
        ),
    )  # fmt: skip


# --- directions -----------------------------------------------------------------------------------


def _cosine_blocks(shared: Figures) -> Iterator[Block]:
    for source, table in shared.items():
        names, matrix = list(table["matrix"]), table["matrix"]
        title = f"Largest cosine of {table['directions']} directions from {source}"
        caption = f"Mean over projections; random directions {table['mean_chance']:.3f}."
        yield Plot(
            id=f"cosines-{source}", title=title, kind="heat map", categories=tuple(names),
            # The diagonal, 1 by definition, would take the scale.
            series=tuple(
                Series(label=a, y=tuple(None if a == b else matrix[a][b] for b in names))
                for a in names
            ),
            unit="largest |cosine|, mean", form="{:.2f}", limits=(0.0, None),
            alt=f"{title} between domains. {caption} Mean over pairs {table['mean']:.3f}.",
        )  # fmt: skip
        yield Table(
            id=f"cosine-table-{source}", title=title, caption=caption,
            columns=(Column(name="domain"),
                     *(Column(name=f"with {b}", kind="number", digits=3) for b in names)),
            rows=tuple((a, *(matrix[a][b] for b in names)) for a in names),
        )  # fmt: skip
    if shared:
        yield _by_projection(shared)


def _by_projection(shared: Figures) -> Plot:
    """A row a projection: mean over pairs and layers, beside that of random directions."""
    kinds = list(dict.fromkeys(kind for t in shared.values() for kind in t["by_projection"]))
    series = [
        Series(label=label, y=tuple(table["by_projection"].get(k, {}).get(key) for k in kinds))
        for source, table in shared.items()
        for label, key in ((f"from {source}", "mean"), (f"chance, {source}", "mean_chance"))
    ]
    means = ", ".join(f"{source} {table['mean']:.3f}" for source, table in shared.items())
    return Plot(
        id="cosines-by-projection", title="Largest cosine between domains, by projection",
        kind="series", categories=tuple(kinds), series=tuple(series),
        x_label="largest |cosine|, mean over pairs and layers",
        alt=f"Mean largest cosine between domains' directions by projection; over all: {means}.",
    )  # fmt: skip


def _spectrum_table(stacks: Figures) -> Table:
    keys = {"effective_rank": "effective rank", "stable_rank": "stable rank",
            "value_16": "16th value / 1st"}  # fmt: skip
    return Table(
        id="spectra", title="Spectra of the stacks' deltas, mean over projections",
        columns=(Column(name="stack"),
                 *(Column(name=name, kind="number", digits=2) for name in keys.values())),
        rows=tuple(
            (name, *((stack[key] or {}).get("mean") for key in keys))
            for name, stack in stacks.items()
        ),
    )  # fmt: skip


def _spectrum_plots(stacks: Figures) -> Iterator[Plot]:
    """Normalised singular values, a plot a projection, a line a stack."""
    kinds = dict.fromkeys(kind for stack in stacks.values() for kind in stack["by_projection"])
    for number, kind in enumerate(list(kinds)[:MOST_PLOTS], 1):
        series = tuple(
            Series(label=name, x=tuple(range(1, len(values) + 1)), y=tuple(values))
            for name, stack in stacks.items()
            if (values := stack["by_projection"].get(kind, {}).get("values"))
        )
        if series:
            ends = ", ".join(f"{line.label} {line.y[-1]:.2g}" for line in series)
            yield Plot(
                id=f"spectra-{number}", title=f"Spectra at {kind}", kind="lines", series=series,
                x_label="singular value, by size", y_label="value over the largest",
                alt=f"Singular values over the largest at {kind}; the last: {ends}.",
            )  # fmt: skip


# --- routing --------------------------------------------------------------------------------------


def _load_table(what: str, stacks: Figures) -> Table:
    most = max(stack["experts"] for stack in stacks.values())
    rows: list[tuple[Cell, ...]] = []
    for name, stack in stacks.items():
        for domain, load in stack["on"].items():
            means = [_interval(expert) for expert in load[what]]
            more = [None] * (most - len(means))
            rows.append((name, domain, *means, *more, stack[f"uniform_{what}"]))
    experts = (Column(name=f"expert {e}", kind="number", digits=3) for e in range(most))
    return Table(
        id=f"load-{what}", title=f"Experts of a stack: {_LOADS[what]}, mean over projections",
        columns=(Column(name="stack"), Column(name="rows of"), *experts,
                 Column(name="uniform", kind="number", digits=3)),
        rows=tuple(rows), caption="With 95% intervals over prompts.",
    )  # fmt: skip


def _load_plots(stacks: Figures) -> Iterator[Plot]:
    """A row an expert, a dot a domain's rows."""
    for what, words in _LOADS.items():
        for number, (name, stack) in enumerate(list(stacks.items())[:MOST_PLOTS], 1):
            uniform = stack[f"uniform_{what}"]
            yield Plot(
                id=f"experts-{what}-{number}", title=f"Stack {name}: {words}", kind="intervals",
                categories=tuple(f"expert {expert}" for expert in range(stack["experts"])),
                series=tuple(
                    Series(
                        label=f"rows of {domain}", y=tuple(e["mean"] for e in load[what]),
                        low=tuple(e["low"] for e in load[what]),
                        high=tuple(e["high"] for e in load[what]),
                    )
                    for domain, load in stack["on"].items()
                ),
                x_label=f"{words}, 95% intervals over prompts", references={"uniform": uniform},
                alt=f"{words.capitalize()} of the experts of stack {name}, by domain of the rows; "
                f"uniform would be {uniform:.3g}.",
            )  # fmt: skip


def _distance_table(stacks: Figures) -> Table:
    """Domains against each other inside a stack: averaged over projections, and one by one."""
    rows = tuple(
        (name, min(on["load_entropy_by_projection"] for on in stack["on"].values()),
         stack["largest_gate_difference"], distance["distance"],
         stack["domain_distance_of_random_routers"]["distance"], distance["permuted"],
         distance["p"])
        for name, stack in stacks.items()
        if (distance := stack["domain_distance"])
    )  # fmt: skip
    names = ("load entropy", "gate difference", "by projection", "random router", "shuffled")
    return Table(
        id="distances", title="Domains inside a stack", rows=rows,
        columns=(Column(name="stack"), *(Column(name=n, kind="number", digits=3) for n in names),
                 Column(name="p", kind="p")),
        caption="Gate difference: largest of two domains, projections averaged. By projection: "
        "half the sum of absolute differences of mean gates.",
    )  # fmt: skip


def _separation_blocks(points: Figures | None) -> Iterator[Block]:
    if points is None:
        return
    trained, random = points["separation"], points["separation_of_random_routers"]
    title = "Routing of prompts, two principal components"
    if trained:
        title = (
            f"Domain told from routing: {trained['accuracy']:.0%} (random routers "
            f"{random['accuracy']:.0%}, chance {trained['chance']:.0%})"
        )
        yield _separation_table(points)
    labels, coordinates = points["labels"], points["coordinates"]
    if all(len(point) == 2 for point in coordinates):
        series = tuple(
            Series(label=name, x=tuple(x for x, _ in members), y=tuple(y for _, y in members))
            for name in dict.fromkeys(labels)
            if (
                members := [
                    p for p, label in zip(coordinates, labels, strict=True) if label == name
                ]
            )
        )
        first, second = points["explained"]
        yield Plot(
            id="routing-components", title=title, kind="points", series=series,
            x_label=f"component 1, {first:.0%} of the variance of mean gates",
            y_label=f"component 2, {second:.0%}",
            alt=f"Two principal components of the mean gates, a point a prompt. {title}.",
        )  # fmt: skip


def _separation_table(points: Figures) -> Table:
    named = {
        "all projections": points["separation"],
        "random routers": points["separation_of_random_routers"],
        "two components": points["separation_on_two_components"],
        "projections averaged": points["separation_of_averages"],
        **{f"stack {name}": found for name, found in points["separation_by_stack"].items()},
    }
    return Table(
        id="separation", title="A prompt's domain from its routing, nearest centroid",
        columns=(
            Column(name="routing of"), Column(name="right", kind="share", digits=0),
            Column(name="chance", kind="share", digits=0),
            Column(name="shuffled", kind="share", digits=0), Column(name="p", kind="p"),
            Column(name="silhouette", kind="number", digits=2),
        ),
        rows=tuple(
            (name, (s["accuracy"], s["interval"]["low"], s["interval"]["high"]), s["chance"],
             s["permuted_accuracy"], s["p"], s["silhouette"])
            for name, s in named.items()
            if s
        ),
        caption=f"n = {points['separation']['n']} prompts, 95% intervals.",
    )  # fmt: skip


def _interval(mean: Figures) -> Cell:
    low, high = mean["low"], mean["high"]
    return mean["mean"] if low is None or high is None else (mean["mean"], low, high)


# --- losses ---------------------------------------------------------------------------------------


def _loss_plots(domains: Sequence[Figures]) -> Iterator[Plot]:
    """Over the optimizer steps of each domain; of domains without a log, after their rounds."""
    curves = {domain["name"]: _curve(domain["curve"]) for domain in domains if domain["curve"]}
    rounds: dict[str, list[tuple[float, float]]] = {
        domain["name"]: list(enumerate(domain["losses"]))
        for domain in domains
        if domain["losses"] and not domain["curve"]
    }
    for id, lines, x_label in (
        ("losses", curves, "optimizer step, all rounds"),
        ("losses-by-round", rounds, "rounds trained"),
    ):
        if lines:
            ends = ", ".join(f"{name} {points[-1][1]:.3g}" for name, points in lines.items())
            yield Plot(
                id=id, title="Validation loss by domain", kind="lines",
                series=tuple(
                    Series(label=name, x=tuple(x for x, _ in line), y=tuple(y for _, y in line))
                    for name, line in lines.items()
                ),
                x_label=x_label, y_label="validation loss, nats a token",
                alt=f"Validation loss by domain; at the end {ends}.",
            )  # fmt: skip


def _curve(curve: Sequence[Figures]) -> list[tuple[float, float]]:
    """(step, loss), the steps of earlier rounds counted on."""
    points: list[tuple[float, float]] = []
    start, number = 0.0, None
    for point in curve:
        if point["round"] != number:
            number, start = point["round"], points[-1][0] if points else 0.0
        points.append((start + point["step"], point["validation_loss"]))
    return points


# --- in words -------------------------------------------------------------------------------------


def outcome(geometry: Figures) -> str:
    mean = geometry["weights"]["mean"]
    return "cosine not measured" if mean is None else f"cosine {mean:.3f}"


def verdict(geometry: Figures, routing: Figures | None) -> str:
    """What the numbers say, a sentence each."""
    words = []
    for source in ("weights", "data"):
        table = geometry[source]
        if table and table["pairs"]:
            words.append(
                f"Directions from {source}: domains share a largest cosine of {table['mean']:.3f} "
                f"on average, random directions {table['mean_chance']:.3f}."
            )
    if routing:
        gates, shares = (_range(routing["stacks"].values(), what) for what in ("gate", "dispatch"))
        words.append(
            f"Mean gate {gates[0]:.3f} to {gates[1]:.3f}, dispatch share {shares[0]:.3f} to "
            f"{shares[1]:.3f}."
        )
        points = routing["points"]
        if points and (separation := points["separation"]):
            right, (low, high) = separation["accuracy"], map(separation["interval"].get, _ENDS)
            random = points["separation_of_random_routers"]["accuracy"]
            words.append(
                f"A prompt's domain is told from its routing in {right:.0%} ({low:.0%} to "
                f"{high:.0%}, chance {separation['chance']:.0%}), from that of random routers in "
                f"{random:.0%}; silhouette {separation['silhouette']:.2f}."
            )
    return " ".join(words) or "Spectra only: one domain, and nothing was measured on data."


def _range(stacks: Sequence[Any], what: str) -> tuple[float, float]:
    means = [e["mean"] for stack in stacks for load in stack["on"].values() for e in load[what]]
    return min(means), max(means)
