"""What the names of the harness's tasks in a run stand for: a task file, or tasks of lm_eval's own.

Files go first: of a directory that was given, then ours, then what lm_eval brings.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.benchmarks.harness.builtin import (
    BuiltinTask,
    build_builtin,
    builtin_names,
    builtin_tasks,
)
from mlxstacks.studies.benchmarks.harness.tasks import (
    TaskFile,
    build_task,
    read_rows,
    read_task_file,
    task_files,
)


@dataclass(frozen=True, slots=True)
class NamedTask:
    """asked_as: the name that was asked for; of a group its tasks have other names."""

    asked_as: str
    source: TaskFile | BuiltinTask

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def file(self) -> str:
        """As reports name it: of lm_eval's own with their folder."""
        if isinstance(self.source, TaskFile):
            return self.source.path.name
        return f"lm_eval/tasks/{self.source.path.parent.name}/{self.source.path.name}"

    def build(self, data: str | Path | None) -> Any:
        """The harness's task with its rows. data: directory of the data of task files.

        Raises: InputError: the data is not there, or does not fit.
        """
        if isinstance(self.source, TaskFile):
            return build_task(self.source, read_rows(self.source, data))
        return build_builtin(self.source)

    def fingerprint(self, data: str | Path | None) -> dict[str, str]:
        """Hashes of config and rows. Raises: as `build`; of a task file no lm_eval is needed."""
        if isinstance(self.source, TaskFile):
            rows = read_rows(self.source, data)
            return {
                "config_sha256": json_sha256(self.source.config), "rows_sha256": json_sha256(rows)
            }  # fmt: skip
        return self.source.fingerprint(build_builtin(self.source))


def find_tasks(names: Sequence[str], include_path: str | Path | None = None) -> list[NamedTask]:
    """The tasks of these names, in their order; a group or tag of lm_eval gives each of its tasks.

    Raises: InputError: a name that is none (the nearest is named), a task that may not be run here
        or that is asked for twice, no name at all.
    """
    if len(set(names)) != len(names) or not names:
        raise InputError("give the names of tasks, each once")
    found = [task for name in names for task in _find(name, include_path)]
    by_name: dict[str, str] = {}
    for task in found:
        if task.name in by_name:
            raise InputError(
                f"task {task.name} is asked for twice: by {by_name[task.name]} and {task.asked_as}"
            )
        by_name[task.name] = task.asked_as
    return found


def _find(name: str, include_path: str | Path | None) -> list[NamedTask]:
    files = task_files(include_path)
    if name in files:
        return [NamedTask(name, read_task_file(name, include_path))]
    builtin = builtin_names()
    if name in builtin:
        return [NamedTask(name, task) for task in builtin_tasks(name)]
    close = difflib.get_close_matches(name, [*files, *builtin], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    own = f"{len(builtin):,} of lm_eval's own" if builtin else "lm_eval is not installed"
    raise InputError(f"no task {name[:80]!r}{hint} (there are: {', '.join(files)}; {own})")
