"""The sample store: stacks and a router, made by the very commands that a user would run.

`mlxstacks stack`, `route discover` and `route train` run in processes of their own: nano may not
import the experiments behind them, and the stacks train in several processes as the base does.

Each domain is trained on the base alone, the others disabled, so that its stack can be loaded by
itself: on top of others it would need them (measured: benchmarks/RESULTS.md).
"""

import hashlib
import json
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mlxstacks.nano.exports import write_files
from tools.nano.curriculum import curriculum_files
from tools.nano.routing_data import routing_files
from tools.nano.settings import RebuildSettings
from tools.nano.workers import run_in_processes


def train_sample_store(
    settings: RebuildSettings, export: Path, work: Path, target: Path
) -> dict[str, float]:
    """Train stacks and router on the model in `export`; write the store to `target`.

    An interrupted run goes on from what it left in `work`. Returns seconds by step.
    Law: the same settings and model give the same files in `target`, interrupted or not.
    """
    place = work / f"store-{_digest(settings)}"
    write_files(place / "curriculum", curriculum_files())
    names = [domain.name for domain in settings.stacks.domains]
    write_files(place / "routing", routing_files(domains=names))
    store, outcomes, router = place / "store", place / "outcomes", place / "router"
    model = {"model": str(export)}
    seconds = {"stacks": _train_stacks(settings, place, store, model)}
    model["store_path"] = str(store)
    seconds["discovery"] = _run("route discover", settings.outcomes, place, 1, {
        **model, "data": str(place / "routing"), "save_path": str(outcomes),
    })  # fmt: skip
    seconds["router"] = _run("route train", settings.router, place, 1, {
        **model, "targets": str(outcomes), "save_path": str(router),
    })  # fmt: skip
    _copy_store(store, target)
    return seconds


def _train_stacks(
    settings: RebuildSettings, place: Path, store: Path, model: dict[str, str]
) -> float:
    """One domain after the other, with no other enabled; in the end all are.

    Returns seconds, those of an interrupted run too, but for a domain in which it was cut off.
    """
    from mlxstacks.files.store import Store

    paths = {**model, "data": str(place / "curriculum"), "save_path": str(store)}
    names = [domain.name for domain in settings.stacks.domains]
    for domain in settings.stacks.domains:
        if store.exists() and Store.open(store).manifest.domain_named(domain.name):
            continue
        _enable(store, ())
        alone = settings.stacks.model_copy(update={"domains": (domain,)})
        took = _run("stack", alone, place, settings.processes, paths)
        (place / f"{domain.name}.seconds").write_text(str(took))
    _enable(store, names)
    known = [place / f"{name}.seconds" for name in names]
    return sum(float(path.read_text()) for path in known if path.exists())


def _enable(path: Path, names: Collection[str]) -> None:
    """Enable these domains of a store, and no others. A store that is not there has none."""
    from mlxstacks.files.store import Store

    if not path.exists():
        return
    with Store.open(path).change("enable") as change:
        for domain in change.manifest.domains:
            now = replace(domain, enabled=domain.name in names)
            change.manifest = change.manifest.with_domain(now)


def _digest(settings: RebuildSettings) -> str:
    """Of what the stacks depend on beside the base: another place for other settings."""
    return hashlib.sha256(settings.stacks.model_dump_json().encode()).hexdigest()[:12]


def _run(
    command: str, settings: BaseModel, place: Path, processes: int, paths: dict[str, Any]
) -> float:
    """Run a command on its own; returns seconds. Raises: RuntimeError where it fails."""
    start = time.perf_counter()
    recipe = place / f"{command.replace(' ', '-')}.yaml"
    values = {"command": command, **settings.model_dump(mode="json", exclude={"force"}), **paths}
    recipe.write_text(json.dumps(values, indent=1), encoding="utf-8")  # JSON is YAML
    force = [] if command == "stack" else ["--force"]  # a store is added to
    run_in_processes("mlxstacks", ["run", str(recipe), *force], processes)
    return time.perf_counter() - start


def _copy_store(store: Path, target: Path) -> None:
    """Manifest and what it names; log, lock and reports tell of times and of this machine."""
    from mlxstacks.files.store import Store
    from mlxstacks.files.store_files import MANIFEST

    named = [record.file for record in Store.open(store).manifest.files()]
    for name in (MANIFEST, *named):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(store / name, target / name)
