"""A lazily built MLX graph as rows of integers, and the order in which `mx.eval` runs it.

MLX shows its graph in one way only, the DOT text of `mx.export_to_dot`. All arrays that matter are
made inputs of one `mx.depends` node, so that the edges into that node list them in order.

To evaluate, MLX first walks down from the outputs and counts how often each operation is asked for;
operations with several outputs share one count. It then goes through the graph breadth first, at
most `width` arrays ahead (`MLX_BFS_MAX_WIDTH`), takes an operation once all that ask for it are
listed, and runs that list backwards.
"""

import io
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LABEL = re.compile(r'label ="([^"]+)"')
_QUOTE, _NEWLINE, _EQUALS, _BEFORE_A = b'"\n=@'


@dataclass(frozen=True)
class Rows:
    """Rows of numbers, one after the other in `values`; row i is values[cuts[i]:cuts[i + 1]]."""

    values: Ints
    cuts: Ints

    @classmethod
    def of_lengths(cls, values: Ints, lengths: Ints) -> "Rows":
        return cls(values, np.concatenate([[0], lengths.cumsum()]))

    @cached_property
    def tuples(self) -> list[tuple[int, ...]]:
        """The rows, for loops."""
        flat = tuple(self.values.tolist())
        return [flat[start:end] for start, end in pairwise(self.cuts.tolist())]

    def __getitem__(self, row: int) -> tuple[int, ...]:
        return self.tuples[row]

    def __len__(self) -> int:
        return len(self.cuts) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.cuts)

    @property
    def owners(self) -> Ints:
        """The row that each value is in."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def without_last(self) -> "Rows":
        return Rows(self.values[: self.cuts[-2]], self.cuts[:-1])

    def take(self, chosen: Ints) -> "Rows":
        """These rows in this order."""
        lengths = self.lengths[chosen]
        taken = Rows.of_lengths(lengths, lengths)
        shift = np.repeat(self.cuts[chosen] - taken.cuts[:-1], lengths)
        return Rows(self.values[np.arange(len(shift)) + shift], taken.cuts)


@dataclass(frozen=True)
class Graph:
    """Operations in an order in which every input is made before it is used.

    names, label: MLX's names of operations, and the place in them of each operation's.
    inputs, outputs: the arrays of each operation, as numbers below `arrays`.
    producer: the operation that makes an array, -1 for arrays that exist before the evaluation.
    """

    names: list[str]
    label: Ints
    inputs: Rows
    outputs: Rows
    arrays: int
    producer: Ints

    @cached_property
    def labels(self) -> list[str]:
        """The name of each operation."""
        return [self.names[label] for label in self.label.tolist()]

    def needed_for(self, arrays: Sequence[int]) -> Bools:
        """Whether each operation is needed to make `arrays`."""
        producer, inputs = self.producer.tolist(), self.inputs.tuples
        needed = [False] * len(inputs)
        waiting = [tuple(arrays)]
        while waiting:
            for array in waiting.pop():
                operation = producer[array]
                if operation >= 0 and not needed[operation]:
                    needed[operation] = True
                    waiting.append(inputs[operation])
        return np.array(needed, np.bool_)

    def cut_at(self, arrays: Sequence[int]) -> None:
        """Treat `arrays` as existing before the evaluation, as if they had been evaluated."""
        self.producer[list(arrays)] = -1


def export_graph(arrays: Sequence[mx.array]) -> tuple[Graph, list[int]]:
    """The graph above `arrays` (nothing is evaluated), and the number of each of them."""
    root = mx.depends([mx.array(0)], list(arrays))[0]
    # A path would be written line by line with a flush each; a Python file gets one long text.
    text = io.StringIO()
    mx.export_to_dot(text, root)
    graph = parse(text.getvalue())
    # The root itself is no part of the run.
    listed = graph.inputs.values[graph.inputs.cuts[-2] + 1 :].tolist()
    inputs, outputs = graph.inputs.without_last(), graph.outputs.without_last()
    kept = Graph(graph.names, graph.label[:-1], inputs, outputs, graph.arrays, graph.producer)
    return kept, listed


def parse(text: str) -> Graph:
    """A graph from DOT text: of each operation its label, a line an input, and a line an output.

        { 7 [label ="Add", shape=rectangle]; }
        "A" -> 7
        "B" -> 7
        { "C"; }
        7 -> "C"

    The number of an operation may repeat (it is an address): position tells what belongs together.
    Every array has a name in letters, counted A to Z, AA to ZZ, and so on.
    """
    raw = np.frombuffer(text.encode(), np.uint8)
    quotes = np.flatnonzero(raw == _QUOTE)
    starts, ends = quotes[::2] + 1, quotes[1::2]
    before, after = raw[starts - 2], raw[ends + 1]
    is_label, is_input, is_output = before == _EQUALS, before == _NEWLINE, after == _NEWLINE
    labels = _LABEL.findall(text)
    names = {name: i for i, name in enumerate(dict.fromkeys(labels))}
    operation = is_label.cumsum() - 1

    def part(chosen: Bools) -> Rows:
        """Numbers of the names at these places: A is 0, Z is 25, AA is 26."""
        first, last = starts[chosen], ends[chosen]
        number = np.zeros(len(first), np.int64)
        for place in range((last - first).max(initial=0)):
            inside = first + place < last
            number[inside] = 26 * number[inside] + raw[first[inside] + place] - _BEFORE_A
        return Rows.of_lengths(number - 1, np.bincount(operation[chosen], minlength=len(labels)))

    inputs, outputs = part(is_input), part(is_output)
    arrays = max(inputs.values.max(initial=-1), outputs.values.max(initial=-1)) + 1
    producer = np.full(arrays, -1)
    producer[outputs.values] = operation[is_output]
    label = np.fromiter(map(names.__getitem__, labels), np.int64, len(labels))
    return Graph(list(names), label, inputs, outputs, int(arrays), producer)


USUAL_WIDTH = 20


def bfs_width() -> int:
    """How far ahead MLX looks in this process."""
    return int(os.environ.get("MLX_BFS_MAX_WIDTH", USUAL_WIDTH))


def evaluation_order(graph: Graph, outputs: Sequence[int], width: int | None = None) -> list[int]:
    """Operations in the order in which they run for `mx.eval(outputs)`.

    Law: every operation comes after those that make its inputs, and only those that the outputs
    need are listed.
    """
    width = bfs_width() if width is None else width
    first = graph.producer[list(outputs)]
    first = first[first >= 0]
    # Of each needed operation those that make its inputs, and how often each is asked for.
    maker, reader = graph.producer[graph.inputs.values], graph.inputs.owners
    is_made = (maker >= 0) & graph.needed_for(outputs)[reader]
    maker, reader = maker[is_made], reader[is_made]
    count = len(graph.label)
    makers = Rows.of_lengths(maker, np.bincount(reader, minlength=count)).tuples
    uses = (np.bincount(maker, minlength=count) + np.bincount(first, minlength=count)).tolist()
    # From the outputs downwards; what does not fit the width waits on a stack.
    listed: list[int] = []
    ahead: deque[int] = deque()
    waiting = [tuple(first.tolist())]
    while ahead or waiting:
        if ahead:
            operation = ahead.popleft()
            listed.append(operation)
            needs = makers[operation]
        else:
            needs = waiting.pop()
        for place, operation in enumerate(needs):
            if len(ahead) >= width:
                waiting.append(needs[place:])
                break
            uses[operation] -= 1
            if not uses[operation]:
                ahead.append(operation)
    return listed[::-1]
