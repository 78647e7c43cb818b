"""Carries sizes from a traced function (`calls.py`) over to the true graph.

Both come from the same code, so walking down from the results of both at once meets the same
operations. Where they differ is known: operations that only pass an array on, equal operations
merged in the trace, sorted expert products traced unsorted, checkpointing left out of the trace
(what is computed again has the sizes of what it repeats), and fused operations (`fused.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxstacks.guard.fused import match_fused
from mlxstacks.guard.graph import Graph
from mlxstacks.guard.instances import PASSED_ON, Instance
from mlxstacks.guard.pieces import Piece

# Names in the DOT text -> names in a trace; the rest agree in their first word.
_OTHER_NAMES = {
    **dict.fromkeys(("Sum", "Prod", "Max", "Min", "And", "Or"), "Reduce"),
    **dict.fromkeys(("CumSum", "CumProd", "CumMax", "CumMin", "CumLogaddexp"), "Scan"),
    **dict.fromkeys(("ArgMin", "ArgMax"), "ArgReduce"),
    **dict.fromkeys(("Log2", "Log10"), "Log"),
    "Exp2": "Exp",
}


def traced_name(label: str) -> str:
    """The name in a trace of an operation of the true graph."""
    first = label.partition(" ")[0]
    return _OTHER_NAMES.get(first, first)


@dataclass(slots=True)
class Sizes:
    """Bytes of every array of a graph.

    guessed: labels of operations that were met in no trace, with how often.
    """

    nbytes: list[int]
    itemsize: list[int]
    guessed: Counter[str] = field(default_factory=Counter)


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: list[tuple[int, int] | None] = [None] * graph.arrays
        self.done = [False] * len(graph.labels)
        self.waiting: list[tuple[int, Instance, str]] = []
        self.passes = [label in PASSED_ON for label in graph.labels]
        self.fused = [label.startswith("Compiled") for label in graph.labels]
        names = {label: traced_name(label) for label in set(graph.labels)}
        self.names = [names[label] for label in graph.labels]

    def run(self) -> None:
        waiting, done, found, producer = self.waiting, self.done, self.found, self.graph.producer
        while waiting:
            array, at, letter = waiting.pop()
            operation = producer[array]
            if done[operation] if operation >= 0 else found[array] is not None:
                continue
            if operation >= 0 and self.passes[operation]:
                self.pair_dependencies(array, *at.jump(letter))
                array = passed_through(self.graph, array)
                operation = producer[array]
            at, letter = at.resolve(letter)
            if found[array] is None:
                found[array] = at.graph.sizes.get(letter)
            if operation >= 0 and not done[operation]:
                self.step(operation, array, at, letter)

    def pair_dependencies(self, array: int, at: Instance, letter: str) -> None:
        """What a `Depends` waits for is part of the run, although it passes on something else."""
        operation = self.graph.producer[array]
        traced = at.graph.producer.get(letter, -1)
        if operation < 0 or self.done[operation] or traced < 0:
            return
        mine, given = self.graph.inputs[operation], at.graph.inputs[traced]
        both = self.graph.labels[operation] == at.graph.names[traced] == "Depends"
        if both and len(mine) == len(given):
            self.done[operation] = True
            self.waiting += [(a, at, other) for a, other in zip(mine, given, strict=True)]

    def step(self, operation: int, array: int, at: Instance, letter: str) -> None:
        """Pair the inputs of an operation with those of the traced one."""
        inputs, outputs = self.graph.inputs[operation], self.graph.outputs[operation]
        if self.fused[operation]:
            pairs = match_fused(self.graph.labels[operation], inputs, at, letter)
            if pairs:
                self.done[operation] = True
                self.waiting += pairs
            return
        traced = at.graph.producer.get(letter, -1)
        if traced < 0:
            return
        name, given = at.graph.names[traced], at.graph.inputs[traced]
        if name == self.names[operation] and len(given) == len(inputs):
            self.done[operation] = True
            for made, other in zip(outputs, at.graph.outputs[traced], strict=False):
                self.found[made] = at.graph.sizes[other]
            self.waiting += [(a, at, other) for a, other in zip(inputs, given, strict=True)]
        elif name == "Scatter":
            self.sorted_product(operation, array, at, given[-1])

    def sorted_product(self, operation: int, array: int, at: Instance, updates: str) -> None:
        """The gradient of a sorted `gather_mm` beside that of an unsorted one.

        By the input: the product itself, where the unsorted one adds rows up by their index. By
        the weight: a SegmentedMM of flattened factors, where the unsorted one multiplies row by
        row and adds up.
        """
        at, product = _skip(at, updates, ("ExpandDims",))
        traced = at.graph.producer.get(product, -1)
        if traced < 0 or at.graph.names[traced] != "GatherMM":
            return
        label = self.graph.labels[operation]
        if label == "GatherMM":
            self.waiting.append((array, at, product))
        elif label == "SegmentedMM":
            self.done[operation] = True
            views = ("Transpose", "Flatten", "Reshape")
            for index in (0, 1):
                mine = self.graph.inputs[operation][index]
                mine = passed_through(self.graph, mine, views)
                self.waiting.append((mine, *_skip(at, at.graph.inputs[traced][index], views)))


def _skip(at: Instance, letter: str, names: Sequence[str]) -> tuple[Instance, str]:
    at, letter = at.resolve(letter)
    while (operation := at.graph.producer.get(letter, -1)) >= 0:
        if at.graph.names[operation] not in names:
            break
        at, letter = at.resolve(at.graph.inputs[operation][0])
    return at, letter


def passed_through(graph: Graph, array: int, also: Sequence[str] = ()) -> int:
    """The array that an array is, below operations that only pass it on (and views in `also`)."""
    while (operation := graph.producer[array]) >= 0:
        label = graph.labels[operation]
        inputs, outputs = graph.inputs[operation], graph.outputs[operation]
        if label == "CustomTransforms":
            array = inputs[len(inputs) - len(outputs) + outputs.index(array)]
        elif label in PASSED_ON:
            array = inputs[outputs.index(array)]
        elif label in also:
            array = inputs[0]
        else:
            break
    return array


def sizes_of(
    graph: Graph,
    order: Sequence[int],
    results: Sequence[int],
    trace: Piece,
    known: dict[int, tuple[int, int]],
) -> Sizes:
    """Bytes of the arrays that `order` makes and reads.

    results: arrays of `graph`, in the order of the results of `trace`.
    known: (bytes, bytes of an element) of arrays that exist before the run.
    """
    walk = _Walk(graph)
    whole = Instance(trace, None, ())
    walk.waiting = [(a, whole, name) for a, name in zip(results, trace.graph.results, strict=True)]
    walk.run()
    found = walk.found
    for array, size in known.items():
        found[array] = size
    sizes = Sizes([4] * graph.arrays, [4] * graph.arrays)
    for operation in order:
        for index, array in enumerate(graph.outputs[operation]):
            if found[array] is None:
                found[array] = _guess(graph, operation, index, found, sizes.guessed)
    for array, met in enumerate(found):
        if met is not None:
            sizes.nbytes[array], sizes.itemsize[array] = met
    return sizes


def _guess(
    graph: Graph,
    operation: int,
    index: int,
    found: Sequence[tuple[int, int] | None],
    guessed: Counter[str],
) -> tuple[int, int]:
    """The size of an array that was not met: of what it passes on, or of the largest input made.

    Weights do not count: what is looked up in one is far smaller.
    """
    label, inputs = graph.labels[operation], graph.inputs[operation]
    if label == "CustomTransforms":
        inputs = inputs[len(inputs) - len(graph.outputs[operation]) :]
    if label in PASSED_ON:
        return found[inputs[index]] or (4, 4)
    guessed[label] += 1
    made = [size for a in inputs if graph.producer[a] >= 0 and (size := found[a]) is not None]
    return max(made, default=(4, 4))
