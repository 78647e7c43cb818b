"""Which frozen stacks answer, and how much each counts: the mode of a model.

base      none of them, nor the active one
ungated   all at weight 1, and the active one: how stacks are trained
subset    the named stacks or domains at weight 1
routed    domains by weight, for the whole batch or for each sequence
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

Mode = Literal["base", "ungated", "subset", "routed"]


@dataclass(frozen=True)
class StackId:
    """Name of a stack (unique in a model) and the domain it was trained on."""

    name: str
    domain: str


@dataclass(frozen=True, eq=False)
class Selection:
    """Weights of stacks. Made by `base`, `ungated`, `subset` and `routed` below.

    names: stacks or domains, in the order of the columns of `weights`. weights: (D,) or, for each
    sequence, (B, D) float32; zero where not above the threshold. active: whether the stack in
    training answers too.
    """

    mode: Mode = "ungated"
    active: bool = True
    names: tuple[str, ...] = ()
    weights: np.ndarray | None = None

    def of(self, ids: Sequence[StackId]) -> tuple[list[int], mx.array | None]:
        """Positions of the kept stacks, and their weights: None where all are 1, else (S,) or
        (B, S).

        A stack that counts nothing for any sequence is not kept.
        """
        if self.mode == "base":
            return [], None
        if self.weights is None:
            return list(range(len(ids))), None
        columns = [self._column(stack_id) for stack_id in ids]
        kept = {i: c for i, c in enumerate(columns) if c is not None and np.any(c != 0)}
        if not kept:
            return [], None
        weights = np.stack(list(kept.values()), axis=-1)  # (S,) or (B, S)
        return list(kept), None if np.all(weights == 1) else mx.array(weights)

    def _column(self, stack_id: StackId) -> np.ndarray | None:
        """Weight of a stack, () or (B,): by its own name, else by its domain."""
        assert self.weights is not None
        for name in (stack_id.name, stack_id.domain):
            if name in self.names:
                return self.weights[..., self.names.index(name)]
        return None


def base() -> Selection:
    """The base alone."""
    return Selection(mode="base", active=False)


def ungated() -> Selection:
    """Everything at weight 1."""
    return Selection()


def subset(names: Iterable[str]) -> Selection:
    """These stacks or domains at weight 1, the others not at all."""
    listed = tuple(names)
    return Selection("subset", False, listed, np.ones(len(listed), dtype=np.float32))


def routed(
    names: Sequence[str], weights: object, threshold: float = 0.0, active: bool = False
) -> Selection:
    """Domains (or stacks) by weight.

    weights: (D,) for all sequences or (B, D) for each, in the order of `names`. At or below the
    threshold a domain is off for that sequence; off for all of them, it is sliced away and costs
    nothing.
    Raises: ValueError for another shape, or a weight that is not finite.
    """
    values = np.asarray(weights, dtype=np.float32)
    if values.ndim not in (1, 2) or values.shape[-1] != len(names) or values.shape[0] == 0:
        raise ValueError(
            f"weights: got shape {values.shape}; allowed is ({len(names)},) or (B, {len(names)}) "
            f"for {', '.join(names) or 'no names'}"
        )
    if not np.isfinite(values).all():
        raise ValueError("weights: NaN or Inf among them; a domain's weight is a finite number")
    return Selection("routed", active, tuple(names), np.where(values > threshold, values, 0))


def check_names(selection: Selection, ids: Iterable[StackId]) -> None:
    """Raises: ValueError naming what a selection asks for and no stack is called."""
    known = sorted({name for stack_id in ids for name in (stack_id.name, stack_id.domain)})
    problems = []
    for name in selection.names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"; close: {', '.join(close)}" if close else ""
            problems.append(f"{name!r} is no stack or domain here{hint}")
    if problems:
        there = ", ".join(known) or "none"
        raise ValueError("\n  ".join([f"known stacks and domains: {there}", *problems]))
