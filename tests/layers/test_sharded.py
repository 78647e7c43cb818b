"""A model on two processes, with adapters and stacks, says what it says on one.

Run: pytest tests/layers/test_sharded.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.in_memory import attach_adapters
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.sharded import shard
from mlxstacks.processes import current_group
from tests.groups import in_group, needs_group
from tests.tiny_models import qwen_moe_config, random_adapter, write_llama, write_model


def main() -> None:
    """MODEL ADAPTER: the largest difference of logits, printed, and their size."""
    model_path, adapter = Path(sys.argv[1]), sys.argv[2]
    model, _, _ = base_model.load(model_path, lazy=True)
    settings = FuseSettings(model=str(model_path), adapter_path=(adapter,))
    attach_adapters(model, open_checkpoint(model_path), settings, None)
    tokens = mx.array([[1, 2, 3, 4, 5, 6, 7]])
    whole = model(tokens).astype(mx.float32)
    mx.eval(whole)
    group = current_group()
    assert group is not None
    shard(model, group)
    parts = model(tokens).astype(mx.float32)
    print(json.dumps([mx.abs(whole - parts).max().item(), mx.abs(whole).max().item()]))


if __name__ == "__main__":
    main()

ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LINEAR = ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"]
EXPERTS = ["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj", "mlp.switch_mlp.down_proj"]


@needs_group
@pytest.mark.parametrize(
    ("kind", "bits", "count"), [("qwen", 4, 2), ("qwen", None, 4), ("llama", 4, 2)]
)
def test_logits_are_those_of_one_process(
    tmp_path: Path, kind: str, bits: int | None, count: int
) -> None:
    """Of four processes two have the same head of keys and values."""
    if kind == "qwen":
        config = qwen_moe_config()
        config["text_config"] |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
        model = write_model(
            tmp_path / "model", config, bits=bits, group_size=32, shards=1, dtype="float32"
        )
        keys = [*ATTENTION, *LINEAR, *EXPERTS]
    else:
        model = write_llama(tmp_path / "model", bits=bits, dtype="float32")
        keys = [*ATTENTION, "mlp.gate_proj", "mlp.down_proj"]
    adapter = random_adapter(model, keys=keys, std=0.05)
    arguments = str(model), str(adapter)
    codes = in_group(tmp_path, *arguments, module=__name__, count=count)
    assert not any(codes), (tmp_path / "0").read_text()
    difference, size = json.loads((tmp_path / "1").read_text().splitlines()[-1])
    assert difference < 1e-4 * size


class _Half:
    """Stands in for a group of two."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def test_a_model_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    group: Any = _Half()
    with pytest.raises(InputError, match=r"cannot split a model over processes; .*llama.*qwen3_5"):
        shard(nn.Linear(2, 2), group)
    path = write_llama(tmp_path / "model", bits=None)
    model, _, _ = base_model.load(path, lazy=True)
    model.model.layers[0].self_attn.q_proj = nn.Linear(128, 127)
    with pytest.raises(InputError, match=r"over 2 processes .*one that divides its heads"):
        shard(model, group)
