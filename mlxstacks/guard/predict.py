"""From graphs of short rows to the buffers and bytes of a long one.

Which moment of a step is the fullest changes with the length of the rows. So each phase of a step
(a layer's multiplications on the way back, say) has a line of its own through two short lengths,
and the highest of these lines at the wanted length is the prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mlxstacks.guard.kinds import FIXED, Phase, buffers_by_kind, layering
from mlxstacks.guard.step import Step, no_collection, simulate_step, step_graph, step_sizes


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
    """

    tokens: int
    points: tuple[Point, ...]
    note: str = ""

    @property
    def extrapolated(self) -> bool:
        return len(self.points) > 1

    def buffers_at(self, tokens: int) -> int:
        """Buffers alive at the peak of a step on rows of `tokens` tokens."""
        return round(self._highest_line(0, tokens)[0])

    def bytes_at(self, tokens: int) -> int | None:
        """Bytes at the peak."""
        if any(point.nbytes is None for point in self.points):
            return None
        return round(self._highest_line(1, tokens)[0])

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
        share = (self.buffers - fixed) / max(last.buffers - fixed, 1)
        found = {
            name: count if name in FIXED else round(share * count)
            for name, count in last.kinds.items()
        }
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def _highest_line(self, which: int, tokens: int) -> tuple[float, float]:
        """Value and slope at `tokens` of the phase that is highest there."""
        last = self.points[-1]
        whole = (last.buffers, last.nbytes or 0)[which]
        if not self.extrapolated:
            return whole * max(tokens / last.tokens, 1.0), whole / last.tokens
        first = self.points[-2]
        pairs = [(first.phases[phase], both) for phase, both in last.phases.items()
                 if phase in first.phases]  # fmt: skip
        pairs.append(((first.buffers, first.nbytes or 0), (last.buffers, last.nbytes or 0)))
        lines = []
        for before, after in pairs:
            slope = (after[which] - before[which]) / (last.tokens - first.tokens)
            lines.append((after[which] + slope * (tokens - last.tokens), slope))
        return max(lines)


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
