"""The engine answers as a model does that holds every stack, whatever is loaded when.

Run: pytest tests/routing/test_engine.py
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.settings import StacksSwitchSettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import disable_domain
from mlxstacks.layers.selection import routed
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.engine import context_tokens, split_thoughts
from mlxstacks.routing.gaps import GapLog, read_gaps
from mlxstacks.routing.generation import PromptCache, Sampling, encode_prompt, generate
from mlxstacks.routing.router import Route, pinned
from tests.routing.engine_cases import (
    DOMAINS,
    Places,
    add_router,
    engine_for,
    user,
    write_places,
)
from tests.studies.train_cases import WORDS
from tests.tiny_models import END_OF_TEXT

SHORT = Sampling(max_tokens=5)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("engine"))


class FullyResident:
    """The model with every stack of the store in memory, by the modes of training."""

    def __init__(self, places: Places) -> None:
        self.model, self.tokenizer, _ = base_model.load(places.model)
        serve(self.model, Store.open(places.store))
        self.model.eval()

    def answer(self, text: str, weights: dict[str, float], sampling: Sampling = SHORT) -> str:
        set_mode(self.model, routed(list(weights), [*weights.values()] or [0.0])
                 if weights else routed(DOMAINS, [0.0] * len(DOMAINS)))  # fmt: skip
        cache = PromptCache(lambda: base_model.make_prompt_cache(self.model))
        prompt = encode_prompt(self.tokenizer, user(text))
        pieces = generate(self.model, self.tokenizer, prompt, cache, sampling)
        return "".join(piece.text for piece in pieces)


@pytest.fixture(scope="module")
def full(places: Places) -> FullyResident:
    return FullyResident(places)


def prompts(count: int) -> list[str]:
    rng = random.Random(7)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(count)]


def ask(engine: Any, text: str, route: Route, **options: Any) -> Any:
    stream = engine.stream(engine.prompt(user(text)), route, options.pop("sampling", SHORT),
                           options.pop("cache", None) or engine.new_cache(), **options)  # fmt: skip
    said = "".join(stream)
    assert stream.answer is not None
    return said, stream.answer


def test_prompts_are_answered_as_by_a_fully_resident_model(
    places: Places, full: FullyResident, campaign: Callable[[int], range]
) -> None:
    """With room for two domains, so that stacks come and go; soft and hard weights."""
    room = engine_for(places, routed=True)
    with room.resident.lease(dict.fromkeys(DOMAINS[:2], 1.0)):  # type: ignore[union-attr]
        budget = room.resident.stats.resident_bytes  # type: ignore[union-attr]
    engines = [
        engine_for(places, routed=True, hard=hard, budget=2 * budget) for hard in (False, True)
    ]
    seen, differ, three = set(), 0, Sampling(max_tokens=3)
    for index, text in enumerate(prompts(len(campaign(240)))):
        engine = engines[index % 2]
        route = engine.route(text, "routed")
        said, answer = ask(engine, text, route, sampling=three)
        assert said == full.answer(text, dict(route.weights), three), text
        assert answer.weights == route.weights
        seen.add(tuple(route.weights))
        differ += index < 20 and said != full.answer(text, {}, three)
    assert len(seen) >= 3  # the router does choose
    assert differ >= 6  # and what it chooses matters
    stats = [engine.resident.stats for engine in engines]  # type: ignore[union-attr]
    assert all(s.resident_bytes <= 2 * budget for s in stats)
    assert sum(s.evictions for s in stats) > 0


def test_streams_by_turns_are_the_streams_alone(places: Places) -> None:
    engine = engine_for(places)
    routes = [pinned(["islands"]), pinned(["tolu"]), pinned([])]
    alone = [ask(engine, "seven red apples", route)[0] for route in routes]
    streams = [
        engine.stream(engine.prompt(user("seven red apples")), route, SHORT, engine.new_cache())
        for route in routes
    ]
    said = [""] * len(streams)
    running = {i: iter(stream) for i, stream in enumerate(streams)}
    while running:
        for i in list(running):
            piece = next(running[i], None)
            if piece is None:
                del running[i]
            else:
                said[i] += piece
    assert said == alone
    assert len(set(alone)) == 3


def test_stack_that_cannot_be_read_is_no_answer_of_the_others(tmp_path: Path) -> None:
    """Nor one of the base, which would look like a route's."""
    places = write_places(tmp_path)
    store = Store.open(places.store)
    engine = engine_for(places)
    path = store.path / store.stack_named("tolu-r1").file.file
    path.unlink()
    for domains in (["islands", "tolu"], ["tolu"]):
        with pytest.raises(StoreError, match=f"{path}: missing"):
            ask(engine, "seven apples", pinned(domains))
    assert ask(engine, "seven apples", pinned(["islands"]))[1].weights == {"islands": 1.0}


def test_a_domain_that_is_there_and_cannot_answer_is_told(tmp_path: Path) -> None:
    places = write_places(tmp_path)
    disable_domain(StacksSwitchSettings(store_path=str(places.store), domain="tolu"))
    with pytest.raises(InputError, match="domain tolu has been disabled; those that answer: "):
        engine_for(places).check_domains(["tolu"])


def test_answer_counts_what_it_took(places: Places) -> None:
    engine = engine_for(places)
    _, first = ask(engine, "seven", pinned(["islands"]))
    _, second = ask(engine, "seven", pinned(["islands"]))
    assert (first.loaded, first.resident) == (("islands",), ())
    assert (second.loaded, second.resident) == ((), ("islands",))
    assert first.bytes_read > 0 == second.bytes_read
    assert (second.tokens, second.finish) == (5, "length")
    assert second.marks == ("cut off at max_tokens",)
    assert second.prompt_tokens == len(encode_prompt(engine.tokenizer, user("seven")).tokens)


def test_ungated_is_every_stack_and_base_is_none(places: Places, full: FullyResident) -> None:
    engine = engine_for(places)
    said, answer = ask(engine, "river", engine.route("river", "ungated"))
    assert dict(answer.weights) == dict.fromkeys(DOMAINS, 1.0)
    assert said == full.answer("river", dict.fromkeys(DOMAINS, 1.0))
    assert ask(engine, "river", engine.route("river", "base"))[0] == full.answer("river", {})


# --- limits and bad input -------------------------------------------------------------------------


def test_prompt_longer_than_the_context_is_refused(places: Places) -> None:
    engine = engine_for(places)
    assert engine.context_tokens == 1024
    with pytest.raises(InputError, match=r"at least 1,024 tokens.*context is 1,024"):
        engine.prompt(user("x" * 1020))


def test_special_tokens_in_a_message_are_text_unless_they_are_allowed(places: Places) -> None:
    for allowed in (False, True):
        engine = engine_for(places, allow_special=allowed)
        prompt = engine.prompt(user("red<|end|>blue"))
        assert (END_OF_TEXT in prompt.tokens) is allowed
        assert engine.tokenizer.decode(list(prompt.tokens)).startswith("[user]red<|end|>blue")


def test_answer_ends_where_the_context_does(places: Places) -> None:
    engine = engine_for(places)
    engine.context_tokens = len(encode_prompt(engine.tokenizer, user("x")).tokens) + 3
    _, answer = ask(engine, "x", pinned([]))
    assert (answer.tokens, answer.finish) == (3, "context")


@pytest.mark.parametrize(
    ("config", "model_max_length", "expected"),
    [
        ({"text_config": {"max_position_embeddings": 512}}, 99, 512),
        ({"max_position_embeddings": 512}, 99, 512),
        ({"max_position_embeddings": 512, "text_config": {}}, 99, 512),
        (
            {"max_position_embeddings": 512,
             "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 512}}, 99, 2048,
        ),
        ({}, 99, 99),
        ({}, int(1e30), None),
        ({"max_position_embeddings": "many"}, None, None),
    ],
)  # fmt: skip
def test_context_is_found(config: Any, model_max_length: Any, expected: int | None) -> None:
    class Tokenizer:
        pass

    tokenizer = Tokenizer()
    tokenizer.model_max_length = model_max_length  # type: ignore[attr-defined]
    assert context_tokens(config, tokenizer) == expected


def test_unknown_and_impossible_routes_say_what_to_do(places: Places) -> None:
    engine = engine_for(places)
    with pytest.raises(InputError, match=r"'iland'.*did you mean 'islands'"):
        engine.route("x", "base", ["iland"])
    with pytest.raises(InputError, match="empty"):
        engine.route("  ", "routed")
    alone = engine_for(places, store_path=None)
    with pytest.raises(InputError, match="--store-path"):
        alone.route("x", "ungated")
    with pytest.raises(InputError, match="--store-path"):
        engine_for(places, store_path=None, routed=True)


def test_store_of_another_base_or_without_router_is_refused(places: Places, tmp_path: Path) -> None:
    other = write_places(tmp_path / "a")
    Store.create(tmp_path / "bare", "tiny", Store.open(places.store).manifest.base_fingerprint)
    with pytest.raises(InputError, match="route train"):
        engine_for(places, store_path=str(tmp_path / "bare"), routed=True)
    Store.create(tmp_path / "strange", "tiny", "c" * 64)
    with pytest.raises(StoreError, match="fingerprint"):
        engine_for(other, store_path=str(tmp_path / "strange"))


def test_gap_is_marked_and_logged(tmp_path: Path) -> None:
    places = write_places(tmp_path)
    add_router(Store.open(places.store), bias=-60.0)
    log = tmp_path / "gaps.jsonl"
    engine = engine_for(places, routed=True, gap_log=str(log))
    route = engine.route("nothing known", "routed")
    assert (route.gap, dict(route.weights)) == (True, {})
    assert any("gap" in mark for mark in ask(engine, "nothing known", route)[1].marks)
    [event] = read_gaps(log).events
    assert (event.text, event.router) == ("nothing known", engine.router.digest)
    blocked = engine_for(places, routed=True)
    (tmp_path / "file").write_text("")
    blocked.gap_log = GapLog(tmp_path / "file" / "gaps.jsonl")
    assert blocked.route("nothing known", "routed").gap  # the answer matters more
    assert "not logged" in blocked.notes[-1]


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("so it is</t>\n\nseven", True, ("seven", "so it is")),
        ("so it", True, ("", "so it")),
        ("<t>\nwhy</t>seven", False, ("seven", "why")),
        ("seven", False, ("seven", None)),
    ],
)
def test_thoughts_are_told_from_the_answer(text: str, inside: bool, expected: Any) -> None:
    class Tokenizer:
        think_start, think_end = "<t>", "</t>"

    assert split_thoughts(text, Tokenizer(), inside) == expected
