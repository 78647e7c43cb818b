"""Names of Hugging Face and of mlx-lm, both ways.

Run: pytest tests/files/test_adapter_names.py
"""

from typing import Any

import pytest

from mlxstacks.files.adapter_names import has_language_model, in_model, to_hub, to_mlx

NAMES = [
    (
        "language_model.model.layers.3.linear_attn.in_proj_qkv",
        "model.layers.3.linear_attn.in_proj_qkv",
    ),
    (
        "language_model.model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.mlp.shared_expert_gate",
    ),
    ("language_model.model.embed_tokens", "model.embed_tokens"),
    ("language_model.lm_head", "lm_head"),
    ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
    ("lm_head", "lm_head"),
]


@pytest.mark.parametrize(("mlx", "hub"), NAMES)
def test_names_go_both_ways(mlx: str, hub: str) -> None:
    assert to_hub(mlx) == hub
    is_language_model = mlx.startswith("language_model.")
    assert to_mlx(hub, is_language_model) == mlx
    assert to_mlx(to_hub(mlx, whole_model=True), is_language_model) == mlx


MIXTRAL = [
    f"model.layers.{layer}.{name}"
    for layer in (1, 11)
    for name in (
        "self_attn.q_proj", "block_sparse_moe.gate", "block_sparse_moe.switch_mlp.up_proj",
        "block_sparse_moe.shared.up_proj", "block_sparse_moe.shared.down_proj",
        "other.down_proj",
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "is_switch", "module"),
    [
        ("model.layers.1.mlp.switch_mlp.up_proj", True, "block_sparse_moe.switch_mlp.up_proj"),
        ("model.layers.1.mlp.gate", False, "block_sparse_moe.gate"),
        ("language_model.model.layers.1.self_attn.q_proj", False, "self_attn.q_proj"),
        ("model.layers.1.mlp.up_proj", False, "block_sparse_moe.shared.up_proj"),
        ("model.layers.1.mlp.down_proj", False, None),  # two could be meant
        ("model.layers.1.mlp.switch_mlp.down_proj", True, None),
        ("model.layers.2.mlp.gate", False, None),
        ("lm_head", False, None),
    ],
)
def test_a_name_is_the_models_own_where_only_one_can_be_meant(
    path: str, is_switch: bool, module: str | None
) -> None:
    wanted = path if module is None else f"model.layers.1.{module}"
    assert in_model(path, is_switch, MIXTRAL) == wanted


def test_only_granite_keeps_the_old_name_of_its_block() -> None:
    name = "model.layers.0.block_sparse_moe.gate"
    assert to_hub(name) == to_hub(name, model_type="mixtral") == "model.layers.0.mlp.gate"
    assert to_hub(name, model_type="granitemoe") == name


@pytest.mark.parametrize(
    ("paths", "config", "expected"),
    [
        (["model.layers.0.self_attn.q_proj"], {}, False),
        (["model.language_model.layers.0.self_attn.q_proj"], {}, True),
        (["model.layers.0.linear_attn.in_proj_qkv"], {}, True),
        (["model.layers.0.linear_attn.in_proj_qkvz"], {}, False),
        (["model.layers.0.mlp.gate"], {"base_model_name_or_path": "Qwen/Qwen3.5-35B-A3B"}, True),
        (["model.layers.0.mlp.gate"], {"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"}, False),
        (["lm_head"], {"auto_mapping": {"base_model_class": "Qwen3_5MoeForCausalLM"}}, True),
    ],
)
def test_family_is_known_by_evidence(
    paths: list[str], config: dict[str, Any], expected: bool
) -> None:
    assert has_language_model(paths, config) is expected
