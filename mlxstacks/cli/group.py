"""Click commands and groups made from the command table, each built when it is first needed; their
options are the fields of a settings model:

    field                         on the command line
    save_path: str | None         --save-path TEXT
    zero_delta: bool = False      --zero-delta
    resume: bool = True           --resume / --no-resume
    verify: bool | None = None    --verify / --no-verify
    requant: Literal["a", "b"]    --requant [a|b]
    bits: Literal[3, 4] | None    --bits [3|4|none]
    adapter_path: tuple[str,...]  --adapter-path TEXT, repeatable
    optimizer: AnotherModel       no option; --set optimizer.steps=5 or a recipe
    store_path, given as STORE    --store-path PATH too

`json_schema_extra={"cli_name": "--copy"}` on a field gives its option another name, and
`{"cli_type": "text"}` an option of text to a field whose model takes text for its shortest form.
`{"cli_switch": True}` on a choice between on, off and more: `--thinking` alone is on, and
`--no-thinking` off.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click

from mlxstacks.cli.execute import Common, execute
from mlxstacks.cli.output import setting
from mlxstacks.errors import InputError, SettingsError
from mlxstacks.recipe.file import recipe_names
from mlxstacks.recipe.resolve import nested_key
from mlxstacks.recipe.spellings import COMMANDS_ELSEWHERE, LETTERS, refusal, spellings
from mlxstacks.recipe.table import ALIASES, COMMANDS, DRY_RUN, GROUPS, command_named, load, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def common_options(names_recipe: bool = True, dry_run: str = DRY_RUN) -> list[click.Parameter]:
    """Options of every command; `run` names its recipe by position instead."""
    options: list[click.Parameter] = [
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."),
        click.Option(["--dry-run"], is_flag=True, help=dry_run),
        click.Option(
            ["--set", "sets"],
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any setting by name; a.b=1 sets a nested one.",
        ),
        click.Option(
            ["-v", "--verbose", "verbosity"], count=True, help="Print more, and tracebacks."
        ),
    ]
    if names_recipe:
        recipe = click.Option(
            ["--recipe"],
            metavar="FILE|NAME",
            shell_complete=complete_recipe,
            help="Read settings from a YAML file or a shipped recipe.",
        )
        options.insert(2, recipe)
    return options


def complete_recipe(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list["click.shell_completion.CompletionItem"]:
    """Names of shipped recipes, then files."""
    from click.shell_completion import CompletionItem

    names = [name for name in recipe_names() if name.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]


def make_command(name: str) -> "TableCommand":
    """The click command of a row of the table: its options are the fields of its settings."""
    row = command_named(name)
    settings_class = load(row.settings)
    flags = {key: _flag(key, field) for key, field in settings_class.model_fields.items()}

    @click.pass_context
    def callback(ctx: click.Context, /, **values: Any) -> int:
        names = list(settings_class.model_fields)
        shared = {key: values[key] for key in ("as_json", "dry_run", "recipe", "sets", "verbosity")}
        try:
            return execute(name, given(ctx, names), Common(**shared))
        except SettingsError as error:
            message = str(error) if values["recipe"] else _with_options(str(error), flags)
            raise InputError(message) from None

    recipe = row.nano_recipe
    on_nano = f"Without a model of your own, runs on nano with the settings of recipe {recipe}."
    return TableCommand(
        name,
        epilog=on_nano if recipe else None,
        flags=flags,
        params=[*parameters(settings_class, row.arguments), *common_options(dry_run=row.dry_run)],
        callback=callback,
        help=row.help,
    )


def _with_options(message: str, flags: Mapping[str, str]) -> str:
    """`--top-p` for `top_p`; a plain word, as `pin`, only where it is what the line is about. Keys
    that a part of the settings knows are no options.
    """
    keys = r"(?<!--set )(?<![\w.=-])[a-z]+_[a-z_]+\b(?![=.])|(?m:^)\w+(?=: got )"
    return "\n".join(
        line if "unknown key" in line else re.sub(keys, lambda m: flags.get(m[0], m[0]), line)
        for line in message.split("\n")
    )


class _Translating(click.Command):
    """Reads and answers the options of `spellings` too.

    full_name: of the command, with the words before it. flags: setting -> its option.
    """

    full_name: str
    flags: Mapping[str, str]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = next((i for i, word in enumerate(args) if word in self._ends()), len(args))
        own = args[:end]
        for word, value in itertools.pairwise(own):
            of_mlx_lm = word == "--verbose" and value.lower() in ("true", "t", "false", "f")
            # mlx-lm's -m is the length of an answer, everybody else's the model
            of_mlx_lm |= word == "-m" and value.isdigit() and not Path(value).exists()
            if of_mlx_lm:
                self._refuse(f"{word} {value}", word, ctx)
        for word in own:
            # click would take -ngl for -n -g -l
            if word[:1] == "-" and word[1:].isalpha() and len(word) > 2:
                self._refuse(word, word, ctx)
        try:
            return super().parse_args(ctx, self._spread(self._translated(own)) + args[end:])
        except click.NoSuchOption as error:
            self._refuse(error.option_name, error.option_name, ctx)
            key = error.option_name.removeprefix("--").replace("-", "_")
            if self.full_name in COMMANDS and (
                inner := nested_key(load(command_named(self.full_name).settings), key)
            ):
                raise click.UsageError(
                    f"{self.name} has no option {error.option_name}: here it is --set {inner}=...",
                    ctx,
                ) from None
            close = [name for name in error.possibilities or () if name != "--help"]
            raise click.NoSuchOption(error.option_name, possibilities=close, ctx=ctx) from None
        except click.UsageError as error:
            by_option = [key for key in ("model", "adapter_path", "save_path") if key in self.flags]
            if error.message.startswith("Got unexpected extra") and by_option:
                shown = " ".join(f"{self.flags[key]} {key.upper()}" for key in by_option)
                raise click.UsageError(
                    f"{error.message}: {self.name} takes its paths by option, {shown}", ctx
                ) from None
            raise

    def _ends(self) -> Collection[str]:
        """Words after which nothing is an option of this command."""
        return ("--",)

    def _translated(self, args: list[str]) -> list[str]:
        """Other tools' spellings replaced with ours."""
        known = spellings(self.full_name, self.flags)
        words = []
        for word in args:
            name, equals, value = word.partition("=")
            setting = known.get(name.replace("_", "-"))
            words.append(self.flags[setting] + equals + value if setting else word)
        return words

    def _refuse(self, typed: str, option: str, ctx: click.Context) -> None:
        """Raises: click.UsageError saying what to do instead, where another tool has the option."""
        instead = refusal(self.full_name, option, self.flags)
        if instead is not None:
            raise click.UsageError(f"{self.name} has no option {typed}: {instead}", ctx) from None

    def _spread(self, args: list[str]) -> list[str]:
        """`--tasks a b` is `--tasks a --tasks b`, where nothing is given by position."""
        if any(isinstance(parameter, click.Argument) for parameter in self.params):
            return args
        options = [option for option in self.params if isinstance(option, click.Option)]
        several = {name for option in options if option.multiple for name in option.opts}
        spread: list[str] = []
        repeated: str | None = None
        for place, word in enumerate(args):
            if word.startswith("-"):
                repeated = word if word.replace("_", "-") in several else None
            elif repeated and args[place - 1] != repeated:
                spread.append(repeated)
            spread.append(word)
        return spread


class TableCommand(_Translating):
    """A command of the table."""

    def __init__(self, full_name: str, flags: Mapping[str, str], **kwargs: Any) -> None:
        self.full_name, self.flags = full_name, flags
        super().__init__(full_name.split()[-1], **kwargs)


# How `mlxstacks --help` lists the commands.
SECTIONS = {
    "Models and adapters": ("fuse", "compare", "convert", "adapter", "train", "align", "guard"),
    "Stacks and routes": ("stack", "stacks", "route", "grow", "distill"),
    "Answers": ("chat", "generate", "serve"),
    "Experiments": ("eval", "confound", "identity", "profile", "sweep", "report"),
    "Recipes": ("init", "recipes", "run"),
}


class TableGroup(_Translating, click.Group):
    """The commands of the table below a prefix; `special` are made by hand.

    A row that is named like the prefix itself (`nano` beside `nano rebuild`) is what the group
    does without a sub-command. Nothing of a command is imported to list it.
    """

    def __init__(
        self,
        prefix: str = "",
        special: Mapping[str, click.Command] | None = None,
        **kwargs: Any,
    ) -> None:
        self.prefix = self.full_name = prefix
        self.special = dict(special or {})
        command = make_command(prefix) if prefix in COMMANDS else None
        self.flags = command.flags if command else {}
        params = command.params if command else []
        kwargs = {"callback": _unless_subcommand(command), "params": params, **kwargs}
        super().__init__(
            prefix.split(" ")[-1] or "mlxstacks", invoke_without_command=True, **kwargs
        )

    def _ends(self) -> Collection[str]:
        return {"--", *self.short_helps()}

    def short_helps(self) -> dict[str, str]:
        """Names below the prefix, in the order of the table, with a sentence each."""
        start = f"{self.prefix} " if self.prefix else ""
        helps: dict[str, str] = {}
        for name, row in COMMANDS.items():
            if not name.startswith(start) or name == self.prefix:
                continue
            first, *rest = name.removeprefix(start).split(" ")
            text = GROUPS.get(start + first, row.help) if rest else row.help
            if first not in helps or not rest:
                helps[first] = GROUPS.get(start + first, text)
        helps |= {name: command.short_help or "" for name, command in self.special.items()}
        if not self.prefix:
            helps |= {name: f"Short for `{full}`." for name, full in ALIASES.items()}
        return {name: text.partition(". ")[0].rstrip(".") + "." for name, text in helps.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.short_helps())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.special:
            return self.special[cmd_name]
        full = f"{self.prefix} {cmd_name}".strip()
        full = ALIASES.get(full, full)
        if any(name.startswith(f"{full} ") for name in COMMANDS):
            return TableGroup(full, help=GROUPS.get(full))
        return make_command(full) if full in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            if not self.prefix and name in COMMANDS_ELSEWHERE:
                raise click.UsageError(f"no command {name!r}: {COMMANDS_ELSEWHERE[name]}", ctx)
            hint = nearest(name, known)
            raise click.UsageError(f"no command {name!r}{hint} (known: {', '.join(known)})", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        helps = self.short_helps()
        sections = {} if self.prefix else SECTIONS
        named = {name for names in sections.values() for name in names}
        rest = [name for name in helps if name not in named]
        for title, names in {**sections, "Commands" if self.prefix else "More": rest}.items():
            with formatter.section(title):
                formatter.write_dl([(name, helps[name]) for name in names])


def _unless_subcommand(own: click.Command | None) -> Callable[..., Any]:
    """The group's own command, or its help; silent when a sub-command follows."""

    @click.pass_context
    def callback(ctx: click.Context, /, **values: Any) -> Any:
        if ctx.invoked_subcommand is not None:
            return None
        if own is not None and own.callback:
            return own.callback(**values)
        click.echo(ctx.get_help())
        return 0

    return callback


# --- options of settings --------------------------------------------------------------------------

_SCALARS: dict[type, click.ParamType] = {
    str: click.STRING,
    int: click.INT,
    float: click.FLOAT,
    Path: click.Path(path_type=Path),
}


class LiteralChoice(click.Choice):
    """A choice among the values of a Literal, which need not be text; `none` stands for None.
    several: `a,b` is a tuple of two.
    """

    def __init__(self, values: Sequence[Any], several: bool = False) -> None:
        self.values = {_spelled(value): value for value in values}
        self.several = several
        super().__init__(list(self.values))

    def normalize_choice(self, choice: Any, ctx: click.Context | None) -> str:
        return str(choice)  # help shows values as they are, not as options are spelled

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = _spelled(value)
        if self.several and "," in text:
            return tuple(self.convert(part.strip(), param, ctx) for part in text.split(","))
        text = next((v for v in self.values if text in (v, v.replace("_", "-"))), text)
        if text not in self.values:
            hint = nearest(text, self.values)
            self.fail(f"got {text!r}, allowed: {', '.join(self.values)}{hint}", param, ctx)
        return self.values[text]


class NumberOrNone(click.ParamType):
    """A number, or `none` for None."""

    def __init__(self, number: click.ParamType) -> None:
        self.number, self.name = number, number.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value == "none" else self.number.convert(value, param, ctx)


class SeveralNumbers(click.ParamType):
    """A number, or several with commas between: `--ranks 4,8` is `--ranks 4 --ranks 8`."""

    def __init__(self, number: click.ParamType) -> None:
        self.number, self.name = number, number.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(self.number.convert(part, param, ctx) for part in str(value).split(","))


class SwitchOption(click.Option):
    """A choice that may stand alone for on; `--no-NAME` is off."""

    def __init__(self, declarations: list[str], **attributes: Any) -> None:
        super().__init__(declarations, is_flag=False, flag_value="on", **attributes)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        negated = [f"--no-{name.removeprefix('--')}" for name in self.opts]
        parser.add_option(self, negated, self.name, action="store_const", const="off")


def _spelled(value: Any) -> str:
    return "none" if value is None else str(value)


# What an option's name begins with that gives a setting which has a parameter of its own.
_ALSO = "also_"


def parameters(
    settings_class: "type[BaseModel]", arguments: Mapping[str, str]
) -> list[click.Parameter]:
    """Arguments and options of a command, in the order of the model's fields. What is given by
    position has its option too.
    """
    params: list[click.Parameter] = []
    for name, shown in arguments.items():
        inner, _ = _without_none(settings_class.model_fields[name].annotation)
        several = get_origin(inner) is tuple  # takes all that follow
        kind = _kind(name, _without_none(get_args(inner)[0])[0] if several else inner)
        params.append(
            click.Argument(
                [name],
                metavar=f"[{shown}]{'...' if several else ''}",
                required=False,
                type=kind,
                nargs=-1 if several else 1,
            )
        )
    for name, known in settings_class.model_fields.items():
        option = _option(settings_class, name, known)
        if option is not None and name in arguments:
            option.name, option.help = _ALSO + name, f"Same as {arguments[name]}. {option.help}"
        params += [option] if option is not None else []
    return params


def _kind(name: str, annotation: Any) -> click.ParamType:
    """The click type of a scalar; text that names a directory gets the shell's completion."""
    names_directory = name == "model" or name.endswith("_path")
    return click.Path() if annotation is str and names_directory else _SCALARS[annotation]


def _extra(known: "FieldInfo") -> dict[str, Any]:
    extra = known.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def _flag(name: str, known: "FieldInfo") -> str:
    return str(_extra(known).get("cli_name", "--" + name.replace("_", "-")))


def _option(
    settings_class: "type[BaseModel]", name: str, known: "FieldInfo"
) -> click.Option | None:
    """The option of one field, or None for a nested model."""
    annotation, optional = _without_none(known.annotation)
    extra, flag = _extra(known), _flag(name, known)
    others = [LETTERS[name]] if name in LETTERS else []
    help_text = _help(known)
    if annotation is bool:
        if known.default is True or optional:
            flag += f"/--no-{flag.removeprefix('--')}"
        return click.Option([flag, *others, name], is_flag=True, default=False, help=help_text)
    multiple = get_origin(annotation) is tuple
    if multiple:
        annotation, _ = _without_none(get_args(annotation)[0])
    if extra.get("cli_type") == "text":
        annotation = str
    if get_origin(annotation) is Literal:
        none = [None] if optional and known.default is not None else []
        kind: click.ParamType = LiteralChoice([*get_args(annotation), *none], multiple)
    elif annotation in _SCALARS:
        kind = _kind(name, annotation)
        if annotation in (int, float) and optional:
            kind = NumberOrNone(kind)
        elif annotation in (int, float) and multiple:
            kind = SeveralNumbers(kind)
    elif hasattr(annotation, "model_fields"):
        return None
    else:
        raise TypeError(f"{settings_class.__name__}.{name}: no option for {known.annotation}")
    if extra.get("cli_switch"):
        return SwitchOption([flag, *others, name], type=kind, help=help_text)
    return click.Option([flag, *others, name], type=kind, multiple=multiple, help=help_text)


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """`X | None` is (X, True); Annotated is taken off."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        inner = [part for part in get_args(annotation) if part is not NoneType]
        if len(inner) == 1:
            return _without_none(inner[0])[0], True
    return annotation, False


def _help(known: "FieldInfo") -> str:
    """The description, as a sentence, with the default where it says something."""
    text = (known.description or "").strip()
    text = text[:1].upper() + text[1:]
    if text and text[-1] not in ".!?)":
        text += "."
    default = known.default
    if known.is_required() or default is None or default == () or default is False:
        return text
    shown = "on" if default is True else setting(default)
    return f"{text}  [default: {shown if isinstance(shown, str) else default}]".strip()


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, tuple) else (value,)


def given(ctx: click.Context, names: Sequence[str]) -> dict[str, Any]:
    """The settings that were typed (or came from the environment), as plain values.

    What stands by position fills, in order, the arguments that no option gives.
    Raises: click.UsageError: a setting that two parameters give, each another value.
    """
    typed = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    values = {
        name: list(_flat(value)) if isinstance(value, tuple) else value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) in typed
    }
    by_option = {
        p.name.removeprefix(_ALSO): p
        for p in ctx.command.params
        if p.name and p.name.startswith(_ALSO) and p.name in values
    }
    arguments = [p.name or "" for p in ctx.command.params if isinstance(p, click.Argument)]
    words = [values.pop(name) for name in arguments if name in values]
    free = [name for name in arguments if name not in by_option]
    # too many: each where it stands, so that the one given twice is named
    values |= dict(zip(free if len(words) <= len(free) else arguments, words, strict=False))
    for name, parameter in by_option.items():
        value = values[_ALSO + name]
        if values.setdefault(name, value) != value:
            raise click.UsageError(
                f"{name} is given twice: {values[name]!r}, and {value!r} by {parameter.opts[0]}",
                ctx,
            )
    return {name: value for name, value in values.items() if name in names}
