"""Arrow: a router without training or prompts, from the weights of the stacks alone.

At each projection a domain is known by the input v (K,) that its stacks answer most, the leading
right singular vector of their deltas (layers/spectrum.py). There a token h (K,) goes to the
domains by softmax over |<v, h>| (Ostapenko et al. 2024, "Towards Modular LLMs by Building and
Reusing a Library of LoRAs", section 4). Two things differ: a prompt is routed once, so a domain's
score is its mean share over tokens and projections, and h is the base's, all stacks off.

Letters: n domains, K input dims.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.spectrum import Block, blocks_of, input_direction
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.routing.features import watched
from mlxstacks.routing.router import PromptReading, PromptRouter


class ArrowRouter(PromptRouter):
    """Scores are shares, so a domain is on where it has more than an equal one."""

    def __init__(self, trained: PromptRouter, model: nn.Module) -> None:
        """trained: its domains, features and chat floor are taken. model: serves their stacks."""
        header = replace(trained.header, threshold=1 / len(trained.domains))
        super().__init__(trained.network, header, trained.features)
        of_layers = (
            (layer.linear, prototypes(layer.stacks.stacks(), self.domains))
            for _, layer in stacked_layers(model)
        )
        self._prototypes = [(linear, v) for linear, v in of_layers if v is not None]

    def _read(self, prompts: Sequence[Sequence[int]]) -> list[PromptReading]:
        return [self._one(prompt) for prompt in prompts]

    def _one(self, prompt: Sequence[int]) -> PromptReading:
        shares: list[mx.array] = []
        with ExitStack() as watching:
            for linear, v in self._prototypes:

                def note(x: mx.array, _: mx.array, v: mx.array = v) -> None:
                    logits = mx.abs(x.astype(mx.float32) @ v)  # (..., n)
                    shares.append(mx.mean(mx.softmax(logits, axis=-1).flatten(0, -2), axis=0))
                    mx.eval(shares[-1])

                watching.enter_context(watched(linear, note))
            features = self.features.batch([prompt])[0]
        means: list[float] = mx.mean(mx.stack(shares), axis=0).tolist()
        scores = dict(zip(self.domains, means, strict=True))
        return PromptReading(scores, self.features.pooled(np.array(features[0])))


def prototypes(stacks: Sequence[FrozenStack], domains: Sequence[str]) -> mx.array | None:
    """(K, n) float32: of each domain its v, zeros where it has no stack among these; None where
    none of them has.
    """
    blocks: dict[str, list[Block]] = {}
    for stack in stacks:
        blocks.setdefault(stack.id.domain, []).extend(blocks_of(stack))
    directions = {name: input_direction(blocks[name]) for name in domains if name in blocks}
    if not directions:
        return None
    zeros = np.zeros_like(next(iter(directions.values())))
    return mx.array(np.stack([directions.get(name, zeros) for name in domains], axis=1), mx.float32)
