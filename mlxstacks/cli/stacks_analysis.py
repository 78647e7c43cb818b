"""Runs `mlxstacks stacks analyse`, on nano where the store is nano's: studies know no nano."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxstacks.files.store_settings import StacksAnalyseSettings
    from mlxstacks.study.result import Result


def run(
    settings: "StacksAnalyseSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "Result":
    """The analysis; nano and its curriculum stand in where the store was trained on them."""
    from mlxstacks.nano.exports import nano_model, nano_paths
    from mlxstacks.studies.stack import analysis

    unsaid = not (settings.model or settings.weights_only or dry_run)
    model = nano_model(settings.store_path) if settings.store_path and unsaid else None
    if model is not None:
        data = settings.data or str(nano_paths().curriculum_path)
        settings = settings.model_copy(update={"model": str(model), "data": data})
    return analysis.run(settings, dry_run=dry_run, progress=progress)
