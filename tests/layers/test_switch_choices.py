"""Choices of routers, heard without changing a bit, in every kind of mixture that mlx-lm has.

Run: pytest tests/layers/test_switch_choices.py
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.layers.switch_choices import (
    chosen_weights,
    find_switches,
    hearing,
    untrained_routers,
)
from mlxstacks.studies.profile.run import count_choices
from tests.tiny_models import llama_config, qwen_moe_config, write_qwen_moe

_COMMON: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
# One of each way in which mlx-lm's blocks hold and call their switch.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _COMMON | {
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "qwen2_moe": _COMMON | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "olmoe": _COMMON | {"num_experts": 4, "num_experts_per_tok": 2},  # flat tokens
    "mixtral": _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phixtral": {  # the other switch class
        "num_vocab": 100, "model_dim": 64, "num_heads": 4, "num_layers": 2, "rotary_dim": 8,
    },
    "llama4": {  # experts, not switch_mlp; one expert a token
        "text_config": _COMMON | {
            "model_type": "llama4_text", "num_hidden_layers": 4,
            "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 64, "attention_bias": False, "attention_chunk_size": 64,
            "use_qk_norm": False, "rope_scaling": None,
        },
    },
}  # fmt: skip


def model_of(kind: str) -> Any:
    mx.random.seed(3)
    model = base_model.build_model({"model_type": kind} | CONFIGS[kind])
    base_model.cast(model, mx.float32)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Qwen3.5's architecture at 4 bits: recurrent and full attention, bfloat16."""
    path = write_qwen_moe(tmp_path_factory.mktemp("moe") / "m", bits=4, num_experts=8)
    return base_model.load(path)[0]


TOKENS = mx.array([[5, 17, 2, 61, 9, 33, 8], [40, 41, 7, 7, 0, 0, 0]])


@pytest.mark.parametrize("kind", [*CONFIGS, "qwen3_5_moe"])
@pytest.mark.parametrize("tokens", [TOKENS, mx.tile(TOKENS, (3, 2))], ids=["unsorted", "sorted"])
def test_logits_are_bit_equal_with_and_without_hearing(
    kind: str, tokens: mx.array, qwen: Any
) -> None:
    model = qwen if kind == "qwen3_5_moe" else model_of(kind)
    before = model(tokens)
    switches = find_switches(model)
    heard: list[tuple[int, mx.array]] = []
    with hearing(switches, lambda place, x, indices: heard.append((place, indices))):
        during = model(tokens)
        mx.eval(during, [indices for _, indices in heard])
    after = model(tokens)
    assert [place for place, _ in heard] == list(range(len(model.layers)))
    assert [switch.layer for switch in switches] == list(range(len(model.layers)))
    for indices in (indices for _, indices in heard):
        assert indices.size == tokens.size * (1 if kind == "llama4" else 2)
        assert int(indices.max().item()) < switches[0].num_experts
    for other in (during, after):
        assert before.dtype == other.dtype
        assert mx.array_equal(before, other)


def test_the_model_is_itself_again_after_an_error(qwen: Any) -> None:
    switches = find_switches(qwen)
    classes = [type(switch.module) for switch in switches]

    def fail(place: int, x: mx.array, indices: mx.array) -> None:
        raise RuntimeError("heard")

    with pytest.raises(RuntimeError, match="heard"), hearing(switches, fail):
        qwen(TOKENS)
    assert [type(switch.module) for switch in switches] == classes


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "mixtral", "qwen3_5_moe"])
def test_counts_depend_on_neither_batches_nor_padding_nor_sorting(kind: str, qwen: Any) -> None:
    model = qwen if kind == "qwen3_5_moe" else model_of(kind)
    if kind == "qwen3_5_moe":
        base_model.dequantize(model)
        base_model.cast(model, mx.float32)
    switches = find_switches(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 90, length).tolist() for length in (3, 40, 17, 1, 25, 38, 9)]
    # 2 x 25 choices: not sorted
    alone = count_choices(model, switches, prompts, batch_size=1, untrained=2)
    together = count_choices(model, switches, prompts, batch_size=7, untrained=2)
    np.testing.assert_array_equal(alone, together)
    assert len({router.tobytes() for router in alone}) == 3
    lengths = np.array([len(prompt) for prompt in prompts])
    # Two choices a token in every layer, and none of the padding.
    np.testing.assert_array_equal(alone.sum(axis=-1), np.tile(2 * lengths[:, None], (3, 1, 2)))


@pytest.mark.parametrize("weights", [False, True])
def test_an_untrained_router_chooses_as_it_would_in_the_model(weights: bool) -> None:
    """In the first layer, whose input no other router has changed."""
    model, prompts = model_of("qwen3_moe"), [[4, 9, 77, 3, 50], [1, 2]]
    first, *_ = switches = find_switches(model)
    block: Any = first.block
    drawn = count_choices(
        model, switches, prompts, batch_size=2, weights=weights, untrained=3, seed=5
    )
    routers = untrained_routers(first, block.gate.weight.shape[1], 3, seed=5)
    scale = mx.std(block.gate.weight).item()
    assert mx.std(routers).item() == pytest.approx(scale, rel=0.1)
    for number in range(3):
        block.gate.weight = routers[:, 4 * number : 4 * (number + 1)].T
        alone = count_choices(model, switches, prompts, batch_size=2, weights=weights)
        np.testing.assert_allclose(alone[0, :, 0], drawn[1 + number, :, 0], rtol=1e-5)


def test_counts_are_those_of_the_router_itself() -> None:
    model = model_of("qwen3_moe")
    switches, prompt = find_switches(model), [4, 9, 77, 3, 50]
    found = count_choices(model, switches, [prompt], batch_size=1)
    inputs: list[mx.array] = []
    with hearing(switches, lambda place, x, indices: inputs.append(x)):
        mx.eval(model(mx.array([prompt])), inputs)
    for place, switch in enumerate(switches):
        block: Any = switch.block
        logits = np.array(block.gate(inputs[place]))[0]
        chosen = np.argsort(-logits, axis=-1)[:, :2]
        expected = np.bincount(chosen.reshape(-1), minlength=4)
        np.testing.assert_array_equal(found[0, 0, place], expected)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "olmoe", "qwen3_5_moe"])
def test_weights_are_those_that_the_block_sums_with(kind: str, qwen: Any) -> None:
    """With the unit vector of its slot for each expert's output, the block returns weights."""
    model = qwen if kind == "qwen3_5_moe" else model_of(kind)
    switch = find_switches(model)[0]
    block: Any = switch.block
    if "shared_expert" in block:
        block.shared_expert = lambda x: mx.zeros_like(x)
    x = mx.random.normal((1, 6, 64 if kind != "qwen3_5_moe" else 128), key=mx.random.key(1))
    told: list[mx.array] = []
    own = type(switch.module)

    def units(module: Any, x: mx.array, indices: mx.array) -> mx.array:
        told.append(chosen_weights(switch, x, indices))
        slots = mx.eye(indices.shape[-1], x.shape[-1])
        return mx.broadcast_to(slots, (*indices.shape, x.shape[-1]))

    switch.module.__class__ = type("Units", (own,), {"__call__": units})
    try:
        made = block(x)
    finally:
        switch.module.__class__ = own
    np.testing.assert_allclose(
        np.array(made.reshape(6, -1)[:, :2]), np.array(told[0].reshape(6, 2)), atol=2e-6
    )


def test_weights_of_an_unknown_router_are_refused() -> None:
    model = model_of("mixtral")
    switches = find_switches(model)
    with pytest.raises(ValueError, match="MixtralSparseMoeBlock are not known here"):
        count_choices(model, switches, [[1, 2]], batch_size=1, weights=True)


def test_weights_of_a_token_sum_to_one_where_they_are_normalised() -> None:
    model = model_of("qwen3_moe")
    switches, prompts = find_switches(model), [[1, 2, 3], [4, 5]]
    found = count_choices(model, switches, prompts, batch_size=2, weights=True)
    np.testing.assert_allclose(found.sum(axis=-1), [[[3, 3], [2, 2]]], rtol=1e-6)


def test_a_dense_model_and_experts_that_are_not_computed_are_refused() -> None:
    with pytest.raises(ValueError, match="no mixture of experts"):
        find_switches(base_model.build_model(llama_config()))
    model = model_of("qwen3_moe")
    model.layers[1].mlp.zero_expert_num = 2
    with pytest.raises(ValueError, match="not computed"):
        find_switches(model)


def test_an_empty_prompt_is_refused(qwen: Any) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        count_choices(qwen, find_switches(qwen), [[1], []], batch_size=1)


def test_switches_of_forty_layers_come_in_the_order_of_layers() -> None:
    """As many as the real model has: by name, layer 10 would come before layer 2."""
    config = qwen_moe_config(num_experts=16)
    config["text_config"] |= {"num_hidden_layers": 40, "full_attention_interval": 4}
    switches = find_switches(base_model.build_model(config))
    assert [switch.layer for switch in switches] == list(range(40))
    assert {switch.num_experts for switch in switches} == {16}
