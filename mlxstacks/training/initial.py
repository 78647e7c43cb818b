"""Starting weights of a decoder: drawn from a seed by name order, the same on every machine."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

EMBEDDING_STD = 0.05
# Time constants of the recurrence at the start: from a few tokens to about a hundred.
DECAY_RATE_RANGE = (1.0, 4.0)
TIME_STEP_RANGE = (0.003, 0.1)


def set_initial_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter of `model` in place, float32.

    Norms start at 1; matrices are normal with deviation 1/sqrt(inputs); projections into the
    residual stream are smaller by sqrt(2 * layers), so that the stream starts with about the size
    of the embeddings.
    """
    rng = np.random.default_rng(seed)
    parameters = sorted(tree_flatten(model.parameters()))
    depth = len(model.layers)
    weights = [(name, mx.array(_draw(name, value.shape, depth, rng))) for name, value in parameters]
    model.load_weights(weights)


def _draw(name: str, shape: tuple[int, ...], depth: int, rng: np.random.Generator) -> np.ndarray:
    module, _, leaf = name.rpartition(".")
    if leaf == "A_log":
        values = np.log(rng.uniform(*DECAY_RATE_RANGE, shape))
    elif leaf == "dt_bias":
        shortest, longest = (math.log(step) for step in TIME_STEP_RANGE)
        steps = np.exp(rng.uniform(shortest, longest, shape))
        values = np.log(np.expm1(steps))
    elif "norm" in module.rpartition(".")[2]:
        values = np.ones(shape)
    elif module.endswith("embed_tokens"):
        values = rng.normal(0.0, EMBEDDING_STD, shape)
    elif module.endswith("conv1d"):
        values = rng.uniform(-0.5, 0.5, shape)
    else:
        into_stream = module.endswith(("o_proj", "out_proj", "down_proj"))
        shrink = math.sqrt(2 * depth) if into_stream else 1.0
        values = rng.normal(0.0, 1 / math.sqrt(shape[-1]) / shrink, shape)
    return values.astype(np.float32)
