"""`mlxstacks route train` from targets to a router in the store, on a tiny base.

Run: pytest tests/studies/route/test_train.py
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pydantic import ValidationError

from mlxstacks import base_model
from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.outputs import write_json
from mlxstacks.files.router_file import read_router
from mlxstacks.files.stack_file import ProjectionShape
from mlxstacks.files.store import Store
from mlxstacks.nano import exports
from mlxstacks.recipe.on_nano import route_train
from mlxstacks.routing.outcomes import Outcome, RouterExample, read_outcomes, write_lines
from mlxstacks.routing.router import ROUTER_FILE, load_prompt_router
from mlxstacks.routing.settings import RouterTrainSettings
from mlxstacks.studies.route.data import stack_hashes
from mlxstacks.studies.route.train import run
from mlxstacks.study.integrity import of_bytes
from mlxstacks.study.result import Result
from tests.files.store_cases import header, tensors
from tests.tiny_models import write_llama

SHAPES = {"model.layers.0.self_attn.q_proj": ProjectionShape("linear", 1, 2, 1, 1.0, 64, 64)}
WORDS = {"code": "loop array", "math": "sum of", "law": "court says"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "tiny"
    return write_llama(path, bits=None, dtype="float32", hidden_size=64)


def add_domain(store: Store, name: str, seed: int = 0) -> None:
    with store.change("train") as change:
        own = header(name, projections=SHAPES, base_fingerprint=store.manifest.base_fingerprint)
        record = change.add_stack(tensors(own, seed), own)
        change.manifest = change.manifest.with_domain(DomainRecord(name, True, (record,)))


def discover(store: Store, directory: Path, domains: tuple[str, ...], **changes: Any) -> Path:
    """What `route discover` leaves, without outcomes."""
    directory.mkdir(exist_ok=True)
    examples = [
        RouterExample(f"{WORDS[d]} {i}", "x", (d,), "single", f"{d}{i}")
        for d in domains
        for i in range(12)
    ]
    examples += [RouterExample(f"zz {i}", None, (), "other", f"o{i}") for i in range(4)]
    write_lines(directory / "examples.jsonl", examples)
    write_lines(directory / "outcomes.jsonl", [])
    report = {
        "base_fingerprint": store.manifest.base_fingerprint,
        "stacks": stack_hashes(store, domains),
        "chat_domain": None,
        "chat_floor": 0.0,
    }
    write_json(directory / "discover_report.json", report | changes)
    return directory


@pytest.fixture
def store(tmp_path: Path, base: Path) -> Store:
    made = Store.create(tmp_path / "store", "tiny", fingerprint(open_checkpoint(base)))
    add_domain(made, "math", 2)
    add_domain(made, "code", 1)
    discover(made, tmp_path / "targets", ("code", "math"))
    return made


def settings(store: Store, base: Path, **changes: Any) -> RouterTrainSettings:
    values = {
        "store_path": str(store.path), "model": str(base), "hidden_dims": 8, "epochs": 2,
        "targets": str(store.path.parent / "targets"),
        "save_path": str(store.path.parent / "out"),
    }  # fmt: skip
    return RouterTrainSettings.model_validate(values | changes)


def test_router_lands_in_target_and_store(store: Store, base: Path) -> None:
    result = run(settings(store, base))
    written = Result.open(store.path.parent / "out")
    assert (result.status, written.data, written.standing.reasons) == ("done", result.data, ())
    assert [*written.provenance] == [ROUTER_FILE]
    assert result.data["router_sha256"] == result.data["installed"]
    assert [block.id for block in result.blocks] == [  # type: ignore[union-attr]
        "facts", "held-out", "losses", "epochs", "domains", "calibration"
    ]  # fmt: skip
    assert [*result.table("epochs")["epoch"]] == [1, 2]
    assert result.next_steps["Next"].startswith("mlxstacks chat --routed")
    store.refresh()
    file = store.read_router()
    assert file.header.domains == ("math", "code")  # as in the store
    assert file.header.input_dims == 64
    assert set(file.header.training["data_sha256"]) == {"examples.jsonl", "outcomes.jsonl"}  # type: ignore
    assert str(store.path.parent) not in str(file.header.as_json())
    assert read_router(store.path.parent / "out" / ROUTER_FILE).header == file.header
    model, tokenizer, _ = base_model.load(base)
    assert set(load_prompt_router(store, model, tokenizer).score("loop array 3")) == {
        "code",
        "math",
    }


def test_a_router_of_labels_takes_no_outcomes(store: Store, base: Path) -> None:
    """The same prompts are held out, so both are compared on the same ones."""
    targets = store.path.parent / "targets"
    examples, _ = read_outcomes(targets)
    found = {"code": 0.0, "math": 1.0}
    lines = [
        Outcome(e.row_id, e.label, e.kind, 2.0, 1.0, ("math",), (), found, found, {"": 2.0}, ())
        for e in examples
    ]
    write_lines(targets / "outcomes.jsonl", lines)
    by_outcome = run(settings(store, base, install=False))
    by_label = run(settings(store, base, install=False, labels_only=True, force=True))
    counts = [r.data["examples"]["discovered"] for r in (by_outcome, by_label)]
    assert counts == [len(lines), 0]
    ids = [r.data["split"]["validation_row_ids"] for r in (by_outcome, by_label)]
    assert ids[0] == ids[1]
    assert by_outcome.data["history"] != by_label.data["history"]
    with pytest.raises(ValidationError, match="labels_only and oracle_only"):
        settings(store, base, labels_only=True, oracle_only=True)


def test_dry_run_and_no_install_leave_the_store_alone(store: Store, base: Path) -> None:
    before = (store.path / "manifest.json").read_bytes()
    planned = run(settings(store, base), dry_run=True)
    assert (planned.status, planned.data["examples"]["all"]) == ("planned", 28)
    assert not (store.path.parent / "out").exists()
    report = run(settings(store, base, install=False))
    assert report.data["installed"] is None
    assert (store.path / "manifest.json").read_bytes() == before


def test_equal_runs_write_equal_routers(store: Store, base: Path) -> None:
    first = run(settings(store, base))
    second = run(settings(store, base, save_path=str(store.path.parent / "again")))
    assert first.data["router_sha256"] == second.data["router_sha256"]


def test_a_failure_while_writing_leaves_nothing(
    store: Store, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise TargetError("the disk is full")

    monkeypatch.setattr("mlxstacks.studies.route.train.write_router", full)
    before = (store.path / "manifest.json").read_bytes()
    with pytest.raises(TargetError, match="full"):
        run(settings(store, base))
    assert sorted(path.name for path in store.path.parent.iterdir()) == ["store", "targets"]
    assert (store.path / "manifest.json").read_bytes() == before


def test_extension_by_a_domain(store: Store, base: Path) -> None:
    run(settings(store, base))
    store.refresh()
    old = store.read_router()
    add_domain(store, "law", 3)
    discover(store, store.path.parent / "targets", ("code", "math", "law"))
    report = run(settings(store, base, extend="new", hidden_dims=99, max_tokens=7, force=True))
    store.refresh()
    new = store.read_router()
    assert report.data["domains"] == ["math", "code", "law"]
    assert (new.header.hidden_dims, new.header.max_tokens) == (8, 256)  # the old router's
    for name, array in old.tensors.items():
        assert mx.array_equal(new.tensors[name][: array.shape[0]], array)


def test_extension_of_a_router_for_other_stacks_is_refused(store: Store, base: Path) -> None:
    run(settings(store, base))
    add_domain(store, "math", 9)  # trained again
    add_domain(store, "law", 3)
    discover(store, store.path.parent / "targets", ("code", "math", "law"))
    with pytest.raises(InputError, match="other stacks of math"):
        run(settings(store, base, extend="new", force=True))
    report = run(settings(store, base, extend="all", force=True))
    assert any("math" in note for note in report.notes)


def test_extension_without_a_router_is_refused(store: Store, base: Path) -> None:
    with pytest.raises(InputError, match="no router"):
        run(settings(store, base, extend="new"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_fingerprint": "0" * 64}, "of a base with fingerprint"),
        ({"stacks": {"code": ["0" * 64]}}, "other stacks of code"),
    ],
)
def test_targets_of_something_else_are_refused(
    store: Store, base: Path, changes: dict[str, Any], message: str
) -> None:
    discover(store, store.path.parent / "targets", ("code", "math"), **changes)
    with pytest.raises(InputError, match=message):
        run(settings(store, base))


def test_chat_domain_and_floor_come_from_the_discovery(store: Store, base: Path) -> None:
    changes = {"chat_domain": "math", "chat_floor": 0.3}
    discover(store, store.path.parent / "targets", ("code", "math"), **changes)
    run(settings(store, base))
    store.refresh()
    about = store.read_router().header
    assert (about.chat_domain, about.chat_floor) == ("math", 0.3)
    run(settings(store, base, chat_floor=0.4, force=True))
    store.refresh()
    assert store.read_router().header.chat_floor == 0.4


def test_bad_input(store: Store, base: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a store"):
        run(settings(store, base).model_copy(update={"store_path": None}))
    with pytest.raises(InputError, match="route discover"):
        run(settings(store, base, targets=str(tmp_path / "none")))
    other = write_llama(tmp_path / "other", bits=4, hidden_size=64)
    with pytest.raises(StoreError, match="fingerprint"):
        run(settings(store, other))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(TargetError):
        run(settings(store, base, force=True))


def test_a_discovery_that_was_changed_is_named(store: Store, base: Path) -> None:
    """Of version 0.2; the other tests read what versions before wrote."""
    targets = store.path.parent / "targets"
    figures = json.loads((targets / "discover_report.json").read_text())
    (targets / "discover_report.json").unlink()
    names = ("examples.jsonl", "outcomes.jsonl")
    discovery = Result(
        kind="route discover", title="t", status="done", data=figures,
        provenance={name: of_bytes((targets / name).read_bytes()) for name in names},
    )  # fmt: skip
    write_json(targets / "result.json", discovery.sealed().as_json())
    assert not any("changed" in note for note in run(settings(store, base), dry_run=True).notes)
    lines = (targets / "examples.jsonl").read_text().splitlines()
    (targets / "examples.jsonl").write_text("\n".join(lines[:-1]))
    notes = run(settings(store, base), dry_run=True).notes
    assert any("examples.jsonl" in note and "changed" in note for note in notes)


def test_the_package_s_own_store_is_never_written_to(
    store: Store, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "ASSETS", store.path.parent)
    before = (store.path / "manifest.json").read_bytes()
    own, options = route_train(settings(store, base))
    report = run(own, **options)
    assert report.data["installed"] is None
    assert "not changed" in report.notes[0]
    assert (store.path / "manifest.json").read_bytes() == before
