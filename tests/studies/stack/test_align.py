"""`mlxstacks align --store-path`: preferences and rewards on the last stack of a domain.

Run: pytest tests/studies/stack/test_align.py
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlxstacks.errors import InputError, ResourceLimitError, StoreError
from mlxstacks.files.settings import StacksSwitchSettings, StacksUndoSettings, StacksVerifySettings
from mlxstacks.files.store import Change, Store
from mlxstacks.files.store_commands import disable_domain, undo_change
from mlxstacks.files.store_verify import verify_store
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.studies.stack import align
from mlxstacks.studies.train import align as train_align
from mlxstacks.studies.train import run as train_run
from mlxstacks.study.result import Result
from mlxstacks.training.continual import DriftError
from mlxstacks.training.settings import AlignSettings
from tests.groups import in_group, needs_group
from tests.studies.stack_cases import TWO, domain_of, hashes, log_of, train_store
from tests.studies.train.test_align import pairs
from tests.studies.train.test_kill import wait_for_start, write_own_reward
from tests.studies.train_cases import write_rows
from tests.warm import ended, start

Own = Callable[..., AlignSettings]


@pytest.fixture
def own(places: tuple[Path, Path], whole: Store, tmp_path: Path) -> Own:
    """Eight short steps on a copy of the store of alpha and beta; losses may rise."""
    shutil.copytree(whole.path, tmp_path / "store")
    for name in ("train", "valid"):
        write_rows(tmp_path / "pairs" / f"{name}.jsonl", pairs(8))

    def settings(**changes: Any) -> AlignSettings:
        values: dict[str, Any] = {
            "store_path": str(tmp_path / "store"), "model": str(places[0]),
            "data": str(tmp_path / "pairs"), "save_path": str(tmp_path / "out"), "iters": 8,
            "batch_size": 2, "learning_rate": 3e-3, "steps_per_eval": 4, "save_every": 1,
            "steps_per_report": 2, "guard": "off", "safeguards": {"max_nll_rise": None},
        }  # fmt: skip
        return AlignSettings.model_validate(values | changes)

    return settings


def store_of(settings: AlignSettings) -> Store:
    return Store.open(str(settings.store_path))


def test_the_last_stack_is_replaced_and_undo_takes_it_back(own: Own, whole: Store) -> None:
    before = hashes(whole.path)
    plan = align.run(own(), dry_run=True)
    assert "Would train beta-r2 on alpha-r1, alpha-r2, beta-r1" in plan.verdict
    assert "Must not change: the prefix losses of alpha." in plan.verdict
    assert hashes(store_of(own()).path) == before
    result = align.run(own())
    first, *_, last = result.data["validation"]
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert last["margin"] > 0.01
    store = store_of(own())
    old, new = (domain_of(s, "beta") for s in (whole, store))
    assert first["domain_loss"] == pytest.approx(old.final_loss, abs=1e-6)
    assert last["domain_loss"] == pytest.approx(new.final_loss, abs=1e-3)  # before it was frozen
    assert [s.file == t.file for s, t in zip(old.stacks, new.stacks, strict=True)] == [True, False]
    assert domain_of(store, "alpha") == domain_of(whole, "alpha")
    (how,) = new.aligned
    assert (how["stack"], how["from_sha256"]) == ("beta-r2", old.stacks[-1].file.sha256)
    assert how["prefix_unchanged"] == ["alpha"]
    assert how["safeguards"] == {"skipped": 0, "restored": 0, "capped": 0}
    assert how["settings"]["method"] == "dpo"
    assert new.losses[:-1] == old.losses[:-1]
    assert new.losses[-1] == new.final_loss == how["loss_after"] == new.stacks[-1].loss_after
    matrix, former = store.manifest.matrix, whole.manifest.matrix
    assert matrix["prefix"]["beta"] == former["prefix"]["beta"] | {"beta": new.final_loss}
    assert matrix["isolated"]["beta"]["alpha"] == former["isolated"]["beta"]["alpha"]
    assert verify_store(StacksVerifySettings(store_path=str(store.path))).problems == ()
    assert log_of(store.path)[-1]["event"] == "aligned"
    assert not Result.open(own().save_path or "").standing.reasons
    assert "Replaced in" in result.verdict
    assert result.data["store"]["losses"]["beta"]["after"] == new.final_loss
    assert "adapters.safetensors" not in [p.name for p in Path(own().save_path or "").iterdir()]
    assert undo_change(StacksUndoSettings(store_path=str(store.path))).domain == "beta"
    assert hashes(store.path)["manifest.json"] == before["manifest.json"]


@needs_group
def test_two_processes_replace_it_by_what_one_does(own: Own, whole: Store, tmp_path: Path) -> None:
    changes = {"grad_accumulation_steps": 2, "iters": 4}
    align.run(own(**changes))
    stacks = hashes(store_of(own()).path / "stacks")
    shutil.rmtree(store_of(own()).path)
    shutil.copytree(whole.path, tmp_path / "store")
    settings = own(**changes, save_path=str(tmp_path / "two"))
    text = json.dumps(settings.model_dump(mode="json", exclude_unset=True) | {"method": "dpo"})
    codes = in_group(tmp_path, text, module="tests.training.test_group")
    assert codes == [0, 0], (tmp_path / "0").read_text() + (tmp_path / "1").read_text()
    assert hashes(store_of(own()).path / "stacks") == stacks


def test_later_domains_are_marked(own: Own, whole: Store) -> None:
    plan = align.run(own(domain="alpha"), dry_run=True)
    assert "Would be marked: beta" in plan.verdict
    result = align.run(own(domain="alpha"))
    store = store_of(own())
    mark = domain_of(store, "beta").prefix_changed
    assert mark.retrained == ("alpha",)
    assert mark.loss_before == domain_of(whole, "beta").final_loss
    assert mark.loss_after == store.manifest.matrix["prefix"]["beta"]["beta"]
    assert any("beta was trained before alpha was trained again" in n for n in result.notes)
    assert domain_of(store, "beta").stacks == domain_of(whole, "beta").stacks


def test_the_stack_keeps_out_of_the_directions_that_it_kept_out_of(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(align, "protect_active", lambda model, bases: seen.append((model, bases)))
    align.run(own(iters=1))
    monkeypatch.undo()
    align.run(own(force=True))
    store, ((_, bases),) = store_of(own()), seen
    assert bases
    tensors = store.read_stack(domain_of(store, "beta").stacks[-1]).tensors
    for path, basis in bases.items():
        lora_b = tensors[f"{path}.lora_b"].astype(mx.float32)
        assert mx.abs(basis.vectors.T @ lora_b).max() < 1e-3 * mx.abs(lora_b).max()


@pytest.mark.parametrize("moment", ["a step", "before the change", "after the change"])
def test_stopped_anywhere_it_ends_with_the_same_store(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    align.run(own(store_path=str(tmp_path / "other"), save_path=str(tmp_path / "o")))
    owner, name = {
        "a step": (train_run.TrainRun, "_on_step"),
        "before the change": (Change, "commit"),
        "after the change": (train_run.TrainRun, "_write_target"),
    }[moment]
    whole, calls = getattr(owner, name), [0]

    def stops(*args: Any) -> Any:
        calls[0] += 1
        if moment != "a step" or calls[0] == 5:
            raise KeyboardInterrupt
        return whole(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stops)
        with pytest.raises(KeyboardInterrupt):
            align.run(own())
    assert verify_store(StacksVerifySettings(store_path=str(tmp_path / "store"))).problems == ()
    result = align.run(own())
    assert result.data["resumed_from_step"] == (4 if moment == "a step" else 8)
    assert hashes(tmp_path / "store") == hashes(tmp_path / "other")
    assert [line["event"] for line in log_of(tmp_path / "store")][-1] == "aligned"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o", "other", "out", "pairs", "store"]


def test_killed_at_random_moments_it_ends_with_the_same_store(
    own: Own, whole: Store, tmp_path: Path, campaign: Callable[..., range]
) -> None:
    align.run(own())
    store, out, chance, kills = tmp_path / "store", tmp_path / "out", random.Random(3), 0
    known, wanted = hashes(store), len(campaign(100, usual=2))
    begun = True
    while kills < wanted:
        if begun:
            shutil.rmtree(out)
            shutil.rmtree(store)
            shutil.copytree(whole.path, store)
        process = start("align", own().model_dump_json())
        wait_for_start(process, out, 0)
        time.sleep(chance.uniform(0, 1))
        process.kill()
        kills += ended(process) == -signal.SIGKILL
        begun = out.exists()
    assert begun or ended(start("align", own().model_dump_json())) == 0
    assert hashes(store) == known


def test_a_reward_a_million_times_too_large_leaves_the_best_snapshot(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad steps after step 4: the stack in the store is that of a run of four steps."""
    shutil.copytree(tmp_path / "store", tmp_path / "four")
    align.run(own(store_path=str(tmp_path / "four"), iters=4, save_path=str(tmp_path / "o")))
    call = train_align.PairGradients.__call__

    def poisoned(self: Any, batches: Any, seed: int, step: int) -> Any:
        found = call(self, batches, seed, step)
        scale = 1.0 if step < 4 else 1e6
        scaled = tree_map(lambda g: scale * g, found.gradients)
        return type(found)(scale * found.loss, found.parts, scaled)

    monkeypatch.setattr(train_align.PairGradients, "__call__", poisoned)
    result = align.run(own())
    assert result.data["safeguards"] == {"skipped": 4, "restored": 1, "capped": 0}
    assert (
        domain_of(store_of(own()), "beta").stacks
        == domain_of(Store.open(tmp_path / "four"), "beta").stacks
    )


def test_a_delta_may_not_outgrow_its_size_at_the_start(own: Own) -> None:
    limits = {"max_nll_rise": None, "max_delta_growth": 1.0}
    result = align.run(own(safeguards=limits))
    assert result.data["safeguards"]["capped"] > 0


def test_a_rising_loss_of_the_domain_leaves_the_store_as_it_was(own: Own, whole: Store) -> None:
    result = align.run(own(safeguards={"max_nll_rise": 1e-5}, learning_rate=0.1, steps_per_eval=1))
    assert result.data["status"] == "stopped"
    assert result.data["best_step"] == 0
    assert "is as it was: beta-r2 was not replaced" in result.verdict
    assert hashes(store_of(own()).path) == hashes(whole.path)


def test_a_stack_that_freezing_made_worse_is_refused(
    own: Own, whole: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align.ActiveStack, "loss", lambda self: -1.0)
    with pytest.raises(InputError, match=r"beta-r2, frozen: .* rose from -1.0000 to"):
        align.run(own(safeguards={"max_nll_rise": 0.5}))
    assert hashes(store_of(own()).path) == hashes(whole.path)


def test_a_moved_prefix_loss_is_refused(
    own: Own, whole: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = align.freeze_active

    def writes_elsewhere(model: Any, *args: Any) -> Any:
        for _, layer in stacked_layers(model):
            layer.linear.weight = layer.linear.weight * 1.1
        return plain(model, *args)

    monkeypatch.setattr(align, "freeze_active", writes_elsewhere)
    with pytest.raises(DriftError, match="alpha: was"):
        align.run(own())
    assert hashes(store_of(own()).path) == hashes(whole.path)


def test_a_store_that_was_changed_meanwhile_is_refused(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = align.freeze_active

    def meanwhile(*args: Any) -> Any:
        disable_domain(StacksSwitchSettings(store_path=own().store_path, domain="alpha"))
        return plain(*args)

    monkeypatch.setattr(align, "freeze_active", meanwhile)
    with pytest.raises(StoreError, match="was changed while beta-r2 was trained"):
        align.run(own())
    undo_change(StacksUndoSettings(store_path=str(own().store_path)))
    monkeypatch.undo()
    assert align.run(own()).data["resumed_from_step"] == 8


def test_rewards_of_drawn_answers_without_noise_of_routers(own: Own, tmp_path: Path) -> None:
    """The first ratio of probabilities is 1, and nothing asks for a key of chance."""
    reward = write_own_reward(tmp_path)
    result = align.run(own(
        method="grpo", reward=(reward,), group_size=4, max_tokens=6, max_seq_length=64,
        steps_per_report=1, steps_per_eval=2, learning_rate=3e-2,
        safeguards={"max_nll_rise": None, "max_divergence": None},
    ))  # fmt: skip
    first, *_, last = result.data["history"]
    assert first["divergence"] == pytest.approx(0, abs=1e-6)
    assert first["clipped"] == 0
    assert last["divergence"] > 1e-5
    (how,) = domain_of(store_of(own()), "beta").aligned
    assert (how["settings"]["method"], how["settings"]["reward"]) == ("grpo", ["own.py:early"])


@pytest.mark.parametrize(
    "stack",
    [{"rank": 2, "num_experts": 3, "latent_dim": 16}, {"rank": 2, "num_experts": 1}],
    ids=["latent", "one expert"],
)
def test_other_forms_of_stacks(
    own: Own, places: tuple[Path, Path], tmp_path: Path, stack: dict[str, Any]
) -> None:
    store = train_store(places, tmp_path / "other", **{**TWO, "rounds": 1, "stack": stack})
    domain = store.manifest.stacks[-1].domain
    result = align.run(own(store_path=str(tmp_path / "other"), domain=domain, iters=4))
    first, *_, last = result.data["validation"]
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert last["margin"] > 0
    verified = verify_store(StacksVerifySettings(store_path=str(tmp_path / "other")))
    assert verified.problems == ()


def test_the_guard_counts_the_stack_and_those_below_it(own: Own) -> None:
    asked = own(guard="refuse", resource_limit=10)
    with pytest.raises(ResourceLimitError, match="does not fit"):
        align.run(asked)
    active = align.ActiveStack(asked)
    align.run(asked, dry_run=True)
    assert active.below == ["alpha-r1", "alpha-r2", "beta-r1"]
    plan = align.run(own(guard="warn", resource_limit=10**6), dry_run=True)
    assert plan.data["guard"]["outcome"] == "fits"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, "rank: of an adapter"),
        ({"keys": ("q_proj",), "layers": "1"}, "layers, keys: of an adapter"),
        ({"resume_adapter_file": "x"}, "resume_adapter_file: of an adapter"),
        ({"merge_ready": "pooled"}, "merge_ready pooled is of train"),
        ({"store_path": None, "domain": "beta"}, "give store_path too"),
        ({"domain": "beta-r1"}, "beta-r1 is a stack; its domain is beta"),
        ({"domain": "gamma"}, "no domain 'gamma'"),
    ],
)
def test_what_does_not_go_with_a_stack_is_named(
    own: Own, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        align.run(own(**changes))


def test_a_stack_without_what_it_was_trained_on_is_refused(own: Own) -> None:
    disable_domain(StacksSwitchSettings(store_path=own().store_path, domain="alpha"))
    with pytest.raises(InputError, match="trained on top of alpha-r1, alpha-r2, not served now"):
        align.run(own())
    with pytest.raises(InputError, match="alpha is disabled"):
        align.run(own(domain="alpha"))


def test_directions_avoided_in_training_alone_are_refused(
    own: Own, places: tuple[Path, Path], tmp_path: Path
) -> None:
    stack = {"rank": 2, "num_experts": 3, "projector_mode": "train_only"}
    train_store(places, tmp_path / "other", **{**TWO, "rounds": 1, "stack": stack})
    with pytest.raises(InputError, match="projector_mode train_only"):
        align.run(own(store_path=str(tmp_path / "other")))
