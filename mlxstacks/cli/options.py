"""Click parameters made from a settings model, the one place where a setting is defined.

    field                         on the command line
    save_path: str | None         --save-path TEXT
    zero_delta: bool = False      --zero-delta
    resume: bool = True           --resume / --no-resume
    verify: bool | None = None    --verify / --no-verify
    requant: Literal["a", "b"]    --requant [a|b]
    bits: Literal[3, 4] | None    --bits [3|4|none]
    adapter_path: tuple[str,...]  --adapter-path TEXT, repeatable
    optimizer: AnotherModel       no option; --set optimizer.steps=5 or a recipe

`json_schema_extra={"cli_name": "--copy"}` on a field gives its option another name, and
`{"cli_type": "text"}` an option of text to a field whose model takes text for its shortest form.
`{"cli_switch": True}` on a choice between on, off and more: `--thinking` alone is on, and
`--no-thinking` off.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click

from mlxstacks.cli.mlx_lm_options import FLAGS, SPELLINGS
from mlxstacks.cli.output import setting
from mlxstacks.recipe.table import nearest

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

_SCALARS: dict[type, click.ParamType] = {
    str: click.STRING,
    int: click.INT,
    float: click.FLOAT,
    Path: click.Path(path_type=Path),
}


class LiteralChoice(click.Choice):
    """A choice among the values of a Literal, which need not be text; `none` stands for None."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = {_spelled(value): value for value in values}
        super().__init__(list(self.values))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = _spelled(value)
        if text not in self.values:
            hint = nearest(text, self.values)
            self.fail(f"got {text!r}, allowed: {', '.join(self.values)}{hint}", param, ctx)
        return self.values[text]


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
    settings_class: "type[BaseModel]", arguments: Mapping[str, str], command: str = ""
) -> list[click.Parameter]:
    """Arguments and options of a command, in the order of the model's fields; with the spellings
    that mlx-lm has for them.
    """
    spellings = SPELLINGS.get(command, {})
    made: list[click.Parameter] = []
    for name, shown in arguments.items():
        inner, _ = _without_none(settings_class.model_fields[name].annotation)
        several = get_origin(inner) is tuple  # takes all that follow
        kind = _kind(name, _without_none(get_args(inner)[0])[0] if several else inner)
        made.append(
            click.Argument(
                [name], metavar=f"[{shown}]", required=False, type=kind, nargs=-1 if several else 1
            )
        )
    for name, known in settings_class.model_fields.items():
        others = spellings.get(name, ())
        if name not in arguments:
            option = _option(settings_class, name, known, others)
            made += [option] if option else []
        elif others:
            help_text = f"{_help(known, str)} The same as {arguments[name]}."
            made.append(click.Option([*others, _ALSO + name], help=help_text))
    for flag, (name, _, help_text) in FLAGS.get(command, {}).items():
        made.append(click.Option([flag, _ALSO + name], is_flag=True, help=help_text))
    return made


def _kind(name: str, annotation: Any) -> click.ParamType:
    """The click type of a scalar; text that names a directory gets the shell's completion."""
    names_directory = name == "model" or name.endswith("_path")
    return click.Path() if annotation is str and names_directory else _SCALARS[annotation]


def _option(
    settings_class: "type[BaseModel]", name: str, known: "FieldInfo", others: Sequence[str]
) -> click.Option | None:
    """The option of one field, or None for a nested model. others: further spellings."""
    annotation, optional = _without_none(known.annotation)
    extra = known.json_schema_extra if isinstance(known.json_schema_extra, dict) else {}
    flag = str(extra.get("cli_name", "--" + name.replace("_", "-")))
    help_text = _help(known, annotation)
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
        kind: click.ParamType = LiteralChoice([*get_args(annotation), *none])
    elif annotation in _SCALARS:
        kind = _kind(name, annotation)
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


def _help(known: "FieldInfo", annotation: Any) -> str:
    """The description, as a sentence, with the default where it says something."""
    text = (known.description or "").strip()
    text = text[:1].upper() + text[1:]
    if text and text[-1] not in ".!?)":
        text += "."
    default = known.default
    if known.is_required() or default is None or default == () or annotation is bool:
        return text
    shown = setting(default)
    return f"{text}  [default: {shown if isinstance(shown, str) else default}]".strip()


def given(ctx: click.Context, names: Sequence[str], command: str = "") -> dict[str, Any]:
    """The settings that were typed (or came from the environment), as plain values.

    Raises: click.UsageError: a setting that two parameters give, each another value.
    """
    typed = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) in typed
    }
    flags = {name: value for name, value, _ in FLAGS.get(command, {}).values()}
    for parameter in ctx.command.params:
        if parameter.name is None or not parameter.name.startswith(_ALSO):
            continue
        name = parameter.name.removeprefix(_ALSO)
        if parameter.name not in values:
            continue
        value = flags.get(name, values[parameter.name])
        if values.setdefault(name, value) != value:
            raise click.UsageError(
                f"{name} is given twice: {values[name]!r}, and {value!r} by {parameter.opts[-1]}",
                ctx,
            )
    return {name: value for name, value in values.items() if name in names}
