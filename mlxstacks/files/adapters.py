"""mlx-lm's adapter format: `adapters.safetensors` and `adapter_config.json`, read, written and laid
on a checkpoint.

`load_any_adapter` also takes a PEFT directory and llama.cpp's GGUF file. Reading gathers every
problem of a file and raises once. DoRA is for those that ask for it: its change rests on the base's
weights, so it can be fused and served, not converted or merged. Full fine-tunes are refused. mlx-lm
stores no mark of the base in an adapter: `match_adapter` checks names and shapes for all, and the
base itself where an adapter carries our fingerprint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.checkpoint import Checkpoint, fingerprint
from mlxstacks.files.disk import user_path
from mlxstacks.files.gguf_adapters import read_gguf
from mlxstacks.files.lora_modules import (
    CONFIG,
    FLOAT_DTYPES,
    Adapter,
    LoraModule,
    StoredPair,
    StreamedModules,
    is_finite_number,
    is_shared_outer,
    open_weights,
    outer_halves_once,
    raise_problems,
    read_config,
    save_adapter,
    with_experts,
    with_magnitude,
)
from mlxstacks.files.manifest import FULL
from mlxstacks.files.peft_adapters import read_peft
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.peft_layout import is_embedding_name
from mlxstacks.files.settings import PeftLayout
from mlxstacks.files.shards import ShardHeader, TensorInfo, file_identity
from mlxstacks.files.stored_weight import (
    StoredWeight,
    grid_texts,
    no_such_modules,
    other_grids,
    stored_name,
    stored_weight,
)
from mlxstacks.ops.affine import Array

WEIGHTS = "adapters.safetensors"

_NOT_LORA = {
    "full": "a full fine-tune has no low-rank delta; its weights are a model of their own, which "
    "`mlx_lm.fuse` writes",
}
_LEAVES = ("lora_a", "lora_b")
_MAGNITUDE = "m"
_OF_A_STACK = (
    "a stack that routes each token has no one delta to fuse or convert; serve it next to the "
    "base, or export a stack of one expert"
)
_OTHER_LEAVES = {"router": _OF_A_STACK, "noise": _OF_A_STACK}


def load_any_adapter(
    path: str | Path,
    peft_layout: PeftLayout | None = None,
    model: Checkpoint | None = None,
    *,
    dora: bool = False,
    stream: bool = False,
) -> Adapter:
    """An adapter in any format, in mlx-lm's terms. path: its directory, or a GGUF file.

    peft_layout: only for PEFT directories. model: for those (`read_peft`) and GGUF (`read_gguf`).
    dora: the caller knows what to do with magnitudes. stream: see `read_adapter`.

    Raises: AdapterError naming what is in the directory instead, or every problem of the adapter;
        one of DoRA where that is not wanted.
    """
    adapter = _load_adapter(path, peft_layout, model, stream)
    if adapter.is_dora and not dora:
        raise AdapterError(
            f"adapter {adapter.directory}: DoRA also rescales every row of the base's weight, so "
            "it is no delta that can be moved on its own; `mlxstacks fuse` puts it into its base, "
            "and `mlxstacks chat --adapter-path ADAPTER` serves it"
        )
    return adapter


def _load_adapter(
    path: str | Path, peft_layout: PeftLayout | None, model: Checkpoint | None, stream: bool
) -> Adapter:
    directory = user_path(path, AdapterError)
    try:
        is_there = directory.is_dir()
    except OSError as error:
        raise AdapterError(f"{str(path)[:200]!a}: cannot be opened: {error.strerror}") from None
    if directory.suffix == ".gguf" and not is_there and directory.exists():
        return read_gguf(directory, model, stream)
    if not is_there:
        what = "a file" if directory.exists() else "not there"
        raise AdapterError(f"{directory}: {what}; give the adapter's directory")
    if (directory / WEIGHTS).exists():
        return read_adapter(directory, stream)
    if (directory / PEFT_WEIGHTS).exists():
        return read_peft(directory, peft_layout, model, stream)
    if len(files := sorted(directory.glob("*.gguf"))) == 1:
        return read_gguf(files[0], model, stream)
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise AdapterError(f"{directory}: {len(files)} GGUF files; give one of them: {names}")
    refused = sorted(p.name for p in directory.iterdir() if p.suffix in {".bin", ".npz", ".pt"})
    if refused:
        raise AdapterError(
            f"{directory}: only {', '.join(refused)}; safetensors alone is read here: save the "
            "adapter again with the tool that made it, as safetensors"
        )
    is_model = (directory / "config.json").exists()
    hint = "; it is a model: are the model and the adapter swapped?" if is_model else ""
    if checkpoints := sorted(directory.glob("*_adapters.safetensors")):
        last = checkpoints[-1].name
        hint = f"; {last} is of a training that has not finished: copy it to {WEIGHTS}"
    elif (directory / CONFIG).is_file() and not hint:
        hint = f"; {CONFIG} is there: its training has not finished, or the weights were not copied"
    elif (directory / "manifest.json").is_file() and not hint:
        hint = "; it is a store, of which `mlxstacks stacks export` makes adapters"
    raise AdapterError(f"{directory}: neither {WEIGHTS} (mlx-lm) nor {PEFT_WEIGHTS} (PEFT){hint}")


def read_adapter(path: str | Path, stream: bool = False) -> Adapter:
    """An mlx-lm adapter of LoRA or DoRA. Shapes of the modules as in `LoraModule`.

    A pair whose halves differ in dtype is widened to float32, which changes no number.
    stream: check every module now, hold one at a time, and read each again when it is asked for.

    Raises: AdapterError listing every problem: not a LoRA, no usable scale, half a pair, shapes
        that do not belong together, numbers that are not finite floats, unknown tensors.
    """
    directory = Path(path)
    config = read_config(directory / CONFIG)
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        reason = _NOT_LORA.get(str(kind), "only fine_tune_type lora and dora are known here")
        raise AdapterError(f"adapter {directory}: fine_tune_type is {kind!r}: {reason}")
    header = open_weights(directory / WEIGHTS)
    problems: list[str] = []
    scale, rank = _scale_and_rank(config, problems)
    modules: Mapping[str, LoraModule]
    read = _streamed_modules if stream else _read_modules
    modules = read(header, scale, rank, kind, problems)
    raise_problems(directory, problems)
    if not modules:
        raise AdapterError(f"adapter {directory}: {WEIGHTS} holds no tensors")
    return Adapter(directory, config, modules, dict(header.metadata))


def _scale_and_rank(config: dict[str, Any], problems: list[str]) -> tuple[float, int | None]:
    """`lora_parameters.scale` and `.rank` (None when absent: the tensors tell it)."""
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        problems.append(f"{CONFIG}: lora_parameters is {parameters!r}; it must hold rank and scale")
        return 0.0, None
    scale, rank = parameters.get("scale"), parameters.get("rank")
    if not is_finite_number(scale):
        hint = "; mlx-lm wants scale, not alpha" if "alpha" in parameters else ""
        problems.append(
            f"{CONFIG}: lora_parameters.scale is {scale!r}, not a finite number below 1e30{hint}"
        )
        scale = 0.0
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
        problems.append(f"{CONFIG}: lora_parameters.rank is {rank!r}, not a positive whole number")
        rank = None
    return float(scale), rank


def _read_modules(
    header: ShardHeader, scale: float, rank: int | None, kind: str, problems: list[str]
) -> dict[str, LoraModule]:
    """Every pair of the file, in file order; what is wrong goes to `problems`.

    kind: "dora" where each pair has a magnitude, else "lora".
    """
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in header.tensors.items():
        module_path, _, leaf = name.rpartition(".")
        if leaf in (*_LEAVES, _MAGNITUDE) and module_path:
            pairs.setdefault(module_path, {})[leaf] = info
        else:
            reason = _OTHER_LEAVES.get(
                leaf, "not a LoRA tensor; a LoRA has path.lora_a and path.lora_b"
            )
            problems.append(f"{name}: {reason}")
    modules = {}
    for module_path, pair in pairs.items():
        module = _read_pair(module_path, pair, scale, problems)
        if module is None:
            continue
        if (module.magnitude is None) == (kind == "dora"):
            has = "no magnitude" if kind == "dora" else "a magnitude"
            name = f"{module_path}.{_MAGNITUDE}"
            problems.append(f"{module_path}: has {has} ({name}), and {CONFIG} says {kind}")
        if rank is not None and module.rank != rank:
            problems.append(
                f"{module_path}: rank {module.rank}, but {CONFIG} says {rank}; mlx-lm has one rank"
            )
        modules[module_path] = module
    if rank is None and len(ranks := {m.rank for m in modules.values()}) > 1:
        problems.append(_rank_problem(ranks))
    return modules


def _streamed_modules(
    header: ShardHeader, scale: float, rank: int | None, kind: str, problems: list[str]
) -> StreamedModules:
    """What `_read_modules` gives, checked and read module by module."""
    identity = file_identity(header.path)
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in header.tensors.items():
        groups.setdefault(name.rpartition(".")[0], {})[name] = info

    def read(path: str, problems: list[str]) -> LoraModule | None:
        tensors = replace(header, tensors=groups[path])
        return _read_modules(tensors, scale, rank, kind, problems).get(path)

    def rank_of(path: str) -> int:
        module = read(path, problems)  # gone before the next one is read
        return module.rank if module is not None else 0

    ranks = {*map(rank_of, groups)} - {0}
    if rank is None and len(ranks) > 1:
        problems.append(_rank_problem(ranks))
    return StreamedModules(header.path, identity, {p: partial(read, p, []) for p in groups})


def _rank_problem(ranks: set[int]) -> str:
    return f"modules of ranks {sorted(ranks)}; mlx-lm has one rank for all"


def _read_pair(
    path: str, pair: dict[str, TensorInfo], scale: float, problems: list[str]
) -> LoraModule | None:
    missing = [leaf for leaf in _LEAVES if leaf not in pair]
    if missing:
        problems.append(f"{path}.{missing[0]}: missing, its other half is there")
        return None
    a, b = (pair[leaf] for leaf in _LEAVES)
    axes, mismatch = (len(a.shape), len(b.shape)), ""
    if axes == (2, 3):
        mismatch = "the expert layout of an old mlx-lm; lora_a must be (experts, rank, input_dims)"
    elif axes not in ((2, 2), (3, 3)):
        mismatch = "expected (K, R) and (R, N), or with experts (E, R, K) and (E, N, R)"
    elif axes == (3, 3) and a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        mismatch = (
            f"{a.shape[0]} and {b.shape[0]} experts; either half has all of them, or one for all"
        )
    elif a.shape[1] != (rank := b.shape[2 if axes == (3, 3) else 0]):
        mismatch = f"ranks {a.shape[1]} and {rank} differ"
    if mismatch:
        problems.append(f"{path}: lora_a {list(a.shape)}, lora_b {list(b.shape)}: {mismatch}")
        return None
    stored = StoredPair(a, b)
    if not stored.check(problems):
        return None
    module = LoraModule(path, stored.read("lora_a"), stored.read("lora_b"), stored.dtype, scale)
    if (magnitude := pair.get(_MAGNITUDE)) is not None:
        return with_magnitude(module, magnitude, problems)
    return with_experts(module, max(a.shape[0], b.shape[0])) if module.is_switch else module


def zero_adapter(adapter: Adapter) -> Adapter:
    """The same adapter with every learned number zero: its delta is zero everywhere.

    Law: names, dtypes, shapes, config and metadata are those of `adapter`.
    """
    zeros = {
        path: replace(m, lora_a=np.zeros_like(m.lora_a), lora_b=np.zeros_like(m.lora_b))
        for path, m in adapter.modules.items()
    }
    return replace(adapter, modules=zeros)


def write_adapter(
    adapter: Adapter, directory: str | Path, force: bool = False, share: bool = False
) -> None:
    """Write mlx-lm's format. Law: read_adapter of the result holds the same numbers and config.

    share: a half that is the same for all experts is stored once (`shared_outer`); every command
        here reads that, mlx-lm itself does not.

    Raises: AdapterError when the modules do not share the config's one rank and scale;
        TargetError when the target exists and `force` is not given.
    """
    problems: list[str] = []
    scale, rank = _scale_and_rank(adapter.config, problems)
    tensors: dict[str, tuple[str, Array]] = {}
    once = share and is_shared_outer(adapter.modules.values())
    for path, module in adapter.modules.items():
        if module.scale != scale or module.rank != (rank or module.rank):
            problems.append(
                f"{path}: rank {module.rank} and scale {module.scale}, the config has {rank} and "
                f"{scale}; bring the modules to one rank and scale first (`unified`)"
            )
        a, b = outer_halves_once(module) if once else (module.lora_a, module.lora_b)
        tensors[f"{path}.lora_a"] = (module.dtype, a)
        tensors[f"{path}.lora_b"] = (module.dtype, b)
        if module.magnitude is not None:
            tensors[f"{path}.{_MAGNITUDE}"] = ("F32", module.magnitude)
    raise_problems(adapter.directory, problems)
    save_adapter(
        directory, WEIGHTS, tensors, adapter.config, adapter.metadata, force, adapter.directory
    )


Kind = Literal["linear", "switch", "embedding"]
BaseCheck = Literal["verified", "verified by samples", "not verifiable", "overridden"]


@dataclass(frozen=True, slots=True)
class Match:
    """An adapted module, by its path in the adapter, and the weight that it changes."""

    path: str
    modules: Mapping[str, LoraModule]
    kind: Kind
    stored: StoredWeight
    base: BaseCheck

    @property
    def module(self) -> LoraModule:
        """Read from the file where the adapter is streamed."""
        return _with_all_experts(self.modules[self.path], self.stored)


def match_adapter(
    adapter: Adapter, checkpoint: Checkpoint, allow_base: bool = False
) -> list[Match]:
    """One Match a module, in the adapter's order.

    allow_base: go on although the adapter names another base; `base` is then "overridden".

    Raises: CheckpointError for files that are not in MLX's layout and that mlx-lm cannot load.
        AdapterError listing every module that has no weight (with the nearest names), does not fit
        it, or whose weight cannot be changed, and a base other than the one trained on.
    """
    if not checkpoint.is_converted:
        checkpoint.loaded_weights  # noqa: B018 (raises)
    problems: list[str] = []
    base: BaseCheck = "not verifiable"
    if (trained_on := adapter.base_fingerprint) is not None:
        try:
            base = compare_base(adapter, fingerprint(checkpoint, trained_on), allow_base)
        except AdapterError as error:
            problems.append(str(error))
    unknown: list[str] = []
    matches = []
    for path in adapter.modules:
        try:
            if stored_name(checkpoint, path) is None:
                unknown.append(path)
            else:
                kind, stored = _match_module(adapter.modules[path], checkpoint)
                matches.append(Match(path, adapter.modules, kind, stored, base))
        except CheckpointError as error:
            problems.append(str(error))
    problems += no_such_modules(unknown, checkpoint)
    if problems and not matches and (named := base_name(adapter)):
        problems.insert(0, f"none of its modules fits; it was trained on {named}: give that base")
    raise_problems(adapter.directory, problems, f" does not fit {checkpoint.directory}")
    return matches


def base_name(adapter: Adapter) -> str | None:
    """The base that an adapter's config names."""
    named = adapter.config.get("model") or adapter.config.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def compare_base(adapter: Adapter, base: str, allow_base: bool) -> BaseCheck:
    """Whether an adapter was trained on the base with the fingerprint `base`, of the same kind as
    its own.

    Raises: AdapterError: on another one, without `allow_base`.
    """
    trained_on = adapter.base_fingerprint
    if trained_on is None:
        return "not verifiable"
    if trained_on == base:
        return "verified" if base.startswith(FULL) else "verified by samples"
    if not allow_base:
        raise AdapterError(
            f"adapter {adapter.directory}: trained on the base with fingerprint {trained_on[:69]}, "
            f"this one has {base}; use that base, or --allow-base to use this one"
        )
    return "overridden"


def _with_all_experts(module: LoraModule, stored: StoredWeight) -> LoraModule:
    is_stack = module.is_switch and len(stored.shape) == 3
    return with_experts(module, stored.shape[0]) if is_stack else module


def _match_module(module: LoraModule, checkpoint: Checkpoint) -> tuple[Kind, StoredWeight]:
    """Raises: CheckpointError where the module does not fit its weight."""
    stored = stored_weight(checkpoint, module.path)
    module = _with_all_experts(module, stored)
    kind = _kind(module, stored)
    if kind is None:
        raise CheckpointError(_misfit(module, stored, checkpoint))
    if module.magnitude is not None and len(module.magnitude) != stored.shape[0]:
        raise CheckpointError(
            f"{module.path}: {len(module.magnitude)} magnitudes for {stored.shape[0]} rows of "
            f"{stored.weight.name}"
        )
    bias = checkpoint.tensors.get(f"{stored.weight.name.removesuffix('.weight')}.bias")
    if bias is not None and (bias.shape, bias.dtype in FLOAT_DTYPES) != (stored.shape[:-1], True):
        raise CheckpointError(
            f"{bias.name}: {bias.dtype} {list(bias.shape)} in {bias.file.name}; next to a weight "
            f"{list(stored.shape)} it has to be {list(stored.shape[:-1])} of "
            f"{', '.join(FLOAT_DTYPES)}: download or convert the model again"
        )
    return kind, stored


def _kind(module: LoraModule, stored: StoredWeight) -> Kind | None:
    """What the weight is to this pair; None when the shapes do not fit.

    Only modules with the name of an embedding can be one; among those the shapes decide, and the
    name again where a square weight fits both.
    """
    a, b, weight = module.lora_a.shape, module.lora_b.shape, stored.shape
    if len(weight) == 3:
        fits = module.is_switch and weight == (a[0], b[1], a[2])
        return "switch" if fits else None
    if len(weight) != 2 or module.is_switch:
        return None
    if is_embedding_name(module.path) and weight == (a[0], b[1]):
        return "embedding"
    return "linear" if weight == (b[1], a[0]) else None


def _misfit(module: LoraModule, stored: StoredWeight, checkpoint: Checkpoint) -> str:
    a, b, weight = module.lora_a.shape, module.lora_b.shape, stored.shape
    grid = f" ({stored.bits} bits, group_size {stored.group_size})" if stored.bits else ""
    text = (
        f"{module.path}: lora_a {list(a)} and lora_b {list(b)} do not fit the weight "
        f"{list(weight)}{grid} in {stored.weight.file.name}"
    )
    if len(weight) == 3:
        experts, rows, width = weight
        text += f"; allowed: lora_a [{experts}, r, {width}], lora_b [{experts}, {rows}, r]"
    elif len(weight) == 2:
        rows, width = weight
        pairs = [f"lora_a [{width}, r], lora_b [r, {rows}]"]
        if is_embedding_name(module.path):
            pairs.insert(0, f"lora_a [{rows}, r], lora_b [r, {width}]")
        text += f"; allowed: {' or '.join(pairs)}"
    else:
        text += "; only weights of two or three axes can be adapted"
    if stored.scales is None:
        return text
    # Another grid is named only where it would help: it may be the config that is wrong.
    groups = stored.scales.shape[-1]
    others = [
        (bits, size)
        for bits, size in other_grids(checkpoint, module.path, stored)
        if _kind(module, replace(stored, input_dims=groups * size))
    ]
    if others:
        text += (
            "; config.json's `quantization` does not name the module, so its default holds: if "
            f"the weight is of {grid_texts(others, stored.scales)}, add that there"
        )
    return text
