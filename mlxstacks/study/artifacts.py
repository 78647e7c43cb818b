"""What a finished experiment takes from its work directory into its target."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mlxstacks.files.side_files import clone_or_link

if TYPE_CHECKING:
    from pydantic import BaseModel

RECIPE = "recipe.yaml"
_NOT_OF_A_RECIPE = {"force", "save_path", "resume"}


def keep_parts(
    work: Path, directory: Path, directories: Iterable[str], files: Iterable[str]
) -> None:
    """Directories (those that are there) and files, under their names.

    Linked, not moved: until the target is there the work directory stays whole. Left out are
    hidden files: locks, and what a killed run left of a model.
    """
    for name in directories:
        if (work / name).is_dir():
            shutil.copytree(
                work / name, directory / name,
                copy_function=lambda old, new: clone_or_link(Path(old), Path(new)),
                ignore=lambda _, names: [name for name in names if name.startswith(".")],
            )  # fmt: skip
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        clone_or_link(work / name, directory / name)


def write_recipe(directory: Path, command: str, settings: "BaseModel") -> None:
    """recipe.yaml: `mlxstacks run` on it makes the same run again. What is none is written too: not
    every default is.
    """
    import yaml

    values = settings.model_dump(mode="json", exclude=_NOT_OF_A_RECIPE)
    text = yaml.safe_dump({"command": command, **values}, sort_keys=False, allow_unicode=True)
    (directory / RECIPE).write_text(text, encoding="utf-8")
