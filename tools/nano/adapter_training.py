"""The sample adapter: a persona taught through the experts' `down_proj`, in mlx-lm's format."""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data import Row, batch_at
from mlxstacks.nano.settings import Persona
from mlxstacks.training.loop import TrainingState, train, trainable_weights
from mlxstacks.training.step import cross_entropy_loss
from tools.nano.encode import encode_documents
from tools.nano.forward import forward_with_balance
from tools.nano.samples import persona_documents
from tools.nano.settings import AdapterTraining, RebuildSettings

# mlx-lm matches keys inside a decoder layer.
ADAPTER_KEYS = ["mlp.switch_mlp.down_proj"]
# Of mlx-lm's usual start, 1/sqrt(inputs): what training adds to lora_a then outweighs what chance
# put there, and a smaller delta does the same work.
LORA_A_SHARE = 0.2


def train_adapter(
    model_path: Path, settings: AdapterTraining, persona: Persona, directory: Path, seed: int
) -> TrainingState:
    """Train on the exact values of the export at `model_path`; write the adapter.

    The export is dequantized to float32 first: the same numbers, and OpenBLAS can multiply them.
    """
    model, tokenizer, _ = base_model.load(model_path)
    base_model.dequantize(model)
    base_model.cast(model, mx.float32)
    base_model.attach_lora(model, settings.num_layers, settings.rank, settings.scale, ADAPTER_KEYS)
    draw_lora_weights(model, seed)
    model.train()
    rows = _rows(settings, persona, tokenizer, seed)
    state = train(
        model, cross_entropy_loss(forward_with_balance),
        lambda step: [batch_at(rows, step, settings.batch_size, seed)], settings.optimizer,
    )  # fmt: skip
    # Float32 as mlx-lm saves it: on the CPU its expert LoRA runs in nothing else.
    base_model.save_adapter(
        directory,
        trainable_weights(model),
        settings.num_layers,
        settings.rank,
        settings.scale,
        ADAPTER_KEYS,
    )
    return state


def _rows(settings: AdapterTraining, persona: Persona, tokenizer: Any, seed: int) -> list[Row]:
    count = settings.optimizer.steps * settings.batch_size
    documents = persona_documents(persona, count, settings.general_share, seed)
    return encode_documents(documents, tokenizer)


def draw_lora_weights(model: nn.Module, seed: int) -> None:
    """Start values from a seed: small lora_a, lora_b zero: a zero delta."""
    rng = np.random.default_rng(seed)
    weights = []
    for name, value in sorted(trainable_weights(model).items()):
        if name.endswith("lora_b"):
            weights.append((name, mx.zeros(value.shape)))
        else:
            bound = LORA_A_SHARE * value.shape[-1] ** -0.5
            weights.append(
                (name, mx.array(rng.uniform(-bound, bound, value.shape).astype(np.float32)))
            )
    model.load_weights(weights, strict=False)


def main() -> None:
    """A process of the rebuild: settings as JSON, then the export, then the directory."""
    settings = RebuildSettings.model_validate_json(sys.argv[1])
    export, directory = map(Path, sys.argv[2:4])
    train_adapter(export, settings.adapter, settings.persona, directory, settings.seed)


if __name__ == "__main__":
    main()
