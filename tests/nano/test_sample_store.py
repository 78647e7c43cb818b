"""The shipped store: its base, its bytes, what it was measured to do, and that nothing changes it.

Run: pytest tests/nano/test_sample_store.py
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.router_file import check_router
from mlxstacks.files.settings import StacksVerifySettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_verify import verify_store
from mlxstacks.nano.exports import ASSETS, nano_paths, read_manifest
from mlxstacks.training.modes import evaluating
from tools.nano import measure_store
from tools.nano.curriculum import curriculum_items
from tools.nano.curriculum_settings import DOMAINS
from tools.nano.measure_store import ITEMS, load_served
from tools.nano.settings import RebuildSettings

STORE = ASSETS / "store"


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.open(STORE)


@pytest.fixture(scope="module")
def figures() -> dict:
    found: dict = read_manifest()["measured"]["store"]
    return found


def hashes() -> dict[str, str]:
    files = [path for path in STORE.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_its_base_is_the_model_of_bare_commands(store: Store) -> None:
    paths = nano_paths()
    assert paths.store_path == STORE
    base = store.manifest.base_fingerprint
    assert fingerprint(open_checkpoint(paths.model_path), like=base) == base


def test_it_is_whole_and_holds_nothing_else(store: Store) -> None:
    report = verify_store(
        StacksVerifySettings(store_path=str(STORE), model=str(nano_paths().model_path))
    )
    assert report.failure is None
    named = {"manifest.json", *(record.file for record in store.manifest.files())}
    assert {p.relative_to(STORE).as_posix() for p in STORE.rglob("*") if p.is_file()} == named


def test_it_was_made_with_the_default_settings(store: Store) -> None:
    settings = RebuildSettings()
    assert tuple(domain.name for domain in store.manifest.domains) == DOMAINS
    for domain in store.manifest.domains:
        assert domain.settings["iters"] == settings.stacks.iters
        assert domain.trained_on == ()  # on the base alone: each can be loaded by itself
        assert domain.settings["stack"] == settings.stacks.stack.model_dump(mode="json")
        assert len(domain.stacks) == settings.stacks.rounds
    header = store.read_router().header
    assert header.hidden_dims == settings.router.hidden_dims == 64
    assert header.domains == DOMAINS
    assert check_router(header, store) == []
    text = (STORE / "manifest.json").read_text() + repr(header)
    assert str(Path.home()) not in text
    assert "/tmp" not in text


def test_it_shows_what_routing_is_for(figures) -> None:
    """Routed answers are far above the base's; all stacks together get in each other's way."""
    for domain in DOMAINS:
        found = figures["domains"][domain]
        assert found["items"] == ITEMS
        assert found["routed"]["loss"] < 0.5 * found["base"]["loss"], domain
        assert found["routed"]["loss"] < 0.7 * found["ungated"]["loss"], domain
    # Of tolu nano learns the form in this time, not the words.
    for domain in ("letters", "islands", "queries"):
        found = figures["domains"][domain]
        assert found["routed"]["accuracy"] >= found["base"]["accuracy"] + 0.08, domain


def test_the_router_tells_its_domains_and_some_of_the_unseen_one(figures) -> None:
    for domain in DOMAINS:
        assert figures["router"][domain]["top_is_own"] >= 0.9, domain
    gaps = figures["gaps"]
    alarms = gaps["false_alarms_on_known"]["rate"]
    assert alarms <= 0.1
    assert gaps["detected_on_unseen_music"]["rate"] >= 3 * alarms
    assert gaps["on_nanos_own_domains"]["rate"] >= 0.6


def test_the_figures_of_a_domain_measured_again(figures, monkeypatch) -> None:
    """Within what rounding on another machine may move; of what is served, routed answers, and of
    these the loss, which needs no wrong options.
    """
    monkeypatch.setattr(measure_store, "MODES", ("routed",))
    served = load_served(STORE, nano_paths().model_path)
    items = [
        replace(item, options=(item.options[item.answer_index],), answer_index=0)
        for item in curriculum_items("islands", ITEMS, RebuildSettings().seed)
    ]
    with evaluating(served.model):
        again = measure_store.measure_items(served, items)["routed"]
    expected = figures["domains"]["islands"]["routed"]
    assert again["loss"] == pytest.approx(expected["loss"], rel=0.02)


def test_store_is_bound_to_every_byte_of_its_base(capsys: pytest.CaptureFixture[str]) -> None:
    """`stacks verify` asks nano, and what is copied says nothing of a weak binding."""
    assert run(["stacks", "verify", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["data"]["base"], result["notes"]) == ("same", [])


CHANGES = [
    ["stacks", "remove", "{store}", "tolu"],
    ["stacks", "disable", "{store}", "tolu"],
    ["stacks", "enable", "{store}", "tolu"],
    ["stacks", "gc", "{store}"],
    ["stacks", "import", "{store}", "{adapter}"],
    ["stack", "--save-path", "{store}"],
    ["stack", "--save-path", "{store}", "--force"],
]


@pytest.mark.parametrize("words", CHANGES, ids=lambda words: " ".join(words[:2]))
def test_no_command_changes_it(words: list[str], capsys) -> None:
    before = hashes()
    known = {"store": str(STORE), "adapter": str(ASSETS / "adapter")}
    code = run([word.format(**known) for word in words])
    said = capsys.readouterr().err
    if words[1] == "enable":  # nothing to do, so nothing is refused
        assert code == 0
    else:
        assert code == 2
        assert "comes with mlxstacks and is only read" in " ".join(said.split())
    assert hashes() == before


@pytest.mark.parametrize("words", [["stacks", "list"], ["stacks", "verify"]])
def test_bare_commands_that_read_use_it(words: list[str], capsys) -> None:
    before = hashes()
    assert run([*words, "--json"]) == 0
    assert str(STORE) in capsys.readouterr().out
    assert hashes() == before
