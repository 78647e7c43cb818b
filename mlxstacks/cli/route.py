"""Runs the commands of `mlxstacks route` on nano where the store's base is nano: studies know none.

Each takes settings of its command and returns its `Result`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mlxstacks.routing.settings import OutcomeSettings, RouterTrainSettings
    from mlxstacks.studies.route.settings import (
        RouteCheckSettings,
        RouteEvaluateSettings,
        RouteExplainSettings,
    )
    from mlxstacks.study.result import Result

    Settings = TypeVar("Settings", bound=BaseModel)

Progress = Callable[..., None] | None


def discover(
    settings: "OutcomeSettings", *, dry_run: bool = False, progress: Progress = None
) -> "Result":
    from mlxstacks.studies.route.discover import run

    return run(with_nano_base(settings), dry_run=dry_run, progress=progress)


def train(
    settings: "RouterTrainSettings", *, dry_run: bool = False, progress: Progress = None
) -> "Result":
    """nano's own store, which lies in the package, is read and not changed."""
    from mlxstacks.studies.route.train import run

    notes: tuple[str, ...] = ()
    if settings.store_path and settings.install and _in_package(settings.store_path):
        settings = settings.model_copy(update={"install": False})
        notes = ("nano's own store is not changed; the router is in the save path alone.",)
    return run(with_nano_base(settings), dry_run=dry_run, progress=progress, notes=notes)


def explain(settings: "RouteExplainSettings") -> "Result":
    from mlxstacks.studies.route.explain import run

    return run(with_nano_base(settings))


def evaluate(
    settings: "RouteEvaluateSettings", *, dry_run: bool = False, progress: Progress = None
) -> "Result":
    from mlxstacks.studies.route.evaluate import run

    return run(with_nano_base(settings), dry_run=dry_run, progress=progress)


def check(
    settings: "RouteCheckSettings", *, dry_run: bool = False, progress: Progress = None
) -> "Result":
    from mlxstacks.studies.route.check import run

    return run(with_nano_base(settings), dry_run=dry_run, progress=progress)


def with_nano_base(settings: "Settings") -> "Settings":
    """With nano's model for a store whose base is nano, where no model is named; and with its
    routing data and its held-out domain, where the command reads such and none are given.
    """
    from mlxstacks.nano.exports import nano_model, nano_paths

    values = vars(settings)
    model = None if values["model"] else nano_model(values["store_path"])
    if model is None:
        return settings
    update: dict[str, Any] = {"model": str(model)}
    if "sources" in values and not (values["data"] or values["sources"]):
        update["data"] = str(nano_paths().routing_path)
        if "unseen" in values and not values["unseen"]:
            update["unseen"] = _held_out(values["store_path"])
    return settings.model_copy(update=update)


def _held_out(store_path: str) -> tuple[Any, ...]:
    """nano's held-out domain, where the store was not trained on it."""
    from mlxstacks.data.settings import SourceSettings
    from mlxstacks.files.store import Store
    from mlxstacks.nano.exports import nano_paths
    from mlxstacks.nano.settings import HELD_OUT, HELD_OUT_DIRECTORY

    if Store.open(store_path).manifest.domain_named(HELD_OUT) is not None:
        return ()
    file = nano_paths().curriculum_path / HELD_OUT_DIRECTORY / f"{HELD_OUT}.jsonl"
    return (SourceSettings(path=str(file)),)


def _in_package(store_path: str) -> bool:
    from mlxstacks.files.disk import user_path
    from mlxstacks.nano.exports import ASSETS

    return Path(user_path(store_path)).resolve().is_relative_to(ASSETS.resolve())
