"""Which buffers are alive while a graph runs: MLX's rules of allocation, sharing and donation.

Nothing is evaluated. Operations are gone through in the order of `evaluation_order`; each
takes new buffers, shares one with an input (a view), or takes one over from an input that nobody
else needs (a donation). Rules as measured on MLX 0.32.4's CPU backend (`tests/guard` compares the
result with a counting allocator). On Metal single kernels replace groups of operations; the graph
is then built there and differs, the rules stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxstacks.guard.graph import Bools, Graph, Ints

# Dispatches that MLX's CPU backend lets be in flight: ten tasks of ten, and one under way (MLX
# 0.32.4, backend/cpu/eval.cpp and encoder.h). The buffers that they read stay alive meanwhile.
LAG = 110
# MLX donates a buffer that is at most this much larger than the result.
DONATION_SLACK_BYTES = 16384
SHARE, LAST, EACH, RESHAPE, FIRST, ANY, FRESH = range(7)


_LABELS = {
    SHARE: "Broadcast ExpandDims Squeeze Transpose Slice Split StopGradient Copy AsStrided",
    EACH: "Depends",
    LAST: "CustomTransforms",
    RESHAPE: "Reshape Flatten Unflatten Contiguous",
    # Unary ones; an update is written into the old array when nobody else reads that.
    FIRST: "Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType BitwiseInvert Ceil Conjugate "
    "Cos Cosh Erf ErfInv Exp Exp2 Expm1 Floor Log Log1p Log2 LogicalNot Negative Round Rsqrt "
    "Sigmoid Sign Sin Sinh Softmax Sqrt Square Tan Tanh SliceUpdate Scatter ScatterAxis",
    ANY: "Add ArcTan2 BitwiseAnd BitwiseOr BitwiseXor Divide Equal FloorDivide Greater "
    "GreaterEqual LeftShift Less LessEqual LogAddExp LogicalAnd LogicalOr Maximum Minimum Multiply "
    "NotEqual Power Remainder RightShift Select Subtract",
}
_RULES = {label: rule for rule, labels in _LABELS.items() for label in labels.split()}
# Views after which a reshape has to copy, and which cannot be donated.
SCATTERED = frozenset(("Broadcast", "Transpose", "Split", "AsStrided"))


def rule_of(label: str) -> int:
    """What an operation does with buffers. `Scatter Sum` goes by its first word."""
    if label.startswith("Compiled"):
        return ANY
    return _RULES.get(label.partition(" ")[0], FRESH)


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moments of a run.

    buffers, nbytes: the most buffers and the most bytes alive at once, at two moments.
    makers: for each buffer alive at the first of them, the operation that made it, or -1 - array
        for one that was there before.
    left: buffers alive once the run is over.
    phases: the most buffers and the most bytes while each phase ran, by phase.
    """

    buffers: int
    nbytes: int
    makers: list[int]
    left: int
    phases: dict[int, tuple[int, int]]


def simulate(
    graph: Graph,
    order: Sequence[int],
    held: Sequence[int],
    existing: Sequence[int],
    outputs: Sequence[int],
    nbytes: Sequence[int] | Ints | None = None,
    itemsize: Sequence[int] | Ints | None = None,
    lag: int = LAG,
    measured_from: int = 0,
    phase_of: Sequence[int] | None = None,
    begins: Sequence[int] = (0,),
    kept: Sequence[int] = (),
    until: int = 0,
) -> Peak:
    """Run `order` on paper.

    held: arrays that stay alive (frozen weights, the batch).
    existing: arrays that are there before and die after their last use (old adapter weights).
    outputs: arrays that stay alive once made.
    nbytes, itemsize: of each array; without them only buffers are counted.
    lag: dispatches in flight. measured_from: the place in the order where the peak may begin.
    phase_of: the phase that each operation belongs to.
    begins: the places in the order where evaluations begin. One waits for all that is in flight,
        and its constants are not there before.
    kept: arrays, there before or made, that stay alive up to the place `until` in the order.

    Law: the same as going through the order one operation at a time (`tests/guard/one_by_one.py`).
    """
    sizes = np.zeros(graph.arrays, np.int64) if nbytes is None else np.array(nbytes)
    widths = np.full(graph.arrays, 4) if itemsize is None else np.array(itemsize)
    run = _Run(graph, order, held, existing, outputs, begins, kept, until)
    root, dense = _views(run)
    # When each operation lets go of what it reads; `end`: never. Each dispatches a task that holds
    # what it read; if it computes, it has dispatched that before.
    done = np.cumsum(np.where((run.rule <= EACH) | (run.rule == RESHAPE), 1, 2))
    landed = np.minimum(np.searchsorted(done, done + lag), run.next_starts - 1)
    donors = _donors(run, root, dense, sizes, widths, landed)
    owner = list(range(len(root)))  # for each array the one that its buffer was allocated for
    for array, donor in donors:
        before = owner[donor]
        # The first input that fits is taken.
        if owner[array] == array and sizes[before] <= sizes[array] + DONATION_SLACK_BYTES:
            owner[array] = before
    born, died = _lives(run, np.array(owner)[root], landed)
    return _peak(run, born, died, sizes, measured_from, phase_of)


class _Run:
    """When each array is made and last used. A time is a place in the order; `end` is never.

    read, read_at: every input of every operation and its time; made, made_at: every output.
    first_in, first_out: where in `read` and `made` an operation's own begin; ins, outs: how many.
    birth: -1 for what is there before the run, `end` for what the run does not touch.
    starts: of each operation, where its evaluation begins; next_starts: where the next one does.
    kept: whether each array stays alive up to the place `until`.
    """

    def __init__(
        self,
        graph: Graph,
        order: Sequence[int],
        held: Sequence[int],
        existing: Sequence[int],
        results: Sequence[int],
        begins: Sequence[int],
        kept: Sequence[int],
        until: int,
    ) -> None:
        self.order, self.end = np.array(order, np.int64), len(order)
        place = np.searchsorted(begins, np.arange(self.end), "right")
        self.starts, self.next_starts = np.append([0, *begins], self.end + 1)[[place, place + 1]]
        inputs, outputs = graph.inputs.take(self.order), graph.outputs.take(self.order)
        self.read, self.read_at = inputs.values, inputs.owners
        self.made, self.made_at = outputs.values, outputs.owners
        self.ins, self.outs = inputs.lengths, outputs.lengths
        self.first_in, self.first_out = inputs.cuts[:-1], outputs.cuts[:-1]
        label = graph.label[self.order]
        self.rule = np.array([rule_of(name) for name in graph.names], np.int64)[label]
        self.scatters = np.array([name in SCATTERED for name in graph.names], np.bool_)[label]
        self.birth = np.full(graph.arrays, self.end)
        # Of several reads the first one counts.
        first = self.starts[self.read_at[::-1]]
        self.birth[self.read[::-1]] = np.where(first > 0, first, -1)
        self.birth[self.made] = self.made_at
        self.birth[[*held, *existing]] = -1
        self.death = np.full(graph.arrays, self.end)
        # An array that nobody asks for dies as it is made. Of several reads the last one counts.
        self.death[self.made] = self.made_at
        self.death[self.read] = self.read_at
        self.kept, self.until = np.zeros(graph.arrays, np.bool_), until
        self.kept[[*kept]] = True
        unread = self.kept & (self.death == self.end)
        self.birth[unread] = -1
        self.death[unread] = until
        self.death[self.kept] = np.maximum(self.death[self.kept], until)
        self.death[[*held, *results]] = self.end


def _views(run: _Run) -> tuple[Ints, Bools]:
    """For each array the one whose buffer it shows, and whether that is row-contiguous."""
    arrays = len(run.birth)
    source = np.arange(arrays)
    scattered = np.zeros(arrays, np.bool_)
    at = run.made_at
    place = np.arange(len(at)) - run.first_out[at]
    rule = run.rule[at]
    # Depends passes on its first inputs in their order, CustomTransforms its last ones.
    place += np.where(rule == LAST, run.ins[at] - run.outs[at], 0)
    place[rule == SHARE] = 0
    views = (rule <= EACH) & (run.birth[run.made] >= 0)
    source[run.made[views]] = run.read[(run.first_in[at] + place)[views]]
    scattered[run.made[views]] = run.scatters[at[views]]
    above, further = source, source[source]
    scattered |= scattered[above]
    while (above != further).any():
        above, further = further, further[further]
        scattered |= scattered[above]
    reshaped = np.flatnonzero((run.rule == RESHAPE) & (run.outs == 1))
    reshaped = reshaped[~scattered[run.read[run.first_in[reshaped]]]]
    source[run.made[run.first_out[reshaped]]] = run.read[run.first_in[reshaped]]
    while (source != source[source]).any():
        source = source[source]
    return source, ~scattered


def _holds(run: _Run, buffer: Ints) -> tuple[Ints, Ints]:
    """Buffers and the times of operations that hold them while in flight.

    Those that an operation reads, and those of its results but the first; not the first's own.
    """
    first_result = buffer[run.made[run.first_out]]
    later = np.flatnonzero(run.made_at[1:] == run.made_at[:-1]) + 1
    held = np.concatenate([buffer[run.read], buffer[run.made[later]]])
    times = np.concatenate([run.read_at, run.made_at[later]])
    apart = held != first_result[times]
    return held[apart], times[apart]


def _donors(
    run: _Run, root: Ints, dense: Bools, sizes: Ints, widths: Ints, landed: Ints
) -> list[tuple[int, int]]:
    """(result, input whose buffer it may take over), in the order in which they are tried.

    Nobody else may need the input, nor a view of it; and no operation that read one is in flight.
    """
    array, at = run.read, run.read_at
    result = run.made[run.first_out[at]]
    first = np.arange(len(array)) == run.first_in[at]
    fits = (run.outs[at] == 1) & ((run.rule[at] == ANY) | (run.rule[at] == FIRST) & first)
    fits &= dense[array] & (widths[array] == widths[result]) & (sizes[result] <= sizes[array])
    # It is read for the last time, and once.
    last_reads = (run.death[array] == at) & ~(run.kept[array] & (at == run.until))
    fits &= last_reads & (np.bincount(array[last_reads], minlength=len(root))[array] == 1)
    # All that share its buffer are dead.
    alive = np.flatnonzero(run.birth < run.end)
    gone = np.full(len(root), -1)
    np.maximum.at(gone, root[alive], run.death[alive])
    latest = alive[run.death[alive] == gone[root[alive]]]
    alone = np.bincount(root[latest], minlength=len(root)) == 1
    fits &= (gone[root[array]] == at) & alone[root[array]]
    held, times = _holds(run, root)
    before = times < gone[held]
    busy_until = np.full(len(root), -1)
    np.maximum.at(busy_until, held[before], landed[times[before]])
    fits &= busy_until[root[array]] < at
    return list(zip(result[fits].tolist(), root[array[fits]].tolist(), strict=True))


def _lives(run: _Run, buffer: Ints, landed: Ints) -> tuple[Ints, Ints]:
    """When the buffer that was allocated for an array is there; `end` where there is none."""
    touched = np.flatnonzero(run.birth < run.end)
    died = np.full(len(buffer), -1)
    np.maximum.at(died, buffer[touched], run.death[touched])
    held, times = _holds(run, buffer)
    np.maximum.at(died, held, landed[times])
    allocated = buffer == np.arange(len(buffer))
    return np.where(allocated, run.birth, run.end), died


def _peak(
    run: _Run,
    born: Ints,
    died: Ints,
    sizes: Ints,
    measured_from: int,
    phase_of: Sequence[int] | None,
) -> Peak:
    """Buffers are counted once an operation has its results and before it lets go of anything."""
    buffers = np.flatnonzero(born < run.end)
    born, died, sizes = born[buffers], died[buffers], sizes[buffers]
    live = _alive(born, died, np.ones_like(sizes), run.end)
    live_bytes = _alive(born, died, sizes, run.end)
    at = measured_from + int(live[measured_from:-1].argmax()) if run.end > measured_from else 0
    moment = (born <= at) & (died >= at)
    operation = np.append(run.order, -1)[born]
    is_made = np.isin(buffers, run.made)
    makers = np.where(is_made, operation, -1 - buffers)[moment]
    phases: dict[int, tuple[int, int]] = {}
    if phase_of is not None:
        phase = np.array(phase_of, np.int64)[run.order]
        most = np.zeros((2, phase.max(initial=0) + 1), np.int64)
        np.maximum.at(most[0], phase, live[:-1])
        np.maximum.at(most[1], phase, live_bytes[:-1])
        phases = {p: (int(most[0, p]), int(most[1, p])) for p in np.unique(phase).tolist()}
    return Peak(
        int(live[measured_from:-1].max(initial=0)),
        int(live_bytes[measured_from:-1].max(initial=0)),
        makers.tolist(),
        int(live[-1]),
        phases,
    )


def _alive(born: Ints, died: Ints, weights: Ints, end: int) -> Ints:
    """Sum of the weights of what is alive at each time, and at last of what is left."""
    change = np.zeros(end + 3, np.int64)
    np.add.at(change, born + 1, weights)
    np.subtract.at(change, died + 2, weights)
    return change.cumsum()[1 : end + 2]
