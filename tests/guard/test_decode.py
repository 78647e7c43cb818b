"""Generating text: the buffers of a step, and those that mlx-lm's batched path leaves behind.

Run: pytest tests/guard/test_decode.py
"""

import json
import os
import sys
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.guard.predict import DecodePrediction, predict_decode, predict_drawing
from tests.counting import Counter, available, counted
from tests.tiny_models import llama_config, qwen_moe_config

# No layers of qwen3_5_moe: a Llama, whose caches this package makes itself.
LAYERS = (0, 4)
TOKENS, SKIPPED = 64, 8


def model_of(layers: int) -> Any:
    if layers == 0:
        return base_model.build_model(llama_config(64) | {"num_hidden_layers": 6})
    config = qwen_moe_config(64, 8)
    config["text_config"] |= {"num_hidden_layers": layers, "full_attention_interval": 4}
    return base_model.build_model(config)


def main() -> None:
    """The counting process: [layers, prompts] -> the peak, and what each token left; [layers,
    number of answers] -> the peak of drawing them.

    Each run in a fork of its own, made before MLX has a thread: mlx-lm's generator outlives its
    last reference, and a process a run would import mlx-lm each time.
    """
    import mlx_lm.generate
    import mlx_lm.models.llama
    import mlx_lm.models.qwen3_5_moe  # noqa: F401

    for layers, prompts in json.load(sys.stdin):
        process = os.fork()
        if process == 0:
            if isinstance(prompts, int):
                count_drawing(layers, prompts)
            else:
                count(layers, prompts)
            os._exit(0)
        assert os.waitpid(process, 0)[1] == 0


def count(layers: int, prompts: list[list[int]] | None) -> None:
    from mlx_lm.generate import BatchGenerator, generate_step

    counter = Counter()
    before = counter.live
    model = model_of(layers)
    model.eval()
    mx.eval(model.parameters())
    if prompts is None:
        steps = iter(generate_step(mx.array([1, 2, 3]), model, max_tokens=TOKENS))
    else:
        batch = BatchGenerator(model, max_tokens=2 * TOKENS)
        batch.insert(prompts)
        steps = iter(batch.next, None)
    for _ in range(SKIPPED):
        next(steps)
    mx.synchronize()
    counter.reset()
    start = counter.live
    with counter.longest_lead():
        for _ in range(TOKENS - SKIPPED - 1):
            next(steps)
        mx.synchronize()
    left = (counter.live - start) / (TOKENS - SKIPPED - 1)
    print(json.dumps({"peak": counter.peak - before, "left": left}), flush=True)


def count_drawing(layers: int, answers: int) -> None:
    from mlxstacks.training.grpo import sample_answers

    counter = Counter()
    before = counter.live
    model = model_of(layers)
    model.eval()
    mx.eval(model.parameters())
    mx.synchronize()
    counter.reset()
    with counter.longest_lead():
        sample_answers(model, [1, 2, 3, 4], answers, 4, (), mx.random.key(0))
    print(json.dumps({"peak": counter.peak - before}), flush=True)


@pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
def test_predictions_beside_counts() -> None:
    same_length, drawn = [[1, 2, 3, 4], [5, 6, 7, 8]], (4, 16)
    runs: list[Any] = [[layers, how] for layers in LAYERS for how in (None, same_length, *drawn)]
    results = counted("tests.guard.test_decode", runs)
    for (layers, prompts), result in zip(runs, results, strict=True):
        if prompts in drawn:
            answers = predict_drawing(model_of(layers), TOKENS, prompts)
            assert answers.buffers == pytest.approx(result["peak"], rel=0.05), (layers, result)
            continue
        batched = prompts is not None
        found = predict_decode(model_of(layers), TOKENS, 2, batched)
        # Counted while one step ends and the next begins, some 25 buffers more or less: hence the
        # many tokens.
        assert found.leaked_per_token == pytest.approx(result["left"], abs=0.8), (layers, result)
        assert found.buffers == pytest.approx(result["peak"], rel=0.05), (layers, result)


def test_the_model_is_in_training_mode_again() -> None:
    model = model_of(4)
    model.train()
    predict_decode(model, 1, 1, False)
    assert model.training


def test_dense_models_leave_nothing() -> None:
    found = predict_decode(model_of(0), 100, 2, True)
    assert found.leaked_per_token == 0
    assert 0 < found.buffers == found.first_buffers


def test_tokens_until_a_limit() -> None:
    """35B-A3B: 30 linear layers leave 29 buffers a token; 499,000 are there after 17,000."""
    found = DecodePrediction(0, 1_900, 29)
    assert found.tokens_until(499_000) == (499_000 - 1_900) // 29
    assert found.tokens_until(1_000) == 0
    assert DecodePrediction(0, 1_900, 0).tokens_until(499_000) is None


if __name__ == "__main__":
    main()
