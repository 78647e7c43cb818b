"""`mlxstacks stack` with other stacks, models and processes than the usual ones.

Run: pytest tests/studies/stack/test_forms.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.cli import run as run_command_line
from mlxstacks.files.store import Store
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.studies.stack import run as stack_run
from tests.groups import in_group, needs_group
from tests.studies.stack_cases import (
    TWO,
    domain_of,
    domain_rows,
    hashes,
    settings_for,
    train_store,
    write_domains,
    write_places,
)
from tests.studies.train_cases import write_rows
from tests.tiny_models import write_llama
from tests.warm import WarmSubprocess
from tools.nano import workers

Places = tuple[Path, Path]
SHORT: dict[str, Any] = {"domains": ("alpha", "beta"), "iters": 4, "rounds": 1}


def test_latent_stacks_share_their_projections(places: Places, tmp_path: Path) -> None:
    """One shared file for all; the next domain of a later run packs with the first."""
    changes = {**SHORT, "iters": 2, "stack": {"rank": 2, "num_experts": 3, "latent_dim": 16}}
    train_store(places, tmp_path / "store", **{**changes, "domains": ("alpha",)})
    whole = train_store(places, tmp_path / "store", **changes)
    assert len(whole.manifest.shared) == 1
    model, _, _ = base_model.load(places[0])
    serve(model, whole)
    for _, layer in stacked_layers(model):
        shapes = {stack.shape for stack in layer.stacks.stacks()}
        assert len(shapes) == 1
    widths = {
        tuple(tensor.shape[-2:])
        for record in whole.manifest.stacks
        for name, tensor in whole.read_stack(record).tensors.items()
        if name.endswith("lora_a")
    }
    assert widths == {(2, 16)}


def test_a_pair_for_each_expert_where_it_was_asked_for(places: Places, tmp_path: Path) -> None:
    stack = {"rank": 1, "num_experts": 2, "switch_form": "per_expert"}
    changes = {**SHORT, "layers": "1", "keys": ("switch_mlp.down_proj",), "stack": stack}
    store = train_store(places, tmp_path / "store", **changes)
    file = store.read_stack(store.manifest.stacks[0])
    (shape,) = file.header.projections.values()
    assert (shape.form, shape.base_experts) == ("per_expert", 4)


def test_one_plain_expert(places: Places, tmp_path: Path) -> None:
    stack = {"rank": 2, "num_experts": 1}
    report = stack_run.run(settings_for(*places, tmp_path / "store", **SHORT, stack=stack))
    assert report.data["domains"]["alpha"]["balance_loss_per_projection"] is None
    store = Store.open(tmp_path / "store")
    names = {name.rpartition(".")[2] for name in store.read_stack(store.manifest.stacks[0]).tensors}
    assert names == {"lora_a", "lora_b"}


def test_domains_on_different_layers_go_together(places: Places, tmp_path: Path) -> None:
    keys = ("switch_mlp.down_proj",)
    longer = {**SHORT, "iters": 4, "min_loss_delta": 0.0, "keys": keys}
    first = {**longer, "domains": ("alpha",), "layers": "0"}
    train_store(places, tmp_path / "store", **first)
    second = {**longer, "domains": ("beta",), "layers": "1"}
    store = train_store(places, tmp_path / "store", **second)
    paths = [list(store.read_stack(r).header.projections) for r in store.manifest.stacks]
    assert [len(p) for p in paths] == [1, 1]
    assert paths[0] != paths[1]
    # What beta protects lies where alpha wrote, which beta does not touch.
    assert list(domain_of(store, "beta").protected["projections"]) == paths[0]


def test_a_dense_model_with_packed_rows_and_a_checkpointed_step(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", bits=4, hidden_size=64)
    data = write_domains(tmp_path / "data")
    changes = {**SHORT, "iters": 2, "keys": ("q_proj", "down_proj"), "packing": True}
    changes |= {"domains": ("alpha",), "validation_rows": 8}
    plain = train_store((model, data), tmp_path / "plain", **changes)
    again = train_store((model, data), tmp_path / "again", **changes, grad_checkpoint=True)
    assert hashes(plain.path) == hashes(again.path)
    report = json.loads((plain.path / "result.json").read_text())["data"]
    assert report["domains"]["alpha"]["padding_percent"] < 50


def test_cumulative_directions_grow_and_are_found_again(places: Places, tmp_path: Path) -> None:
    """The basis of a later run goes through the earlier domains once more and finds the same."""
    null_space = {"directions": 3, "samples": 6, "scope": "cumulative", "data": "both"}
    changes: dict[str, Any] = {**SHORT, "iters": 2, "keys": ("q_proj",), "null_space": null_space}
    all_three = {**changes, "domains": ("alpha", "beta", "gamma")}
    whole = train_store(places, tmp_path / "whole", **all_three)
    train_store(places, tmp_path / "steps", **changes)
    steps = train_store(places, tmp_path / "steps", **all_three)
    assert hashes(steps.path) == hashes(whole.path)
    used = [
        next(iter(domain_of(whole, name).protected["projections"].values()))["directions"]
        for name in ("beta", "gamma")
    ]
    assert used == [3, 6]


def test_a_disabled_domain_is_neither_served_nor_measured(
    places: Places, whole: Store, tmp_path: Path
) -> None:
    target = tmp_path / "store"
    shutil.copytree(whole.path, target)
    assert run_command_line(["stacks", "disable", str(target), "alpha"]) == 0
    data = write_domains(tmp_path / "data", ("beta", "gamma"))
    changes = {**TWO, "domains": ("beta", {"name": "gamma", "rounds": 1})}
    report = stack_run.run(settings_for(places[0], data, target, **changes))
    assert list(report.data["matrix"]["ungated"]["gamma"]) == ["beta", "gamma"]
    assert domain_of(Store.open(target), "gamma").trained_on == ("beta-r1", "beta-r2")
    assert any("beta was trained on other stacks than those" in note for note in report.notes)


# --- the command line -----------------------------------------------------------------------------


def test_the_command_line_trains_goes_on_and_says_so(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "stack", "--model", str(places[0]), "--data", str(places[1]), "--save-path",
        str(tmp_path / "store"), "--keys", "q_proj", "--iters", "4", "--rounds", "1",
        "--validation-rows", "6", "--learning-rate", "0.01", "--set", "stack.rank=2",
        "--set", "null_space.directions=4", "--max-seq-length", "64", "--guard", "off",
    ]  # fmt: skip
    assert run_command_line([*common, "--domains", "alpha"]) == 0
    assert "1 domain in 1 frozen stack" in " ".join(capsys.readouterr().out.split())
    assert run_command_line([*common, "--domains", "alpha", "--domains", "beta"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Losses, ungated: every stack on" in text
    assert "every domain's loss is what it was, to the last bit" in text
    assert "With every stack on" in text
    assert run_command_line([*common, "--domains", "alpha", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["data"]["status"] == "complete"
    assert list(report["data"]["domains"]) == ["alpha", "beta"]
    assert run_command_line([*common, "--set", "stack.rnk=2"]) == 2
    assert "did you mean 'stack.rank'" in capsys.readouterr().err
    assert run_command_line([*common, "--set", "null_space=null", "--dry-run"]) == 2
    assert "null_space" in capsys.readouterr().err


# --- processes ------------------------------------------------------------------------------------


@needs_group
def test_two_processes_that_share_whole_batches_train_the_bytes_of_one(tmp_path: Path) -> None:
    """With noise of the routers and their balance."""
    places = write_places(tmp_path)
    changes = {**SHORT, "keys": ("q_proj",), "grad_accumulation_steps": 2, "iters": 4}
    one = train_store(places, tmp_path / "one", **changes)
    settings = settings_for(*places, tmp_path / "two", **changes)
    codes = in_group(tmp_path, settings.model_dump_json(), module="tests.studies.stack_cases")
    assert codes == [0, 0], (tmp_path / "0").read_text()
    assert hashes(tmp_path / "two" / "stacks") == hashes(one.path / "stacks")


@needs_group
def test_two_joined_processes_train_the_stacks_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise and balance loss, which each process has of its own rows: losses to 2e-5 (met:
    9e-7), numbers to one step of bfloat16.

    Joined as `mlx.launch` joins them, as tests/groups.py does.
    """
    model, data = write_places(tmp_path)
    write_rows(data / "alpha.jsonl", domain_rows("alpha", 23))
    stack = {"rank": 2, "num_experts": 3, "router_noise": False, "storage": "bfloat16"}
    changes = {**SHORT, "keys": ("q_proj", "linear_attn.out_proj"), "stack": stack}
    train_store((model, data), tmp_path / "one", **changes, balance_weight=0.0)
    settings = settings_for(model, data, tmp_path / "two", **changes, balance_weight=0.0)
    monkeypatch.setattr(workers, "subprocess", WarmSubprocess)
    workers.run_in_processes("tests.studies.stack_cases", [settings.model_dump_json()], 2)
    one, two = (Store.open(tmp_path / name) for name in ("one", "two"))
    report = json.loads((two.path / "result.json").read_text())["data"]
    assert report["processes"] == 2
    assert [d.name for d in two.manifest.domains] == [d.name for d in one.manifest.domains]
    for mine, theirs in zip(one.manifest.domains, two.manifest.domains, strict=True):
        assert np.allclose(mine.losses, theirs.losses, atol=2e-5)
    for mine_file, their_file in zip(one.manifest.stacks, two.manifest.stacks, strict=True):
        mine_tensors = one.read_stack(mine_file).tensors
        for name, tensor in two.read_stack(their_file).tensors.items():
            expected = mine_tensors[name].astype(mx.float32)
            difference = mx.abs(tensor.astype(mx.float32) - expected).max().item()
            assert difference < 0.008 * mx.abs(expected).max().item(), name
