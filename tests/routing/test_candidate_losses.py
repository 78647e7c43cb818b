"""Candidates in batches: each once, within the bound, with the losses of one by one.

Run: pytest tests/routing/test_candidate_losses.py
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks import base_model
from mlxstacks.data.rows import Row, row_of
from mlxstacks.errors import InputError
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.layers.freezing import add_frozen
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.selection import base, routed
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.stack_files import attach_paths
from mlxstacks.layers.stacked import set_mode
from mlxstacks.layers.targets import find_targets
from mlxstacks.routing.candidate_losses import (
    GPU_TOKENS,
    LEAST_TOKENS,
    Candidate,
    CandidateLosses,
    LossCache,
    candidate,
    choose_batch_tokens,
    plan_batches,
)
from mlxstacks.training.modes import evaluating
from tests.studies.stack_analysis_cases import random_part
from tests.studies.train_cases import write_tiny_model

DOMAINS = ("a", "b")
STACKS = {name: [f"{name}-hash"] for name in DOMAINS}
MIXES: tuple[dict[str, float], ...] = (
    {},
    {"a": 1.0},
    {"b": 1.0},
    {"a": 1.0, "b": 0.2},
    {"a": 1.0, "b": 1.0},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    loaded, _, _ = base_model.load(directory, lazy=True)
    base_model.dequantize(loaded)
    base_model.cast(loaded, mx.float32)
    names = TargetSettings(projections=("down_proj", "q_proj", "out_proj"))
    targets = find_targets(loaded, names)
    attach_paths(loaded, [target.path for target in targets])
    for seed, name in enumerate(DOMAINS):
        parts = {
            t.path: random_part(t.dims, StackSettings(rank=2), f"{name}-r1", name, 10 * seed)
            for t in targets
        }
        add_frozen(loaded, parts)
    return loaded


def rows_of(count: int, seed: int = 0) -> list[Row]:
    """Pairs of 4 to 23 tokens, of which the last ones are answers."""
    chance = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(chance.integers(4, 24))
        answer = int(chance.integers(1, length - 1))
        tokens = chance.integers(1, 250, length).tolist()
        rows.append(row_of(tokens, [0.0] * (length - answer) + [1.0] * answer))
    return rows


def one_by_one(model: nn.Module, row: Row, weights: dict[str, float]) -> float:
    mode = routed(list(weights), list(weights.values())) if weights else base()
    set_mode(model, mode, mx.float32)
    with evaluating(model):
        return evaluate_mean_loss(model, [row])


def losses_on(model: nn.Module, rows: list[Row], cache: LossCache, tokens: int) -> CandidateLosses:
    head, _ = find_output_head(model)
    return CandidateLosses(
        model, rows, STACKS, "tiny", cache, batch_tokens=tokens, dtype=mx.float32, head=head
    )


def every(count: int) -> list[Candidate]:
    return [candidate(pair, weights) for pair in range(count) for weights in MIXES]


def test_batched_losses_are_those_of_one_by_one(model: nn.Module) -> None:
    rows, wanted = rows_of(5), every(5)
    expected = [one_by_one(model, rows[one.pair], dict(one.weights)) for one in wanted]
    for batch_tokens in (1, 64, 10_000):
        found = losses_on(model, rows, LossCache(), batch_tokens)(wanted)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    by_mix = np.array(expected).reshape(5, len(MIXES))
    assert (np.abs(np.diff(by_mix, axis=1)) > 1e-3).all(), "the stacks do nothing here"


def test_mixed_batches_do_not_confuse_sequences(model: nn.Module) -> None:
    """One pair under all weights in a single batch: rows with weights of their own."""
    rows = rows_of(1, seed=3)
    losses = losses_on(model, rows, LossCache(), 10_000)
    found = losses(every(1))
    assert losses.made == len(MIXES)
    expected = [one_by_one(model, rows[0], dict(weights)) for weights in MIXES]
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_cache_answers_without_the_model(model: nn.Module) -> None:
    rows, cache = rows_of(4), LossCache()
    first = losses_on(model, rows, cache, 100)
    found = first(every(4))

    def no_model(*_: object) -> None:
        raise AssertionError("the model was asked")

    again = losses_on(model, rows, cache, 100)
    again._measure = no_model  # type: ignore[method-assign, assignment]
    assert again(every(4)) == found
    assert (again.made, again.recalled, first.made) == (0, 20, 20)


def test_resumed_work_ends_with_the_same_bits(model: nn.Module, tmp_path: Path) -> None:
    """Whatever whole lines a killed run has left, in any number."""
    rows, path = rows_of(9, seed=5), tmp_path / "losses.jsonl"
    cache = LossCache(path)
    whole = losses_on(model, rows, cache, 120)(every(9))
    cache.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    for kept in (0, 1, len(lines) // 2, len(lines) - 1):
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:11])
        resumed = LossCache(path)
        assert losses_on(model, rows, resumed, 120)(every(9)) == whole
        resumed.close()


def test_a_loss_that_is_no_number_names_the_domains(model: nn.Module) -> None:
    losses = losses_on(model, rows_of(1), LossCache(), 100)
    layer = model.language_model.model.layers[0].linear_attn.out_proj
    stacks = layer.stacks.stacks()
    try:
        broken = [s.id.domain == "b" for s in stacks].index(True)
        part = stacks[broken]
        poisoned = type(part)(part.id, part.shape, part.lora_a * mx.inf, part.lora_b, part.router)
        layer.set_stacks([*stacks[:broken], poisoned, *stacks[broken + 1 :]])
        with pytest.raises(InputError, match="with a \\+ b is nan"):
            losses([candidate(0, {"a": 1.0, "b": 1.0})])
        assert losses([candidate(0, {"a": 1.0})])
    finally:
        layer.set_stacks(stacks)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    batch_tokens=st.integers(1, 400),
    mixes=st.integers(1, 5),
)
def test_every_candidate_is_in_one_batch_within_the_bound(
    lengths: list[int], batch_tokens: int, mixes: int
) -> None:
    wanted = [candidate(pair, weights) for weights in MIXES[:mixes] for pair in range(len(lengths))]
    batches = plan_batches(wanted, lengths, batch_tokens)
    assert sorted(p for batch in batches for p in batch) == list(range(len(wanted)))
    for batch in batches:
        longest = max(lengths[wanted[p].pair] for p in batch)
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens


def test_candidates_of_equal_weights_share_batches() -> None:
    wanted = every(20)
    batches = plan_batches(wanted, [10] * 20, 80)
    mixed = [len({wanted[p].weights for p in batch}) > 1 for batch in batches]
    # 20 rows of each mix: two batches of eight, and the four that are left, put together
    assert mixed == [False] * 10 + [True] * 3


def test_automatic_batch_is_within_its_bounds() -> None:
    sizes = [choose_batch_tokens(width) for width in (64, 2048, 8192, 10**9)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(LEAST_TOKENS <= size <= GPU_TOKENS for size in sizes)
    assert sizes[-1] == LEAST_TOKENS
