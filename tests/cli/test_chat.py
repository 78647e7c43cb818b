"""`mlxstacks chat`: what is typed, what is shown, how it ends.

Run: pytest tests/cli/test_chat.py
"""

import io
import json
import os
import signal
import stat
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxstacks import base_model
from mlxstacks.cli import answers, chat_input, output
from mlxstacks.cli.chat import COMMANDS, Chat, complete
from mlxstacks.errors import InputError
from mlxstacks.files.router_file import write_router
from mlxstacks.files.store import Store
from mlxstacks.routing import generation
from mlxstacks.routing.engine import open_routed, sampling_of
from mlxstacks.routing.generation import Sampling
from mlxstacks.routing.settings import AnswerSettings, ChatSettings, parse_bytes
from tests.cli.conftest import Run
from tests.routing.engine_cases import Places, add_router, write_places
from tests.tiny_models import random_adapter


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("chat"))


def settings_for(places: Places, **changes: Any) -> ChatSettings:
    values = {"model": str(places.model), "store_path": str(places.store), "gap_log": "none"}
    return ChatSettings.model_validate(values | {"max_tokens": 4} | changes)


class Typed:
    """Lines of somebody; an exception among them is raised."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = iter(lines)

    def read(self) -> str:
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def talk(places: Places, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Chat, str]]:
    """`talk("hello", "/quit", routed=True)` is the chat at its end and what was shown."""

    def call(*lines: str | BaseException, **changes: Any) -> tuple[Chat, str]:
        settings = settings_for(places, **changes)
        chat = Chat(settings, open_routed(settings))
        chat.talk(Typed(*lines))
        return chat, capsys.readouterr().out

    return call


# --- the command ----------------------------------------------------------------------------------


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def command_line(places: Places) -> list[str]:
    return ["chat", "--model", str(places.model), "--store-path", str(places.store),
            "--max-tokens", "4", "--gap-log", "none"]  # fmt: skip


def test_piped_lines_are_answered_until_they_end(
    places: Places, command: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, b"seven\\\napples \xff\n\n/pin tolu\nriver\n")
    code, out, _ = command(*command_line(places), "--routed")
    assert code == 0, out
    assert "> seven\\\n. apples \ufffd" in out
    assert "pinned: tolu" in out
    assert "\x1b" not in out  # no colour where there is no terminal


def test_json_is_one_document_with_everything(
    places: Places, command: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped(monkeypatch, b"seven apples\n/quit\nnever asked\n")
    code, out, err = command(*command_line(places), "--ungated", "--json")
    document = json.loads(out)
    assert code == 0
    assert [m["role"] for m in document["messages"]] == ["user", "assistant"]
    [turn] = document["turns"]
    assert turn["text"] == document["messages"][1]["content"]
    assert turn["route"]["mode"] == "ungated"
    assert set(turn["weights"]) == {"islands", "letters", "tolu"}
    assert document["stats"]["resident"]["bytes_read"] > 0
    assert "ungated: islands, letters, tolu" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--routed", "--ungated"], 2, "only one of --routed, --ungated"),
        (["--routed", "--pin", "tolu"], 2, "only one of"),
        (["--pin", "tol"], 2, "did you mean 'tolu'?"),
        (["--budget", "lots"], 2, "write 2000000000, 2GB"),
        (["--hard"], 2, "--hard is of no use without --routed"),
        (["--model", "nowhere"], 2, "no such directory"),
        (["--store-path", "nowhere"], 2, "not there"),
        (["--temp", "-1"], 2, "temp: got -1"),
        (["--routed", "--router-path", "nowhere"], 2, "no router there"),
        (["--adapter-path", "nowhere"], 2, "--adapter-path goes with the base alone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_used_ends_it_at_once(
    places: Places, command: Run, work_dir: Path, arguments: list[str], code: int, message: str
) -> None:
    found, out, err = command(*command_line(places), *arguments)
    assert (found, message in err) == (code, True), err
    assert "Traceback" not in err + out


def test_line_without_an_end_is_refused(
    places: Places, command: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_CHARACTERS", 50)
    monkeypatch.setattr(chat_input, "MOST_CHARACTERS", 50)
    piped(monkeypatch, b"short\n" + b"x" * 60 + b"\n")
    code, out, err = command(*command_line(places))
    assert (code, "more than 50 characters" in err, out.count(" tokens, ")) == (2, True, 1), err


def test_router_for_other_stacks_is_a_store_error(
    places: Places, command: Run, work_dir: Path
) -> None:
    store = Store.open(places.store)
    file = store.read_router()
    stacks = {**file.header.stacks, "tolu": ("0" * 64,)}
    write_router(work_dir / "router.safetensors", file.tensors, replace(file.header, stacks=stacks))
    code, _, err = command(*command_line(places), "--routed", "--router-path", str(work_dir))
    assert (code, "tolu" in err) == (1, True), err


# --- the loop -------------------------------------------------------------------------------------


def test_ctrl_c_at_the_prompt_clears_and_twice_leaves(talk: Any) -> None:
    chat, out = talk(KeyboardInterrupt(), "seven", KeyboardInterrupt(), KeyboardInterrupt(), "x")
    assert [turn.question for turn in chat.conversation.turns] == ["seven"]
    assert out.count("Ctrl-C again or /quit leaves.") == 2


def test_ctrl_c_during_an_answer_stops_the_answer_alone(
    talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, interrupts = base_model.stream_tokens, iter([signal.SIGINT])

    def interrupted(*args: Any) -> Iterator[Any]:
        for index, step in enumerate(own(*args)):
            if index == 1:
                for number in interrupts:
                    signal.raise_signal(number)
            yield step

    monkeypatch.setattr(base_model, "stream_tokens", interrupted)
    before = signal.getsignal(signal.SIGINT)
    chat, _ = talk("seven apples", "river")
    assert signal.getsignal(signal.SIGINT) is before
    found = [(turn.answer.finish, turn.answer.tokens) for turn in chat.conversation.turns]
    assert found == [("stopped", 2), ("length", 4)]


def test_second_ctrl_c_breaks_off_a_step_and_the_chat_goes_on(
    talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    own = generation._prefill

    def slow(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        own(*args)

    monkeypatch.setattr(generation, "_prefill", slow)
    chat, out = talk("seven apples", "river")
    assert "the answer is forgotten" in out
    assert [turn.question for turn in chat.conversation.turns] == ["river"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_the_chat(talk: Any, number: int) -> None:
    def read() -> str:
        signal.raise_signal(number)
        raise AssertionError("still here")

    before = signal.signal(number, signal.default_int_handler)  # as the command line has it
    lines = Typed()
    lines.read = read  # type: ignore[method-assign]
    try:
        chat, _ = talk()
        with pytest.raises(SystemExit) as ended, answers.ended_by_signals():
            chat.talk(lines)
        assert ended.value.code == 130
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_notes_are_shown_once_each_whenever_they_come(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(places)
    chat = Chat(settings, open_routed(settings))
    chat.engine.notes.append("something on the side")
    chat.talk(Typed("seven", "/mode routed", "river"))
    out = capsys.readouterr().out
    assert all(out.count(note) == 1 for note in chat.engine.notes)
    assert chat.report().notes == chat.engine.notes


def test_what_fails_is_said_and_the_chat_goes_on(talk: Any) -> None:
    chat, out = talk("x" * 3000, "/stats", "river")
    assert "error: the prompt has" in out
    assert len(chat.conversation.turns) == 1


def test_stack_that_cannot_be_read_is_an_error_and_the_chat_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = write_places(tmp_path)
    store = Store.open(places.store)
    (store.path / store.stack_named("tolu-r1").file.file).unlink()
    settings = settings_for(places, pin=["tolu", "islands"])
    chat = Chat(settings, open_routed(settings))
    chat.talk(Typed("seven", "/mode base", "/unpin", "river"))
    out = capsys.readouterr().out.replace("\n", "")
    assert "error: " in out
    assert "missing" in out
    assert [turn.answer.route.mode for turn in chat.conversation.turns] == ["base"]


def test_gap_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = write_places(tmp_path)
    add_router(Store.open(places.store), bias=-60.0)
    log = tmp_path / "gaps.jsonl"
    settings = settings_for(places, routed=True, gap_log=str(log))
    Chat(settings, open_routed(settings)).talk(Typed("seven"))
    assert "gap: no domain fits" in capsys.readouterr().out
    assert json.loads(log.read_text())["text"] == "seven"


# --- slash commands -------------------------------------------------------------------------------


def test_commands_show_and_change(talk: Any, tmp_path: Path) -> None:
    target = tmp_path / "talk.jsonl"
    chat, out = talk(
        "/help", "/route", "/stacks", "/mode", "/mode routed", "seven apples", "/route", "/stacks",
        "/pin islands,tolu", "river", "/route", "/unpin", "/stats", f"/save {target}",
        f"/save {target}", f"/load {target}", "/route", "/quit", "not read",
    )  # fmt: skip
    assert (len(chat.conversation.messages), len(chat.report().turns)) == (4, 2)
    assert f"Read 4 messages from {target}" in out
    assert all(name in out for name in COMMANDS)
    assert "Nothing was asked yet." in out
    assert "Mode base." in out
    assert "These answer from now on: islands, tolu." in out
    assert "exists; choose another name" in out
    assert len(json.loads(target.read_text())["messages"]) == 4
    for word in ("score", "weight", "why", "resident", "domains asked for", "pinned"):
        assert word in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rout", "did you mean '/route'?"),
        ("/pin island", "did you mean 'islands'?"),
        ("/mode rooted", "did you mean 'routed'?"),
        ("/save", "takes the name"),
        ("/save talk.jsonl", "nothing has been said yet"),
        ("/load", "takes the name"),
        ("/load talk.jsonl", "No such file"),
        ("/compare", "nothing was asked yet"),
        ("/", "/help lists them"),
    ],
)
def test_commands_that_cannot_be_done_say_why(talk: Any, line: str, message: str) -> None:
    assert message in talk(line)[1].replace("\n", " ")


@pytest.mark.parametrize("word", ["/quit", "/exit", "exit", "quit", "q", " q "])
def test_words_that_leave(talk: Any, word: str) -> None:
    chat, _ = talk(word, "never asked")
    assert (chat.done, chat.conversation.turns) == (True, [])


@pytest.mark.parametrize("word", ["/new", "/clear", "r"])
def test_words_that_restart(talk: Any, word: str) -> None:
    chat, out = talk("seven apples", word, "exit the island", "h")
    assert [turn.question for turn in chat.conversation.turns] == ["exit the island"]
    assert "A new conversation" in out
    assert "/clear" in out.partition("/new")[2], "h lists the commands"


def test_temperature_changes_between_answers(talk: Any) -> None:
    chat, out = talk("/temp", "/temp 0.7", "/temp hot", "/temp -1", "/temp nan", "/temp 101")
    assert chat.conversation.sampling.temp == 0.7
    assert "Temperature 0: the likeliest token is taken." in out
    assert "Temperature 0.7: tokens are drawn." in out
    assert out.count("takes a number from 0 to 100") == 4


def test_length_and_system_prompt_change_between_answers(talk: Any) -> None:
    chat, out = talk(
        "/max-tokens 3", "alpha", "/max-tokens 0", "/system Be brief.", "beta", "/system"
    )
    assert chat.conversation.sampling.max_tokens == 3
    assert "At most 3 tokens an answer." in out
    assert out.count("System prompt: Be brief.") == 2
    assert "got '0'; /max-tokens takes a number from 1" in out
    roles = [message["role"] for message in chat.conversation.messages]
    assert roles == ["system", "user", "assistant"]
    assert chat.conversation.messages[0]["content"] == "Be brief."
    assert len(chat.report().turns) == 2


def test_adapter_beside_the_base_answers(
    places: Places, tmp_path: Path, command: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        random_adapter(places.model, ["self_attn.q_proj"], std=0.5, seed=seed,
                       directory=tmp_path / f"persona {seed}")
        for seed in (1, 2)
    )  # fmt: skip
    arguments = ["chat", "--model", str(places.model), "--max-tokens", "4"]
    texts = []
    for adapters in ((), (first,), (first, second)):
        piped(monkeypatch, b"seven apples\n")
        given = [word for path in adapters for word in ("--adapter-path", str(path))]
        code, out, _ = command(*arguments, *given, "--json")
        [turn] = json.loads(out)["turns"]
        assert (code, turn["adapters"]) == (0, [path.name for path in adapters])
        texts.append(turn["text"])
    assert len(set(texts)) == 3
    piped(monkeypatch, b"seven apples\n")
    _, out, _ = command(*arguments, "--adapter-path", str(first))
    assert "model; base with persona 1." in out
    assert "base with persona 1 | " in out


def test_base_of_the_store_is_found_from_anywhere(
    places: Places, command: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest says `tiny`; the model lies elsewhere."""
    arguments = ["chat", "--routed", "--store-path", str(places.store), "--gap-log", "none",
                 "--max-tokens", "2"]  # fmt: skip
    piped(monkeypatch, b"seven apples\n")
    code, _, err = command(*arguments)
    assert (code, "is not found here" in err, "--model" in err) == (2, True, True), err
    location = places.store / "base.json"
    location.write_text(json.dumps({"relative_path": "../model"}))
    try:
        piped(monkeypatch, b"seven apples\n")
        code, out, _ = command(*arguments)
        assert (code, "tiny; domains" in out) == (0, True)
        assert f"The base of the store is {places.model}." in " ".join(out.split())
    finally:
        location.unlink()


@pytest.mark.parametrize("columns", ["80", "120"])
def test_compare_shows_three_answers(
    talk: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    chat, out = talk("seven apples", "/compare", compare=True)
    assert [turn.question for turn in chat.conversation.turns] == ["seven apples"]
    modes = [found["route"]["mode"] for found in chat.compared]
    assert modes == ["base", "ungated", "routed"] * 2
    assert [a["text"] for a in chat.compared[:3]] == [a["text"] for a in chat.compared[3:]]
    assert all(mode in out for mode in ("base", "ungated", "routed"))
    assert chat.conversation.turns[0].answer.route.mode == "routed"


def test_new_conversation_fits_where_the_old_one_was_full(talk: Any) -> None:
    chat, out = talk("x" * 600, "y" * 600, "/new", "y" * 600, "/compare")
    assert "/new in a chat" in out
    assert [turn.question[0] for turn in chat.conversation.turns] == ["y"]
    report = chat.report()
    assert [turn["question"][0] for turn in report.turns] == ["x", "y"]
    assert len(report.messages) == 2


def test_compare_needs_no_more_room_than_its_largest_set(talk: Any, places: Places) -> None:
    engine = open_routed(settings_for(places))
    assert engine.resident is not None
    with engine.resident.lease(dict.fromkeys(engine.domains, 1.0)):
        whole = engine.resident.stats.resident_bytes
    chat, out = talk("/compare seven", pin=["islands"], budget=int(1.1 * whole))
    assert "error" not in out
    assert chat.last is not None  # of which /route speaks
    assert (chat.last.question, chat.conversation.turns) == ("seven", [])


def test_compare_that_is_over_the_budget_says_so_and_goes_on(talk: Any, places: Places) -> None:
    settings = settings_for(places)
    engine = open_routed(settings)
    assert engine.resident is not None
    with engine.resident.lease({"islands": 1.0}):
        one = engine.resident.stats.resident_bytes
    chat, out = talk("/compare seven", "/pin islands", "seven", budget=int(1.2 * one))
    assert "ungated: error" in out
    assert len(chat.conversation.turns) == 1


def test_completion_knows_commands_and_their_words(talk: Any) -> None:
    chat, _ = talk()
    assert complete(chat, "/st") == ["/stacks", "/stats"]
    assert complete(chat, "/pin t") == ["/pin tolu"]
    assert complete(chat, "/pin tolu ") == ["/pin tolu islands", "/pin tolu letters"]
    assert complete(chat, "/mode u") == ["/mode ungated"]
    assert complete(chat, "hello /st") == complete(chat, "/nothing x") == []


# --- text and lines -------------------------------------------------------------------------------


def test_answers_cannot_command_the_terminal() -> None:
    assert output.safe("a\x1b[2Jb\r\x07\x9b1m\u202ec\ud800") == (
        "a\\x1b[2Jb\\r\\x07\\x9b1m\\u202ec\\ud800"
    )
    kept = "line\n\ttab é 漢 👩\u200d🔬 नि"
    assert output.safe(kept) == kept


def test_history_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "history"
    history = chat_input._history(path)
    history.append_string("my secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.chmod(path, 0o644)
    chat_input._history(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("")
    chat_input._history(tmp_path / "file" / "history").append_string("kept in memory")


def test_history_that_cannot_be_kept_any_more_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "history"
    history = chat_input._history(path)
    path.unlink()
    path.parent.rmdir()
    history.append_string("kept in memory")
    assert history.get_strings() == ["kept in memory"]


def test_history_is_never_a_pipe_that_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history")
    chat_input._history(tmp_path / "history").append_string("kept in memory")


def typed_into_terminal(keys: bytes, tmp_path: Path) -> list[str]:
    """What prompt_toolkit makes of keys, without a terminal."""
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    found = []
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        lines = chat_input.TerminalLines(lambda before: [], tmp_path / "history")
        pipe.send_bytes(keys)
        while True:
            try:
                found.append(lines.read())
            except EOFError:
                return found


def test_terminal_takes_several_lines_and_pasted_text(tmp_path: Path) -> None:
    escape_enter, paste = "\x1b\r", "\x1b[200~one\ntwo\x1b[201~"
    keys = f"seven{escape_enter}apples\rred\\\rblue\r{paste}\r\x04"
    assert typed_into_terminal(keys.encode(), tmp_path) == [
        "seven\napples", "red\nblue", "one\ntwo",
    ]  # fmt: skip


def test_byte_that_is_no_text_becomes_a_mark(tmp_path: Path) -> None:
    assert typed_into_terminal(b"a\xffb\r\x04", tmp_path) == ["a?b"]


@pytest.mark.parametrize(
    ("term", "tty", "kind"),
    [("xterm", True, chat_input.TerminalLines), ("dumb", True, chat_input.PlainLines),
     ("xterm", False, chat_input.PlainLines)],
)  # fmt: skip
def test_reader_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, term: str, tty: bool, kind: type
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdin", Stream())
    monkeypatch.setattr(sys, "stdout", Stream())
    monkeypatch.setattr(chat_input.TerminalLines, "__init__", lambda self, *args: None)
    assert type(chat_input.open_lines(lambda before: [], tmp_path / "h")) is kind


@pytest.mark.parametrize(
    ("text", "expected"), [("2GB", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("7", 7), (9, 9)]
)
def test_budget_is_read(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_without_settings_the_likeliest_token_is_taken() -> None:
    assert sampling_of(AnswerSettings()) == Sampling()
    assert Sampling().temp == 0


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2 XB", "1e9"])
def test_budget_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="no number of bytes"):
        parse_bytes(text)


def test_line_of_an_answer_is_safe_to_split(talk: Any) -> None:
    chat, _ = talk("seven", pin=["tolu"])
    line = answers.status_line(chat.conversation.turns[0])
    mode, loads, said, kept, mark = line.split(" | ")
    assert mode == "pinned: tolu"
    assert loads.startswith("loaded tolu (")
    assert said.startswith("4 tokens, ")
    assert kept.startswith("0 of ")
    assert mark == "cut off at max_tokens"
    with pytest.raises(InputError):
        chat.engine.check_domains(["x"])


@pytest.mark.parametrize(
    ("name", "message"), [("a\0b", "NUL character"), ("x/" * 3000, "name too long")]
)
def test_a_name_that_no_file_can_have_ends_no_chat(talk: Any, name: str, message: str) -> None:
    chat, out = talk("seven apples", f"/save {name}", "river")
    assert len(chat.conversation.turns) == 2
    assert message in " ".join(out.split())


def test_a_terminal_does_not_write_its_mark_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()

    def writes_marks() -> bool:
        return bool(termios.tcgetattr(follower)[3] & termios.ECHOCTL)

    before = termios.tcgetattr(follower)
    with os.fdopen(follower) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        with answers.stoppable():
            assert not writes_marks()
        assert writes_marks()
        assert termios.tcgetattr(follower) == before
    os.close(leader)
