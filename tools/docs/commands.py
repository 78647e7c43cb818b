"""A page for each command: what it takes, from the settings that its command line is made from."""

import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mlxstacks.cli import make_group
from mlxstacks.recipe.table import ALIASES, COMMANDS, GROUPS, load
from mlxstacks.resources import resource_dir
from tools.docs.blocks import PAGES, lines_of_docs

COMMON = ("as_json", "dry_run", "recipe", "sets", "verbosity", "help")
# Options by what a reader looks for; what stands nowhere here is particular to a command.
GROUPS_OF_OPTIONS: Mapping[str, str] = {
    "Input": "model adapter_path data store_path router_path prompt prompts items tasks task_files "
    "targets runs run domain other_path log_path sources persona suite peft_layout allow_base "
    "peft_model base_model_name",
    "Output": "save_path force resume retry plots plot_format formats title date copy_shards "
    "keep_models gap_log install save_every",
    "Training": "iters learning_rate lr_schedule warmup batch_size grad_accumulation_steps "
    "optimizer clip_norm weight_decay beta1 beta2 dropout patience min_loss_delta epochs "
    "steps_per_eval steps_per_report val_batches spike_threshold max_seq_length mask_prompt "
    "packing compile_step grad_checkpoint",
    "LoRA": "rank scale keys layers num_layers projections",
    "Memory": "guard working_set_bytes resource_limit budget base",
    "Generation": "temp top_p min_p top_k max_tokens repetition_penalty system_prompt thinking "
    "allow_special template chat_template",
    "Statistics": "seed seeds alpha confidence permutations expected_discordant expected_rate "
    "sample limit max_prompts draws",
}
# What commands without `--save-path` write.
WRITES: Mapping[str, str] = {
    "stacks remove": "the list of stacks of the store; the files stay until `stacks gc`",
    "stacks disable": "the list of stacks of the store",
    "stacks enable": "the list of stacks of the store",
    "stacks undo": "the list of stacks of the store",
    "stacks retrain": "the domain's new stacks into the store; the old ones stay until `stacks gc`",
    "stacks import": "a stack into the store, which it makes where there is none",
    "stacks gc": "nothing; removes files of the store that nothing names",
    "chat": "the prompts that no domain fits, to `--gap-log`",
    "generate": "the answers to standard output; prompts that no domain fits, to `--gap-log`",
    "run": "what the command of the recipe writes",
    "init": "one file, the recipe",
}
MOST_EXAMPLES = 3
_BOUNDS = {"gt": ">", "ge": "\u2265", "lt": "<", "le": "\u2264"}


def names() -> list[str]:
    """Every command, those made by hand last."""
    root = make_group()
    return [*COMMANDS, *getattr(root, "special", {})]


def slug(name: str) -> str:
    """The file of a command's page, without its ending."""
    return name.replace(" ", "-")


def families() -> dict[str, list[str]]:
    """First word -> the commands that begin with it, in the order of the table."""
    grouped: dict[str, list[str]] = {}
    for name in names():
        grouped.setdefault(name.split()[0], []).append(name)
    return grouped


def index() -> str:
    """The table of all commands."""
    rows = [
        f"| [`{name}`]({slug(name)}.md) | {_cell(_help(name))} |"
        for family in families().values()
        for name in family
    ]
    return "\n".join([
        "# Commands", "", "Made from the table of commands. Options that all commands share are on",
        "[Commands in general](../index.md).", "", "| command | does |", "|---|---|", *rows, "",
    ])  # fmt: skip


def page(name: str) -> str:
    """Usage, examples, what is written, options by group, nested settings, recipes."""
    command = _command(name)
    model: type[BaseModel] | None = load(COMMANDS[name].settings) if name in COMMANDS else None
    lines = [f"# mlxstacks {name}", "", _help(name), ""]
    for short in (short for short, full in ALIASES.items() if full == name):
        lines += [f"`mlxstacks {short}` is short for it.", ""]
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    lines += ["```text", f"mlxstacks {name} {usage}", "```", ""]
    lines += [*_examples(name), f"**Writes** {_writes(name, model)}", ""]
    for group, rows in _rows_of_groups(command, model.model_fields if model else {}).items():
        lines += [f"## {group}", "", *_table("option", rows)]
    lines += ["Options of all commands (`--json`, `--dry-run`, `--recipe`, `--set`): see"]
    lines += ["[Commands in general](../index.md).", ""]
    nested = list(_nested(model)) if model else []
    if nested:
        lines += [
            "## Nested settings", "", "In a recipe, or with `--set`:", "",
            *_table("setting", nested),
        ]  # fmt: skip
    recipes = [row for of, row in recipe_rows() if of == name]
    if recipes:
        lines += ["## Recipes", "", "| recipe | does |", "|---|---|", *recipes, ""]
    return "\n".join(lines)


def examples_of(name: str) -> list[tuple[str, str, str]]:
    """(page, mark, line) of the documentation's own lines, which tests run where no mark says why
    not; those of the page that is named like the command first.
    """
    others = [other for other in names() if other.startswith(f"{name} ")]
    lines: dict[str, tuple[str, str, str]] = {}
    for where, mark, line in lines_of_docs():
        is_other = any(f"{line} ".startswith(f"mlxstacks {other} ") for other in others)
        if f"{line} ".startswith(f"mlxstacks {name} ") and not is_other:
            lines.setdefault(line, (where, mark, line))
    page_of = f"docs/howto/{name.split()[0]}"
    return sorted(lines.values(), key=lambda each: (bool(each[1]), not each[0].startswith(page_of)))


def _examples(name: str) -> list[str]:
    examples = examples_of(name)[:MOST_EXAMPLES]
    if not examples:
        return ["```bash", f"mlxstacks {name}   # on nano, the built-in model", "```", ""]
    shown, last = [], ""
    for _, mark, line in examples:
        shown += [mark] * (mark not in ("", last)) + [_folded(line)]
        last = mark
    pages = dict.fromkeys(where for where, _, _ in examples)
    titles = [(PAGES[where].read_text().split("\n")[0].lstrip("# "), where) for where in pages]
    links = ", ".join(f"[{title}](../../{where.removeprefix('docs/')})" for title, where in titles)
    return ["```bash", *shown, "```", "", f"From {links}.", ""]


def _folded(line: str) -> str:
    """A command line in lines that a page has room for."""
    return " \\\n    ".join(wrap(line, 76, break_long_words=False, break_on_hyphens=False))


def _writes(name: str, model: type[BaseModel] | None) -> str:
    if name in WRITES:
        return f"{WRITES[name]}."
    if model is None or "save_path" not in model.model_fields:
        return "no file."
    text = model.model_fields["save_path"].description or ""
    made = re.sub(r"^Output directory", "a directory", text).rstrip(".")
    made = made[:1].lower() + made[1:]
    kept = "; in it `result.json`, for `mlxstacks report` and `ms.Result.open`"
    return f"`--save-path`: {made}{kept if COMMANDS[name].report else ''}."


def _rows_of_groups(
    command: click.Command, fields: Mapping[str, FieldInfo]
) -> dict[str, list[str]]:
    """Heading -> rows; what is particular to the command stands second."""
    group_of = {name: group for group, of in GROUPS_OF_OPTIONS.items() for name in of.split()}
    groups: dict[str, list[str]] = {"Input": [], "Options": []}
    groups |= {group: [] for group in GROUPS_OF_OPTIONS if group != "Input"}
    for param in command.params:
        if param.name not in COMMON:
            name = (param.name or "").removeprefix("also_")
            group = "Input" if isinstance(param, click.Argument) else group_of.get(name, "Options")
            groups[group].append(_row(param, fields.get(name)))
    return {group: rows for group, rows in groups.items() if rows}


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


def _table(what: str, rows: Sequence[str]) -> list[str]:
    """In the style that a phone shows row by row."""
    head = [f"| {what} | type | default | meaning |", "|---|---|---|---|"]
    return ['<div class="options" markdown>', "", *head, *rows, "", "</div>", ""]


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


def _row(param: click.Parameter, field: FieldInfo | None) -> str:
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
    return f"| {shown} | {_cell(kind)} | {default} | {_cell(_sentence(text))} |"


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
        if isinstance(getattr(part, key, None), int | float) and abs(getattr(part, key)) < 2**53
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
