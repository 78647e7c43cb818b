"""The recipe that makes a result again, on any machine that has what it reads.

A run on the built-in model holds where that model lay: in a cache, in a package. Such paths are
left out of the recipe, and the command finds the model where it lies then.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.files.outputs import PLACES

_CACHE, _DIGEST = r"nano-[0-9a-f]{16}", r"(?:-[0-9a-f]{12})?"
# How the paths of `nano.exports.nano_paths` end, wherever cache and package are.
_ENDS = {
    "model": rf"{_CACHE}/model-3bit",
    "adapter": r"mlxstacks/assets/nano/adapter",
    "store": r"mlxstacks/assets/nano/store",
    "data": rf"{_CACHE}/data",
    "domains": rf"{_CACHE}/domains",
    "float model": rf"{_CACHE}/model-float32",
    "curriculum": rf"{_CACHE}/curriculum{_DIGEST}",
    "held out": rf"{_CACHE}/curriculum{_DIGEST}/[a-z_]+/[a-z_]+\.jsonl",
    "routing": rf"{_CACHE}/routing{_DIGEST}",
    "items": rf"{_CACHE}/items{_DIGEST}/items\.jsonl",
    "suite": rf"{_CACHE}/suite{_DIGEST}/suite\.json",
}
# Settings that name what is read, from the directory of the run where they are relative. A model
# and items may be hub ids instead, which by their text cannot be told from such paths.
READ = {
    "model", "adapter_path", "store_path", "other_path", "router_path", "routers", "targets",
    "resume_adapter_file", "json_schema", "calibration",
    "data", "corpus", "log_path", "prompts", "persona", "persona_data", "items",
    "narrow_items", "suite", "task_files", "regrade", "plain_model",
}  # fmt: skip
# Settings of `train` that a study sets where it trains; among its own they would be said twice.
TRAINING_OF_A_STUDY = (
    "model", "data", "save_path", "seed", "resume", "force", "thinking", "allow_special"
)  # fmt: skip
# Names of what ships with the package.
_SHIPPED = {("suite", "default"), ("narrow_items", "default")}
# Settings that are text to a model, whatever they begin with.
_TEXT = {"prompt", "expect", "forbid", "system_prompt", "question"}
# What a source of data says of itself by default.
_USUAL = (None, "train", "auto")
_ROUTED = {"store_path": "store", "model": "model"}
# Command -> setting -> which part of nano stands in for it. With a store of nano's the commands of
# routing find its model and data themselves, so these are more than the table of commands says.
NANO_PARTS: Mapping[str, Mapping[str, str]] = {
    "fuse": {"model": "model", "adapter_path": "adapter"},
    "train": {"model": "model", "data": "data"},
    "stack": {"model": "model", "data": "curriculum"},
    "stack compare": {"model": "model", "data": "curriculum"},
    "stacks analyse": {**_ROUTED, "data": "curriculum"},
    "sweep": {"model": "model", "data": "data"},
    "sweep buffers": {"model": "model"},
    "route discover": {**_ROUTED, "data": "routing"},
    "route train": _ROUTED,
    "route evaluate": {**_ROUTED, "data": "routing", "unseen": "held out"},
    "route check": _ROUTED,
    "profile": {"model": "model", "data": "domains"},
    "confound": {
        "model": "model",
        "persona": "adapter",
        "items": "items",
        "plain_model": "float model",
    },
    "identity": {
        "model": "model",
        "persona": "adapter",
        "persona_data": "data",
        "items": "items",
        "suite": "suite",
    },
    "eval": {"model": "model", "adapter_path": "adapter", "store_path": "store", "data": "items"},
}


@dataclass(frozen=True)
class Recipe:
    """text: YAML that `mlxstacks run` takes. of_nano: settings left to the built-in model.

    paths: settings that hold a path from the root, which another machine may not have.
    relative: settings that hold a path from the directory where the run was made.
    """

    text: str
    of_nano: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    relative: tuple[str, ...] = ()


def recipe_of(command: str, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of settings of a command.

    Law: where the paths left out are those that `command` fills in, it resolves the recipe to the
    settings of the result.
    """
    import yaml

    values = {name: value for name, value in settings.items() if name not in PLACES}
    of_nano = _nano_parts(command, values)
    values = {name: value for name, value in values.items() if name not in of_nano}
    values = {name: _training(value) for name, value in values.items()}
    text: str = yaml.safe_dump(
        {"command": command, **values}, sort_keys=False, allow_unicode=False, width=88
    )
    if of_nano:
        listed = "".join(f"#   {name}: {end}\n" for name, end in of_nano.items())
        text = f"# Left out, so that the command takes the built-in nano's own:\n{listed}{text}"
    paths = tuple(
        str(name) for name, value in values.items()
        if any(_is_absolute(text) for key, text in _strings(name, value) if key not in _TEXT)
    )  # fmt: skip
    # files of sources lie in `data`, where that is given
    alone = not settings.get("data")
    relative = tuple(str(name) for name, value in values.items() if _relative(name, value, alone))
    return Recipe(text, tuple(of_nano), paths, relative)


def _training(value: Any) -> Any:
    """Of a training in a study, without what the study sets."""
    if not isinstance(value, Mapping) or not value.keys() >= PLACES:
        return value
    return {name: one for name, one in value.items() if name not in TRAINING_OF_A_STUDY}


def _nano_parts(command: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> how its path of nano ends, of those that the command fills in again."""
    parts = NANO_PARTS.get(command, {})
    ends = {name: _nano_end(part, values.get(name)) for name, part in parts.items()}
    of_nano = {name: end for name, end in ends.items() if end is not None}
    if "data" not in of_nano:
        of_nano.pop("unseen", None)  # it is found again beside nano's own data alone
    # what the command would fill in without a model, and the run went without
    added = [
        name for name in parts
        if not values.get(name) and name != "unseen"
        and not (name == "data" and values.get("sources"))
    ]  # fmt: skip
    if "model" in of_nano and not added:
        return of_nano
    # beside a model that is named, only a store of nano's is found again
    alone = "store_path" in of_nano and command.startswith(("route ", "stacks "))
    return {"store_path": of_nano["store_path"]} if alone else {}


def _nano_end(part: str, value: Any) -> str | None:
    """Of a path, or of a list of one; None for what is not this part of nano."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        # a source of data, where it says no more than where it is
        others = [other for key, other in value.items() if key != "path"]
        value = value.get("path") if all(other in _USUAL for other in others) else None
    if not isinstance(value, str):
        return None
    match = re.search(rf"(?:^|/)({_ENDS[part]})/?\Z", value)
    return match.group(1) if match else None


def _relative(name: str, value: Any, alone: bool) -> bool:
    """Whether it holds a path from the directory of the run; alone: there is no `data`."""
    if name in READ:
        listed = value if isinstance(value, list) else [value]
        paths = [path for path in listed if isinstance(path, str) and (name, path) not in _SHIPPED]
        paths += [path for key, path in _strings(name, value) if key == "path"]
    else:
        paths = [p for key, p in _strings(name, value) if alone and key in ("path", "unseen")]
    return any(path and not _is_absolute(path) for path in paths)


def _is_absolute(path: str) -> bool:
    return path.startswith(("/", "~"))


def _strings(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Each text in a setting, with the nearest name above it."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(str(key), inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(name, inner)
