"""`mlxstacks stacks analyse`: what the frozen stacks of a store do, in numbers, tables and plots.

The store is only read. Weights are looked at domain by domain, without a model; unless that is all
that is asked for, the domains' validation rows then go through the base with all stacks on. They
are the rows that were held out when the domain was trained: the store has their ids, and the data
settings of the domain, which say where they come from.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import DomainDataSettings, encode_examples, read_domains
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory
from mlxstacks.files.settings import StacksAnalyseSettings
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.store_files import LOG
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.stack_files import SharedPairs, parts_of, serve
from mlxstacks.studies.stack.geometry import (
    Directions,
    Spectrum,
    cosines_json,
    data_directions,
    path_at,
    plane_json,
    shares_json,
    spectra_json,
    weights_of,
)
from mlxstacks.studies.stack.plan import stored_data
from mlxstacks.studies.stack.report import matrix_blocks, ordered_matrix, stored_json
from mlxstacks.studies.stack.routing import Prompt, routing_json, run_prompts
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table, cell_of
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.study.write import environment, write_result
from mlxstacks.training.modes import prepare_base

# Where an analysis writes and reads, not what it finds.
# A look at the weights of a domain counts as so many of its prompts.
_PROMPTS_OF_WEIGHTS = 8
_NOT_OF_THE_RESULT = {"force", "save_path"}
_OF_A_DOMAIN = ("name", "enabled", "origin", "stacks", "parameters", "bytes", "losses")
Progress = Callable[..., None]


def run(
    settings: StacksAnalyseSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Look, and write result and plots to `settings.save_path`.

    Raises: InputError: no store, model or target, or no enabled stack. StoreError: a damaged file,
        another base.
    """
    if settings.store_path is None:
        raise InputError(
            "stacks analyse needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("stacks analyse needs save_path")
    if (settings.layer is None) != (settings.projection is None):
        raise InputError("layer and projection pick the directions to draw together: give both")
    started = time.monotonic()
    target = user_path(settings.save_path)
    store = Store.open(settings.store_path)
    check_target(target, force=settings.force, inputs=[store.path])
    if not store.enabled_stacks():
        raise InputError(f"{store.path}: holds no enabled stack; there is nothing to look at")
    shown = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    curves = curves_of(store.path)
    data: dict[str, Any] = {
        "store_path": str(store.path),
        "settings_sha256": json_sha256(shown),
        "domains": [
            {
                **{key: value for key, value in stored_json(record).items() if key in _OF_A_DOMAIN},
                "curve": curves.get(record.name, []),
                # Captured energy and capacity used; by projection it is in the store's manifest.
                "protected": {
                    key: value
                    for key, value in (record.protected or {}).items()
                    if key != "projections"
                }
                or None,
            }
            for record in store.manifest.domains
        ],
        "matrix": ordered_matrix(store.manifest),
    }
    planned = Result(
        **ABOUT, status="planned", settings=shown, data=plain(data), directory=str(target),
        blocks=(domain_table(data["domains"]),),
    )  # fmt: skip
    if dry_run:
        return planned
    notes: list[str] = []
    geometry, routing = _look(settings, store, notes, progress)
    data = plain(data | {"geometry": geometry, "routing": routing})
    notes += left_out(data) if settings.plots else []
    result = planned.model_copy(update={
        "status": "done", "outcome": outcome(geometry), "verdict": verdict(geometry, routing),
        "environment": environment(time.monotonic() - started), "data": data,
        "blocks": tuple(blocks(data)), "notes": tuple(notes),
    })  # fmt: skip
    formats = [settings.plot_format] if settings.plots else []
    with staged_directory(target, force=settings.force, inputs=[store.path]) as directory:
        return write_result(result, directory, target, formats)


def _look(
    settings: StacksAnalyseSettings, store: Store, notes: list[str], progress: Progress | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(geometry, routing); of the weights one domain in memory at a time."""
    k, pairs = settings.directions, SharedPairs(store)
    spectra: dict[str, dict[str, Spectrum]] = {}  # by stack and path
    from_weights: dict[str, Directions] = {}  # by domain and path
    domains = [record for record in store.manifest.domains if record.enabled and record.stacks]
    sizes = len(domains) * _PROMPTS_OF_WEIGHTS, len(domains) * settings.prompts
    whole = WholeProgress(progress, sizes[0] if settings.weights_only else sum(sizes))
    of_weights = whole.part(sizes[0], "weights")
    for number, record in enumerate(domains, start=1):
        stacks: dict[str, dict[str, FrozenStack]] = {}
        for stack in record.stacks:
            file = store.read_stack(stack)
            stacks[stack.name] = parts_of(file, pairs.of(file.header))
        of_domain, from_weights[record.name] = weights_of(stacks, k, settings.seed)
        spectra |= of_domain
        of_weights(number, len(domains))
    geometry: dict[str, Any] = {
        "spectra": spectra_json(spectra, {s.name: s.domain for s in store.manifest.stacks}),
        "weights": cosines_json(from_weights, k),
        "data": None,
        "delta_energy": None,
    }
    at = None
    if settings.layer is not None and settings.projection is not None:
        paths = [path for of_domain in from_weights.values() for path in of_domain]
        at = path_at(dict.fromkeys(paths), settings.layer, settings.projection)
        geometry["planes"] = {"path": at, "weights": plane_json(from_weights, at)}
    if settings.weights_only:
        return geometry, None
    model, tokenizer = load_served(settings, store, notes)
    prompts = domain_prompts(settings, store, tokenizer, notes)
    if not prompts:
        notes.append("Nothing was measured on data: no domain's rows are to be had.")
        return geometry, None
    passes = run_prompts(model, prompts, whole.part(sizes[1], "prompts"))
    from_data, shares = data_directions(passes.deltas, k)
    geometry |= {"data": cosines_json(from_data, k), "delta_energy": shares_json(shares, k)}
    if at is not None:
        geometry["planes"]["data"] = plane_json(from_data, at)
    if not passes.routing:
        notes.append("No routing: every stack has one expert.")
        return geometry, None
    order = [stack.name for stack in store.enabled_stacks()]
    routing = tuple(sorted(passes.routing, key=lambda stack: order.index(stack.name)))
    return geometry, routing_json(replace(passes, routing=routing), settings.seed)


def load_served(
    settings: StacksAnalyseSettings, store: Store, notes: list[str]
) -> tuple[nn.Module, Any]:
    """(model with every enabled stack of the store, tokenizer), the base as training has it.

    Raises: InputError: no model is found. StoreError: it is another base.
    """
    try:
        checkpoint = find_base(store, settings.model, notes)
    except InputError as error:
        raise type(error)(f"{error}; --weights-only does without it") from None
    model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    prepare_base(model, None, notes)
    serve(model, store, base_fingerprint=store.manifest.base_fingerprint)
    return model, tokenizer


def domain_prompts(
    settings: StacksAnalyseSettings, store: Store, tokenizer: Any, notes: list[str]
) -> dict[str, list[Prompt]]:
    """Domain -> token ids of its validation rows, the first `settings.prompts` by row id.

    Domains whose data is not there are left out, and `notes` says why.
    Raises: InputError: data that is there but cannot be used, or of which held-out rows are gone.
    """
    wanted: dict[str, DomainDataSettings] = {}
    for record in store.manifest.domains:
        if record.enabled and record.stacks:
            try:
                wanted[record.name] = stored_data(store, record, settings.data)
            except InputError as error:
                notes.append(f"No prompts of {record.name}: {error}")
    splits = {
        record.name: store.read_json(record.split)
        for record in store.manifest.domains
        if record.name in wanted and record.split is not None
    }
    # All at once: rows may have been moved from one domain to another.
    read = read_domains(wanted, Path(), tokenizer=tokenizer, stored=splits) if wanted else {}
    return {
        name: [
            row.tokens
            for row in encode_examples(
                read[name].validation[: settings.prompts], tokenizer, about, settings.max_seq_length
            ).rows
        ]
        for name, about in wanted.items()
    }


def curves_of(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Domain -> [{round, step, validation_loss}], by round and step; empty without a log.

    Lines of other events are passed over, as is what a killed process left half written. Of a round
    that was trained again the last training counts.
    """
    try:
        lines = (store / LOG).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    curves: dict[str, dict[tuple[int, int], float]] = {}  # domain -> (round, step) -> loss
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or event.get("event") != "validation":
            continue
        match [event.get(key) for key in ("domain", "round", "step", "validation_loss")]:
            case [str(domain), int(number), int(step), float(loss)]:
                curve = curves.setdefault(domain, {})
                if step == 0:  # trained again: what later steps said before no longer counts
                    for key in [key for key in curve if key >= (number, 0)]:
                        del curve[key]
                curve[number, step] = loss
    return {
        domain: [
            {"round": number, "step": step, "validation_loss": loss}
            for (number, step), loss in sorted(curve.items())
        ]
        for domain, curve in curves.items()
    }


# --- tables, plots, a verdict ---------------------------------------------------------------------

Figures = Mapping[str, Any]
ABOUT = {
    "kind": "stacks analyse",
    "title": "Analysis of stacks",
    "question": "Do the stacks of different domains share directions, and does their routing tell "
    "domains apart?",
}
# Of plots that there is one of for each stack or projection; all their figures are data.
MOST_PLOTS = 9
_LOADS = {"gate": "mean gate weight", "dispatch": "share of tokens that choose it"}


def blocks(data: Figures) -> Iterator[Block]:
    """Every table and plot that there are numbers for, questions between domains first."""
    geometry, routing = data["geometry"], data["routing"]
    sources = {name: geometry[name] for name in ("weights", "data") if geometry[name]}
    yield from _cosine_blocks({name: table for name, table in sources.items() if table["pairs"]})
    if planes := geometry.get("planes"):
        yield from _plane_plots(planes)
    if routing:
        yield from _separation_blocks(routing["points"])
        yield from _routing_blocks(routing["stacks"])
    yield from _spectrum_blocks(geometry["spectra"])
    yield domain_table(data["domains"])
    yield from _loss_plots(data["domains"])
    yield from matrix_blocks(data["matrix"])


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
    columns: Columns = {
        "domain": "text", "served": "text", "stacks": "count", "size": "bytes",
        "loss before": ("number", 3), "loss after": ("number", 3),
        "energy held": ("share", 0), "capacity used": ("share", 0),
    }  # fmt: skip
    return Table.of("domains", "Domains, in the order of training", columns, [
        (domain["name"], domain["enabled"], len(domain["stacks"]), domain["bytes"],
         *((domain["losses"][0], domain["losses"][-1]) if domain["losses"] else (None, None)),
         *((domain["protected"] or {}).get(key)
           for key in ("captured_energy_mean", "capacity_used_highest")))
        for domain in domains
    ])  # fmt: skip


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
        yield Table.of(
            f"cosine-table-{source}", title,
            {"domain": "text", **{f"with {b}": ("number", 3) for b in names}},
            [(a, *(matrix[a][b] for b in names)) for a in names], caption=caption,
        )  # fmt: skip
    if not shared:
        return
    # a row a projection: mean over pairs and layers, next to that of random directions
    kinds = list(dict.fromkeys(kind for t in shared.values() for kind in t["by_projection"]))
    series = [
        Series(label=label, y=tuple(table["by_projection"].get(k, {}).get(key) for k in kinds))
        for source, table in shared.items()
        for label, key in ((f"from {source}", "mean"), (f"chance, {source}", "mean_chance"))
    ]
    means = ", ".join(f"{source} {table['mean']:.3f}" for source, table in shared.items())
    yield Plot(
        id="cosines-by-projection", title="Largest cosine between domains, by projection",
        kind="series", categories=tuple(kinds), series=tuple(series),
        x_label="largest |cosine|, mean over pairs and layers",
        alt=f"Mean largest cosine between domains' directions by projection; over all: {means}.",
    )  # fmt: skip


def _plane_plots(planes: Figures) -> Iterator[Plot]:
    for source, plane in planes.items():
        if source == "path" or not plane["points"]:
            continue
        share = f"{plane['inside']:.0%}, random directions {plane['inside_chance']:.0%}"
        yield Plot(
            id=f"plane-{source}", title=f"Directions from {source} at {planes['path']}",
            kind="lines", x_label=f"the plane of most of their squared lengths: {share}",
            series=tuple(
                Series(
                    label=domain,
                    x=tuple(x for point in points for x in (0.0, point[0])),
                    y=tuple(y for point in points for y in (0.0, point[1])),
                )
                for domain, points in plane["points"].items()
            ),
            alt=f"Principal output directions of {', '.join(plane['points'])} at "
            f"{planes['path']}, from {source}, in the plane of most of their squared "
            f"lengths: {share}.",
        )  # fmt: skip


def _spectrum_blocks(stacks: Figures) -> Iterator[Block]:
    """Ranks; normalised singular values, a plot a projection, a line a stack."""
    keys = {"effective_rank": "effective rank", "stable_rank": "stable rank",
            "value_16": "16th value / 1st"}  # fmt: skip
    yield Table.of(
        "spectra", "Spectra of the stacks' deltas, mean over projections",
        {"stack": "text", **dict.fromkeys(keys.values(), ("number", 2))},
        [(name, *((stack[key] or {}).get("mean") for key in keys))
         for name, stack in stacks.items()],
    )  # fmt: skip
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


def _routing_blocks(stacks: Figures) -> Iterator[Block]:
    """Domains against each other inside a stack: averaged over projections, and one by one; then
    what each expert gets: a row or a dot a domain's rows.
    """
    columns: Columns = {
        "stack": "text", "load entropy": ("number", 3), "gate difference": ("number", 3),
        "by projection": ("number", 3), "random router": ("number", 3),
        "shuffled": ("number", 3), "p": "p",
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (name, min(on["load_entropy_by_projection"] for on in stack["on"].values()),
         stack["largest_gate_difference"], distance["distance"],
         stack["domain_distance_of_random_routers"]["distance"], distance["permuted"],
         distance["p"])
        for name, stack in stacks.items()
        if (distance := stack["domain_distance"])
    ]  # fmt: skip
    if rows:
        yield Table.of(
            "distances", "Domains inside a stack", columns, rows,
            caption="Gate difference: largest of two domains, projections averaged. By projection: "
            "half the sum of absolute differences of mean gates.",
        )  # fmt: skip
    most = max(stack["experts"] for stack in stacks.values())
    for what, words in _LOADS.items():
        rows = []
        for name, stack in stacks.items():
            for domain, load in stack["on"].items():
                means = [cell_of(e) for e in load[what]]
                more = [None] * (most - len(means))
                rows.append((name, domain, *means, *more, stack[f"uniform_{what}"]))
        experts: Columns = dict.fromkeys(
            [*(f"expert {e}" for e in range(most)), "uniform"], ("number", 3)
        )
        yield Table.of(
            f"load-{what}", f"Experts of a stack: {words}, mean over projections",
            {"stack": "text", "rows of": "text", **experts}, rows,
            caption="With 95% intervals over prompts.",
        )  # fmt: skip
    for what, words in _LOADS.items():
        for number, (name, stack) in enumerate(list(stacks.items())[:MOST_PLOTS], 1):
            if what == "dispatch" and all(on["gate"] == on[what] for on in stack["on"].values()):
                continue  # top_k 1: the same again
            uniform = stack[f"uniform_{what}"]
            yield Plot(
                id=f"experts-{what}-{number}", title=f"Stack {name}: {words}", kind="intervals",
                categories=tuple(f"expert {expert}" for expert in range(stack["experts"])),
                series=tuple(
                    Series.of_intervals(f"rows of {domain}", map(cell_of, load[what]))
                    for domain, load in stack["on"].items()
                ),
                x_label=f"{words}, 95% intervals over prompts", references={"uniform": uniform},
                alt=f"{words.capitalize()} of the experts of stack {name}, by domain of the rows; "
                f"uniform would be {uniform:.3g}.",
            )  # fmt: skip


def _separation_blocks(points: Figures | None) -> Iterator[Block]:
    if points is None:
        return
    trained, random = points["separation"], points["separation_of_random_routers"]
    title = "Routing of prompts, two principal components"
    if trained:
        title = (
            f"Domain predicted from routing: {trained['accuracy']:.0%} (random routers "
            f"{random['accuracy']:.0%}, chance {trained['chance']:.0%})"
        )
        named = {
            "all projections": trained,
            "random routers": random,
            "two components": points["separation_on_two_components"],
            "projections averaged": points["separation_of_averages"],
            **{f"stack {name}": figures for name, figures in points["separation_by_stack"].items()},
        }
        columns: Columns = {
            "routing of": "text", "right": ("share", 0), "chance": ("share", 0),
            "shuffled": ("share", 0), "p": "p", "silhouette": ("number", 2),
        }  # fmt: skip
        yield Table.of(
            "separation", "A prompt's domain from its routing, nearest centroid", columns,
            [(name, (s["accuracy"], s["interval"]["low"], s["interval"]["high"]), s["chance"],
              s["permuted_accuracy"], s["p"], s["silhouette"]) for name, s in named.items() if s],
            caption=f"n = {trained['n']} prompts, 95% intervals. p: share of shuffles of domains "
            "(this one counted) that tell as many apart; shuffled: their mean.",
        )  # fmt: skip
    labels, coordinates = points["labels"], points["coordinates"]
    if all(len(point) == 2 for point in coordinates):
        series = tuple(
            Series(label=name, x=tuple(x for x, _ in members), y=tuple(y for _, y in members))
            for name in dict.fromkeys(labels)
            for members in [[p for p, of in zip(coordinates, labels, strict=True) if of == name]]
        )
        first, second = points["explained"]
        yield Plot(
            id="routing-components", title=title, kind="points", series=series,
            x_label=f"component 1, {first:.0%} of the variance of mean gates",
            y_label=f"component 2, {second:.0%}",
            alt=f"Two principal components of the mean gates, a point a prompt. {title}.",
        )  # fmt: skip


# --- losses ---------------------------------------------------------------------------------------


def _loss_plots(domains: Sequence[Figures]) -> Iterator[Plot]:
    """Over the optimizer steps of each domain, those of earlier rounds counted on; of domains
    without a log, after their rounds.
    """
    curves: dict[str, list[tuple[float, float]]] = {}
    rounds: dict[str, list[tuple[float, float]]] = {}
    for domain in domains:
        start, number = 0.0, None
        for point in domain["curve"]:
            points = curves.setdefault(domain["name"], [])
            if point["round"] != number:
                number, start = point["round"], points[-1][0] if points else 0.0
            points.append((start + point["step"], point["validation_loss"]))
        if domain["losses"] and not domain["curve"]:
            rounds[domain["name"]] = list(enumerate(domain["losses"]))
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
                x_label=x_label, y_label="validation loss, nats per token",
                alt=f"Validation loss by domain; at the end {ends}.",
            )  # fmt: skip


# --- in words -------------------------------------------------------------------------------------


def outcome(geometry: Figures) -> str:
    weights = geometry["weights"]
    if weights["mean"] is None:
        return "cosine not measured"
    return f"cosine of domains {weights['mean']:.3f}, of chance {weights['mean_chance']:.3f}"


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
        spans = []
        for what in ("gate", "dispatch"):
            means = [
                expert["mean"]
                for stack in routing["stacks"].values()
                for load in stack["on"].values()
                for expert in load[what]
            ]
            spans.append(f"{min(means):.3f} to {max(means):.3f}")
        words.append(f"Mean gate {spans[0]}, dispatch share {spans[1]}.")
        points = routing["points"]
        if points and (separation := points["separation"]):
            interval = separation["interval"]
            random = points["separation_of_random_routers"]["accuracy"]
            words.append(
                f"A prompt's domain is predicted from its routing in {separation['accuracy']:.0%} "
                f"({interval['low']:.0%} to {interval['high']:.0%}, chance "
                f"{separation['chance']:.0%}), from that of random routers in {random:.0%}; "
                f"silhouette {separation['silhouette']:.2f}."
            )
    return " ".join(words) or "Spectra only: one domain, and nothing was measured on data."
