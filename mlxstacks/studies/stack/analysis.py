"""`mlxstacks stacks analyse`: what the frozen stacks of a store do, in numbers, tables and plots.

The store is only read. Weights are looked at domain by domain, without a model; unless that is all
that is asked for, the domains' validation rows then go through the base with all stacks on.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.files.store import Store
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.stack_files import SharedPairs, parts_of
from mlxstacks.studies.stack.analysis_settings import StacksAnalyseSettings
from mlxstacks.studies.stack.curves import curves_of
from mlxstacks.studies.stack.directions import (
    Directions,
    cosines_json,
    data_directions,
    shares_json,
    spectra_json,
    weights_of,
)
from mlxstacks.studies.stack.geometry import Spectrum
from mlxstacks.studies.stack.passes import Passes, run_prompts
from mlxstacks.studies.stack.plots import write_plots
from mlxstacks.studies.stack.prompts import domain_prompts, load_served
from mlxstacks.studies.stack.report import ordered_matrix
from mlxstacks.studies.stack.routing import routing_json

REPORT = "analysis_report.json"
# Where an analysis writes and reads, not what it finds.
_NOT_OF_THE_RESULT = {"force", "save_path"}

Progress = Callable[..., None]


@dataclass(frozen=True)
class AnalysisReport:
    """status: "planned" or "done". Tables are JSON values; None: not measured.

    domains: of the store, in order: stacks, losses, curve, protected directions.
    """

    status: str
    store_path: str
    save_path: str
    settings: dict[str, Any]
    domains: list[dict[str, Any]]
    matrix: dict[str, Any]
    geometry: dict[str, Any] = field(default_factory=dict)
    routing: dict[str, Any] | None = None
    plots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if self.status == "planned":
            return "planned only; nothing was looked at."
        return " ".join(verdict(self.geometry, self.routing))

    def as_json(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        device = memory.device()
        document: dict[str, Any] = {
            "kind": "stacks analyse",
            "status": self.status,
            "store_path": self.store_path,
            "save_path": self.save_path,
            "settings": self.settings,
            "settings_sha256": digest,
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
            "domains": self.domains,
            "matrix": self.matrix,
        }
        if self.status != "planned":
            document |= {
                "geometry": self.geometry,
                "routing": self.routing,
                "plots": self.plots,
                "seconds": round(self.seconds, 1),
            }
        return document | {"notes": self.notes, "verdict": self.verdict}


def run(
    settings: StacksAnalyseSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> AnalysisReport:
    """Look, and write report and plots to `settings.save_path`.

    Raises: InputError: no store, model or target, or no enabled stack. StoreError: a damaged file,
        another base.
    """
    if settings.store_path is None:
        raise InputError(
            "stacks analyse needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("stacks analyse needs save_path")
    target = user_path(settings.save_path)
    store = Store.open(settings.store_path)
    check_target(target, force=settings.force, inputs=[store.path])
    if not store.enabled_stacks():
        raise InputError(f"{store.path}: holds no enabled stack; there is nothing to look at")
    curves = curves_of(store.path)
    shown = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    domains = [_domain_json(record, curves) for record in store.manifest.domains]
    matrix = ordered_matrix(store.manifest)
    about = (str(store.path), str(target), shown, domains, matrix)
    if dry_run:
        return AnalysisReport("planned", *about)
    started = time.monotonic()
    notes: list[str] = []
    found = _look(settings, store, notes, progress)
    report = AnalysisReport("done", *about, *found, notes=notes)
    with staged_directory(target, force=settings.force, inputs=[store.path]) as directory:
        plots: list[str] = []
        if settings.plots:
            plots, said = write_plots(directory, report.as_json(), settings.plot_format)
            notes += said
        seconds = time.monotonic() - started
        report = AnalysisReport("done", *about, *found, plots, notes, seconds)
        write_json(directory / REPORT, report.as_json())
    return report


def _look(
    settings: StacksAnalyseSettings, store: Store, notes: list[str], progress: Progress | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(geometry, routing)."""
    k = settings.directions
    spectra, from_weights = _weights(store, settings, progress)
    geometry: dict[str, Any] = {
        "spectra": spectra_json(spectra, {s.name: s.domain for s in store.manifest.stacks}),
        "weights": cosines_json(from_weights, k),
        "data": None,
        "delta_energy": None,
    }
    passes = None if settings.weights_only else _passes(settings, store, notes, progress)
    if passes is None:
        return geometry, None
    from_data, shares = data_directions(passes.deltas, k)
    geometry |= {"data": cosines_json(from_data, k), "delta_energy": shares_json(shares, k)}
    if not passes.routing:
        notes.append("No routing: every stack has one expert.")
        return geometry, None
    return geometry, routing_json(passes, settings.seed)


def _weights(
    store: Store, settings: StacksAnalyseSettings, progress: Progress | None
) -> tuple[dict[str, dict[str, Spectrum]], dict[str, Directions]]:
    """Spectra by stack and path, directions by domain and path; one domain in memory at a time."""
    pairs = SharedPairs(store)
    spectra: dict[str, dict[str, Spectrum]] = {}
    directions: dict[str, Directions] = {}
    domains = [record for record in store.manifest.domains if record.enabled and record.stacks]
    for number, record in enumerate(domains, start=1):
        stacks: dict[str, dict[str, FrozenStack]] = {}
        for stack in record.stacks:
            file = store.read_stack(stack)
            stacks[stack.name] = parts_of(file, pairs.of(file.header))
        found = weights_of(stacks, settings.directions, settings.seed)
        spectra |= found.spectra
        directions[record.name] = found.directions
        if progress:
            progress(number, len(domains), f"weights of {record.name}")
    return spectra, directions


def _passes(
    settings: StacksAnalyseSettings, store: Store, notes: list[str], progress: Progress | None
) -> Passes | None:
    """The prompts' passes, stacks in the store's order; None where there is no prompt."""
    model, tokenizer = load_served(settings, store, notes)
    prompts = domain_prompts(settings, store, tokenizer, notes)
    if not prompts:
        notes.append("Nothing was measured on data: no domain's rows are to be had.")
        return None
    found = run_prompts(model, prompts, progress)
    order = [stack.name for stack in store.enabled_stacks()]
    routing = sorted(found.routing, key=lambda stack: order.index(stack.name))
    return Passes(found.labels, tuple(routing), found.deltas)


def _domain_json(record: DomainRecord, curves: Mapping[str, Any]) -> dict[str, Any]:
    protected = record.protected or {}
    return {
        "name": record.name,
        "enabled": record.enabled,
        "origin": record.origin,
        "stacks": [stack.name for stack in record.stacks],
        "parameters": sum(stack.parameters for stack in record.stacks),
        "bytes": sum(stack.file.nbytes for stack in record.stacks),
        "losses": list(record.losses),
        "curve": curves.get(record.name, []),
        # Captured energy and capacity used; by projection it is in the store's manifest.
        "protected": {k: v for k, v in protected.items() if k != "projections"} or None,
    }


def verdict(geometry: Mapping[str, Any], routing: Mapping[str, Any] | None) -> list[str]:
    """What the numbers say, a sentence each."""
    said = []
    for what in ("weights", "data"):
        table = geometry.get(what)
        if table and table["pairs"]:
            said.append(
                f"Directions from {what}: domains share a largest cosine of {table['mean']:.3f} on "
                f"average, random directions {table['mean_chance']:.3f}."
            )
    if routing:
        gates, shares = (_range(routing["stacks"].values(), what) for what in ("gate", "dispatch"))
        said.append(
            f"Mean gate {gates[0]:.3f} to {gates[1]:.3f}, dispatch share {shares[0]:.3f} to "
            f"{shares[1]:.3f}."
        )
        points = routing["points"]
        found = points and points["separation"]
        if found:
            said.append(
                f"A prompt's domain is told from its routing in {100 * found['accuracy']:.0f}% "
                f"({found['interval']['low'] * 100:.0f} to {found['interval']['high'] * 100:.0f}, "
                f"chance {100 * found['chance']:.0f}%), from that of random routers in "
                f"{100 * points['separation_of_random_routers']['accuracy']:.0f}%; silhouette "
                f"{found['silhouette']:.2f}."
            )
    return said or ["Spectra only: one domain, and nothing was measured on data."]


def _range(stacks: Sequence[Any], what: str) -> tuple[float, float]:
    means = [e["mean"] for stack in stacks for found in stack["on"].values() for e in found[what]]
    return min(means), max(means)
