"""Shapes of a graph: what `mx.export_function` tells of a traced function and of the calls in it.

It knows shape and dtype of every array, which the DOT text lacks, but merges equal operations and
refuses some: `SegmentedMM` (the gradient of a sorted `gather_mm`; traced unsorted here),
`Contiguous` (left out here), and custom functions. Those and decoder layers (`calls.py`) are traced
apart, each different one once. Inputs, outputs, cotangents and gradients of a call are made results
of the trace around it, so that `align.py` can step from one trace into the other and carry the
sizes over to the true graph.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from mlxstacks.guard.calls import Recorder, Site, recording, use_probes


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
            outputs = self._named(event["outputs"])
            self.producer |= dict.fromkeys(outputs, len(self.names))
            self.names.append(_own_name(event["name"], event["arguments"]))
            self.inputs.append([letter for letter, _, _ in event["inputs"]])
            self.outputs.append(outputs)
        elif kind == "inputs":
            self.arguments = self._named(event["inputs"])
        elif kind == "outputs":
            self.results = self._named(event["outputs"])
        elif kind == "constants":
            for letter, value in event["constants"]:
                self.sizes[letter] = (value.nbytes, value.itemsize)

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


# Operations that give an input on as it is, in a trace and in the true graph.
PASSED_ON = frozenset(("Copy", "StopGradient", "Depends", "CustomTransforms", "Contiguous"))

Function = Callable[[list[mx.array], list[mx.array]], tuple[list[mx.array], list[mx.array]]]
"""(arguments, probes) -> (results, gradients of the probes)."""


@dataclass
class Piece:
    """A traced function and the calls inside it.

    inputs: letter -> its place among the arguments.
    inner: letter -> (call, place among the results of that call's piece).
    """

    graph: SizedGraph
    calls: list["Call"] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    inner: dict[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def indirect(self) -> set[str]:
        """Letters of arrays that are made elsewhere: what is asked for once the piece is whole."""
        graph = self.graph
        operations = zip(graph.names, graph.outputs, strict=True)
        passed = (letter for name, letters in operations if name in PASSED_ON for letter in letters)
        return {*self.inputs, *self.inner, *passed}


@dataclass(slots=True)
class Call:
    """One call in a piece. given: the letters, there, of its inputs, then of its cotangents."""

    piece: Piece
    given: list[str]


def trace(
    function: Function, arguments: list[mx.array], pieces: dict[str, Piece] | None = None
) -> Piece:
    """The piece of `function(arguments, probes)`. Nothing is evaluated.

    pieces: pieces by the key of their call, filled here.
    """
    pieces = {} if pieces is None else pieces
    recorder = learn = Recorder({})
    with recording(learn):
        function(arguments, [])
    probes = [mx.zeros(shape, dtype) for shape, dtype in learn.probe_shapes]
    count = len(arguments)

    def flat(*given: mx.array) -> list[mx.array]:
        nonlocal recorder
        recorder = Recorder(learn.shapes, given[count:])
        with recording(recorder):
            results, gradients = function(list(given[:count]), list(given[count:]))
        ends = [a for site in recorder.sites for a in (*site.inputs, *site.outputs)]
        return [*results, *ends, *gradients]

    graph = export_sized(flat, [*arguments, *probes])
    piece = Piece(graph, inputs={letter: i for i, letter in enumerate(graph.arguments[:count])})
    _place_calls(piece, recorder.sites, len(probes), pieces)
    return piece


def _place_calls(piece: Piece, sites: list[Site], probes: int, pieces: dict[str, Piece]) -> None:
    """Say which letters are the ends of calls, and take those off the results."""
    results = piece.graph.results
    ends = sum(len(site.inputs) + len(site.outputs) for site in sites)
    first = len(results) - probes - ends
    end = iter(results[first : first + ends])
    gradient = iter(results[first + ends :])
    del results[first:]
    for number, site in enumerate(sites):
        inputs = [next(end) for _ in site.inputs]
        outputs: list[str | None] = [next(end) for _ in site.outputs]
        gradients = [
            next(gradient) if mx.issubdtype(array.dtype, mx.floating) else None
            for array in site.inputs
        ]
        cotangents = [next(gradient) for _ in site.outputs]
        for place, letter in enumerate(outputs + gradients):
            if letter is not None:
                piece.inner[letter] = (number, place)
        inside = pieces.get(site.key or "") or _trace_inside(site, pieces)
        if site.key is not None:
            pieces[site.key] = inside
        piece.calls.append(Call(inside, inputs + cotangents))


def _trace_inside(site: Site, pieces: dict[str, Piece]) -> Piece:
    """The piece of a call: results are its outputs, then a gradient for each input."""

    def function(
        given: list[mx.array], probes: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        inputs, cotangents = given[: len(site.inputs)], given[len(site.inputs) :]
        if site.backward is None:
            return _differentiated(site, inputs, cotangents, probes)
        with recording(None):
            outputs = [array for _, array in site.body(inputs)]
            return [*outputs, *site.backward(inputs, cotangents, outputs)], []

    return trace(function, [mx.zeros(a.shape, a.dtype) for a in site.inputs + site.outputs], pieces)


def _differentiated(
    site: Site, inputs: list[mx.array], cotangents: list[mx.array], probes: list[mx.array]
) -> tuple[list[mx.array], list[mx.array]]:
    floats = [i for i, a in enumerate(inputs) if mx.issubdtype(a.dtype, mx.floating)]

    def body(*changing: mx.array) -> list[mx.array]:
        filled = list(inputs)
        for place, array in zip(floats, changing, strict=False):
            filled[place] = array
        use_probes(changing[len(floats) :])
        return [array for _, array in site.body(filled)]

    primals = [inputs[i] for i in floats] + probes
    outputs, gradients = mx.vjp(body, primals, cotangents)
    by_place = dict(zip(floats, gradients, strict=False))
    # What has no gradient stands for itself, to keep the places.
    of_inputs = [by_place.get(i, array) for i, array in enumerate(inputs)]
    return [*outputs, *of_inputs], list(gradients[len(floats) :])


class Instance:
    """One call of a piece: where its inputs come from, and the calls inside it."""

    def __init__(self, piece: Piece, outside: "Instance | None", given: Sequence[str]) -> None:
        self.piece, self.graph = piece, piece.graph
        self.outside, self.given = outside, given
        self.indirect = piece.indirect
        self._inside: dict[int, Instance] = {}
        self._resolved: dict[str, tuple[Instance, str]] = {}

    def resolve(self, letter: str) -> "tuple[Instance, str]":
        """Where an array is really made: inside a call, or outside of this one."""
        if letter not in self.indirect:
            return self, letter
        resolved = self._resolved.get(letter)
        if resolved is None:
            at, other = self.jump(letter)
            while (passed := at.passed_on(other)) is not None:
                at, other = at.jump(passed)
            resolved = self._resolved[letter] = (at, other)
        return resolved

    def jump(self, letter: str) -> "tuple[Instance, str]":
        """From the results and inputs of calls to what they are."""
        at = self
        while True:
            if letter in at.piece.inner:
                number, index = at.piece.inner[letter]
                at = at.inside(number)
                letter = at.graph.results[index]
            elif at.outside is not None and letter in at.piece.inputs:
                letter = at.given[at.piece.inputs[letter]]
                at = at.outside
            else:
                return at, letter

    def passed_on(self, letter: str) -> str | None:
        operation = self.graph.producer.get(letter, -1)
        if operation < 0 or self.graph.names[operation] not in PASSED_ON:
            return None
        return self.graph.inputs[operation][self.graph.outputs[operation].index(letter)]

    def inside(self, number: int) -> "Instance":
        if number not in self._inside:
            call = self.piece.calls[number]
            self._inside[number] = Instance(call.piece, self, call.given)
        return self._inside[number]
