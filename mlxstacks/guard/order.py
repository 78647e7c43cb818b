"""The order in which `mx.eval` runs a graph.

MLX first walks down from the outputs and counts how often each operation is asked for; operations
with several outputs share one count. It then goes through the graph breadth first, at most `width`
arrays ahead (`MLX_BFS_MAX_WIDTH`), takes an operation once all that ask for it are listed, and runs
that list backwards.
"""

import os
from collections.abc import Sequence

from mlxstacks.guard.graph import Graph

USUAL_WIDTH = 20


def bfs_width() -> int:
    """How far ahead MLX looks in this process."""
    return int(os.environ.get("MLX_BFS_MAX_WIDTH", USUAL_WIDTH))


def evaluation_order(graph: Graph, outputs: Sequence[int], width: int | None = None) -> list[int]:
    """Operations in the order in which they run for `mx.eval(outputs)`.

    Law: every operation comes after those that make its inputs, and only those that the outputs
    need are listed.
    """
    asked = _times_asked_for(graph, outputs)
    listed = _breadth_first(graph, outputs, asked, bfs_width() if width is None else width)
    listed.reverse()
    return listed


def _times_asked_for(graph: Graph, outputs: Sequence[int]) -> list[int]:
    """For each operation, how many inputs (and outputs of the run) it provides."""
    producer, inputs = graph.producer, graph.inputs
    asked = [0] * len(inputs)
    waiting = []
    for array in outputs:
        operation = producer[array]
        if operation >= 0:
            asked[operation] += 1
            if asked[operation] == 1:
                waiting.append(operation)
    while waiting:
        for array in inputs[waiting.pop()]:
            operation = producer[array]
            if operation >= 0:
                asked[operation] += 1
                if asked[operation] == 1:
                    waiting.append(operation)
    return asked


def _breadth_first(graph: Graph, outputs: Sequence[int], asked: list[int], width: int) -> list[int]:
    """Operations from the outputs downwards; what does not fit the width waits on a stack."""
    producer, inputs = graph.producer, graph.inputs
    remaining = sum(1 for count in asked if count)
    listed: list[int] = []
    position = 0
    waiting: list[tuple[Sequence[int], int]] = [(outputs, 0)]
    needs: Sequence[int]
    while remaining and (position < len(listed) or waiting):
        if position < len(listed):
            needs = inputs[listed[position]]
            start = 0
            position += 1
        else:
            needs, start = waiting.pop()
        for index in range(start, len(needs)):
            operation = producer[needs[index]]
            if operation < 0:
                continue
            if len(listed) - position >= width:
                waiting.append((needs, index))
                break
            asked[operation] -= 1
            if asked[operation] == 0:
                listed.append(operation)
                remaining -= 1
    return listed
