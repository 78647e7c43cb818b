"""Fuses by gptq: what is written, and what it keeps. Run: pytest tests/fuse/test_gptq_fuse.py"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from pydantic import ValidationError

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.module import gather_modules
from mlxstacks.fuse.run import run_command
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.gptq import Moments
from mlxstacks.studies.agreement import calibrate as calibrate_module
from mlxstacks.studies.agreement.calibrate import calibrate, second_moments
from mlxstacks.study.result import Result
from tests.fuse.cases import assert_same_bytes, fuse, tensors
from tests.tiny_models import random_adapter, write_qwen_moe

DOWN, QUERY, KEY = "mlp.switch_mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mx.set_default_device(mx.cpu)
    return write_qwen_moe(tmp_path_factory.mktemp("base") / "model", bits=4, hidden_size=64)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """A delta of about a third of a step on experts and attention."""
    return random_adapter(model, [DOWN, QUERY], rank=2, std=0.012)


def settings_for(model: Path, adapter: Path, target: Path, **options: Any) -> FuseSettings:
    return FuseSettings(
        model=str(model), adapter_path=(str(adapter),), save_path=str(target),
        **{"requant": "gptq", "calibration": "rows.jsonl", **options},
    )  # fmt: skip


def moments_of(settings: FuseSettings) -> dict[str, Moments]:
    """Of inputs that are far from independent, for each module."""
    found = {}
    for module in gather_modules(open_checkpoint(Path(str(settings.model))), settings)[0]:
        random, width = np.random.default_rng(7), module.stored.input_dims
        x = random.standard_normal((4 * width, 6)) @ random.standard_normal((6, width))
        x += 0.1 * random.standard_normal(x.shape)
        found[module.path] = Moments((x.T @ x).astype(np.float32))
    return found


def gptq(model: Path, adapter: Path, target: Path, **options: Any) -> Result:
    settings = settings_for(model, adapter, target, **options)
    return run_command(settings, moments_of(settings))


def cost(model: Path, adapter: Path, target: Path) -> float:
    """Of all outputs: sum of e H e^T over the rows of all modules, e to the unfused adapter."""
    settings = settings_for(model, adapter, target)
    exact, fused = base_model.load(model)[0], base_model.load(target)[0]
    for one in (exact, fused):
        base_model.dequantize(one)
    total, fused_layers = 0.0, dict(fused.named_modules())
    layers, moments = dict(exact.named_modules()), moments_of(settings)
    for module in gather_modules(open_checkpoint(model), settings)[0]:
        match = module.stages[0]
        a, b = (np.asarray(x) for x in (match.module.lora_a, match.module.lora_b))
        delta = b @ a if match.kind == "switch" else (a @ b).T
        wanted = (
            np.array(layers[module.path].weight.astype(mx.float32)) + match.module.scale * delta
        )
        error = np.array(fused_layers[module.path].weight.astype(mx.float32)) - wanted
        flat = error.reshape(-1, error.shape[-1]).astype(np.float64)
        total += float(np.einsum("ij,jk,ik->", flat, moments[module.path].sums, flat))
    return total


def test_outputs_are_closer_at_the_same_bytes(model: Path, adapter: Path, tmp_path: Path) -> None:
    result = gptq(model, adapter, tmp_path / "gptq")
    fuse(model, adapter, tmp_path / "nearest", requant="nearest")
    sizes = [sum(t.nbytes for t in tensors(tmp_path / n).values()) for n in ("gptq", "nearest")]
    assert sizes[0] == sizes[1] == sum(t.nbytes for t in tensors(model).values())
    assert cost(model, adapter, tmp_path / "gptq") < 0.3 * cost(
        model, adapter, tmp_path / "nearest"
    )
    total = result.data["total"]
    assert total["correlation"] > 0.9
    assert total["artifact"] == 0
    assert result.data["extra_bytes"] == 0


def test_zeros_change_nothing(model: Path, adapter: Path, tmp_path: Path) -> None:
    result = gptq(model, adapter, tmp_path / "zero", zero_delta=True)
    assert "survival" not in str(result)
    assert_same_bytes(model, tmp_path / "zero")


def test_more_bits_are_a_finer_grid_of_the_same_rule(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    gptq(model, adapter, tmp_path / "four")
    gptq(model, adapter, tmp_path / "six", bits=(f"*{DOWN}=6",))
    config = json.loads((tmp_path / "six" / "config.json").read_text())
    bits = {e["bits"] for n, e in config["quantization"].items() if n.endswith(DOWN)}
    assert bits == {6}
    assert cost(model, adapter, tmp_path / "six") < cost(model, adapter, tmp_path / "four")
    with pytest.raises(InputError, match="requant gptq allows 4 or more"):
        gptq(model, adapter, tmp_path / "three", bits=(f"*{DOWN}=3",))


def test_without_inputs_and_in_fp4_it_is_nearest(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    run_command(settings_for(model, adapter, tmp_path / "unseen"), {})
    fuse(model, adapter, tmp_path / "nearest", requant="nearest")
    assert_same_bytes(tmp_path / "unseen", tmp_path / "nearest")
    floats = write_qwen_moe(tmp_path / "mxfp4", hidden_size=64, mode="mxfp4")
    other = random_adapter(floats, [DOWN], rank=2, std=0.012)
    gptq(floats, other, tmp_path / "gptq4")
    fuse(floats, other, tmp_path / "nearest4", requant="nearest")
    assert_same_bytes(tmp_path / "gptq4", tmp_path / "nearest4")


def test_moments_are_of_what_a_module_is_given(model: Path) -> None:
    """Layer 0 projects what its norm makes of the embedding; the query and the key of layer 1 read
    the same.
    """
    loaded = base_model.load(model)[0]
    layers = {name.rpartition("layers.")[2]: (name, m) for name, m in loaded.named_modules()}
    names = ("0.linear_attn.in_proj_qkv", f"1.{QUERY}", f"1.{KEY}", f"1.{DOWN}")
    paths = [layers[name][0] for name in names]
    rows = [[65, 66, 67, 68, 69], [70, 71]]
    found = second_moments(loaded, paths, rows)
    assert found[paths[1]] is found[paths[2]]
    assert found[paths[3]].sums.shape == (64, 64)
    embed = next(m for n, m in loaded.named_modules() if n.endswith("embed_tokens"))
    x = layers["0.input_layernorm"][1](embed(mx.array([*rows[0], *rows[1]])))
    x = np.array(x.astype(mx.float32))
    np.testing.assert_allclose(found[paths[0]].sums, x.T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"answer": "b"}'], "rows.jsonl, line 2: no format fits"),
        (['{"text": ""}'], "0 rows|no row|none of"),
    ],
)
def test_rows_that_cannot_be_used(
    model: Path, adapter: Path, tmp_path: Path, lines: list[str], message: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(lines))
    settings = settings_for(model, adapter, tmp_path / "out", calibration=str(rows))
    loaded, tokenizer, _ = base_model.load(model)
    with pytest.raises(InputError, match=message):
        calibrate(settings, loaded, tokenizer)


def test_no_more_rows_are_rendered_than_are_read(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"{n:04d} is here"}) + "\n" for n in range(1000)))
    rendered: list[int] = []
    encode = calibrate_module.encode_examples

    def counted(examples: Any, *given: Any) -> Any:
        rendered.append(len(examples))
        return encode(examples, *given)

    monkeypatch.setattr(calibrate_module, "encode_examples", counted)
    settings = settings_for(
        model, adapter, tmp_path / "out", calibration=str(rows), calibration_tokens=1000
    )
    loaded, tokenizer, _ = base_model.load(model)
    _, (note, _) = calibrate(settings, loaded, tokenizer)
    assert " 1,000 tokens of " in note
    assert sum(rendered) == 128
    zero = settings.model_copy(update={"zero_delta": True})
    assert calibrate(zero, loaded, tokenizer)[1] == [note]  # no word of correlations


def test_what_it_needs_is_said(model: Path, adapter: Path, tmp_path: Path) -> None:
    for options in ({"calibration": None}, {"requant": "nearest"}):
        with pytest.raises(ValidationError, match="requant gptq and calibration go together"):
            settings_for(model, adapter, tmp_path / "out", **options)
    with pytest.raises(ValidationError, match="merge them first"):
        FuseSettings(requant="gptq", calibration="rows.jsonl", adapter_path=("a", "b"))
