"""Studies of one's own: their settings, their rules, and how a script runs one."""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import PLACES
from mlxstacks.settings import Settings
from mlxstacks.study.code import Code, code_of, is_installed
from mlxstacks.study.document import RESULT, problem_of
from mlxstacks.study.engine import Checks, Step, Study, run_study, step_record
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import what_differs
from mlxstacks.study.shared_files import found_files

__all__ = ["OwnStudy", "RunSettings", "Step", "main", "run_study"]


class RunSettings(Settings):
    """What the settings of a study of one's own begin with: `class MySettings(RunSettings)`."""

    save_path: str
    seed: int = 0
    resume: bool = True
    force: bool = False

    def __init__(self, **values: Any) -> None:
        """Raises: InputError naming each setting that cannot be used."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            fields = [*type(self).model_fields]
            problems = []
            for part in error.errors(include_url=False):
                name = ".".join(map(str, part["loc"]))
                known = get_close_matches(name, fields, 1) or [", ".join(fields)]
                unknown = part["type"] == "extra_forbidden"
                problems.append(
                    f"no setting {name}: {known[0]}?" if unknown else f"{name}: {part['msg']}"
                )
            raise InputError("\n".join(problems)) from None


class OwnChecks(Checks):
    """Of a study whose code may change between two runs, and whose author may err."""

    keeps_all = True

    def run(self, study: Study, run: Callable[[], Result], *, dry_run: bool) -> Result:
        assert isinstance(study, OwnStudy)
        study._read_code(is_new=True)
        try:
            return (None if dry_run else _read_finished(study)) or run()
        except InputError as error:
            error.args = (_keywords_in(str(error)),)
            raise
        except ValidationError as error:
            part = "" if error.title == "Result" else f"{error.title}: "
            raise InputError(f"{study.kind}: {part}{problem_of(error)}") from error

    def code(self, study: Study) -> dict[str, str]:
        assert isinstance(study, OwnStudy)
        return study._code_read.digests or study._read_code()

    def after_steps(self, study: Study, work: Path) -> None:
        """Raises: InputError: the study names what no step left, and would lose what it meant; or
        what the result is made from would not be kept.
        """
        for of in ("artifacts", "provenance"):
            for pattern in getattr(study, of):
                if not found_files(work, [pattern]):
                    raise InputError(
                        f"{of}: no step left a {pattern}; nothing is lost, it lies in {work}"
                    )
        kept = found_files(work, study.artifacts)
        for path in found_files(work, study.provenance):
            if not {path, *path.parents} & {*kept}:
                name = path.relative_to(work)
                raise InputError(f"provenance: {name} would not be kept; name it in artifacts too")

    def after_conclusion(self, study: Study, work: Path, planned: Result) -> list[str]:
        """Raises: InputError: a later step, or `conclude`, wrote over what a step left; or an input
        was changed.
        """
        assert isinstance(study, OwnStudy)
        _check_kept(work)
        before, now = (planned.plan or {}).get("inputs", {}), study.input_digests()
        if changed := sorted(dict(before.items() ^ now.items())):
            raise InputError(
                f"inputs: {', '.join(changed)}: changed while the study ran; "
                "--no-resume begins again"
            )
        kept = {*found_files(work, study.artifacts)}
        names = [name for written in step_record(work).values() for name in written["sha256"]]
        lost = [name for name in names if not {work / name, *(work / name).parents} & kept]
        unwatched = study._code_read.unwatched
        notes = {
            "Not kept, for artifacts do not name it": lost,
            "Used, but not watched for changes": unwatched,
        }
        return [f"{note}: {', '.join(about)}." for note, about in notes.items() if about]


class OwnStudy(Study):
    """A study of one's own: its plan is its settings, what `plan` adds, and hashes of its `inputs`.

    kind, title, question: the head of its result.
    """

    kind = title = question = ""
    settings: RunSettings
    _checks = OwnChecks()
    _code_read = Code({}, ())

    def __init_subclass__(cls) -> None:
        with suppress(OSError):  # notes the files as they were imported
            code_of(cls, OwnStudy)

    def __init__(self, settings: RunSettings) -> None:
        if not isinstance(settings, RunSettings):
            what = f"{type(self).__name__}(RunSettings(save_path=...))"
            raise TypeError(f"a study takes its settings, not {type(settings).__name__}: {what}")
        self.settings = settings

    def plan(self) -> Mapping[str, Any]:
        """What is fixed before the first answer, besides the settings."""
        return {}

    def planned(self) -> Result:
        settings = self.settings.model_dump(mode="json", exclude=PLACES)
        # the table of commands is above this level
        if self.kind in import_module("mlxstacks.recipe.table").COMMANDS:
            raise InputError(f"kind: {self.kind!r} is a command; name this study otherwise")
        if not isinstance(own := self.plan(), Mapping):
            raise TypeError(f"plan returned {own!r}; return a dict")
        for name in ("artifacts", "provenance", "inputs", "plot_formats"):
            if isinstance(value := getattr(self, name), str):
                raise TypeError(f"{name} is a tuple, ({value!r},)")
        if unknown := {*self.plot_formats} - {*FORMATS}:
            raise InputError(f"plot_formats: {min(unknown)}; there are {', '.join(FORMATS)}")
        given = self.input_digests()
        plan = {**settings, **own} | ({"inputs": given} if given else {})
        return self._head(status="planned", settings=settings, plan=plan)

    def input_digests(self) -> dict[str, str]:
        """SHA-256 of each file that `inputs` name or hold. Raises: InputError: one is not there."""
        files = (file for path in self.inputs if path is not None for file in _files_of(path))
        return {str(name): file_sha256(path) for name, path in files}

    def _read_code(self, *, is_new: bool = False) -> dict[str, str]:
        """As it is now: what a run fills while it works is no change of its code."""
        held = {n: v for n, v in vars(self).items() if n not in ("settings", "_code_read")}
        held |= {"settings": type(self.settings)}  # their values are in the plan
        self._code_read = code_of(type(self), OwnStudy, held, is_new=is_new)
        return self._code_read.digests

    def result(self, **fields: Any) -> Result:
        """For `conclude`: outcome, verdict, data and blocks under the study's head."""
        return self._head(status="done", **fields)

    def _head(self, **fields: Any) -> Result:
        about = {"kind": self.kind, "title": self.title, "question": self.question}
        return Result(**about, **fields)


def main(
    study: type[OwnStudy], settings: type[RunSettings], arguments: Sequence[str] | None = None
) -> int:
    """Run a study from a script as commands are run, `sys.exit(main(MyStudy, MySettings))`.

    arguments: SAVE_PATH KEY=VALUE..., the command line's where not given. The result is printed;
    what cannot be used is one message. A finished run of the same plan is read back. Returns 0, 1
    where something failed on the way, 2 for bad input, 3 for a gate that is not met, 130 where it
    was interrupted.
    """
    from mlxstacks.study.render.console import result_text, write
    from mlxstacks.study.render.progress import ProgressBar

    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] in (["-h"], ["--help"]):
        write("\n".join(_usage(settings)))
        return 0
    pairs = [word.partition("=") for word in words[1:]]
    try:
        first, equals, _ = words[0].partition("=") if words else ("", "", "")
        is_setting = equals and first in settings.model_fields
        if not words or words[0][:1] == "-" or is_setting or not all(e for _, e, _ in pairs):
            raise InputError("give SAVE_PATH [KEY=VALUE...], as in results/one seed=3")
        if twice := {key for key, _, _ in pairs if [p[0] for p in pairs].count(key) > 1}:
            raise InputError(f"given twice: {', '.join(sorted(twice))}")
        values = {key: _parsed(settings, key, value) for key, _, value in pairs} | {
            "save_path": words[0]
        }
        given = study(settings(**values))
        if (result := _read_finished(given)) is None:
            with ProgressBar(given.kind) as bar:
                result = run_study(given, progress=bar)
        else:
            write(f"Already done with these settings: {result.directory}; force=True runs it again")
    except KeyboardInterrupt:
        write("interrupted; the same call resumes", error=True)
        return 130
    except (InputError, StoreError, OSError) as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if not is_installed(f.filename)]
        is_own = isinstance(error, OSError) and own
        where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if is_own else ""
        write(f"error: {where}{_keywords_in(str(error))}", error=True)
        return 2 if isinstance(error, InputError) else 1
    write(result_text(result))
    return 3 if result.failed_gate else 0


def _parsed(settings: type[RunSettings], key: str, text: str) -> Any:
    """`[a, b]` and `{a: 1}` as YAML, `a,b` of a list; other text is pydantic's to read.

    Raises: InputError.
    """
    import yaml

    field = settings.model_fields.get(key)
    if field and get_origin(field.annotation) in (list, tuple, Sequence) and text[:1] != "[":
        return text.split(",")
    try:
        return yaml.safe_load(text) if text[:1] in ("[", "{") else text
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        raise InputError(f"{key}={text}: no YAML list or mapping: {problem}") from None


def _files_of(given: str | Path) -> Iterator[tuple[Path, Path]]:
    """(its name, its place) of a file, or of each file of a directory. Raises: InputError: nothing
    is there.
    """
    path = user_path(given)
    if not path.exists():
        raise InputError(f"inputs: {given}: no such file or directory")
    if path.is_file():
        yield Path(given), path
        return
    for file in sorted(path.rglob("*")):
        part = file.relative_to(path)
        if file.is_file() and not any(p[0] == "." or p == "__pycache__" for p in part.parts):
            yield Path(given) / part, file


def _check_kept(work: Path) -> None:
    """Raises: InputError: a later step, or `conclude`, wrote over what a step left."""
    for step, written in step_record(work).items():
        for name, digest in written["sha256"].items():
            if not (work / name).is_file() or file_sha256(work / name) != digest:
                raise InputError(
                    f"{work / name}: what step {step!r} left there was changed by a later step, or "
                    "by conclude; write to another name"
                )


def _keywords_in(message: str) -> str:
    return message.replace("--no-resume", "resume=False").replace("--force", "force=True")


def _usage(settings: type[RunSettings]) -> Iterator[str]:
    yield f"usage: python {Path(sys.argv[0]).name} SAVE_PATH [KEY=VALUE...]"
    for name, field in settings.model_fields.items():
        if name != "save_path":
            default = "" if field.is_required() else f" (default {field.get_default()})"
            yield f"  {name}{default}  {field.description or ''}".rstrip()


def _read_finished(study: OwnStudy) -> Result | None:
    """The result in the target, where it is of the same plan. Raises: InputError for another's."""
    target = user_path(str(study.settings.save_path))
    if study.settings.force or not (target / RESULT).is_file():
        return None
    result, planned = Result.open(target), study.planned()
    plan = json.loads(json.dumps(planned.plan))  # as it would be read back: lists for tuples
    if (result.kind, result.plan) == (planned.kind, plan):
        now = study._read_code()
        if {*now.values()} <= {*result.environment.versions.values()}:
            return result
        before = {*result.environment.versions.values()}
        changed = [name for name, digest in now.items() if digest not in before]
        note = f"Changed since this was made: {', '.join(changed)}. force=True runs it again."
        return result.model_copy(update={"notes": (*result.notes, note)})
    differing = what_differs(
        {"kind": result.kind, **(result.plan or {})}, {"kind": planned.kind, **(plan or {})}
    )
    raise InputError(
        "\n  ".join([f"{target}: another plan was carried out there; it differs in", *differing])
        + "\ngive another save_path, or replace it with force=True"
    )
