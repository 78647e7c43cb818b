"""What a sweep over ranks shows: losses, what each fuse would keep, live buffers; differences
between ranks with intervals, and a verdict in words.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mlxstacks.memory import bytes_in_words
from mlxstacks.stats import mean_interval
from mlxstacks.studies.sweep.cells import Cell as SweepCell
from mlxstacks.studies.sweep.cells import CellResult, cells_of, read_results
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.study.document import Block, Columns, Plot, Series, Table, cell_of, counted
from mlxstacks.study.result import Result

ABOUT = {
    "kind": "sweep",
    "title": "Sweep",
    "question": "What does rank do to the loss, and what of it survives a fuse?",
}
Figures = Mapping[str, Any]
Measure = Callable[[CellResult], float | None]
_MOST_POINTS = 3


def _figure(name: str) -> Measure:
    return lambda result: result.figures.get(name)


def _fused(policy: str, name: str) -> Measure:
    return lambda result: result.survival.get(policy, {}).get(name)


# What is averaged over seeds, by name.
MEASURES: dict[str, Measure] = {
    "first_validation_loss": _figure("first_validation_loss"),
    "last_validation_loss": _figure("last_validation_loss"),
    "best_validation_loss": _figure("best_validation_loss"),
    "delta_over_step": lambda r: next(
        (figures.get("delta_over_step") for figures in r.survival.values()), None
    ),
    "seconds": _figure("seconds"),
    "peak_bytes": _figure("peak_bytes"),
    "predicted_buffers": lambda r: r.guard.get("buffers"),
    "counted_buffers": _figure("counted_buffers"),
}


def concluded(settings: SweepSettings, results: Sequence[CellResult]) -> Result:
    """The result of finished cells."""
    rows, compared = matrix(settings, results), differences(settings, results)
    refused = [result for result in results if result.status == "refused"]
    failed_gate = None
    if len(refused) == len(results):
        failed_gate = f"every cell was refused by the guard: {refused[0].reason}"
    losses = [d for d in compared if d["what"] == "last_validation_loss"]
    outcome = "; ".join(dict.fromkeys(map(_loss_by_rank, losses)))
    if not losses:
        outcome = f"no {'validation loss' if compared else 'two ranks'} to compare"
    cells = [result.as_json() for result in results]
    return Result(
        **ABOUT, status="done", verdict=verdict(settings, rows, compared), failed_gate=failed_gate,
        outcome=outcome, notes=_notes(results),
        data={"matrix": rows, "differences": compared, "cells": cells},
        blocks=tuple(_blocks(settings, rows, compared, cells)),
    )  # fmt: skip


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the cells of a finished sweep. Raises: ValueError, KeyError, InputError."""
    settings = SweepSettings.model_validate(result.settings)
    axes = (settings.ranks, settings.seeds, settings.layers, settings.projections)
    # Each has a file: millions of them are not looked for.
    if math.prod(map(len, axes)) * max(1, len(settings.bits)) > len(result.provenance):
        raise ValueError("more cells than files")
    cells = read_results(directory / "cells")
    return concluded(settings, [cells[cell] for cell in cells_of(settings)])


def _notes(results: Sequence[CellResult]) -> tuple[str, ...]:
    """Cells without an adapter: why, how far they came, which checkpoints they left; and what is
    not like for like.
    """
    notes = []
    for result in results:
        if result.reason:
            note = f"{result.cell.name}: {result.status}: {result.reason}"
            if result.status != "refused":
                saved = ", ".join(map(str, result.figures.get("saved_steps", []))) or "none"
                note += f" (after step {result.figures.get('step', 0)}; states saved at: {saved})"
            notes.append(note)
        if result.guard["outcome"] != "fits" and result.status != "refused":
            notes.append(f"{result.cell.name}: the guard warns: {result.guard['verdict']}.")
        if change := result.guard.get("change"):
            notes.append(f"{result.cell.name}: reshaped by the guard, {change}; not like for like.")
    resumed = [r.cell.name for r in results if r.figures.get("resumed_from_step")]
    if resumed:
        notes.append(f"Seconds are of the last part of a resumed run: {', '.join(resumed)}.")
    return tuple(dict.fromkeys(notes))


# --- figures --------------------------------------------------------------------------------------


def matrix(settings: SweepSettings, results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """A row for every point (layers, projections, bits) and rank, in the order of the cells.

    cells: how many have which status. means: by measure, with Student's interval over the seeds of
    the trained cells, None where none has it. survival, correlation, extra_bytes: by policy.
    """
    rows = []
    for point, rank in dict.fromkeys((result.cell.point, result.cell.rank) for result in results):
        cells = [r for r in results if r.cell.point == point and r.cell.rank == rank]
        statuses = [result.status for result in cells]
        fused = {
            name: {policy: _mean(cells, _fused(policy, name)) for policy in settings.policies}
            for name in ("survival", "correlation", "extra_bytes")
        }
        extra_bytes = {p: grown and grown["mean"] for p, grown in fused["extra_bytes"].items()}
        rows.append({
            "rank": rank, **_point_json(point),
            "cells": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
            "means": {name: _mean(cells, measure) for name, measure in MEASURES.items()},
            **fused, "extra_bytes": extra_bytes,
        })  # fmt: skip
    return rows


def _point_json(point: tuple[str, str, int | None]) -> dict[str, Any]:
    return dict(zip(("layers", "projections", "bits"), point, strict=True))


def _point_name(figures: Figures) -> str:
    """Of the point that a row of figures is at."""
    bits = f", {figures['bits']} bits" if figures["bits"] else ""
    return f"layers {figures['layers']}, {figures['projections']}{bits}"


def _mean(results: Sequence[CellResult], measure: Measure) -> dict[str, Any] | None:
    values = [value for result in results if (value := measure(result)) is not None]
    return mean_interval(values).as_json() if values else None


def _mean_of(row: Figures, name: str) -> float | None:
    interval = row["means"][name]
    return interval and interval["mean"]


def differences(settings: SweepSettings, results: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Loss, size of the delta and survival of the highest trained rank less the lowest, at each
    point, paired by seed. finding: what the 95% interval says of zero, or that there is
    one seed, and no interval.
    """
    measures = {name: MEASURES[name] for name in ("last_validation_loss", "delta_over_step")}
    measures |= {f"survival {policy}": _fused(policy, "survival") for policy in settings.policies}
    trained = {r.cell: r for r in results if r.status == "trained"}
    compared = []
    for point in dict.fromkeys(cell.point for cell in trained):
        ranks = sorted({cell.rank for cell in trained if cell.point == point})
        pairs = [
            (result, trained[high])
            for cell, result in trained.items()
            if cell.point == point and cell.rank == ranks[0]
            if (high := SweepCell(ranks[-1], cell.seed, *point)) in trained
        ]
        for what, measure in measures.items() if len(ranks) > 1 else ():
            values = [(measure(low), measure(high)) for low, high in pairs]
            gains = [high - low for low, high in values if low is not None and high is not None]
            if not gains:
                continue
            difference = mean_interval(gains)
            finding = "excludes 0" if difference.excludes(0.0) else "holds 0"
            compared.append({
                "what": what, **_point_json(point), "low_rank": ranks[0], "high_rank": ranks[-1],
                "difference": difference.as_json(),
                "finding": "one seed" if difference.low is None else finding,
            })  # fmt: skip
    return compared


# --- tables and plots -----------------------------------------------------------------------------


def plan_table(cells: Sequence[Figures]) -> Table:
    """The cells of --dry-run."""
    columns: Columns = {
        "cell": "text", "status": "text", "trained": "count", "buffers": "count", "bytes": "bytes",
        "guard": "text", "seconds": "number", "at least": "number",
    }  # fmt: skip
    keys = ("name", "status", "parameters", "predicted_buffers", "predicted_bytes", "outcome",
            "seconds", "least_seconds")  # fmt: skip
    return Table.of(
        "cells", "Cells", columns, [[cell[key] for key in keys] for cell in cells],
        caption="Seconds: as the finished cells of an interrupted sweep took; at least: what the "
        "products alone take at this machine's speed.",
    )  # fmt: skip


def _blocks(
    settings: SweepSettings,
    rows: Sequence[Figures],
    compared: Sequence[Figures],
    cells: Sequence[Figures],
) -> Iterator[Block]:
    """Runs, what a fuse keeps, differences; every cell last, folded."""
    several = len(set(map(_point_name, rows))) > 1
    labels = [f"rank {row['rank']}{f', {_point_name(row)}' if several else ''}" for row in rows]
    by_label = dict(zip(labels, rows, strict=True))
    yield from _tables(settings, rows, compared, several)
    if any(_mean_of(row, "peak_bytes") is not None for row in rows):
        yield from _plots(settings, by_label, cells, several)
    columns: Columns = {"cell": "text", "status": "text", "why": "text"}
    statuses = [(cell["name"], cell["status"], cell["reason"] or "") for cell in cells]
    yield Table.of("cells", "Cells", columns, statuses, folded=True)


def _tables(
    settings: SweepSettings, rows: Sequence[Figures], compared: Sequence[Figures], several: bool
) -> Iterator[Table]:
    place: Columns = {"rank": "count", **({"at": "text"} if several else {})}
    places = [(row["rank"], *([_point_name(row)] if several else [])) for row in rows]
    ends = ", with 95% intervals" if len(settings.seeds) > 1 else ""
    columns: Columns = {
        **place, "cells": "text", "before": ("number", 3), "after": ("number", 3),
        "best": ("number", 3), "delta/step": ("number", 3), "seconds": "number", "peak": "bytes",
        "buffers": ("count", 1), "counted": ("count", 1),
    }  # fmt: skip
    keys = ["delta_over_step", "seconds", "peak_bytes", "predicted_buffers", "counted_buffers"]
    if all(_mean_of(row, keys[-1]) is None for row in rows):
        columns, keys = dict(list(columns.items())[:-1]), keys[:-1]
    yield Table.of(
        "runs", "Runs, means over seeds", columns,
        [
            (*at, ", ".join(f"{count} {status}" for status, count in row["cells"].items()),
             _mean_of(row, "first_validation_loss"),
             cell_of(row["means"]["last_validation_loss"]),
             cell_of(row["means"]["best_validation_loss"]), *(_mean_of(row, k) for k in keys))
            for at, row in zip(places, rows, strict=True)
        ],
        caption=f"Before, after, best: validation loss, nats per token{ends}. "
        "delta/step: size of the delta in quantization steps. Buffers: predicted by the guard.",
    )  # fmt: skip
    columns = {
        **place, "policy": "text", "correlation": ("number", 3), "survival": "share",
        "more bytes": "bytes",
    }  # fmt: skip
    fused = [
        (*at, policy, cell_of(row["correlation"][policy]), cell_of(row["survival"][policy]),
         row["extra_bytes"][policy])
        for at, row in zip(places, rows, strict=True)
        for policy in settings.policies
        if row["survival"][policy] is not None
    ]  # fmt: skip
    if fused:
        kept = [interval for row in rows for interval in row["correlation"].values()]
        seeds = max((interval["n"] for interval in kept if interval), default=0)
        yield Table.of(
            "fused", "Correlation and survival of a fuse", columns, fused,
            caption=f"Means over {seeds} seed{'s, 95% intervals' if seeds != 1 else ''}. "
            "Correlation of a fuse with the trained change; survival: <F,D>/<D,D>.",
        )  # fmt: skip
    columns = {
        "measure": "text", **({"at": "text"} if several else {}), "low rank": "count",
        "high rank": "count", "difference (95%)": ("change", 4), "95% interval": "text",
    }  # fmt: skip
    if compared:
        yield Table.of(
            "differences", "Highest rank - lowest rank, paired by seed", columns,
            [(_in_words(d["what"]), *([_point_name(d)] if several else []), d["low_rank"],
              d["high_rank"], cell_of(d["difference"]), d["finding"]) for d in compared],
            caption="Each interval stands for itself: none is widened for the others beside it.",
        )  # fmt: skip


def _in_words(measure: str) -> str:
    """A name of `differences`."""
    return {"delta_over_step": "delta/step"}.get(measure, measure.replace("_", " "))


def _plots(
    settings: SweepSettings, rows: Mapping[str, Figures], cells: Sequence[Figures], several: bool
) -> Iterator[Plot]:
    """Survival by label and policy; frontiers; validation loss by step."""
    series = tuple(
        Series(
            label=label,
            y=tuple(100 * kept["mean"] if (kept := row["survival"][policy]) else None
                    for policy in settings.policies),
        )
        for label, row in rows.items()
    )  # fmt: skip
    values = [y for line in series for y in line.y if y is not None]
    span = f"{min(values):.0f} to {max(values):.0f}%" if values else "nothing measured"
    title = "Survival of the adapter in a fuse, <F,D>/<D,D>"
    yield Plot(
        id="survival", title=title, kind="heat map", series=series, categories=settings.policies,
        x_label="policy of the fuse", unit="survival, %", form="{:.0f}", limits=(0.0, 100.0),
        alt=f"{title}. Rows: {', '.join(rows)}; columns: {', '.join(settings.policies)}; {span}.",
    )  # fmt: skip
    yield from _frontiers(settings, rows, cells, several)
    curves = []
    for label, row in rows.items():
        found = [dict(curve) for cell in _cells_of(row, cells) if (curve := _curve(cell))]
        steps = sorted(set.intersection(*map(set, found))) if found else []
        losses = [[curve[step] for curve in found] for step in steps]
        if losses:
            curves.append(
                Series(
                    label=label, x=tuple(steps), y=tuple(map(fmean, losses)),
                    low=tuple(map(min, losses)), high=tuple(map(max, losses)),
                )
            )  # fmt: skip
    if curves:
        title = "Validation loss by step, mean and range of the seeds"
        ends = ", ".join(f"{s.label} {s.y[-1]:.3g}" for s in curves if s.y[-1] is not None)
        yield Plot(
            id="losses", title=title, kind="lines", series=tuple(curves), x_label="step",
            y_label="nats per token", alt=f"{title}; at the end {ends}.",
        )  # fmt: skip


def _cells_of(row: Figures, cells: Sequence[Figures]) -> list[Figures]:
    keys = ("rank", "layers", "projections", "bits")
    return [cell for cell in cells if all(cell["cell"][key] == row[key] for key in keys)]


def _curve(cell: Figures) -> list[tuple[float, float]]:
    records = cell["figures"].get("validation") or []
    return [(record["step"], record["validation_loss"]) for record in records]


def _frontiers(
    settings: SweepSettings, rows: Mapping[str, Figures], cells: Sequence[Figures], several: bool
) -> Iterator[Plot]:
    """What a larger adapter buys in loss, a line a point of the sweep; what bytes of a fuse buy in
    survival, a line a policy.
    """
    ranks = tuple(dict.fromkeys(row["rank"] for row in rows.values()))
    points: dict[str, dict[int, tuple[float, Any]]] = {}
    for row in rows.values():
        sizes = [cell["figures"].get("adapter_bytes") for cell in _cells_of(row, cells)]
        known = [size for size in sizes if size is not None]
        loss = row["means"]["last_validation_loss"]
        if known and loss is not None:
            name = _point_name(row) if several else "validation loss"
            points.setdefault(name, {})[row["rank"]] = (fmean(known), loss)
    if any(len(line) > 1 for line in points.values()):
        title = "Loss against the size of the adapter"
        words = "; ".join(
            f"{name}: " + ", ".join(
                f"rank {rank} {bytes_in_words(int(size))} {loss['mean']:.3g}"
                for rank, (size, loss) in line.items()
            )
            for name, line in points.items()
        )  # fmt: skip
        yield Plot(
            id="frontier-loss", title=title, kind="frontier", unit="bytes",
            categories=tuple(f"rank {rank}" for rank in ranks),
            series=tuple(
                Series(
                    label=name, x=tuple(line[r][0] if r in line else 0.0 for r in ranks),
                    **{
                        end: tuple(line[r][1][key] if r in line else None for r in ranks)
                        for end, key in (("y", "mean"), ("low", "low"), ("high", "high"))
                    },
                )
                for name, line in points.items()
            ),
            x_label="bytes of the adapter", y_label="validation loss, nats per token",
            alt=f"{title}, means over seeds with 95% intervals. {words}.",
        )  # fmt: skip
    fused = {label: row for label, row in rows.items() if all(row["survival"].values())}
    added = {row["extra_bytes"][policy] for row in fused.values() for policy in settings.policies}
    if len(added) > 1:
        title = "Survival against the bytes that a fuse adds"
        words = "; ".join(
            f"{policy}: " + ", ".join(
                f"{label} {bytes_in_words(int(row['extra_bytes'][policy] or 0))} "
                f"{row['survival'][policy]['mean']:.0%}"
                for label, row in fused.items()
            )
            for policy in settings.policies
        )  # fmt: skip
        yield Plot(
            id="frontier-survival", title=title, kind="frontier", unit="bytes",
            categories=tuple(fused),
            series=tuple(
                Series(
                    label=policy,
                    x=tuple(row["extra_bytes"][policy] or 0.0 for row in fused.values()),
                    y=tuple(100 * row["survival"][policy]["mean"] for row in fused.values()),
                )
                for policy in settings.policies
            ),
            x_label="bytes that the fuse adds to the model", y_label="survival, %",
            references={"all of the adapter": 100.0}, alt=f"{title}, means over seeds. {words}.",
        )  # fmt: skip


# --- in words -------------------------------------------------------------------------------------


def verdict(settings: SweepSettings, rows: Sequence[Figures], compared: Sequence[Figures]) -> str:
    """What happened to the cells; then, at each point, what rank did to loss and delta."""
    total: dict[str, int] = {}
    for row in rows:
        for status, count in row["cells"].items():
            total[status] = total.get(status, 0) + count
    ranks = ", ".join(map(str, sorted({row["rank"] for row in rows})))
    seeds, count = len(settings.seeds), sum(total.values())
    opening = f"Rank{'s' if ', ' in ranks else ''} {ranks}, {counted(seeds, 'seed')}:"
    if set(total) == {"trained"}:
        sentences = [f"{opening} {'all ' if count > 1 else ''}{counted(count, 'cell')} trained."]
    else:
        parts = ", ".join(f"{n} {status}" for status, n in total.items())
        lost = sorted({row["rank"] for row in rows if set(row["cells"]) - {"trained"}})
        sentences = [f"{opening} {parts} (not all of rank {', '.join(map(str, lost))})."]
    if compared and not any(d["what"] == "last_validation_loss" for d in compared):
        sentences.append(
            "No validation loss to compare: --data needs valid.jsonl beside train.jsonl, in Python "
            "{'train': rows, 'valid': rows}."
        )
    points = list(dict.fromkeys(map(_point_name, rows)))
    for point in points[:_MOST_POINTS]:
        trained = [
            row for row in rows
            if _point_name(row) == point and _mean_of(row, "peak_bytes") is not None
        ]  # fmt: skip
        losses = [
            d for d in compared
            if _point_name(d) == point and d["what"] == "last_validation_loss"
        ]  # fmt: skip
        if trained:
            opening = f"[{point}] " if len(points) > 1 else ""
            sentences += [opening + _loss_sentence(trained, loss) for loss in losses]
            sentences += _fuse_sentences(settings, trained)
    if len(points) > _MOST_POINTS:
        sentences.append(f"{len(points) - _MOST_POINTS} more points are in the report.")
    return " ".join(sentences)


def _loss_by_rank(loss: Figures) -> str:
    ranks = f"loss of rank {loss['high_rank']} against rank {loss['low_rank']}"
    difference = loss["difference"]
    if difference["low"] is None:
        return f"{ranks}: one seed, so no interval"
    side = "higher" if difference["mean"] > 0 else "lower"
    return f"{ranks}, 95% interval: {side if loss['finding'] == 'excludes 0' else 'undecided'}"


def _loss_sentence(rows: Sequence[Figures], loss: Figures) -> str:
    by_rank = {row["rank"]: _mean_of(row, "last_validation_loss") for row in rows}
    low_rank, high_rank, difference = loss["low_rank"], loss["high_rank"], loss["difference"]
    text = (
        f"Validation loss {by_rank[low_rank]:.3f} at rank {low_rank}, {by_rank[high_rank]:.3f} at "
        f"rank {high_rank}; difference {difference['mean']:+.3f}"
    )
    if difference["low"] is None:
        return f"{text}, one seed, so nothing follows from it; more --seeds give an interval."
    interval = f"({difference['low']:+.3f} to {difference['high']:+.3f}, {difference['n']} seeds)"
    if loss["finding"] == "excludes 0":
        return f"{text} {interval}, which excludes 0."
    room = max(-difference["low"], difference["high"])
    return f"{text} {interval}: undecided, so few seeds leave room for a difference of {room:.3f}."


def _fuse_sentences(settings: SweepSettings, rows: Sequence[Figures]) -> Iterator[str]:
    """Size of the delta, what the fuses keep of it, buffers: from low to high rank."""
    steps = [size for row in rows if (size := _mean_of(row, "delta_over_step")) is not None]
    if steps:
        span = _span([f"{size:.3f}" for size in steps])
        yield f"From low to high rank the delta is {span} of a quantization step."
    fused = []
    for policy in settings.policies:
        survival = [kept["mean"] for row in rows if (kept := row["survival"][policy])]
        if survival:
            grown = max(row["extra_bytes"][policy] or 0.0 for row in rows)
            cost = f" (for up to {bytes_in_words(int(grown))} more)" if grown else ""
            along = [kept["mean"] for row in rows if (kept := row["correlation"][policy])]
            shares = _span([f"{100 * share:.0f}%" for share in survival])
            close = f"correlation {_span([f'{r:.2f}' for r in along])}, " if along else ""
            fused.append(f"{policy}: {close}survival {shares}{cost}")
    if fused:
        yield f"Fused by {'; '.join(fused)}."
    predicted = [int(b) for row in rows if (b := _mean_of(row, "predicted_buffers")) is not None]
    if predicted:
        same = min(predicted) == max(predicted)
        span = f"{predicted[0]:,}" if same else f"{min(predicted):,} to {max(predicted):,}"
        word = "the same for every rank" if same else "by rank"
        yield f"Predicted live buffers: {span}, {word}."


def _span(values: Sequence[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
