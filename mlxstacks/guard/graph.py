"""A lazily built MLX graph as lists of integers.

MLX shows its graph in one way only, the DOT text of `mx.export_to_dot`. All arrays that matter are
made inputs of one `mx.depends` node, so that the edges into that node list them in order.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

# One operation, its inputs and outputs, and leaves, in the order in which MLX prints them. The
# number of an operation may repeat (it is an address): what belongs together is told by position.
_TOKEN = re.compile(r'label ="([^"]+)"|\n"([A-Z]+)" ->|-> "([A-Z]+)"')

_SLICE = 4_000_000


@dataclass(frozen=True, slots=True)
class Graph:
    """Operations in an order in which every input is made before it is used.

    labels: MLX's name of each operation.
    inputs, outputs: the arrays of each operation, as numbers below `arrays`.
    producer: the operation that makes an array, -1 for arrays that exist before the evaluation.
    """

    labels: list[str]
    inputs: list[list[int]]
    outputs: list[list[int]]
    arrays: int
    producer: list[int]

    def cut_at(self, arrays: Sequence[int]) -> None:
        """Treat `arrays` as existing before the evaluation, as if they had been evaluated."""
        for array in arrays:
            self.producer[array] = -1


def export_graph(arrays: Sequence[mx.array]) -> tuple[Graph, list[int]]:
    """The graph above `arrays` (nothing is evaluated), and the number of each of them."""
    root = mx.depends([mx.array(0)], list(arrays))[0]
    # A path would be written line by line with a flush each; a Python file gets one long text.
    text = io.StringIO()
    mx.export_to_dot(text, root)
    graph = parse(text.getvalue())
    listed = graph.inputs[-1][1:]
    # The root itself is no part of the run.
    for column in (graph.labels, graph.inputs, graph.outputs):
        column.pop()
    return graph, listed


def _tokens(text: str) -> Iterator[tuple[str, str, str]]:
    """Matches of `_TOKEN`, a few megabytes at a time: all at once are larger than the text."""
    start = 0
    while start < len(text):
        end = text.find("\n{", start + _SLICE) + 1 or len(text)
        yield from _TOKEN.findall(text, max(start - 1, 0), end)
        start = end


def parse(text: str) -> Graph:
    """A graph from DOT text."""
    labels: list[str] = []
    inputs: list[list[int]] = []
    outputs: list[list[int]] = []
    number: dict[str, int] = {}
    for label, source, made in _tokens(text):
        if label:
            labels.append(label)
            into: list[int] = []
            out: list[int] = []
            inputs.append(into)
            outputs.append(out)
        elif source:
            into.append(number.setdefault(source, len(number)))
        else:
            out.append(number.setdefault(made, len(number)))
    producer = [-1] * len(number)
    for operation, made_arrays in enumerate(outputs):
        for array in made_arrays:
            producer[array] = operation
    return Graph(labels, inputs, outputs, len(number), producer)
