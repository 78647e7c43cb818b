"""Runs `mlxstacks sweep`, with nano's exports where the model is nano."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxstacks.studies.sweep.settings import SweepSettings
    from mlxstacks.study.result import Result


def run(
    settings: "SweepSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "Result":
    """The sweep. nano is exported at whatever widths are asked for; studies know no nano."""
    from mlxstacks.nano.exports import nano_paths
    from mlxstacks.studies.sweep import rank_sweep

    def nano_at(bits: int | None) -> str:
        return str(nano_paths(bits).model_path)

    # A model of one's own has {bits} in its name wherever there are bits.
    is_nano = settings.bits and settings.model == str(nano_paths().model_path)
    base_at = nano_at if is_nano else None
    return rank_sweep.run(settings, base_at=base_at, dry_run=dry_run, progress=progress)
