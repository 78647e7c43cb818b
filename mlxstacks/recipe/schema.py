"""The JSON Schema of recipes, for completion and checks in an editor; made from the settings.

One document: `command` decides which other keys there are. It says what pydantic says of single
keys (names, types, choices, limits, descriptions); what depends on several keys together is found
when the recipe is read.

The first line of a shipped recipe names `recipe.schema.json` next to it: this document, which
`make install` and `make wheel` write. Elsewhere:

    mlxstacks recipes --schema > recipe.schema.json
"""

from typing import Any

from mlxstacks.recipe.table import ALIASES, COMMANDS, command_named, load

# Editors know this draft best.
DRAFT = "http://json-schema.org/draft-07/schema#"
FILE = "recipe.schema.json"
_COMMAND = "What to run; it decides which other keys there are."
_FOREIGN = ("title", "cli_name", "cli_type", "cli_switch", "ge", "le")
_SCALARS = ("string", "integer", "number")


def recipe_schema(command: str | None = None) -> dict[str, Any]:
    """The schema of all recipes, or of those for one command.

    Law: a shipped recipe passes, and one with an unknown key, at any depth, does not.
    Raises: InputError for an unknown command.
    """
    head = {"$schema": DRAFT, "title": "A recipe of mlxstacks"}
    if command is not None:
        command_named(command)
        schema, nested = _of_command(ALIASES.get(command, command))
        return head | schema | {"$defs": nested}
    definitions: dict[str, Any] = {}
    cases = []
    for name in COMMANDS:
        definitions[name], nested = _of_command(name)
        definitions |= nested
        this = {"properties": {"command": {"enum": _names(name)}}, "required": ["command"]}
        cases.append({"if": this, "then": {"$ref": f"#/$defs/{name}"}})
    names = [spelling for name in COMMANDS for spelling in _names(name)]
    return head | {
        "type": "object", "required": ["command"],
        "properties": {"command": {"description": _COMMAND, "enum": names}},
        "allOf": cases, "$defs": definitions,
    }  # fmt: skip


def _names(command: str) -> list[str]:
    """The command, and its aliases."""
    return [command, *(alias for alias, name in ALIASES.items() if name == command)]


def _of_command(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its schema, and those of the models that its settings hold, by their classes.

    No setting is required: what is not said has a default or comes from nano, and the save path
    from the recipe's name.
    """
    schema = _plain(load(COMMANDS[name].settings).model_json_schema())
    nested = schema.pop("$defs", {})
    for model in (schema, *nested.values()):
        model.get("properties", {}).pop("force", None)  # no key of a recipe
    keys = {key: _or_one(value) for key, value in schema["properties"].items()}
    about = {"description": COMMANDS[name].help, "enum": _names(name)}
    schema |= {"properties": {"command": about, **keys}, "required": ["command"]}
    return schema, nested


def _or_one(schema: dict[str, Any]) -> dict[str, Any]:
    """A list of one may be written without its brackets, as settings.py reads it."""
    if schema.get("type") != "array":
        return schema
    items = schema.get("items", {})
    scalars = [kind for kind in items.get("anyOf", [items]) if kind.get("type") in _SCALARS]
    about = {key: schema.pop(key) for key in ("description", "default") if key in schema}
    return about | ({"anyOf": [schema, *scalars]} if scalars else schema)


def _plain(schema: Any) -> Any:
    """Without pydantic's titles, what the command line alone reads, and `ge` and `le`, which it
    leaves beside a type that is a function's. A setting of such a name stays.
    """
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _plain(part) for key, part in schema.items()}
    return {k: v for k, v in parts.items() if isinstance(v, dict) or k not in _FOREIGN}
