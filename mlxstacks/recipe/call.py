"""Running a command whose settings are resolved: what the command line and Python do alike."""

import inspect
from collections.abc import Callable
from typing import Any

from mlxstacks.recipe.resolve import Resolved
from mlxstacks.recipe.table import command_named, load


def call(
    name: str,
    resolved: Resolved,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> Any:
    """What the function of a command returns.

    dry_run: only for functions that take it; see `plans_itself`.
    Raises: TargetError when the target cannot be written, before anything else is done.
    """
    from mlxstacks.files.outputs import mark_bare

    row = command_named(name)
    check_output(name, resolved)
    function = load(row.function)
    accepted = inspect.signature(function).parameters
    options: dict[str, Any] = {"dry_run": True} if dry_run else {}
    if progress is not None and "progress" in accepted:
        options["progress"] = progress
    result = function(resolved.settings, **options)
    # A run that could only plan leaves no target.
    target = resolved.target if resolved.bare and not (dry_run or row.extends) else None
    if target is not None and target.is_dir():
        mark_bare(target)
    return result


def plans_itself(name: str) -> bool:
    """Whether a command's function can plan without running."""
    return "dry_run" in inspect.signature(load(command_named(name).function)).parameters


def check_output(name: str, resolved: Resolved) -> None:
    """Raises: TargetError when the target cannot be written: before hours of work, not after."""
    from mlxstacks.files.outputs import check_target

    if resolved.target is not None and not command_named(name).extends:
        check_target(resolved.target, force=bool(getattr(resolved.settings, "force", False)))
