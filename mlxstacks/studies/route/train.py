"""`mlxstacks route train`: the meta-router of a store, from what `route discover` left.

The router and its result appear in the target whole or not at all; then the store gets the router.
A run is short, so a stopped one starts again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks import base_model
from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory
from mlxstacks.files.router_file import RouterFile, write_router
from mlxstacks.files.stack_file import file_sha256
from mlxstacks.files.store import Store, find_base
from mlxstacks.routing.outcomes import EXAMPLES, OUTCOMES, read_discovery, read_outcomes
from mlxstacks.routing.router import ROUTER_FILE, features_for, parameter_count
from mlxstacks.routing.router_metrics import rate_json
from mlxstacks.routing.router_training import train_router
from mlxstacks.routing.settings import RouterTrainSettings
from mlxstacks.studies.route.cells import RATE, rate_cells
from mlxstacks.studies.route.data import routed_domains, stack_hashes
from mlxstacks.study.document import Block, Cell, Plot, Series, Table, cell_of
from mlxstacks.study.render.words import number
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment, write_result
from mlxstacks.training.modes import prepare_base

ABOUT = {
    "kind": "route train",
    "title": "Training of the router",
    "question": "Can the right stacks be predicted from the prompt alone?",
}
# Where a run reads and writes, not what it makes.
_PLACES = {"force", "save_path", "store_path", "model", "targets", "install"}

Progress = Callable[..., None]


def run(
    settings: RouterTrainSettings,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """Train, write router and result to `settings.save_path`, put the router into the store.

    notes: the first ones of the result.
    Raises: InputError: no store, targets, model or save path; targets of other stacks; examples
        that do not do. StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError(
            "route train needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("route train needs save_path")
    started, target = time.monotonic(), user_path(settings.save_path)
    store = Store.open(settings.store_path)
    directory = user_path(settings.targets)
    check_target(target, force=settings.force, inputs=[store.path, directory])
    examples, discovered = read_outcomes(directory)
    if settings.labels_only:
        discovered = {}
    notes, shown = list(notes), settings.model_dump(mode="json")
    hashes = {n: tuple(h) for n, h in stack_hashes(store, routed_domains(store)).items()}
    settings = _as_discovered(settings, store, hashes, directory, notes)
    start = _start(settings, store, hashes, notes)
    data: dict[str, Any] = {
        "domains": list(hashes),
        "examples": {
            "all": len(examples),
            "discovered": len(discovered),
            "discovered_share": len(discovered) / len(examples) if examples else None,
        },
    }
    result = Result(
        **ABOUT, status="planned", settings=shown, data=data, notes=tuple(notes),
        blocks=(_facts(data),), directory=str(target),
    )  # fmt: skip
    if dry_run:
        return result
    # Of the base alone: no stack is attached. An extended router keeps its own features.
    model, tokenizer, _ = base_model.load(
        find_base(store, settings.model, notes).directory, lazy=True
    )
    prepare_base(model, settings.base, notes)
    trained = train_router(
        examples, discovered,
        features_for(settings if start is None else start.header, model, tokenizer), settings,
        domains=tuple(hashes), start=start, directory=target.parent, progress=progress,
    )  # fmt: skip
    header = trained.header(store.manifest.base_model, store.manifest.base_fingerprint, hashes, {
        "settings": settings.model_dump(mode="json", exclude=_PLACES),
        "data_sha256": {name: file_sha256(directory / name) for name in (EXAMPLES, OUTCOMES)},
        "calibration_error": trained.metrics["calibration"]["expected_calibration_error"],
    })  # fmt: skip
    data |= {
        "domains": list(trained.domains),
        "input_dims": trained.input_dims,
        "parameters": parameter_count(trained.input_dims, len(trained.domains), header.hidden_dims),
        "best_epoch": trained.best_epoch,
        "history": trained.history,
        "metrics": trained.metrics,
        "split": trained.split,
        "installed": None,
    }
    result = result.model_copy(update={
        "status": "done", "notes": (*notes, *trained.notes),
        "environment": environment(time.monotonic() - started),
        "next_steps": {"Next": command_line(
            "mlxstacks chat", routed=True, model=settings.model, store_path=str(store.path),
            router_path=None if settings.install else str(target),
        )},
    })  # fmt: skip
    tensors = trained.tensors()
    nbytes = sum(array.nbytes for array in tensors.values()) + (1 << 20)
    with staged_directory(
        target, force=settings.force, needed_bytes=nbytes, inputs=[store.path]
    ) as staged:
        data["router_sha256"] = write_router(staged / ROUTER_FILE, tensors, header)
        if settings.install:  # before the target is there, by which the command counts as done
            if store.manifest.router is not None:
                undo = command_line("mlxstacks stacks undo", str(store.path))
                note = f"It replaced the store's router; `{undo}` brings that back."
                result = result.model_copy(update={"notes": (*result.notes, note)})
            with store.change("route train", domains=list(trained.domains)) as change:
                data["installed"] = change.set_router(tensors, header).sha256
        return write_result(_concluded(result, data), staged, target)


def _as_discovered(
    settings: RouterTrainSettings,
    store: Store,
    now: Mapping[str, tuple[str, ...]],
    directory: Path,
    notes: list[str],
) -> RouterTrainSettings:
    """The settings with the chat domain and floor of the discovery, where nothing else is said.

    now: domain -> SHA-256 of its stacks.
    Raises: InputError: the outcomes are of another base, or of other stacks of a domain.
    """
    discovery, changed_since = read_discovery(directory)
    notes += [f"{directory}: {change}." for change in changed_since]
    again = "run `mlxstacks route discover` again"
    wanted = store.manifest.base_fingerprint
    if discovery["base_fingerprint"] != wanted:
        raise InputError(
            f"{directory}: its outcomes are of a base with fingerprint "
            f"{str(discovery.get('base_fingerprint'))[:12]}, the store's is {wanted[:12]}; {again}"
        )
    then: Mapping[str, list[str]] = discovery["stacks"]
    changed = [name for name in now if name in then and tuple(then[name]) != now[name]]
    if changed:
        raise InputError(
            f"{directory}: its outcomes were found with other stacks of {', '.join(changed)} than "
            f"{store.path} has; {again}"
        )
    if new := [name for name in now if name not in then]:
        notes.append(f"The discovery did not know {', '.join(new)}; {again} for its outcomes.")
    changes: dict[str, Any] = {}
    if settings.chat_domain is None and discovery["chat_domain"] in now:
        changes["chat_domain"] = discovery["chat_domain"]
    if settings.chat_floor is None and discovery["chat_domain"] is not None:
        changes["chat_floor"] = discovery["chat_floor"]
    return settings.model_copy(update=changes)


def _start(
    settings: RouterTrainSettings,
    store: Store,
    now: Mapping[str, tuple[str, ...]],
    notes: list[str],
) -> RouterFile | None:
    """The router to extend. Raises: InputError: there is none, or it knows other stacks."""
    if settings.extend is None:
        return None
    file = store.read_router()
    changed = [name for name in now if file.header.stacks.get(name, now[name]) != now[name]]
    if changed and settings.extend == "new":
        raise InputError(
            f"{store.path}: its router was trained for other stacks of {', '.join(changed)}; "
            "extend new would leave them as they are: use extend all, or train again from scratch"
        )
    if changed:
        notes.append(f"The stacks of {', '.join(changed)} are others than when it was trained.")
    return file


# --- the result -----------------------------------------------------------------------------------


def _concluded(result: Result, data: Mapping[str, Any]) -> Result:
    single, mixed = (_share(rate) for rate in _hits(data["metrics"]).values())
    error = data["metrics"]["calibration"]["expected_calibration_error"]
    other = data["metrics"]["gaps"]["other"]
    stays_off = (
        f"No domain on {_share(other)} prompts that need none."
        if other is not None
        else "No prompt that needs no domain was held out, so whether it stays off is not known."
    )
    return result.model_copy(update={
        "data": dict(data), "blocks": blocks(data), "outcome": f"right domain first: {single}",
        "verdict": f"epoch {data['best_epoch']}: the right domain first on {single} single "
        f"prompts, both domains on {mixed} mixed ones, calibration error {error:.3f}. {stays_off}",
    })  # fmt: skip


def _hits(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Rates on prompts that were held out."""
    names = {
        "right domain first, single prompts": ("single_top1", "single"),
        "both domains, mixed prompts": ("mixed_set", "mixed"),
    }
    counts = metrics["examples"]
    return {
        name: rate_json(round((metrics[key] or 0) * counts[kind]), counts[kind])
        for name, (key, kind) in names.items()
    }


def _share(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return "none of 0"
    low, high = 100 * rate["low"], 100 * rate["high"]
    return f"{100 * rate['rate']:.1f}% (95% {low:.0f} to {high:.0f}) of {rate['n']}"


def _facts(data: Mapping[str, Any]) -> Table:
    examples, split = data["examples"], data.get("split")
    rows: dict[str, Cell] = {
        "domains": ", ".join(data["domains"]),
        "examples": f"{examples['all']:,}, of {examples['discovered']:,} the outcome is known",
    }
    if split is not None:
        rows |= {
            "router": f"{data['parameters']:,} parameters on {data['input_dims']} dims",
            "split": f"{split['training']:,} to train, {split['validation']:,} held out",
            "best epoch": str(data["best_epoch"]),
            "test for gaps": _gap_words(data["metrics"].get("gap_detector")),
            "router in the store": data["installed"] or "not put there",
        }
    return Table.of_facts("facts", "Training", rows)


def _gap_words(detector: Mapping[str, Any] | None) -> str:
    if detector is None:
        return "every score is low"
    found = detector["left_out"].get(detector["test"], {})
    shares = [rate["rate"] for rate in found.values()]
    mean = f": finds {sum(shares) / len(shares):.0%} of a domain left out" if shares else ""
    return f"{detector['test']}{mean}"


def _gap_table(detector: Mapping[str, Any]) -> Table:
    """What each candidate finds of domains that were left out in turn, the best first."""
    found = detector["left_out"]
    names = list(dict.fromkeys(name for rates in found.values() for name in rates))
    means = {test: float(np.mean([r["rate"] for r in rates.values()])) for test, rates in
             found.items()}  # fmt: skip
    rows = [
        (test, means[test], *(found[test][n]["rate"] if n in found[test] else None for n in names))
        for test in sorted(found, key=lambda test: -means[test])
    ]
    return Table.of(
        "gap-tests", "Tests for gaps, each domain left out in turn",
        {"test": "text", "mean": ("share", 0), **dict.fromkeys(names, ("share", 0))},
        rows,
        caption="Share of the domain's prompts that a test finds which never saw it, at 5% false "
        "alarms on the others. Numbers are decoder layers.",
    )  # fmt: skip


def blocks(data: Mapping[str, Any]) -> tuple[Block, ...]:
    metrics = data["metrics"]
    domains = (
        (name, row["true"], row["chosen"], cell_of(row["precision"]), cell_of(row["recall"]),
         row["expected_calibration_error"])
        for name, row in metrics["domains"].items()
    )  # fmt: skip
    bins = (
        (f"{row['low']:.1f} to {row['high']:.1f}", row["count"], row["mean_score"],
         row["mean_target"])
        for row in metrics["calibration"]["bins"]
    )  # fmt: skip
    hits = ((name, *rate_cells(rate)) for name, rate in _hits(metrics).items())
    gaps = metrics.get("gap_detector")  # earlier versions had none
    return (
        _facts(data),
        Table.of("held-out", "On prompts that were held out", {"what": "text", **RATE}, hits),
        _loss_plot(data["history"]),
        _epoch_table(data),
        Table.of("domains", "Domains", {
            "domain": "text", "wanted": "count", "chosen": "count", "precision": ("share", 0),
            "recall": ("share", 0), "calibration error": "number",
        }, domains),
        Table.of("calibration", "Calibration", {
            "score": "text", "pairs": "count", "mean score": "number", "mean target": "number"
        }, bins),
        *([_gap_table(gaps)] if gaps and gaps["left_out"] else []),
    )  # fmt: skip


def _epoch_table(data: Mapping[str, Any]) -> Table:
    rows = []
    for row in data["history"]:
        hits = _hits({**row, "examples": data["metrics"]["examples"]}).values()
        is_best = "*" if row["epoch"] == data["best_epoch"] else ""
        rows.append((row["epoch"], is_best, row["train_loss"], *map(cell_of, hits), row["val_bce"],
                     row["checkpoint_score"]))  # fmt: skip
    return Table.of("epochs", "Epochs, on held-out prompts but for the loss", {
        "epoch": "count", "kept": "text", "loss": "number", "single": "share", "mixed": "share",
        "validation BCE": "number", "score": "number",
    }, rows)  # fmt: skip


def _loss_plot(history: Sequence[Mapping[str, Any]]) -> Plot:
    names = {"training": "train_loss", "validation BCE": "val_bce"}
    epochs = tuple(row["epoch"] for row in history)
    curves = {name: tuple(row[key] for row in history) for name, key in names.items()}
    title = "Losses of the router by epoch"
    spans = ", ".join(
        f"{name} from {number(y[0])} to {number(y[-1])}" for name, y in curves.items()
    )
    return Plot(
        id="losses", title=title, kind="lines", x_label="epoch", y_label="loss",
        series=tuple(Series(label=name, x=epochs, y=y) for name, y in curves.items()),
        alt=f"{title}: {spans}.",
    )  # fmt: skip
