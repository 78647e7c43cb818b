"""A step of `stack`, and of `train`, predicted from a config beside the count of a real one.

Run: pytest tests/guard/test_stacks.py
"""

from typing import Any

import mlx.core as mx
import pytest
from pydantic import ValidationError

from mlxstacks import base_model
from mlxstacks.guard.build import recurrence, training_step
from mlxstacks.guard.run import predict_training
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.guard.step import step_graph, step_sizes
from tests.counting import available, counted
from tests.guard.stack_cases import StackCase
from tests.guard.test_sizes import SORTED

needs_compiler = pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
SHARED, DROPPED = {"rank": 4}, {"rank": 4, "dropout": 0.1}
PER_EXPERT = {"rank": 4, "switch_form": "per_expert"}
CASES = (
    StackCase(),
    StackCase(frozen=2, checkpointed=True),
    StackCase(frozen=4, stack=DROPPED),
    StackCase(frozen=8),
    StackCase(stack=PER_EXPERT),
    StackCase(frozen=8, stack=PER_EXPERT | DROPPED, tokens=24),
    StackCase(frozen=4, bits=4),
    StackCase(frozen=2, stack={"rank": 4, "latent_dim": 16}),
    StackCase("mixtral", frozen=2),
    StackCase("mixtral", frozen=8, stack=PER_EXPERT),
    StackCase("phi3", frozen=4, stack=DROPPED),
    StackCase("dense", frozen=4, directions=16, accumulation=2),
    StackCase("mixtral", grouped=True, stack=None),
    StackCase("mixtral", grouped=True, checkpointed=True, stack=None),
    StackCase("mixtral", grouped=True, frozen=2, stack=DROPPED),
    StackCase("nano", frozen=2, batch_size=1),
    StackCase(stack=None, dropout=0.1),
    StackCase(stack=None, form={"shared_outer": True}, bits=4, batch_size=1, tokens=4),
    StackCase(stack=None, form={"merge_ready": "grid"}, bits=4, checkpointed=True),
    StackCase("mixtral", stack=None, form={"merge_ready": "grid"}, bits=3, widened=True),
    StackCase("mixtral", stack=None, form={"merge_ready": "pooled"}, bits=4),
)
BUFFERS_WITHIN, BYTES_WITHIN = 0.05, 0.10


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    results = counted("tests.guard.stack_cases", [case.as_json() for case in CASES])
    return dict(zip(map(str, CASES), results, strict=True))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prediction_is_within_bounds_of_the_count(
    case: StackCase, counts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.grouped:
        monkeypatch.setattr(base_model.change, "LEAST_EXPERT_BYTES", 0)
    found, count = predict_training(case.config(), case.settings()), counts[str(case)]
    buffers = found.buffers / (count["buffers"] - count["before"]) - 1
    assert found.nbytes is not None
    nbytes = found.nbytes / count["bytes"] - 1
    print(f"{buffers:+.1%} buffers, {nbytes:+.1%} bytes")
    assert (abs(buffers) <= BUFFERS_WITHIN, abs(nbytes) <= BYTES_WITHIN) == (True, True)


def test_nearly_every_operation_is_met_in_the_trace() -> None:
    """Balance losses and random keys go from layer to layer beside the calls."""
    case = StackCase(frozen=2, stack=DROPPED, directions=8)
    with recurrence(case.settings()):
        step = training_step(case.config(), case.settings(), case.tokens)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        graph = step_graph(step)
        sizes = step_sizes(step, graph)
    unknown = sum(n for label, n in sizes.guessed.items() if label not in SORTED)
    assert unknown <= 0.005 * len(graph.order)
    assert mx.get_peak_memory() - before < 200_000  # nothing is evaluated


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "whole", "stack": SHARED}, "need loss pieces"),
        ({"loss": "whole", "dropout": 0.1}, "need loss pieces"),
        ({"frozen_stacks": 2}, "go with stack"),
        ({"loss": "whole", "merge_ready": "grid"}, "need loss pieces"),
        ({"stack": SHARED, "shared_outer": True}, "do not go together"),
        ({"stack": {"rank": 0}}, "greater than or equal to 1"),
    ],
)
def test_settings_that_no_run_has_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GuardSettings.model_validate(settings)
