"""`mlxstacks run RECIPE` and `mlxstacks recipes`."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mlxstacks.cli import output
from mlxstacks.cli.execute import Common, execute
from mlxstacks.cli.group import common_options, complete_recipe, given, make_command
from mlxstacks.recipe.file import Recipe, load_recipe, recipe_names
from mlxstacks.recipe.schema import recipe_schema
from mlxstacks.recipe.table import ALIASES, COMMANDS, command_named, load
from mlxstacks.resources import resource_dir

if TYPE_CHECKING:
    from rich.console import Console

RUN_HELP = "Run a recipe, skipping work already done with the same settings."
LIST_HELP = "List the recipes that ship with mlxstacks."


def run_command() -> click.Command:
    """`run RECIPE`: the command that the recipe names, resumable."""

    @click.pass_context
    def callback(
        ctx: click.Context, /, recipe_name: str | None, recipe: str | None, force: bool,
        **shared: Any,
    ) -> int:  # fmt: skip
        if None not in (recipe_name, recipe) and not str(recipe_name).startswith("-"):
            raise click.UsageError(f"two recipes are given: {recipe_name} and {recipe}")
        words = list(ctx.args)
        if recipe is not None and recipe_name is not None:
            words.insert(0, recipe_name)
        name = recipe or recipe_name
        if name is None:
            raise click.UsageError("RECIPE is missing: a file, or a name of `mlxstacks recipes`")
        if name.startswith("-"):
            raise click.UsageError(f"RECIPE comes first, then {name}: mlxstacks run RECIPE {name}")
        return run_recipe(name, words, force, shared)

    def run_recipe(
        recipe_name: str, words: Sequence[str], force: bool, shared: dict[str, Any]
    ) -> int:
        recipe = load_recipe(recipe_name)
        options = options_of(recipe.command, words) | ({"force": True} if force else {})
        common = Common(recipe=recipe_name, **shared)
        code = execute(recipe.command, options, common, resume=True)
        if common.dry_run and not common.as_json:
            _print_head(output.console(), recipe)
        return code

    argument = click.Argument(
        ["recipe_name"], metavar="RECIPE", shell_complete=complete_recipe, required=False
    )
    force = click.Option(["--force"], is_flag=True, help="Run again and replace the save path.")
    return click.Command(
        "run",
        params=[argument, force, *common_options()],
        callback=callback,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        short_help=RUN_HELP,
        help=f"{RUN_HELP} RECIPE is a YAML file or the name of a shipped recipe. Options of "
        "its command may follow, such as --seed or --save-path; they override the recipe.",
    )


def options_of(command: str, words: Sequence[str]) -> dict[str, Any]:
    """What options of a command, as they are typed, set.

    Raises: click.UsageError: an option that it has not, or a word that is none.
    """
    own = make_command(command)
    own.params = [p for p in own.params if not isinstance(p, click.Argument)]
    parent = click.Context(click.Command("mlxstacks"), info_name="mlxstacks")
    context = own.make_context(command, list(words), parent=parent)
    return given(context, list(load(command_named(command).settings).model_fields))


def list_command() -> click.Command:
    """`recipes`: name and purpose of each shipped recipe; or the JSON Schema of recipes."""

    def callback(as_json: bool, schema: bool, words: Sequence[str]) -> int:
        command = " ".join(words) or None
        if schema:
            output.print_json(recipe_schema(command))
            return 0
        if command is not None:
            command = ALIASES.get(command, command)
            command_named(command)
        recipes = [load_recipe(name) for name in recipe_names()]
        recipes = [recipe for recipe in recipes if command in (None, recipe.command)]
        if as_json:
            rows = [
                {"name": r.name, "command": r.command, "about": list(r.head), "path": str(r.path)}
                for r in recipes
            ]
            output.print_json({"recipes": rows})
        else:
            _print_recipes(output.console(), recipes)
        return 0

    argument = click.Argument(["words"], metavar="[COMMAND]", nargs=-1, required=False)
    schema = click.Option(
        ["--schema"],
        is_flag=True,
        help="Print the JSON Schema of recipes, for completion in editors.",
    )
    return click.Command(
        "recipes",
        params=[argument, schema, *common_options(names_recipe=False)[:1]],
        callback=callback,
        short_help=LIST_HELP,
        help=f"{LIST_HELP} With COMMAND, only those for it.",
    )


def _print_recipes(console: "Console", recipes: Sequence[Recipe]) -> None:
    """The recipes of each command, in the order of the table of commands, and how to go on."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    widest = max((len(recipe.name) for recipe in recipes), default=0)
    for command in COMMANDS:
        rows = [(recipe.name, recipe.about) for recipe in recipes if recipe.command == command]
        if rows:
            console.print(command, markup=False, style="bold")
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(min_width=widest, overflow="fold")
            table.add_column(overflow="fold")
            for name, about in rows:
                table.add_row(Text(name), Text(about))
            console.print(Padding(table, (0, 0, 0, 2)))
    if not recipes:
        console.print("No recipe is shipped for this command.", markup=False)
    console.print("Run one: mlxstacks run NAME; with --dry-run it only says what it would do.")
    console.print("What each needs stands in its file, in", markup=False)
    console.print(str(resource_dir("recipes")), markup=False, soft_wrap=True)


def _print_head(console: "Console", recipe: Recipe) -> None:
    """What the head says beyond the purpose: guard, memory, time, what is written, what to get."""
    lines = list(itertools.dropwhile(bool, recipe.head))
    if lines:
        console.print("\nFrom the comment at the top of the recipe (written for its own settings):")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
