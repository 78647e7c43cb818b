"""Names of Hugging Face and of mlx-lm, both ways.

Run: pytest tests/files/test_adapter_names.py
"""

from typing import Any

import pytest

from mlxstacks.files.peft_layout import has_language_model, in_model, to_hub, to_mlx

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


LAYER = (
    "self_attn.q_proj", "self_attn.o_proj", "linear_attn.out_proj", "mlp.shared_expert.gate_proj",
    "mlp.switch_mlp.up_proj", "mlp.gate",
)  # fmt: skip
TEXT = [f"model.layers.{layer}.{name}" for layer in (1, 11) for name in LAYER]
WHOLE = [f"language_model.{name}" for name in (*TEXT, "model.embed_tokens", "lm_head")]
NESTED = [f"model.language_model.layers.1.{name}" for name in LAYER]
MIXTRAL = [name.replace(".mlp.", ".block_sparse_moe.") for name in TEXT]


@pytest.mark.parametrize(
    ("path", "modules", "module"),
    [
        ("model.layers.1.mlp.switch_mlp.up_proj", MIXTRAL, "block_sparse_moe.switch_mlp.up_proj"),
        ("model.layers.1.mlp.gate", MIXTRAL, "block_sparse_moe.gate"),
        ("model.layers.11.block_sparse_moe.gate", TEXT, "model.layers.11.mlp.gate"),
        ("language_model.model.layers.1.self_attn.q_proj", TEXT, "self_attn.q_proj"),
        ("model.language_model.layers.1.self_attn.q_proj", TEXT, "self_attn.q_proj"),
        ("layers.1.self_attn.q_proj", TEXT, "self_attn.q_proj"),
        ("model.layers.11.mlp.gate", WHOLE, "language_model.model.layers.11.mlp.gate"),
        ("model.language_model.layers.1.mlp.gate", WHOLE, "language_model.model.layers.1.mlp.gate"),
        ("model.embed_tokens", WHOLE, "language_model.model.embed_tokens"),
        ("lm_head", WHOLE, "language_model.lm_head"),
        ("model.layers.1.mlp.gate", NESTED, "model.language_model.layers.1.mlp.gate"),
        ("model.layers.1.mlp.switch_mlp.up_proj", ["model.layers.1.mlp.experts.switch_mlp.up_proj"],
         "mlp.experts.switch_mlp.up_proj"),
        ("mtp.layers.1.mlp.gate", [*TEXT, "mtp.layers.1.mlp.gate"], "mtp.layers.1.mlp.gate"),
    ],
)  # fmt: skip
def test_a_name_of_another_version_is_the_models_own(
    path: str, modules: list[str], module: str
) -> None:
    (found,) = in_model([path], modules)
    assert found in modules
    assert found in (module, f"model.layers.1.{module}")


@pytest.mark.parametrize("modules", [TEXT, WHOLE, NESTED, MIXTRAL])
@pytest.mark.parametrize(
    "path",
    [
        "vision_tower.encoder.layers.1.self_attn.o_proj",
        "model.vision_tower.encoder.layers.1.self_attn.o_proj",
        "audio_tower.layers.1.self_attn.o_proj",
        "mtp.layers.1.self_attn.o_proj",
        "model.mtp.layers.1.mlp.switch_mlp.up_proj",
        "model.layers.1.cross_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.self_attn.out_proj",
        "model.layers.1.feed_forward.switch_mlp.up_proj",
        "model.layers.2.mlp.gate",
        "model.decoder.layers.1.self_attn.q_proj",
    ],
)
def test_a_name_of_another_part_is_none_of_the_text_models(path: str, modules: list[str]) -> None:
    assert in_model([path], modules) == [path]


def test_a_name_that_two_modules_have_is_neither() -> None:
    both = ["model.layers.1.mlp.gate", "model.layers.1.block_sparse_moe.gate"]
    assert in_model(["layers.1.mlp.gate", both[1]], both) == ["layers.1.mlp.gate", both[1]]


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
