"""The conclusion of a study drawn again from the files that lie next to its result.

A seal shows that a result was changed, unless a new seal was computed. Where a conclusion follows
from settings and files, the page therefore draws it again and shows what it drew: an edited
verdict or table is not shown at all, and figures that the files do not bear out make the result
exploratory. What is left to an edit: title, notes, settings that decide nothing, and the files
themselves with all their digests.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.recipe.table import COMMANDS
from mlxstacks.study.document import Standing
from mlxstacks.study.provenance import copy_named
from mlxstacks.study.result import Result

_MOST_NAMED = 3
# Of all files, and of runs in one of them: more are not ours, or would take minutes.
_MOST_BYTES, _MOST_RUNS = 64_000_000, 10_000
# Of a result these are the conclusion's; the rest is said before it, or of the process.
_DRAWN = ("outcome", "verdict", "failed_gate", "blocks")


def check_conclusion(result: Result, directory: Path) -> Result:
    """The result with the conclusion that its files bear out, and a note that says so; exploratory
    where they bear out other figures; as it is, with a note that says why, where none can be drawn.

    Reads nothing of `directory` but the files that the result names, from a copy.
    """
    draw = _DRAW.get(result.kind)
    if result.status != "done":
        return result
    if draw is None:
        unknown = f"no command is called {result.kind:.40}"
        return result if result.kind in COMMANDS else _noted(result, unknown)
    made_with = result.environment.versions.get("mlxstacks", "unknown")
    try:
        with tempfile.TemporaryDirectory() as copy:
            copy_named(directory, result.provenance, Path(copy), _MOST_BYTES)
            drawn = draw(result, Path(copy))
        own, other = (json.loads(json.dumps(each.as_json()["data"])) for each in (result, drawn))
        differing = list(_differences(own, other))
    except Exception as error:  # the files may be anybody's; their contents are not repeated
        why = f"its files do not have what it takes ({type(error).__name__})"
        return _contradicted(result, made_with, f"conclusion not drawn again: {why}")
    if differing:
        names = ", ".join(differing[:_MOST_NAMED])
        reason = f"other figures follow from its files: {names:.300}"
        return _contradicted(result, made_with, reason)
    note = "Conclusion drawn again from its files: the same figures."
    return result.model_copy(
        update={name: getattr(drawn, name) for name in _DRAWN} | {"notes": (*result.notes, note)}
    )


def _contradicted(result: Result, made_with: str, reason: str) -> Result:
    """Another version of mlxstacks may have computed otherwise, so nothing follows from that."""
    if made_with != version("mlxstacks"):
        return _noted(result, f"it was made by mlxstacks {made_with:.40}, this is another")
    standing = Standing(status="exploratory", reasons=(*result.standing.reasons, reason))
    return result.model_copy(update={"standing": standing})


def _noted(result: Result, why: str) -> Result:
    note = f"Conclusion not drawn again: {why}."
    return result.model_copy(update={"notes": (*result.notes, note)})


def _differences(own: Any, drawn: Any, name: str = "") -> Iterator[str]:
    """Names of values that are not those drawn again. Words may differ, as between revisions, and
    numbers in their last digits, as between machines.
    """
    if isinstance(drawn, dict) and isinstance(own, dict):
        for key in dict.fromkeys((*own, *drawn)):
            place = f"{name}.{key}" if name else key
            if key in own and key in drawn:
                yield from _differences(own[key], drawn[key], place)
            else:
                yield place
    elif isinstance(drawn, list) and isinstance(own, list) and len(own) == len(drawn):
        for place, (mine, value) in enumerate(zip(own, drawn, strict=True)):
            yield from _differences(mine, value, f"{name}.{place}")
    elif isinstance(drawn, str) and isinstance(own, str):
        return
    elif isinstance(drawn, float) and type(own) in (int, float):
        if not math.isclose(own, drawn, rel_tol=1e-6, abs_tol=1e-9):
            yield name
    elif own != drawn:
        yield name


def _sweep(result: Result, directory: Path) -> Result:
    from mlxstacks.studies.sweep.cells import cells_of, read_results
    from mlxstacks.studies.sweep.report import concluded
    from mlxstacks.studies.sweep.settings import SweepSettings

    settings = SweepSettings.model_validate(result.settings)
    axes = (settings.ranks, settings.seeds, settings.layers, settings.projections)
    _check_count(math.prod(map(len, axes)) * max(1, len(settings.bits)), result)
    cells = read_results(directory / "cells")
    return concluded(settings, [cells[cell] for cell in cells_of(settings)])


def _comparison(result: Result, directory: Path) -> Result:
    from mlxstacks.studies.compare.run import concluded
    from mlxstacks.studies.compare.settings import CompareSettings

    settings = CompareSettings.model_validate(result.settings)
    _check_count(len(settings.seeds) * len(settings.arms), result)
    return concluded(settings, (result.plan or {})["budgets"], directory)


def _buffers(result: Result, directory: Path) -> Result:
    from mlxstacks.studies.buffers.run import concluded
    from mlxstacks.studies.buffers.settings import BufferSettings

    settings = BufferSettings.model_validate(result.settings)
    if math.prod(map(len, (settings.ranks, settings.order_seeds))) > _MOST_RUNS:
        raise ValueError("more runs than any experiment has")
    return concluded(settings, directory)


def _check_count(cells: int, result: Result) -> None:
    """Each has a file. Raises: ValueError before millions of them are looked for."""
    if cells > len(result.provenance):
        raise ValueError("more cells than files")


def _confound(result: Result, directory: Path) -> Result:
    from mlxstacks.studies.confound.run import conclude_again
    from mlxstacks.studies.confound.settings import ConfoundSettings

    return conclude_again(ConfoundSettings.model_validate(result.settings), directory)


def _identity(result: Result, directory: Path) -> Result:
    from mlxstacks.studies.identity.run import conclude_again
    from mlxstacks.studies.identity.settings import IdentitySettings

    return conclude_again(IdentitySettings.model_validate(result.settings), result, directory)


_DRAW: dict[str, Callable[[Result, Path], Result]] = {
    "sweep": _sweep,
    "stack compare": _comparison,
    "sweep buffers": _buffers,
    "confound": _confound,
    "identity": _identity,
}
