"""The rules of `mlxstacks.guard.live`, one operation at a time: slow, and plain to follow."""

from collections import deque
from collections.abc import Iterable, Sequence

from mlxstacks.guard.graph import Graph
from mlxstacks.guard.live import (
    DONATION_SLACK_BYTES,
    EACH,
    FIRST,
    FRESH,
    LAG,
    LAST,
    RESHAPE,
    SCATTERED,
    Peak,
    rule_of,
)


class Buffers:
    """Buffers by number, with the count of who holds each."""

    def __init__(self, arrays: int) -> None:
        self.of_array = [-1] * arrays
        self.holders: list[int] = []
        self.nbytes: list[int] = []
        self.maker: list[int] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self.live = self.live_bytes = 0

    def allocate(self, array: int, nbytes: int, maker: int, now: int) -> None:
        self.of_array[array] = len(self.holders)
        self.holders.append(1)
        self.nbytes.append(nbytes)
        self.maker.append(maker)
        self.born.append(now)
        self.died.append(-1)
        self.live += 1
        self.live_bytes += nbytes

    def share(self, array: int, source: int) -> None:
        buffer = self.of_array[array] = self.of_array[source]
        self.holders[buffer] += 1

    def release(self, buffer: int, now: int) -> None:
        self.holders[buffer] -= 1
        if self.holders[buffer] == 0:
            self.died[buffer] = now
            self.live -= 1
            self.live_bytes -= self.nbytes[buffer]

    def makers_at(self, moment: int) -> list[int]:
        """Makers of the buffers alive while operation number `moment` runs."""
        lives = zip(self.maker, self.born, self.died, strict=True)
        return sorted(
            made for made, born, died in lives if born <= moment and not 0 <= died < moment
        )


def simulate(
    graph: Graph,
    order: Sequence[int],
    held: Iterable[int],
    existing: Iterable[int],
    outputs: Iterable[int],
    nbytes: Sequence[int] | None = None,
    itemsize: Sequence[int] | None = None,
    lag: int = LAG,
    measured_from: int = 0,
    phase_of: Sequence[int] | None = None,
    begins: Sequence[int] = (0,),
    kept: Sequence[int] = (),
    until: int = 0,
) -> Peak:
    """What `live.simulate` says, which has the meaning of the arguments."""
    run = _Run(graph, order, nbytes, itemsize)
    run.begin(held, existing, outputs, begins)
    run.keep(kept, until)
    flight: deque[tuple[int, list[int]]] = deque()
    done = 0
    buffers = run.buffers
    most = most_bytes = at = 0
    phases: dict[int, tuple[int, int]] = {}
    for now, operation in enumerate(order):
        while now in begins and flight:
            for buffer in flight.popleft()[1]:
                buffers.release(buffer, now - 1)
        for array in run.later.get(now, ()):
            buffers.allocate(array, run.nbytes[array], -1 - array, now)
        run.make_outputs(operation, now)
        if buffers.live > most and now >= measured_from:
            most, at = buffers.live, now
        if buffers.live_bytes > most_bytes and now >= measured_from:
            most_bytes = buffers.live_bytes
        if phase_of is not None:
            before = phases.get(phase_of[operation], (0, 0))
            if buffers.live > before[0] or buffers.live_bytes > before[1]:
                both = max(buffers.live, before[0]), max(buffers.live_bytes, before[1])
                phases[phase_of[operation]] = both
        done += 1 if run.rules[operation] in (*range(EACH + 1), RESHAPE) else 2
        flight.append((done, run.hold_in_flight(operation)))
        while flight and flight[0][0] + lag <= done:
            for buffer in flight.popleft()[1]:
                buffers.release(buffer, now)
        run.let_go(operation, now)
        if now == until:
            run.drop(kept, now)
    left = buffers.live
    return Peak(most, most_bytes, buffers.makers_at(at), left, phases)


class _Run:
    """References to arrays, contiguity, and buffers of one simulated run."""

    def __init__(
        self,
        graph: Graph,
        order: Sequence[int],
        nbytes: Sequence[int] | None,
        itemsize: Sequence[int] | None,
    ) -> None:
        self.graph, self.order = graph, order
        self.nbytes = nbytes or [0] * graph.arrays
        self.itemsize = itemsize or [4] * graph.arrays
        self.references = [0] * graph.arrays
        self.dense = [True] * graph.arrays
        self.buffers = Buffers(graph.arrays)
        self.rules = [rule_of(label) for label in graph.labels]

    def begin(
        self,
        held: Iterable[int],
        existing: Iterable[int],
        outputs: Iterable[int],
        begins: Sequence[int],
    ) -> None:
        """Count who asks for each array; allocate what is there before the run. later: what is
        there only from an evaluation on.
        """
        graph, references = self.graph, self.references
        before = dict.fromkeys([*held, *existing], 0)
        start = 0
        for now, operation in enumerate(self.order):
            start = now if now in begins else start
            # MLX keeps one list of inputs an output, so siblings count each input several times.
            outs = len(graph.outputs[operation])
            for array in graph.inputs[operation]:
                references[array] += outs
                if graph.producer[array] < 0:
                    before.setdefault(array, start)
        for array in [*held, *outputs]:
            references[array] += 1
        self.later: dict[int, list[int]] = {}
        for array, start in before.items():
            if start:
                self.later.setdefault(start, []).append(array)
            else:
                self.buffers.allocate(array, self.nbytes[array], -1 - array, 0)

    def keep(self, kept: Sequence[int], until: int) -> None:
        """One more asks for each of these; what no operation reads is there from the start."""
        touched = {array for operation in self.order for array in self.graph.inputs[operation]}
        touched.update(a for operation in self.order for a in self.graph.outputs[operation])
        for array in kept:
            self.references[array] += 1
            if array not in touched and self.buffers.of_array[array] < 0:
                self.buffers.allocate(array, self.nbytes[array], -1 - array, 0)

    def drop(self, kept: Sequence[int], now: int) -> None:
        for array in kept:
            self.references[array] -= 1
            if self.references[array] == 0 and self.buffers.of_array[array] >= 0:
                self.buffers.release(self.buffers.of_array[array], now)

    def make_outputs(self, operation: int, now: int) -> None:
        graph, buffers = self.graph, self.buffers
        outputs, inputs = graph.outputs[operation], graph.inputs[operation]
        rule = self.rules[operation]
        if rule <= EACH:
            self._view(operation, rule)
            return
        source = self._donor(rule, inputs, outputs)
        if source >= 0:
            buffers.share(outputs[0], source)
            return
        for array in outputs:
            buffers.allocate(array, self.nbytes[array], operation, now)

    def _view(self, operation: int, rule: int) -> None:
        outputs, inputs = self.graph.outputs[operation], self.graph.inputs[operation]
        scattered = self.graph.labels[operation] in SCATTERED
        if rule == EACH:
            sources = inputs[: len(outputs)]
        elif rule == LAST:
            sources = inputs[len(inputs) - len(outputs) :]
        else:
            sources = inputs[:1] * len(outputs)
        for array, source in zip(outputs, sources, strict=True):
            self.buffers.share(array, source)
            self.dense[array] = self.dense[source] and not scattered

    def _donor(self, rule: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
        """The input whose buffer becomes the output's, or -1."""
        if rule == FRESH or len(outputs) != 1:
            return -1
        if rule == RESHAPE:
            return inputs[0] if self.dense[inputs[0]] else -1
        size = self.nbytes[outputs[0]]
        item = self.itemsize[outputs[0]]
        for array in inputs[:1] if rule == FIRST else inputs:
            buffer = self.buffers.of_array[array]
            if (
                self.references[array] == 1
                and self.buffers.holders[buffer] == 1
                and self.dense[array]
                and self.itemsize[array] == item
                and size <= self.nbytes[array]
                and self.buffers.nbytes[buffer] <= size + DONATION_SLACK_BYTES
            ):
                return array
        return -1

    def hold_in_flight(self, operation: int) -> list[int]:
        """Buffers that the operation reads, and those of its siblings, held until it has run."""
        outputs, of_array = self.graph.outputs[operation], self.buffers.of_array
        used = {of_array[array] for array in self.graph.inputs[operation]}
        used.update(of_array[array] for array in outputs[1:])
        used.discard(of_array[outputs[0]])
        for buffer in used:
            self.buffers.holders[buffer] += 1
        return list(used)

    def let_go(self, operation: int, now: int) -> None:
        """Drop the operation's own references, and outputs that nobody asks for."""
        outputs, references, buffers = self.graph.outputs[operation], self.references, self.buffers
        for array in self.graph.inputs[operation]:
            references[array] -= len(outputs)
            if references[array] == 0:
                buffers.release(buffers.of_array[array], now)
        for array in outputs:
            if references[array] == 0:
                buffers.release(buffers.of_array[array], now)
