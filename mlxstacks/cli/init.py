"""`mlxstacks init MODEL`: a commented recipe for a model, to begin with."""

from pathlib import Path

import click

from mlxstacks.cli import output
from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError, TargetError

HELP = "Write a recipe for a model or a command: every setting with its meaning and default."
_DETAILS = """For a training, it lists the layers and projections of the model, and sets what the
guard says fits. The model's config is enough: a directory, a Hugging Face id, or nothing
for the built-in model."""


def init_command() -> click.Command:
    """`init [MODEL]`."""
    return click.Command(
        "init",
        params=[
            click.Argument(["places"], metavar="[MODEL]", nargs=-1, type=click.Path()),
            click.Option(["-m", "--model"], type=click.Path(), help="Same as MODEL."),
            click.Option(
                ["--command"], default="train", show_default=True, metavar="COMMAND",
                help="Command the recipe is for, such as fuse or 'stack compare'.",
            ),
            click.Option(
                ["--save-path"], metavar="FILE",
                help="Output file; - is standard output. Default: COMMAND-MODEL.yaml.",
            ),
            click.Option(["--force"], is_flag=True, help="Replace an existing file."),
        ],
        callback=_init,
        short_help=HELP,
        help=f"{HELP} {_DETAILS}",
    )  # fmt: skip


def _init(
    places: tuple[str, ...], model: str | None, command: str, save_path: str | None, force: bool
) -> int:
    from mlxstacks.recipe.starter import starter
    from mlxstacks.recipe.table import COMMANDS

    if (words := " ".join(places)) in COMMANDS and not Path(words).exists():
        raise click.UsageError(f'{words} is a command: `mlxstacks init --command "{words}"`')
    if len(places) > 1:
        raise click.UsageError(f"got {len(places)} models: {', '.join(places)}")
    place = places[0] if places else None
    if None not in (place, model) and place != model:
        raise click.UsageError(f"model is given twice: {place!r}, and {model!r} by --model")
    model = place or model
    name = Path(model).name if model else "nano"
    stem = command.replace(" ", "-")
    file = save_path or f"{stem}-{name}.yaml"
    target = Path(file)
    if file != "-" and target.exists() and not force:
        raise TargetError(f"{file}: is there; give --force, or another --save-path")
    text = starter(command, model, f"{stem}.yaml" if file == "-" else file)
    if file == "-":
        output.write(text, end="")
        return 0
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror}") from None
    output.write(f"Wrote {file}. What it would do: {command_line('mlxstacks run', file)} --dry-run")
    return 0
