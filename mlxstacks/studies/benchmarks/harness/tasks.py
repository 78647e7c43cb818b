"""Task files of lm-evaluation-harness that need neither network nor code: read, checked, built.

A task file is YAML in the harness's own form, with `dataset_path: json` and file names. Ours are in
lm_eval_tasks/. Whatever would run Python or download something (`!function`, `class`,
`unsafe_code`, `trust_remote_code`, a data set of the hub, a metric of the hub) is refused, by name:
a file may come from anywhere. What lm_eval itself brings is in builtin.py.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlxstacks.data.json_lines import read_records
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path

SHIPPED = Path(__file__).with_name("lm_eval_tasks")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_KEYS = frozenset(
    {
        "task", "task_alias", "tag", "dataset_path", "dataset_kwargs", *_SPLITS, "doc_to_text",
        "doc_to_target", "doc_to_choice", "description", "target_delimiter", "fewshot_delimiter",
        "num_fewshot", "output_type", "generation_kwargs", "filter_list", "metric_list", "repeats",
        "gen_prefix", "should_decontaminate", "doc_to_decontamination_query", "metadata",
    }
)  # fmt: skip
_RUNS_CODE = {
    "unsafe_code": "runs code that a model wrote; `mlxstacks eval` does that in a sandbox",
    "class": "is Python", "process_docs": "runs Python", "process_results": "runs Python",
    "custom_dataset": "runs Python", "include": "includes other files; write it out",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskFile:
    """config: as the harness takes it. files: split -> names of its data files."""

    path: Path
    config: dict[str, Any]
    files: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        return str(self.config["task"])


def task_files(include_path: str | Path | None = None) -> dict[str, Path]:
    """Task name -> file: those shipped, and those of a directory, which go first.

    Raises: InputError: the directory is none, a file is not YAML, a name is there twice.
    """
    found = _named(SHIPPED)
    if include_path is not None:
        directory = user_path(include_path)
        if not directory.is_dir():
            raise InputError(f"{directory}: include_path is no directory of task files")
        found |= _named(directory)
    return found


def read_task_file(name: str, include_path: str | Path | None = None) -> TaskFile:
    """Raises: InputError: no such task (the nearest is named), or one that may not be run here."""
    there = task_files(include_path)
    if name not in there:
        close = difflib.get_close_matches(name, there, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"no task file for {name[:80]!r}{hint} (there are: {', '.join(there)})")
    path = there[name]
    config = _yaml(path)
    _check(path, config)
    return TaskFile(path, config, _data_files(path, config))


def read_rows(file: TaskFile, data: str | Path | None) -> dict[str, list[dict[str, Any]]]:
    """Split -> rows of its JSONL files. data: directory of relative names; None: the working one.

    A blank in a column's name, which no template can say, becomes an underscore.
    Raises: InputError naming the file, and the line that is no JSON object.
    """
    base = user_path(data) if data is not None else Path()
    return {
        split: [row for name in names for row in _rows(base / Path(name).expanduser(), file.path)]
        for split, names in file.files.items()
    }


def build_task(file: TaskFile, rows: Mapping[str, Sequence[dict[str, Any]]]) -> Any:
    """The harness's task over these rows. Raises: InputError: rows or templates do not fit."""
    import datasets
    from jinja2 import TemplateError
    from lm_eval.api.registry import metric_registry
    from lm_eval.api.task import ConfigurableTask

    for metric in file.config.get("metric_list") or ():
        if metric.get("metric") not in metric_registry:
            raise InputError(f"{file.path}: metric {metric.get('metric')!r} is none of lm_eval's")
    try:
        tables = {split: datasets.Dataset.from_list(list(of)) for split, of in rows.items()}

        class LocalTask(ConfigurableTask):
            def download(self, dataset_kwargs: Any = None, **options: Any) -> None:
                self.dataset = tables

        return LocalTask(config={k: v for k, v in file.config.items() if k != "tag"})
    except (ValueError, TypeError, KeyError, SyntaxError, TemplateError) as error:
        raise InputError(f"{file.path}: {type(error).__name__}: {error}") from error


# --- reading --------------------------------------------------------------------------------------


def _named(directory: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.yaml")):
        name = _yaml(path).get("task")
        if not isinstance(name, str) or not name:
            raise InputError(f"{path}: task is {name!r}; a task file names one task")
        if name in found:
            raise InputError(f"{path}: task {name} is in {found[name].name} already")
        found[name] = path
    return found


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        if "!function" in str(error):
            raise InputError(
                f"{path}: !function runs Python from beside the file; write it as a template"
            ) from None
        raise InputError(f"{path}: no task file: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: no task file: it holds no keys")
    return found


def _check(path: Path, config: Mapping[str, Any]) -> None:
    """Raises: InputError listing all that may not be run."""
    problems = [f"{key}: it {why}" for key, why in _RUNS_CODE.items() if config.get(key)]
    problems += [
        f"{key}: not a key that is known here"
        for key in config
        if key not in _KEYS and key not in _RUNS_CODE
    ]
    if config.get("dataset_path") != "json":
        problems.append(f"dataset_path {config.get('dataset_path')!r}: only json, from local files")
    if not isinstance(config.get("dataset_kwargs"), dict):
        problems.append("dataset_kwargs: needs data_files")
    elif extra := sorted(set(config["dataset_kwargs"]) - {"data_files"}):
        problems.append(f"dataset_kwargs {', '.join(extra)}: only data_files")
    metrics = config.get("metric_list") or [{}]
    if any(not isinstance(m, dict) or m.get("hf_evaluate") or "metric" not in m for m in metrics):
        problems.append("metric_list: needs metrics of lm_eval itself, none of the hub")
    if config.get("repeats", 1) != 1:
        problems.append("repeats: answers are greedy, so one is enough")
    if problems:
        raise InputError("\n  ".join([f"{path}: cannot be run here:", *problems]))


def _data_files(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    given = config["dataset_kwargs"].get("data_files")
    given = {"train": given} if isinstance(given, str | list) else given
    found = {
        split: (names,) if isinstance(names, str) else tuple(names or ())
        for split, names in (given or {}).items()
    }
    wanted = {config[key] for key in _SPLITS if config.get(key)}
    if not found or not all(found.values()) or not wanted or wanted - set(found):
        raise InputError(
            f"{path}: data_files needs a file for each split in use ({', '.join(sorted(wanted))})"
        )
    return found


def _rows(path: Path, task: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path}: no such file, which {task.name} asks for; give its directory")
    return [
        {re.sub(r"\W", "_", key): value for key, value in row.items()} for row in read_records(path)
    ]
