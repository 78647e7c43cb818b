"""PEFT's LoRA format (`adapter_model.safetensors`), read into mlx-lm's terms.

Ranks and alphas may differ by module in PEFT; mlx-lm has one of each. Smaller ranks are padded
with zeros, other scales folded into lora_b (`lora_modules.unified`): bit-exact where nothing is
folded or the ratio is a power of two, else the deltas agree to 1 ulp of float32. Layouts of experts
are in `peft_layout` and `peft_export`. Numbers are read module by module, once all fit together.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import (
    CONFIG,
    FINGERPRINT_KEY,
    Adapter,
    LoraModule,
    StoredPair,
    StreamedModules,
    common_rank_and_scale,
    mlx_config,
    open_weights,
    padded,
    raise_problems,
    read_config,
    rescaled,
    with_experts,
    with_magnitude,
)
from mlxstacks.files.peft_config import PEFT_WEIGHTS, PeftConfig, parse_peft_config
from mlxstacks.files.peft_layout import (
    EXPERT_NAMES,
    EXPERTS,
    FIRST_CURRENT_VERSION,
    OLD_BLOCK,
    ONE_EXPERT,
    PARAMETERS,
    STACKED_EXPERTS,
    FusedPair,
    choose_layout,
    has_language_model,
    in_model,
    split_gate_up,
    to_mlx,
)
from mlxstacks.files.settings import PeftLayout
from mlxstacks.files.shards import DTYPES, ShardHeader, TensorInfo, file_identity
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
class _Pair(StoredPair):
    """A stored pair by hub name: lora_A (R, K), lora_B (N, R); an embedding's (R, V), (K, R).

    Stacked experts: (E, R, K) and (E, N, R), where either E may be 1, one for all.
    """

    path: str
    nested: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A module that is not read yet.

    outline: the module with zeros for its numbers, which take no memory. read: the numbers of
    "lora_a" or "lora_b".
    """

    outline: LoraModule
    read: Callable[[str], Array]

    def module(self, path: str, rank: int, scale: float) -> LoraModule:
        """The module of that name, with its numbers, at another rank and scale."""
        a, b = (np.ascontiguousarray(self.read(half)) for half in ("lora_a", "lora_b"))
        module = replace(self.outline, path=path, lora_a=a, lora_b=b)
        if module.is_switch:
            module = with_experts(module, len(self.outline.lora_a))
        return rescaled(padded(module, rank), scale)


def _source(
    path: str,
    pair: StoredPair,
    scale: float,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    read: Callable[[str], Array],
) -> _Source:
    """shapes: of lora_a and lora_b in mlx-lm's axes."""
    zero = np.zeros((), DTYPES[pair.dtype][1])
    a, b = (np.broadcast_to(zero, shape) for shape in shapes)
    return _Source(LoraModule(path, a, b, pair.dtype, scale), read)


def read_peft(
    path: str | Path,
    layout: PeftLayout | None = None,
    model: Checkpoint | None = None,
    stream: bool = False,
) -> Adapter:
    """A PEFT LoRA directory as an mlx-lm adapter.

    layout: of fused experts, needed only where shapes and the recorded PEFT version leave it open.
    model: the MLX checkpoint that it is meant for, where at hand: tells hidden size and names.
    stream: check every module now, hold one at a time, and read each again when it is asked for.

    Raises: AdapterError listing every problem: features without an equal in MLX, unknown or half
        tensors, shapes that contradict the config, numbers that are not finite, an open layout,
        names of no module of the model. CheckpointError: mlx-lm cannot load it to tell its names.
    """
    directory = Path(path)
    raw_config = read_config(directory / CONFIG)
    header = open_weights(directory / PEFT_WEIGHTS)
    identity = file_identity(header.path)
    problems: list[str] = []
    config = parse_peft_config(raw_config, problems)
    pairs, ignored, magnitudes = _stored_pairs(header, problems)
    dense, fused = _sort_pairs(pairs, config, problems)
    dense = _with_magnitudes(dense, magnitudes, bool(raw_config.get("use_dora")), problems)
    raise_problems(directory, problems)
    if not pairs:
        raise AdapterError(f"adapter {directory}: {PEFT_WEIGHTS} holds no LoRA tensors")
    sources = _stacked_experts(dense, problems)
    sources += _split_experts(fused, config, layout, _hidden_size(dense, model), header)
    raise_problems(directory, problems)
    hub_paths = [source.outline.path for source in sources]
    if model is not None:
        paths = _paths_in(model, hub_paths, directory)
    else:
        mark = header.metadata.get(LANGUAGE_MODEL_KEY)
        language_model = mark == "yes" if mark else has_language_model(hub_paths, raw_config)
        paths = [to_mlx(path, language_model) for path in hub_paths]
        if header.metadata.get(BLOCK_KEY) == OLD_BLOCK:
            paths = [path.replace(".mlp.", f".{OLD_BLOCK}.") for path in paths]
    counts = Counter(paths)
    raise_problems(
        directory,
        [f"{path}: {n} modules of the file mean it" for path, n in counts.items() if n > 1],
    )
    rank, scale = common_rank_and_scale([source.outline for source in sources])
    readers = {
        path: partial(source.module, path, rank, scale)
        for path, source in zip(paths, sources, strict=True)
    }
    modules: Mapping[str, LoraModule] = StreamedModules(header.path, identity, readers)
    metadata = {IGNORED_KEY: ", ".join(ignored)} if ignored else {}
    base_name = raw_config.get("base_model_name_or_path")
    mlx = mlx_config(modules, base_name, header.metadata.get(FINGERPRINT_KEY))
    if raw_config.get("use_dora"):
        mlx["fine_tune_type"] = "dora"
    return Adapter(directory, mlx, modules if stream else dict(modules), metadata)


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
    sources: list[_Source],
    magnitudes: dict[str, TensorInfo],
    use_dora: bool,
    problems: list[str],
) -> list[_Source]:
    """Sources with DoRA's magnitudes, which all of them have or none."""
    paths = {source.outline.path for source in sources}
    problems += [f"{i.name}: no LoRA pair of it" for p, i in magnitudes.items() if p not in paths]
    made = []
    for source in sources:
        module = source.outline
        info = magnitudes.get(module.path)
        if (info is None) == use_dora:
            has = "no magnitude" if use_dora else "a magnitude"
            problems.append(f"{module.path}: has {has}, and {CONFIG} has use_dora {use_dora}")
        elif info is not None:
            found = with_magnitude(module, info, problems)
            made += [] if found is None else [replace(source, outline=found)]
        else:
            made.append(source)
    return made


def _stored_pairs(
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
        if (stored := _stored_pair(path, nested, pair, problems)) is not None:
            pairs.append(stored)
    known = {path for path, _, _ in halves}
    problems += [
        f"{info.name}: a base weight without a LoRA pair"
        for p, info in copies.items()
        if p not in known
    ]
    return pairs, [info.name for path, info in copies.items() if path in known], magnitudes


def _stored_pair(
    path: str, nested: int, pair: dict[str, TensorInfo], problems: list[str]
) -> _Pair | None:
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
    stored = _Pair(pair["A"], pair["B"], path, nested)
    return stored if stored.check(problems) else None


def _sort_pairs(
    pairs: list[_Pair], config: PeftConfig, problems: list[str]
) -> tuple[list[_Source], list[FusedPair]]:
    """Dense modules and stacked experts (hub names, mlx-lm's axes), and fused expert pairs."""
    dense, fused = [], []
    for pair in pairs:
        if block := EXPERTS.match(pair.path):
            fused += _fused_pair(pair, block["block"], config, problems)
        elif len(pair.lora_a.shape) == 3:
            dense += _stacked_modules(pair, config, problems)
        elif pair.nested:
            problems.append(f"{pair.path}: nested LoRA on parameters of this module is not known")
        else:
            parameter = f"{pair.path}.weight"
            name = parameter if config.targets_parameter(parameter) else pair.path
            if config.check_rank(name, pair.lora_a.shape[0], problems):
                shapes = pair.lora_a.shape[::-1], pair.lora_b.shape[::-1]
                read = partial(_read_dense, pair)
                dense.append(_source(pair.path, pair, config.scale(name), shapes, read))
    return dense, fused


def _read_dense(pair: StoredPair, half: str) -> Array:
    return pair.read(half).T


def _stacked_modules(pair: _Pair, config: PeftConfig, problems: list[str]) -> list[_Source]:
    """Switch modules of one tensor pair of all experts: two of a gate_up_proj, else one."""
    match = STACKED_EXPERTS.match(pair.path)
    assert match is not None
    if not config.check_rank(pair.path, pair.lora_a.shape[1], problems):
        return []
    rows, name = pair.lora_b.shape[1], EXPERT_NAMES.get(match["name"], match["name"])
    parts = {name: slice(rows)}
    if name == "gate_up_proj":
        parts = {"gate_proj": slice(rows // 2), "up_proj": slice(rows // 2, rows)}
        if rows % 2:
            problems.append(f"{pair.path}: {rows} rows are no gate and up")
            return []
    experts = max(pair.lora_a.shape[0], pair.lora_b.shape[0])
    sources = []
    for leaf, part in parts.items():
        shapes = (
            (experts, *pair.lora_a.shape[1:]),
            (experts, part.stop - (part.start or 0), pair.lora_b.shape[2]),
        )
        path, read = f"{match['block']}.switch_mlp.{leaf}", partial(_read_stacked, pair, part)
        sources.append(_source(path, pair, config.scale(pair.path), shapes, read))
    return sources


def _read_stacked(pair: StoredPair, rows: slice, half: str) -> Array:
    raw = pair.read(half)
    return raw if half == "lora_a" else raw[:, rows]


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
    rank, scale = config.rank(name), config.scale(name)
    fused = FusedPair(pair.lora_a, pair.lora_b, block, parameter, rank, scale)
    if problem := fused.problem():
        problems.append(problem)
        return []
    return [fused]


def _stacked_experts(dense: list[_Source], problems: list[str]) -> list[_Source]:
    """Dense modules, with experts that were adapted one by one stacked to switch modules."""
    others, experts = [], dict[str, dict[int, _Source]]()
    for source in dense:
        if match := ONE_EXPERT.match(source.outline.path):
            name = EXPERT_NAMES.get(match["name"], match["name"])
            path = f"{match['block']}.switch_mlp.{name}"
            experts.setdefault(path, {})[int(match["expert"])] = source
        else:
            others.append(source)
    for path, numbered in experts.items():
        stack = [numbered[e] for e in sorted(numbered)]
        outlines = [source.outline for source in stack]
        alike = {(m.lora_a.shape, m.lora_b.shape, m.dtype, m.scale) for m in outlines}
        if sorted(numbered) != list(range(len(stack))) or len(alike) != 1:
            problems.append(
                f"{path}: experts {sorted(numbered)} are adapted one by one; all of them, with one "
                "rank, scale and dtype, are needed to stack them"
            )
            continue
        if any(outline.magnitude is not None for outline in outlines):
            problems.append(f"{path}: DoRA of experts, which MLX has no layer for; train a LoRA")
            continue
        a, b = (  # (E, R, K), (E, N, R)
            np.broadcast_to(half.T, (len(stack), *half.T.shape))
            for half in (outlines[0].lora_a, outlines[0].lora_b)
        )
        outline = replace(outlines[0], path=path, lora_a=a, lora_b=b)
        others.append(_Source(outline, partial(_read_stack, stack)))
    return others


def _read_stack(stack: list[_Source], half: str) -> Array:
    return np.stack([source.read(half).T for source in stack])


def _split_experts(
    fused: list[FusedPair],
    config: PeftConfig,
    layout: PeftLayout | None,
    hidden: int | None,
    header: ShardHeader,
) -> list[_Source]:
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
    sources = []
    for pair in fused:
        parts = {"down_proj": (slice(None), slice(None))}
        if pair.parameter == "gate_up_proj":
            parts = split_gate_up(pair, chosen, marks.get(pair.name))
        width, rows = pair.dims(chosen)
        experts = pair.lora_a.shape[0] // pair.rank
        for name, part in parts.items():
            out, rank = (len(range(n)[cut]) for n, cut in zip((rows, pair.rank), part, strict=True))
            shapes = (experts, rank, width), (experts, out, rank)
            read = partial(_read_fused, pair, chosen, part)
            path = f"{pair.block}.switch_mlp.{name}"
            sources.append(_source(path, pair, pair.scale, shapes, read))
    return sources


def _read_fused(pair: FusedPair, layout: PeftLayout, part: tuple[slice, slice], half: str) -> Array:
    return pair.read_switch(half, layout, *part)


def _hidden_size(dense: list[_Source], model: Checkpoint | None) -> int | None:
    """Width of the hidden state by the model's config, else by dense modules that agree on it."""
    if model is not None:
        text = model.config.get("text_config")
        for config in (text, model.config):
            if isinstance(config, dict) and isinstance(config.get("hidden_size"), int):
                return int(config["hidden_size"])
    outlines = [source.outline for source in dense]
    sizes = {m.lora_a.shape[0] for m in outlines if _READS_HIDDEN.search(m.path)}
    sizes |= {m.lora_b.shape[1] for m in outlines if _WRITES_HIDDEN.search(m.path)}
    return sizes.pop() if len(sizes) == 1 else None
