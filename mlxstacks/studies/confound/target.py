"""What `mlxstacks confound` leaves in its target, and the names of its parts."""

from dataclasses import dataclass, replace
from pathlib import Path

from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.studies.confound.plots import write_plots
from mlxstacks.studies.confound.report import ConfoundReport
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.study.artifacts import keep_parts, write_recipe

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
        keep_parts(work, directory, (*_KEPT_DIRECTORIES, *models), _KEPT_FILES)
        write_recipe(directory, "confound", settings)
        if report.findings and settings.plots:
            ways = list(settings.ways)
            plots, said = write_plots(directory, report.findings, ways, settings.least_gain)
            report = replace(report, plots=plots, notes=[*report.notes, *said])
        write_json(directory / REPORT, report.as_json())
    return report
