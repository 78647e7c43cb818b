"""`mlxstacks route train`: the meta-router of a store, from what `route discover` left.

The router and its report appear in the target whole or not at all; then the store gets the router.
A run is short, so a stopped one starts anew.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks import base_model, memory
from mlxstacks.errors import InputError
from mlxstacks.files.base_location import find_base
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.files.router_file import RouterFile, RouterHeader, write_router
from mlxstacks.files.stack_file import file_sha256
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.routing.features import PromptFeatures
from mlxstacks.routing.outcome_files import (
    EXAMPLES,
    OUTCOMES,
    read_discover_report,
    read_outcomes,
)
from mlxstacks.routing.router import ROUTER_FILE, parameter_count, router_tensors
from mlxstacks.routing.router_settings import RouterTrainSettings
from mlxstacks.routing.router_training import TrainedRouter, train_router
from mlxstacks.stats import wilson_interval
from mlxstacks.studies.route.data import routed_domains, stack_hashes
from mlxstacks.training.prepare_base import prepare_base

REPORT = "train_report.json"
# Where a run reads and writes, not what it makes.
_PLACES = {"force", "save_path", "store_path", "model", "targets", "install"}

Progress = Callable[..., None]


@dataclass(frozen=True)
class RouteTrainReport:
    """status: "planned" or "trained". installed: sha256 of the router in the store, None where it
    was not put there. metrics: of the best epoch, on the prompts that were held out.
    """

    status: str
    store_path: str
    save_path: str
    settings: dict[str, Any]
    domains: list[str]
    examples: dict[str, Any]
    input_dims: int | None = None
    parameters: int | None = None
    best_epoch: int | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    split: dict[str, Any] = field(default_factory=dict)
    router_sha256: str | None = None
    installed: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.status == "planned":
            return "planned only; nothing was trained."
        return _verdict(self.metrics, self.best_epoch or 0)

    def as_json(self) -> dict[str, Any]:
        about = {"settings_sha256": json_sha256(self.settings), "verdict": self.verdict}
        return {"kind": "route train", **vars(self), **about}


def run(
    settings: RouterTrainSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> RouteTrainReport:
    """Train, write router and report to `settings.save_path`, put the router into the store.

    Raises: InputError: no store, targets, model or save path; targets of other stacks; examples
        that do not do. StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError(
            "route train needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("route train needs save_path")
    started = time.monotonic()
    target = user_path(settings.save_path)
    store = Store.open(settings.store_path)
    domains = routed_domains(store)
    directory = user_path(settings.targets)
    check_target(target, force=settings.force, inputs=[store.path, directory])
    examples, discovered = read_outcomes(directory)
    notes: list[str] = []
    given = settings
    settings = _as_discovered(given, store, directory, notes)
    start = _start(settings, store, notes)
    counts = {
        "all": len(examples),
        "discovered": len(discovered),
        "discovered_share": len(discovered) / len(examples) if examples else None,
    }
    report = RouteTrainReport(
        "planned", str(store.path), str(target), given.model_dump(mode="json"), list(domains),
        counts, notes=notes,
    )  # fmt: skip
    if dry_run:
        return report
    features = _features(settings, store, start, notes)
    trained = train_router(
        examples, discovered, features, settings,
        domains=domains, start=start, directory=target.parent, progress=progress,
    )  # fmt: skip
    notes += trained.notes
    header = _header(settings, store, trained, directory)
    report = replace(
        report,
        status="trained",
        domains=list(trained.domains),
        input_dims=trained.input_dims,
        parameters=parameter_count(trained.input_dims, len(trained.domains), header.hidden_dims),
        best_epoch=trained.best_epoch,
        history=trained.history,
        metrics=trained.metrics,
        split=trained.split,
        figures=_figures(time.monotonic() - started),
    )
    return _write(report, store, trained, header, target, settings)


def _hashes(store: Store) -> dict[str, tuple[str, ...]]:
    """Domain -> SHA-256 of its stacks, in order, of the domains that are served."""
    found = stack_hashes(store, routed_domains(store))
    return {name: tuple(hashes) for name, hashes in found.items()}


def _as_discovered(
    settings: RouterTrainSettings, store: Store, directory: Path, notes: list[str]
) -> RouterTrainSettings:
    """The settings with the chat domain and floor of the discovery, where nothing else is said.

    Raises: InputError: the outcomes are of another base, or of other stacks of a domain.
    """
    found = read_discover_report(directory)
    again = "run `mlxstacks route discover` again"
    wanted = store.manifest.base_fingerprint
    if found.get("base_fingerprint") != wanted:
        raise InputError(
            f"{directory}: its outcomes are of a base with fingerprint "
            f"{str(found.get('base_fingerprint'))[:12]}, the store's is {wanted[:12]}; {again}"
        )
    then: Mapping[str, list[str]] = found.get("stacks") or {}
    now = _hashes(store)
    changed = [name for name in now if name in then and tuple(then[name]) != now[name]]
    if changed:
        raise InputError(
            f"{directory}: its outcomes were found with other stacks of {', '.join(changed)} than "
            f"{store.path} has; {again}"
        )
    if new := [name for name in now if name not in then]:
        notes.append(f"The discovery did not know {', '.join(new)}; {again} for its outcomes.")
    changes: dict[str, Any] = {}
    if settings.chat_domain is None and found.get("chat_domain") in now:
        changes["chat_domain"] = found["chat_domain"]
    if settings.chat_floor is None and found.get("chat_domain") is not None:
        changes["chat_floor"] = found.get("chat_floor")
    return settings.model_copy(update=changes)


def _start(settings: RouterTrainSettings, store: Store, notes: list[str]) -> RouterFile | None:
    """The router to extend. Raises: InputError: there is none, or it knows other stacks."""
    if settings.extend is None:
        return None
    file = store.read_router()
    now = _hashes(store)
    changed = [name for name in now if file.header.stacks.get(name, now[name]) != now[name]]
    if changed and settings.extend == "new":
        raise InputError(
            f"{store.path}: its router was trained for other stacks of {', '.join(changed)}; "
            "extend new would leave them as they are: use extend all, or train anew"
        )
    if changed:
        notes.append(f"The stacks of {', '.join(changed)} are others than when it was trained.")
    return file


def _features(
    settings: RouterTrainSettings, store: Store, start: RouterFile | None, notes: list[str]
) -> PromptFeatures:
    """Of the base alone: no stack is attached. An extended router keeps its own features."""
    checkpoint = find_base(store, settings.model, notes)
    model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    prepare_base(model, settings.base, notes)
    about = settings if start is None else start.header
    return PromptFeatures(
        model, tokenizer, max_tokens=about.max_tokens, mid_weight=about.mid_weight,
        last_weight=about.last_weight, normalise=about.normalise_features,
    )  # fmt: skip


def _header(
    settings: RouterTrainSettings, store: Store, trained: TrainedRouter, directory: Path
) -> RouterHeader:
    data = {name: file_sha256(directory / name) for name in (EXAMPLES, OUTCOMES)}
    manifest = store.manifest
    about = {
        "settings": settings.model_dump(mode="json", exclude=_PLACES),
        "data_sha256": data,
        "calibration_error": trained.metrics["calibration"]["expected_calibration_error"],
    }
    hashes = _hashes(store)
    return trained.header(manifest.base_model, manifest.base_fingerprint, hashes, about)


def _write(
    report: RouteTrainReport,
    store: Store,
    trained: TrainedRouter,
    header: RouterHeader,
    target: Path,
    settings: RouterTrainSettings,
) -> RouteTrainReport:
    tensors = router_tensors(trained.network)
    nbytes = sum(array.nbytes for array in tensors.values()) + (1 << 20)
    inputs = [store.path]
    with staged_directory(
        target, force=settings.force, needed_bytes=nbytes, inputs=inputs
    ) as staged:
        report = replace(report, router_sha256=write_router(staged / ROUTER_FILE, tensors, header))
        write_json(staged / REPORT, report.as_json())
    if settings.install:
        with store.change("route train", domains=list(trained.domains)) as change:
            record = change.set_router(tensors, header)
        # Again, and after the store: it says what the store has, and is newer than it.
        report = replace(report, installed=record.sha256)
        write_json(target / REPORT, report.as_json())
    return report


def _figures(seconds: float) -> dict[str, Any]:
    device = memory.device()
    return {
        "seconds": round(seconds, 1),
        "device": f"{device.name} ({device.kind})",
        "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
    }


def _verdict(metrics: Mapping[str, Any], best_epoch: int) -> str:
    def share(name: str, kind: str) -> str:
        value, n = metrics[name], metrics["examples"][kind]
        if value is None or not n:
            return "none of 0"
        interval = wilson_interval(round(value * n), n)
        return (
            f"{100 * value:.1f}% (95% {100 * interval.low:.0f} to {100 * interval.high:.0f}) of {n}"
        )

    return (
        f"epoch {best_epoch}: the right domain first on {share('single_top1', 'single')} "
        f"single prompts, both domains on {share('mixed_set', 'mixed')} mixed ones, "
        "calibration error "
        f"{metrics['calibration']['expected_calibration_error']:.3f}."
    )
