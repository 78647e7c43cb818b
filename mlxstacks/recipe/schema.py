"""The JSON Schema of recipes, for completion and checks in an editor; made from the settings.

One document: `command` decides which other keys there are. It says what pydantic says of single
keys (names, types, choices, limits, descriptions); what depends on several keys together is found
when the recipe is read.

The first line of a shipped recipe names `recipe.schema.json` next to it: this document, which
`make install` and `make wheel` write. Elsewhere:

    mlxstacks recipes --schema > recipe.schema.json
"""

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from mlxstacks.recipe.table import ALIASES, COMMANDS, command_named, load

# Editors know this draft best.
DRAFT = "http://json-schema.org/draft-07/schema#"
FILE = "recipe.schema.json"
_REF = "#/$defs/"
_COMMAND = "What to run; it decides which other keys there are."
# Of pydantic or of ours, and no words of the draft.
_FOREIGN = ("cli_type", "cli_name", "cli_switch", "ge")
_SCALARS = ("string", "integer", "number")


def recipe_schema(command: str | None = None) -> dict[str, Any]:
    """The schema of all recipes, or of those for one command.

    Law: a shipped recipe passes, and one with an unknown key, at any depth, does not.
    Raises: InputError for an unknown command.
    """
    definitions = copy.deepcopy(_definitions())
    head = {"$schema": DRAFT, "title": "A recipe of mlxstacks"}
    if command is not None:
        command_named(command)
        own = definitions.pop(ALIASES.get(command, command))
        return head | own | {"$defs": _reached(own, definitions)}
    names = {name: _names(name) for name in COMMANDS}
    body = {
        "type": "object",
        "required": ["command"],
        "properties": {
            "command": {"description": _COMMAND, "enum": [n for own in names.values() for n in own]}
        },
        "allOf": [
            {
                "if": {"properties": {"command": {"enum": own}}, "required": ["command"]},
                "then": {"$ref": _REF + name},
            }
            for name, own in names.items()
        ],
    }
    return head | body | {"$defs": _reached(body, definitions)}


def _names(command: str) -> list[str]:
    """The command, and its aliases."""
    return [command, *(alias for alias, name in ALIASES.items() if name == command)]


@functools.cache
def _definitions() -> dict[str, Any]:
    """A definition for each command by its name, and for each nested model by its class."""
    from pydantic.json_schema import models_json_schema

    classes = {name: load(row.settings) for name, row in COMMANDS.items()}
    unique = list(dict.fromkeys(classes.values()))
    refs, made = models_json_schema(
        [(each, "validation") for each in unique], ref_template=_REF + "{model}"
    )
    nested = {name: _cleaned(schema) for name, schema in made["$defs"].items()}
    for schema in nested.values():
        schema.get("properties", {}).pop("force", None)  # no key of a recipe
    of_command = {}
    for name, settings_class in classes.items():
        place = refs[(settings_class, "validation")]["$ref"].removeprefix(_REF)
        of_command[name] = _of_command(name, nested[place])
    return nested | of_command


def _of_command(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and the key `command`. Nothing is required: what is not said has a default or comes
    from nano, and the save path from the recipe's name.
    """
    made = copy.deepcopy(dict(settings))
    made.pop("required", None)
    keys = {key: _or_one(schema) for key, schema in made["properties"].items()}
    about = {"description": COMMANDS[name].help, "enum": _names(name)}
    made["properties"] = {"command": about, **keys}
    made["required"] = ["command"]
    return made


def _or_one(schema: dict[str, Any]) -> dict[str, Any]:
    """A list of one may be written without its brackets, as `validate` in resolve.py reads it."""
    if schema.get("type") != "array":
        return schema
    items = schema.get("items", {})
    scalars = [one for one in items.get("anyOf", [items]) if _is_scalar(one)]
    about = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return about | ({"anyOf": [schema, *scalars]} if scalars else schema)


def _is_scalar(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") in _SCALARS


def _cleaned(schema: Any, names: bool = False) -> Any:
    """Without generated titles and words that the draft does not know. names: the keys are names
    of settings, and each of them stays.
    """
    if isinstance(schema, list):
        return [_cleaned(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if not names:
        schema = _without_null(schema)
    drop = () if names else ("title", *_FOREIGN)
    keep_as_it_is = ("default", "const", "enum", "examples")
    return {
        key: value if key in keep_as_it_is and not names
        else _cleaned(value, names=key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if key not in drop
    }  # fmt: skip


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """`X or null` as one type where X has one, and no word of a default that is nothing."""
    made = {k: v for k, v in schema.items() if k != "default" or v is not None}
    parts = made.get("anyOf", [])
    if len(parts) != 2 or parts[1] != {"type": "null"} or not isinstance(parts[0].get("type"), str):
        return made
    del made["anyOf"]
    made = {**parts[0], **made, "type": [parts[0]["type"], "null"]}
    if "enum" in made:
        made["enum"] = [*made["enum"], None]
    return made


def _reached(body: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions that `body` refers to, directly or not, by name."""
    found: dict[str, Any] = {}
    left = list(_references(body))
    while left:
        name = left.pop()
        if name not in found:
            found[name] = definitions[name]
            left += _references(definitions[name])
    return dict(sorted(found.items()))


def _references(schema: Any) -> Iterable[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(_REF)
        for part in schema.values():
            yield from _references(part)
