"""The tasks that lm_eval itself brings (`arc_easy`, `gsm8k`, `mmlu`): found, checked, built.

Their functions are code of an installed package and may run; their data comes from the hub, or from
what was fetched of it before. Of a group or a tag each task is run by itself, since items are
paired in a task. A task is refused before any of its code is imported.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxstacks.data.arrow_sets import hub_snapshot
from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import json_sha256

OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")
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
class BuiltinTask:
    """config: of the task, its functions as the places they stand at. overrides: of its group."""

    name: str
    path: Path
    config: Mapping[str, Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self, task: Any) -> dict[str, str]:
        """Hashes of what is asked and how; task: as built. lm_eval's version stands for its code,
        and no path of this machine counts.
        """
        plain = json.dumps([self.config, self.overrides], sort_keys=True, default=str)
        config = [version("lm_eval"), plain.replace(str(_root()), "")]
        return {"config_sha256": json_sha256(config), "rows_sha256": _rows_sha256(task)}


def builtin_names() -> tuple[str, ...]:
    """Tasks, groups and tags of the installed lm_eval; none where it is not installed."""
    return tuple(_folders()) if find_spec("lm_eval") else ()


def builtin_tasks(name: str) -> list[BuiltinTask]:
    """The task of this name, or each task of the group or tag of this name.

    Raises: InputError listing those that may not be run here; for a group that changes more of its
        tasks than their examples.
    """
    found = list(_leaves(name, {}))
    refused = [
        "\n    ".join([f"lm_eval/{task.name}: cannot be run here:", *problems])
        for task in found
        if (problems := _problems(task.config))
    ]
    if refused:
        more = [f"and {len(refused) - _MOST_SHOWN} more"] if len(refused) > _MOST_SHOWN else []
        raise InputError("\n  ".join([*refused[:_MOST_SHOWN], *more]))
    return found


def build_builtin(found: BuiltinTask) -> Any:
    """The harness's task with its data, fetched where it was not before.

    Raises: InputError: the data is not there, or the task cannot be built.
    """
    try:
        return _built(found, {})
    except (OSError, ValueError) as error:
        return _from_snapshot(found, error)
    except (ImportError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise _not_built(found, error) from error


# --- finding --------------------------------------------------------------------------------------


def _root() -> Path:
    spec = find_spec("lm_eval")
    assert spec is not None, "asked for after need_lm_eval"
    assert spec.origin is not None
    return (Path(spec.origin).parent / "tasks").resolve()


@cache
def _folders() -> dict[str, list[str]]:
    """Name -> folders of lm_eval's tasks that say it: reading all 14,000 files as YAML takes half
    a minute, looking for names in them a second.
    """
    found: dict[str, list[str]] = {}
    root = _root()
    for path in sorted(root.glob("*/**/*"), key=Path.as_posix):
        # Templates that tasks include have no ending, and may name their tags.
        if path.suffix not in ("", ".yaml") or not path.is_file():
            continue
        text = _text(path)
        folder = path.relative_to(root).parts[0]
        for name in {*_DEFINED.findall(text), *_TAG.findall("\n".join(_TAGS.findall(text)))}:
            if folder not in (there := found.setdefault(name, [])):
                there.append(folder)
    return found


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


def _entries(name: str) -> list[Any]:
    """Entries of this name, one of each folder that has it, in the order of lm_eval's own index."""
    need_lm_eval()
    indices = [_manager(folder).task_index for folder in _folders().get(name, ())]
    return [index[name] for index in indices if name in index]


def _leaves(name: str, overrides: Mapping[str, Any]) -> Iterator[BuiltinTask]:
    entries = _entries(name)
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
    own = {**_changes(group, config), **overrides}
    members = config.get("task") or ()
    for member in [members] if isinstance(members, str) else members:
        if isinstance(member, str):
            yield from _leaves(member, own)
        elif isinstance(member.get("task"), list):
            yield from _members(str(member.get("group", group)), member, own)
        else:
            changes = own | _changes(group, member)
            yield from _leaves(str(member.get("task") or member.get("group")), changes)


def _changes(group: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which examples a group shows. Raises: InputError: it changes more of its tasks."""
    if others := sorted(set(config) - _NAMES_ALONE - _EXAMPLES):
        raise InputError(
            f"lm_eval/{group}: the group changes {', '.join(others)} of its tasks; ask for those "
            "tasks by name"
        )
    return {key: config[key] for key in sorted(_EXAMPLES) if key in config}


# --- checking -------------------------------------------------------------------------------------


def _problems(config: Mapping[str, Any]) -> list[str]:
    """What of a task is not run here."""
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
    return [*problems, *_metric_problems(config), *_sampling_problems(config)]


def _metric_problems(config: Mapping[str, Any]) -> list[str]:
    """Metrics that lm_eval would fetch from the hub, as programs."""
    import lm_eval.api.metrics  # noqa: F401  registers them
    from lm_eval.api.registry import metric_registry

    own = str(_root())
    return [
        f"metric {metric.get('metric')}: a program of the hub"
        for metric in config.get("metric_list") or ()
        if not config.get("process_results")
        and (
            metric.get("hf_evaluate")
            or not (metric["metric"] in metric_registry or str(metric["metric"]).startswith(own))
        )
    ]


def _sampling_problems(config: Mapping[str, Any]) -> list[str]:
    from mlxstacks.studies.benchmarks.harness.model import greedy_settings

    try:
        greedy_settings(config.get("generation_kwargs") or {})
    except InputError as error:
        return [str(error)]
    return []


# --- building -------------------------------------------------------------------------------------


def _built(found: BuiltinTask, changes: Mapping[str, Any]) -> Any:
    from jinja2 import TemplateError

    folder = found.path.relative_to(_root()).parts[0]
    member = {"task": found.name, **found.overrides, **changes}
    # As a group of one: the way in which lm_eval takes a task of its index with changes.
    try:
        loaded = _manager(folder).load([{"group": "mlxstacks", "task": [member]}])
    except TemplateError as error:
        raise _not_built(found, error) from error
    return loaded["tasks"][found.name]


def _from_snapshot(found: BuiltinTask, reason: Exception) -> Any:
    """Built from files that `hf download` fetched, which `datasets` does not look for by itself.

    Raises: InputError: there are none either.
    """
    path = str(found.config.get("dataset_path"))
    try:
        if (snapshot := hub_snapshot(path)) is not None:
            return _built(found, {"dataset_path": str(snapshot)})
    except (OSError, ValueError) as error:
        reason = error
    config = found.config.get("dataset_name")
    named = f"data set {path}" + (f" ({config})" if config else "")
    raise InputError(
        f"lm_eval/{found.name}: {named} could not be read: {type(reason).__name__}: {reason}\n"
        f"  With a network it is fetched by itself; or fetch it before: "
        f"`hf download --repo-type dataset {path}`"
    ) from reason


def _not_built(found: BuiltinTask, error: Exception) -> InputError:
    return InputError(f"lm_eval/{found.name}: cannot be built: {type(error).__name__}: {error}")


def _rows_sha256(task: Any) -> str:
    """Hash of the items, and of the examples where some are shown."""
    digest = hashlib.sha256()
    shown = task.fewshot_docs() if task.get_config("num_fewshot") else None
    for rows in (task.eval_docs, shown or ()):
        for row in rows:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        digest.update(b"\n")
    return digest.hexdigest()
