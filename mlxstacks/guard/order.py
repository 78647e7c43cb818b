"""The order in which `mx.eval` runs a graph.

MLX first walks down from the outputs and counts how often each operation is asked for; operations
with several outputs share one count. It then goes through the graph breadth first, at most `width`
arrays ahead (`MLX_BFS_MAX_WIDTH`), takes an operation once all that ask for it are listed, and runs
that list backwards.
"""

import os
from collections import deque
from collections.abc import Sequence

import numpy as np

from mlxstacks.guard.graph import Bools, Graph, Ints, Rows

USUAL_WIDTH = 20


def bfs_width() -> int:
    """How far ahead MLX looks in this process."""
    return int(os.environ.get("MLX_BFS_MAX_WIDTH", USUAL_WIDTH))


def evaluation_order(graph: Graph, outputs: Sequence[int], width: int | None = None) -> list[int]:
    """Operations in the order in which they run for `mx.eval(outputs)`.

    Law: every operation comes after those that make its inputs, and only those that the outputs
    need are listed.
    """
    first = graph.producer[list(outputs)]
    first = first[first >= 0]
    makers, asked = _makers(graph, graph.needed_for(outputs))
    asked += np.bincount(first, minlength=len(graph.label))
    width = bfs_width() if width is None else width
    return _breadth_first(makers.tuples, tuple(first.tolist()), asked.tolist(), width)[::-1]


def _makers(graph: Graph, needed: Bools) -> tuple[Rows, Ints]:
    """Of each needed operation, those that make its inputs, and how often such ask for it."""
    maker, reader = graph.producer[graph.inputs.values], graph.inputs.owners
    made = (maker >= 0) & needed[reader]
    maker, reader = maker[made], reader[made]
    count = len(graph.label)
    makers = Rows.of_lengths(maker, np.bincount(reader, minlength=count))
    return makers, np.bincount(maker, minlength=count)


def _breadth_first(
    makers: list[tuple[int, ...]], first: tuple[int, ...], asked: list[int], width: int
) -> list[int]:
    """Operations from the outputs downwards; what does not fit the width waits on a stack."""
    listed: list[int] = []
    ahead: deque[int] = deque()
    waiting = [first]
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
            asked[operation] -= 1
            if not asked[operation]:
                ahead.append(operation)
    return listed
