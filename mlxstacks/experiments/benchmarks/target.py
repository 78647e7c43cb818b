"""What `mlxstacks eval` leaves in its target."""

import shutil
from dataclasses import replace
from pathlib import Path

from mlxstacks.experiments.benchmarks.plots import write_plots
from mlxstacks.experiments.benchmarks.report import REPORT, EvalReport
from mlxstacks.experiments.benchmarks.settings import EvalSettings
from mlxstacks.experiments.prereg import PLAN
from mlxstacks.files.outputs import clone_or_link, staged_directory, write_json

_PARTS = ("answers", "arms", "harness")


def write_target(
    target: Path, work: Path, report: EvalReport, settings: EvalSettings
) -> EvalReport:
    """Answers, notes of the arms, plan, plots, recipe and report; returns the report as written."""
    with staged_directory(target, force=settings.force) as directory:
        for name in _PARTS:
            if (work / name).is_dir():
                # Linked, not moved: until the target is there the work directory stays whole.
                shutil.copytree(
                    work / name, directory / name,
                    copy_function=lambda old, new: clone_or_link(Path(old), Path(new)),
                )  # fmt: skip
        shutil.copyfile(work / PLAN, directory / PLAN)
        if settings.plots and report.findings is not None:
            names, notes = write_plots(directory, report.findings)
            report = replace(report, plots=names, notes=[*report.notes, *notes])
        _write_recipe(directory, settings)
        write_json(directory / REPORT, report.as_json())
    return report


def _write_recipe(directory: Path, settings: EvalSettings) -> None:
    """recipe.yaml: `mlxstacks run` on it makes the same run again."""
    import yaml

    values = settings.model_dump(
        mode="json", exclude={"force", "save_path", "resume"}, exclude_none=True
    )
    # No limit is written down, where a limit that is missing would be the default.
    values["limit"] = settings.limit
    text = yaml.safe_dump({"command": "eval", **values}, sort_keys=False, allow_unicode=True)
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
