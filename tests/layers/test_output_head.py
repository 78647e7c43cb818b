"""The output head of every kind of model: found, proven to the bit, left out and put back; where it
is more than a projection, a reason.

Run: pytest tests/layers/test_output_head.py
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from mlxstacks import base_model
from mlxstacks.layers.attach import attach_lora
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.layers.settings import LoRASettings, TargetSettings
from mlxstacks.layers.targets import find_targets
from tests.tiny_models import VOCAB_SIZE, llama_config, qwen_moe_config

TOKENS = mx.array([[5, 3, 8, 1, 9, 2], [1, 2, 3, 4, 5, 6]])

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
GEMMA2 = SMALL | {"model_type": "gemma2", "head_dim": 32}
COHERE = SMALL | {"model_type": "cohere", "logit_scale": 0.0625}
MINICPM = SMALL | {
    "model_type": "minicpm", "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_ctx": 64, "n_embd": 64, "n_head": 2, "n_layer": 2, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "vocab_size": VOCAB_SIZE,
}  # fmt: skip


def build(config: dict[str, Any], bits: int | None = None, dtype: mx.Dtype = mx.float32) -> Any:
    """A frozen model in training mode, weights from a fixed key."""
    model = base_model.build_model(config)
    key = mx.random.key(1)

    def draw(path: str, value: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        return (0.2 * mx.random.normal(value.shape, key=now)).astype(dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    if bits is not None:
        base_model.quantize(model, config, bits)
    model.freeze()
    model.train()
    return model


# Builder, the head's path, whether it is an embedding.
HEADS: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "hybrid": (lambda: build(qwen_moe_config(64)), "language_model.lm_head", False),
    "hybrid tied": (
        lambda: build(qwen_moe_config(64, tied=True)), "language_model.model.embed_tokens", True,
    ),
    "hybrid 4-bit": (lambda: build(qwen_moe_config(64), 4), "language_model.lm_head", False),
    "hybrid tied 4-bit": (
        lambda: build(qwen_moe_config(64, tied=True), 4), "language_model.model.embed_tokens", True,
    ),
    "dense bf16": (lambda: build(llama_config(64), None, mx.bfloat16), "lm_head", False),
    "dense tied": (lambda: build(llama_config(64, tied=True)), "model.embed_tokens", True),
    "scaled before the head": (lambda: build(MINICPM), "lm_head", False),
    "other names": (lambda: build(GPT2), "model.wte", True),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_head_of_hidden_states_is_the_logits_to_the_bit(name: str) -> None:
    make, path, tied = HEADS[name]
    model = make()
    before = [type(module) for module in model.modules()]
    head, note = find_output_head(model)
    assert head is not None, note
    assert (head.path, head.tied, note) == (path, tied, "")
    assert head.vocabulary_size == VOCAB_SIZE
    hidden = head.hidden_states(model, TOKENS)
    assert hidden.shape == (2, 6, 64)
    assert mx.array_equal(head(hidden), model(TOKENS)).item()
    assert [type(module) for module in model.modules()] == before
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GEMMA2, "what model.embed_tokens makes is changed"),
        (COHERE, "what model.embed_tokens makes is changed"),
        (MINICPM | {"tie_word_embeddings": True}, "no plain projection"),
    ],
    ids=["softcap", "scale", "matmul"],
)
def test_what_follows_the_head_is_noticed(config: dict[str, Any], words: str) -> None:
    head, note = find_output_head(build(config))
    assert head is None
    assert words in note
    assert note.startswith("The loss takes the logits of all tokens at once: ")


def test_a_head_that_trains_is_left_whole() -> None:
    model = build(llama_config(64))
    model.lm_head.unfreeze()
    head, note = find_output_head(model)
    assert head is None
    assert "lm_head is trained" in note


def test_an_adapted_head_is_left_whole() -> None:
    model = build(llama_config(64))
    targets = find_targets(model, TargetSettings(projections=("q_proj",)))
    attach_lora(model, targets, LoRASettings(rank=2), mx.random.key(0))
    assert find_output_head(model)[0] is not None
    from mlx_lm.tuner.lora import LoRALinear

    model.lm_head = LoRALinear.from_base(model.lm_head)
    head, note = find_output_head(model)
    assert head is None
    assert "what lm_head.linear makes is changed" in note


class Odd(nn.Module):
    """A model whose last steps can be chosen."""

    def __init__(self, finish: Callable[["Odd", mx.array], Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 8)
        self.out = nn.Linear(8, VOCAB_SIZE)
        self._finish = finish
        self.freeze()

    def __call__(self, tokens: mx.array) -> Any:
        return self._finish(self, self.embed(tokens))


def test_odd_models_are_left_whole() -> None:
    def twice(model: Odd, x: mx.array) -> mx.array:
        model.out(x)
        return model.out(mx.tanh(x))

    reasons = {
        "called 2 times": twice,
        "returns a tuple": lambda model, x: (model.out(x), None),
        "for 4 tokens": lambda model, x: model.out(x[:, -1:]),
        "what out makes is changed": lambda model, x: mx.clip(model.out(x), -50, 50),
        "no plain projection": lambda model, x: x[..., :2],
    }
    for words, finish in reasons.items():
        head, note = find_output_head(Odd(finish))
        assert head is None
        assert words in note


def test_a_model_that_asks_what_its_head_is_fails_the_proof() -> None:
    """Only numbers tell: the hidden states change once the head is left out."""

    def finish(model: Odd, x: mx.array) -> mx.array:
        return model.out(x if "passed_on" not in str(type(model.out).__call__) else 2 * x)

    model = Odd(finish)
    head, note = find_output_head(model)
    assert head is None
    assert "makes other logits" in note
    assert find_output_head(model, prove=False)[0] is not None


def test_nothing_is_evaluated_without_proof() -> None:
    model = base_model.build_model(llama_config(64))
    model.freeze()
    huge = mx.zeros((200_000, 64))
    model.lm_head.weight = huge
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    head, _ = find_output_head(model, prove=False)
    assert head is not None
    assert mx.get_peak_memory() - before < huge.nbytes / 10


def test_the_model_is_itself_after_an_exception() -> None:
    model = build(llama_config(64))
    head, _ = find_output_head(model)
    assert head is not None
    before = [type(module) for module in model.modules()]

    def broken(tokens: mx.array) -> mx.array:
        model(tokens)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        head.hidden_states(broken, TOKENS)
    model.model.norm = None
    with pytest.raises(TypeError):
        find_output_head(model)
    model.model.norm = nn.RMSNorm(64)
    assert [type(m) for m in model.modules()] == before
    assert all(module.training for module in model.modules())


def test_a_call_that_does_more_with_the_output_is_an_error() -> None:
    model = build(llama_config(64))
    head, _ = find_output_head(model)
    assert head is not None
    with pytest.raises(ValueError, match="does not return what lm_head makes"):
        head.hidden_states(lambda tokens: 2 * model(tokens), TOKENS)
    with pytest.raises(ValueError, match="calls it 2 times"):
        head.hidden_states(lambda tokens: (model(tokens), model(tokens))[1], TOKENS)
    hidden, extra = head.hidden_states(lambda tokens: (model(tokens), "more"), TOKENS)
    assert hidden.shape == (2, 6, 64)
    assert extra == "more"


def test_tokens_that_do_not_count_are_left_out() -> None:
    head = OutputHead(nn.Linear(8, 11), "out", tied=False)
    hidden = mx.random.normal((2, 3, 8), key=mx.random.key(0))
    targets = mx.array([[1, 2, 3], [4, 5, 6]])
    weights = mx.array([[0.0, 0.5, 0.25], [0.0, 0.0, 2.0]])
    counted = mx.array([1, 2, 4, 5])
    whole, of_hidden = mx.value_and_grad(head.cross_entropy_sum)(hidden, targets, weights)
    some, of_some = mx.value_and_grad(head.cross_entropy_sum)(hidden, targets, weights, counted)
    assert mx.allclose(whole, some, rtol=1e-6).item()
    assert mx.allclose(of_hidden, of_some, rtol=1e-5, atol=1e-7).item()
    assert dict(tree_flatten(head.module.parameters())).keys() == {"weight", "bias"}
