"""Traces a function, and the calls in it apart: each different one once.

Inputs, outputs, cotangents and gradients of a call are made results of the trace around it, so that
`align.py` can step from one trace into the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from mlxstacks.guard.calls import Recorder, Site, recording, use_probes
from mlxstacks.guard.sizes import SizedGraph, export_sized

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
        made = zip(graph.names, graph.outputs, strict=True)
        passed = (letter for name, letters in made if name in PASSED_ON for letter in letters)
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
        inside = pieces.get(site.key) if site.key is not None else None
        if inside is None:
            inside = _trace_inside(site, pieces)
        if site.key is not None:
            pieces[site.key] = inside
        piece.calls.append(Call(inside, inputs + cotangents))


def _trace_inside(site: Site, pieces: dict[str, Piece]) -> Piece:
    """The piece of a call: results are its outputs, then a gradient for each input."""
    inputs = [mx.zeros(a.shape, a.dtype) for a in site.inputs]
    cotangents = [mx.zeros(a.shape, a.dtype) for a in site.outputs]
    inside = _with_own_gradient if site.backward is not None else _differentiated

    def function(
        given: list[mx.array], probes: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        return inside(site, given[: len(inputs)], given[len(inputs) :], probes)

    return trace(function, [*inputs, *cotangents], pieces)


def _with_own_gradient(
    site: Site, inputs: list[mx.array], cotangents: list[mx.array], probes: list[mx.array]
) -> tuple[list[mx.array], list[mx.array]]:
    assert site.backward is not None
    with recording(None):
        outputs = [array for _, array in site.body(inputs)]
        return [*outputs, *site.backward(inputs, cotangents, outputs)], []


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
    found = dict(zip(floats, gradients, strict=False))
    # What has no gradient stands for itself, to keep the places.
    of_inputs = [found.get(i, array) for i, array in enumerate(inputs)]
    return [*outputs, *of_inputs], list(gradients[len(floats) :])
