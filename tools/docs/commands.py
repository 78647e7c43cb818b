"""A page for each command: what it takes, from the settings that its command line is made from."""

import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mlxstacks.cli import make_group
from mlxstacks.recipe.table import ALIASES, COMMANDS, GROUPS, load
from mlxstacks.resources import resource_dir

COMMON = ("as_json", "dry_run", "recipe", "sets", "verbosity", "help")
_BOUNDS = {"gt": ">", "ge": "\u2265", "lt": "<", "le": "\u2264"}


def names() -> list[str]:
    """Every command, those made by hand last."""
    root = make_group()
    return [*COMMANDS, *getattr(root, "special", {})]


def slug(name: str) -> str:
    """The file of a command's page, without its ending."""
    return name.replace(" ", "-")


def index() -> str:
    """The table of all commands."""
    rows = [f"| [`{name}`]({slug(name)}.md) | {_cell(_help(name))} |" for name in names()]
    return "\n".join([
        "# Commands", "", "Made from the table of commands. Options that all commands share are on",
        "[Commands in general](../index.md).", "", "| command | does |", "|---|---|", *rows, "",
    ])  # fmt: skip


def page(name: str) -> str:
    """Usage, arguments, options, settings without an option, and recipes of a command."""
    command = _command(name)
    model: type[BaseModel] | None = load(COMMANDS[name].settings) if name in COMMANDS else None
    lines = [f"# mlxstacks {name}", "", _help(name), ""]
    for short in (short for short, full in ALIASES.items() if full == name):
        lines += [f"`mlxstacks {short}` is short for it.", ""]
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    lines += ["```text", f"mlxstacks {name} {usage}", "```", ""]
    rows = list(_rows(command, model.model_fields if model else {}))
    if rows:
        lines += ["| option | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    nested = list(_nested(model)) if model else []
    if nested:
        lines += [
            "## Nested settings", "", "In a recipe, or with `--set`:", "",
            "| setting | type | default | meaning |", "|---|---|---|---|", *nested, "",
        ]  # fmt: skip
    recipes = [row for of, row in recipe_rows() if of == name]
    if recipes:
        lines += ["## Recipes", "", "| recipe | does |", "|---|---|", *recipes, ""]
    return "\n".join(lines)


def recipes_page() -> str:
    """The table of shipped recipes."""
    rows = [f"{row[:-1]}| [`{of}`](commands/{slug(of)}.md) |" for of, row in recipe_rows()]
    return "\n".join([
        "# Recipes", "", "`mlxstacks run NAME` runs one; `mlxstacks run NAME --dry-run` shows its",
        "plan. The head of each file says what it needs, its memory and its time.", "",
        "| recipe | does | command |", "|---|---|---|", *rows, "",
    ])  # fmt: skip


def recipe_rows() -> Iterator[tuple[str, str]]:
    """(command, row of a table) of each shipped recipe: its name and the first line of its head."""
    for file in sorted(resource_dir("recipes").glob("*.yaml")):
        text = file.read_text()
        head = " ".join(re.findall(r"^# ?(.*)$", text.split("\n#\n")[0], re.M)[1:])
        yield yaml.safe_load(text)["command"], f"| `{file.stem}` | {_cell(head)} |"


def _command(name: str) -> click.Command:
    command: click.Command = make_group()
    for word in name.split():
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None, name
        command = found
    return command


def _help(name: str) -> str:
    if name in COMMANDS:
        text = GROUPS.get(name, COMMANDS[name].help) if name == "sweep" else COMMANDS[name].help
    else:
        text = _command(name).help or ""
    return " ".join(text.split())


def _rows(command: click.Command, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for param in command.params:
        if param.name in COMMON:
            continue
        field = fields.get((param.name or "").removeprefix("also_"))
        shown = ", ".join(f"`{flag}`" for flag in (*param.opts, *param.secondary_opts))
        if isinstance(param, click.Argument):
            shown = f"`{(param.metavar or param.name or '').strip('[]')}`"
        text = getattr(param, "help", None) or (field.description if field else "") or ""
        text = re.sub(r"\s*\[default: .*?\]", "", text)
        if getattr(param, "is_flag", False) and (field is None or field.annotation is not bool):
            kind, default = "switch", "off"  # another spelling of a setting, or an option of `run`
        else:
            kind = _type(field.annotation, field.metadata) if field else param.type.name
            default = _default(field)
        yield f"| {shown} | {_cell(kind)} | {default} | {_cell(_sentence(text))} |"


def _nested(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Rows of the settings that are models themselves, by their dotted names."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from _nested(inner, f"{prefix}{name}.")
        elif prefix:
            kind = _cell(_type(field.annotation, field.metadata))
            text = _cell(_sentence(field.description or ""))
            yield f"| `{prefix}{name}` | {kind} | {_default(field)} | {text} |"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings model that is all of an annotation, but for None."""
    parts = [part for part in _parts(annotation) if part is not NoneType]
    if len(parts) == 1 and isinstance(parts[0], type) and issubclass(parts[0], BaseModel):
        return parts[0]
    return None


def _parts(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [part for arg in get_args(annotation) for part in _parts(arg)]
    return [annotation]


def _type(annotation: Any, metadata: Any = ()) -> str:
    """In words: `integer, >= 1`; `auto, keep or refit`; `text, repeatable`."""
    bounds = [
        f"{sign} {getattr(part, key):g}"
        for part in metadata
        for key, sign in _BOUNDS.items()
        if isinstance(getattr(part, key, None), int | float)
    ]
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        more = [part for each in more for part in getattr(each, "metadata", None) or [each]]
        return ", ".join(dict.fromkeys([_type(inner, more), *bounds]))
    parts = [part for part in _parts_of(annotation) if part is not NoneType]
    kinds = dict.fromkeys(_plain_type(part) for part in parts)
    return ", ".join([" or ".join(kinds), *bounds])


def _parts_of(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return list(get_args(annotation))
    return [annotation]


def _plain_type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (tuple, list):
        return f"{_type(get_args(annotation)[0])}, repeatable"
    if origin is dict:
        return "mapping"
    plain = {str: "text", int: "integer", float: "number", bool: "switch"}
    name = getattr(annotation, "__name__", str(annotation))
    return plain.get(annotation, "path" if name == "Path" else "mapping")


def _default(field: FieldInfo | None) -> str:
    if field is None:
        return ""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or default == () or isinstance(default, BaseModel):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple | list):
        default = ", ".join(map(str, default))
    return f"`{_cell(str(default))}`"


def _sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("." if text and text[-1] not in ".!?)" else "")


def _cell(text: str) -> str:
    """Text that stays in its cell."""
    text = " ".join(text.split())
    # A name is no tag, and a bar ends no cell.
    text = text.replace("<", "&lt;") if "`" not in text else text
    return re.sub(r"(?<!\\)\|", r"\\|", text)
