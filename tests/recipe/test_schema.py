"""The JSON Schema: every shipped recipe passes, what pydantic refuses of a key it refuses too.

Run: pytest tests/recipe/test_schema.py
"""

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

from mlxstacks.errors import InputError
from mlxstacks.recipe.file import EDITOR_LINE, load_recipe, recipe_names
from mlxstacks.recipe.resolve import validate
from mlxstacks.recipe.schema import FILE, recipe_schema
from mlxstacks.recipe.table import ALIASES, COMMANDS, load
from tests.cli.conftest import Run

SCHEMA = recipe_schema()


def problems(document: Any, schema: dict[str, Any] = SCHEMA) -> list[str]:
    return [error.message for error in Draft7Validator(schema).iter_errors(document)]


def keywords(schema: Any, names: bool = False) -> set[str]:
    """Of JSON Schema, at any depth; names: the keys are names of settings or of models."""
    if isinstance(schema, list):
        return {word for part in schema for word in keywords(part)}
    if not isinstance(schema, dict):
        return set()
    here = set() if names else set(schema)
    parts = (
        keywords(part, key in ("properties", "$defs") and not names)
        for key, part in schema.items()
        if key not in ("default", "enum", "const") or names
    )
    return here.union(*parts)


def test_it_is_a_schema_of_its_draft() -> None:
    known = set(Draft7Validator.META_SCHEMA["properties"]) | {"$defs", "discriminator"}
    assert keywords(SCHEMA) <= known
    Draft7Validator.check_schema(SCHEMA)
    assert Draft7Validator.META_SCHEMA["$schema"] == SCHEMA["$schema"]
    enum = SCHEMA["properties"]["command"]["enum"]
    assert set(enum) == {*COMMANDS, *ALIASES}


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe_passes_and_one_with_a_typo_does_not(name: str) -> None:
    recipe = load_recipe(name)
    document = {"command": recipe.command, **recipe.values}
    assert problems(document) == []
    assert problems(document, recipe_schema(recipe.command)) == []
    assert recipe.path.read_text(encoding="utf-8").startswith(f"{EDITOR_LINE}{FILE}\n")
    assert not any("yaml-language-server" in line for line in recipe.head)
    # and a typo in any key is refused by both
    settings_class = load(COMMANDS[recipe.command].settings)
    for values in spoilt(recipe.values):
        assert problems({"command": recipe.command, **values})
        with pytest.raises(InputError, match=r"unknown key|xx"):
            validate(settings_class, {"save_path": "out", **values} if "save_path" in
                     settings_class.model_fields else values)  # fmt: skip


def spoilt(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The recipe with a new key, at its top and in each mapping one level below."""
    found = [{**values, "no_such_key_xx": 1}]
    for key, value in values.items():
        if isinstance(value, dict):
            found.append({**values, key: {**value, "no_such_key_xx": 1}})
        if isinstance(value, list) and value and isinstance(value[0], dict):
            first = {**value[0], "no_such_key_xx": 1}
            found.append({**values, key: [first, *value[1:]]})
    return found


@pytest.mark.parametrize(
    ("document", "good"),
    [
        ({"command": "fuse"}, True),
        ({"command": "zero"}, True),
        ({"command": "fues"}, False),
        ({}, False),
        ({"command": "fuse", "requant": "kep"}, False),
        ({"command": "fuse", "adapter_path": "one"}, True),
        ({"command": "fuse", "adapter_path": ["one", "two"]}, True),
        ({"command": "fuse", "adapter_path": {"one": 1}}, False),
        ({"command": "train", "rank": 0}, False),
        ({"command": "train", "rank": 8.5}, False),
        ({"command": "train", "layers": "8,14"}, True),
        ({"command": "train", "layers": [8, 14]}, True),
        ({"command": "train", "layers": 8}, True),
        ({"command": "train", "layers": {"8": 14}}, False),
        ({"command": "train", "iters": None}, True),
        ({"command": "chat", "budget": "2GB"}, True),
        ({"command": "stack", "domains": ["chat", {"name": "code", "iters": 5}]}, True),
        ({"command": "stack", "domains": [{"name": "code", "itres": 5}]}, False),
        ({"command": "stack", "stack": {"rank": 4}}, True),
        ({"command": "stack", "stack": {"rnak": 4}}, False),
        ({"command": "stack", "null_space": None}, True),
        ({"command": "nano export", "bits": 7}, False),
        ({"command": "nano export", "bits": None}, True),
        ({"command": "doctor", "model": "fuse has it, doctor not"}, False),
    ],
    ids=str,
)
def test_what_it_takes(document: dict[str, Any], good: bool) -> None:
    assert (problems(document) == []) is good
    name = document.get("command")
    name = ALIASES.get(name, name) if name else None
    if name in COMMANDS:
        settings_class = load(COMMANDS[name].settings)
        values = {key: value for key, value in document.items() if key != "command"}
        values |= {"save_path": "out"} if "save_path" in settings_class.model_fields else {}
        if good:
            validate(settings_class, values)
        else:
            with pytest.raises(InputError):
                validate(settings_class, values)


def test_every_setting_is_described_for_the_editor() -> None:
    for name in COMMANDS:
        for key, about in recipe_schema(name)["properties"].items():
            assert "description" in about or "$ref" in about or "allOf" in about, f"{name}.{key}"


def test_the_command_prints_it(command: Run) -> None:
    code, out, _ = command("recipes", "--schema")
    assert (code, json.loads(out)) == (0, SCHEMA)
    code, out, _ = command("recipes", "--schema", "stack", "compare")
    assert (code, json.loads(out)) == (0, recipe_schema("stack compare"))
    code, _, err = command("recipes", "--schema", "stak")
    assert code == 2
    assert "did you mean 'stack'" in err
