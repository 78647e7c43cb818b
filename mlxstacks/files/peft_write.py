"""Writes an adapter in PEFT's LoRA format, in the layout of PEFT >= 0.19.1.

PEFT computes `alpha / rank * B A`; alpha is chosen so that this quotient is the adapter's scale.
Experts go through `target_parameters`, which PEFT allows without dropout only.
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.adapter_file import (
    CONFIG,
    open_weights,
    raise_problems,
    read_config,
    save_adapter,
)
from mlxstacks.files.adapter_names import (
    OLD_BLOCK,
    SWITCH,
    is_embedding_name,
    is_router_name,
    to_hub,
)
from mlxstacks.files.lora_modules import FINGERPRINT_KEY, Adapter, LoraModule, unified
from mlxstacks.files.peft_adapters import BLOCK_KEY, FUSED_KEY, LANGUAGE_MODEL_KEY, PREFIX
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.peft_experts import BLOCKS, PARAMETERS, as_fused, join_gate_up
from mlxstacks.files.shards import read_tensor
from mlxstacks.ops.affine import Array


@dataclass
class _Export:
    """What grows while modules are laid out."""

    tensors: dict[str, tuple[str, Array]] = field(default_factory=dict)
    target_modules: list[str] = field(default_factory=list)
    target_parameters: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)  # targets of rank 2R
    marks: dict[str, str] = field(default_factory=dict)  # hub parameter -> how it was joined


def write_peft(
    adapter: Adapter,
    directory: str | Path,
    base_model_name: str | None = None,
    force: bool = False,
    whole_model: bool = False,
    model_type: str | None = None,
) -> None:
    """Write `adapter` for PEFT.

    base_model_name: hub id or path of the base for PEFT's config; default: what the adapter names.
    whole_model, model_type: see `to_hub`.
    Law: read_peft of the result has the same modules, bit for bit, and the same scale.

    Raises: AdapterError listing modules that PEFT has no place for; TargetError as
        `write_adapter`.
    """
    export = _Export()
    problems: list[str] = []
    blocks: dict[str, dict[str, LoraModule]] = {}
    modules = unified(adapter.modules.values())  # PEFT has patterns, but one rank reads better
    for path, module in modules.items():
        if match := SWITCH.match(path):
            hub_block = to_hub(match["block"], whole_model, model_type)
            blocks.setdefault(hub_block, {})[match["name"]] = module
        elif module.is_switch:
            problems.append(f"{path}: experts are known to PEFT here only as `switch_mlp`")
        else:
            _add_dense(export, to_hub(path, whole_model, model_type), module)
    for block, experts in blocks.items():
        try:
            _add_experts(export, block, experts)
        except AdapterError as error:
            problems.append(str(error))
    raise_problems(adapter.directory, problems)
    language_model = any(path.startswith("language_model.") for path in modules)
    metadata = {"format": "pt", LANGUAGE_MODEL_KEY: "yes" if language_model else "no"}
    if any(f".{OLD_BLOCK}." in path for path in modules):
        metadata[BLOCK_KEY] = OLD_BLOCK
    if export.marks:
        metadata[FUSED_KEY] = json.dumps(export.marks, sort_keys=True)
    if adapter.base_fingerprint:
        metadata[FINGERPRINT_KEY] = adapter.base_fingerprint
    first = next(iter(modules.values()))
    config = _config(first, export, base_model_name or adapter.config.get("model"))
    source = adapter.directory
    save_adapter(directory, PEFT_WEIGHTS, export.tensors, config, metadata, force, source)


def _add_dense(export: _Export, hub: str, module: LoraModule) -> None:
    a, b = module.lora_a.T, module.lora_b.T  # (R, K), (N, R)
    if is_embedding_name(hub):
        names = f"{PREFIX}{hub}.lora_embedding_A", f"{PREFIX}{hub}.lora_embedding_B"
    else:
        names = f"{PREFIX}{hub}.lora_A.weight", f"{PREFIX}{hub}.lora_B.weight"
    if is_router_name(hub):
        export.target_parameters.append(f"{hub}.weight")
    else:
        export.target_modules.append(hub)
    for name, raw in zip(names, (a, b), strict=True):
        export.tensors[name] = (module.dtype, np.ascontiguousarray(raw))


def _add_experts(export: _Export, block: str, experts: dict[str, LoraModule]) -> None:
    """One MoE block: the inner wrapper is gate_up_proj, the outer down_proj, alone it is outer."""
    found: dict[str, LoraModule] = {}
    if "gate_proj" in experts or "up_proj" in experts:
        joined, how = join_gate_up(experts.get("gate_proj"), experts.get("up_proj"))
        found["gate_up_proj"] = joined
        export.marks[f"{block}.experts.gate_up_proj"] = how
        if how == BLOCKS:
            export.doubled.append(f"{block}.experts.gate_up_proj")
    if "down_proj" in experts:
        found["down_proj"] = experts["down_proj"]
    present = [parameter for parameter in PARAMETERS if parameter in found]
    for depth, parameter in enumerate(reversed(present)):
        module = found[parameter]
        prefix = f"{PREFIX}{block}.experts" + ".base_layer" * depth
        for leaf, raw in zip(("lora_A", "lora_B"), as_fused(module), strict=True):
            export.tensors[f"{prefix}.{leaf}.weight"] = (module.dtype, raw)
        export.target_parameters.append(f"{block}.experts.{parameter}")


def _config(first: LoraModule, export: _Export, base_model_name: str | None) -> dict[str, Any]:
    """A LoraConfig as JSON, with the fields that decide and those that older PEFT versions want."""
    rank, alpha = first.rank, alpha_for(first.scale, first.rank)
    # Whole ranks double, so that alpha / rank, and with it the scale, stays.
    doubled = {re.escape(name): 2 for name in export.doubled}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "rank_pattern": {name: factor * rank for name, factor in doubled.items()},
        "alpha_pattern": {name: factor * alpha for name, factor in doubled.items()},
        "target_modules": export.target_modules,
        "target_parameters": export.target_parameters or None,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def alpha_for(scale: float, rank: int) -> int | float:
    """The lora_alpha with which PEFT's float64 `alpha / rank` is `scale` again.

    Law: alpha_for(scale, rank) / rank == scale, and twice that over 2 * rank too, for ranks that
    are powers of two and whenever a float64 with that quotient exists near scale * rank.
    """
    product = scale * rank
    near = (product, math.nextafter(product, math.inf), math.nextafter(product, -math.inf))
    alpha = next((a for a in near if a / rank == scale), product)
    return int(alpha) if alpha.is_integer() and abs(alpha) < 2**53 else alpha


def write_zero_peft(source: str | Path, directory: str | Path, force: bool = False) -> None:
    """The zero-delta copy of a PEFT adapter: every LoRA number is zero, all else is as it was.

    Raises: AdapterError for a file that cannot be read; TargetError as `write_adapter`.
    """
    source = Path(source)
    header = open_weights(source / PEFT_WEIGHTS)
    tensors = {}
    for name, info in header.tensors.items():
        raw = read_tensor(info)
        tensors[name] = (info.dtype, np.zeros_like(raw) if ".lora_" in name else raw)
    config = read_config(source / CONFIG)
    save_adapter(directory, PEFT_WEIGHTS, tensors, config, header.metadata, force, source)
