"""PEFT's LoRA on fused expert parameters (`target_parameters`) and mlx-lm's switch modules.

A base parameter is (E, out, in): gate_up_proj (E, 2I, H), gate above up, and down_proj (E, H, I).
PEFT keeps one pair of matrices for all experts; A is grouped by expert, B interleaves them:

    current, PEFT >= 0.19.1   A (E*R, in)    B (out, R*E)   delta[e] = B_e A_e
    legacy, before            A (E*R, out)   B (in, R*E)    delta[e] = A_e^T B_e^T

The parameters of one module are nested wrappers: gate_up_proj is the inner one, whose keys carry a
`.base_layer`. mlx-lm has separate gate and up, so a pair of rank R each becomes one of rank 2R: A
is stacked, B block-diagonal, alpha doubled so that alpha / rank stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.lora_modules import LoraModule, is_zero, widened
from mlxstacks.files.settings import PeftLayout
from mlxstacks.ops.affine import Array

LAYOUTS: tuple[PeftLayout, ...] = ("current", "legacy")
PARAMETERS = ("gate_up_proj", "down_proj")  # inner wrapper first, the order in transformers
FIRST_CURRENT_VERSION = (0, 19, 1)

# How a fused pair was built, kept in the file's metadata; zero adapters do not show it otherwise.
SHARED, BLOCKS, GATE_ONLY, UP_ONLY = "shared", "blocks", "gate_proj", "up_proj"


@dataclass(frozen=True, slots=True)
class FusedPair:
    """One expert parameter as PEFT stores it: lora_a (E*R, X), lora_b (Y, R*E)."""

    block: str  # hub name of the MoE block, `....mlp`
    parameter: str
    lora_a: Array
    lora_b: Array
    dtype: str
    rank: int
    scale: float

    @property
    def name(self) -> str:
        return f"{self.block}.experts.{self.parameter}"

    def problem(self) -> str | None:
        """Why the shapes are no fused pair; None when they are."""
        rows, columns = self.lora_a.shape[0], self.lora_b.shape[1]
        shapes = f"{self.name}: lora_A {list(self.lora_a.shape)}, lora_B {list(self.lora_b.shape)}"
        if rows != columns:
            return f"{shapes}: rank x experts differs"
        return f"{shapes}: rank {self.rank} does not divide {rows}" if rows % self.rank else None

    def dims(self, layout: PeftLayout) -> tuple[int, int]:
        """(in, out) of the base parameter if the file has this layout."""
        x, y = self.lora_a.shape[1], self.lora_b.shape[0]
        return (x, y) if layout == "current" else (y, x)

    def as_switch(self, layout: PeftLayout, path: str) -> LoraModule:
        """The same numbers as lora_a (E, R, in), lora_b (E, out, R). Exact."""
        experts = self.lora_a.shape[0] // self.rank
        grouped = self.lora_a.reshape(experts, self.rank, -1)  # (E, R, X)
        interleaved = self.lora_b.reshape(-1, self.rank, experts)  # (Y, R, E)
        if layout == "current":
            a, b = grouped, interleaved.transpose(2, 0, 1)  # (E, R, in), (E, out, R)
        else:
            a, b = interleaved.transpose(2, 1, 0), grouped.transpose(0, 2, 1)
        return LoraModule(
            path, np.ascontiguousarray(a), np.ascontiguousarray(b), self.dtype, self.scale
        )


def choose_layout(
    pairs: Sequence[FusedPair],
    hidden: int | None,
    version: tuple[int, ...] | None,
    asked: PeftLayout | None,
) -> PeftLayout:
    """The one layout that all pairs fit.

    hidden: width of the model's hidden state, where known. version: PEFT that wrote the file; it
    decides only where the shapes fit both layouts. asked: the user's word.

    Raises: AdapterError when none fits, `asked` does not, or both do and nothing decides.
    """
    fitting = [layout for layout in LAYOUTS if _fits(pairs, layout, hidden)]
    shapes = "; ".join(
        f"{p.name} lora_A {list(p.lora_a.shape)} lora_B {list(p.lora_b.shape)}" for p in pairs[:2]
    )
    known = f" with hidden size {hidden}" if hidden else ""
    if not fitting or (asked is not None and asked not in fitting):
        wanted = f"the layout {asked!r}" if asked and fitting else "neither layout of PEFT"
        raise AdapterError(f"experts fit {wanted}{known}: {shapes}")
    if asked is not None:
        return asked
    if len(fitting) == 1:
        return fitting[0]
    if version is not None:
        return "current" if version >= FIRST_CURRENT_VERSION else "legacy"
    raise AdapterError(
        f"experts fit both layouts of PEFT{known}: {shapes}; say which wrote them with "
        "--peft-layout current (PEFT >= 0.19.1) or --peft-layout legacy"
    )


def _fits(pairs: Sequence[FusedPair], layout: PeftLayout, hidden: int | None) -> bool:
    """Whether one hidden size and, within a block, one expert width explain every pair."""
    hiddens = set() if hidden is None else {hidden}
    widths: dict[str, set[int]] = {}
    for pair in pairs:
        inner, outer = pair.dims(layout)
        if pair.parameter == "gate_up_proj":
            if outer % 2:
                return False
            inner, outer = outer // 2, inner
        hiddens.add(outer)
        widths.setdefault(pair.block, set()).add(inner)
    return len(hiddens) <= 1 and all(len(found) == 1 for found in widths.values())


def split_gate_up(pair: FusedPair, layout: PeftLayout, how: str | None) -> list[LoraModule]:
    """gate_proj and up_proj of one fused pair, named `gate_proj` and `up_proj`.

    how: the mark that `join_gate_up` left, None in files of PEFT's own. Without it, a B that is
    block-diagonal is split, and a half whose B is zero throughout is dropped.
    Law: split_gate_up(join_gate_up(gate, up)) is [gate, up], bit for bit.
    """
    both = pair.as_switch(layout, "gate_up_proj")
    half = both.lora_b.shape[1] // 2
    gate = replace(both, path="gate_proj", lora_b=both.lora_b[:, :half])
    up = replace(both, path="up_proj", lora_b=both.lora_b[:, half:])
    how = _how_built(gate, up, how)
    if how == GATE_ONLY:
        return [gate]
    if how == UP_ONLY:
        return [up]
    if how == BLOCKS:
        rank = both.rank // 2
        return [_ranks(gate, 0, rank), _ranks(up, rank, both.rank)]
    return [gate, up]


def _how_built(gate: LoraModule, up: LoraModule, mark: str | None) -> str:
    """The mark where the numbers allow it, else what the numbers show."""
    rank = gate.rank // 2
    gate_zero, up_zero = is_zero(gate.lora_b, gate.dtype), is_zero(up.lora_b, up.dtype)
    diagonal = (
        gate.rank % 2 == 0
        and is_zero(gate.lora_b[:, :, rank:], gate.dtype)
        and is_zero(up.lora_b[:, :, :rank], up.dtype)
    )
    possible = {SHARED: True, BLOCKS: diagonal, GATE_ONLY: up_zero, UP_ONLY: gate_zero}
    if mark is not None and possible.get(mark):
        return mark
    if gate_zero or up_zero:
        return SHARED if gate_zero and up_zero else UP_ONLY if gate_zero else GATE_ONLY
    return BLOCKS if diagonal else SHARED


def _ranks(module: LoraModule, first: int, last: int) -> LoraModule:
    return replace(
        module, lora_a=module.lora_a[:, first:last], lora_b=module.lora_b[:, :, first:last]
    )


def join_gate_up(gate: LoraModule | None, up: LoraModule | None) -> tuple[LoraModule, str]:
    """One switch pair for gate_up_proj, lora_b (E, 2I, R or 2R), and how it was built.

    Raises: AdapterError when the two have other experts, widths or scales.
    """
    if gate is None or up is None:
        only = gate or up
        assert only is not None
        zeros = np.zeros_like(only.lora_b)
        halves = [only.lora_b, zeros] if gate else [zeros, only.lora_b]
        joined = replace(only, lora_b=np.concatenate(halves, axis=1))
        return joined, GATE_ONLY if gate else UP_ONLY
    _check_alike(gate, up)
    if gate.dtype != up.dtype:
        gate, up = widened(gate), widened(up)
    if gate.lora_a.shape == up.lora_a.shape and gate.lora_a.tobytes() == up.lora_a.tobytes():
        return replace(gate, lora_b=np.concatenate([gate.lora_b, up.lora_b], axis=1)), SHARED
    a = np.concatenate([gate.lora_a, up.lora_a], axis=1)  # (E, 2R, K)
    experts, width, rank = gate.lora_b.shape
    b = np.zeros((experts, 2 * width, 2 * rank), dtype=gate.lora_b.dtype)  # (E, 2I, 2R)
    b[:, :width, :rank], b[:, width:, rank:] = gate.lora_b, up.lora_b
    return replace(gate, lora_a=a, lora_b=b), BLOCKS


def _check_alike(gate: LoraModule, up: LoraModule) -> None:
    same = gate.lora_b.shape == up.lora_b.shape and gate.lora_a.shape == up.lora_a.shape
    if not same or gate.scale != up.scale:
        raise AdapterError(
            f"{gate.path} and {up.path} need one shape and scale to share PEFT's gate_up_proj: "
            f"lora_b {list(gate.lora_b.shape)} and {list(up.lora_b.shape)}, scales {gate.scale} "
            f"and {up.scale}"
        )


def as_fused(module: LoraModule) -> tuple[Array, Array]:
    """PEFT's current layout of a switch pair: A (E*R, K), B (N, R*E). Exact."""
    experts, rank, input_dims = module.lora_a.shape
    a = module.lora_a.reshape(experts * rank, input_dims)  # (E*R, K)
    b = module.lora_b.transpose(1, 2, 0).reshape(-1, rank * experts)  # (N, R*E)
    return a, np.ascontiguousarray(b)
