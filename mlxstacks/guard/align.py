"""Carries sizes from a traced function (`trace.py`) over to the true graph.

Both come from the same code, so walking down from the results of both at once meets the same
operations. Where they differ is known: operations that only pass an array on, equal operations
merged in the trace, sorted expert products traced unsorted, checkpointing left out of the trace
(what is computed again has the sizes of what it repeats), and operations fused by `mx.compile`.

A fused operation carries the names of its parts in its label, each part after its inputs:
`CompiledBroadcastMultiplyAdd`. Walking the trace from the fused result, every input is either a
part too, which then stands next in the label, or an input of the whole.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mlxstacks.guard.graph import Graph, Ints
from mlxstacks.guard.trace import PASSED_ON, Instance, Piece

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

    nbytes: Ints
    itemsize: Ints
    guessed: Counter[str]


class _Walk:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs, self.outputs = graph.inputs.tuples, graph.outputs.tuples
        self.producer = graph.producer.tolist()
        self.found: list[tuple[int, int] | None] = [None] * graph.arrays
        self.done = [False] * len(graph.label)
        self.waiting: list[tuple[int, Instance, str]] = []
        names = [traced_name(label) for label in graph.names]
        self.names = [names[label] for label in graph.label.tolist()]

    def run(self) -> None:
        waiting, done, sizes, producer = self.waiting, self.done, self.found, self.producer
        while waiting:
            array, at, letter = waiting.pop()
            operation = producer[array]
            if operation >= 0:
                if done[operation]:
                    continue
                if self.names[operation] in PASSED_ON:
                    self.pair_dependencies(array, *at.jump(letter))
                    array = self.passed_through(array)
                    operation = producer[array]
            if letter in at.indirect:
                at, letter = at.resolve(letter)
            if sizes[array] is None:
                sizes[array] = at.graph.sizes.get(letter)
            if operation >= 0 and not done[operation]:
                self.step(operation, array, at, letter)

    def pair(self, operation: int, at: Instance, given: Sequence[str]) -> None:
        """The inputs of an operation are these of the trace; what is settled need not wait."""
        self.done[operation] = True
        for array, letter in zip(self.inputs[operation], given, strict=True):
            maker = self.producer[array]
            if not self.done[maker] if maker >= 0 else self.found[array] is None:
                self.waiting.append((array, at, letter))

    def pair_dependencies(self, array: int, at: Instance, letter: str) -> None:
        """What a `Depends` waits for is part of the run, although it passes on something else."""
        operation = self.producer[array]
        traced = at.graph.producer.get(letter, -1)
        if self.done[operation] or traced < 0:
            return
        given = at.graph.inputs[traced]
        both = self.names[operation] == at.graph.names[traced] == "Depends"
        if both and len(self.inputs[operation]) == len(given):
            self.pair(operation, at, given)

    def step(self, operation: int, array: int, at: Instance, letter: str) -> None:
        """Pair the inputs of an operation with those of the traced one."""
        inputs, own_name = self.inputs[operation], self.names[operation]
        if own_name.startswith("Compiled"):
            pairs = match_fused(self.graph.labels[operation], inputs, at, letter)
            self.done[operation] = bool(pairs)
            self.waiting += pairs
            return
        traced = at.graph.producer.get(letter, -1)
        if traced < 0:
            return
        name, given = at.graph.names[traced], at.graph.inputs[traced]
        if name == own_name and len(given) == len(inputs):
            for output, other in zip(
                self.outputs[operation], at.graph.outputs[traced], strict=False
            ):
                self.found[output] = at.graph.sizes[other]
            self.pair(operation, at, given)
        elif name == "Scatter":
            self.sorted_product(operation, array, at, given[-1])

    def sorted_product(self, operation: int, array: int, at: Instance, updates: str) -> None:
        """The gradient of a sorted `gather_mm` next to that of an unsorted one.

        By the input: the product itself, where the unsorted one adds rows up by their index. By
        the weight: a SegmentedMM of flattened factors, where the unsorted one multiplies row by
        row and adds up.
        """
        at, product = _skip(at, updates, ("ExpandDims",))
        traced = at.graph.producer.get(product, -1)
        if traced < 0 or at.graph.names[traced] != "GatherMM":
            return
        label = self.names[operation]
        if label == "GatherMM":
            self.waiting.append((array, at, product))
        elif label == "SegmentedMM":
            self.done[operation] = True
            views = ("Transpose", "Flatten", "Reshape")
            for index in (0, 1):
                mine = self.passed_through(self.inputs[operation][index], views)
                self.waiting.append((mine, *_skip(at, at.graph.inputs[traced][index], views)))

    def passed_through(self, array: int, also: Sequence[str] = ()) -> int:
        """The array that an array is, below what only passes it on (and views in `also`)."""
        while (operation := self.producer[array]) >= 0:
            name, inputs = self.names[operation], self.inputs[operation]
            if name in PASSED_ON:
                index = self.outputs[operation].index(array)
                if name == "CustomTransforms":
                    index += len(inputs) - len(self.outputs[operation])
                array = inputs[index]
            elif name in also:
                array = inputs[0]
            else:
                break
        return array


def _skip(at: Instance, letter: str, names: Sequence[str]) -> tuple[Instance, str]:
    at, letter = at.resolve(letter)
    while (operation := at.graph.producer.get(letter, -1)) >= 0:
        if at.graph.names[operation] not in names:
            break
        at, letter = at.resolve(at.graph.inputs[operation][0])
    return at, letter


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
    sizes = walk.found
    for array, size in known.items():
        sizes[array] = size
    guessed: Counter[str] = Counter()
    unmet = {walk.producer[array] for array, size in enumerate(sizes) if size is None}
    for operation in order:
        if operation not in unmet:
            continue
        for index, array in enumerate(walk.outputs[operation]):
            if sizes[array] is None:
                sizes[array] = _guess(walk, operation, index, guessed)
    flat = np.fromiter(chain.from_iterable(size or (4, 4) for size in sizes), np.int64)
    return Sizes(flat[::2], flat[1::2], guessed)


def _guess(walk: _Walk, operation: int, index: int, guessed: Counter[str]) -> tuple[int, int]:
    """The size of an array that was not met: of what it passes on, or of the largest input made.

    Weights do not count: what is looked up in one is far smaller.
    """
    label, inputs = walk.graph.labels[operation], walk.inputs[operation]
    if label == "CustomTransforms":
        inputs = inputs[len(inputs) - len(walk.outputs[operation]) :]
    if label in PASSED_ON:
        return walk.found[inputs[index]] or (4, 4)
    guessed[label] += 1
    sizes = [size for a in inputs if walk.producer[a] >= 0 and (size := walk.found[a]) is not None]
    return max(sizes, default=(4, 4))


# More tries than this and the label is left unread.
_MOST_TRIES = 20_000
# MLX fuses no deeper.
_DEPTH = 11
_Array = tuple[Instance, str]


class _TooManyTriesError(Exception):
    pass


def match_fused(
    label: str, inputs: Sequence[int], at: Instance, letter: str
) -> list[tuple[int, Instance, str]]:
    """Each of `inputs` with the array of the trace that it is, or nothing where none fit.

    (at, letter): the result of the fused operation in the trace. With several results the one that
    is made last gives a match; the others give none.
    """
    search = _Search(label.removeprefix("Compiled"), len(inputs))
    with suppress(_TooManyTriesError):
        if search.part((at, letter), 0, 0, search.complete):
            return [(mine, *other) for mine, other in zip(inputs, search.solution, strict=True)]
    return []


class _Search:
    """Depth first, with a way back: `then` resumes with the rest of the label."""

    def __init__(self, text: str, count: int) -> None:
        self.text, self.count = text, count
        self.parts: set[tuple[int, str]] = set()
        self.inputs: list[_Array] = []
        self.solution: list[_Array] = []
        self.tries = 0

    def complete(self, position: int) -> bool:
        if position != len(self.text) or len(self.inputs) != self.count:
            return False
        self.solution = list(self.inputs)
        return True

    def part(self, array: _Array, depth: int, position: int, then: Callable[[int], bool]) -> bool:
        """Take `array` as a part: its inputs first, then its own name."""
        self.tries += 1
        if self.tries > _MOST_TRIES:
            raise _TooManyTriesError
        at, letter = array
        operation = at.graph.producer.get(letter, -1)
        if depth >= _DEPTH or operation < 0 or len(at.graph.outputs[operation]) != 1:
            return False
        name = at.graph.names[operation]
        if self.text.find(name, position) < 0:
            return False
        key = (id(at), letter)
        self.parts.add(key)

        def own_name(now: int) -> bool:
            return self.text.startswith(name, now) and then(now + len(name))

        arrays = [at.resolve(given) for given in at.graph.inputs[operation]]
        if self.each(arrays, depth + 1, position, own_name):
            return True
        self.parts.discard(key)
        return False

    def each(
        self, arrays: list[_Array], depth: int, position: int, then: Callable[[int], bool]
    ) -> bool:
        """Go through the inputs of a part, the first of them first."""
        if not arrays:
            return then(position)

        def rest(now: int) -> bool:
            return self.each(arrays[1:], depth, now, then)

        at, letter = array = arrays[0]
        operation = at.graph.producer.get(letter, -1)
        # A broadcast is copied to each of its users; anything else occurs once.
        is_broadcast = operation >= 0 and at.graph.names[operation] == "Broadcast"
        if ((id(at), letter) in self.parts and not is_broadcast) or array in self.inputs:
            return rest(position)
        if self.part(array, depth, position, rest):
            return True
        self.inputs.append(array)
        if len(self.inputs) <= self.count and rest(position):
            return True
        self.inputs.pop()
        return False
