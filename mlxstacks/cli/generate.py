"""`mlxstacks generate`: answers to one prompt, or to every row of a JSONL file."""

import collections
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import answers, output
from mlxstacks.data.examples import as_messages
from mlxstacks.data.json_rows import numbered_records
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import user_path

if TYPE_CHECKING:
    from mlxstacks.routing.conversation import Conversation
    from mlxstacks.routing.engine import Mode, RoutedModel
    from mlxstacks.routing.settings import GenerateSettings

# A bare run on nano has something to answer.
SAMPLE_PROMPT = "Who are you?"


@dataclass(frozen=True)
class Job:
    """A question, what was said before it, and where it stands, for messages."""

    question: str
    before: tuple[dict[str, Any], ...] = ()
    line: int | None = None
    where: str = ""


@dataclass(frozen=True)
class GenerateReport:
    """answers: one a prompt, or three where modes are compared; one that could not be given has
    `error` in its place. failure: how many such there are, None for none. interrupted: Ctrl-C came
    before the last one.
    """

    settings: dict[str, Any]
    answers: list[dict[str, Any]]
    resident: dict[str, Any] | None
    notes: list[str]
    failure: str | None
    interrupted: bool = False


def run(settings: "GenerateSettings") -> GenerateReport:
    """Answer the prompts in order, streaming; all are checked before the first is answered.

    Raises: InputError: an empty prompt, one longer than the context, a row that is none.
    """
    from mlxstacks.routing.engine import open_routed

    bare = settings.model is None and settings.store_path is None
    jobs = _jobs(settings, bare)
    ready = answers.completed(settings)
    engine = open_routed(ready)
    for job in jobs:
        try:
            _conversation(engine, ready, job, "base", 0).prompt(job.question)
        except InputError as error:
            raise InputError(f"{job.where}{error}") from None
    shown = _show_notes(engine, 0)
    several = len(jobs) > 1
    given: list[dict[str, Any]] = []
    interrupted = False
    try:
        for index, job in enumerate(jobs):
            if several:
                output.write(f"> {job.question}")
            for mode in _modes(ready):
                about = {"prompt": job.question, "line": job.line, "mode": mode or "pinned"}
                try:
                    given.append(about | _answer(engine, ready, job, mode, index, several))
                except (InputError, StoreError) as error:
                    if job.line is None:
                        raise
                    # the rows before and behind it are worth more
                    given.append(about | {"error": f"{job.where}{error}"})
                    output.note(given[-1]["error"])
    except KeyboardInterrupt:
        if not given:
            raise
        interrupted = True  # what was answered is not lost
    _show_notes(engine, shown)
    resident = None if engine.resident is None else engine.resident.stats.as_json()
    errors = [answer["error"] for answer in given if "error" in answer]
    failure = f"{len(errors)} of {len(given)} answers; the first: {errors[0]}" if errors else None
    return GenerateReport(
        ready.model_dump(mode="json"), given, resident, engine.notes, failure, interrupted
    )


def _answer(
    engine: "RoutedModel",
    settings: "GenerateSettings",
    job: Job,
    mode: "Mode | None",
    index: int,
    several: bool,
) -> dict[str, Any]:
    """One answer, streamed; the line about it goes to stderr where the answer stands alone."""
    conversation = _conversation(engine, settings, job, mode, index)
    if settings.compare:
        output.write(f"{mode}:")
    with answers.reading() as progress:
        answering = conversation.ask(job.question, progress=progress)
        if output.is_quiet():  # the document will have it
            collections.deque(answering, maxlen=0)
        else:
            answers.write_answer(answering)
    assert answering.turn is not None  # nobody can stop it but Ctrl-C, which ends the command
    line = answers.status_line(answering.turn, engine.alone)
    if several or settings.compare:
        output.write(f"{line}\n")
    else:
        output.note(line)
    about = answering.turn.as_json()
    del about["question"]
    return about


def _show_notes(engine: "RoutedModel", first: int) -> int:
    """Those from `first` on; how many there are."""
    for note in engine.notes[first:]:
        output.note(note)
    return len(engine.notes)


def _conversation(
    engine: "RoutedModel", settings: "GenerateSettings", job: Job, mode: "Mode | None", index: int
) -> "Conversation":
    from mlxstacks.routing.conversation import Conversation
    from mlxstacks.routing.engine import sampling_of

    sampling = sampling_of(settings)
    has_system = any(message["role"] == "system" for message in job.before)
    return Conversation(
        engine, replace(sampling, seed=(sampling.seed + index) % 2**64),
        system_prompt=None if has_system else settings.system_prompt, thinking=settings.thinking,
        mode=mode, messages=job.before,
    )  # fmt: skip


def _modes(settings: "GenerateSettings") -> tuple["Mode | None", ...]:
    """None stands for pinned domains."""
    if settings.compare:
        return ("base", "ungated", "routed")
    return (None if settings.pin else settings.mode,)


def _jobs(settings: "GenerateSettings", bare: bool) -> list[Job]:
    """Raises: InputError: an empty prompt, a file that is none, a row that is none."""
    if settings.prompts is not None:
        return list(_rows(settings.prompts))
    text = settings.prompt
    if text is None or text == "-":
        typed = ""
        if text == "-" or not sys.stdin.isatty():
            if reconfigure := getattr(sys.stdin, "reconfigure", None):
                reconfigure(errors="replace")
            typed = answers.bounded(sys.stdin.read(answers.MOST_CHARACTERS + 1)).rstrip("\n")
        if text is None and bare and not typed.strip():
            output.note(f"No prompt was given; asking nano: {SAMPLE_PROMPT}")
            return [Job(SAMPLE_PROMPT)]
        text = typed
    if not text.strip():
        raise InputError(
            "the prompt is empty; give a PROMPT, --prompts FILE, or text on standard input"
        )
    return [Job(text)]


def _rows(name: str) -> Iterator[Job]:
    path = user_path(name)
    for number, record in numbered_records(path):
        where = f"{path}, line {number}: "
        try:
            yield _job(record, number, where)
        except InputError as error:
            raise InputError(f"{where}{error}") from None


def _job(record: dict[str, Any], number: int, where: str) -> Job:
    if "messages" in record:
        messages = as_messages(record) or []
        *before, last = messages
        if before and last["role"] == "assistant":  # a row of training data
            *before, last = before
        if last["role"] != "user":
            raise InputError(f"the last message is of {last['role']!r}; it must be the user's")
        question = last["content"]
    elif "prompt" in record:
        question, before = record["prompt"], []
    else:
        raise InputError(f"a row has the keys {sorted(record)}; it needs prompt or messages")
    if not isinstance(question, str):
        raise InputError(f"prompt is {type(question).__name__}, must be text")
    if not question.strip():
        raise InputError("the prompt is empty")
    return Job(question, tuple(before), number, where)
