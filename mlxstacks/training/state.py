"""Saving and loading a training run: weights, best weights, optimizer, step, history in one file.

Random keys and the order of the data are functions of seed and step, so the step is all of them.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks.base_model import load_arrays, save_arrays
from mlxstacks.errors import InputError
from mlxstacks.files.disk import mlx_write_errors, sync_directory
from mlxstacks.training.loop import TrainingState, new_state, trainable_weights
from mlxstacks.training.settings import OptimizerSettings
from mlxstacks.training.snapshot import BestSnapshot

_START_ANEW = "remove it, or give --no-resume, to start anew"


def save_state(path: Path, model: nn.Module, state: TrainingState, run_id: str) -> None:
    """Write the state atomically. `run_id` names the settings it belongs to.

    Law: on the machine that wrote it (see loop.py), a run loaded from it goes on to the same bytes
    as one that never stopped; a state that the disk has changed is not loaded.
    """
    arrays = {f"model.{name}": value for name, value in trainable_weights(model).items()}
    arrays |= {f"optimizer.{name}": value for name, value in tree_flatten(state.optimizer.state)}
    metadata = {"step": str(state.step), "run_id": run_id, "history": json.dumps(state.history)}
    metadata["validation"] = json.dumps(state.validation)
    metadata["stopped"] = json.dumps(state.stopped)
    if state.best is not None:
        arrays |= {f"best.{name}": value for name, value in state.best.weights.items()}
        best = {"loss": _written(state.best.loss), "step": state.best.step}
        metadata["best"] = json.dumps(best | {"without_gain": state.best.without_gain})
    metadata["sha256"] = _digest(arrays, metadata)
    # mlx appends the suffix when it is missing, so the temporary name must end in it.
    temporary = path.with_name(f".{path.name}.tmp.safetensors")
    with mlx_write_errors(path):
        save_arrays(temporary, arrays, metadata)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def load_state(
    path: Path, model: nn.Module, settings: OptimizerSettings, run_id: str
) -> TrainingState:
    """Put the saved weights into `model` and return the state to go on from.

    Raises:
        InputError: the file is damaged, or belongs to a run with other settings or another model.
    """
    try:
        arrays, metadata = load_arrays(path)
        mx.eval(arrays)  # now, not when the file may have been replaced
    except (RuntimeError, ValueError) as error:  # cut off, or no safetensors any more
        raise InputError(f"{path}: damaged ({error}); {_START_ANEW}") from None
    if metadata.get("run_id") != run_id:
        raise InputError(f"{path}: saved by a run with other settings; {_START_ANEW}")
    # Before all else is used: a header that is still JSON may have lost a key.
    digest = metadata.pop("sha256", None)
    if digest is None:
        raise InputError(f"{path}: written by an older version, or damaged; {_START_ANEW}")
    if digest != _digest(arrays, metadata):
        raise InputError(
            f"{path}: damaged (its bytes are not those that were saved); {_START_ANEW}"
        )
    weights = _part(arrays, "model")
    expected = {name: value.shape for name, value in trainable_weights(model).items()}
    if {name: value.shape for name, value in weights.items()} != expected:
        raise InputError(f"{path}: its weights are not those that this model trains")
    model.load_weights(list(weights.items()), strict=False)
    state = new_state(settings)
    state.optimizer.state = tree_unflatten(list(_part(arrays, "optimizer").items()))
    state.step = int(metadata["step"])
    state.history = json.loads(metadata["history"])
    state.validation = json.loads(metadata.get("validation", "[]"))
    state.stopped = json.loads(metadata.get("stopped", "null"))
    if "best" in metadata:
        best: dict[str, Any] = json.loads(metadata["best"])
        loss = math.inf if best["loss"] is None else best["loss"]
        weights = _part(arrays, "best")
        state.best = BestSnapshot(loss, best["step"], weights, best["without_gain"])
    return state


def _digest(arrays: dict[str, mx.array], metadata: dict[str, str]) -> str:
    """SHA-256 of everything in the file; safetensors itself notices no changed byte of a tensor."""
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        found.update(f"{name} {value.dtype} {value.shape}".encode())
        found.update(memoryview(value.reshape(-1).view(mx.uint8)))
    return found.hexdigest()


def _part(arrays: dict[str, mx.array], name: str) -> dict[str, mx.array]:
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}


def _written(loss: float) -> float | None:
    """JSON has no infinity."""
    return loss if math.isfinite(loss) else None
