"""Runs a study: a plan before the first answer, resumable steps, a conclusion from files.

Until it is done a run lives in `.NAME.work` next to its target NAME:

    plan.json      what was fixed before the first step; a run with another plan is refused
    settings.json  the settings of that plan
    steps.json     SHA-256 of each file that a finished step wrote
    source.json    digests of code that is not the package's, each that steps were run with
    ...            what the steps wrote

Laws, held here for every study: a killed run, started again, ends with the bytes of one that was
not killed; a file of a finished step that was changed is refused; nothing appears in the target
before all of it does.

Processes of a group each run the whole study, every one in a work directory of its own (the others'
are `.NAME.rank-1.work` and so on), but for what is dealt out: steps that a study gives as a list,
and answers to items (answer_log.py). What one has done, all are sent, so that all come to the same
end, and the first one writes it. One that dies leaves the work of the others.
"""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mlxstacks.errors import InputError, OtherRunError
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
from mlxstacks.study.document import Standing
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.plan import PLAN, keep_plan
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import (
    IDENTITY,
    RunDirectory,
    check_same,
    keep_parts,
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


class Checks:
    """What the engine does besides for studies that are no part of the package, `OwnChecks`; for
    the others nothing.

    keeps_all: what a step leaves besides its outputs is kept, too.
    """

    keeps_all = False

    def run(self, study: "Study", run: Callable[[], Result], *, dry_run: bool) -> Result:
        """A finished result, or what `run` gives."""
        return run()

    def code(self, study: "Study") -> dict[str, str]:
        """Digest of each part of its code."""
        return {}

    def after_steps(self, study: "Study", work: Path) -> None:
        """Raises: InputError: its conclusion would not be kept whole."""

    def after_conclusion(self, study: "Study", work: Path, planned: Result) -> list[str]:
        """Notes on the result. Raises: InputError: what it was made from was changed."""
        return []


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
    _checks = Checks()

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


def run_study(
    study: Study, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """Run a study to its target, or resume what an earlier run of the same plan left. Of an
    `OwnStudy`, what is done already is read back.

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
    run = partial(_run, study, dry_run, progress)
    return study._checks.run(study, run, dry_run=dry_run)


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
                if progress and study._checks.keeps_all:
                    progress(0, 1, step.name)
                if not step.outputs:
                    _note_source(work, study)
                run_step(step, work, planned.plan_sha256, keeps_all=study._checks.keeps_all)
            else:
                _run_dealt(step, work, study, planned.plan_sha256)
            _note_source(work, study)
        study._checks.after_steps(study, work)
        seconds = None if resumes else time.monotonic() - started
        result = _finished(planned, study.conclude(work), seconds)
        notes = (*result.notes, *study._checks.after_conclusion(study, work, planned))
        versions = {**result.environment.versions, **study._checks.code(study)}
        about = result.environment.model_copy(update={"versions": versions})
        result = result.model_copy(update={"environment": about, "notes": notes})
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


def _note_source(work: Path, study: Study) -> list[dict[str, str]]:
    """The code that steps in this work directory were run with, the present one last."""
    path, known = work / SOURCE, list[dict[str, str]]()
    if path.exists():
        try:
            known = read_object(path.read_bytes())["code"]
        except (KeyError, ValueError) as error:
            raise InputError(f"{path}: damaged ({error}); --no-resume begins again") from None
    if (source := study._checks.code(study)) and source not in known:
        known.append(source)
        write_json(path, {"code": known})
    return known


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
    record = step_record(work)
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


def step_record(work: Path) -> dict[str, Any]:
    """Plan and files' SHA-256 of each finished step. Raises: InputError: STEPS is damaged."""
    try:
        return read_object((work / STEPS).read_bytes()) if (work / STEPS).exists() else {}
    except ValueError as error:
        raise InputError(f"{work / STEPS}: damaged ({error}); --no-resume begins again") from None


def _note_step(step: Step, work: Path, plan_sha256: str | None, names: Sequence[str] = ()) -> None:
    digests = {name: file_sha256(work / name) for name in names or step.outputs}
    write_json(
        work / STEPS,
        {**step_record(work), step.name: {"plan_sha256": plan_sha256, "sha256": digests}},
    )
