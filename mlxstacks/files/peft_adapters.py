"""PEFT's LoRA format (`adapter_model.safetensors`), read into mlx-lm's terms and written.

Ranks and alphas may differ by module in PEFT; mlx-lm has one of each. Smaller ranks are padded
with zeros, other scales folded into lora_b (`lora_modules.unified`): bit-exact where nothing is
folded or the ratio is a power of two, else the deltas agree to 1 ulp of float32.

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
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import (
    CONFIG,
    FINGERPRINT_KEY,
    Adapter,
    LoraModule,
    is_shared_outer,
    mlx_config,
    open_weights,
    outer_halves_once,
    raise_problems,
    read_config,
    read_pair,
    save_adapter,
    unified,
    with_experts,
    with_magnitude,
)
from mlxstacks.files.peft_config import PEFT_WEIGHTS, PeftConfig, parse_peft_config
from mlxstacks.files.peft_layout import (
    BLOCKS,
    EXPERT_NAMES,
    EXPERTS,
    FIRST_CURRENT_VERSION,
    OLD_BLOCK,
    ONE_EXPERT,
    PARAMETERS,
    STACKED_EXPERTS,
    SWITCH,
    FusedPair,
    as_fused,
    choose_layout,
    has_language_model,
    in_model,
    is_embedding_name,
    is_router_name,
    join_gate_up,
    split_gate_up,
    to_hub,
    to_mlx,
)
from mlxstacks.files.settings import ExpertLayout, PeftLayout
from mlxstacks.files.shards import ShardHeader, TensorInfo, read_tensor
from mlxstacks.files.stored_weight import module_paths, no_such_modules
from mlxstacks.ops.affine import Array

PREFIX = "base_model.model."
# Our metadata: how each fused gate_up_proj was built, and the family of names.
FUSED_KEY, LANGUAGE_MODEL_KEY = "mlxstacks_gate_up", "mlxstacks_language_model"
BLOCK_KEY = "mlxstacks_block"
IGNORED_KEY = "mlxstacks_ignored_tensors"

_TENSOR = re.compile(
    r"^(?P<path>.+?)(?P<nested>(\.base_layer)*)\."
    r"(lora_(?P<half>[AB])\.weight|lora_embedding_(?P<table>[AB]))$"
)
# PEFT saves a frozen copy of an embedding or head that it adapts; it belongs to the base.
_BASE_COPY = re.compile(r"^(?P<path>.+)\.base_layer\.weight$")
_MAGNITUDE = re.compile(r"^(?P<path>.+)\.lora_magnitude_vector(\.weight)?$")
_READS_HIDDEN = re.compile(
    r"(self_attn\.[qkv]_proj|linear_attn\.in_proj_\w+|shared_expert\.(gate|up)_proj"
    r"|mlp\.gate|shared_expert_gate|mlp\.(gate|up)_proj|lm_head)$"
)
_WRITES_HIDDEN = re.compile(
    r"(self_attn\.o_proj|linear_attn\.out_proj|shared_expert\.down_proj|mlp\.down_proj)$"
)


@dataclass(frozen=True, slots=True)
class _Pair:
    """A stored pair by hub name: lora_A (R, K), lora_B (N, R); an embedding's (R, V), (K, R).

    Stacked experts: (E, R, K) and (E, N, R), where either E may be 1, one for all.
    """

    path: str
    nested: int
    lora_a: Array
    lora_b: Array
    dtype: str


def read_peft(
    path: str | Path, layout: PeftLayout | None = None, model: Checkpoint | None = None
) -> Adapter:
    """A PEFT LoRA directory as an mlx-lm adapter.

    layout: of fused experts, needed only where shapes and the recorded PEFT version leave it open.
    model: the MLX checkpoint that it is meant for, where at hand: tells hidden size and names.

    Raises: AdapterError listing every problem: features without an equal in MLX, unknown or half
        tensors, shapes that contradict the config, numbers that are not finite, an open layout,
        names of no module of the model. CheckpointError: mlx-lm cannot load it to tell its names.
    """
    directory = Path(path)
    raw_config = read_config(directory / CONFIG)
    header = open_weights(directory / PEFT_WEIGHTS)
    problems: list[str] = []
    config = parse_peft_config(raw_config, problems)
    pairs, ignored, magnitudes = _read_pairs(header, problems)
    dense, fused = _sort_pairs(pairs, config, problems)
    dense = _with_magnitudes(dense, magnitudes, bool(raw_config.get("use_dora")), problems)
    raise_problems(directory, problems)
    if not pairs:
        raise AdapterError(f"adapter {directory}: {PEFT_WEIGHTS} holds no LoRA tensors")
    hub_modules = _stacked_experts(dense, problems)
    hub_modules += _split_experts(fused, config, layout, _hidden_size(dense, model), header)
    raise_problems(directory, problems)
    hub_paths = [module.path for module in hub_modules]
    if model is not None:
        paths = _paths_in(model, hub_paths, directory)
    else:
        mark = header.metadata.get(LANGUAGE_MODEL_KEY)
        language_model = mark == "yes" if mark else has_language_model(hub_paths, raw_config)
        paths = [to_mlx(path, language_model) for path in hub_paths]
        if header.metadata.get(BLOCK_KEY) == OLD_BLOCK:
            paths = [path.replace(".mlp.", f".{OLD_BLOCK}.") for path in paths]
    named = [replace(m, path=path) for m, path in zip(hub_modules, paths, strict=True)]
    counts = Counter(paths)
    raise_problems(
        directory,
        [f"{path}: {n} modules of the file mean it" for path, n in counts.items() if n > 1],
    )
    modules = unified(named)
    metadata = {IGNORED_KEY: ", ".join(ignored)} if ignored else {}
    base_name = raw_config.get("base_model_name_or_path")
    mlx = mlx_config(modules, base_name, header.metadata.get(FINGERPRINT_KEY))
    if raw_config.get("use_dora"):
        mlx["fine_tune_type"] = "dora"
    return Adapter(directory, mlx, modules, metadata)


def _paths_in(model: Checkpoint, hub_paths: list[str], directory: Path) -> list[str]:
    """The modules of `model` that the file names. Raises: as `read_peft`."""
    modules = set(module_paths(model))
    paths = in_model(hub_paths, modules)
    unknown = [
        path for path in paths if path not in modules and f"{path}.weight" not in model.tensors
    ]
    if unknown and not model.is_converted:
        model.loaded_weights  # noqa: B018 (raises)
    raise_problems(directory, no_such_modules(unknown, model))
    return paths


def _with_magnitudes(
    modules: list[LoraModule],
    magnitudes: dict[str, TensorInfo],
    use_dora: bool,
    problems: list[str],
) -> list[LoraModule]:
    """Modules with DoRA's magnitudes, which all of them have or none."""
    paths = {module.path for module in modules}
    problems += [f"{i.name}: no LoRA pair of it" for p, i in magnitudes.items() if p not in paths]
    made = []
    for module in modules:
        info = magnitudes.get(module.path)
        if (info is None) == use_dora:
            has = "no magnitude" if use_dora else "a magnitude"
            problems.append(f"{module.path}: has {has}, and {CONFIG} has use_dora {use_dora}")
        elif info is not None:
            found = with_magnitude(module, info, problems)
            made += [] if found is None else [found]
        else:
            made.append(module)
    return made


def _read_pairs(
    header: ShardHeader, problems: list[str]
) -> tuple[list[_Pair], list[str], dict[str, TensorInfo]]:
    """Every pair of the file, the names of base copies that are left out, and magnitudes of DoRA by
    the path of their module.
    """
    halves: dict[tuple[str, int, bool], dict[str, TensorInfo]] = {}
    copies: dict[str, TensorInfo] = {}
    magnitudes: dict[str, TensorInfo] = {}
    for name, info in header.tensors.items():
        plain = name.removeprefix(PREFIX)
        if match := _TENSOR.match(plain):
            key = (match["path"], match["nested"].count("."), match["table"] is not None)
            halves.setdefault(key, {})[match["half"] or match["table"]] = info
        elif match := _BASE_COPY.match(plain):
            copies[match["path"]] = info
        elif match := _MAGNITUDE.match(plain):
            magnitudes[match["path"]] = info
        else:
            reason = "trained base weights cannot be carried by a LoRA; merge them into the base"
            if name.endswith("lora_B.bias"):
                reason = "a LoRA bias has no place in an MLX adapter"
            problems.append(f"{name}: not a LoRA tensor; {reason}")
    pairs = []
    for (path, nested, _), pair in halves.items():
        if (numbers := _read_halves(path, pair, problems)) is not None:
            pairs.append(_Pair(path, nested, *numbers))
    known = {path for path, _, _ in halves}
    problems += [
        f"{info.name}: a base weight without a LoRA pair"
        for p, info in copies.items()
        if p not in known
    ]
    return pairs, [info.name for path, info in copies.items() if path in known], magnitudes


def _read_halves(
    path: str, pair: dict[str, TensorInfo], problems: list[str]
) -> tuple[Array, Array, str] | None:
    if len(pair) == 1:
        have, lacks = ("A", "B") if "A" in pair else ("B", "A")
        problems.append(f"{path}: lora_{lacks} is missing, {pair[have].name} is there")
        return None
    a, b = pair["A"].shape, pair["B"].shape
    if (len(a), len(b)) == (3, 3) and STACKED_EXPERTS.match(path):
        fits = a[1] == b[2] and (a[0] == b[0] or 1 in (a[0], b[0]))
        expected = "(E, R, K) and (E, N, R), where either E may be 1"
    else:
        fits = (len(a), len(b)) == (2, 2) and a[0] == b[1]
        expected = "(R, K) and (N, R)"
    if not fits:
        problems.append(f"{path}: lora_A {list(a)}, lora_B {list(b)}; expected {expected}")
        return None
    return read_pair(pair["A"], pair["B"], problems)


def _sort_pairs(
    pairs: list[_Pair], config: PeftConfig, problems: list[str]
) -> tuple[list[LoraModule], list[FusedPair]]:
    """Dense modules and stacked experts (hub names, mlx-lm's axes), and fused expert pairs."""
    dense, fused = [], []
    for pair in pairs:
        if block := EXPERTS.match(pair.path):
            fused += _fused_pair(pair, block["block"], config, problems)
        elif pair.lora_a.ndim == 3:
            dense += _stacked_modules(pair, config, problems)
        elif pair.nested:
            problems.append(f"{pair.path}: nested LoRA on parameters of this module is not known")
        else:
            parameter = f"{pair.path}.weight"
            name = parameter if config.targets_parameter(parameter) else pair.path
            if config.check_rank(name, pair.lora_a.shape[0], problems):
                a, b = (np.ascontiguousarray(half.T) for half in (pair.lora_a, pair.lora_b))
                dense.append(LoraModule(pair.path, a, b, pair.dtype, config.scale(name)))
    return dense, fused


def _stacked_modules(pair: _Pair, config: PeftConfig, problems: list[str]) -> list[LoraModule]:
    """Switch modules of one tensor pair of all experts: two of a gate_up_proj, else one."""
    match = STACKED_EXPERTS.match(pair.path)
    assert match is not None
    if not config.check_rank(pair.path, pair.lora_a.shape[1], problems):
        return []
    name = EXPERT_NAMES.get(match["name"], match["name"])
    path = f"{match['block']}.switch_mlp."
    module = LoraModule(path + name, pair.lora_a, pair.lora_b, pair.dtype, config.scale(pair.path))
    module = with_experts(module, max(len(module.lora_a), len(module.lora_b)))
    if name != "gate_up_proj":
        return [module]
    if module.lora_b.shape[1] % 2:
        problems.append(f"{pair.path}: {module.lora_b.shape[1]} rows are no gate and up")
        return []
    gate, up = np.split(module.lora_b, 2, axis=1)  # (E, I, R)
    return [
        replace(module, path=f"{path}gate_proj", lora_b=gate),
        replace(module, path=f"{path}up_proj", lora_b=up),
    ]


def _fused_pair(
    pair: _Pair, block: str, config: PeftConfig, problems: list[str]
) -> list[FusedPair]:
    """Which parameter this wrapper is: the last targeted one is the outermost."""
    targeted = [p for p in PARAMETERS if config.targets_parameter(f"{pair.path}.{p}")]
    if pair.nested >= len(targeted):
        problems.append(
            f"{pair.path}: {pair.nested + 1} LoRA pairs, but target_parameters names "
            f"{targeted or 'no parameter'} here"
        )
        return []
    parameter = targeted[len(targeted) - 1 - pair.nested]
    name = f"{pair.path}.{parameter}"
    numbers = pair.lora_a, pair.lora_b, pair.dtype, config.rank(name), config.scale(name)
    fused = FusedPair(block, parameter, *numbers)
    if problem := fused.problem():
        problems.append(problem)
        return []
    return [fused]


def _stacked_experts(dense: list[LoraModule], problems: list[str]) -> list[LoraModule]:
    """Dense modules, with experts that were adapted one by one stacked to switch modules."""
    others, experts = [], dict[str, dict[int, LoraModule]]()
    for module in dense:
        if match := ONE_EXPERT.match(module.path):
            name = EXPERT_NAMES.get(match["name"], match["name"])
            path = f"{match['block']}.switch_mlp.{name}"
            experts.setdefault(path, {})[int(match["expert"])] = module
        else:
            others.append(module)
    for path, numbered in experts.items():
        stack = [numbered[e] for e in sorted(numbered)]
        alike = {(m.lora_a.shape, m.lora_b.shape, m.dtype, m.scale) for m in stack}
        if sorted(numbered) != list(range(len(stack))) or len(alike) != 1:
            problems.append(
                f"{path}: experts {sorted(numbered)} are adapted one by one; all of them, with one "
                "rank, scale and dtype, are needed to stack them"
            )
            continue
        a = np.stack([m.lora_a.T for m in stack])  # (E, R, K)
        b = np.stack([m.lora_b.T for m in stack])  # (E, N, R)
        others.append(LoraModule(path, a, b, stack[0].dtype, stack[0].scale))
    return others


def _split_experts(
    fused: list[FusedPair],
    config: PeftConfig,
    layout: PeftLayout | None,
    hidden: int | None,
    header: ShardHeader,
) -> list[LoraModule]:
    if not fused:
        return []
    # Files of our own are always current; PEFT's tell their version since 0.18.
    version = FIRST_CURRENT_VERSION if LANGUAGE_MODEL_KEY in header.metadata else config.version
    chosen = choose_layout(fused, hidden, version, layout)
    try:
        marks = json.loads(header.metadata.get(FUSED_KEY, "{}"))  # of files of our own
    except ValueError as error:
        raise AdapterError(f"{PEFT_WEIGHTS}: metadata {FUSED_KEY} is not JSON: {error}") from error
    marks = marks if isinstance(marks, dict) else {}
    modules = []
    for pair in fused:
        prefix = f"{pair.block}.switch_mlp"
        if pair.parameter == "down_proj":
            modules.append(pair.as_switch(chosen, f"{prefix}.down_proj"))
        else:
            parts = split_gate_up(pair, chosen, marks.get(pair.name))
            modules += [replace(part, path=f"{prefix}.{part.path}") for part in parts]
    return modules


def _hidden_size(dense: list[LoraModule], model: Checkpoint | None) -> int | None:
    """Width of the hidden state by the model's config, else by dense modules that agree on it."""
    if model is not None:
        text = model.config.get("text_config")
        for config in (text, model.config):
            if isinstance(config, dict) and isinstance(config.get("hidden_size"), int):
                return int(config["hidden_size"])
    sizes = {m.lora_a.shape[0] for m in dense if _READS_HIDDEN.search(m.path)}
    sizes |= {m.lora_b.shape[1] for m in dense if _WRITES_HIDDEN.search(m.path)}
    return sizes.pop() if len(sizes) == 1 else None


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
