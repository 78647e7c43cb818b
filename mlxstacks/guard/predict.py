"""From graphs of short rows to the buffers and bytes of a long one.

Which moment of a step is the fullest changes with the length of the rows. So each phase of a step
(a layer's multiplications on the way back, say) has a line of its own through two short lengths,
and the highest of these lines at the wanted length is the prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mlxstacks.guard.kinds import FIXED, STATE, Phase, buffers_by_kind, layering
from mlxstacks.guard.step import Step, no_collection, simulate_step, step_graph, step_sizes

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A step on rows of `tokens` tokens, simulated.

    phases: the most buffers and bytes while each phase ran; without them the whole step is one.
    """

    tokens: int
    buffers: int
    nbytes: int | None
    kinds: dict[str, int]
    phases: dict[Phase, tuple[int, int]]


@dataclass(frozen=True)
class Prediction:
    """The peak of a training step.

    points: what was simulated: `tokens` itself, or two shorter rows.
    note: why bytes are missing, or empty.
    held: buffers and bytes that the run keeps beside the step.
    """

    tokens: int
    points: tuple[Point, ...]
    note: str = ""
    held: tuple[int, int] = (0, 0)

    @property
    def extrapolated(self) -> bool:
        return len(self.points) > 1

    def buffers_at(self, tokens: int) -> int:
        """Buffers alive at the peak of a step on rows of `tokens` tokens."""
        return round(self._highest_line(0, tokens)[0]) + self.held[0]

    def bytes_at(self, tokens: int) -> int | None:
        """Bytes at the peak."""
        if any(point.nbytes is None for point in self.points):
            return None
        return round(self._highest_line(1, tokens)[0]) + self.held[1]

    @property
    def buffers(self) -> int:
        return self.buffers_at(self.tokens)

    @property
    def nbytes(self) -> int | None:
        return self.bytes_at(self.tokens)

    @property
    def buffers_per_token(self) -> float:
        """The slope of the line; with a single length, the average."""
        return self._highest_line(0, self.tokens)[1]

    @property
    def kinds(self) -> dict[str, int]:
        """Buffers by kind of layer, most first: those of the longest simulated rows.

        Weights, adapter and optimizer are what they are; the rest is scaled to the wanted length.
        """
        last = self.points[-1]
        fixed = sum(count for name, count in last.kinds.items() if name in FIXED)
        share = (self.buffers - self.held[0] - fixed) / max(last.buffers - fixed, 1)
        found = {
            name: count if name in FIXED else round(share * count)
            for name, count in last.kinds.items()
        }
        if self.held[0]:
            found[STATE] = found.get(STATE, 0) + self.held[0]
        # What rounding left over belongs to the largest.
        found[max(found, key=lambda name: found[name])] += self.buffers - sum(found.values())
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def _highest_line(self, which: int, tokens: int) -> tuple[float, float]:
        """Value and slope at `tokens` of the phase that is highest there."""
        if not self.extrapolated:
            last = self.points[-1]
            whole = (last.buffers, last.nbytes or 0)[which]
            return whole * max(tokens / last.tokens, 1.0), whole / last.tokens
        ends, slopes = (column[which] for column in self._lines)
        values = ends + slopes * (tokens - self.points[-1].tokens)
        highest = values.max()
        return float(highest), float(slopes[values == highest].max())

    @cached_property
    def _lines(self) -> tuple[Floats, Floats]:
        """Of each phase, and of the whole step: where its lines end, and their slopes.

        Both (2, phases + 1): buffers, then bytes.
        """
        first, last = self.points[-2:]
        pairs = [(first.phases[p], both) for p, both in last.phases.items() if p in first.phases]
        pairs.append(((first.buffers, first.nbytes or 0), (last.buffers, last.nbytes or 0)))
        before, after = np.array(pairs, np.float64).transpose(1, 2, 0)
        return after, (after - before) / (last.tokens - first.tokens)


def simulate_at(step: Step, tokens: int, with_bytes: bool = True) -> tuple[Point, str]:
    """One simulated step, and why its bytes are not known (or nothing)."""
    sizes, note = None, ""
    with no_collection():
        graph = step_graph(step)
        if with_bytes:
            try:
                sizes = step_sizes(step, graph)
            except ValueError as error:
                if "export_function" not in str(error):
                    raise
                note = f"Bytes are not predicted: {error}"
        layers = layering(graph)
        peak = simulate_step(graph, sizes, layers.phase_of)
        kinds = buffers_by_kind(step.model, graph, layers, peak)
    nbytes = None if sizes is None else peak.nbytes
    phases = {layers.phases[number]: both for number, both in peak.phases.items()}
    return Point(tokens, peak.buffers, nbytes, kinds, phases), note


def predict(
    step_at: Callable[[int], Step],
    tokens: int,
    lengths: tuple[int, int],
    direct_up_to: int,
    with_bytes: bool = True,
) -> Prediction:
    """The peak at `tokens` tokens: simulated up to `direct_up_to`, beyond on lines.

    lengths: of the two rows to draw lines through.
    """
    points, note = [], ""
    for length in (tokens,) if tokens <= direct_up_to else lengths:
        point, note = simulate_at(step_at(length), length, with_bytes)
        points.append(point)
    return Prediction(tokens, tuple(points), note)
