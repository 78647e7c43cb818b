"""`mlxstacks run RECIPE` and `mlxstacks recipes`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mlxstacks.cli import output
from mlxstacks.cli.execute import Common, execute
from mlxstacks.cli.group import common_options, complete_recipe
from mlxstacks.recipe.file import Recipe, load_recipe, recipe_names
from mlxstacks.resources import resource_dir

if TYPE_CHECKING:
    from rich.console import Console

RUN_HELP = "Run a recipe; what is already done with the same settings is not done again."
LIST_HELP = "List the recipes that come with mlxstacks."


@dataclass(frozen=True, slots=True)
class RecipeList:
    """The shipped recipes."""

    recipes: tuple[Recipe, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "recipes": [
                {
                    "name": each.name,
                    "command": each.command,
                    "about": list(each.head),
                    "path": str(each.path),
                }
                for each in self.recipes
            ]
        }


def run_command() -> click.Command:
    """`run RECIPE`: the command that the recipe names, resumable."""

    def callback(recipe_name: str, force: bool, **shared: Any) -> int:
        recipe = load_recipe(recipe_name)
        options = {"force": True} if force else {}
        return execute(recipe.command, options, Common(recipe=recipe_name, **shared), resume=True)

    argument = click.Argument(
        ["recipe_name"], metavar="RECIPE", shell_complete=complete_recipe, required=True
    )
    force = click.Option(["--force"], is_flag=True, help="Run again, and replace the save path.")
    return click.Command(
        "run",
        params=[argument, force, *common_options(names_recipe=False)],
        callback=callback,
        short_help=RUN_HELP,
        help=f"{RUN_HELP} RECIPE is a YAML file or the name of a shipped recipe.",
    )


def list_command() -> click.Command:
    """`recipes`: name and first line of each shipped recipe."""

    def callback(as_json: bool, **unused: Any) -> int:
        found = RecipeList(tuple(load_recipe(name) for name in recipe_names()))
        output.emit(found, as_json, render)
        return 0

    return click.Command(
        "recipes",
        params=common_options(names_recipe=False)[:1],
        callback=callback,
        short_help=LIST_HELP,
        help=LIST_HELP,
    )


def render(console: "Console", found: RecipeList) -> None:
    """One row a recipe, and how to go on."""
    rows = [[each.name, each.command, each.head[0] if each.head else ""] for each in found.recipes]
    console.print(output.table(["recipe", "command", "what it does"], rows))
    console.print("Run one: mlxstacks run NAME. What it needs stands in its file, in", markup=False)
    console.print(str(resource_dir("recipes")), markup=False, soft_wrap=True)
