"""The chunked recurrence is in effect in every mlx-lm model that uses one, and can be removed.

Run: pytest tests/test_install_gated_delta.py
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.ops import gated_delta
from tests.tiny_models import VOCAB_SIZE, qwen_moe_config

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "head_dim": 16,
    "rope_theta": 10000.0,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_LATENT_ATTENTION = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
_KIMI = {
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "gate_lower_bound": -5.0,
    },
    "mla_use_nope": True,
    "model_max_length": 128,
}

# Three gated-delta layers and one of full attention; by module of mlx_lm.models that calls the
# recurrence.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "model_type": "qwen3_next", "decoder_sparse_step": 1, "mlp_only_layers": [],
        "partial_rotary_factor": 0.25, **_SIZES, **_LINEAR, **_EXPERTS,
    },
    "qwen3_5": {"model_type": "qwen3_5", "text_config": {"model_type": "", **_SIZES, **_LINEAR}},
    "olmo_hybrid": {
        "model_type": "olmo_hybrid", "linear_allow_neg_eigval": True, "attention_bias": False,
        **_SIZES, **_LINEAR,
    },
    "kimi_linear": {
        "model_type": "kimi_linear", **_SIZES, **_EXPERTS, **_LATENT_ATTENTION, **_KIMI,
    },
    "kimi_k3": {
        "model_type": "kimi_k3",
        "text_config": {
            **_SIZES, **_EXPERTS, **_LATENT_ATTENTION, **_KIMI, "activation_situ_beta": 2.0,
        },
    },
    "bailing_moe_v3": {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"],
        "q_lora_rank": 16, "n_group": 1, "topk_group": 1, "layer_group_size": 4,
        **_SIZES, **_EXPERTS, **_LATENT_ATTENTION,
    },
}  # fmt: skip

# qwen3_5_moe takes its layers from qwen3_5.
MODELS = {**CONFIGS, "qwen3_5_moe": qwen_moe_config()}
GATED_DELTA_LAYERS = {**dict.fromkeys(CONFIGS, 3), "qwen3_5_moe": 1}

TOKENS = mx.array(np.random.default_rng(0).integers(0, VOCAB_SIZE, (2, 9)))


def models_directory() -> Path:
    import mlx_lm.models

    return Path(mlx_lm.models.__path__[0])


def theirs() -> Callable[..., Any]:
    from mlx_lm.models import gated_delta as module

    return module.gated_delta_update


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The T of every call of the chunked op."""
    seen: list[int] = []
    op = gated_delta.gated_delta_update

    def counted(q: mx.array, *arrays: Any, **options: Any) -> Any:
        seen.append(q.shape[1])
        return op(q, *arrays, **options)

    monkeypatch.setattr(gated_delta, "gated_delta_update", counted)
    return seen


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    """And no compiled kernels for mlx-lm's loop: each shape would be built with a C++ compiler."""
    original = theirs()
    mx.disable_compile()
    yield
    mx.enable_compile()
    assert theirs() is original


def build(name: str) -> nn.Module:
    """A model with float32 weights from a seed of its own."""
    model = base_model.build_model(MODELS[name])
    random = np.random.default_rng(1)
    weights = [
        (path, mx.array(random.standard_normal(value.shape) * max(value.shape[-1], 4) ** -0.5))
        for path, value in tree_flatten(model.parameters())
    ]
    model.load_weights([(path, value.astype(mx.float32)) for path, value in weights])
    return model


def loss(model: nn.Module) -> mx.array:
    logits = model(TOKENS[:, :-1])
    return nn.losses.cross_entropy(logits, TOKENS[:, 1:]).mean()


def test_every_module_that_calls_the_recurrence_is_tested_here() -> None:
    files = [file for file in models_directory().glob("*.py") if file.stem != "gated_delta"]
    found = {file.stem for file in files if re.search(r"\bgated_delta_update\b", file.read_text())}
    assert found == CONFIGS.keys(), "mlx-lm has another user of the recurrence: add a config"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_training_calls_the_chunked_op_in_every_layer(name: str, calls: list[int]) -> None:
    model = build(name).train()
    with base_model.gated_delta_installed():
        installed = loss(model)
        assert calls == [8] * GATED_DELTA_LAYERS[name]
    removed = loss(model)
    assert len(calls) == GATED_DELTA_LAYERS[name], "still in effect after its removal"
    np.testing.assert_allclose(installed.item(), removed.item(), rtol=1e-5)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_inference_stays_with_mlx_lm(name: str, calls: list[int]) -> None:
    model = build(name).eval()
    plain = model(TOKENS)
    with base_model.gated_delta_installed():
        installed = model(TOKENS)
    assert not calls
    assert mx.array_equal(plain, installed)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_k3", "olmo_hybrid"])
def test_training_gradients_equal_those_without_it(name: str, calls: list[int]) -> None:
    model = build(name).train()
    value, gradients = nn.value_and_grad(model, loss)(model)
    mx.eval(value, gradients)
    with base_model.gated_delta_installed():
        again, chunked = nn.value_and_grad(model, loss)(model)
        mx.eval(again, chunked)
    assert calls
    np.testing.assert_allclose(again.item(), value.item(), rtol=1e-5)
    largest = max(float(mx.abs(x).max()) for _, x in tree_flatten(gradients))
    for (path, x), (_, y) in zip(tree_flatten(gradients), tree_flatten(chunked), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-3, atol=1e-5 * largest, err_msg=path)


def test_every_name_is_rebound_and_restored() -> None:
    names = [f"mlx_lm.models.{name}" for name in ("gated_delta", *CONFIGS)]
    for name in CONFIGS:
        base_model.build_model(CONFIGS[name])
    original = theirs()
    remove = base_model.install_gated_delta()
    replaced = {sys.modules[name].gated_delta_update for name in names}
    remove()
    assert len(replaced) == 1
    assert original not in replaced
    assert {sys.modules[name].gated_delta_update for name in names} == {original}


def test_models_imported_after_the_install_are_covered_and_restored() -> None:
    """In a fresh process, where no model is imported yet."""
    code = """
import sys
from mlxstacks import base_model
remove = base_model.install_gated_delta()
assert "mlx_lm.models.kimi_linear" not in sys.modules
from mlx_lm.models import gated_delta, kimi_linear
assert kimi_linear.gated_delta_update is gated_delta.gated_delta_update
assert hasattr(kimi_linear.gated_delta_update, "__wrapped__")
remove()
from mlx_lm.models import olmo_hybrid
for module in (gated_delta, kimi_linear, olmo_hybrid):
    assert not hasattr(module.gated_delta_update, "__wrapped__"), module
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installs_nest_and_removers_work_once() -> None:
    original = theirs()
    first = base_model.install_gated_delta()
    replacement = theirs()
    second = base_model.install_gated_delta()
    assert theirs() is replacement
    second()
    second()
    assert theirs() is replacement
    with base_model.gated_delta_installed():
        assert theirs() is replacement
    assert theirs() is replacement
    first()
    assert theirs() is original
    first()
    assert theirs() is original


def test_an_error_inside_the_block_removes_it_too() -> None:
    original = theirs()
    with pytest.raises(AssertionError), base_model.gated_delta_installed():
        assert theirs() is original
    assert theirs() is original


def test_other_threads_may_import_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Name(str):
        def startswith(self, *arguments: Any) -> bool:  # a name that is asked about imports another
            sys.modules[f"imported.{len(sys.modules)}"] = re
            return False

    monkeypatch.setattr(sys, "modules", {Name("one"): re, **sys.modules})
    with base_model.gated_delta_installed():
        pass
