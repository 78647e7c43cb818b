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
        schema = definitions.pop(ALIASES.get(command, command))
        return head | schema | {"$defs": _reached(schema, definitions)}
    names = {name: _names(name) for name in COMMANDS}
    body = {
        "type": "object",
        "required": ["command"],
        "properties": {
            "command": {
                "description": _COMMAND,
                "enum": [spelling for spellings in names.values() for spelling in spellings],
            }
        },
        "allOf": [
            {
                "if": {"properties": {"command": {"enum": spellings}}, "required": ["command"]},
                "then": {"$ref": _REF + name},
            }
            for name, spellings in names.items()
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
    refs, schemas = models_json_schema(
        [(each, "validation") for each in unique], ref_template=_REF + "{model}"
    )
    nested = {name: _cleaned(schema) for name, schema in schemas["$defs"].items()}
    for schema in nested.values():
        schema.get("properties", {}).pop("force", None)  # no key of a recipe
    definitions = dict(nested)
    for name, settings_class in classes.items():
        place = refs[(settings_class, "validation")]["$ref"].removeprefix(_REF)
        schema = copy.deepcopy(nested[place])
        keys = {key: _or_one(value) for key, value in schema["properties"].items()}
        about = {"description": COMMANDS[name].help, "enum": _names(name)}
        # No setting is required: what is not said has a default or comes from nano, and the save
        # path from the recipe's name.
        definitions[name] = schema | {
            "properties": {"command": about, **keys}, "required": ["command"],
        }  # fmt: skip
    return definitions


def _or_one(schema: dict[str, Any]) -> dict[str, Any]:
    """A list of one may be written without its brackets, as `validate` in resolve.py reads it."""
    if schema.get("type") != "array":
        return schema
    items = schema.get("items", {})
    scalars = [kind for kind in items.get("anyOf", [items]) if kind.get("type") in _SCALARS]
    about = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return about | ({"anyOf": [schema, *scalars]} if scalars else schema)


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
    schema = {k: v for k, v in schema.items() if k != "default" or v is not None}
    parts = schema.get("anyOf", [])
    if len(parts) != 2 or parts[1] != {"type": "null"} or not isinstance(parts[0].get("type"), str):
        return schema
    del schema["anyOf"]
    schema = {**parts[0], **schema, "type": [parts[0]["type"], "null"]}
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    return schema


def _reached(body: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions that `body` refers to, directly or not, by name."""
    reached: dict[str, Any] = {}
    left = list(_references(body))
    while left:
        name = left.pop()
        if name not in reached:
            reached[name] = definitions[name]
            left += _references(definitions[name])
    return dict(sorted(reached.items()))


def _references(schema: Any) -> Iterable[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)
    elif isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix(_REF)
        for part in schema.values():
            yield from _references(part)
