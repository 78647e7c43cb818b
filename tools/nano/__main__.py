"""Make the built-in model and its sample data again, in a clone:

    python -m tools.nano rebuild DIR                     # 20 to 70 minutes on two cores, OpenBLAS
    python -m tools.nano rebuild DIR --set seed=1        # any key of tools/nano/settings.py
    python -m tools.nano samples                         # the sample data that the package ships

A rebuild that was stopped goes on where it was. To ship the result, put it in the place of
mlxstacks/assets/nano; its fingerprint is a new one.
"""

import click

from mlxstacks.errors import InputError
from mlxstacks.nano.exports import SAMPLES_FILE, measured_table
from mlxstacks.recipe.resolve import parse_sets, validate
from mlxstacks.study.render.console import console, print_result
from mlxstacks.study.result import Result
from tools.nano.build import rebuild
from tools.nano.samples import write_samples
from tools.nano.settings import RebuildSettings


@click.group(help=__doc__)
def main() -> None: ...


@main.command("rebuild")
@click.argument("save_path", metavar="DIR")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Any setting.")
@click.option("--force", is_flag=True, help="Replace an existing directory.")
@click.option("--no-resume", is_flag=True, help="Begin again.")
def rebuild_command(save_path: str, sets: tuple[str, ...], force: bool, no_resume: bool) -> None:
    """Train, measure and write the model, its adapter and its store."""
    given = {"save_path": save_path, "force": force, "resume": not no_resume}
    try:
        settings = validate(RebuildSettings, {**parse_sets(sets), **given})
        assert isinstance(settings, RebuildSettings)
        result = rebuild(settings)
    except InputError as error:
        raise click.ClickException(str(error)) from None
    minutes = result.manifest["total_seconds"] / 60
    print_result(
        console(),
        Result(
            kind="nano rebuild",
            title="nano, trained again",
            status="done",
            blocks=(measured_table(result.manifest),),
            notes=(f"{minutes:.1f} minutes in all.",),
            directory=str(result.save_path),
        ),
    )


@main.command("samples")
def samples_command() -> None:
    """Write mlxstacks/assets/nano-samples.json.gz: the sample data of bare commands."""
    write_samples(SAMPLES_FILE)


if __name__ == "__main__":
    main()
