"""A first recipe for a model: every setting of a command with its meaning and its default.

What the model needs to be named is set; of a training also what the guard says that fits, with the
layers and projections to choose from. The rest stands behind a `#`, as its default is. A config is
enough; nothing of the weights is read.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from textwrap import wrap
from typing import Any

from mlxstacks import memory
from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError
from mlxstacks.recipe.config_plan import TRAIN
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import OUT, resolve
from mlxstacks.recipe.schema import recipe_schema
from mlxstacks.recipe.table import command_named, load
from mlxstacks.study.render.console import byte_parts

# What stands in a recipe of one's own model for what nano brings: paths to be put there.
_PLACES: Mapping[str, Any] = {
    "repo_id": "you/repository",
    "data": "data", "adapter_path": "adapters", "store_path": "stacks", "persona": "persona",
    "items": "items.jsonl", "domain": "DOMAIN", "stack": "DOMAIN/1", "save_path": "out",
    "other_path": "other-stacks", "prompt": "Who are you?",
}  # fmt: skip
_WIDTH = 96


def starter(command: str, model: str | None, file: str) -> str:
    """The text of a recipe. model: None: nano, with what belongs to it. file: its name.

    Law: it resolves, and for a training `mlxstacks run FILE --dry-run` plans it.
    Raises: InputError: no such command, a model for one that takes none or without a config.
    """
    row = command_named(command)
    settings_class = load(row.settings)
    if model is not None and "model" not in settings_class.model_fields:
        raise InputError(f"{command} takes no model: mlxstacks init --command {command!r}")
    values: dict[str, Any] = (
        {} if row.nano_recipe is None else dict(load_recipe(row.nano_recipe).values)
    )
    if model is not None:
        needed = [key for key in row.nano if key not in (*row.optional, "model")]
        # what has no default, as the arms of a comparison, begins as nano's
        example: dict[str, Any] = {
            key: values[key] for key in ("arms", "question", "run") if key in values
        }
        beside = {"other": "other-model"} if "other" in row.arguments else {}
        values = {"model": model, **beside, **{key: _PLACES[key] for key in needed}, **example}
    places = [key for key in (*row.needs, *row.arguments) if key not in row.nano]
    values |= {key: _PLACES[key] for key in places if key in _PLACES}
    if "save_path" in settings_class.model_fields:
        values = values | {"save_path": str(OUT / PurePath(file).stem)}
    facts: list[str] = []
    if command in TRAIN:
        values, facts = _fitting(command, settings_class, values)
    head = [
        f"{row.help.rstrip('.')}: {model or 'nano, the built-in model'}.",
        "",
        f"Run:      {command_line('mlxstacks run', file)}",
        f"Plan:     {command_line('mlxstacks run', file)} --dry-run",
        *facts,
        "",
        "Every setting is below. What has a # before its name is at its default, or not set.",
    ]
    comment = "\n".join(f"# {line}".rstrip() for line in head)
    return "\n".join([comment, f"command: {command}", *_settings(command, values)]) + "\n"


def _settings(command: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A paragraph for each setting, in the order of the model."""
    schema = recipe_schema(command)["properties"]
    for key, known in load(command_named(command).settings).model_fields.items():
        if key == "force":  # no key of a recipe
            continue
        yield ""
        choices = ", ".join(map(str, schema[key].get("enum", ())))
        words = [known.description or key, f"One of: {choices}." if choices else ""]
        for line in wrap(" ".join(" ".join(words).split()), _WIDTH):
            yield f"# {line}"
        if key in values:
            yield f"{key}: {_yaml(values[key])}"
            continue
        default = known.get_default(call_default_factory=True)
        default = default.model_dump(mode="json") if hasattr(default, "model_dump") else default
        yield f"#{key}: {_yaml(default)}"


def _yaml(value: Any) -> str:
    """JSON, which YAML reads; plain words where they mean the same."""
    plain = isinstance(value, str) and value.replace("-", "").replace("_", "").isalpha()
    plain = plain and value not in ("true", "false", "null")
    if plain or isinstance(value, PurePath):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=list)


def _fitting(
    command: str, settings_class: Any, values: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The values with the guard's change where they would not fit, and the lines that say so."""
    from mlxstacks.recipe.training_plan import projections_of, trainings_of

    def first_training() -> tuple[Any, dict[str, Any]]:
        settings: Any = resolve(command, values).settings
        if "working_set_bytes" in settings_class.model_fields and not settings.working_set_bytes:
            # without a Metal device, whose limit the guard knows, the memory that is there
            most = memory.device().working_set_bytes or memory.device().memory_bytes
            settings = settings.model_copy(update={"working_set_bytes": most})
        return settings, next(iter(trainings_of(command, settings)))

    settings, first = first_training()
    lines, guard = [f"Trains:   {first['trained_parameters']:,} parameters"], first["guard"]
    change = (guard or {}).get("change", {})
    change = {
        key: value
        for key, value in {
            "grad_checkpoint": change.get("checkpointing") == "layers" or None,
            # the guard counts inputs, a row has one token more
            "max_seq_length": 1 + change.get("max_seq_length", -1) or None,
        }.items()
        if value is not None and key in settings_class.model_fields
    }
    if change:
        lines += _hanging(f"Guard:    without {', '.join(change)} as below: {guard['verdict']}")
        values = values | change
        settings, first = first_training()
        guard = first["guard"]
    if guard is not None:
        tokens = first["longest_row_tokens"]
        lines += _hanging(f"Guard:    {guard['verdict']}, for rows of {tokens:,} tokens")
        lines += _hanging(f"Memory:   {byte_parts(guard['parts_bytes'])} (predicted, not measured)")
    return values, [*lines, *_choices(projections_of(settings.model))]


def _hanging(text: str) -> list[str]:
    return wrap(text, _WIDTH, subsequent_indent=" " * 10)


def _choices(projections: Sequence[tuple[int, str]]) -> Iterator[str]:
    """The projections that `keys` can name, by the layers that have them."""
    layers = sorted({layer for layer, _ in projections})
    yield f"Layers:   {layers[0]} to {layers[-1]}; what `keys` can name in them:"
    for name, count in Counter(name for _, name in projections).items():
        having = [layer for layer, other in projections if other == name]
        where = "every layer" if count == len(layers) else f"layers {_ranges(having)}"
        yield from wrap(f"{name}: {where}", _WIDTH, initial_indent=" " * 10,
                        subsequent_indent=" " * 12)  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    """0,1,2,5 as 0-2,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
