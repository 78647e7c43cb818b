"""Recipe files: what is read, what is refused, and the shipped ones. Run: pytest tests/recipe"""

import re
from pathlib import Path

import pytest

from mlxstacks.errors import InputError
from mlxstacks.recipe.file import find_recipe, load_recipe, recipe_names
from mlxstacks.recipe.resolve import validate
from mlxstacks.recipe.table import ALIASES, COMMANDS, GROUPS, load


def write(directory: Path, text: str) -> str:
    path = directory / "a.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return str(path)


def test_reads_command_values_and_head(tmp_path: Path) -> None:
    found = load_recipe(write(tmp_path, "# One.\n#\n# Two.\ncommand: fuse\nseed: 3\n# not head\n"))
    assert (found.command, found.values) == ("fuse", {"seed": 3})
    assert found.head == ("One.", "", "Two.")


@pytest.mark.parametrize(
    "line",
    [
        "force: true",
        "force: false",
        "train: {force: true}",
        "arms: [{force: 1}]",
        "a: &a {b: *a, force: 1}",
    ],
)
def test_a_recipe_cannot_force(tmp_path: Path, line: str) -> None:
    """One from elsewhere replaced the package's own store with a model."""
    path = write(tmp_path, f"command: sweep\nsave_path: elsewhere\n{line}\n")
    with pytest.raises(InputError, match=f"recipe {path}: `force` is no key .* give --force"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", "no"), ("true", True), ("1e-3", 0.001), ("3", 3), ("0.5", 0.5), ("1.5.2", "1.5.2")],
)
def test_scalars_mean_what_they_look_like(tmp_path: Path, text: str, value: object) -> None:
    found = load_recipe(write(tmp_path, f"command: fuse\nkey: {text}\n")).values["key"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 3", "add `command: train`"),
        ("command: fues", "no command 'fues'; did you mean 'fuse'?"),
        ("command: fuse\nseed: 1\nseed: 2", "'seed' is given twice"),
        ("command: fuse\nx: {a: 1, a: 2}", "'a' is given twice"),
        ("- command: fuse", "must be a mapping"),
        ("", "must be a mapping"),
        ("command: [fuse", "expected ',' or ']'"),
        ("command: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("1: fuse", "must be a mapping"),
        ("\x00", "special characters are not allowed"),
        ("command: \udcff\udcfe", "can't decode byte"),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}\ncommand: fuse", "<< takes one mapping"),
        ("command: fuse\nb: {<<: {<<: &a {x: 1}, <<: *a}}", "<< takes one mapping"),
        ('command: fuse\nx: "\\UFFFFFFFF"', "a value is not what it claims to be"),
        ('command: fuse\nx: !!int ""', "a value is not what it claims to be"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_recipe(write(tmp_path, text))
    assert message in str(error.value)
    assert "a.yaml" in str(error.value)


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'fuse-refit'"):
        find_recipe("fuse-refti")
    with pytest.raises(InputError, match="no such file"):
        find_recipe("../recipes/fuse-refit")


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipe_is_valid_and_says_what_it_needs(name: str) -> None:
    recipe = load_recipe(name)
    settings_class = load(COMMANDS[recipe.command].settings)
    values = {"save_path": "out"} if "save_path" in settings_class.model_fields else {}
    validate(settings_class, values | recipe.values)
    about = "\n".join(recipe.head)
    assert f"mlxstacks run {name}" in about
    assert all(f"{word}:" in about for word in ("Command", "Memory", "Time"))
    assert len(recipe.head[0]) <= 100
    # The command can be typed: `run` has no settings as options; they are given with --set.
    (line,) = [line for line in recipe.head if line.startswith("Command:")]
    commands = re.findall(r"mlxstacks ([^()]+)", line)
    assert commands
    for words in map(str.split, commands):
        options = {word for word in words if word.startswith("--")}
        if words[0] == "run":
            assert options <= {"--set", "--dry-run", "--force"}, line
        else:
            assert " ".join(words[:2]) in COMMANDS or words[0] in COMMANDS, line


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_of_the_table_resolves(name: str) -> None:
    row = COMMANDS[name]
    settings_class = load(row.settings)
    assert callable(load(row.function))
    assert callable(load(row.render))
    fields = set(settings_class.model_fields)
    assert {*row.arguments, *row.nano} <= fields
    assert settings_class.model_config.get("frozen") is True
    assert settings_class.model_config.get("extra") == "forbid"
    silent = [
        n for n, f in settings_class.model_fields.items() if not (f.description or is_model(f))
    ]
    assert not silent, f"{name}: settings without a description have no help: {silent}"


def is_model(field: object) -> bool:
    return hasattr(getattr(field, "annotation", None), "model_fields")


def test_aliases_and_groups_point_at_commands() -> None:
    assert set(ALIASES.values()) <= COMMANDS.keys()
    assert {name.split()[0] for name in COMMANDS if " " in name} == GROUPS.keys()


def test_a_recipe_that_would_take_minutes_to_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("command: fuse\nadapter_path:\n" + "- a\n" * 100_000)
    with pytest.raises(InputError, match=r"long\.yaml: has 400,\d+ characters; at most 250,000"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "? [a, b]\n: c",
        "? {a: b}\n: c",
        "model: " + "[" * 5000 + "]" * 5000,
        "model: 2020-99-99",
        "seed: 0b_",
        "seed: " + "9" * 5000,
        "seed: !!int abc",
        "seed: !!timestamp abc",
        "force: !!bool maybe",
    ],
)
def test_what_yaml_itself_stumbles_over_is_bad_input(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"recipe .*a\.yaml: "):
        load_recipe(write(tmp_path, f"command: fuse\n{text}\n"))


def test_aliases_do_not_grow_in_a_message(tmp_path: Path) -> None:
    """Eight levels of nine references each: 43 million words if they were spelled out."""
    lines = ["command: fuse", "model:", "- &a [x, x, x, x, x, x, x, x, x]"]
    for old, new in zip("abcdefg", "bcdefgh", strict=True):
        lines.append(f"- &{new} [{', '.join([f'*{old}'] * 9)}]")
    recipe = load_recipe(write(tmp_path, "\n".join(lines)))
    with pytest.raises(InputError, match="model: got ") as caught:
        validate(load(COMMANDS["fuse"].settings), recipe.values)
    assert len(str(caught.value)) < 1000
