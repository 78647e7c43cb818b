"""Runs a study: a plan before the first answer, resumable steps, a conclusion from files.

Until it is done a run lives in `.NAME.work` next to its target NAME:

    plan.json      what was fixed before the first step; a run with another plan is refused
    settings.json  the settings of that plan
    steps.json     SHA-256 of each file that a finished step wrote
    source.json    digests of the code of a study of one's own, each that steps were run with
    ...            what the steps wrote

Laws, held here for every study: a killed run, started again, ends with the bytes of one that was
not killed; a file of a finished step that was changed is refused; nothing appears in the target
before all of it does.

Processes of a group each run the whole study, every one in a work directory of its own (the others'
are `.NAME.rank-1.work` and so on), but for what is dealt out: steps that a study gives as a list,
and answers to items (answer_log.py). What one has done, all are sent, so that all come to the same
end, and the first one writes it. One that dies leaves the work of the others.
"""

import json
import shutil
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, get_origin

from pydantic import ValidationError

from mlxstacks.errors import InputError, OtherRunError, StoreError
from mlxstacks.files.disk import sync_directory, sync_tree, user_path
from mlxstacks.files.outputs import PLACES, check_target, staged_directory, write_json
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.processes import (
    current_group,
    dealing,
    dealing_over,
    gathered,
    size_and_rank,
    wait_for_all,
)
from mlxstacks.settings import Settings
from mlxstacks.study.code import code_digests, is_installed
from mlxstacks.study.document import RESULT, Standing, problem_of
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.plan import PLAN, keep_plan
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import (
    IDENTITY,
    RunDirectory,
    check_same,
    keep_parts,
    what_differs,
    work_path,
)
from mlxstacks.study.shared_files import (
    SETTINGS,
    SOURCE,
    STEPS,
    found_files,
    is_own,
    listed_files,
    share_files,
)
from mlxstacks.study.write import environment, write_result

_CHANGED_CODE = "the study's code was changed after its first step; force=True runs all of it again"


@dataclass(frozen=True)
class Step:
    """A named part of a run.

    run: takes an empty directory and writes `outputs` into it, files whose paths are relative; they
    move into the work directory when all of them are there, and the step is not run again.
    Without outputs it takes the work directory itself, runs every time, and keeps what is there:
    answer logs, checkpoints, the runs of other commands.
    """

    name: str
    run: Callable[[Path], object]
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.outputs, str):
            raise TypeError(f"step {self.name}: outputs is a tuple, ({self.outputs!r},)")


class StudySettings(Protocol):
    """What the engine reads of a study's settings, a pydantic model."""

    @property
    def save_path(self) -> str | None: ...
    @property
    def force(self) -> bool: ...
    @property
    def resume(self) -> bool: ...


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


class Study(ABC):
    """What a study says for the engine to run it.

    settings: a pydantic model, with the target. inputs: models and data, which the target may not
    be or hold. artifacts: files and directories of the work directory that the target keeps;
    provenance: those that the result is made from; both as patterns of `Path.glob`, which never
    mean the engine's own files. plot_formats: of the plots' files. part: ends the work directory's
    name where a part of the study has to share nothing with the whole. is_dealt: several processes
    can share it.
    """

    settings: StudySettings
    inputs: Sequence[str | Path | None] = ()
    artifacts: Sequence[str] = ()
    provenance: Sequence[str] = ()
    plot_formats: Sequence[str] = ()
    part: str = ""
    is_dealt: bool = False

    @property
    def work_target(self) -> Path:
        """What `work_path` gives the work directory of."""
        _, rank = size_and_rank(dealing() or current_group())
        place = f"{self.part}.rank-{rank}" if rank else self.part
        return Path(f"{user_path(str(self.settings.save_path))}{place}")

    @abstractmethod
    def planned(self) -> Result:
        """Head of the result with the plan, status "planned". Writes nothing, so that inputs that
        cannot be used leave no work directory. Called once.
        """

    @abstractmethod
    def steps(self, work: Path) -> Iterable[Step | Sequence[Step]]:
        """A generator may read what its earlier steps wrote. A list: steps that can run in any
        order, each in one process of a group; they leave files that `artifacts` or `provenance`
        name.
        """

    @abstractmethod
    def conclude(self, work: Path) -> Result:
        """Outcome, verdict, data and blocks, of the files in `work` and the settings alone; the
        head is the planned one's where it says nothing else.
        """


class OwnStudy(Study):
    """A study of one's own: its plan is its settings, what `plan` adds, and hashes of its `inputs`.

    kind, title, question: the head of its result.
    """

    kind = title = question = ""
    settings: RunSettings

    def __init_subclass__(cls) -> None:
        with suppress(OSError):  # notes the files as they were imported
            code_digests(cls, OwnStudy)

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings

    def plan(self) -> Mapping[str, Any]:
        """What is fixed before the first answer, besides the settings."""
        return {}

    def planned(self) -> Result:
        settings = self.settings.model_dump(mode="json", exclude=PLACES)
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
        """SHA-256 of each of `inputs`. Raises: InputError: one is not there."""
        return {str(path): _input_sha256(path) for path in self.inputs if path is not None}

    def result(self, **fields: Any) -> Result:
        """For `conclude`: outcome, verdict, data and blocks under the study's head."""
        return self._head(status="done", **fields)

    def _head(self, **fields: Any) -> Result:
        about = {"kind": self.kind, "title": self.title, "question": self.question}
        return Result(**about, **fields)


def run_study(
    study: Study, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """Run a study to its target, or resume what an earlier run of the same plan left. Of a study
    of one's own, what is done already is read back.

    progress: is told when planning begins; what the steps do is the study's to tell.

    Raises:
        InputError: the work directory holds another plan, results without one, or a changed file of
            a finished step.
        TargetError: the target exists and may not be replaced, or another process writes it.
    """
    if not isinstance(study, Study):
        name = getattr(study, "__name__", "MyStudy")
        raise InputError(f"give a study with its settings, as in {name}(MySettings(...))")
    if (group := current_group()) is not None:
        if not study.is_dealt:
            raise InputError("this study runs in one process; start it without mlx.launch")
        with dealing_over(group):
            return _run(study, dry_run, progress)
    if not isinstance(study, OwnStudy):
        return _run(study, dry_run, progress)
    code_digests(type(study), OwnStudy, is_new=True)
    try:
        finished = None if dry_run else _read_finished(study)
        return finished or _run(study, dry_run, progress)
    except InputError as error:
        error.args = (_keywords_in(str(error)),)
        raise
    except ValidationError as error:
        part = "" if error.title == "Result" else f"{error.title}: "
        raise InputError(f"{study.kind}: {part}{problem_of(error)}") from error


def _keywords_in(message: str) -> str:
    return message.replace("--no-resume", "resume=False").replace("--force", "force=True")


def _run(study: Study, dry_run: bool, progress: Callable[..., None] | None) -> Result:
    started = time.monotonic()
    settings = study.settings
    group = dealing()
    _, rank = size_and_rank(group)
    if settings.save_path is None:
        raise InputError("save_path is needed: the directory that the result is written to")
    target = user_path(settings.save_path)
    inputs = [user_path(given) for given in study.inputs if given is not None]
    check_target(target, force=settings.force, inputs=[path for path in inputs if path.exists()])
    if progress and not dry_run:
        progress(0, 1, "reading inputs, planning")
    planned = study.planned().model_copy(update={"directory": str(target)})
    if planned.plan is not None:
        planned = planned.model_copy(update={"plan_sha256": json_sha256(planned.plan)})
    if dry_run:
        return planned.model_copy(update={"notes": (*planned.notes, *_quick_look(settings))})
    resumes = settings.resume and work_path(study.work_target).exists()
    directory = RunDirectory(study.work_target, {"kind": planned.kind}, resume=settings.resume)
    try:
        work = directory.path
        if planned.plan is not None:
            _keep_plan(work, planned, study.provenance)
        _check_plans(planned)
        share_files(work, study.artifacts, study.provenance)
        names, outputs = set[str](), set[str]()
        if all(is_own(path.relative_to(work)) for path in work.iterdir()):  # nothing is kept
            (work / SOURCE).unlink(missing_ok=True)
        steps = study.steps(work)
        if steps is None:
            raise TypeError("steps gave None; yield its steps")
        for step in steps:
            if isinstance(step, Step):
                _check_new(step, names, outputs)
                if progress and isinstance(study, OwnStudy):
                    progress(0, 1, step.name)
                if not step.outputs:
                    _note_source(work, study)
                run_step(step, work, planned.plan_sha256, keeps_all=isinstance(study, OwnStudy))
            else:
                _run_dealt(step, work, study, planned.plan_sha256)
            _note_source(work, study)
        _check_patterns(work, study)
        seconds = None if resumes else time.monotonic() - started
        result = _finished(planned, study.conclude(work), seconds)
        if isinstance(study, OwnStudy):
            _check_kept(work)
            if (study.input_digests() or None) != (planned.plan or {}).get("inputs"):
                raise InputError(
                    f"inputs: {', '.join(map(str, study.inputs))}: changed while the study ran; "
                    "--no-resume begins again"
                )
            result = result.model_copy(
                update={"notes": (*result.notes, *_left_behind(work, study))}
            )
        versions = {**result.environment.versions, **_source(study)}
        about = result.environment.model_copy(update={"versions": versions})
        result = result.model_copy(update={"environment": about})
        if len(_note_source(work, study)) > 1:
            reasons = (*result.standing.reasons, _CHANGED_CODE)
            standing = Standing(status="exploratory", reasons=reasons)
            result = result.model_copy(update={"standing": standing})
        if rank:  # the first process writes
            wait_for_all(group)
            directory.remove()
            return result
        with staged_directory(target, force=settings.force) as staged:
            kept = [
                path for path in (work / PLAN, *found_files(work, study.artifacts)) if path.exists()
            ]
            directories, files = (
                [str(path.relative_to(work)) for path in kept if path.is_dir() == is_dir]
                for is_dir in (True, False)
            )
            keep_parts(work, staged, directories, files)
            found = found_files(staged, study.provenance)
            parts = (part for path in found if path.is_dir() for part in path.rglob("*"))
            sources = {*staged.glob(PLAN), *found, *parts}
            result = write_result(result, staged, target, study.plot_formats, sources)
        wait_for_all(group)
        directory.remove()
    finally:
        directory.close()
    return result


def _check_plans(planned: Result) -> None:
    """Raises: InputError where the processes of a group planned differently."""
    plans = gathered(planned.plan_sha256, dealing())
    if len({*plans}) > 1:
        digests = ", ".join(str(plan)[:12] for plan in plans)
        raise InputError(
            f"the processes of the group made different plans ({digests}): every host needs the "
            "same model, data and version of mlxstacks"
        )


def _run_dealt(steps: Sequence[Step], work: Path, study: Study, plan_sha256: str | None) -> None:
    """The steps of this process; what those of the others left comes as files."""
    size, rank = size_and_rank(dealing())
    share_files(work, study.artifacts, study.provenance)
    before = listed_files(work, [*study.artifacts, *study.provenance])
    for step in steps[rank::size]:
        run_step(step, work, plan_sha256)
    share_files(work, study.artifacts, study.provenance, before)
    for step in steps:
        if size > 1 and step.outputs:
            _note_step(step, work, plan_sha256)


def _keep_plan(work: Path, planned: Result, provenance: Sequence[str]) -> None:
    """Raises: InputError as `keep_plan`; where the settings differ it names these alone: a plan has
    much that follows from them. A plan by which nothing was done yet gives way.
    """
    assert planned.plan is not None
    if {p.name for p in work.iterdir() if p.name[0] != "."} <= {PLAN, SETTINGS, IDENTITY}:
        (work / PLAN).unlink(missing_ok=True)
    settings = {k: v for k, v in planned.settings.items() if k not in PLACES}
    what = f"{planned.kind} results"
    try:
        keep_plan(work / PLAN, planned.plan, what, found_files(work, provenance))
    except OtherRunError as error:
        try:
            before = read_object((work / SETTINGS).read_bytes())
        except (OSError, ValueError):  # of an earlier version, or damaged
            raise error from None
        check_same(work, f"{what} with other settings", before, settings)
        raise
    write_json(work / SETTINGS, settings)


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
            raise InputError("give SAVE_PATH KEY=VALUE..., as in results/one seed=3")
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


def _source(study: Study) -> dict[str, str]:
    if not isinstance(study, OwnStudy):
        return {}
    return code_digests(type(study), OwnStudy)


def _check_new(step: Step, names: set[str], outputs: set[str]) -> None:
    """Raises: InputError: an earlier step has its name, or one of its outputs."""
    if not step.outputs:
        return
    if step.name in names or outputs & {*step.outputs}:
        twice = ", ".join(sorted(outputs & {*step.outputs}))
        what = f"are called {step.name!r}" if step.name in names else f"leave {twice}"
        raise InputError(f"two steps {what}; give each names of its own")
    names.add(step.name)
    outputs.update(step.outputs)


def _check_patterns(work: Path, study: Study) -> None:
    """Raises: InputError: an own study names what no step left, and would lose what it meant; or
    what the result is made from would not be kept.
    """
    if not isinstance(study, OwnStudy):
        return
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


def _left_behind(work: Path, study: Study) -> list[str]:
    """A note of what steps left and artifacts do not name."""
    kept = {*found_files(work, study.artifacts)}
    names = [name for written in _record(work).values() for name in written["sha256"]]
    lost = [name for name in names if not {work / name, *(work / name).parents} & kept]
    return [f"Not kept, for artifacts do not name it: {', '.join(lost)}."] if lost else []


def _input_sha256(path: str | Path) -> str:
    """Of a file, or of the files of a directory. Raises: InputError: nothing is there."""
    given = user_path(path)
    if given.is_dir():
        files = {str(file.relative_to(given)): file for file in given.rglob("*") if file.is_file()}
        return json_sha256({
            name: file_sha256(file)
            for name, file in sorted(files.items())
            if not any(part[0] == "." or part == "__pycache__" for part in Path(name).parts)
        })  # fmt: skip
    if not given.is_file():
        raise InputError(f"inputs: {path}: no such file or directory")
    return file_sha256(given)


def _check_kept(work: Path) -> None:
    """Raises: InputError: a later step, or `conclude`, wrote over what a step left."""
    for step, written in _record(work).items():
        for name, digest in written["sha256"].items():
            if not (work / name).is_file() or file_sha256(work / name) != digest:
                raise InputError(
                    f"{work / name}: what step {step!r} left there was changed by a later step, or "
                    "by conclude; write to another name"
                )


def _note_source(work: Path, study: Study) -> list[dict[str, str]]:
    """The code that steps in this work directory were run with, the present one last."""
    path, known = work / SOURCE, list[dict[str, str]]()
    if path.exists():
        try:
            known = read_object(path.read_bytes())["code"]
        except (KeyError, ValueError) as error:
            raise InputError(f"{path}: damaged ({error}); --no-resume begins again") from None
    if (source := _source(study)) and source not in known:
        known.append(source)
        write_json(path, {"code": known})
    return known


def _usage(settings: type[RunSettings]) -> Iterator[str]:
    yield f"usage: python {Path(sys.argv[0]).name} SAVE_PATH [KEY=VALUE...]"
    for name, field in settings.model_fields.items():
        if name != "save_path":
            default = "" if field.is_required() else f" (default {field.get_default()})"
            yield f"  {name}{default}  {field.description or ''}".rstrip()


def _read_finished(study: Study) -> Result | None:
    """The result in the target, where it is of the same plan. Raises: InputError for another's."""
    target = user_path(str(study.settings.save_path))
    if study.settings.force or not (target / RESULT).is_file():
        return None
    result, planned = Result.open(target), study.planned()
    plan = json.loads(json.dumps(planned.plan))  # as it would be read back: lists for tuples
    if (result.kind, result.plan) == (planned.kind, plan):
        now = _source(study)
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


def _quick_look(settings: StudySettings) -> Iterable[str]:
    """What a plan says of a part: it decides nothing, by whatever name the part is asked for."""
    for name in ("limit", "max_prompts"):
        if count := getattr(settings, name, None):
            yield f"{name} {count}: a quick look at a part of this; the result will be EXPLORATORY."


def _finished(planned: Result, concluded: Result, seconds: float | None) -> Result:
    """The planned head with what the conclusion says. seconds: None for a run that was resumed.

    Raises: TypeError: `conclude` returned no result.
    """
    if not isinstance(concluded, Result):
        raise TypeError(f"conclude returned a {type(concluded).__name__}; return self.result(...)")
    concluded_fields = {
        name: getattr(concluded, name)
        for name in concluded.model_fields_set
        if name not in ("kind", "title", "notes", "provenance", "directory")
    }
    if planned.plan:
        concluded_fields.setdefault("standing", Standing(status="confirmatory"))
    return planned.model_copy(
        update={
            "environment": environment(seconds),
            "provenance": {**planned.provenance, **concluded.provenance},
            **concluded_fields,
            "notes": (*planned.notes, *concluded.notes),
            "status": "done",
        }
    )


def run_step(step: Step, work: Path, plan_sha256: str | None, *, keeps_all: bool = False) -> None:
    """Run a step whose outputs are not there yet. keeps_all: what it left besides is kept, too.

    Raises: InputError for one that was changed, or that the step did not leave.
    """
    if not step.outputs:
        step.run(work)
        return
    record = _record(work)
    if (written := record.get(step.name)) is not None:
        noted = written.get("sha256") if isinstance(written, dict) else None
        known = {*step.outputs, *(noted if isinstance(noted, dict) else ())}
        digests = {name: file_sha256(work / name) for name in known if (work / name).is_file()}
        if written != {"plan_sha256": plan_sha256, "sha256": digests}:
            raise InputError(
                f"{work}: {', '.join(step.outputs)} of step {step.name!r} or {STEPS} was changed "
                "after it was written; --no-resume begins again"
            )
        return
    scratch = work / f".{step.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    step.run(scratch)
    sync_tree(scratch)
    if missing := [name for name in step.outputs if not (scratch / name).is_file()]:
        if directories := [name for name in missing if (scratch / name).is_dir()]:
            names = ", ".join(directories)
            raise InputError(f"step {step.name}: outputs are files; name those in {names}")
        raise InputError(f"step {step.name} left no {', '.join(missing)}")
    files = [path for path in scratch.rglob("*") if path.is_file()] if keeps_all else []
    left = [*dict.fromkeys((*step.outputs, *(str(f.relative_to(scratch)) for f in sorted(files))))]
    taken = {name for noted in record.values() for name in noted["sha256"]}
    if twice := taken & {*left}:
        raise InputError(
            f"step {step.name} left {', '.join(sorted(twice))}, as an earlier step did; give each "
            f"names of its own. What it left lies in {scratch}"
        )
    for name in left:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).replace(work / name)
        sync_directory((work / name).parent)
    shutil.rmtree(scratch)
    _note_step(step, work, plan_sha256, left)


def _record(work: Path) -> dict[str, Any]:
    """What STEPS says. Raises: InputError: it is damaged."""
    try:
        return read_object((work / STEPS).read_bytes()) if (work / STEPS).exists() else {}
    except ValueError as error:
        raise InputError(f"{work / STEPS}: damaged ({error}); --no-resume begins again") from None


def _note_step(step: Step, work: Path, plan_sha256: str | None, names: Sequence[str] = ()) -> None:
    digests = {name: file_sha256(work / name) for name in names or step.outputs}
    write_json(
        work / STEPS, {**_record(work), step.name: {"plan_sha256": plan_sha256, "sha256": digests}}
    )
