"""`mlxstacks stack` on a tiny hybrid model: frozen means frozen, the matrix, what it writes.

Run: pytest tests/studies/stack/test_run.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import Manifest
from mlxstacks.files.settings import StacksRemoveSettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import remove_domain
from mlxstacks.layers.attach import detach
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.study.result import Result
from mlxstacks.training import continual
from tests.studies.stack_cases import (
    DOMAINS,
    TWO,
    domain_of,
    domain_rows,
    hashes,
    log_of,
    settings_for,
    train_store,
    write_domains,
)
from tests.studies.train_cases import write_rows

Places = tuple[Path, Path]


class Watch:
    """What a run had in memory around each domain, and the bases that it protected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frozen: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {}
        self.bases: list[continual.Bases] = []
        plain, plain_bases = stack_run.train_domain, stack_run.protected_bases

        def watched(model: nn.Module, job: Any, *args: Any, **kwargs: Any) -> Any:
            before = frozen_bytes(model)
            result = plain(model, job, *args, **kwargs)
            after = frozen_bytes(model)
            self.frozen[job.name] = (before, {name: after[name] for name in before})
            return result

        def kept(*args: Any) -> Any:
            self.bases.append(plain_bases(*args))
            return self.bases[-1]

        monkeypatch.setattr(stack_run, "train_domain", watched)
        monkeypatch.setattr(stack_run, "protected_bases", kept)


def frozen_bytes(model: nn.Module) -> dict[str, bytes]:
    """Base weights and frozen stacks, to the bit."""
    found = {
        name: np.array(value).tobytes()
        for name, value in tree_flatten(model.parameters())
        if ".active." not in name
    }
    for path, layer in stacked_layers(model):
        for stack in layer.stacks.stacks():
            for leaf, value in stack.tensors().items():
                found[f"{path}/{stack.id.name}/{leaf}"] = np.array(value).tobytes()
    return found


@pytest.fixture(scope="module")
def trained(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A whole run: its report, its store, what was in memory."""
    target = tmp_path_factory.mktemp("out") / "store"
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        report = stack_run.run(settings_for(*places, target))
    return report, Store.open(target), watch


def logits_of(places: Places, store: Store) -> mx.array:
    """What the base with the store's stacks computes; float32, as it was trained."""
    model, tokenizer, _ = base_model.load(places[0])
    base_model.dequantize(model)
    base_model.cast(model, mx.float32)
    serve(model, store, base_fingerprint=fingerprint(open_checkpoint(places[0])))
    tokens = tokenizer.encode("alpha 3: seven apple")
    return model(mx.array([tokens]))


# --- answers after each domain --------------------------------------------------------------------


def test_answers_after_each_domain_change_nothing_that_is_trained(
    places: Places, whole: Store, tmp_path: Path
) -> None:
    """Prompts of all domains by turns; frozen stacks give the answers that they gave."""
    settings = settings_for(*places, tmp_path / "store", **TWO, sample_prompts=3)
    report = stack_run.run(settings)
    assert hashes(tmp_path / "store") == hashes(whole.path)
    first, last = (report.data["domains"][name]["samples"] for name in ("alpha", "beta"))
    for samples in (first, last):
        assert [sample["domain"] for sample in samples] == ["alpha", "beta", "alpha"]
        assert all("alpha" in s["prompt"] or "beta" in s["prompt"] for s in samples)
    rows = {row["prompt"]: row["completion"] for name in DOMAINS for row in domain_rows(name)}
    assert any(question in first[0]["prompt"] for question in rows)
    assert first[0]["expected"] in rows.values()
    assert [*first[1]["answers"]] == ["base", "ungated"]
    assert [*last[1]["answers"]] == ["base", "ungated", "prefix", "isolated"]
    for before, after in zip(first, last, strict=True):
        for mode in {"base", "prefix"} & before["answers"].keys():
            assert after["answers"][mode] == before["answers"][mode]
    assert last[1]["answers"]["prefix"] == last[1]["answers"]["ungated"]
    table = report.table("samples")
    assert [*table["after"]] == ["alpha", "beta"] * 3


# --- frozen means frozen --------------------------------------------------------------------------


def test_base_and_earlier_stacks_keep_every_byte(trained: Any) -> None:
    _, _, watch = trained
    assert list(watch.frozen) == list(DOMAINS)
    for before, after in watch.frozen.values():
        assert before == after
    counts = [sum("/" in name for name in before) for before, _ in watch.frozen.values()]
    assert counts[0] == 0
    assert 0 < counts[1] < counts[2]


def test_prefix_losses_stay_what_they_were_to_the_bit(trained: Any) -> None:
    report, store, _ = trained
    prefix = report.data["matrix"]["prefix"]
    assert list(prefix) == list(DOMAINS)
    for place, name in enumerate(DOMAINS):
        column = {prefix[row][name] for row in DOMAINS[place:]}
        assert column == {domain_of(store, name).final_loss}
        assert domain_of(store, name).final_loss == domain_of(store, name).losses[-1]


def test_the_matrix_has_its_three_modes(trained: Any) -> None:
    report, store, _ = trained
    for mode in ("ungated", "prefix", "isolated"):
        rows = report.data["matrix"][mode]
        assert {row: list(columns) for row, columns in rows.items()} == {
            name: list(DOMAINS[: place + 1]) for place, name in enumerate(DOMAINS)
        }
        assert store.manifest.matrix[mode] == rows
    ungated, isolated = report.data["matrix"]["ungated"], report.data["matrix"]["isolated"]
    for name in DOMAINS:
        assert ungated[name][name] == report.data["matrix"]["prefix"][name][name]
    # Only the first domain was trained alone.
    assert isolated["gamma"]["alpha"] == domain_of(store, "alpha").final_loss
    assert isolated["gamma"]["gamma"] != domain_of(store, "gamma").final_loss
    assert ungated["gamma"]["alpha"] != ungated["alpha"]["alpha"]


def test_domain_by_domain_is_the_same_as_all_at_once(
    places: Places, whole: Store, with_alpha: Store
) -> None:
    """To the byte; and removing the last domain gives the logits of before back."""
    before = logits_of(places, with_alpha)
    store = train_store(places, with_alpha.path, **TWO)
    assert hashes(store.path) == hashes(whole.path)
    assert not mx.array_equal(logits_of(places, store), before).item()
    remove_domain(StacksRemoveSettings(store_path=str(store.path), domain="beta"))
    assert mx.array_equal(logits_of(places, Store.open(store.path)), before).item()


def hashes_of_stacks(manifest: Manifest) -> dict[str, str]:
    return {stack.name: stack.file.sha256 for stack in manifest.stacks}


def test_a_frozen_stack_keeps_out_of_the_protected_directions(trained: Any) -> None:
    """What was folded and cast to half precision has nothing but rounding left in the span."""
    _, store, watch = trained
    assert len(watch.bases) == 2  # nothing is protected from the first domain
    for domain, bases in zip(("beta", "gamma"), watch.bases, strict=True):
        assert len(bases) == 4
        for record in domain_of(store, domain).stacks:
            tensors = store.read_stack(record).tensors
            for path, basis in bases.items():
                lora_b = tensors[f"{path}.lora_b"].astype(mx.float32)
                inside = mx.abs(basis.vectors.T @ lora_b).max().item()
                assert inside < 1e-3 * mx.abs(lora_b).max().item()
        told = domain_of(store, domain).protected
        for path, basis in bases.items():
            assert told["projections"][path]["capacity_used"] == basis.capacity
            assert 0 < told["projections"][path]["captured_energy"] <= 1 + 1e-9
        earlier = list(DOMAINS)[: DOMAINS.index(domain)]
        assert list(told["overlap"]) == earlier
        assert all(0 < o["share"] < 1 and 0 < o["chance"] < 1 for o in told["overlap"].values())


def test_without_null_space_nothing_is_protected(places: Places, tmp_path: Path) -> None:
    store = train_store(
        places, tmp_path / "store", **{**TWO, "iters": 2, "rounds": 1, "null_space": None}
    )
    assert [domain.protected for domain in store.manifest.domains] == [None, None]


# --- rounds ---------------------------------------------------------------------------------------


def test_no_round_ends_worse_than_it_began(trained: Any) -> None:
    report, store, _ = trained
    for name in DOMAINS:
        rounds = report.data["domains"][name]["rounds"]
        assert [one["number"] for one in rounds] == [1, 2]
        for one in rounds:
            assert one["loss_after"] < one["loss_before"]
            assert one["loss_after"] == pytest.approx(one["loss_trained"], abs=1e-3)
        # A new stack changes nothing: round 2 begins at the loss that round 1 froze.
        assert rounds[1]["loss_before"] == rounds[0]["loss_after"]
        losses = [rounds[0]["loss_before"], *(one["loss_after"] for one in rounds)]
        assert list(domain_of(store, name).losses) == losses
        assert report.data["domains"][name]["losses"] == losses


def test_task_and_balance_loss_are_told_apart(trained: Any) -> None:
    report, _, _ = trained
    weight, places = 0.01, report.data["modules"]
    for record in report.data["domains"]["beta"]["rounds"][0]["history"]:
        whole = record["task_loss"] + weight * record["balance_loss"]
        assert record["loss"] == pytest.approx(whole, rel=1e-5)
        # Two of three experts a token: 2 where routing is even, 3 at most.
        assert 1.9 * places < record["balance_loss"] <= 3 * places
    assert 1.9 < report.data["domains"]["beta"]["balance_loss_per_projection"] <= 3


def test_a_round_that_gains_too_little_is_the_last_and_dropped(
    places: Places, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        **TWO, "domains": ("alpha",), "iters": 2, "min_loss_delta": 50.0, "rounds": 3,
    }  # fmt: skip
    dropped = stack_run.run(settings_for(*places, tmp_path / "dropped", **changes))
    kept = stack_run.run(
        settings_for(*places, tmp_path / "kept", keep_plateau_stack=True, **changes)
    )
    assert Store.open(tmp_path / "dropped").manifest.stacks == ()
    assert len(Store.open(tmp_path / "kept").manifest.stacks) == 1
    for report in (dropped, kept):
        (only,) = report.data["domains"]["alpha"]["rounds"]
        assert "less than 50.0" in only["last"]
    assert dropped.data["domains"]["alpha"]["losses"] == kept.data["domains"]["alpha"]["losses"][:1]
    assert "gained nothing for alpha" in dropped.verdict
    assert "Few rows to validate with: alpha 4 (see validation_rows)." in dropped.verdict


def test_each_domain_may_have_rounds_batches_and_rate_of_its_own(
    places: Places, tmp_path: Path
) -> None:
    domains = [{"name": "beta", "rounds": 1, "iters": 2, "learning_rate": 5e-3}, "alpha"]
    store = train_store(places, tmp_path / "store", **{**TWO, "iters": 3, "domains": domains})
    assert [domain.name for domain in store.manifest.domains] == ["beta", "alpha"]
    beta, alpha = store.manifest.domains
    assert (beta.settings["rounds"], beta.settings["iters"]) == (1, 2)
    assert beta.settings["learning_rate"] == 5e-3
    assert (alpha.settings["rounds"], alpha.settings["iters"]) == (2, 3)
    assert len(beta.stacks) == 1
    assert alpha.trained_on == ("beta-r1",)


# --- what is written ------------------------------------------------------------------------------


def test_nothing_but_the_store_is_left(trained: Any) -> None:
    _, store, _ = trained
    assert [path.name for path in store.path.parent.iterdir()] == [store.path.name]
    files = {path.name for path in store.path.iterdir()} - {".lock"}
    assert files == {
        "manifest.json", "previous.json", "base.json", "result.json", "result.md", "log.jsonl",
        "metrics.csv", "stacks", "splits",
    }  # fmt: skip


def test_report_log_and_manifest_agree(trained: Any) -> None:
    report, store, _ = trained
    assert report.data["status"] == "trained"
    assert Result.open(store.path).standing.status == "no plan"
    document = json.loads((store.path / "result.json").read_text())
    assert document == report.as_json()
    written = document["data"]
    assert list(written["domains"]) == list(DOMAINS)
    for name in DOMAINS:
        domain, record = written["domains"][name], store.domain_named(name)
        assert domain["bytes"] == sum(stack.file.nbytes for stack in record.stacks)
        assert domain["steps"] == 8
        assert [r["step"] for r in domain["rounds"][0]["validation"]] == [0, 4]
        assert record.settings["data"]["train_rows"] == 18
        assert record.settings["data"]["validation_rows"] == 6
        split = store.read_json(record.split)
        assert (len(split["train"]), len(split["validation"])) == (18, 6)
    events = [e for e in log_of(store.path) if e["event"] == "step" and e["domain"] == "beta"]
    assert [(e["round"], e["step"]) for e in events] == [
        (number, step) for number in (1, 2) for step in (2, 4)
    ]
    assert "to the last bit" in report.verdict


def test_a_dry_run_plans_and_touches_nothing(places: Places, trained: Any, tmp_path: Path) -> None:
    report = stack_run.run(settings_for(*places, tmp_path / "out"), dry_run=True)
    assert report.status == "planned"
    assert list(tmp_path.iterdir()) == []
    of_the_run = {"status", "save_path", "settings_sha256", "domains", "matrix", "processes"}
    planned = {**trained[0].data, "writes": [str(tmp_path / "out")]}
    assert {k: v for k, v in report.data.items() if k not in of_the_run} == {
        k: v for k, v in planned.items() if k not in of_the_run
    }
    assert [report.data["domains"][name]["steps_per_round"] for name in DOMAINS] == [4, 4, 4]
    record = trained[1].manifest.stacks[0]
    tensors = trained[1].read_stack(record).tensors
    assert report.data["stack_bytes"] == sum(array.nbytes for array in tensors.values())


def test_what_cleaning_changed_is_in_the_plan(places: Places, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "completion": f"    a{i}  b\n"} for i in range(24)]
    rows += [{"prompt": f"q{i}", "completion": "a<|im_end|>"} for i in range(3)]
    rows += [{"prompt": "q", "completion": "<|im_end|>"}]
    write_rows(tmp_path / "data" / "code.jsonl", rows)
    report = stack_run.run(settings_for(places[0], tmp_path / "data", tmp_path / "o"), dry_run=True)
    (source,) = report.data["domains"]["code"]["data"]["sources"]
    assert source["changed"] == {"markers_removed": 3}
    note = "code: code.jsonl: 27 of 28 rows are used (1 no answer, 3 markers removed)."
    assert note in report.notes


def test_a_complete_store_is_left_alone(places: Places, trained: Any) -> None:
    _, store, _ = trained
    before = hashes(store.path)
    report = stack_run.run(settings_for(*places, store.path))
    assert report.data["status"] == "complete"
    assert hashes(store.path) == before
    # What was known of the training is still told.
    assert report.data["domains"]["alpha"]["steps"] == 8


def test_serving_a_store_and_taking_it_off_again(places: Places, trained: Any) -> None:
    _, store, _ = trained
    model, tokenizer, _ = base_model.load(places[0])
    tokens = mx.array([tokenizer.encode("beta 2: river")])
    base = model(tokens)
    assert [record.name for record in serve(model, store)] == [
        f"{name}-r{number}" for name in DOMAINS for number in (1, 2)
    ]
    assert not mx.array_equal(model(tokens), base).item()
    detach(model)
    assert mx.array_equal(model(tokens), base).item()


# --- changed stores -------------------------------------------------------------------------------


def test_a_domain_can_be_trained_again_after_it_was_removed(
    places: Places, trained: Any, tmp_path: Path
) -> None:
    model, data = places[0], write_domains(tmp_path / "data")
    shutil.copytree(trained[1].path, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    old = hashes_of_stacks(store.manifest)
    remove_domain(StacksRemoveSettings(store_path=str(store.path), domain="beta", force=True))
    write_rows(data / "beta.jsonl", domain_rows("beta", 30))
    domains = ["alpha", "gamma", {"name": "beta", "rounds": 1, "iters": 8}]
    report = stack_run.run(settings_for(model, data, store.path, domains=domains))
    manifest = Store.open(store.path).manifest
    assert [domain.name for domain in manifest.domains] == ["alpha", "gamma", "beta"]
    new = hashes_of_stacks(manifest)
    assert new["alpha-r1"] == old["alpha-r1"]
    assert new["gamma-r1"] == old["gamma-r1"]
    assert new["beta-r1"] != old["beta-r1"]
    # gamma was trained on top of the old beta: without it, its loss is another, and that is told.
    assert any("gamma was trained on other stacks than" in note for note in report.notes)
    assert domain_of(Store.open(store.path), "beta").trained_on == (
        "alpha-r1", "alpha-r2", "gamma-r1", "gamma-r2",
    )  # fmt: skip
