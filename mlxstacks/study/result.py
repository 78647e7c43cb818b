"""What a command came to: one document with a head, figures for machines, and blocks for people.

`result.json` in a target is a `Result`. A renderer reads head and `blocks` and knows no kind of
result. The document ends with its seal, the SHA-256 of everything before it, and names a digest of
each file that it was made from, so that a change to either shows. What a seal cannot show: that who
changed the document did not compute a new one; only running the command again shows that.
"""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import MAX_JSON_BYTES, compact, json_sha256, read_object
from mlxstacks.regular_files import check_regular
from mlxstacks.study.document import (
    RESULT,
    Document,
    Plot,
    Standing,
    Table,
    plain_names,
    problem_of,
)
from mlxstacks.study.integrity import check_provenance
from mlxstacks.study.render.words import clean

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from matplotlib.figure import Figure

CHANGED = f"{RESULT} was changed after the run"
_MOST_NAMED = 5


class _OfPeople(type(Document)):  # type: ignore[misc]
    """Help and editors show a class's own parts, not those of every pydantic model."""

    def __dir__(cls) -> list[str]:
        inner = {"read", "checked", "sealed", "digest", "from_json", "model_config"}
        return [name for name in vars(cls) if name[0] != "_" and name not in inner]


class Result(Document, metaclass=_OfPeople):
    """What a command computed, as `ms.fuse`, `ms.train` and the others return it.

    `print(result)` shows what the command line prints; a notebook shows tables and plots.

        verdict, outcome        what came out, in sentences and in a few words
        table(id), plot(id)     a pandas DataFrame, a matplotlib figure; `tables` and `plots` list
                                the ids
        data                    a dict of all figures, units in the names
        settings, plan, environment, notes, standing, provenance    how it was made
        status                  'done', or 'planned' of a dry run
        failed_gate             why the command line would exit with 3, or None
        directory               where it lies; `Result.open(directory)` reads and checks it
    """

    # --- for people -------------------------------------------------------------------------------

    def table(self, id: str | None = None) -> "pandas.DataFrame":
        """A table as a pandas DataFrame with plain names of columns: `p (Holm)` is `p_holm`, a size
        `size_bytes`; shares, and differences in points, are fractions. An interval is in two
        columns, `..._low` and `..._high`, behind its estimate, and `5 of 8` in two, the second
        `..._of`. Numbers are numeric, NaN where there is none or a word instead. id: may be left
        out where there is one table.

        Raises: InputError: no such table; it lists the ids.
        """
        import pandas

        block = self._block(id, Table)
        columns: dict[str, Any] = {}
        names = plain_names(block.columns)

        def put(name: str, values: Any) -> None:
            """Beside a column, under a name that none has."""
            while name in columns or name in names:
                name += "_2"
            columns[name] = values

        numeric = [column.kind != "text" for column in block.columns]
        for name, is_number, *cells in zip(names, numeric, *block.rows, strict=True):
            if is_number:
                cells = [None if isinstance(cell, str) else cell for cell in cells]
            elif cells and None not in (pairs := list(map(_count_of, cells))):
                columns[name], wholes = zip(*pairs, strict=True)
                put(f"{name}_of", wholes)
                continue
            if not any(isinstance(cell, tuple) for cell in cells):
                columns[name] = cells
                if is_number and None in cells:  # all of them, perhaps
                    columns[name] = pandas.Series(cells, dtype=float)
                continue
            parts = [cell if isinstance(cell, tuple) else (cell,) for cell in cells]
            values = [None if len(part) == 2 else part[0] for part in parts]
            if any(value is not None for value in values):
                columns[name] = values
            ends = [part[-2:] if len(part) > 1 else (None, None) for part in parts]
            for end, bounds in zip(("low", "high"), zip(*ends, strict=True), strict=True):
                put(f"{name}_{end}", bounds)
        return pandas.DataFrame(columns)

    @property
    def tables(self) -> dict[str, str]:
        """Id, which `table` takes, -> title."""
        return {block.id: block.title for block in self.blocks if isinstance(block, Table)}

    @property
    def plots(self) -> dict[str, str]:
        """Id, which `plot` takes, -> title."""
        return {block.id: block.title for block in self.blocks if isinstance(block, Plot)}

    def __dir__(self) -> list[str]:
        return [*dir(type(self)), *type(self).model_fields]

    def plot(self, id: str | None = None) -> "Figure":
        """A plot as a matplotlib figure. id, Raises: as `table`, or matplotlib is not there."""
        from mlxstacks.study.render.figures import WITHOUT, figure_of

        try:
            return figure_of(self._block(id, Plot))
        except ImportError:
            raise InputError(f"no plot: {WITHOUT}") from None

    def _block(self, id: str | None, kind: Any) -> Any:
        blocks = {block.id: block for block in self.shown_blocks if isinstance(block, kind)}
        if id is None and len(blocks) == 1:
            return next(iter(blocks.values()))
        if id not in blocks:
            what = kind.__name__.lower()
            got = f"no {what} {id!r};" if id is not None else f"which {what}?"
            if not blocks:
                others = ", ".join(self.plots if kind is Table else self.tables) or "none"
                other = "plots" if kind is Table else "tables"
                raise InputError(f"a result of {self.kind} has no {what}s; {other}: {others}")
            raise InputError(f"{got} ids of {self.kind}: {', '.join(map(repr, blocks))}")
        return blocks[id]

    def __str__(self) -> str:
        from mlxstacks.study.render.console import result_text

        return result_text(self)

    def __repr__(self) -> str:
        """One line: what it is, and the names that `table` and `plot` take."""
        named = {"tables": self.tables, "plots": self.plots}
        held = [f"{what}: {', '.join(ids)}" for what, ids in named.items() if ids]
        about = "; ".join([self.outcome or self.status, *held])
        return f"<Result of {self.kind}: {about}>"

    def _repr_markdown_(self) -> str:
        from mlxstacks.study.render.markdown import to_markdown

        return to_markdown(self)

    def _repr_html_(self) -> str:
        from mlxstacks.study.render.html import result_html

        return result_html(self)

    # --- on disk ----------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """As it is written. Law: `Result.from_json` of it is the result again."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """What the seal of this document has to be."""
        document = self.as_json()
        del document["seal"]
        return sha256(compact(document)).hexdigest()

    def sealed(self) -> "Result":
        return self.model_copy(update={"seal": self.digest()})

    @classmethod
    def open(cls, path: "str | Path | Result") -> "Result":
        """The result in a directory, or in a file: EXPLORATORY, with the reasons, where the
        document, its plan or a file behind it is not what it was when it was made. Its texts name
        keywords, as those of a call do.

        Raises: InputError: no result of this version.
        """
        if isinstance(path, Result):
            path = path.directory or ""
        if not isinstance(path, str | Path):
            raise InputError(f"path: got {path!r:.80}; give the directory that a command wrote")
        file = Path(path) / RESULT if Path(path).is_dir() else Path(path)
        checked = cls.read(file).checked(file.parent.absolute())
        # of a level above this one: it knows the commands
        said: Result = importlib.import_module("mlxstacks.keywords").said_in_python(checked)
        return said

    @classmethod
    def read(cls, file: Path) -> "Result":
        """The document as it stands there. Raises: as `open`."""
        try:
            check_regular(file)
            if file.stat().st_size > MAX_JSON_BYTES:
                raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
            return cls.from_json(read_object(file.read_bytes()))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            why = "no text" if isinstance(error, UnicodeDecodeError) else why
            raise InputError(
                f"{file}: no result that can be read: {clean(why, 300)}; give the directory "
                "that a command wrote, or run it again"
            ) from None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Result":
        """Raises: ValueError saying what is wrong with the document."""
        try:
            return cls.model_validate_json(json.dumps(document))
        except ValidationError as error:
            raise ValueError(problem_of(error)) from None

    def checked(self, directory: Path) -> "Result":
        """This result beside what lies in its directory now. Raises: as `check_provenance`."""

        reasons, notes = list[str](), list[str]()
        told = {}
        if self.seal != self.digest():
            reasons.append(CHANGED)
            told = dict.fromkeys(("outcome", "verdict"), f"Not shown: {CHANGED}.")
        if self.plan is not None and self.plan_sha256 != json_sha256(self.plan):
            reasons.append("the plan in it has not the hash that it names")
        files = check_provenance(directory, self.provenance)
        if files.other:
            reasons.append(_beginning(files.other))
        if files.missing:
            reasons.append(f"what it was made from is not next to it: {_beginning(files.missing)}")
        if files.same and not reasons:
            plural = "" if files.same == 1 else "s"
            notes.append(f"Read again: {files.same:,} file{plural} behind it, as when it was made.")
        standing = self.standing
        if reasons:
            reasons = [*standing.reasons, *reasons]
            standing = Standing(status="exploratory", reasons=tuple(dict.fromkeys(reasons)))
            planned, now = (Standing.of(why).in_words() for why in ((), standing.reasons))
            told.setdefault("verdict", self.verdict.replace(planned, now))
        return self.model_copy(
            update={
                "standing": standing, "notes": (*self.notes, *notes), "directory": str(directory),
                **told,
            }
        )  # fmt: skip


Result.__signature__ = Signature()  # commands make results; help shows no arguments


def _beginning(parts: Sequence[str]) -> str:
    more = len(parts) - _MOST_NAMED
    listed = ", ".join(part[:200] for part in parts[:_MOST_NAMED])
    return f"{listed} and {more:,} more" if more > 0 else listed


def _count_of(cell: Any) -> tuple[int, int] | None:
    """Of `5 of 1,020` both numbers."""
    found = re.fullmatch(r"([\d,]+) of ([\d,]+)", str(cell))
    return found and (int(found[1].replace(",", "")), int(found[2].replace(",", "")))
