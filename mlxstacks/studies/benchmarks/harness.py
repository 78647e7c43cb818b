"""lm-evaluation-harness (extra `eval`) over arms: its tasks, its prompts and metrics, our modes.

    results = run_harness(open_arms(("base", "routed"), settings), ["arc_easy_local"], data="data/")
    results["arms"]["routed"]["tasks"]["arc_easy_local"]["samples"]

The model class (harness_model.py) is the harness's `TemplateLM`; it is imported when first used,
since importing lm_eval takes seconds. Texts go in as the harness writes them: contexts and
continuations are cut apart by its own rule, which for most texts is that of `ModelArm.score`.

A task's name is that of a task file (of a directory that was given, then ours in lm_eval_tasks/),
else of a task, group or tag that lm_eval itself brings. Of a group or a tag each task is run by
itself, since items are paired in a task.

A task file is YAML in the harness's own form, with `dataset_path: json` and file names. Whatever
would run Python or download something (`!function`, `class`, `unsafe_code`, `trust_remote_code`, a
data set of the hub, a metric of the hub) is refused, by name: a file may come from anywhere.
Functions of lm_eval's own tasks are code of an installed package and may run; their data comes from
the hub, or from what was fetched of it before. A task is refused before its code is imported.
"""

import difflib
import hashlib
import json
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError

from mlxstacks.data.arrow_sets import hub_snapshot
from mlxstacks.data.json_rows import read_records
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.benchmarks.arms import ModelArm
from mlxstacks.studies.benchmarks.tasks import TASKS

SHIPPED = Path(__file__).with_name("lm_eval_tasks")
OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
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
_NOT_TEXT = ("doc_to_image", "doc_to_audio")
_MOST_SHOWN = 8
# What a group may say of its tasks that changes nothing that is asked.
_NAMES_ALONE = {"group", "group_alias", "task", "task_alias", "aggregate_metric_list", "metadata",
                "tag"}  # fmt: skip
_EXAMPLES = {"num_fewshot", "fewshot_split"}
_DEFINED = re.compile(r"""^["']?(?:task|group)["']?:[ \t]*["']?([^\s"'#]+)""", re.MULTILINE)
_INCLUDE = re.compile(r"""^["']?include["']?:[ \t]*["']?([^\s"'#]+)""", re.MULTILINE)
_TAG = re.compile(r"""[^\s\[\],"'-][^\s\[\],"']*""")
_TAGS = re.compile(r"""^["']?tag["']?:([^\n]*(?:\n[ \t]*-[^\n]*)*)""", re.MULTILINE)


def need_lm_eval() -> None:
    """Raises: InputError: lm_eval is not installed."""
    try:
        version("lm_eval")
    except PackageNotFoundError:
        raise InputError(
            "lm-evaluation-harness is not installed; `pip install 'mlxstacks[eval]'`"
        ) from None


@dataclass(frozen=True, slots=True)
class TaskFile:
    """config: as the harness takes it. files: split -> names of its data files."""

    path: Path
    config: dict[str, Any]
    files: Mapping[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        return str(self.config["task"])

    @property
    def asked_as(self) -> str:
        return self.name

    @property
    def file(self) -> str:
        return self.path.name

    def build(self, data: str | Path | None) -> Any:
        """The harness's task over its rows. Raises: InputError: rows or templates do not fit."""
        import datasets
        from lm_eval.api.registry import metric_registry
        from lm_eval.api.task import ConfigurableTask

        for metric in self.config.get("metric_list") or ():
            if metric.get("metric") not in metric_registry:
                raise InputError(
                    f"{self.path}: metric {metric.get('metric')!r} is none of lm_eval's"
                )
        rows = self.read_rows(data)
        try:
            tables = {split: datasets.Dataset.from_list(of) for split, of in rows.items()}

            class LocalTask(ConfigurableTask):
                def download(self, dataset_kwargs: Any = None, **options: Any) -> None:
                    self.dataset = tables

            return LocalTask(config={k: v for k, v in self.config.items() if k != "tag"})
        except (ValueError, TypeError, KeyError, SyntaxError, TemplateError) as error:
            raise InputError(f"{self.path}: {type(error).__name__}: {error}") from error

    def fingerprint(self, data: str | Path | None) -> dict[str, str]:
        """Hashes of config and rows; no lm_eval is needed. Raises: as `read_rows`."""
        rows = self.read_rows(data)
        return {"config_sha256": json_sha256(self.config), "rows_sha256": json_sha256(rows)}

    def read_rows(self, data: str | Path | None) -> dict[str, list[dict[str, Any]]]:
        """Split -> rows of its JSONL files. data: directory of relative names; None: the working
        one.

        A blank in a column's name, which no template can say, becomes an underscore.
        Raises: InputError naming the file, and the line that is no JSON object.
        """
        base = user_path(data) if data is not None else Path()
        rows: dict[str, list[dict[str, Any]]] = {}
        for split, names in self.files.items():
            for path in (base / Path(name).expanduser() for name in names):
                if not path.is_file():
                    raise InputError(
                        f"{path}: no such file; {Path(self.file).name} reads it below --data"
                    )
                rows.setdefault(split, []).extend(
                    {re.sub(r"\W", "_", key): value for key, value in row.items()}
                    for row in read_records(path)
                )
        return rows


@dataclass(frozen=True, slots=True)
class BuiltinTask:
    """asked_as: the name that was asked for; of a group its tasks have other names. config: of the
    task, its functions as the places they stand at. overrides: of its group.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    asked_as: str = ""

    @property
    def file(self) -> str:
        """As reports name it: with its folder."""
        return f"lm_eval/tasks/{self.path.parent.name}/{self.path.name}"

    def fingerprint(self, data: str | Path | None = None) -> dict[str, str]:
        """Hashes of what is asked and how: of the items, and of the examples where some are shown.
        lm_eval's version stands for its code, and no path of this machine counts.

        Raises: as `build`.
        """
        plain = json.dumps([self.config, self.overrides], sort_keys=True, default=str)
        config = [version("lm_eval"), plain.replace(str(_root()), "")]
        task = self.build()
        shown = task.fewshot_docs() if task.get_config("num_fewshot") else None
        digest = hashlib.sha256()
        for rows in (task.eval_docs, shown or ()):
            for row in rows:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
            digest.update(b"\n")
        return {"config_sha256": json_sha256(config), "rows_sha256": digest.hexdigest()}

    def build(self, data: str | Path | None = None) -> Any:
        """The harness's task with its data, fetched where it was not before.

        Raises: InputError: the data is not there, or the task cannot be built.
        """
        dataset, name = str(self.config.get("dataset_path")), self.config.get("dataset_name")
        try:
            try:
                return self._load({})
            except (OSError, ValueError):
                # What `hf download` fetched, which `datasets` does not look for by itself.
                if (snapshot := hub_snapshot(dataset)) is None:
                    raise
                return self._load({"dataset_path": str(snapshot)})
        except (OSError, ValueError) as error:
            named = f"data set {dataset}" + (f" ({name})" if name else "")
            raise InputError(
                f"lm_eval/{self.name}: {named} could not be read: {type(error).__name__}: {error}\n"
                f"  --data serves other tasks than the harness's own. With a network it is fetched "
                f"by itself; or fetch it before: `hf download --repo-type dataset {dataset}`"
            ) from error
        except (
            ImportError, RuntimeError, LookupError, TypeError, AttributeError, TemplateError,
        ) as error:  # fmt: skip
            raise InputError(
                f"lm_eval/{self.name}: cannot be built: {type(error).__name__}: {error}"
            ) from error

    def _load(self, changes: Mapping[str, Any]) -> Any:
        folder = self.path.relative_to(_root()).parts[0]
        member = {"task": self.name, **self.overrides, **changes}
        # As a group of one: the way in which lm_eval takes a task of its index with changes.
        loaded = _manager(folder).load([{"group": "mlxstacks", "task": [member]}])
        return loaded["tasks"][self.name]


HarnessTask = TaskFile | BuiltinTask


def find_tasks(names: Sequence[str], include_path: str | Path | None = None) -> list[HarnessTask]:
    """The tasks of these names, in their order; a group or tag of lm_eval gives each of its tasks.

    Raises: InputError: a name that is none (the nearest is named), a task that may not be run here
        or that is asked for twice, no name at all.
    """
    if len(set(names)) != len(names) or not names:
        raise InputError("give the names of tasks, each once")
    tasks = [task for name in names for task in _tasks_named(name, include_path)]
    asked_as: dict[str, str] = {}
    for task in tasks:
        if task.name in asked_as:
            raise InputError(
                f"task {task.name} is asked for twice: by {asked_as[task.name]} and {task.asked_as}"
            )
        asked_as[task.name] = task.asked_as
    return tasks


def _tasks_named(name: str, include_path: str | Path | None) -> Sequence[HarnessTask]:
    files = task_files(include_path)
    if name in files:
        config = _yaml(files[name])
        _check(files[name], config)
        return [TaskFile(files[name], config, _data_files(files[name], config))]
    builtin = tuple(_folders()) if find_spec("lm_eval") else ()
    if name in builtin:
        return builtin_tasks(name)
    if not builtin:
        close = difflib.get_close_matches(name, files, n=1, cutoff=0.9)
        own = f"; did you mean {close[0]!r}?" if close else ""
        own = f"; or give --tasks {name}, which needs none" if name in TASKS else own
        raise InputError(
            f"lm_eval/{name[:80]}: lm_eval is not installed: `pip install 'mlxstacks[eval]'`{own}"
        )
    close = difflib.get_close_matches(name, [*files, *builtin], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(files)
    count = f"{len(builtin):,} of lm_eval's own"
    raise InputError(f"no task {name[:80]!r}{hint} (there are: {listed}; {count})")


def task_files(include_path: str | Path | None = None) -> dict[str, Path]:
    """Task name -> file: those shipped, and those of a directory, which go first.

    Raises: InputError: the directory is none, a file is not YAML, a name is there twice.
    """
    directories = [SHIPPED]
    if include_path is not None:
        directories.append(user_path(include_path))
        if not directories[-1].is_dir():
            raise InputError(f"{directories[-1]}: include_path is no directory of task files")
    files: dict[str, Path] = {}
    for directory in directories:
        of_directory: dict[str, Path] = {}
        for path in sorted(directory.glob("*.yaml")):
            name = _yaml(path).get("task")
            if not isinstance(name, str) or not name:
                raise InputError(f"{path}: task is {name!r}; a task file names one task")
            if name in of_directory:
                raise InputError(f"{path}: task {name} is in {of_directory[name].name} already")
            of_directory[name] = path
        files |= of_directory
    return files


def _yaml(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        if "!function" in str(error):
            raise InputError(
                f"{path}: !function runs Python from a file next to it; write it as a template"
            ) from None
        raise InputError(f"{path}: no task file: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: no task file: it holds no keys")
    return config


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
    data_files = config["dataset_kwargs"].get("data_files")
    data_files = {"train": data_files} if isinstance(data_files, str | list) else data_files
    files = {
        split: (names,) if isinstance(names, str) else tuple(names or ())
        for split, names in (data_files or {}).items()
    }
    splits = {config[key] for key in _SPLITS if config.get(key)}
    if not files or not all(files.values()) or not splits or splits - set(files):
        raise InputError(
            f"{path}: data_files needs a file for each split in use ({', '.join(sorted(splits))})"
        )
    return files


def builtin_tasks(name: str) -> list[BuiltinTask]:
    """The task of this name, or each task of the group or tag of this name.

    Raises: InputError listing those that may not be run here; for a group that changes more of its
        tasks than their examples.
    """
    tasks = [replace(task, asked_as=name) for task in _leaves(name, {})]
    refused = [
        "\n    ".join([f"lm_eval/{task.name}: cannot be run here:", *problems])
        for task in tasks
        if (problems := _problems(task.config))
    ]
    if refused:
        more = [f"and {len(refused) - _MOST_SHOWN} more"] if len(refused) > _MOST_SHOWN else []
        raise InputError("\n  ".join([*refused[:_MOST_SHOWN], *more]))
    return tasks


def _root() -> Path:
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "tasks").resolve()


@cache
def _folders() -> dict[str, list[str]]:
    """Name -> folders of lm_eval's tasks that say it: reading all 14,000 files as YAML takes half
    a minute, looking for names in them a second.
    """
    folders: dict[str, list[str]] = {}
    root = _root()
    for path in sorted(root.glob("*/**/*"), key=Path.as_posix):
        # Templates that tasks include have no ending, and may name their tags.
        if path.suffix not in ("", ".yaml") or not path.is_file():
            continue
        text = _text(path)
        folder = path.relative_to(root).parts[0]
        for name in {*_DEFINED.findall(text), *_TAG.findall("\n".join(_TAGS.findall(text)))}:
            if folder not in (of_name := folders.setdefault(name, [])):
                of_name.append(folder)
    return folders


def _text(path: Path, elsewhere: bool = False) -> str:
    """Of a file, and of those that it includes from another folder."""
    texts = [path.read_text(encoding="utf-8", errors="replace")]
    for name in _INCLUDE.findall(texts[0]):
        if (elsewhere or name.startswith("../")) and (other := path.parent / name).is_file():
            texts.append(_text(other, True))
    return "\n".join(texts)


@cache
def _manager(folder: str) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(_root() / folder), include_defaults=False)


def _leaves(name: str, overrides: Mapping[str, Any]) -> Iterator[BuiltinTask]:
    # One of each folder that has the name, in the order of lm_eval's own index.
    indices = [_manager(folder).task_index for folder in _folders().get(name, ())]
    entries = [index[name] for index in indices if name in index]
    if not entries:
        raise InputError(f"lm_eval has no task {name[:80]!r}")
    first = entries[0]
    if first.kind.name == "TAG":
        for task in sorted({task for entry in entries for task in entry.tags}):
            yield from _leaves(task, overrides)
    elif first.kind.name == "GROUP":
        yield from _members(name, first.cfg, overrides)
    else:
        yield BuiltinTask(name, first.yaml_path, first.cfg, dict(overrides))


def _members(
    group: str, config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Iterator[BuiltinTask]:
    changes = {**_changes(group, config), **overrides}
    members = config.get("task") or ()
    for member in [members] if isinstance(members, str) else members:
        if isinstance(member, str):
            yield from _leaves(member, changes)
        elif isinstance(member.get("task"), list):
            yield from _members(str(member.get("group", group)), member, changes)
        else:
            name = str(member.get("task") or member.get("group"))
            yield from _leaves(name, changes | _changes(group, member))


def _changes(group: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which examples a group shows. Raises: InputError: it changes more of its tasks."""
    if others := sorted(set(config) - _NAMES_ALONE - _EXAMPLES):
        raise InputError(
            f"lm_eval/{group}: the group changes {', '.join(others)} of its tasks; ask for those "
            "tasks by name"
        )
    return {key: config[key] for key in sorted(_EXAMPLES) if key in config}


def _problems(config: Mapping[str, Any]) -> list[str]:
    """What of a task is not run here."""
    import lm_eval.api.metrics  # noqa: F401  registers them
    from lm_eval.api.registry import metric_registry

    from mlxstacks.studies.benchmarks.harness_model import greedy_settings

    problems = []
    if config.get("unsafe_code"):
        problems.append(
            "unsafe_code: it runs code that a model wrote; `mlxstacks eval` does that in a sandbox"
            " for its own tasks"
        )
    if config.get("class"):
        problems.append("class: it is a Python class with requests of its own form")
    problems += [f"{key}: only text is asked" for key in config if key in _NOT_TEXT]
    kwargs = config.get("dataset_kwargs") or {}
    if config.get("trust_remote_code") or kwargs.get("trust_remote_code"):
        problems.append("trust_remote_code: its data set is a program of the hub")
    if config.get("output_type", "generate_until") not in OUTPUT_TYPES:
        problems.append(f"output_type {config['output_type']}: only {', '.join(OUTPUT_TYPES)}")
    if config.get("repeats", 1) != 1:
        problems.append("repeats: answers are greedy, so one is enough")
    # Metrics that lm_eval would fetch from the hub, as programs; its own may be functions in files.
    for metric in () if config.get("process_results") else config.get("metric_list") or ():
        name = metric["metric"]
        ours = name in metric_registry or str(name).startswith(str(_root()))
        if metric.get("hf_evaluate") or not ours:
            problems.append(f"metric {name}: a program of the hub")
    try:
        greedy_settings(config.get("generation_kwargs") or {})
    except InputError as error:
        problems.append(str(error))
    return problems


def run_harness(
    arms: Iterable[ModelArm],
    task_names: Sequence[str],
    *,
    include_path: str | Path | None = None,
    data: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    chat: bool = False,
    domains: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The same items of each task for every arm; JSON.

    task_names: a task file of include_path, else one of ours, else a task of lm_eval's own; a group
    or tag of those stands for each of its tasks. include_path: directory of more task files. data:
    directory of the data files of task files; lm_eval's own tasks have theirs from the hub. limit:
    items of a task, drawn by the seed from all of them, never the first ones. num_fewshot: in the
    place of a task's own. chat: prompts go through the model's chat template. domains: task, or
    the group it is of -> its domain, for the arms oracle and random.

    tasks: name -> file, output_type, items, asked (places of the rows). arms: name -> tasks (name
    -> metrics, samples, ties, seconds), notes, details. A sample has doc_id, filter, metrics (name
    -> value of this item), and scores or reply; samples of two arms pair by doc_id and filter.
    ties: items whose two best candidates score the same, which lm_eval gives to the first.

    Raises: InputError: lm_eval is not installed, a task may not be run here or does not fit.
    """
    need_lm_eval()
    from mlxstacks.studies.benchmarks.harness_model import ArmModel

    named = find_tasks(task_names, include_path)
    # Its own domain, else that of the group it was asked for by.
    of_name = domains or {}
    labels = {task.name: of_name.get(task.name, of_name.get(task.asked_as)) for task in named}
    tasks = {task.name: task.build(data) for task in named}
    asked = {name: _draw(len(t.eval_docs), limit, f"{seed}/{name}") for name, t in tasks.items()}
    about = {
        task.name: {
            "file": task.file,
            "output_type": tasks[task.name].OUTPUT_TYPE,
            "items": len(tasks[task.name].eval_docs),
            "asked": asked[task.name],
            "version": (task.config.get("metadata") or {}).get("version"),
        }
        for task in named
    }
    of_arms = {}
    for arm in arms:
        model = ArmModel(arm, {name: label for name, label in labels.items() if label is not None})
        results = {
            name: _evaluate(model, name, task, asked[name], seed, num_fewshot, chat)
            for name, task in tasks.items()
        }
        of_arms[arm.name] = {
            "tasks": results, "notes": list(arm.notes), "details": dict(arm.details)
        }  # fmt: skip
    return {
        "lm_eval": version("lm_eval"), "seed": seed, "limit": limit, "chat": chat, "tasks": about,
        "arms": of_arms,
    }  # fmt: skip


def _draw(count: int, limit: int | None, key: str) -> list[int]:
    """Places of the items that are asked, rising."""
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(random.Random(key).sample(range(count), limit))


def _evaluate(
    model: Any, name: str, task: Any, asked: list[int], seed: int, fewshot: int | None, chat: bool
) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    began = time.monotonic()
    shown = task.get_config("num_fewshot")
    task.set_config(key="num_fewshot", value=shown or 0 if fewshot is None else fewshot)
    task.set_fewshot_seed(seed=seed)  # for each arm: all see the same examples
    model.wants_greedy = (
        task.OUTPUT_TYPE == "loglikelihood"
        or "exact_match" in task.aggregation()
        or task.get_config("process_results") is not None  # Python, that may look at it
    )
    model.scores_answers = task.OUTPUT_TYPE != "generate_until"
    evaluation = evaluate(
        model, {"tasks": {name: task}}, samples={name: asked}, bootstrap_iters=0,
        apply_chat_template=chat,
    )  # fmt: skip
    task.set_config(key="num_fewshot", value=shown)
    samples = [_sample(logged, task.OUTPUT_TYPE) for logged in evaluation["samples"][name]]
    metrics = {
        key: value
        for key, value in evaluation["results"][name].items()
        if isinstance(value, int | float) and "stderr" not in key
    }
    scores = [sample["scores"] for sample in samples if len(sample.get("scores", ())) > 1]
    ties = sum(of_item.count(max(of_item)) > 1 for of_item in scores)
    return {
        "metrics": metrics, "samples": samples, "ties": ties, "seconds": time.monotonic() - began
    }  # fmt: skip


def _sample(logged: Mapping[str, Any], output_type: str) -> dict[str, Any]:
    """What paired tests and a reader need of a logged sample."""
    sample = {
        "doc_id": int(logged["doc_id"]),
        "filter": logged["filter"],
        "metrics": {key: _plain(logged[key]) for key in logged["metrics"]},
        "doc_hash": logged["doc_hash"],
    }
    replies = [response[0] for response in logged["resps"]]
    if output_type == "generate_until":
        return {**sample, "reply": replies[0], "answer": logged["filtered_resps"][0]}
    if output_type == "loglikelihood_rolling":
        return {**sample, "scores": [float(value) for value in replies]}
    return {**sample, "scores": [float(value) for value, _ in replies]}


def _plain(value: Any) -> Any:
    """A metric of one item as JSON."""
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value
