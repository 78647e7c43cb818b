"""The engine on nano: admission, memory, stacks that come and go, what ends an answer. No HTTP.

Run: pytest tests/serve/test_engine.py
"""

import json
import os
import queue
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, InputError, ResourceLimitError, TargetError
from mlxstacks.files.settings import (
    StacksImportSettings,
    StacksRemoveSettings,
    StacksSwitchSettings,
    StacksUndoSettings,
)
from mlxstacks.files.stack_adapters import import_adapter
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import (
    disable_domain,
    enable_domain,
    remove_domain,
    undo_change,
)
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from mlxstacks.routing.generation import Sampling
from mlxstacks.routing.schemas import SchemaMask, Schemas
from mlxstacks.serve.engine import Engine
from mlxstacks.serve.prefix_files import PrefixFiles
from mlxstacks.serve.requests import Ask, Begun, Piece, Refused, Ticket
from mlxstacks.serve.rows import RowRoutes
from mlxstacks.serve.wire import Answer
from mlxstacks.training.modes import prepare_base
from tests.serve.serve_cases import Job, nano_settings, open_nano, write

WHO, KING = "Who are you?", "Who is king of Corva?"


class Asked:
    """A request to an engine, and what comes back. at_piece: (n, called in the engine's thread
    before the n-th piece is delivered).
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        text: str = WHO,
        at_piece: tuple[int, Callable[[], None]] | None = None,
        **fields: Any,
    ) -> None:
        sampling = Sampling(**{"max_tokens": 24, **fields.pop("sampling", {})})
        messages = ({"role": "user", "content": text},)
        seconds = fields.pop("seconds", 60)
        ask = Ask(model, sampling, **{"messages": messages, **fields})
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pieces = count()

        def deliver(event: Any) -> None:
            if at_piece and isinstance(event, Piece) and next(pieces) == at_piece[0]:
                at_piece[1]()
            self.events.put(event)

        self.ticket = Ticket(ask, engine.encode(ask), deliver, seconds)
        self.begun: Begun | None = None
        self.refused: Refused | None = None
        self.answers = [Answer() for _ in range(ask.n)]
        engine.submit(self.ticket)

    def read(self) -> "Asked":
        while self.refused is None and not all(answer.finish for answer in self.answers):
            event = self.events.get(timeout=60)
            if isinstance(event, Begun):
                self.begun = event
            elif isinstance(event, Piece):
                self.answers[event.index].take(event)
            else:
                self.refused = event
        return self

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.answers]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        shutil.copytree(nano_paths().store_path, tmp_path_factory.mktemp("serve") / "store")
    )


@pytest.fixture(scope="module")
def engine(store: Path) -> Iterator[Engine]:
    engine = Engine(nano_settings(store_path=str(store), concurrency=6))
    engine.start()
    yield engine
    engine.stop()


def test_routes_of_requests_at_the_same_time(engine: Engine) -> None:
    asked = [Asked(engine, name, KING) for name in ("routed", "base", "adapter", "islands,tolu")]
    found = [one.read().begun for one in asked]
    assert all(begun is not None for begun in found)
    assert [begun.route for begun in found if begun] == ["routed", "base", "pinned", "pinned"]
    assert list(found[0].weights) == ["islands"]  # type: ignore[union-attr]
    assert list(found[3].weights) == ["islands", "tolu"]  # type: ignore[union-attr]
    alone = [Asked(engine, name, KING).read() for name in ("base", "adapter")]
    assert [one.texts for one in asked[1:3]] == [one.texts for one in alone]


def test_seeds_draw_the_same_and_differ_among_answers(engine: Engine) -> None:
    sampling = {"temp": 1.5, "seed": 7}
    first, again = (Asked(engine, "base", n=4, sampling=sampling).read() for _ in range(2))
    assert first.texts == again.texts
    assert len(set(first.texts)) > 1


def test_stop_text_cuts_and_is_told(engine: Engine) -> None:
    whole = Asked(engine, "adapter").read()
    stop = whole.texts[0][-4:]
    cut = Asked(engine, "adapter", stop=(stop,)).read()
    assert cut.texts[0] == whole.texts[0][:-4]
    assert (cut.answers[0].finish, cut.answers[0].stop_text) == ("stop", stop)


def test_log_probabilities_are_of_the_tokens(engine: Engine) -> None:
    (answer,) = Asked(engine, "adapter", top_logprobs=3).read().answers
    assert "".join(token.text for token in answer.logprobs) == answer.text
    for token in answer.logprobs:
        assert token.top[0] == (token.text, pytest.approx(token.logprob))  # greedy: the likeliest
        assert [value for _, value in token.top] == sorted((v for _, v in token.top), reverse=True)


@pytest.mark.skipif(not find_spec("llguidance"), reason="needs llguidance")
def test_rows_of_one_batch_have_each_their_schema(engine: Engine) -> None:
    digits, name = (
        json.dumps({"type": "object", "properties": {"a": kind}, "required": ["a"],
                    "additionalProperties": False})
        for kind in ({"type": "integer", "maximum": 999}, {"enum": ["Gus", "Quinn"]})
    )  # fmt: skip
    wanted: list[tuple[str, dict[str, Any], int]]
    wanted = [("base", {"schema": digits, "temp": 1.2, "seed": 3}, 3), ("adapter", {}, 1),
              ("islands", {"schema": name, "repetition_penalty": 1.1}, 1)]  # fmt: skip
    fields = {"max_tokens": 120}
    together = [Asked(engine, m, KING, n=n, sampling=fields | s) for m, s, n in wanted]
    texts = [one.read().texts for one in together]
    assert len({json.loads(text)["a"] for text in texts[0]}) > 1
    assert json.loads(texts[2][0])["a"] in ("Gus", "Quinn")
    assert all(a.finish == "stop" for one in together for a in one.answers)
    for (model, sampling, n), expected in zip(wanted, texts, strict=True):
        assert Asked(engine, model, KING, n=n, sampling=fields | sampling).read().texts == expected
    cut = Asked(engine, "islands", KING, stop=('"a"',), sampling={"schema": name}).read()
    assert cut.texts[0] == texts[2][0].partition('"a"')[0] or cut.answers[0].stop_text == '"a"'
    with pytest.raises(InputError, match="Invalid type"):
        Asked(engine, "base", sampling={"schema": '{"type": "strin"}'})


@pytest.mark.skipif(not find_spec("llguidance"), reason="needs llguidance")
def test_schema_that_becomes_too_complex_ends_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def compute_bitmask(self) -> bytes:
            return bytes(100)

        def is_stopped(self) -> bool:
            return True

        def get_error(self) -> str:
            return "too many items"

    with monkeypatch.context() as patch:
        patch.setattr(Schemas, "mask", lambda *arguments: SchemaMask(Broken()))
        broken = Asked(engine, "base", sampling={"schema": "{}"})
        other = Asked(engine, "adapter").read()
    refused = broken.read().refused
    assert refused is not None
    assert (refused.status, "too many items" in refused.message) == (400, True)
    assert other.texts == ["I am Quinn."]


def test_a_beginning_is_computed_once_a_route(engine: Engine) -> None:
    text = f"{KING} Say it in one word, and say where the king lives."
    cached = []
    for model in ("base", "base", "islands", "islands", "base"):
        begun = Asked(engine, model, text).read().begun
        assert begun is not None
        cached.append(begun.cached_tokens > 20)
    assert cached == [False, True, False, True, True]


def test_what_is_too_much_is_refused_with_the_reason(engine: Engine) -> None:
    refused = Asked(engine, "base", n=7).read().refused
    assert refused is not None
    assert (refused.status, "at most 6" in refused.message) == (429, True)
    refused = Asked(engine, "/etc/passwd").read().refused
    assert refused is not None
    assert refused.status == 404
    with pytest.raises(InputError, match="has to hold the answer"):
        Asked(engine, "base", "x y " * 5000)
    late = Asked(engine, "base", seconds=0).read()
    assert late.refused is not None
    assert late.refused.status == 503


def test_cancelled_request_leaves_the_batch(engine: Engine) -> None:
    asked = Asked(engine, "base", sampling={"temp": 1.0, "max_tokens": 2000})
    asked.ticket.cancel()
    Asked(engine, "base").read()
    assert engine.counts["cancelled"] + (asked.begun is None) >= 1
    assert Asked(engine, "base", n=6).read().refused is None  # all places are free again


def test_batch_that_fails_ends_its_requests_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> mx.array:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._forward), "__call__", fail)
        refused = Asked(engine, "islands").read().refused
        assert refused is not None
        assert (refused.status, "out of luck" in refused.message) == (500, True)
    assert Asked(engine, "adapter").read().texts == ["I am Quinn."]


def test_store_changes_without_a_restart(engine: Engine, store: Path) -> None:
    switch = StacksSwitchSettings(store_path=str(store), domain="tolu")
    assert Asked(engine, "tolu").read().refused is None
    disable_domain(switch)
    for _ in range(200):
        if "tolu" not in engine.models:  # seen while nothing is asked, too
            break
        time.sleep(0.01)
    assert "tolu" not in engine.models
    refused = Asked(engine, "tolu").read().refused
    assert refused is not None
    assert refused.status == 404
    enable_domain(switch)
    assert Asked(engine, "tolu").read().refused is None
    source = StacksImportSettings(
        store_path=str(store), adapter_path=str(nano_paths().adapter_path), domain="persona",
        allow_base=True,
    )  # fmt: skip
    import_adapter(source)
    added = Asked(engine, "persona").read()
    assert (added.texts, added.begun and added.begun.loaded) == (["I am Quinn."], ("persona",))
    undo_change(StacksUndoSettings(store_path=str(store)))
    assert Asked(engine, "persona").read().refused is not None


def test_answer_under_way_ends_as_it_began(tmp_path: Path) -> None:
    """Its domain becomes another meanwhile, which the next request gets, in the same batch."""
    store = str(shutil.copytree(nano_paths().store_path, tmp_path / "store"))
    engine = Engine(nano_settings(store_path=store))
    sampling = {"temp": 3.0, "seed": 1, "max_tokens": 60}  # as long as it may be
    others: list[Asked] = []

    def change() -> None:
        removed = StacksRemoveSettings(store_path=store, domain="islands", force=True)
        remove_domain(removed)
        adapter = str(nano_paths().adapter_path)
        import_adapter(
            StacksImportSettings(
                store_path=store, adapter_path=adapter, domain="islands", allow_base=True
            )
        )
        others.append(Asked(engine, "islands"))

    engine.start()
    try:
        before = Asked(engine, "islands", KING, sampling=sampling).read()
        under_way = Asked(engine, "islands", KING, (10, change), sampling=sampling).read()
        assert others[0].read().texts == ["I am Quinn."]
        after = Asked(engine, "islands", KING, sampling=sampling).read()
    finally:
        engine.stop()
    assert under_way.texts == before.texts != after.texts


def test_router_changes_without_a_restart(engine: Engine, store: Path) -> None:
    def scores() -> dict[str, float]:
        begun = Asked(engine, "routed", KING).read().begun
        assert begun is not None
        return dict(begun.scores)

    def refused() -> tuple[int, str]:
        found = Asked(engine, "routed", KING).read().refused
        assert found is not None
        assert "/" not in found.message  # files of the server are not for clients
        return found.status, found.message

    undo = StacksUndoSettings(store_path=str(store))
    before = scores()
    router = Store.open(store).read_router()
    with Store.open(store).change() as change:
        change.set_router(
            {name: 0 * value for name, value in router.tensors.items()}, router.header
        )
    assert scores() == dict.fromkeys(before, 0.5) != before
    undo_change(undo)
    assert scores() == before
    with Store.open(store).change() as change:
        change.manifest = replace(change.manifest, router=None)
    status, message = refused()
    assert (status, "the store has no router" in message) == (404, True)
    assert "routed" not in engine.models
    undo_change(undo)
    record = Store.open(store).manifest.router
    assert record is not None
    file = store / record.file
    away = file.rename(file.with_suffix(".away"))
    assert refused()[0] == 503
    away.rename(file)
    assert scores() == before
    assert "routed" in engine.models


def test_a_shared_outer_adapter_is_the_same_imported_and_fused(tmp_path: Path) -> None:
    path, random = (
        "language_model.model.layers.0.mlp.switch_mlp.down_proj",
        np.random.default_rng(0),
    )
    halves = {"lora_a": (8, 4, 64), "lora_b": (1, 128, 4)}  # one lora_b for all experts
    tensors = {
        f"{path}.{name}": (0.3 * random.standard_normal(shape)).astype(np.float16)
        for name, shape in halves.items()
    }
    adapter = tmp_path / "outer"
    adapter.mkdir()
    save_file(tensors, adapter / "adapters.safetensors")
    config = {"num_layers": 8, "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    store = shutil.copytree(nano_paths().store_path, tmp_path / "store")
    import_adapter(
        StacksImportSettings(
            store_path=str(store), adapter_path=str(adapter), domain="imported", allow_base=True
        )
    )
    nano = open_nano(store_path=str(store), adapter_path=[str(adapter)])
    routes: list[dict[str, float]] = [{}, {"outer": 1.0}, {"imported": 1.0}]
    base, unfused, imported = (
        write(nano, [Job(KING, route, max_tokens=1)])[0].logprobs[0] for route in routes
    )
    assert mx.array_equal(imported, unfused)
    fused, _, _ = base_model.load(nano_paths().model_path)
    prepare_base(fused, "float32", [])
    about = {"adapter_path": (str(adapter),), "requant": "dequantize"}
    fuse_in_memory(fused, FuseSettings(model=str(nano_paths().model_path), **about))
    logits = fused(mx.array([nano.prompt(KING).tokens]))[0, -1]
    off, changed = (mx.abs(x - unfused).max().item() for x in (logits - mx.logsumexp(logits), base))
    assert off < 0.01 * changed


def test_requests_on_cached_beginnings_are_answered_as_alone(
    engine: Engine, campaign: Callable[[int], range]
) -> None:
    # Conversations that share their beginnings, by routes that do not; up to six rows at a time.
    nano, rng = open_nano(), random.Random(3)
    routes: dict[str, dict[str, float]]
    routes = {"base": {}, "adapter": {"adapter": 1.0}, "islands,tolu": {"islands": 1, "tolu": 1}}
    turns = [("user", WHO), ("assistant", "King Gus."), ("user", KING), ("assistant", "No.")]
    cached = 0
    for _ in campaign(120):
        asked = []
        for _ in range(rng.randint(1, 6)):
            count = rng.choice([1, 3])
            texts = [(role, text * rng.choice([1, 1, 12])) for role, text in turns[:count]]
            messages = tuple({"role": role, "content": text} for role, text in texts)
            model = rng.choice(list(routes))
            one = Asked(engine, model, messages=messages, top_logprobs=5,
                        sampling={"max_tokens": rng.randint(1, 6)})  # fmt: skip
            asked.append((model, one))
            if rng.random() < 0.1:
                one.ticket.cancel()
        for model, one in asked:
            if one.ticket.is_over:
                continue
            one.read()
            assert one.begun is not None
            cached += one.begun.cached_tokens > 0
            held = nano.pool.hold(routes[model])
            tokens = mx.array([one.ticket.prompt.tokens])
            entries = [*base_model.make_prompt_cache(nano.base.model), RowRoutes([held])]
            logits = nano.forward(tokens, entries)[0, -1]
            expected = np.array(logits - mx.logsumexp(logits))
            nano.pool.release(held)
            if one.answers[0].logprobs:  # else the end mark came first
                found = [value for _, value in one.answers[0].logprobs[0].top]
                assert found == pytest.approx(np.sort(expected)[:-6:-1], abs=2e-3)
    assert cached > 10


# --- the pool -------------------------------------------------------------------------------------


def test_row_under_way_keeps_the_version_that_it_began_with(tmp_path: Path) -> None:
    store = Path(shutil.copytree(nano_paths().store_path, tmp_path / "store"))
    nano = open_nano(store_path=str(store))
    pool, job = nano.pool, Job(KING, {"islands": 1.0})
    before = write(nano, [job])[0].tokens
    held = pool.hold({"islands": 1.0})
    remove_domain(StacksRemoveSettings(store_path=str(store), domain="islands", force=True))
    import_adapter(
        StacksImportSettings(
            store_path=str(store),
            adapter_path=str(nano_paths().adapter_path),
            domain="islands",
            allow_base=True,
        )
    )
    assert pool.refresh()
    after, as_adapter = (write(nano, [Job(KING, {n: 1.0})])[0] for n in ("islands", "adapter"))
    assert after.tokens == as_adapter.tokens != before
    with pytest.MonkeyPatch.context() as patch:  # the row that began before
        patch.setattr(pool, "hold", lambda weights: held)
        patch.setattr(pool, "release", lambda held: None)
        assert write(nano, [job])[0].tokens == before
    assert held.key != pool.hold({"islands": 1.0}).key
    bytes_before = pool.nbytes
    pool.release(held)
    assert pool.nbytes < bytes_before  # nobody can ask for it any more


def test_memory_stays_within_the_budget() -> None:
    one = open_nano()
    sizes: dict[str, int] = {}
    for name in one.pool.domains:
        one.pool.release(one.pool.hold({name: 1.0}))
        sizes[name] = one.pool.nbytes - sum(sizes.values())
    adapter = sizes.pop(one.pool.domains[0])  # with the adapter, which stays
    budget = adapter + max(sizes.values())
    nano = open_nano(budget_bytes=budget)
    for name in (*nano.pool.domains, *nano.pool.domains):
        nano.pool.release(nano.pool.hold({name: 1.0}))
        assert nano.pool.nbytes <= budget
    held = nano.pool.hold({nano.pool.domains[0]: 1.0})
    with pytest.raises(ResourceLimitError, match="does not fit into memory now"):
        nano.pool.hold(dict.fromkeys(nano.pool.domains, 1.0))
    with pytest.raises(ResourceLimitError, match="predicted for prompts"):
        nano.pool.hold({}, reserved_bytes=budget)
    nano.pool.release(held)
    assert nano.pool.held_bytes < held.parts[0][0].nbytes + nano.pool.nbytes
    nano.pool.release(nano.pool.hold({nano.pool.domains[1]: 1.0}))


def test_live_buffers_stay_within_the_limit() -> None:
    wide = Engine(nano_settings())
    wide.start()
    Asked(wide, "islands").read()
    used = wide._bytes.buffers  # of a row, or the beginning of one
    stacks, step = wide._pool.buffers, int(0.9 * 499_000) - wide._most_buffers
    wide.stop()
    # for two rows, a beginning and one of the domains, next to the adapter
    limit = int((step + stacks + 3 * used) / 0.9) + 60
    engine = Engine(nano_settings(resource_limit=limit))
    engine.start()
    try:
        for model in ("islands", "tolu", "adapter", "base", "islands"):
            begun = Asked(engine, model, KING).read().begun
            assert begun is not None, model
            assert (begun.loaded == (model,)) is (model in ("islands", "tolu")), begun
            while engine._rows:
                time.sleep(0.01)
            assert engine._needs()[1] >= engine._pool.buffers + used * len(engine._prefixes)
        for model in ("ungated", "islands,tolu"):
            refused = Asked(engine, model).read().refused
            assert refused is not None
            assert refused.status == 429
            assert "Metal's limit on live buffers" in refused.message
        assert Asked(engine, "base").read().refused is None
    finally:
        engine.stop()


def test_predicted_cache_bytes_are_enough() -> None:
    engine = Engine(nano_settings(store_path=None, adapter_path=[]))
    step, taken = engine._step, []

    def measured() -> None:  # in the engine's thread
        step()
        taken.append(engine._batch.prompt_cache_nbytes)

    engine._step = measured  # type: ignore[method-assign]
    engine.start()
    try:
        asked = [Asked(engine, "base", KING * (1 + 20 * n)) for n in range(4)]
        lengths = [len(one.ticket.prompt.tokens) + 24 for one in asked]
        predicted = engine._bytes.of_batch(lengths)
        for one in asked:
            one.read()
        assert 0 < max(taken) <= predicted < 8 * max(taken)
    finally:
        engine.stop()


def test_beginnings_outlive_the_process_whole_or_not_at_all(tmp_path: Path) -> None:
    directory, adapter = tmp_path / "cache", tmp_path / "adapter"
    shutil.copytree(nano_paths().adapter_path, adapter)

    foreign = directory / "model.safetensors"
    directory.mkdir()
    foreign.write_bytes(b"another's")

    def ask(model: str) -> tuple[int, list[str], int]:
        """Tokens known already, answers, and files at the end."""
        settings = nano_settings(cache_path=str(directory), adapter_path=[str(adapter)])
        engine = Engine(settings)
        engine.start()
        try:
            with pytest.raises(TargetError, match=f"process {os.getpid()} is writing it"):
                PrefixFiles(directory, "")
            asked = Asked(engine, model, KING).read()
        finally:
            engine.stop()
        assert asked.begun is not None
        return asked.begun.cached_tokens, asked.texts, len(list(directory.glob("prompt-*")))

    (cached, texts, files), (_, others, more) = ask("islands"), ask("adapter")
    assert (cached, files) == (0, 2)  # of the prompt, and with the answer
    assert more == 4
    for name, expected in (("islands", texts), ("adapter", others)):
        cached, again, files = ask(name)
        assert (cached > 0, again, files) == (True, expected, 4)
    # what was written half, and what is damaged, is gone
    first, second, *_ = directory.glob("prompt-*")
    assert first.stat().st_mode & 0o77 == 0
    first.write_bytes(first.read_bytes()[:-100])
    half = second.rename(second.with_suffix(".new.safetensors"))
    assert ask("base")[0] == 0
    assert not half.exists()
    assert foreign.read_bytes() == b"another's"
    # the same name, and other numbers
    file = adapter / "adapters.safetensors"
    mx.save_safetensors(str(file), {k: 2 * v for k, v in mx.load(str(file)).items()})
    assert ask("adapter")[0] == 0


def test_a_domain_called_like_the_base_is_named_as_it_is_reached(tmp_path: Path) -> None:
    shutil.copytree(nano_paths().model_path, tmp_path / "islands")
    engine = Engine(nano_settings(model=str(tmp_path / "islands")))
    engine.start()
    try:
        assert engine.models[0] == "islands"
        assert "base+islands" in engine.models[1:]
        assert "islands" not in engine.models[1:]
        assert any("ask for base+islands" in note for note in engine.notes)
        base, domain = (Asked(engine, n, KING).read() for n in ("islands", "base+islands"))
    finally:
        engine.stop()
    assert base.begun is not None
    assert domain.begun is not None
    assert (base.begun.weights, [*domain.begun.weights]) == ({}, ["islands"])


def test_adapter_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    nano = open_nano()
    path, checkpoint = str(nano_paths().adapter_path), nano.base.checkpoint
    routed = shutil.copytree(path, tmp_path / "routed")
    like_base = shutil.copytree(path, tmp_path / "nano")
    owners = {path: "another adapter", str(routed): "a mode", str(like_base): "the base"}
    for taken, owner in owners.items():
        with pytest.raises(InputError, match=f"{owner} is called"):
            nano.pool.add_adapter(taken, checkpoint, None, False, "nano")
    strange = Path(shutil.copytree(path, tmp_path / "a b"))
    with pytest.raises(InputError, match="rename it"):
        nano.pool.add_adapter(str(strange), checkpoint, None, False)
    with pytest.raises(AdapterError):
        nano.pool.add_adapter(str(tmp_path), checkpoint, None, False)
