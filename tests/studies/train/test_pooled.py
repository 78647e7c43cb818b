"""Training that merges without loss: pooled adapters, from the first step to the fused model.

Run: pytest tests/studies/train/test_pooled.py
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.adapters import read_adapter
from mlxstacks.studies.train.run import run
from mlxstacks.training.pooled import pooled
from mlxstacks.training.settings import TrainSettings
from tests.fuse.cases import fuse, tensors
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

ROWS = "".join(json.dumps({"text": f"the number {n} comes after {n - 1}"}) + "\n" for n in range(8))


def settings_for(model: Path, target: Path, **options: object) -> TrainSettings:
    data = target.parent / "rows.jsonl"
    data.write_text(ROWS)
    given = {"iters": 3, "batch_size": 2, "rank": 2, "learning_rate": 0.01, "seed": 1}
    return TrainSettings.model_validate(
        {"model": str(model), "data": str(data), "save_path": str(target), **given,
         "merge_ready": "pooled", **options}
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


@pytest.mark.parametrize("experts", [False, True])
def test_what_is_trained_is_in_the_fused_model_at_the_same_bytes(
    experts: bool, tmp_path: Path
) -> None:
    write = write_qwen_moe if experts else write_llama
    model = write(tmp_path / "model", bits=3, dtype="float32")
    keys = ["switch_mlp.down_proj", "o_proj"] if experts else ["q_proj", "down_proj"]
    run(settings_for(model, tmp_path / "adapter", keys=keys))
    adapter = read_adapter(tmp_path / "adapter")
    for module in adapter.modules.values():
        rows = module.lora_a if module.is_switch else module.lora_a.T
        groups = rows.reshape(*rows.shape[:-1], -1, 64)
        np.testing.assert_array_equal(groups, np.broadcast_to(groups[..., :1], groups.shape))
        assert np.abs(module.lora_b).max() > 0
    report = fuse(model, tmp_path / "adapter", tmp_path / "fused")
    assert {module.policy for module in report.stages[0].modules} == {"shift"}
    assert report.extra_bytes == 0
    assert report.total is not None
    assert report.total.correlation == pytest.approx(1, abs=1e-4)
    before, after = tensors(model), tensors(tmp_path / "fused")
    changed = {n for n in before if not mx.array_equal(before[n], after[n])}
    assert changed
    assert all(name.endswith(".biases") for name in changed)


def test_an_ordinary_adapter_is_not_taken_for_a_pooled_one(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", bits=3)
    adapter = random_adapter(model, ["self_attn.q_proj"], std=0.01)
    report = fuse(model, adapter, tmp_path / "fused", dry_run=True)
    assert all("shift" not in module.tried for module in report.stages[0].modules)
    low = fuse(model, adapter, tmp_path / "shifted", requant="shift")
    assert low.total is not None
    assert low.total.correlation is not None
    assert low.total.correlation < 0.5


def test_means_are_of_groups_and_of_lora_a_alone() -> None:
    a = mx.random.normal((128, 3))
    experts = mx.random.normal((2, 3, 64))
    tree = {"x": {"lora_a": a, "lora_b": a}, "y": {"lora_a": experts}, "z": {"lora_a": a}}
    found = pooled({"x": 64, "y": 32})(tree)
    wanted = np.repeat(np.array(a).reshape(2, 64, 3).mean(axis=1), 64, axis=0)
    np.testing.assert_allclose(found["x"]["lora_a"], wanted, atol=1e-6)
    means = np.array(experts).reshape(2, 3, 2, 32).mean(axis=3)
    np.testing.assert_allclose(found["y"]["lora_a"], np.repeat(means, 32, axis=2), atol=1e-6)
    assert mx.array_equal(found["x"]["lora_b"], a)
    assert mx.array_equal(found["z"]["lora_a"], a)
    louder = pooled({"x": 64}, gain=True)(tree)["x"]["lora_a"]
    np.testing.assert_allclose(louder, 8 * wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"bits": None}, "no trained module of this model is quantized"),
     ({"mode": "mxfp4"}, "which has no biases to move")],
)  # fmt: skip
def test_models_without_biases_are_refused(
    options: dict[str, object], said: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=said):
        run(settings_for(model, tmp_path / "adapter", keys=["q_proj"]), dry_run=True)
    if "mode" in options:
        adapter = random_adapter(model, ["self_attn.q_proj"])
        with pytest.raises(InputError, match="shift is for affine grids"):
            fuse(model, adapter, tmp_path / "fused", requant="shift")
