"""Fuse an adapter into a model that is loaded, without writing one.

    found = fuse_in_memory(model, FuseSettings(model=..., adapter_path=(...,), requant="refit"))

Decisions, deltas and packed bytes come from the code of `fuse.run`, module by module. Law: every
tensor of the model is, to the bit, what loading the model that `mlxstacks fuse` writes would give.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxstacks import base_model
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.shards import tensor_nbytes
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import decide
from mlxstacks.fuse.fidelity import Sums
from mlxstacks.fuse.module import Done, Module, gather_modules
from mlxstacks.fuse.report import StageReport, entries_bytes, stage_report, together, verdict
from mlxstacks.fuse.rewrite import (
    ModuleWork,
    measure_module,
    module_works,
    process,
    total_sums,
)
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.affine import Array

_MOST_WORKERS = 8  # as in fuse.run
# Stored dtype -> what NumPy holds its bytes as, and MLX's own.
_DTYPES: dict[str, tuple[type, mx.Dtype]] = {
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
}


@dataclass(frozen=True)
class MemoryFuse:
    """What was done: the figures of a fuse's result, without files.

    stages: one an adapter, in order. extra_bytes: of the touched modules, against before.
    """

    stages: tuple[StageReport, ...]
    extra_bytes: int
    verdict: str
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "stages": [stage.as_json() for stage in self.stages],
            "extra_bytes": self.extra_bytes,
            "verdict": self.verdict,
            "notes": list(self.notes),
        }


def fuse_in_memory(model: nn.Module, settings: FuseSettings) -> MemoryFuse:
    """Put `settings.adapter_path` into `model`, which was loaded from `settings.model`.

    A module that is packed gets new weight, scales, biases and bits; one that the policy leaves
    plain becomes a plain module; one that was widened (`prepare_base`) gets the values in its
    dtype. save_path, force and fail_under count for nothing. Memory: one module at a time.

    Raises: InputError: the model, an adapter or an option cannot be used, or a module of the
        checkpoint is not in the model as it is stored; the model is unchanged then. A weight or
        delta that is not finite is found on the way, and leaves the model half changed.
    """
    if settings.model is None or not settings.adapter_path:
        raise InputError("a fuse in memory needs model and adapter_path")
    checkpoint = open_checkpoint(resolve_model(settings.model))
    modules, notes = gather_modules(checkpoint, settings)
    check_places(model, modules)
    workers = max(1, min(os.cpu_count() or 1, _MOST_WORKERS))
    with ThreadPoolExecutor(workers) as pool:

        def full_pass(module: Module, decisions: dict[int, Decision]) -> dict[int, Sums]:
            return measure_module(ModuleWork(module, decisions), pool, workers, settings)

        choices = {module.path: decide(module, settings, full_pass) for module in modules}
        works = module_works(modules, choices, settings, notes)
        sums = {}
        for work in works:
            tensors, sums[work.module.path] = fused_tensors(work, pool, workers, settings)
            put(model, work, tensors)
    stages = tuple(
        stage_report(number, adapter, works, choices, sums)
        for number, adapter in enumerate(settings.adapter_path)
    )
    before = sum(info.nbytes for work in works for info in work.module.tensors())
    extra = sum(entries_bytes(work.outputs()) for work in works) - before
    words = verdict(stages, together(sums), settings, None, extra, checkpoint.nbytes)
    return MemoryFuse(stages, extra, words, tuple(notes))


def fused_tensors(
    work: ModuleWork, pool: ThreadPoolExecutor, workers: int, settings: FuseSettings
) -> tuple[dict[str, mx.array], dict[int, Sums]]:
    """The module's new tensors by their last name ("weight", "scales"), and its sums by stage."""
    raw = {name: np.empty(tensor_nbytes(dtype, shape) or 0, np.uint8)
           for name, dtype, shape in work.outputs()}  # fmt: skip
    filled = dict.fromkeys(raw, 0)

    def kept_blocks() -> Iterator[Done]:
        for done in process(work, pool, workers, settings):
            for name, chunk in done.chunks.items():
                part = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
                raw[name][filled[name] : filled[name] + part.size] = part
                filled[name] += part.size
            yield done

    total = total_sums(kept_blocks())
    assert all(filled[name] == raw[name].size for name in raw), "a block is missing"
    weight = work.module.stored.weight.name  # without a last name in some hub checkpoints
    tensors = {}
    for name, dtype, shape in work.outputs():
        held, stored = _DTYPES[dtype]
        array = mx.array(raw.pop(name).view(held).reshape(shape))
        ending = "weight" if name == weight else name.rpartition(".")[2]
        tensors[ending] = array if array.dtype == stored else array.view(stored)
    return tensors, total


# --- into the model -------------------------------------------------------------------------------


def check_places(model: nn.Module, modules: list[Module]) -> None:
    """Raises: CheckpointError listing the modules that are not in the model as they are stored."""
    loaded, problems = dict(model.named_modules()), []
    for module in modules:
        layer, stored = loaded.get(module.path), module.stored
        if layer is None or "weight" not in layer:
            kind = "no module" if layer is None else f"a {type(layer).__name__}"
            remedy = "take adapters off first, use an mlx checkpoint"
            problems.append(f"{module.path}: {kind} there; {remedy}")
            continue
        packed = "scales" in layer and stored.bits is not None
        plain = (*stored.weight.shape[:-1], stored.input_dims)
        shape = tuple(stored.weight.shape if packed else plain)
        if tuple(layer.weight.shape) != shape:
            problems.append(f"{module.path}: weight {layer.weight.shape} there, {shape} stored")
        elif packed and (layer.bits, layer.group_size, layer.mode) != (
            stored.bits, stored.group_size, stored.mode
        ):  # fmt: skip
            there, here = (f"{x.bits} bits, {x.mode}" for x in (layer, stored))
            problems.append(f"{module.path}: {there} there, {here} stored")
    if problems:
        heading = "the model in memory is not the one the adapter was matched with:"
        raise CheckpointError("\n  ".join([heading, *problems]))


def put(model: nn.Module, work: ModuleWork, tensors: dict[str, mx.array]) -> None:
    """Set a module's tensors: packed where it is packed, their values where it was widened."""
    path, bits = work.module.path, work.bits
    module: Any = dict(model.named_modules())[path]
    if "scales" not in module:
        # Values as mlx-lm's dequantize makes them, in the dtype that the module was widened to.
        values = tensors["weight"]
        if bits is not None:
            grid = work.module.group_size(work.mode), bits, work.mode
            values = mx.dequantize(values, tensors["scales"], tensors.get("biases"), *grid)
        module.weight = values.astype(module.weight.dtype)
    elif bits is not None:
        module.weight, module.scales = tensors["weight"], tensors["scales"]
        module.biases = tensors.get("biases")
        module.bits, module.mode = bits, work.mode
        module.group_size = work.module.group_size(work.mode)
    else:
        holder = nn.Module()
        holder.inner = module
        base_model.dequantize(holder)
        holder.inner.weight = tensors["weight"]
        model.update_modules(tree_unflatten([(path, holder.inner)]))
        module = holder.inner
    mx.eval(module.parameters())


def attach_adapters(
    model: nn.Module, checkpoint: Checkpoint, settings: FuseSettings, dtype: mx.Dtype | None = None
) -> list[str]:
    """Put `settings.adapter_path` over modules of `model`, which was loaded from `checkpoint`: one
    adapter over the other, in order. Returns notes on the adapters, as the fuse gives them.

    dtype: that the pairs compute in, as in `prepare_base`; None: their own.
    Law: what the model computes is what mlx-lm computes with the adapter, to the bit; with several,
    each adds its delta to the same inputs.
    Raises: AdapterError, CheckpointError: as the fuse, for what does not fit; the model has LoRA
        layers already.
    """
    modules, notes = gather_modules(checkpoint, settings)
    check_places(model, modules)
    for module in modules:
        for _, match in sorted(module.stages.items()):
            lora = match.module
            pair = (
                _lora_array(lora.lora_a, lora.dtype, dtype),
                _lora_array(lora.lora_b, lora.dtype, dtype),
            )
            magnitude = None if lora.magnitude is None else mx.array(lora.magnitude)
            base_model.attach_pair(model, module.path, match.kind, pair, lora.scale, magnitude)
    model.eval()
    return notes


def _lora_array(raw: Array, stored: str, dtype: mx.Dtype | None) -> mx.array:
    array = mx.array(raw)
    array = array.view(mx.bfloat16) if stored == "BF16" else array
    return array if dtype is None else array.astype(dtype)
