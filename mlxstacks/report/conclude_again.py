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
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.recipe.table import COMMANDS, load
from mlxstacks.study.document import Standing
from mlxstacks.study.integrity import copy_named
from mlxstacks.study.result import Result

_MOST_NAMED = 3
_MOST_BYTES = 64_000_000
# Of a result these are the conclusion's; the rest is said before it, or of the process.
_DRAWN = ("outcome", "verdict", "failed_gate", "blocks")


def check_conclusion(result: Result, directory: Path) -> Result:
    """The result with the conclusion that its files bear out, and a note that says so; exploratory
    where they bear out other figures; as it is, with a note that says why, where none can be drawn.

    Reads nothing of `directory` but the files that the result names, from a copy.
    """
    command = COMMANDS.get(result.kind)
    if result.status != "done" or (command and command.conclude_again is None):
        return result
    if command is None:
        return _noted(result, f"no command is called {result.kind:.40}")
    made_with = result.environment.versions.get("mlxstacks", "unknown")
    try:
        with tempfile.TemporaryDirectory() as copy:
            copy_named(directory, result.provenance, Path(copy), _MOST_BYTES)
            drawn = load(str(command.conclude_again))(result, Path(copy))
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
    update = {name: getattr(drawn, name) for name in _DRAWN} | {"notes": (*result.notes, note)}
    if result.standing.status == "exploratory" and drawn.standing.status != "exploratory":
        # Drawn of a run that was as planned; what is found now takes that back.
        taken_back = result.standing.in_words()
        update["outcome"] = f"exploratory: {drawn.outcome}"
        update["verdict"] = drawn.verdict.replace(Standing.of(()).in_words(), taken_back)
    return result.model_copy(update=update)


def _contradicted(result: Result, made_with: str, reason: str) -> Result:
    """Another version of mlxstacks may have computed otherwise, so nothing follows from that."""
    if made_with != version("mlxstacks"):
        return _noted(result, f"it was made by mlxstacks {made_with:.40}, this is another")
    standing = Standing.of((*result.standing.reasons, reason))
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
