"""The CPU forward pass against mlx-lm's own. Run: pytest tests/nano/test_forward.py"""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.training.initial import set_initial_weights
from tools.nano.forward import chunked_gated_delta, forward, forward_with_balance
from tools.nano.settings import NanoShape

SHAPE = NanoShape(
    hidden_size=64, num_hidden_layers=3, num_experts=4, moe_intermediate_size=64, vocab_size=64,
    shared_expert_intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    model = base_model.build_model(SHAPE.config())
    set_initial_weights(model, 5)
    return model.eval()


def tokens_of(batch: int, length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(0, 64, (batch, length)))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 5), (3, 16), (2, 33), (1, 70)])
def test_logits_equal_mlx_lm(model, batch: int, length: int) -> None:
    tokens = tokens_of(batch, length)
    expected, got = np.array(model(tokens)), np.array(forward(model, tokens))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_logits_equal_mlx_lm_with_lora_on_experts() -> None:
    model = base_model.build_model(SHAPE.config())
    set_initial_weights(model, 5)
    plain = np.array(forward(model, tokens_of(2, 12)))
    base_model.attach_lora(model, 3, rank=2, scale=3.0, keys=["mlp.switch_mlp.down_proj"])
    rng = np.random.default_rng(0)
    lora = [(k, mx.array(rng.normal(size=v.shape).astype(np.float32) * 0.1))
            for k, v in tree_flatten(model.trainable_parameters())]  # fmt: skip
    model.load_weights(lora, strict=False)
    tokens = tokens_of(2, 12)
    changed = np.array(forward(model, tokens))
    np.testing.assert_allclose(changed, np.array(model(tokens)), atol=2e-4)
    assert np.abs(changed - plain).max() > 0.01


def test_gradients_equal_mlx_lm(model) -> None:
    import mlx.nn as nn

    tokens = tokens_of(2, 20)

    def loss(run):
        def value(model):
            return mx.mean(mx.square(run(model, tokens)))

        return value

    _, ours = nn.value_and_grad(model, loss(forward))(model)
    _, theirs = nn.value_and_grad(model, loss(lambda m, t: m(t)))(model)
    for (name, a), (_, b) in zip(tree_flatten(ours), tree_flatten(theirs), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-4, err_msg=name)


@pytest.mark.parametrize("length", [1, 7, 16, 40])
@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_chunks_equal_the_recurrence(length: int, chunk: int) -> None:
    rng = np.random.default_rng(length)
    q, k = (rng.normal(size=(2, length, 2, 8)) for _ in "qk")
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(2, length, 4, 6))
    log_decay, beta = -rng.exponential(size=(2, length, 4)), rng.uniform(size=(2, length, 4))
    as_mx = [mx.array(x.astype(np.float32)) for x in (q, k, v, log_decay, beta)]
    got = np.array(chunked_gated_delta(as_mx[0], as_mx[1], as_mx[2], as_mx[3], as_mx[4], chunk))
    expected = np.zeros_like(v)
    for b, h in np.ndindex(2, 4):
        state = np.zeros((6, 8))
        for t in range(length):
            state = state * np.exp(log_decay[b, t, h])
            error = v[b, t, h] - state @ k[b, t, h // 2]
            state = state + beta[b, t, h] * np.outer(error, k[b, t, h // 2])
            expected[b, t, h] = state @ q[b, t, h // 2]
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_balance_is_one_when_experts_share_alike_and_grows_when_one_takes_all(model) -> None:
    _, balance = forward_with_balance(model, tokens_of(4, 32))
    assert 0.9 < balance.item() < 1.6
    skewed = base_model.build_model(SHAPE.config())
    set_initial_weights(skewed, 5)
    for layer in skewed.layers:
        layer.mlp.gate.weight = mx.concatenate(
            [layer.mlp.gate.weight[:1] * 50, layer.mlp.gate.weight[1:]]
        )
    _, worse = forward_with_balance(skewed, tokens_of(4, 32))
    assert worse.item() > balance.item()


def test_initial_weights_depend_on_the_seed_alone() -> None:
    def drawn(seed: int) -> dict[str, bytes]:
        model = base_model.build_model(SHAPE.config())
        set_initial_weights(model, seed)
        return {k: np.array(v).tobytes() for k, v in tree_flatten(model.parameters())}

    mx.random.seed(1)
    first = drawn(0)
    mx.random.seed(2)
    assert first == drawn(0) != drawn(1)
