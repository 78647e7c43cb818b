"""Saving and loading a training run: weights, optimizer, step and history in one file."""

import json
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks.errors import InputError
from mlxstacks.training.loop import TrainingState, new_state, trainable_weights
from mlxstacks.training.settings import OptimizerSettings


def save_state(path: Path, model: nn.Module, state: TrainingState, run_id: str) -> None:
    """Write the state atomically. `run_id` names the settings it belongs to.

    Law: a run loaded from it goes on to the same bytes as one that never stopped.
    """
    arrays = {f"model.{name}": value for name, value in trainable_weights(model).items()}
    arrays |= {f"optimizer.{name}": value for name, value in tree_flatten(state.optimizer.state)}
    metadata = {"step": str(state.step), "run_id": run_id, "history": json.dumps(state.history)}
    # mlx appends the suffix when it is missing, so the temporary name must end in it.
    temporary = path.with_name(f".{path.name}.tmp.safetensors")
    mx.save_safetensors(str(temporary), arrays, metadata)
    os.replace(temporary, path)


def load_state(
    path: Path, model: nn.Module, settings: OptimizerSettings, run_id: str
) -> TrainingState:
    """Put the saved weights into `model` and return the state to go on from.

    Raises:
        InputError: the file belongs to a run with other settings.
    """
    arrays, metadata = mx.load(str(path), return_metadata=True)
    if metadata.get("run_id") != run_id:
        raise InputError(f"{path}: saved by a run with other settings; delete it to start anew")
    weights = [(k.removeprefix("model."), v) for k, v in arrays.items() if k.startswith("model.")]
    model.load_weights(weights, strict=False)
    state = new_state(settings)
    saved = [
        (k.removeprefix("optimizer."), v) for k, v in arrays.items() if k.startswith("optimizer.")
    ]
    state.optimizer.state = tree_unflatten(saved)
    state.step = int(metadata["step"])
    state.history = json.loads(metadata["history"])
    return state
