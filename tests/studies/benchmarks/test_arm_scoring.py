"""Scores of continuations, on a stub with known logits.
Run: pytest tests/studies/benchmarks/test_arm_scoring.py
"""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks.arms.scoring import Pair, PairScorer, selection_of
from mlxstacks.errors import InputError
from mlxstacks.layers.selection import Selection

VOCABULARY = 11


def stub(tokens: mx.array) -> mx.array:
    """Logits that a causal model could give: of the token and the sum of those before it."""
    seen = mx.cumsum(tokens, axis=1)[..., None]
    return mx.sin(seen * mx.arange(1, VOCABULARY + 1) * 0.37) * 3


def log_p(tokens: tuple[int, ...]) -> list[float]:
    """log p of each token but the first, in float64 NumPy."""
    seen = np.cumsum(tokens)[:, None]
    logits = np.sin(seen * np.arange(1, VOCABULARY + 1) * 0.37) * 3
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(logits[place, token]) for place, token in enumerate(tokens[1:])]


def scorer(batch_size: int = 64, batch_tokens: int = 2048) -> PairScorer:
    return PairScorer(stub, lambda selection: None, None, batch_size, batch_tokens)


tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9).map(tuple)
pairs = st.lists(st.builds(Pair, tokens, tokens), min_size=1, max_size=9)


@given(pairs, st.integers(1, 5), st.integers(4, 40))
@settings(max_examples=40, deadline=None)
def test_sums_hold_the_first_token_whatever_the_batch(
    found: list[Pair], batch_size: int, batch_tokens: int
) -> None:
    wanted = [
        sum(log_p(pair.context + pair.continuation)[len(pair.context) - 1 :]) for pair in found
    ]
    assert scorer(batch_size, batch_tokens).sums(found) == pytest.approx(wanted, abs=1e-4)


@given(pairs)
@settings(max_examples=20, deadline=None)
def test_the_reference_leaves_the_first_token_out(found: list[Pair]) -> None:
    wanted = [sum(log_p(pair.context + pair.continuation)[len(pair.context) :]) for pair in found]
    assert scorer().reference_sums(found) == pytest.approx(wanted, abs=1e-4)


def test_one_token_candidates_always_win_in_the_reference_and_not_in_ours() -> None:
    """Every context, the likeliest pair of tokens beside each single token, unlikely ones too."""
    reference_wins = our_wins = 0
    for first in range(VOCABULARY):
        after = [log_p((first, token))[0] for token in range(VOCABULARY)]
        likely = int(np.argmax(after))
        best = max(range(VOCABULARY), key=lambda t: log_p((first, likely, t))[1])
        for single in set(range(VOCABULARY)) - {likely}:
            asked = [Pair((first,), (likely, best)), Pair((first,), (single,))]
            old, new = scorer().reference_sums(asked), scorer().sums(asked)
            assert old[1] == 0.0 > old[0]
            reference_wins += 1
            our_wins += new[1] > new[0] / 2
    assert reference_wins == VOCABULARY * (VOCABULARY - 1)
    assert our_wins < reference_wins / 2


@given(pairs)
@settings(max_examples=20, deadline=None)
def test_greedy_is_what_argmax_says(found: list[Pair]) -> None:
    def argmax_says(pair: Pair) -> bool:
        whole = pair.context + pair.continuation
        chosen = mx.argmax(stub(mx.array([whole])), axis=-1).tolist()[0]
        return chosen[len(pair.context) - 1 : -1] == list(pair.continuation)

    assert scorer().are_greedy(found) == [argmax_says(pair) for pair in found]


def test_a_context_goes_in_once_for_all_letters_and_for_both_rules() -> None:
    rows = 0

    def counted(tokens: mx.array) -> mx.array:
        nonlocal rows
        rows += tokens.shape[0]
        return stub(tokens)

    kept = PairScorer(counted, lambda selection: None, None, 64, 2048)
    letters = [Pair((1, 2, 3), (token,)) for token in range(4)]
    texts = [Pair((1, 2, 3), (token, 5)) for token in range(4)]
    assert kept.sums(letters) == pytest.approx([log_p((1, 2, 3, t))[2] for t in range(4)])
    assert rows == 1
    new = kept.sums(texts)
    assert rows == 5
    # The old rule, in another order: of the same tokens, so nothing is computed.
    old = kept.reference_sums(texts[::-1])[::-1]
    assert rows == 5
    assert old == scorer().reference_sums(texts)
    assert [n - o for n, o in zip(new, old, strict=True)] == pytest.approx(kept.sums(letters))
    assert kept.are_greedy(texts) == scorer().are_greedy(texts)
    weighted = [Pair((1, 2, 3), (token,), (("a", 1.0),)) for token in range(4)]
    kept.sums(weighted)
    assert rows == 10  # four of `are_greedy`, and other weights are another row


def test_nan_is_refused_and_names_the_domains() -> None:
    broken = PairScorer(lambda t: stub(t) * math.nan, lambda s: None, None, 4, 100)
    with pytest.raises(InputError, match="with medical a log probability is nan"):
        broken.sums([Pair((1,), (2,), (("medical", 0.5),))])


def test_a_batch_of_unequal_weights_has_a_row_for_each() -> None:
    chosen: list[Selection] = []
    kept = PairScorer(stub, chosen.append, None, 64, 2048)
    kept.sums([Pair((1,), (2,)), Pair((1,), (2,), (("a", 0.5),)), Pair((1,), (3,), (("b", 1.0),))])
    (mixed,) = chosen
    assert mixed.names == ("a", "b")
    assert mixed.weights is not None
    assert sorted(mixed.weights.tolist()) == [[0.0, 0.0], [0.0, 1.0], [0.5, 0.0]]
    assert selection_of([(), ()]).mode == "base"
    equal = selection_of([(("a", 0.5),)] * 2)
    assert equal.weights is not None
    assert equal.weights.tolist() == [0.5]
