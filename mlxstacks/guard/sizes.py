"""Shapes of a graph: what `mx.export_function` tells of a traced function.

It knows shape and dtype of every array, which the DOT text lacks, but merges equal operations and
refuses some: `SegmentedMM` (the gradient of a sorted `gather_mm`; traced unsorted here),
`Contiguous` (left out here), and custom functions (`calls.py`). `align.py` carries the sizes over
to the true graph.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx


@dataclass(slots=True)
class SizedGraph:
    """A traced function; arrays are known by MLX's letters.

    names, inputs, outputs: of each operation, in the order of the trace.
    producer: letter -> operation; inputs of the function and constants have none.
    sizes: letter -> (bytes of the array, bytes of an element).
    """

    names: list[str] = field(default_factory=list)
    inputs: list[list[str]] = field(default_factory=list)
    outputs: list[list[str]] = field(default_factory=list)
    producer: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    def __call__(self, event: dict[str, Any]) -> None:
        """Take in one event of `mx.export_function`."""
        kind = event["type"]
        if kind == "primitive":
            self._take_operation(event)
        elif kind == "inputs":
            self.arguments = self._named(event["inputs"])
        elif kind == "outputs":
            self.results = self._named(event["outputs"])
        elif kind == "constants":
            for letter, value in event["constants"]:
                self.sizes[letter] = (value.nbytes, value.itemsize)

    def _take_operation(self, event: dict[str, Any]) -> None:
        made = self._named(event["outputs"])
        for letter in made:
            self.producer[letter] = len(self.names)
        self.names.append(_own_name(event["name"], event["arguments"]))
        self.inputs.append([letter for letter, _, _ in event["inputs"]])
        self.outputs.append(made)

    def _named(self, arrays: Sequence[tuple[str, tuple[int, ...], mx.Dtype]]) -> list[str]:
        for letter, shape, dtype in arrays:
            self.sizes[letter] = (math.prod(shape) * dtype.size, dtype.size)
        return [letter for letter, _, _ in arrays]


_BITWISE = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift")


def _own_name(name: str, arguments: list[Any]) -> str:
    """The name that the DOT text and labels of fused operations have for it."""
    if name == "Sqrt" and arguments and arguments[0] is True:
        return "Rsqrt"
    if name == "BitwiseBinary" and arguments and isinstance(arguments[0], int):
        return _BITWISE[arguments[0]]
    return name


def export_sized(
    function: Callable[..., list[mx.array]], arguments: Sequence[mx.array]
) -> SizedGraph:
    """Trace `function(*arguments)` and list its operations with sizes. Nothing is evaluated."""
    graph = SizedGraph()
    with _traceable():
        mx.export_function(graph, function, *arguments)
    return graph


@contextmanager
def _traceable() -> Iterator[None]:
    """`mx.gather_mm` without the promise that indices are sorted, `mx.contiguous` without a copy:
    what cannot be traced, done by what can.
    """
    real = mx.gather_mm, mx.contiguous

    def gather(*args: Any, sorted_indices: bool = False, **kwargs: Any) -> mx.array:
        return real[0](*args, **kwargs)

    def contiguous(a: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return a

    mx.gather_mm, mx.contiguous = gather, contiguous
    try:
        yield
    finally:
        mx.gather_mm, mx.contiguous = real
