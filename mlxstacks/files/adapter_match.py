"""Lays an adapter on a checkpoint: every module finds its weight, or one error lists what does not.

mlx-lm stores no mark of the base in an adapter. Names and shapes are therefore checked for all;
where an adapter carries our fingerprint, the base itself is.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.adapter_names import is_embedding_name
from mlxstacks.files.checkpoint import Checkpoint, fingerprint
from mlxstacks.files.lora_modules import FLOAT_DTYPES, Adapter, LoraModule, with_experts
from mlxstacks.files.manifest import FULL
from mlxstacks.files.stored_weight import (
    StoredWeight,
    grid_texts,
    module_paths,
    other_grids,
    stored_name,
    stored_weight,
)

Kind = Literal["linear", "switch", "embedding"]
BaseCheck = Literal["verified", "verified by samples", "not verifiable", "overridden"]

# Nearest names cost time in proportion to modules x problems (30 microseconds each); further
# problems are listed without.
_NAMED_NEIGHBOURS, _COMPARED_NAMES = 20, 40_000


@dataclass(frozen=True, slots=True)
class Match:
    """An adapted module and the weight that it changes."""

    module: LoraModule
    kind: Kind
    stored: StoredWeight
    base: BaseCheck


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
    base = _check_base(adapter, checkpoint, allow_base, problems)
    unknown: list[str] = []
    matches = []
    for path, module in adapter.modules.items():
        try:
            known = stored_name(checkpoint, path) is not None
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if not known:
            unknown.append(path)
            continue
        match = _match_module(module, checkpoint, base, problems)
        if match is not None:
            matches.append(match)
    problems += no_such_modules(unknown, checkpoint)
    if problems:
        many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise AdapterError(
            f"adapter {adapter.directory} does not fit {checkpoint.directory}: {many}{lines}"
        )
    return matches


def _check_base(
    adapter: Adapter, checkpoint: Checkpoint, allow_base: bool, problems: list[str]
) -> BaseCheck:
    trained_on = adapter.base_fingerprint
    if trained_on is None:
        return "not verifiable"
    found = fingerprint(checkpoint, trained_on)
    if trained_on == found:
        return "verified" if found.startswith(FULL) else "verified by samples"
    if not allow_base:
        problems.append(
            f"trained on the base with fingerprint {trained_on}, this one has {found}; use that "
            "base, or --allow-base to go on with this one"
        )
    return "overridden"


def no_such_modules(paths: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """A problem for each path, which is no module of the model; the first name the nearest."""
    candidates = module_paths(checkpoint) if paths else []
    compared = min(_NAMED_NEIGHBOURS, max(1, _COMPARED_NAMES // max(1, len(candidates))))
    problems = []
    for number, path in enumerate(paths):
        near = difflib.get_close_matches(path, candidates, 2) if number < compared else []
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        problems.append(f"{path}: no such module in the model{nearest}")
    return problems


def _match_module(
    module: LoraModule, checkpoint: Checkpoint, base: BaseCheck, problems: list[str]
) -> Match | None:
    try:
        stored = stored_weight(checkpoint, module.path)
    except CheckpointError as error:
        problems.append(str(error))
        return None
    if module.is_switch and len(stored.shape) == 3:
        module = with_experts(module, stored.shape[0])
    kind = _kind(module, stored)
    if kind is None:
        problems.append(_misfit(module, stored, checkpoint))
        return None
    bias = checkpoint.tensors.get(f"{stored.weight.name.removesuffix('.weight')}.bias")
    if bias is not None and (bias.shape, bias.dtype in FLOAT_DTYPES) != (stored.shape[:-1], True):
        problems.append(
            f"{bias.name}: {bias.dtype} {list(bias.shape)} in {bias.file.name}; beside a weight "
            f"{list(stored.shape)} it has to be {list(stored.shape[:-1])} of "
            f"{', '.join(FLOAT_DTYPES)}: download or convert the model again"
        )
        return None
    return Match(module, kind, stored, base)


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
