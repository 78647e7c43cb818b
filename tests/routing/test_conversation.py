"""Conversations: turns, what is kept between them, comparing, saving.

Run: pytest tests/routing/test_conversation.py
"""

import errno
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.cli.answers import weights_in_words
from mlxstacks.data.examples import as_messages
from mlxstacks.errors import InputError, TargetError
from mlxstacks.routing.conversation import Conversation
from mlxstacks.routing.engine import RoutedModel
from mlxstacks.routing.generation import Sampling
from mlxstacks.routing.router import Route
from tests.routing.engine_cases import DOMAINS, Places, engine_for, write_places

SHORT = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("talk"))


@pytest.fixture(scope="module")
def engine(places: Places) -> RoutedModel:
    return engine_for(places)


def say(conversation: Conversation, text: str, **options: Any) -> str:
    return "".join(conversation.ask(text, **options))


def anew(engine: RoutedModel, conversation: Conversation, text: str, route: Route) -> str:
    """What the whole conversation gets under one route, on an empty cache."""
    messages = [*conversation.messages, {"role": "user", "content": text}]
    return "".join(engine.stream(engine.prompt(messages), route, SHORT, engine.new_cache()))


def routes_of(monkeypatch: pytest.MonkeyPatch, engine: RoutedModel, weights: list[Any]) -> None:
    """The router's next decisions."""
    coming = iter(weights)

    def route(text: str, mode: str, pins: Any = ()) -> Route:
        return Route("routed", {}, next(coming))

    monkeypatch.setattr(engine, "route", route)


def test_turns_go_on_and_equal_the_conversation_read_anew(engine: RoutedModel) -> None:
    conversation = Conversation(engine, SHORT, system_prompt="be brief", mode="ungated")
    for text in ("seven apples", "and a river", "stone"):
        expected = anew(engine, conversation, text, Route("ungated"))
        assert say(conversation, text) == expected
    first, second, third = (turn.answer for turn in conversation.turns)
    assert first.cached_tokens == 0
    # The template begins an answer with a mark that is not in the history: back to before it.
    assert second.cached_tokens >= first.prompt_tokens - 20
    assert third.cached_tokens > second.cached_tokens
    assert [m["role"] for m in conversation.messages] == ["system", *["user", "assistant"] * 3]


@pytest.mark.parametrize(("reroute", "kept"), [("set", True), ("always", False)])
def test_weights_of_the_same_set(
    engine: RoutedModel, monkeypatch: pytest.MonkeyPatch, reroute: Any, kept: bool
) -> None:
    weights = [{"islands": 0.9}, {"islands": 0.6}]
    routes_of(monkeypatch, engine, weights)
    conversation = Conversation(engine, SHORT, mode="routed", reroute=reroute)
    say(conversation, "seven apples")
    expected = anew(engine, conversation, "and", Route("routed", {}, weights[0 if kept else 1]))
    assert say(conversation, "and") == expected
    answer = conversation.turns[-1].answer
    assert dict(answer.weights) == weights[0 if kept else 1]
    assert (answer.cached_tokens > 0) == kept
    assert dict(answer.route.alone) == ({"islands": 0.6} if kept else {})
    told = "routed: islands 0.90 (kept from before; this prompt alone: islands 0.60)"
    assert weights_in_words(answer) == (told if kept else "routed: islands 0.60")


def test_another_set_reads_everything_again(
    engine: RoutedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [{"islands": 0.9}, {"islands": 0.9, "tolu": 0.5}, {}]
    routes_of(monkeypatch, engine, weights)
    conversation = Conversation(engine, SHORT, mode="routed")
    for text, active in zip(("one", "two", "three"), weights, strict=True):
        expected = anew(engine, conversation, text, Route("routed", {}, active))
        assert say(conversation, text) == expected
        assert conversation.turns[-1].answer.cached_tokens == 0


def test_pins_and_modes_change_between_turns(engine: RoutedModel) -> None:
    conversation = Conversation(engine, SHORT)
    say(conversation, "one")
    conversation.pins = ("tolu",)
    say(conversation, "two")
    conversation.pins, conversation.mode = (), "ungated"
    say(conversation, "three")
    assert [list(turn.answer.weights) for turn in conversation.turns] == [[], ["tolu"], [*DOMAINS]]


def test_comparing_changes_neither_conversation_nor_what_is_loaded(places: Places) -> None:
    engine = engine_for(places)
    conversation = Conversation(engine, SHORT, pins=["islands"])
    say(conversation, "seven apples")
    held = (list(conversation.cache.tokens), list(conversation.messages))
    assert engine.resident is not None
    with engine.lease(conversation.turns[-1].answer.route):
        for mode in ("base", "ungated"):
            assert "".join(conversation.compared("seven apples", mode, again=True)) == anew(
                engine, Conversation(engine, SHORT), "seven apples", engine.route("x", mode)
            )
    assert (conversation.cache.tokens, conversation.messages) == held
    say(conversation, "and")
    answer = conversation.turns[-1].answer
    assert (answer.loaded, answer.resident) == ((), ("islands",))
    assert answer.cached_tokens > 0


def test_same_question_again_draws_what_it_drew(engine: RoutedModel) -> None:
    hot = Sampling(temp=3.0, max_tokens=12, seed=5)
    conversation = Conversation(engine, hot, pins=["tolu", "islands", "letters"])
    for text in ("seven apples", "river"):
        said = say(conversation, text)
        assert "".join(conversation.compared(text, "ungated", again=True)) == said
        assert "".join(conversation.compared(text, "ungated")) != said


def test_conversation_begun_anew_is_a_new_one(engine: RoutedModel, tmp_path: Path) -> None:
    conversation = Conversation(engine, SHORT, system_prompt="be brief", pins=["tolu"])
    first = [say(conversation, "seven"), say(conversation, "river")]
    conversation.restart()
    assert (conversation.turns, conversation.cache.tokens) == ([], [])
    assert [say(conversation, "seven"), say(conversation, "river")] == first
    assert conversation.turns[0].answer.cached_tokens == 0
    assert len(json.loads(conversation.save(tmp_path / "talk.jsonl").read_text())["messages"]) == 5


def test_question_that_cannot_be_answered_is_not_routed(
    engine: RoutedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def route(text: str, mode: str, pins: Any = ()) -> Route:
        raise AssertionError("a router would log it as a gap")

    monkeypatch.setattr(engine, "route", route)
    conversation = Conversation(engine, SHORT, mode="routed")
    for text, message in (("x" * 2000, "context is 1,024"), ("\udcff", "half of one")):
        with pytest.raises(InputError, match=message):
            conversation.ask(text)


def test_question_that_fails_leaves_no_trace(engine: RoutedModel) -> None:
    conversation = Conversation(engine, SHORT, mode="ungated")
    say(conversation, "one")
    for text, message in (("", "empty"), ("x" * 2000, "context is 1,024")):
        with pytest.raises(InputError, match=message):
            conversation.ask(text)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        say(conversation, "two", progress=fail)
    assert say(conversation, "nothing", stop=lambda: True) == ""
    assert (len(conversation.turns), len(conversation.messages)) == (1, 2)
    expected = anew(engine, conversation, "three", Route("ungated"))
    assert say(conversation, "three") == expected


def test_stopped_answer_stays_as_far_as_it_went(engine: RoutedModel) -> None:
    conversation = Conversation(engine, SHORT, mode="ungated")
    asked = conversation.ask("one", stop=lambda: bool(said))
    said: list[str] = []
    for piece in asked:
        said.append(piece)
    assert asked.turn is not None
    assert asked.turn.answer.finish == "stopped"
    assert conversation.messages[-1]["content"] == "".join(said)
    expected = anew(engine, conversation, "two", Route("ungated"))
    assert say(conversation, "two") == expected


def test_loaded_conversation_goes_on_as_it_would_have(engine: RoutedModel, tmp_path: Path) -> None:
    first = Conversation(engine, SHORT, system_prompt="be brief", pins=["tolu"])
    say(first, "seven apples")
    path = first.save(tmp_path / "talk.jsonl")
    second = Conversation(engine, SHORT, pins=["tolu"])
    say(second, "another matter")
    second.load(path)
    assert (second.turns, second.messages) == ([], first.messages)
    assert say(second, "river") == say(first, "river")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "must end with an answer"),
        ('{"text": "a"}', "must end with an answer"),
        ('{"prompt": "a", "completion": "b"}\n' * 2, "2 rows; must be one"),
        ('{"role": "user", "content": "a"}', "allowed: text"),
        ('{"prompt": "a", "completion": "' + "x" * 2000 + '"}', "context is 1,024"),
    ],
)
def test_what_cannot_be_gone_on_with_changes_nothing(
    engine: RoutedModel, tmp_path: Path, rows: str, message: str
) -> None:
    conversation = Conversation(engine, SHORT, pins=["tolu"])
    say(conversation, "seven apples")
    before = list(conversation.messages)
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    with pytest.raises(InputError, match=f"rows.jsonl: .*{message}"):
        conversation.load(path)
    assert (conversation.messages, len(conversation.turns)) == (before, 1)


def test_saved_messages_have_their_routes(
    engine: RoutedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    conversation = Conversation(engine, SHORT, pins=["tolu"], messages=before)
    say(conversation, "zwölf \x1b[31m")
    path = conversation.save(tmp_path / "talk.jsonl")
    row = json.loads(path.read_text())
    assert row["messages"] == conversation.messages
    assert [turn["route"]["weights"] for turn in row["turns"]] == [{"tolu": 1.0}]
    assert as_messages(row) == conversation.messages, "a row of training data"
    written = path.read_bytes()
    with pytest.raises(TargetError, match="exists"):
        conversation.save(path)
    assert path.read_bytes() == written
    assert [p.name for p in tmp_path.iterdir()] == ["talk.jsonl"]
    with pytest.raises(TargetError, match="nowhere: no such directory"):
        conversation.save(tmp_path / "nowhere" / "talk.jsonl")
    with pytest.raises(TargetError, match="not a usable target"):
        conversation.save(tmp_path / ("x" * 300))
    conversation.save(tmp_path / ("x" * 250))

    def refused(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("mlxstacks.files.disk.write_all", refused)
    with pytest.raises(TargetError, match=r"/other\.jsonl: not writable"):
        conversation.save(tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("opened", "mode", "weights"),
    [
        ({"ungated": True}, "ungated", set(DOMAINS)),
        ({"pin": ("tolu",)}, "pinned", {"tolu"}),
        ({"routed": True}, "routed", None),
    ],
)
def test_answers_as_the_engine_was_opened(
    places: Places, opened: dict[str, Any], mode: str, weights: set[str] | None
) -> None:
    conversation = Conversation(engine_for(places, **opened), SHORT)
    say(conversation, "seven apples")
    answer = conversation.turns[-1].answer
    assert answer.route.mode == mode
    assert weights is None or set(answer.weights) == weights


def test_a_named_mode_wins_over_the_engine(places: Places) -> None:
    engine = engine_for(places, pin=("tolu",))
    conversation = Conversation(engine, SHORT, mode="base")
    say(conversation, "seven apples")
    assert conversation.turns[-1].answer.route.mode == "base"


def test_another_thread_is_refused_and_changes_nothing(engine: RoutedModel) -> None:
    """It used to answer with whatever stacks the last thread had activated."""
    expected = say(Conversation(engine, SHORT, pins=["tolu"]), "seven apples")
    begun = iter(Conversation(engine, SHORT, pins=["tolu"]).ask("seven apples"))
    pieces = [next(begun)]

    def refused(call: Callable[[], object]) -> str:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError) as error:
            pool.submit(call).result()
        return str(error.value)

    conversation = Conversation(engine, SHORT, pins=["letters"])
    assert "MainThread" in refused(lambda: say(conversation, "seven apples"))
    assert "MainThread" in refused(lambda: list(conversation.engine.stream(
        engine.prompt([{"role": "user", "content": "x"}]), Route("ungated"), SHORT,
        engine.new_cache())))  # fmt: skip
    assert conversation.turns == []
    assert "".join([*pieces, *begun]) == expected
