"""An adapter written in PEFT's format, for PEFT or for the servers that read its files.

Written is the layout of PEFT >= 0.19.1. PEFT computes `alpha / rank * B A`; alpha is chosen so that
this quotient is the adapter's scale. Experts have three layouts (E experts, R rank):

    parameters   .experts.lora_A (E*R, K)        PEFT's `target_parameters`, which it allows without
                 .experts.lora_B (N, R*E)        dropout only; vLLM's where it has all experts in
                 and .experts.base_layer...      one tensor
    per_expert   .experts.0.gate_proj.lora_A     one linear an expert: vLLM's for other models
    stacked      .experts.w1.lora_A (E, R, K)    w1 gate, w3 up, w2 down: SGLang's, and vLLM's with
                 .experts.w1.lora_B (E, N, R)    --enable-moe-shared-loras. Shared outer: 1 for E in
                                                 lora_A of w1 and w3, and in lora_B of w2
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.lora_modules import (
    CONFIG,
    FINGERPRINT_KEY,
    Adapter,
    LoraModule,
    is_shared_outer,
    open_weights,
    outer_halves_once,
    raise_problems,
    read_config,
    save_adapter,
    unified,
)
from mlxstacks.files.peft_adapters import BLOCK_KEY, FUSED_KEY, LANGUAGE_MODEL_KEY, PREFIX
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.peft_layout import (
    BLOCKS,
    EXPERT_NAMES,
    OLD_BLOCK,
    SWITCH,
    as_fused,
    is_embedding_name,
    is_router_name,
    join_gate_up,
    to_hub,
)
from mlxstacks.files.settings import ExpertLayout
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
    experts_layout: ExpertLayout = "parameters",
) -> None:
    """Write `adapter` for PEFT, or for the servers that read its files.

    base_model_name: hub id or path of the base for PEFT's config; default: what the adapter names.
    whole_model, model_type: see `to_hub`. experts_layout: see above; a server's layout keeps the
        name `block_sparse_moe`, as the checkpoints and servers have it.
    Law: read_peft of the result has the same modules, bit for bit, and the same scale.

    Raises: AdapterError listing modules that PEFT has no place for; TargetError as
        `write_adapter`.
    """
    export = _Export()
    problems: list[str] = []
    for_server = experts_layout != "parameters"

    def hub_name(path: str) -> str:
        # Granite's block keeps its name in every version of transformers.
        return to_hub(path, whole_model, "granitemoe" if for_server else model_type)

    blocks: dict[str, dict[str, LoraModule]] = {}
    modules = unified(adapter.modules.values())  # PEFT has patterns, but one rank reads better
    for path, module in modules.items():
        if match := SWITCH.match(path):
            hub_block = hub_name(match["block"])
            blocks.setdefault(hub_block, {})[match["name"]] = module
        elif module.is_switch:
            problems.append(f"{path}: experts are known to PEFT here only as `switch_mlp`")
        else:
            hub = hub_name(path)
            if is_router_name(hub) and not for_server:
                export.target_parameters.append(f"{hub}.weight")
            else:
                export.target_modules.append(hub)
            leaf = "lora_embedding_{}" if is_embedding_name(hub) else "lora_{}.weight"
            for half, raw in (("A", module.lora_a), ("B", module.lora_b)):
                name = f"{PREFIX}{hub}.{leaf.format(half)}"
                export.tensors[name] = (module.dtype, np.ascontiguousarray(raw.T))
    once = experts_layout == "stacked" and is_shared_outer(modules.values())
    for block, experts in blocks.items():
        try:
            if for_server:
                _add_server_experts(export, block, experts, experts_layout, once)
            else:
                _add_experts(export, block, experts)
        except AdapterError as error:
            problems.append(str(error))
    raise_problems(adapter.directory, problems)
    language_model = any(path.startswith("language_model.") for path in modules)
    metadata = {"format": "pt", LANGUAGE_MODEL_KEY: "yes" if language_model else "no"}
    if not for_server and any(f".{OLD_BLOCK}." in path for path in modules):
        metadata[BLOCK_KEY] = OLD_BLOCK
    if export.marks:
        metadata[FUSED_KEY] = json.dumps(export.marks, sort_keys=True)
    if adapter.base_fingerprint:
        metadata[FINGERPRINT_KEY] = adapter.base_fingerprint
    first = next(iter(modules.values()))
    rank, alpha = first.rank, alpha_for(first.scale, first.rank)
    # Whole ranks double, so that alpha / rank, and with it the scale, stays.
    doubled = [re.escape(name) for name in export.doubled]
    config = {  # the fields that decide, and those that older PEFT versions want
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name or adapter.config.get("model"),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "rank_pattern": dict.fromkeys(doubled, 2 * rank),
        "alpha_pattern": dict.fromkeys(doubled, 2 * alpha),
        # Servers compare the last part of a name; PEFT adapts what ends with it.
        "target_modules": sorted({name.rpartition(".")[2] for name in export.target_modules})
        if for_server
        else export.target_modules,
        "target_parameters": export.target_parameters or None,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    source = adapter.directory
    save_adapter(directory, PEFT_WEIGHTS, export.tensors, config, metadata, force, source)


def _add_experts(export: _Export, block: str, experts: dict[str, LoraModule]) -> None:
    """One MoE block: the inner wrapper is gate_up_proj, the outer down_proj, alone it is outer."""
    parameters: dict[str, LoraModule] = {}  # the outer wrapper first
    if "down_proj" in experts:
        parameters["down_proj"] = experts["down_proj"]
    if "gate_proj" in experts or "up_proj" in experts:
        joined, how = join_gate_up(experts.get("gate_proj"), experts.get("up_proj"))
        parameters["gate_up_proj"] = joined
        export.marks[f"{block}.experts.gate_up_proj"] = how
        if how == BLOCKS:
            export.doubled.append(f"{block}.experts.gate_up_proj")
    for depth, (parameter, module) in enumerate(parameters.items()):
        prefix = f"{PREFIX}{block}.experts" + ".base_layer" * depth
        for leaf, raw in zip(("lora_A", "lora_B"), as_fused(module), strict=True):
            export.tensors[f"{prefix}.{leaf}.weight"] = (module.dtype, raw)
        export.target_parameters.append(f"{block}.experts.{parameter}")


def _add_server_experts(
    export: _Export,
    block: str,
    experts: dict[str, LoraModule],
    layout: ExpertLayout,
    once: bool,
) -> None:
    """One MoE block in the layout per_expert or stacked."""
    old_names = {new: old for old, new in EXPERT_NAMES.items()}
    for name, module in experts.items():
        export.target_modules.append(name)
        prefix = f"{PREFIX}{block}.experts"
        if layout == "stacked":
            pair = outer_halves_once(module) if once else (module.lora_a, module.lora_b)
            for half, raw in zip("AB", pair, strict=True):
                tensor = f"{prefix}.{old_names[name]}.lora_{half}.weight"
                export.tensors[tensor] = (module.dtype, raw)
            continue
        leaf = old_names[name] if block.endswith(OLD_BLOCK) else name
        for expert in range(len(module.lora_a)):
            for half, raw in (("A", module.lora_a), ("B", module.lora_b)):
                tensor = f"{prefix}.{expert}.{leaf}.lora_{half}.weight"
                export.tensors[tensor] = (module.dtype, raw[expert])


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
