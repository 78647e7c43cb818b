"""A context that goes in once says the same of its continuations as one before each of them.
Run: pytest tests/studies/benchmarks/test_shared_context.py
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from mlxstacks import base_model
from mlxstacks.arms import scoring
from mlxstacks.arms.scoring import (
    CachedModel,
    Pair,
    PairScorer,
    continuation_log_p,
    find_cached_model,
    sharing_pays,
)
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.studies.benchmarks.settings import ArmName
from mlxstacks.training.modes import evaluating
from tests.studies.benchmarks.arm_cases import arms_of, write_adapter
from tests.studies.benchmarks.test_arm_scoring import VOCABULARY, log_p, stub
from tests.studies.route_evaluate_cases import Places, write_places
from tests.tiny_models import VOCAB_SIZE, write_llama, write_model, write_qwen_moe

# Largest difference of a sum, in nats: over 498 drawn sets of pairs on these models it was 2.5e-5.
ROUNDING = 2e-4
WINDOW = 12


def cached_stub(seen: list[tuple[int, int]] | None = None) -> CachedModel:
    """`stub` with a cache: the sum of the tokens so far. seen: shapes of what goes in."""

    def logits_of(tokens: mx.array, entries: list[Any]) -> mx.array:
        if seen is not None:
            seen.append(tokens.shape)
        (entry,) = entries
        before = mx.zeros((tokens.shape[0], 1), tokens.dtype) if entry.empty() else entry[0]
        assert before.shape[0] == tokens.shape[0]
        whole = mx.concatenate([before, tokens], axis=1)
        entry[0] = mx.sum(whole, axis=1, keepdims=True)
        return stub(whole)[:, 1:]

    return CachedModel(logits_of, lambda: [ArraysCache(1)])


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)


@given(tokens, st.lists(tokens, min_size=1, max_size=7), st.integers(1, 4), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_log_p_of_known_logits_whatever_the_batch(
    context: tuple[int, ...],
    continuations: list[tuple[int, ...]],
    batch_size: int,
    batch_tokens: int,
) -> None:
    seen: list[tuple[int, int]] = []
    found = continuation_log_p(
        cached_stub(seen), context, continuations, None, batch_size, batch_tokens
    )
    for continuation, values in zip(continuations, found, strict=True):
        wanted = log_p(context + continuation)[len(context) - 1 :]
        assert values == pytest.approx(wanted, abs=1e-4)
    # The context alone and once; then each distinct beginning once, within both limits.
    assert seen[0] == (1, len(context))
    assert sum(rows for rows, _ in seen[1:]) == len({c[:-1] for c in continuations} - {()})
    for rows, width in seen[1:]:
        assert rows <= batch_size
        assert rows == 1 or rows * (len(context) + width) + len(context) <= batch_tokens


def test_long_contexts_of_several_continuations_pay_and_others_do_not() -> None:
    ten = [(number, *range(9)) for number in range(4)]
    assert not sharing_pays(50, ten)
    assert sharing_pays(100, ten)
    assert sharing_pays(50, ten, width=576)  # a token of a wider model costs more
    assert not sharing_pays(100_000, ten[:1])
    # Letters are one row as it is, and a copy is no other row.
    assert not sharing_pays(1000, [(number,) for number in range(5)])
    assert not sharing_pays(1000, [ten[0], ten[0]])
    # Little to save beside so much to compute.
    assert not sharing_pays(300, [(0,) * 3000, (1,) * 3000])


def write_gemma(directory: Path, **options: Any) -> Path:
    """Layer 0 has a sliding window, layer 1 sees everything."""
    config = {
        "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "query_pre_attn_scalar": 32, "vocab_size": VOCAB_SIZE,
        "sliding_window": WINDOW, "sliding_window_pattern": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    return write_model(directory, config, group_size=64, shards=1, **options)


WRITE: dict[str, Callable[..., Path]] = {
    "llama": write_llama,
    "qwen_moe": write_qwen_moe,
    "gemma": write_gemma,
}


@pytest.fixture(scope="module", params=WRITE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    directory = tmp_path_factory.mktemp(request.param)
    loaded, _, _ = base_model.load(WRITE[request.param](directory, bits=None, dtype="float32"))
    loaded.freeze()
    return loaded


def scorer(model: nn.Module, batch_size: int = 64, batch_tokens: int = 2048) -> PairScorer:
    cached = find_cached_model(model)
    assert cached is not None
    head = find_output_head(model)[0]
    return PairScorer(model, lambda selection: None, head, batch_size, batch_tokens, cached)


def whole(kept: PairScorer) -> PairScorer:
    """The same, without sharing."""
    return replace(kept, cached=None, kept={})


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share whatever saves a token, so that tiny contexts are shared too."""
    monkeypatch.setattr(scoring, "LEAST_SAVED", 1)
    monkeypatch.setattr(scoring, "LEAST_SHARE", 0.0)


def draw(seed: int, contexts: int = 3) -> list[Pair]:
    """Pairs of contexts of 1 to 40 tokens, around the window too, in no order; some copies."""
    random = np.random.default_rng(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(random.integers(0, 256, random.integers(1, most + 1)).tolist())

    pairs = []
    for _ in range(contexts):
        context = some(40)
        ends = [some(9) for _ in range(random.integers(1, 6))]
        ends += [ends[0] + some(1), ends[0]]  # a longer one, and the very same
        pairs += [Pair(context, end) for end in ends]
    random.shuffle(pairs)
    return pairs


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("limits", [(64, 2048), (2, 70)])
def test_sums_are_those_of_whole_inputs(model: nn.Module, limits: tuple[int, int]) -> None:
    kept = scorer(model, *limits)
    headless = replace(kept, head=None, kept={})
    with evaluating(model), base_model.gated_delta_installed():
        pairs = draw(limits[0])
        wanted = whole(scorer(model)).sums(pairs)
        assert kept.sums(pairs) == pytest.approx(wanted, abs=ROUNDING)
        assert headless.sums(pairs) == pytest.approx(wanted, abs=ROUNDING)
        old = whole(kept).reference_sums(pairs)
        assert kept.reference_sums(pairs) == pytest.approx(old, abs=ROUNDING)


@pytest.mark.usefixtures("always")
def test_what_a_state_holds_beside_its_arrays_does_not_matter(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before mlx-lm 0.32 it was keys and values, cut at the offset, which was set from them."""

    def get(entry: Any) -> tuple[mx.array, mx.array]:
        return entry.keys[..., : entry.offset, :], entry.values[..., : entry.offset, :]

    def put(entry: Any, state: tuple[mx.array, mx.array]) -> None:
        entry.keys, entry.values = state
        entry.offset = entry.keys.shape[2]

    def put_arrays(entry: Any, state: list[Any]) -> None:
        entry.cache = state

    for kind in (KVCache, RotatingKVCache):
        monkeypatch.setattr(kind, "state", property(get, put))
    monkeypatch.setattr(ArraysCache, "state", property(lambda entry: entry.cache, put_arrays))
    pairs = draw(3)
    kept = scorer(model)
    with evaluating(model), base_model.gated_delta_installed():
        assert kept.sums(pairs) == pytest.approx(whole(kept).sums(pairs), abs=ROUNDING)


@pytest.mark.usefixtures("always")
def test_windows_are_passed_by_context_and_by_continuation(model: nn.Module) -> None:
    """Of the sliding window: before, at and behind its end, by one token and by several."""
    random = np.random.default_rng(5)
    together, alone = scorer(model), scorer(model, batch_size=1)
    with evaluating(model), base_model.gated_delta_installed():
        for length in (WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
            context = tuple(random.integers(0, 256, length).tolist())
            for width in (2, 2 * WINDOW):  # one token goes in, or many
                ends = random.integers(0, 256, (3, width)).tolist()
                pairs = [Pair(context, tuple(end)) for end in ends]
                wanted = whole(together).sums(pairs)
                for kept in (together, alone):
                    assert kept.sums(pairs) == pytest.approx(wanted, abs=ROUNDING), (length, width)


@pytest.mark.usefixtures("always")
def test_greedy_is_the_same(model: nn.Module) -> None:
    context = tuple(range(1, 30))
    said: list[int] = []
    with evaluating(model), base_model.gated_delta_installed():
        for _ in range(5):
            said.append(int(mx.argmax(model(mx.array([[*context, *said]]))[0, -1])))
        right = tuple(said)
        ends = [right, right[:1], right[:-1], (*right[:-1], (right[-1] + 1) % 256), (7, *right)]
        pairs = [Pair(context, end) for end in ends]
        kept = scorer(model)
        for one in (kept, replace(kept, head=None)):
            assert one.are_greedy(pairs) == [True, True, True, False, said[0] == 7]
            assert one.are_greedy(pairs) == whole(one).are_greedy(pairs)


@pytest.mark.usefixtures("always")
def test_bits_depend_on_the_set_of_pairs_alone(model: nn.Module) -> None:
    pairs = draw(11)
    with evaluating(model), base_model.gated_delta_installed():
        first = scorer(model).sums(pairs)
        again = scorer(model)  # of a run that goes on: nothing is known
        assert again.reference_sums(pairs[::-1]) == scorer(model).reference_sums(pairs)[::-1]
        assert again.sums(pairs[::-1])[::-1] == first


@pytest.mark.usefixtures("always")
def test_a_context_is_computed_once_and_caches_stay_within_the_limit(model: nn.Module) -> None:
    shapes: list[tuple[tuple[int, ...], int]] = []
    kept = scorer(model, batch_tokens=150)
    assert kept.cached is not None
    own = kept.cached.logits_of

    def noted(tokens: mx.array, entries: list[Any]) -> mx.array:
        made = own(tokens, entries)
        held = [e.keys.shape[0] * e.keys.shape[2] for e in entries if isinstance(e, KVCache)]
        shapes.append((tokens.shape, max(held)))
        return made

    kept = replace(kept, cached=replace(kept.cached, logits_of=noted))
    context = tuple(range(30))
    pairs = [Pair(context, (number, 1, 2, 3, 4, 5)) for number in range(7)]
    with evaluating(model), base_model.gated_delta_installed():
        kept.sums(pairs)
    # (150 - 30) // (30 + 5) = 3 copies; keys have no room but for what goes in.
    assert [shape for shape, _ in shapes] == [(1, 30), (3, 5), (3, 5), (1, 5)]
    assert [held for _, held in shapes[1:]] == [105, 105, 35]


def test_unknown_caches_leave_pairs_whole(tmp_path: Path) -> None:
    model, _, _ = base_model.load(write_llama(tmp_path, bits=None, dtype="float32"))
    assert find_cached_model(model) is not None

    # Of this name alone: nobody has looked at what it does.
    own = type("KVCache", (KVCache,), {"__module__": "somewhere"})
    for kind in (lambda: ChunkedKVCache(64), own):
        object.__setattr__(model, "make_cache", lambda kind=kind: [kind() for _ in model.layers])
        assert find_cached_model(model) is None


def test_arrays_that_do_not_lead_with_the_batch_leave_pairs_whole() -> None:
    class Summed(nn.Module):
        layers = ()

        def make_cache(self) -> list[Any]:
            return [ArraysCache(1)]

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            cache[0][0] = mx.sum(tokens, axis=0)  # over the batch
            return stub(tokens)

    assert find_cached_model(Summed()) is None


LONG = "beta 7: " + "stone cloud " * 12
ENDS = ((1, 2, 3), (4, 5), (6,), (7, 8, 9, 10))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    mx.set_default_device(mx.cpu)
    return write_places(tmp_path_factory.mktemp("places"), threshold=0.3)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the contexts that were shared."""
    shared: list[int] = []

    def noted(model: CachedModel, context: tuple[int, ...], *rest: Any) -> Any:
        shared.append(len(context))
        return continuation_log_p(model, context, *rest)

    monkeypatch.setattr("mlxstacks.arms.scoring.continuation_log_p", noted)
    return shared


def test_every_arm_shares_long_contexts(
    places: Places, contexts: list[int], tmp_path: Path
) -> None:
    names: tuple[ArmName, ...] = ("base", "ungated", "adapter")
    adapter = str(write_adapter(places, tmp_path / "adapter"))
    of_arm = {}
    for arm in arms_of(places, names, adapter_path=adapter):
        long = arm.prompts.text(LONG)
        asked = [(long, end) for end in ENDS] + [(long[:9], end) for end in ENDS]
        prompts = [(LONG, None)] * len(asked)
        contexts.clear()
        of_arm[arm.name], greedy = arm.score_tokens(asked, prompts, with_greedy=True)
        assert contexts == [len(long)] * 2, "the short one is not shared"
        assert arm._scorer is not None
        arm._scorer = whole(arm._scorer)
        alone, greedy_alone = arm.score_tokens(asked, prompts, with_greedy=True)
        assert of_arm[arm.name] == pytest.approx(alone, abs=ROUNDING)
        assert greedy == greedy_alone
    assert of_arm["base"] != pytest.approx(of_arm["ungated"], abs=0.01)
    assert of_arm["base"] != pytest.approx(of_arm["adapter"], abs=0.01)


def test_a_context_under_other_weights_is_another_one(places: Places, contexts: list[int]) -> None:
    """Side by side with short ones, which go in by rows of their own weights."""
    weights = [(), (("alpha", 1.0),), (("alpha", 0.5), ("beta", 0.25))]
    arms = arms_of(places, ("ungated",))  # an arm is closed with its generator
    arm = next(arms)
    long = arm.prompts.text(LONG)
    pairs = [Pair(c, end, w) for c in (long, long[:9]) for w in weights for end in ENDS]
    assert arm._scorer is not None
    assert arm._loaded is not None
    with evaluating(arm._loaded.model), base_model.gated_delta_installed():
        sums = arm._scorer.sums(pairs)
        assert contexts == [len(long)] * len(weights)
        assert sums == pytest.approx(whole(arm._scorer).sums(pairs), abs=ROUNDING)
    first = sums[:: len(ENDS)][: len(weights)]
    assert len({round(value, 3) for value in first}) == len(weights)
