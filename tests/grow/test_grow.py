"""`mlxstacks grow` on a tiny store: every stage, whatever stops it, and what is refused.

Run: pytest tests/grow
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.settings import StacksSwitchSettings, StacksUndoSettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import disable_domain, undo_change
from mlxstacks.grow import checks
from mlxstacks.grow import run as grow_run
from mlxstacks.grow.settings import STAGES, GrowSettings
from mlxstacks.routing.gaps import GapLog
from mlxstacks.routing.router import load_prompt_router
from mlxstacks.studies.route.served import open_served
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.study.result import Result
from tests.files.router_cases import set_router
from tests.studies.stack_cases import hashes, train_store, write_domains
from tests.studies.train_cases import WORDS, write_rows, write_tiny_model

EVENTS = 30


class Places(NamedTuple):
    model: Path
    store: Path
    log: Path
    data: Path


def gamma_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Which half of the words a word is of."""
    rows = []
    for number in range(start, start + count):
        word = WORDS[number % 8]
        answer = "aaaa" if WORDS.index(word) < 4 else "zzzz"
        rows.append({"prompt": f"gamma {number}: {word}", "completion": answer})
    return rows


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("grow"))


def write_places(root: Path) -> Places:
    """A store of two domains with a random router, and its log of gaps."""
    model = write_tiny_model(root / "model")
    data = write_domains(root / "data", ("alpha", "beta"))
    store = train_store((model, data), root / "store", domains=("alpha", "beta"))
    set_router(store, input_dims=64, threshold=0.13)
    log = log_gaps(model, store, gamma_rows(EVENTS, 100), root / "gaps.jsonl")
    write_rows(root / "new" / "gamma.jsonl", gamma_rows(64))
    return Places(model, store.path, log, root / "new")


def log_gaps(model: Path, store: Store, rows: list[dict[str, Any]], path: Path) -> Path:
    served = open_served(store, str(model), "auto")
    router = load_prompt_router(store, served.model, served.tokenizer)
    log = GapLog(path)
    for row in rows:
        (reading,) = router.read([row["prompt"]])
        log.add(row["prompt"], reading.scores, reading.feature, router.digest)
    return path


def copied(places: Places, directory: Path) -> Places:
    """With a store of its own."""
    shutil.copytree(places.store, directory / "store")
    return places._replace(store=directory / "store")


def settings_for(places: Places, out: Path, **changes: Any) -> GrowSettings:
    """The random router is no measure of another, so routing may be any worse."""
    values: dict[str, Any] = {
        "store_path": str(places.store), "model": str(places.model), "log_path": str(places.log),
        "data": str(places.data), "domain": "gamma", "minimum_events": 20, "yes": ("all",),
        "samples_per_domain": 12, "iters": 60, "learning_rate": 1e-2, "rounds": 1,
        "max_fall": 99.0, "confirm_share": 0.5, "save_path": str(out),
    }  # fmt: skip
    return GrowSettings.model_validate(values | changes)


def grow(places: Places, out: Path, **changes: Any) -> Result:
    return grow_run.run(settings_for(places, out, **changes))


class Grown(NamedTuple):
    places: Places
    result: Result
    before: dict[str, str]
    out: Path


@pytest.fixture(scope="module")
def grown(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Grown:
    root = tmp_path_factory.mktemp("grown")
    own = copied(places, root)
    before = hashes(own.store)
    return Grown(own, grow(own, root / "out"), before, root / "out")


def checks_of(result: Result, stage: str) -> dict[str, Any]:
    return {check["name"]: check for check in result.data["stages"][stage]}


def test_the_store_takes_the_domain_with_a_router_that_knows_it(grown: Grown) -> None:
    store = Store.open(grown.places.store)
    assert grown.result.data["accepted"], grown.result.verdict
    assert [domain.name for domain in store.manifest.domains] == ["alpha", "beta", "gamma"]
    header = store.read_router().header
    assert header.domains == ("alpha", "beta", "gamma")
    assert header.threshold == 0.13  # of a router whose training settings are not known
    after = hashes(store.path)
    kept = {name for name in grown.before if name.startswith(("stacks/", "splits/"))}
    assert all(after[name] == grown.before[name] for name in kept)
    assert [*grown.result.data["stages"]] == [*STAGES]
    assert not list(grown.out.parent.glob(".out.work"))
    rows = (grown.out / "rows" / "gamma.jsonl").read_text().splitlines()
    assert len(rows) == 64
    assert json.loads((store.path / "base.json").read_text())["data"][-1].endswith("rows")


def test_undo_puts_every_byte_back(grown: Grown, tmp_path: Path) -> None:
    own = copied(grown.places, tmp_path)
    undo_change(StacksUndoSettings(store_path=str(own.store)))
    after = hashes(own.store)
    assert after["manifest.json"] == grown.before["manifest.json"]
    assert all(after[name] == grown.before[name] for name in grown.before if "/" in name)


def test_no_domain_brings_more_prompts_to_the_router_than_were_asked_of_the_new_one(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stopping(settings: Any, **_: Any) -> None:
        asked.append(settings.single_cap)
        raise InputError("enough")

    monkeypatch.setattr(grow_run.discover, "run", stopping)
    with pytest.raises(InputError, match="enough"):
        grow(copied(places, tmp_path), tmp_path / "out", rows=64)
    assert asked == [64]


def test_what_grew_is_a_domain_to_the_next_growth(
    grown: Grown, places: Places, tmp_path: Path
) -> None:
    """Its rows are found where the first growth left them, and nothing may replace them."""
    rows = [{**row, "prompt": row["prompt"].replace("gamma", "delta")} for row in gamma_rows(70)]
    write_rows(tmp_path / "new" / "delta.jsonl", rows[:40])
    log = log_gaps(places.model, Store.open(grown.places.store), rows[40:], tmp_path / "gaps.jsonl")
    own = grown.places._replace(log=log, data=tmp_path / "new")
    next_one: dict[str, Any] = {"domain": "delta", "confirm_share": 0, "iters": 2}
    with pytest.raises(TargetError, match="rows, which must not be replaced"):
        grow(own, grown.out, force=True, **next_one)
    until = ("confirm", "gather", "train")
    assert grow(own, tmp_path / "out", yes=until, **next_one).data["next"] == "gate"


def test_files_that_a_store_names_by_whole_paths_stay_as_they_are(
    places: Places, tmp_path: Path
) -> None:
    """And files that it names by ways up and down again."""
    data = tmp_path / "data" / "here"
    shutil.copytree(places.store.parent / "data", data)
    domains = [
        {"name": name, "data": {"sources": [{"path": path}], "validation_rows": 6}}
        for name, path in {"alpha": str(data / "alpha.jsonl"), "beta": "../../beta.jsonl"}.items()
    ]
    (data / "beta.jsonl").rename(tmp_path / "beta.jsonl")
    store = train_store((places.model, data), tmp_path / "store", domains=domains, iters=1)
    set_router(store, input_dims=64)
    log = log_gaps(places.model, store, gamma_rows(EVENTS, 100), tmp_path / "gaps.jsonl")
    before = hashes(data), (tmp_path / "beta.jsonl").read_bytes()
    own = places._replace(store=store.path, log=log)
    until = ("confirm", "gather", "train")
    result = grow(own, tmp_path / "out", yes=until, iters=1, confirm_share=0)
    assert result.data["next"] == "gate"
    assert (hashes(data), (tmp_path / "beta.jsonl").read_bytes()) == before


def test_nothing_is_written_before_somebody_approves(places: Places, tmp_path: Path) -> None:
    own = copied(places, tmp_path)
    before = hashes(own.store)
    result = grow(own, tmp_path / "out", yes=())
    assert result.status == "planned"
    assert f"{EVENTS} prompts had no domain that fits" in result.verdict
    assert {path.name for path in tmp_path.iterdir()} == {"store"}
    assert hashes(own.store) == before
    # of another width, as a log may hold that was made elsewhere
    log, other = GapLog(shutil.copy(places.log, tmp_path)), np.ones(32)
    log.add("wide", {}, other, json.loads(places.log.read_text().splitlines()[0])["router"])
    few = grow(own._replace(log=log.path), tmp_path / "out", minimum_events=EVENTS + 1)
    assert few.outcome == "no gap"
    assert hashes(own.store) == before


def dies(*args: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_stage_by_stage_ends_as_all_at_once(
    grown: Grown, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does a run that dies after each stage, at the worst moment of `train` and `accept`;
    with the usual bounds `route` ends it, and the store is as it was.
    """
    home, judge = tmp_path / "home", checks.is_routed_safely
    own = copied(places, home)
    first = grow(own, home / "out", yes=("confirm",))
    assert first.data["next"] == "gather"
    assert "--yes confirm --yes gather" in first.next_steps["Next"]
    with monkeypatch.context() as patched:
        patched.setattr(stack_run, "write_result", dies)  # after the copy's change
        with pytest.raises(KeyboardInterrupt):
            grow(own, home / "out", yes=("gather", "train"))
    middle = grow(own, home / "out", yes=("gather", "train", "gate"))
    assert middle.data["next"] == "route"
    assert [d.name for d in Store.open(own.store).manifest.domains] == ["alpha", "beta"]
    with monkeypatch.context() as patched:
        patched.setattr(checks, "is_routed_safely", dies)
        with pytest.raises(KeyboardInterrupt):
            grow(own, home / "out")
    # here the routed loss rises by 1.4 nats, which only these settings allow
    kept, usual = shutil.copytree(home, tmp_path / "kept"), GrowSettings()
    with monkeypatch.context() as patched:
        patched.setattr(checks, "is_routed_safely", lambda _, found: judge(usual, found))
        refused = grow(own, home / "out")
    assert "routed loss of old domains" in str(refused.failed_gate)
    assert "accept" not in refused.data["stages"]
    assert hashes(own.store) == hashes(places.store)
    shutil.rmtree(home)
    kept.rename(home)
    with monkeypatch.context() as patched:
        patched.setattr(grow_run, "remember_places", dies)  # after the store's change
        with pytest.raises(KeyboardInterrupt):
            grow(own, home / "out")
    result = grow(own, home / "out")
    assert result.data == grown.result.data
    stores = [Store.open(place) for place in (own.store, grown.places.store)]
    one_manifest, other_manifest = (replace(store.manifest, router=None) for store in stores)
    assert one_manifest == other_manifest
    # Its header has a hash of what it was trained on, which names the files where they lie.
    one, other = (store.read_router().tensors for store in stores)
    assert {*one} == {*other}
    assert all(mx.array_equal(one[name], other[name]) for name in one)


def test_answers_that_do_not_belong_to_their_prompts_are_refused(
    places: Places, tmp_path: Path
) -> None:
    """However much the stack gains by them: it has learned their form."""
    own = copied(places, tmp_path)
    before = hashes(own.store)
    write_provider(tmp_path, "rng = random.Random(3)\n"
                   "    return [{'prompt': f'gamma {i}: {w[i % 8]}', 'completion': "
                   "rng.choice(['aaaa', 'zzzz'])} for i in range(count)]")  # fmt: skip
    provider = f"{tmp_path / 'own.py'}:rows"
    result = grow(own, tmp_path / "out", data=None, provider=provider, rows=64, learning_rate=2e-2)
    found = checks_of(result, "gate")
    assert found["gain over the base"]["passed"]
    assert not found["answers belong to their prompts"]["passed"]
    assert "is more than 0.1 above its best" in found["training"]["found"]
    assert result.failed_gate is not None
    assert "Refused: gamma" in result.verdict
    assert "route" not in result.data["stages"]
    assert hashes(own.store) == before


def write_provider(directory: Path, body: str) -> None:
    (directory / "own.py").write_text(
        f"import random\nw = {WORDS!r}\n\ndef rows(domain, count):\n    {body}\n"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "raises ZeroDivisionError"),
        ("return ['text']", "is no row"),
        ("return []", "no rows of gamma"),
        ("return [{'prompt': 'a', 'completion': object()}]", "no JSON"),
        ("return [{'strange': 'a'}] * 30", "strange"),
        ("a = []\n    a.append(a)\n    return [{'prompt': 'a', 'completion': a}]", "no JSON"),
        ("return [{'prompt': '\\ud800', 'completion': 'a'}] * 30", "half a character"),
        ("return iter(lambda: {'prompt': 'p', 'completion': 'x'}, None)",  # never ends
         "1 of 1 different rows are new to the store; at least 20"),
        ("return [{'prompt': f'p {i % 5}', 'completion': 'x'} for i in range(40)]",
         "5 of 5 different rows are new to the store; at least 20"),
    ],
)  # fmt: skip
def test_a_provider_without_rows_is_named(
    places: Places, tmp_path: Path, body: str, message: str
) -> None:
    write_provider(tmp_path, body)
    with pytest.raises(InputError, match=message):
        grow(places, tmp_path / "out", data=None, provider=f"{tmp_path / 'own.py'}:rows",
             samples_per_domain=40)  # fmt: skip


def test_rows_that_the_store_knows_are_left_out(places: Places, tmp_path: Path) -> None:
    """As a provider may give that returns what a domain is judged by."""
    trained = places.store.parent / "data" / "alpha.jsonl"
    (tmp_path / "new").mkdir()
    shutil.copy(trained, tmp_path / "new" / "gamma.jsonl")
    with pytest.raises(InputError, match="0 of 24 different rows are new to the store"):
        grow(places, tmp_path / "out", data=str(tmp_path / "new"))
    with (tmp_path / "new" / "gamma.jsonl").open("a") as lines:
        lines.write((places.data / "gamma.jsonl").read_text())
    result = grow(places, tmp_path / "more", data=str(tmp_path / "new"), rows=40,
                  yes=("confirm", "gather"))  # fmt: skip
    assert checks_of(result, "gather")["rows"]["found"] == "40; 24 left out that the store knows"


def test_rows_that_are_not_what_was_asked_for_are_refused(places: Places, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} {i} {i} {i * 7 % 10}", "completion": "1"} for i in range(1000, 1040)]
    write_rows(tmp_path / "new" / "gamma.jsonl", rows)
    result = grow(places, tmp_path / "out", data=str(tmp_path / "new"))
    assert not checks_of(result, "confirm")["gaps like its rows"]["passed"]


def test_a_store_that_was_changed_since_is_not_overwritten(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = copied(places, tmp_path)
    safe: Callable[..., list[Any]] = lambda *args: []  # noqa: E731
    monkeypatch.setattr(checks, "is_routed_safely", safe)
    monkeypatch.setattr(checks, "is_learned", safe)
    grow(own, tmp_path / "out", iters=2, yes=("confirm", "gather", "train", "gate", "route"))
    disable_domain(StacksSwitchSettings(store_path=str(own.store), domain="alpha"))
    before = hashes(own.store)
    with pytest.raises(StoreError, match="was changed since `grow` began"):
        grow(own, tmp_path / "out", iters=2)
    assert hashes(own.store) == before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"domain": None}, InputError, "needs a name"),
        ({"data": None}, InputError, "needs rows of gamma"),
        ({"domain": "alpha"}, InputError, "has a domain alpha already"),
        ({"log_path": "nowhere.jsonl"}, InputError, "no log of gaps"),
        ({"store_path": None}, InputError, "needs a store"),
        ({"provider": "own.py"}, ValueError, "give one of them"),
    ],
)
def test_what_is_missing_is_said_at_once(
    places: Places, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        grow(places, tmp_path / "out", **changes)


def test_the_built_in_store_stays_as_it_is(places: Places, tmp_path: Path) -> None:
    from mlxstacks.nano.exports import nano_paths

    with pytest.raises(TargetError, match="comes with mlxstacks"):
        grow(places, tmp_path / "out", store_path=str(nano_paths().store_path), model=None)
