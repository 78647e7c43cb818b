"""The prediction beside the count: tiny qwen3_5_moe runs, simulated here and counted in a process
whose allocator counts.

Run: pytest tests/guard/test_census.py (a tenth), MLXSTACKS_SOAK=1 for all.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxstacks.guard.step import simulate_step, step_graph, step_sizes
from tests.counting import available, counted
from tests.guard.cases import COUNT, Case, cases

needs_compiler = pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
BUFFERS_WITHIN, BYTES_WITHIN = 0.05, 0.10


def predicted(case: Case) -> tuple[int, int]:
    with case.step() as step:
        graph = step_graph(step)
        peak = simulate_step(graph, step_sizes(step, graph))
    return peak.buffers, peak.nbytes


@needs_compiler
def test_prediction_is_within_bounds_of_the_count(
    campaign: Callable[[int], range], record_property: Callable[[str, Any], None]
) -> None:
    chosen = [cases()[index] for index in campaign(COUNT)]
    results = counted("tests.guard.count_worker", [case.as_json() for case in chosen])
    wrong, buffer_errors, byte_errors = [], [], []
    for case, result in zip(chosen, results, strict=True):
        buffers, nbytes = predicted(case)
        # What an earlier run in that process left behind is not this run's.
        buffer_errors.append(buffers / (result["buffers"] - result["before"]) - 1)
        byte_errors.append(nbytes / result["bytes"] - 1)
        if abs(buffer_errors[-1]) > BUFFERS_WITHIN or abs(byte_errors[-1]) > BYTES_WITHIN:
            wrong.append(f"{case}: {buffer_errors[-1]:+.1%} buffers, {byte_errors[-1]:+.1%} bytes")
    record_property("buffers", _spread(buffer_errors))
    record_property("bytes", _spread(byte_errors))
    print(f"buffers {_spread(buffer_errors)}; bytes {_spread(byte_errors)}")
    assert not wrong, "\n".join(wrong)


def _spread(errors: list[float]) -> str:
    return f"{min(errors):+.1%} to {max(errors):+.1%}, median {median(errors):+.1%}"


def test_prediction_evaluates_nothing() -> None:
    """Law: a model a thousand times this machine can be asked about."""
    with Case(32).step() as step:
        graph = step_graph(step)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        simulate_step(graph, step_sizes(step, graph))
    # Scalars and indices are made when a graph is built; the weights of this model are 400 kB.
    assert mx.get_peak_memory() - before < 100_000


def test_rank_and_experts_do_not_move_the_count_on_the_cpu() -> None:
    """On the CPU backend; nothing is said of Metal."""
    counts = {
        predicted(Case(40, rank=rank, num_experts=experts))[0]
        for rank, experts in ((1, 8), (16, 8), (4, 64))
    }
    assert max(counts) - min(counts) <= 0.01 * max(counts)


def test_building_a_graph_leaves_the_model_as_it_was() -> None:
    with Case(24, checkpointing="layers").step() as step:
        layers = [type(layer) for layer in step.model.layers]
        weights = step.model.trainable_parameters()
        graph = step_graph(step)
        step_sizes(step, graph)
        assert [type(layer) for layer in step.model.layers] == layers
        after = step.model.trainable_parameters()
    pairs = zip(tree_flatten(weights), tree_flatten(after), strict=True)
    assert all(a is b for (_, a), (_, b) in pairs)
