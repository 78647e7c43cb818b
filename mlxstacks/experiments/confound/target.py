"""What `mlxstacks confound` leaves in its target, and the names of its parts."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from mlxstacks.experiments.confound.plots import write_plots
from mlxstacks.experiments.confound.report import ConfoundReport
from mlxstacks.experiments.confound.settings import ConfoundSettings
from mlxstacks.files.outputs import clone_or_link, staged_directory, write_json

REPORT = "confound_report.json"


@dataclass(frozen=True)
class _Parts:
    persona: str = "persona"
    adapter: str = "adapter"
    zero: str = "zero"
    random: str = "random"
    models: str = "models"


PARTS = _Parts()
_KEPT_DIRECTORIES = ("answers", "data", "fuse", PARTS.adapter, PARTS.zero, PARTS.random)
_KEPT_FILES = ("protocol.json", "split.json", "plan.json")


def write_target(
    target: Path, work: Path, report: ConfoundReport, settings: ConfoundSettings
) -> ConfoundReport:
    """Answers, adapters, plan, figures, plots and report; with `keep_models` the models too.

    Returns the report with the names of its plots.
    """
    models = (PARTS.persona, PARTS.models) if settings.keep_models else ()
    with staged_directory(target, force=settings.force) as directory:
        for name in (*_KEPT_DIRECTORIES, *models):
            if (work / name).is_dir():
                # Linked, not moved: until the target is there the work directory stays whole.
                shutil.copytree(
                    work / name, directory / name,
                    copy_function=lambda old, new: clone_or_link(Path(old), Path(new)),
                    ignore=lambda _, names: [name for name in names if name.endswith(".lock")],
                )  # fmt: skip
        for name in _KEPT_FILES:
            shutil.copyfile(work / name, directory / name)
        _write_recipe(directory, settings)
        if report.findings and settings.plots:
            ways = list(settings.ways)
            plots, said = write_plots(directory, report.findings, ways, settings.least_gain)
            report = replace(report, plots=plots, notes=[*report.notes, *said])
        write_json(directory / REPORT, report.as_json())
    return report


def _write_recipe(directory: Path, settings: ConfoundSettings) -> None:
    """recipe.yaml: `mlxstacks run` on it makes the same run again."""
    import yaml

    values = settings.model_dump(
        mode="json", exclude={"force", "save_path", "resume"}, exclude_none=True
    )
    text = yaml.safe_dump({"command": "confound", **values}, sort_keys=False, allow_unicode=True)
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
