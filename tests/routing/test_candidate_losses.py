"""Candidates in batches: each once, within the bound, with the losses of one by one.

Run: pytest tests/routing/test_candidate_losses.py
"""

import json
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
    BASE_CONFIG,
    GPU_TOKENS,
    LEAST_TOKENS,
    Candidate,
    CandidateLosses,
    LossCache,
    candidate,
    choose_batch_tokens,
    config_key,
    pair_key,
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
    rows, wanted = rows_of(3), every(3)
    expected = [one_by_one(model, rows[one.pair], dict(one.weights)) for one in wanted]
    for batch_tokens in (1, 64, 10_000):
        found = losses_on(model, rows, LossCache(), batch_tokens)(wanted)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    by_mix = np.array(expected).reshape(3, len(MIXES))
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
    rows, path = rows_of(6, seed=5), tmp_path / "losses.jsonl"
    cache = LossCache(path)
    whole = losses_on(model, rows, cache, 120)(every(6))
    cache.close()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    for kept in (0, 1, len(lines) // 2, len(lines) - 1):
        path.write_bytes(b"".join(lines[:kept]) + lines[kept][:11])
        resumed = LossCache(path)
        assert losses_on(model, rows, resumed, 120)(every(6)) == whole
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


# --- the cache ------------------------------------------------------------------------------------


ROW = row_of([1, 2, 3, 4], [0, 0, 1, 1])
HASHES = {"a": ["aa", "ab"], "b": ["ba"], "c": ["ca"]}


def test_pair_key_holds_tokens_weights_and_context() -> None:
    key = pair_key("base", ROW)
    assert key == pair_key("base", row_of([1, 2, 3, 4], [0, 0, 1, 1]))
    others = [
        pair_key("other", ROW),
        pair_key("base", row_of([1, 2, 3, 5], [0, 0, 1, 1])),
        pair_key("base", row_of([1, 2, 3, 4], [0, 0, 0, 1])),
    ]
    assert len({key, *others}) == 4


def test_config_key_holds_hashes_and_weights_only() -> None:
    key = config_key({"a": 1.0, "b": 0.2}, HASHES)
    assert key == config_key({"b": 0.2, "a": 1.0}, HASHES)
    assert key == config_key({"a": 1.0, "b": 0.2, "c": 0.0}, HASHES)
    # a domain more, or another name for the same stacks
    assert key == config_key({"a": 1.0, "b": 0.2}, {**HASHES, "d": ["da"]})
    assert key == config_key({"x": 1.0, "b": 0.2}, {"x": ["aa", "ab"], "b": ["ba"]})
    assert key != config_key({"a": 1.0, "b": 0.3}, HASHES)
    assert key != config_key({"a": 1.0, "b": 0.2}, {**HASHES, "b": ["bb"]})
    assert key != config_key({"a": 1.0, "b": 0.2}, {**HASHES, "a": ["ab", "aa"]})
    assert config_key({}, HASHES) == config_key({"a": 0.0}, HASHES) == BASE_CONFIG


def test_what_was_added_is_there_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    cache = LossCache(path)
    cache.add([("p", "x", 0.1), ("p", "y", 1 / 3)])
    cache.add([("q", "x", 2.5)])
    cache.close()
    again = LossCache(path)
    assert [again.get("p", "x"), again.get("p", "y"), again.get("q", "x")] == [0.1, 1 / 3, 2.5]
    assert again.get("q", "y") is None
    assert again.notes == []
    again.close()


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_torn_last_line_counts_as_none_and_spoils_nothing(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "losses.jsonl"
    cache = LossCache(path)
    cache.add([("p", "x", 0.125)])
    whole = path.stat().st_size
    cache.add([("q", "x", 1.5), ("q", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy", 2.5)])
    cache.close()
    assert path.stat().st_size - whole > 60
    path.write_bytes(path.read_bytes()[: whole + kept])
    again = LossCache(path)
    assert (len(again), again.get("p", "x"), again.get("q", "x")) == (1, 0.125, None)
    again.add([("q", "x", 1.5)])
    again.close()
    third = LossCache(path)
    assert (len(third), third.get("q", "x")) == (2, 1.5)
    assert third.notes == []
    third.close()


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    good = json.dumps({"losses": [["p", "x", 1.0]]})
    bad = ['{"losses": [["p", "y", NaN]]}', '{"losses": [["p", "z"]]}', "\0\0\0", "[1]", "{}"]
    bad += ['{"losses": [[1, "y", 2.0]]}', '{"losses": [["p", "y", "2"]]}', '{"losses": 3}']
    path.write_text("\n".join([*bad, good]) + "\n")
    cache = LossCache(known=[path])
    assert (len(cache), cache.get("p", "x")) == (1, 1.0)
    assert cache.notes == ["losses.jsonl: 8 lines cannot be read; their losses are made again."]


def test_the_final_file_does_not_depend_on_the_order_of_work(tmp_path: Path) -> None:
    records = [("p", "x", 0.1), ("q", "x", 0.2), ("p", "y", 0.3), ("r", "base", 0.4)]
    one, other = LossCache(), LossCache()
    one.add(records)
    for record in reversed(records):
        other.add([record])
    one.write(tmp_path / "one")
    other.write(tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert len(LossCache(known=[tmp_path / "one"])) == 4


def test_known_files_are_only_read(tmp_path: Path) -> None:
    known, path = tmp_path / "known", tmp_path / "work"
    before = LossCache(known)
    before.add([("p", "x", 1.0)])
    before.close()
    data = known.read_bytes()
    cache = LossCache(path, [known, tmp_path / "absent"])
    assert cache.get("p", "x") == 1.0
    cache.add([("p", "y", 2.0)])
    cache.close()
    assert known.read_bytes() == data
    assert len(LossCache(known=[path])) == 1
