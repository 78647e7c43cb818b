"""From what was typed to an exit code: resolve the settings, call the one function, print."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.cli import output
from mlxstacks.errors import InputError
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import (
    Resolved,
    call,
    finished,
    resolve,
    what_is_kept,
)
from mlxstacks.recipe.table import COMMANDS, Command, command_named, load
from mlxstacks.study.render.progress import ProgressBar

DONE, FAILED, BAD_INPUT, GATE, INTERRUPTED = 0, 1, 2, 3, 130


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every command has."""

    as_json: bool = False
    dry_run: bool = False
    recipe: str | None = None
    sets: Sequence[str] = ()
    verbosity: int = 0


def execute(name: str, options: Mapping[str, Any], common: Common, resume: bool = False) -> int:
    """Run a command and print its result; returns the exit code.

    resume: report a target that was made with the same settings instead of making it again.
    """
    from mlxstacks.files.disk import use_private_temporary_directory

    _log_to_stderr(common.verbosity)
    use_private_temporary_directory()
    row = command_named(name)
    group = _group(name, row)
    recipe = load_recipe(common.recipe) if common.recipe is not None else None
    with output.quiet_stdout(common.as_json and not output.is_silent()):
        resolved = resolve(name, options, recipe, common.sets)
    if resolved.from_nano and not common.as_json:
        name_of_recipe = resolved.nano_recipe
        more = f" Its defaults are those of the recipe {name_of_recipe}." if name_of_recipe else ""
        output.note(_nano_note(resolved.from_nano) + more)
    if resume and not common.dry_run and not resolved.forced:
        report = finished(name, resolved)
        if group is not None:
            from mlxstacks.processes import gathered

            if gathered(report is not None, group)[0] and report is None:
                return DONE  # the first process has it
        if report is not None:
            return _already_done(report, resolved, common.as_json)
    with output.quiet_stdout(common.as_json and not output.is_silent()):
        try:
            result, render = _call(name, row, resolved, common)
        except KeyboardInterrupt as error:
            from mlxstacks.study.render.words import capital

            if not str(error) and (kept := what_is_kept(resolved)):
                output.note(f"\n{capital(kept)}.")  # below the terminal's ^C
            raise
    output.emit(result, common.as_json, render)
    can_resume = "resume" in type(resolved.settings).model_fields
    if common.dry_run and can_resume and (kept := what_is_kept(resolved)):
        output.note(f"An unfinished run is here: {kept}.")
    failure = getattr(result, "failure", None)
    if failure:  # the result is whole, and what it says is that something is broken
        output.note(f"Failed: {failure}")
    if getattr(result, "interrupted", False):
        output.note("Interrupted; what was done until then is above.")
        return INTERRUPTED
    if failure:
        return FAILED
    return _gate(getattr(result, "failed_gate", None))


def _group(name: str, row: Command) -> Any:
    """The processes that share this run, as `mlx.launch` starts them, or None. All but the first
    are silent. Raises: InputError: they cannot be joined, or the command runs in one process.
    """
    if not {"MLX_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys():
        return None
    from mlxstacks.processes import current_group

    group = current_group()
    if group is not None and not row.in_group:
        shared = ", ".join(name for name, command in COMMANDS.items() if command.in_group)
        raise InputError(
            f"`mlxstacks {name}` runs in one process; start it without mlx.launch, which is for "
            f"{shared}"
        )
    if group is not None and group.rank():
        output.silence()
    return group


def _nano_note(keys: Sequence[str]) -> str:
    """Says which parts of the built-in model stand in for what was not given."""
    whose = "its" if "model" in keys else "nano's"
    parts = {
        "model": "nano, the built-in model",
        "adapter_path": f"{whose} sample adapter",
        "data": f"{whose} sample data",
        "store_path": f"{whose} sample stacks",
        "persona": f"{whose} sample persona",
        "persona_data": f"{whose} persona's rows",
        "items": f"{whose} items",
        "suite": f"{whose} identity suite",
        "target": f"{whose} sample stacks",
    }
    *most, last = [parts.get(key, f"nano for {key}") for key in keys]
    return f"Using {', '.join(most)} and {last}." if most else f"Using {last}."


def _call(name: str, row: Command, resolved: Resolved, common: Common) -> tuple[Any, Any]:
    """The result of the function, or of its dry run, and the renderer that goes with it."""
    if common.dry_run:
        from mlxstacks.recipe.config_plan import plan
        from mlxstacks.study.render.console import print_result

        with ProgressBar(name) as bar:
            return plan(name, resolved, common.recipe is not None, bar), print_result
    with ProgressBar(name, logs=not output.is_silent()) as bar:
        result = call(name, resolved, progress=bar)
    return result, load(row.render)


def _already_done(report: dict[str, Any], resolved: Resolved, as_json: bool) -> int:
    from mlxstacks.study.render.words import capital
    from mlxstacks.study.result import RESULT, Result

    if resolved.target is not None and (resolved.target / RESULT).is_file():
        # an edited one does not show what it was made to say
        result = Result.read(resolved.target / RESULT).checked(resolved.target.absolute())
        report = result.as_json()
        for reason in result.standing.reasons:
            output.note(f"EXPLORATORY: {reason}")
    if as_json:
        output.print_json({**report, "already_done": True})
    else:
        console = output.console()
        console.print(f"Already done with these settings: {resolved.target}", markup=False)
        if report.get("verdict"):
            console.print(capital(str(report["verdict"])), markup=False)
        console.print("Run it again with --force.", markup=False)
    return _gate(report.get("failed_gate"))


def _gate(failed: str | None) -> int:
    if failed:
        output.note(f"Gate not met: {failed}")
    return GATE if failed else DONE


def _log_to_stderr(verbosity: int) -> None:
    logger = logging.getLogger("mlxstacks")
    logger.setLevel([logging.WARNING, logging.INFO, logging.DEBUG][min(verbosity, 2)])
    if not logger.handlers:
        logger.addHandler(_ToTerminal())


class _ToTerminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        output.write(self.format(record), error=True)
