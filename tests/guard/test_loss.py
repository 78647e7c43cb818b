"""The guard's picture of the loss in pieces: the count of a real step, and of which steps.

Run: pytest tests/guard/test_loss.py
"""

import mlx.core as mx
import pytest

from mlxstacks.guard.build import lazy_model, recurrence, training_step
from mlxstacks.guard.predict import predict
from mlxstacks.guard.run import predict_training
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.guard.step import Step, run_step, simulate_step, step_graph, step_sizes
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.ops import token_loss
from tests.counting import available, counted
from tests.guard.cases import Case, real_weights
from tests.guard.loss_cases import CASES, LossCase, short_pieces
from tests.layers.test_output_head import GEMMA2

needs_compiler = pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
BUFFERS_WITHIN, BYTES_WITHIN = 0.05, 0.10


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "PIECE_LOGITS", token_loss.PIECE_LOGITS)
    short_pieces()


@needs_compiler
def test_prediction_is_within_bounds_of_the_count() -> None:
    results = counted("tests.guard.loss_cases", [case.as_json() for case in CASES])
    errors = {}
    for case, result in zip(CASES, results, strict=True):
        with case.step() as step:
            graph = step_graph(step)
            peak = simulate_step(graph, step_sizes(step, graph))
        buffers = peak.buffers / (result["buffers"] - result["before"]) - 1
        errors[case] = buffers, peak.nbytes / result["bytes"] - 1
    print({str(case): [f"{error:+.1%}" for error in both] for case, both in errors.items()})
    for case, (buffers, nbytes) in errors.items():
        assert abs(buffers) <= BUFFERS_WITHIN, case
        assert abs(nbytes) <= BYTES_WITHIN, case


def test_longer_rows_take_hardly_more_logits() -> None:
    """Also beyond the rows that are simulated."""
    found = {}
    for loss in ("whole", "pieces"):
        case = LossCase(
            8, layers=2, interval=2, loss=loss, recurrence="chunked", vocabulary=1 << 17
        )

        def step_at(tokens: int, case: LossCase = case) -> Step:
            return training_step(case.config(), case.settings(), tokens)

        with recurrence(case.settings()):
            found[loss] = predict(step_at, 512, lengths=(128, 192), direct_up_to=192)
    logits_bytes = 4 * (1 << 17)
    for tokens in (192, 512):
        whole, pieces = (found[loss].bytes_at(tokens) or 0 for loss in ("whole", "pieces"))
        assert whole > 3 * tokens * logits_bytes
        assert pieces < whole - 2 * tokens * logits_bytes


def test_pieces_are_the_loss_of_the_whole() -> None:
    losses = []
    for loss in ("whole", "pieces"):
        with LossCase(40, layers=2, interval=2, loss=loss).step() as step:
            real_weights(step)
            losses.append(run_step(step)[0][-1 if step.clip_norm is None else 0])
    assert mx.allclose(*losses, rtol=1e-5).item()


def test_a_model_whose_loss_cannot_be_taken_in_pieces_is_predicted_whole() -> None:
    assert find_output_head(lazy_model(GEMMA2), prove=False)[0] is None
    settings = GuardSettings(max_seq_length=16, rank=2)
    pieces = settings.model_copy(update={"loss": "pieces"})
    assert predict_training(GEMMA2, pieces) == predict_training(GEMMA2, settings)


def test_the_default_is_the_loss_of_mlx_lm() -> None:
    with Case(40, layers=2, interval=2).step() as step:
        assert step.loss.__name__ == "mlx_lm_loss"
