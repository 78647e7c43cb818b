"""Click commands and groups made from the command table, each built when it is first asked for."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import click

from mlxstacks.cli.execute import Common, execute
from mlxstacks.cli.mlx_lm_options import refusal
from mlxstacks.recipe.file import recipe_names
from mlxstacks.recipe.table import ALIASES, COMMANDS, GROUPS, command_named, load, nearest


def common_options(names_recipe: bool = True) -> list[click.Parameter]:
    """Options of every command; `run` names its recipe by position instead."""
    options: list[click.Parameter] = [
        click.Option(["--json", "as_json"], is_flag=True, help="One JSON document on stdout."),
        click.Option(["--dry-run"], is_flag=True, help="Say what would be done; touch nothing."),
        click.Option(
            ["--set", "sets"],
            multiple=True,
            metavar="KEY=VALUE",
            help="Any setting by its name; a.b=1 reaches into a nested one.",
        ),
        click.Option(["-v", "--verbose", "verbosity"], count=True, help="Say more; trace errors."),
    ]
    if names_recipe:
        recipe = click.Option(
            ["--recipe"],
            metavar="FILE|NAME",
            shell_complete=complete_recipe,
            help="Settings from a YAML file or a shipped recipe.",
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


def make_command(name: str) -> click.Command:
    """The click command of a row of the table: its options are the fields of its settings."""
    from mlxstacks.cli.options import given, parameters

    row = command_named(name)
    settings_class = load(row.settings)

    @click.pass_context
    def callback(ctx: click.Context, /, **values: Any) -> int:
        names = list(settings_class.model_fields)
        shared = {key: values[key] for key in ("as_json", "dry_run", "recipe", "sets", "verbosity")}
        return execute(name, given(ctx, names, name), Common(**shared))

    return TableCommand(
        name,
        params=[*parameters(settings_class, row.arguments, name), *common_options()],
        callback=callback,
        help=row.help,
    )


class TableCommand(click.Command):
    """A command of the table, which reads and answers mlx-lm's options too."""

    def __init__(self, full_name: str, **kwargs: Any) -> None:
        self.full_name = full_name
        super().__init__(full_name.split()[-1], **kwargs)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word, value in itertools.pairwise(args):
            if word == "--verbose" and value.lower() in ("true", "t", "false", "f"):
                self._refuse(f"{word} {value}", word, ctx)
        try:
            return super().parse_args(ctx, self._spread(args))
        except click.NoSuchOption as error:
            self._refuse(error.option_name, error.option_name, ctx)
            raise

    def _refuse(self, typed: str, option: str, ctx: click.Context) -> None:
        """Raises: click.UsageError saying what to do instead, where mlx-lm has the option."""
        instead = refusal(self.full_name, option)
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


class TableGroup(click.Group):
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
        self.prefix = prefix
        self.special = dict(special or {})
        own = make_command(prefix) if prefix in COMMANDS else None
        params = own.params if own else []
        kwargs = {"callback": _unless_subcommand(own), "params": params} | kwargs
        super().__init__(
            prefix.split(" ")[-1] or "mlxstacks", invoke_without_command=True, **kwargs
        )

    def short_helps(self) -> dict[str, str]:
        """Names below the prefix, in the order of the table, with a line each."""
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
        return helps

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
            hint = nearest(name, known)
            raise click.UsageError(f"no command {name!r}{hint} (known: {', '.join(known)})", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.short_helps().items()))


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
