"""What `mlxstacks eval` leaves in its target."""

from dataclasses import replace
from pathlib import Path

from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.studies.benchmarks.plots import write_plots
from mlxstacks.studies.benchmarks.report import REPORT, EvalReport
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.study.artifacts import keep_parts, write_recipe
from mlxstacks.study.plan import PLAN

_PARTS = ("answers", "arms", "harness")


def write_target(
    target: Path, work: Path, report: EvalReport, settings: EvalSettings
) -> EvalReport:
    """Answers, notes of the arms, plan, plots, recipe and report; returns the report as written."""
    with staged_directory(target, force=settings.force) as directory:
        keep_parts(work, directory, _PARTS, (PLAN,))
        if settings.plots and report.findings is not None:
            names, notes = write_plots(directory, report.findings)
            report = replace(report, plots=names, notes=[*report.notes, *notes])
        write_recipe(directory, "eval", settings)
        write_json(directory / REPORT, report.as_json())
    return report
