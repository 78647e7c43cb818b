"""Names of Hugging Face and of mlx-lm, both ways.

Run: pytest tests/files/test_adapter_names.py
"""

from typing import Any

import pytest

from mlxstacks.files.adapter_names import has_language_model, to_hub, to_mlx

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
