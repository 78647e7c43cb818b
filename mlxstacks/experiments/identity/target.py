"""What `mlxstacks identity` leaves in its target."""

import shutil
from pathlib import Path

from mlxstacks.experiments.identity.conditions import FACTUAL, SECOND
from mlxstacks.experiments.identity.report import IdentityReport
from mlxstacks.experiments.identity.settings import IdentitySettings
from mlxstacks.experiments.identity.suite import Suite, suite_text
from mlxstacks.files.outputs import clone_or_link, staged_directory, write_json

REPORT, SUITE = "identity_report.json", "suite.json"
_KEPT_DIRECTORIES = ("answers", "data", "fuse", FACTUAL, SECOND)
_KEPT_FILES = ("plan.json", "split.json")


def write_target(
    target: Path, work: Path, report: IdentityReport, suite: Suite, settings: IdentitySettings
) -> None:
    """Replies, adapters, plan, suite, figures and report; with `keep_models` the models too."""
    models = ("models",) if settings.keep_models else ()
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
        (directory / SUITE).write_text(suite_text(suite), encoding="utf-8")
        _write_recipe(directory, settings)
        write_json(directory / REPORT, report.as_json())


def _write_recipe(directory: Path, settings: IdentitySettings) -> None:
    """recipe.yaml: `mlxstacks run` on it makes the same run again."""
    import yaml

    values = settings.model_dump(
        mode="json", exclude={"force", "save_path", "resume"}, exclude_none=True
    )
    text = yaml.safe_dump({"command": "identity", **values}, sort_keys=False, allow_unicode=True)
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
