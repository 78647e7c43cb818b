"""What `mlxstacks identity` leaves in its target."""

from pathlib import Path

from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.studies.identity.conditions import FACTUAL, SECOND
from mlxstacks.studies.identity.report import IdentityReport
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.studies.identity.suite import Suite, suite_text
from mlxstacks.study.artifacts import keep_parts, write_recipe

REPORT, SUITE = "identity_report.json", "suite.json"
_KEPT_DIRECTORIES = ("answers", "data", "fuse", FACTUAL, SECOND)
_KEPT_FILES = ("plan.json", "split.json")


def write_target(
    target: Path, work: Path, report: IdentityReport, suite: Suite, settings: IdentitySettings
) -> None:
    """Replies, adapters, plan, suite, figures and report; with `keep_models` the models too."""
    models = ("models",) if settings.keep_models else ()
    with staged_directory(target, force=settings.force) as directory:
        keep_parts(work, directory, (*_KEPT_DIRECTORIES, *models), _KEPT_FILES)
        (directory / SUITE).write_text(suite_text(suite), encoding="utf-8")
        write_recipe(directory, "identity", settings)
        write_json(directory / REPORT, report.as_json())
