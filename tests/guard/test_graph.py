"""Reading MLX's graph, the order of evaluation, and the life of buffers, on graphs small enough to
follow by hand.

Run: pytest tests/guard/test_graph.py
"""

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.guard.graph import Graph, Rows, evaluation_order, export_graph, parse
from mlxstacks.guard.live import ANY, FIRST, FRESH, SHARE, rule_of, simulate
from tests.guard import one_by_one


def hand_made(operations: list[tuple[str, list[int], list[int]]]) -> Graph:
    """(label, inputs, outputs) -> a graph."""
    labels, inputs, outputs = (list(column) for column in zip(*operations, strict=True))
    arrays = 1 + max(a for column in (*inputs, *outputs) for a in column)
    producer = np.full(arrays, -1)
    for operation, made in enumerate(outputs):
        producer[made] = operation
    names = sorted(set(labels))
    label = np.array([names.index(name) for name in labels])
    return Graph(names, label, rows(inputs), rows(outputs), arrays, producer)


def rows(lists: list[list[int]]) -> Rows:
    values = np.array([value for one in lists for value in one], np.int64)
    return Rows.of_lengths(values, np.array([len(one) for one in lists]))


def peak_of(graph: Graph, results: list[int], held: tuple[int, ...] = ()) -> int:
    return simulate(graph, evaluation_order(graph, results), held, (), results).buffers


# --- the text -----------------------------------------------------------------------------------


def test_an_exported_graph_has_every_operation_once() -> None:
    x = mx.ones((2, 2))
    mx.eval(x)
    y = mx.exp(x) + 1
    left, right = mx.split(y, 2, axis=1)
    graph, numbers = export_graph([x, left * right, right])
    assert graph.labels.count("Exp") == graph.labels.count("Split") == 1
    split = graph.labels.index("Split")
    assert len(graph.outputs[split]) == 2
    assert len(numbers) == 3
    assert graph.producer[numbers[0]] == -1
    assert graph.labels[graph.producer[numbers[1]]] == "Multiply"
    assert graph.producer[numbers[2]] == split
    assert "Depends" not in graph.labels


def test_one_array_twice_is_listed_twice() -> None:
    x = mx.exp(mx.ones(2))
    _, numbers = export_graph([x, x])
    assert numbers[0] == numbers[1]


def test_many_arrays_can_be_asked_for() -> None:
    """Naming them by keyword ends at 1,024."""
    arrays = [mx.exp(mx.array(float(i))) for i in range(3000)]
    _, numbers = export_graph(arrays)
    assert len(set(numbers)) == 3000


def test_names_are_counted_in_letters() -> None:
    """A to Z, then AA: twenty-eight arrays end at AB."""
    x = mx.ones((2,))
    mx.eval(x)
    for _ in range(27):
        x = mx.sin(x)
    graph, (number,) = export_graph([x])
    assert graph.arrays >= 28
    chain = []
    while (operation := graph.producer[number]) >= 0:
        (number,) = graph.inputs[operation]
        chain.append(number)
    assert len(set(chain)) == 27


def test_rows_are_taken_in_any_order() -> None:
    three = rows([[5, 6], [], [7]])
    taken = three.take(np.array([2, 0, 1, 2]))
    assert taken.tuples == [(7,), (5, 6), (), (7,)]
    assert taken.owners.tolist() == [0, 1, 1, 3]
    assert three.without_last().tuples == [(5, 6), ()]


def test_operations_at_one_address_are_told_apart() -> None:
    """Their numbers in the text may repeat; position decides."""
    text = (
        'digraph {\n{ rank=source; "A"; }\n'
        '{ 7 [label ="Exp", shape=rectangle]; }\n"A" -> 7\n{ "B"; }\n7 -> "B"\n'
        '{ 7 [label ="Log", shape=rectangle]; }\n"B" -> 7\n{ rank=sink; "C"; }\n7 -> "C"\n}\n'
    )
    graph = parse(text)
    assert graph.labels == ["Exp", "Log"]
    assert (graph.inputs.tuples, graph.outputs.tuples) == ([(0,), (1,)], [(1,), (2,)])


# --- order --------------------------------------------------------------------------------------


LABELS = ["Exp", "Add", "Matmul", "Transpose", "Reshape", "Split", "Slice", "Depends",
          "CustomTransforms", "SliceUpdate", "CompiledMultiplyAdd", "Select",
          "Multiply"]  # fmt: skip


def random_graph(rng: random.Random) -> tuple[Graph, list[int]]:
    """Up to 60 operations over two leaves; results are some of the arrays."""
    arrays = [0, 1]
    operations: list[tuple[str, list[int], list[int]]] = []
    for _ in range(rng.randint(1, 60)):
        # Chains of donations need inputs that are new.
        near = arrays[-rng.choice((2, 5, 1000)) :]
        inputs = [rng.choice(near) for _ in range(rng.randint(1, 3))]
        label = rng.choice(LABELS)
        count = rng.choice((1, 1, 1, 2))
        if label in ("Depends", "CustomTransforms"):
            count = min(count, len(inputs))
        outputs = [len(arrays) + i for i in range(count)]
        operations.append((label, inputs, outputs))
        arrays += outputs
    return hand_made(operations), rng.sample(arrays[2:], min(len(arrays) - 2, rng.randint(1, 4)))


def graphs() -> st.SearchStrategy[tuple[Graph, list[int]]]:
    return st.integers(0, 10**9).map(lambda seed: random_graph(random.Random(seed)))


@given(graphs(), st.integers(1, 30))
def test_order_is_complete_and_inputs_come_first(case: tuple[Graph, list[int]], width: int) -> None:
    graph, results = case
    order = evaluation_order(graph, results, width)
    assert len(set(order)) == len(order)
    place = {operation: i for i, operation in enumerate(order)}
    for array in results:
        assert graph.producer[array] in place
    for operation in order:
        for array in graph.inputs[operation]:
            maker = graph.producer[array]
            assert maker < 0 or place[maker] < place[operation]


def test_what_no_result_needs_is_left_out() -> None:
    graph = hand_made([("Exp", [0], [1]), ("Log", [0], [2])])
    assert evaluation_order(graph, [1]) == [0]


# --- buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_all_at_once_is_one_by_one(seed: int) -> None:
    """Law: what the plain simulation says, and, a phase an operation, at each moment."""
    rng = random.Random(seed)
    for _ in range(100):
        graph, results = random_graph(rng)
        order = evaluation_order(graph, results)
        nbytes = [rng.choice((100, 200, 210, 40_000)) for _ in range(graph.arrays)]
        itemsize = [rng.choice((2, 4, 4, 4)) for _ in range(graph.arrays)]
        held, existing = rng.choice((([0], [1]), ([], [1, 0]), ([1], []), ([], [])))
        lag, measured_from = rng.choice((0, 1, 3, 10)), rng.randrange(len(order))
        run = graph, order, held, existing, results, nbytes, itemsize, lag, measured_from
        later = rng.sample(range(1, len(order)), min(rng.randrange(3), len(order) - 1))
        begins = [0, *sorted(later)]
        kept = rng.sample(range(graph.arrays), rng.randrange(graph.arrays))
        more = range(len(graph.label)), begins, kept, rng.choice(begins)
        peak = simulate(*run, *more)
        plain = one_by_one.simulate(*run, *more)
        assert replace(peak, makers=sorted(peak.makers)) == plain


@given(graphs(), st.integers(0, 80))
def test_what_is_left_is_what_is_held(case: tuple[Graph, list[int]], lag: int) -> None:
    """Law: after a run without anything in flight only results and held arrays have buffers."""
    graph, results = case
    order = evaluation_order(graph, results)
    peak = simulate(graph, order, [0], (), results, lag=lag)
    if lag == 0:
        assert peak.left <= 1 + len(set(results))
    assert len(peak.makers) == peak.buffers >= peak.left >= 1


def test_a_chain_of_donations_needs_one_buffer() -> None:
    """exp(exp(exp(x))) in place of what nobody else needs; x itself is held."""
    chain = hand_made([("Exp", [i], [i + 1]) for i in range(5)])
    assert peak_of(chain, [5], held=(0,)) == 2
    # Not held, it is donated too.
    assert peak_of(chain, [5]) == 1


def test_what_is_read_again_is_not_donated() -> None:
    graph = hand_made([("Exp", [0], [1]), ("Exp", [1], [2]), ("Add", [1, 2], [3])])
    assert peak_of(graph, [3], held=(0,)) == 3


def test_a_buffer_in_flight_is_not_donated() -> None:
    """Sum reads array 1 first; while that is in flight, Exp cannot write over it."""
    operations = [("Sin", [0], [1]), ("Sum", [1], [2]), ("Exp", [1], [3]), ("Add", [3, 2], [4])]
    graph = hand_made(operations)
    order = [0, 1, 2, 3]
    counts = [simulate(graph, order, [0], (), [4], lag=lag).buffers for lag in (0, 60)]
    assert counts == [3, 4]


def test_views_take_nothing() -> None:
    graph = hand_made([("Transpose", [0], [1]), ("Broadcast", [1], [2]), ("Split", [2], [3, 4])])
    assert peak_of(graph, [3, 4], held=(0,)) == 1


def test_a_reshape_copies_what_is_scattered() -> None:
    plain = hand_made([("Reshape", [0], [1])])
    turned = hand_made([("Transpose", [0], [1]), ("Reshape", [1], [2])])
    assert peak_of(plain, [1], held=(0,)) == 1
    assert peak_of(turned, [2], held=(0,)) == 2


def test_several_outputs_take_no_donation() -> None:
    """Each output keeps its own list of inputs, so the input is never held once."""
    one = hand_made([("Compiled", [0], [1])])
    two = hand_made([("Compiled", [0], [1, 2])])
    assert peak_of(one, [1]) == 1
    assert peak_of(two, [1, 2]) == 3


def test_donation_asks_for_size_and_width() -> None:
    graph = hand_made([("Exp", [0], [1])])
    order = [0]

    def buffers(old: tuple[int, int], new: tuple[int, int]) -> int:
        nbytes, itemsize = [old[0], new[0]], [old[1], new[1]]
        return simulate(graph, order, (), (), [1], nbytes, itemsize).buffers

    assert buffers((400, 4), (400, 4)) == 1
    assert buffers((400, 2), (800, 4)) == 2
    assert buffers((100_000, 4), (400, 4)) == 2  # too large a buffer for so little


@pytest.mark.parametrize(
    ("label", "rule"),
    [
        ("Scatter Sum", FIRST),
        ("CompiledBroadcastMultiplyAdd", ANY),
        ("Matmul", FRESH),
        ("SomethingNew", FRESH),
        ("Slice", SHARE),
    ],
)
def test_labels_go_by_their_first_word(label: str, rule: int) -> None:
    assert rule_of(label) == rule
