"""Sizes carried from the trace to the true graph.

Run: pytest tests/guard/test_sizes.py
"""

from collections import Counter

import mlx.core as mx
import pytest

from mlxstacks.guard.align import match_fused, traced_name
from mlxstacks.guard.calls import Recorder, recorded_functions, recording
from mlxstacks.guard.step import step_graph, step_sizes
from mlxstacks.guard.trace import Instance, Piece, SizedGraph, export_sized, trace
from tests.guard.cases import Case

# Bookkeeping of sorted expert products, small integers, is in no trace.
SORTED = Counter(
    ["AsStrided", "Concatenate", "CumSum", "ScatterAxis Sum", "Full", "Broadcast", "Flatten",
     "Transpose", "Slice", "Squeeze", "Reshape", "Unflatten", "Greater", "AsType", "Arange"]
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        Case(12),
        Case(40, num_experts=16, keys="attention"),
        Case(40, checkpointing="layers"),
        Case(40, checkpointing="mlx", keys="usual"),
        Case(20, recurrence="chunked", checkpointing="layers", bits=4),
        Case(24, compile=True, keys="attention"),
        Case(24, compile=True, checkpointing="layers", keys="attention"),
    ],
    ids=str,
)
def test_nearly_every_operation_is_met_in_the_trace(case: Case) -> None:
    with case.step() as step:
        graph = step_graph(step)
        sizes = step_sizes(step, graph)
    unknown = {label: n for label, n in sizes.guessed.items() if label not in SORTED}
    assert sum(unknown.values()) <= 0.02 * len(graph.order), unknown


def test_results_have_their_own_sizes() -> None:
    """What a step leaves behind is as large as what it found."""
    with Case(12, rank=2, keys="attention").step() as step:
        graph = step_graph(step)
        sizes = step_sizes(step, graph)
    before = [graph.known[array] for array in graph.existing]
    after = [(sizes.nbytes[a], sizes.itemsize[a]) for a in graph.results[: len(before)]]
    assert after == before


def test_a_trace_knows_shapes_and_evaluates_nothing() -> None:
    huge = mx.zeros((100_000, 100_000))
    mx.reset_peak_memory()
    graph = export_sized(lambda x: [mx.exp(x).sum()], [huge])
    assert mx.get_peak_memory() < 10_000_000
    assert graph.sizes[graph.results[0]] == (4, 4)
    assert (4 * 10**10, 4) in graph.sizes.values()


def test_what_cannot_be_traced_is_done_by_what_can() -> None:
    """Gradients of sorted expert products, and mx.contiguous; both are themselves afterwards."""
    real = mx.gather_mm, mx.contiguous

    def function(x: mx.array, w: mx.array) -> list[mx.array]:
        indices = mx.array([0, 0, 1, 2])

        def loss(w: mx.array) -> mx.array:
            made = mx.gather_mm(x, w, rhs_indices=indices, sorted_indices=True)
            return mx.contiguous(made.swapaxes(0, 1)).sum()

        return [mx.grad(loss)(w)]

    graph = export_sized(function, [mx.zeros((4, 1, 8)), mx.zeros((3, 8, 5))])
    assert graph.sizes[graph.results[0]] == (3 * 8 * 5 * 4, 4)
    assert (mx.gather_mm, mx.contiguous) == real


def test_custom_functions_are_traced_apart() -> None:
    """Forward and own gradient of the inner function; the outer trace holds neither."""

    def function(
        given: list[mx.array], probes: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        from mlxstacks.guard.calls import use_probes

        double = mx.custom_function(lambda x: mx.erf(x) * 2)

        @double.vjp
        def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
            return mx.arctan(cotangent)

        def value(x: mx.array, probes: list[mx.array]) -> mx.array:
            use_probes(probes)
            return mx.cosh(double(mx.sinh(x))).sum()

        by_x, by_probes = mx.grad(value, argnums=(0, 1))(given[0], probes)
        return [by_x], by_probes

    with recorded_functions():
        piece = trace(function, [mx.zeros((2, 3))])
    assert "Erf" not in piece.graph.names
    assert len(piece.calls) == 1
    inside = piece.calls[0].piece.graph
    assert {"Erf", "ArcTan"} <= set(inside.names)
    # From the gradient by x: through cosh' to the inner gradient, and on to the cotangent.
    whole = Instance(piece, None, ())
    at, letter = whole.resolve(piece.graph.results[0])
    assert at is whole
    (multiply,) = [o for o, names in enumerate(at.graph.outputs) if letter in names]
    makers = [whole.resolve(a) for a in at.graph.inputs[multiply]]
    names = {m.graph.names[m.graph.producer[a]] for m, a in makers if a in m.graph.producer}
    assert "ArcTan" in names


def test_outside_of_recording_custom_functions_run() -> None:
    with recorded_functions():
        square = mx.custom_function(lambda x: x * x)
        assert square(mx.array(3.0)).item() == 9
    with recording(Recorder({})):
        pass


def test_keys_are_shared_only_by_equal_layers() -> None:
    """Eight layers of two kinds: two pieces with gradients, however many calls."""
    from mlxstacks.guard.step import _trace_step, unchanged

    with Case(12, layers=8, interval=4, keys="experts").step() as step, unchanged(step):
        piece = _trace_step(step)
    assert len(piece.calls) == 8
    assert len({id(call.piece) for call in piece.calls}) == 2


@pytest.mark.parametrize(
    ("label", "name"),
    [("Sum", "Reduce"), ("Scatter Sum", "Scatter"), ("CumSum", "Scan"), ("Matmul", "Matmul")],
)
def test_names_of_both_listings(label: str, name: str) -> None:
    assert traced_name(label) == name


# --- fused operations ---------------------------------------------------------------------------


def traced(function: object, *shapes: tuple[int, ...]) -> tuple[Instance, SizedGraph]:
    graph = export_sized(function, [mx.zeros(shape) for shape in shapes])  # type: ignore[arg-type]
    return Instance(Piece(graph), None, ()), graph


def test_parts_of_a_fused_operation_are_found() -> None:
    at, graph = traced(lambda x, y: [mx.exp(x * y) + x], (4,), (4,))
    pairs = match_fused("CompiledMultiplyExpAdd", [10, 11], at, graph.results[0])
    assert [(mine, letter) for mine, _, letter in pairs] == [
        (10, graph.arguments[0]), (11, graph.arguments[1])
    ]  # fmt: skip


def test_a_part_with_another_user_can_be_an_input() -> None:
    at, graph = traced(lambda x: [mx.exp(mx.sin(x)) + 1.0], (4,))
    pairs = match_fused("CompiledExpAdd", [10, 11], at, graph.results[0])
    assert [mine for mine, _, _ in pairs] == [10, 11]
    _, where, letter = pairs[0]
    assert where.graph.names[where.graph.producer[letter]] == "Sin"


def test_a_label_that_fits_nothing_gives_nothing() -> None:
    at, graph = traced(lambda x: [mx.exp(x) + x], (4,))
    assert match_fused("CompiledSinAdd", [10, 11], at, graph.results[0]) == []
    assert match_fused("CompiledExpAdd", [10, 11, 12], at, graph.results[0]) == []


def test_long_chains_end() -> None:
    def total(x: mx.array) -> list[mx.array]:
        y = x
        for _ in range(300):
            y = y + mx.exp(y)
        return [y]

    at, graph = traced(total, (4,))
    assert match_fused("Compiled" + "ExpAdd" * 30, [1, 2], at, graph.results[0]) == []
