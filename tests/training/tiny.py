"""Models small enough to train in a test, and batches for them."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.data import Batch
from mlxstacks.layers.attach import attach_lora
from mlxstacks.layers.settings import LoRASettings, TargetSettings
from mlxstacks.layers.targets import find_targets
from mlxstacks.training.loop import trainable_weights
from tests.tiny_models import VOCAB_SIZE, qwen_moe_config

VOCAB = 11


class TinyModel(nn.Module):
    """An embedding and a linear layer: a bigram model of a few hundred weights."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.out = nn.Linear(8, VOCAB)
        self.embed.weight = mx.array(rng.normal(size=(VOCAB, 8)).astype(np.float32) * 0.1)
        self.out.weight = mx.array(rng.normal(size=(VOCAB, 8)).astype(np.float32) * 0.1)
        self.out.bias = mx.zeros(VOCAB)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.out(self.embed(tokens))


def batch_at(step: int) -> Batch:
    """Four rows of six tokens that count upwards."""
    rng = np.random.default_rng(step)
    tokens = (rng.integers(0, VOCAB, (4, 1)) + np.arange(6)) % VOCAB
    return Batch(tokens.astype(np.int32), np.ones((4, 6), np.float32))


def batches_at(step: int) -> list[Batch]:
    return [batch_at(step)]


def weights_of(model: nn.Module) -> dict[str, bytes]:
    """The trainable weights, to be compared to the bit."""
    return {name: np.array(value).tobytes() for name, value in trainable_weights(model).items()}


def hybrid_model(layers: int = 2, seed: int = 0) -> nn.Module:
    """A `qwen3_5_moe` in float32: every second layer is gated-delta, every other one attention."""
    config = qwen_moe_config(hidden_size=64)
    config["text_config"] |= {"num_hidden_layers": layers, "num_attention_heads": 2}
    config["text_config"] |= {"num_key_value_heads": 1, "linear_num_key_heads": 1}
    config["text_config"] |= {"linear_num_value_heads": 2, "linear_key_head_dim": 16}
    config["text_config"] |= {"linear_value_head_dim": 16}
    model = base_model.build_model(config)
    rng = np.random.default_rng(seed)
    drawn = []
    for name, value in sorted(tree_flatten(model.parameters())):
        values = rng.normal(0, value.shape[-1] ** -0.5, value.shape)
        if value.ndim == 1:
            values = 1 + 0.1 * values
        drawn.append((name, mx.array(values.astype(np.float32))))
    model.load_weights(drawn)
    mx.eval(model.parameters())
    return model


def with_lora(
    model: nn.Module, layers: tuple[int, ...] | None = None, dropout: float = 0.0, std: float = 0.05
) -> nn.Module:
    """LoRA on the usual projections, with a lora_b that is not zero, so that all of it matters."""
    targets = find_targets(model, TargetSettings(layers=layers))
    attach_lora(model, targets, LoRASettings(rank=2, dropout=dropout), mx.random.key(0))
    rng = np.random.default_rng(1)
    drawn = [
        (name, mx.array(rng.normal(0, std, value.shape).astype(np.float32)))
        for name, value in sorted(trainable_weights(model).items())
        if name.endswith("lora_b")
    ]
    model.load_weights(drawn, strict=False)
    return model


def random_tokens(count: int, length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB_SIZE, (count, length)).astype(np.int32)
