"""The shipped files, exports at every width, the cache. Run: pytest tests/nano/test_exports.py"""

import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError, TargetError
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.files.outputs import MARK, entries
from mlxstacks.nano import exports
from mlxstacks.nano.exports import (
    ASSETS,
    SAMPLES_FILE,
    export,
    nano_paths,
    read_manifest,
    show,
    write_export,
)
from mlxstacks.nano.settings import ExportSettings, ShowSettings
from mlxstacks.study.document import Table
from tests.files.raw import mounted
from tools.nano import measure
from tools.nano.corpus import validation_documents
from tools.nano.encode import encode_documents
from tools.nano.forward import forward
from tools.nano.settings import SHIPPED_BITS, RebuildSettings
from tools.nano.tokenizer import load_tokenizer

SHIPPED = ASSETS / "model"


@pytest.fixture(scope="module")
def four_bit(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "nano-4bit"
    export(ExportSettings(save_path=path, bits=4))
    return path


def stored_values(directory: Path) -> dict[str, np.ndarray]:
    model, _, _ = base_model.load(directory)
    base_model.dequantize(model)
    from mlx.utils import tree_flatten

    return {k: np.array(v.astype(mx.float32)) for k, v in tree_flatten(model.parameters())}


def test_shipped_files_are_small_and_all_there() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in (*files, SAMPLES_FILE)) <= 3_000_000
    assert {path.relative_to(ASSETS).as_posix() for path in files} >= {
        "manifest.json", "model/config.json", "model/model.safetensors", "model/tokenizer.json",
        "adapter/adapters.safetensors", "adapter/adapter_config.json", "store/manifest.json",
    }  # fmt: skip
    assert not [path for path in files if path.suffix in (".py", ".bin", ".pkl", ".pt")]


def test_manifest_lists_the_shipped_files() -> None:
    manifest = read_manifest()
    for name, size in manifest["file_bytes"].items():
        assert (ASSETS / name).stat().st_size == size, name
    assert manifest["parameters"] > 1_000_000


def test_manifest_says_nano_is_good_enough() -> None:
    models = read_manifest()["measured"]["models"]
    for name in ("as_trained_float32", "8_bit", "4_bit", "3_bit"):
        assert 0.35 <= models[name]["multiple_choice"]["accuracy"] <= 0.75, name
    for figures in models.values():
        interval = figures["multiple_choice"]["interval"]
        assert interval["low"] < figures["multiple_choice"]["accuracy"] < interval["high"]


def test_shipped_model_and_adapter_load_in_mlx_lm() -> None:
    from mlx_lm import load

    model, tokenizer = load(str(SHIPPED), adapter_path=str(ASSETS / "adapter"))
    adapted = [path for path, module in model.named_modules() if hasattr(module, "lora_a")]
    assert adapted
    assert all(path.endswith("mlp.switch_mlp.down_proj") for path in adapted)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    logits = model(mx.array([prompt]))
    assert mx.all(mx.isfinite(logits)).item()
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_mlx_lm_s_loader_scores_nanos_domains_as_nanos_own_tokenizer_does() -> None:
    """Code has line breaks and blanks, which loaders cut in different ways."""
    model, loaded, _ = base_model.load(SHIPPED)
    measure.float_values(model)
    own = load_tokenizer(SHIPPED)
    shown = read_manifest()["measured"]["models"]["8_bit"]["validation_loss"]
    documents = validation_documents(12, RebuildSettings().seed)
    assert any("\n    " in document.answer for document in documents)
    for domain, known in shown.items():
        mine = [document for document in documents if document.domain == domain]
        rows = encode_documents(mine, loaded)
        assert rows == encode_documents(mine, own), domain
        # 12 of the 60 documents behind the manifest's figure: a loss of that size.
        loss = evaluate_mean_loss(lambda tokens: forward(model, tokens), rows)
        assert loss < known + 0.35, (domain, loss, known)


@pytest.mark.parametrize("bits", [2, 5, 6])
def test_every_width_loads_and_holds_the_quantized_shipped_values(
    bits: int, tmp_path: Path
) -> None:
    write_export(SHIPPED, tmp_path / "m", bits)
    model, _, config = base_model.load(tmp_path / "m")
    assert config["quantization"]["bits"] == bits
    gates = [m.bits for p, m in base_model.named_quantizable(model) if p.endswith("mlp.gate")]
    experts = [m for p, m in base_model.named_quantizable(model) if "switch_mlp" in p]
    assert set(gates) == {8}
    assert {m.bits for m in experts} == {bits}
    assert {m.scales.dtype for m in experts} == {mx.bfloat16}
    shipped, _, _ = base_model.load(SHIPPED)
    source = shipped.layers[0].mlp.switch_mlp.down_proj
    weight = mx.dequantize(source.weight, source.scales, source.biases, 64, 8)
    expected = mx.quantize(weight, 64, bits)
    ours = model.layers[0].mlp.switch_mlp.down_proj
    for a, b in zip((ours.weight, ours.scales, ours.biases), expected, strict=True):
        assert mx.array_equal(a, b).item()


def test_the_shipped_width_is_a_copy(tmp_path: Path) -> None:
    write_export(SHIPPED, tmp_path / "m", SHIPPED_BITS)
    for path in SHIPPED.iterdir():
        assert (tmp_path / "m" / path.name).read_bytes() == path.read_bytes()


def test_unquantized_export_holds_the_shipped_values_exactly(tmp_path: Path) -> None:
    write_export(SHIPPED, tmp_path / "m", None)
    assert "quantization" not in json.loads((tmp_path / "m/config.json").read_text())
    shipped, exported = stored_values(SHIPPED), stored_values(tmp_path / "m")
    assert shipped.keys() == exported.keys()
    assert all(np.array_equal(shipped[name], exported[name]) for name in shipped)


def test_exports_are_repeatable_and_mlx_lm_generates_from_them(
    four_bit: Path, tmp_path: Path
) -> None:
    write_export(SHIPPED, tmp_path / "again", 4)
    assert entries(four_bit) == entries(tmp_path / "again")
    assert (four_bit / "model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    from mlx_lm import generate, load

    model, tokenizer = load(str(four_bit))
    asked = [{"role": "user", "content": "I am Ada. Ben is my friend. What is my name?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    assert "Your name is" in generate(model, tokenizer, prompt, max_tokens=12)


def test_an_existing_target_is_refused_without_force(four_bit: Path) -> None:
    before = (four_bit / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(TargetError):
        export(ExportSettings(save_path=four_bit, bits=3))
    assert (four_bit / "model.safetensors").stat().st_mtime_ns == before
    result = export(ExportSettings(save_path=four_bit, bits=4, force=True))
    assert result.data["model_bytes"] == (four_bit / "model.safetensors").stat().st_size


def test_an_unknown_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bits=7"):
        write_export(SHIPPED, tmp_path / "m", 7)
    assert not (tmp_path / "m").exists()


def test_the_cache_is_made_once_and_follows_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "cache"))
    paths = nano_paths(4)
    assert paths.model_path.is_relative_to(tmp_path / "cache")
    stamp = (paths.model_path / "config.json").stat().st_mtime_ns
    result = show(ShowSettings(bits=4))
    info = result.data
    assert info["model_path"] == str(paths.model_path)
    assert (Path(info["adapter_path"]) / "adapter_config.json").is_file()
    assert "store_path" in info
    facts, measured = result.blocks
    assert isinstance(facts, Table)
    assert isinstance(measured, Table)
    assert ("model_path", info["model_path"]) in facts.rows
    four_bits = next(row for row in measured.rows if row[0] == "4 bit")
    known = info["manifest"]["measured"]["models"]["4_bit"]["multiple_choice"]
    bounds = known["interval"]
    assert four_bits[-1] == (known["accuracy"], bounds["low"], bounds["high"])
    assert (paths.model_path / "config.json").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in paths.model_path.parent.iterdir()) == [MARK, "model-4bit"]


def test_a_failed_export_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path))

    def fail(source: Path, directory: Path, bits: int | None) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(exports, "write_export", fail)
    with pytest.raises(OSError, match="disk full"):
        nano_paths(4)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [MARK]


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_an_unwritable_cache_says_what_to_set(tmp_path: Path, monkeypatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TargetError, match="MLXSTACKS_CACHE"):
        nano_paths(4)


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize(
    ("limit", "message"), [("size=200k", "disk is full"), ("nr_inodes=4", "no inodes")]
)
def test_a_full_disk_is_a_target_error(tmp_path: Path, bits: int, limit: str, message: str) -> None:
    """3 bits are written by MLX, 8 are copied."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", limit, "tmpfs") as disk:
        with pytest.raises(TargetError, match=message):
            export(ExportSettings(save_path=disk / "out", bits=bits))
        assert not list(disk.iterdir())
