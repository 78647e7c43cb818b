"""Shipped configs: known by name, and their published sizes recomputed. Run: pytest tests/files"""

import json
import math
from pathlib import Path

import pytest
from mlx.utils import tree_flatten

from mlxstacks.errors import CheckpointError
from mlxstacks.files.hub import has_shape_of, shipped_config, shipped_names
from mlxstacks.guard.build import lazy_model, read_config
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.targets import find_targets, stack_size
from mlxstacks.nano.exports import nano_paths

QWEN = Path(__file__).resolve().parents[2] / "mlxstacks/assets/configs/qwen3.5-35b-a3b.json"


@pytest.mark.parametrize(
    ("model", "name", "bits"),
    [
        ("qwen3.5-35b-a3b-3bit", "qwen3.5-35b-a3b", 3),
        ("mlx-community/Qwen3.5-35B-A3B-4bit", "qwen3.5-35b-a3b", 4),
        ("models/qwen3.5-35b-a3b/", "qwen3.5-35b-a3b", None),
        ("stories260K", "stories260k", None),
    ],
)
def test_a_model_is_known_by_the_last_part_of_its_name(
    model: str, name: str, bits: int | None
) -> None:
    found = shipped_config(model)
    assert found is not None
    assert (found.name, found.bits) == (name, bits)
    assert found.config.get("quantization", {}).get("bits") == bits
    assert "not here" in found.words


@pytest.mark.parametrize(
    "model", ["", "qwen", "qwen3.5-35b-a3b-7bit", "my-qwen3.5-35b-a3b-3bit", "3bit", "x/../y", "/"]
)
def test_other_names_are_not_known(model: str) -> None:
    assert shipped_config(model) is None


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # embedding (the head too), 48 x (attention, MLP, norms), last norm
        (
            "gemma-3-12b",
            262_208 * 3840
            + 48 * (2 * 3840 * (4096 + 2048) + 3 * 3840 * 15_360 + 4 * 3840 + 2 * 256)
            + 3840,
        ),
        ("tinyllama-1.1b", 1_100_048_384),
        ("stories260k", 260_032),
        # 256 experts of 3 x 2,048 x 512 in 40 layers are 32.2e9 of them
        ("qwen3.5-35b-a3b", 34_660_610_688),
    ],
)
def test_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    config, where = read_config(name)
    assert where.startswith(f"the shipped config {name}")
    found = tree_flatten(lazy_model(config).parameters())
    assert sum(math.prod(array.shape) for _, array in found) == parameters


@pytest.mark.parametrize(
    ("name", "parameters"), [("gemma-3-12b-4bit", 276_725_760), ("tinyllama-1.1b-4bit", 53_616_640)]
)
def test_stacks_have_the_published_size(name: str, parameters: int) -> None:
    """Brainstacks: 276.7 M on Gemma 3 12B, 53.6 M on TinyLlama, four experts of rank 16."""
    model = lazy_model(read_config(name)[0])
    size = stack_size(find_targets(model), StackSettings(rank=16, num_experts=4))
    assert size.parameters == parameters


def test_a_model_is_known_by_its_sizes_and_bits() -> None:
    published = "qwen3.5-35b-a3b-3bit"
    config = read_config(published)[0]
    assert has_shape_of(config, published)
    assert not has_shape_of(config, "qwen3.5-35b-a3b-4bit")
    assert not has_shape_of(config, "gemma-3-12b-4bit")
    for name in ("num_hidden_layers", "num_experts"):
        other = {**config, "text_config": {**config["text_config"], name: 7}}
        assert not has_shape_of(other, published)
    # What a converter pads or leaves to the class's defaults is no other model.
    text = {k: v for k, v in config["text_config"].items() if k != "head_dim"}
    assert has_shape_of({**config, "text_config": {**text, "vocab_size": 1}}, published)
    assert not has_shape_of({"quantization": {"bits": 3}}, published)
    assert not has_shape_of(
        json.loads((nano_paths(3).model_path / "config.json").read_text()), published
    )
    with pytest.raises(ValueError, match="shipped are"):
        has_shape_of(config, "gpt-2")


def test_a_directory_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(QWEN.read_text())
    (tmp_path / "qwen3.5-35b-a3b").mkdir()
    (tmp_path / "qwen3.5-35b-a3b" / "config.json").write_text(json.dumps(config | {"mine": True}))
    monkeypatch.chdir(tmp_path)
    found, where = read_config("qwen3.5-35b-a3b")
    assert found["mine"] is True
    assert where.endswith("config.json")


def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=", ".join(shipped_names())):
        read_config("nobody/no-such-model")
