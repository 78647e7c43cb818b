"""Fuses into models of MLX's FP4 and FP8 modes. Run: pytest tests/fuse/test_float_modes.py"""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.stored_weight import stored_weight
from mlxstacks.ops.float_grids import MODES
from tests.fuse.cases import assert_same_bytes, fuse, tensors
from tests.fuse.test_fuse_parity import mlx_lm_fuse
from tests.fuse.test_in_memory import assert_as_from_disk, settings_for
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

DOWN, QUERY = "mlp.switch_mlp.down_proj", "self_attn.q_proj"
POLICIES = ("auto", "refit", "keep", "nearest", "promote", "stochastic", "dequantize")


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


@pytest.fixture(scope="module", params=list(MODES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    mx.set_default_device(mx.cpu)
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return write_qwen_moe(directory, hidden_size=64, mode=request.param)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return random_adapter(model, [DOWN, QUERY, "mlp.gate"], rank=2, std=0.01)


def test_refit_is_mlx_lm_fuse_to_the_bit(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Experts, linears, and the gates, which mlx-lm leaves affine in these models."""
    fuse(model, adapter, tmp_path / "ours", requant="refit")
    mlx_lm_fuse(model, adapter, tmp_path / "theirs")
    assert_same_bytes(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("requant", POLICIES)
def test_every_policy_makes_what_mlx_lm_loads_on_disk_and_in_memory(
    model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    assert_as_from_disk(settings_for(model, adapter, requant=requant), model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entries = [entry for name, entry in config["quantization"].items() if name.endswith(DOWN)]
    if requant == "promote":
        assert {entry["mode"] for entry in entries} == {"affine"}
        assert {entry["group_size"] for entry in entries} == {32}
    if requant in ("refit", "keep", "nearest", "stochastic"):
        assert entries == []
    if requant == "dequantize":
        assert entries == [False, False]


def test_zero_delta_changes_no_value_where_the_grid_stays(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, adapter, tmp_path / "out", requant="nearest", zero_delta=True)
    assert "nothing of its own" in report.verdict
    before, after = tensors(model), tensors(tmp_path / "out")
    assert all(mx.array_equal(before[name], after[name]) for name in before)


def test_what_a_promotion_does_by_itself_is_measured(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """Only of mxfp4 an affine grid of more bits holds every value."""
    report = fuse(model, adapter, tmp_path / "out", requant="promote", zero_delta=True)
    mode = json.loads((model / "config.json").read_text())["quantization"]["mode"]
    artifacts = {
        module.path: module.fidelity.artifact
        for module in report.stages[0].modules
        if module.fidelity is not None and "mlp.gate" not in module.path
    }
    assert all((artifact == 0) == (mode == "mxfp4") for artifact in artifacts.values())
    assert all(artifact is not None and artifact < 0.05 for artifact in artifacts.values())


def test_two_adapters_promoted_once(model: Path, adapter: Path, tmp_path: Path) -> None:
    """The second finds an affine grid of other groups than the first."""
    second = random_adapter(model, [DOWN], std=0.01, seed=3, directory=tmp_path / "second")
    settings = settings_for(model, adapter, second, requant="promote", bits=("*down_proj=8",))
    assert_as_from_disk(settings, model, tmp_path / "out")


def test_bits_that_a_mode_has_not_are_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"down_proj, which is \w+; refit keeps that mode"):
        fuse(model, adapter, tmp_path / "out", requant="refit", bits=("*down_proj=6",))


def test_device_parity_is_this_device_s_own_quantize(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """Here that is the CPU's, whose rule the fuse follows."""
    fuse(model, adapter, tmp_path / "device", requant="refit", device_parity=True)
    fuse(model, adapter, tmp_path / "rule", requant="refit")
    assert_same_bytes(tmp_path / "device", tmp_path / "rule")


def test_the_config_may_not_contradict_a_mode(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", mode="mxfp8")
    config = json.loads((model / "config.json").read_text())
    path = "model.layers.0.self_attn.q_proj"
    for entry, said in (
        ({"mode": "mxfp4"}, "are not mxfp4"),
        ({"mode": "mxfp8", "bits": 4}, "mxfp8 has {'bits': 8}"),
        ({"mode": "int4"}, "quantized as int4; MLX has affine, mxfp4, nvfp4, mxfp8"),
    ):
        config["quantization"][path] = entry
        (model / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=said):
            stored_weight(open_checkpoint(model), path)
