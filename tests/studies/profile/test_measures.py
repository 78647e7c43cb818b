"""Measures of a routing profile: published numbers recomputed, laws, and what chance gives.

Run: pytest tests/studies/profile/test_measures.py
"""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.profile_false_positives import LENGTHS, rates
from mlxstacks.studies.profile.measures import (
    adjusted_p_values,
    chance_jaccard,
    comparable,
    divergence,
    expected_bias,
    expert_overlap,
    group_counts,
    least_excess,
    length_strata,
    mean_of_pairs,
    measure,
    membership,
    p_value,
    pairwise_divergence,
    random_sets_jaccard,
    set_jaccard,
    shares,
    shuffle_within,
    shuffled,
    split_halves,
    top_layers,
    usual_top_experts,
)

# MoE Routing Layers Converge: top-3 layers by subject, Qwen3.5-35B-A3B, 40 layers.
PUBLISHED = {
    "chemistry": (20, 8, 14), "math": (14, 20, 18), "business": (14, 19, 8),
    "engineering": (8, 9, 14), "physics": (8, 20, 14), "law": (14, 19, 15),
    "other": (20, 8, 14), "computer science": (20, 8, 15), "health": (20, 8, 14),
    "history": (14, 20, 9), "philosophy": (8, 20, 14), "economics": (8, 20, 14),
    "psychology": (20, 8, 9), "biology": (20, 8, 13),
}  # fmt: skip


def test_the_published_table_has_a_mean_jaccard_of_451_910() -> None:
    inside = membership(np.array(list(PUBLISHED.values())), 40)
    assert mean_of_pairs(set_jaccard(inside)) == pytest.approx(451 / 910, abs=1e-15)


def test_published_chance_levels() -> None:
    assert chance_jaccard(3, 40) == pytest.approx(0.046, abs=5e-4)
    assert chance_jaccard(3, 13) == pytest.approx(0.150, abs=5e-4)
    # The published 0.496 is far above what 14 random sets give.
    drawn = random_sets_jaccard(14, 3, 40, seed=0)
    assert drawn.mean() == pytest.approx(chance_jaccard(3, 40), abs=2e-3)
    assert p_value(451 / 910, drawn) == 1 / (1 + len(drawn))


@given(size=st.integers(1, 9), data=st.data())
def test_chance_jaccard_is_the_mean_over_all_pairs_of_subsets(
    size: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, size))
    subsets = [frozenset(one) for one in combinations(range(size), k)]
    every = [Fraction(len(subsets[0] & b), len(subsets[0] | b)) for b in subsets]
    assert chance_jaccard(k, size) == pytest.approx(float(sum(every) / len(every)))


@pytest.mark.parametrize("k", [0, 5])
def test_chance_jaccard_refuses_what_is_no_subset(k: int) -> None:
    with pytest.raises(ValueError, match=f"got {k} of 4"):
        chance_jaccard(k, 4)


def counts_of(seed: int, groups: int = 4, layers: int = 5, experts: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, (groups, layers, experts)) + 1.0


@given(seed=st.integers(0, 10_000), groups=st.integers(2, 6))
def test_divergence_obeys_its_laws(seed: int, groups: int) -> None:
    p = shares(counts_of(seed, groups))
    kl = divergence(p)
    assert (kl >= 0).all()
    assert (kl <= math.log(groups) + 1e-6).all()
    # Jensen-Shannon: entropy of the mean less the mean of entropies.
    entropy = -(p * np.log(p)).sum(axis=-1)
    pooled = p.mean(axis=0)
    jensen_shannon = -(pooled * np.log(pooled)).sum(axis=-1) - entropy.mean(axis=0)
    np.testing.assert_allclose(kl.mean(axis=0), jensen_shannon, atol=1e-7)
    np.testing.assert_allclose(divergence(p[::-1]), kl[::-1], atol=1e-12)


def test_divergence_by_hand() -> None:
    p = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    np.testing.assert_allclose(divergence(p), math.log(2), atol=1e-6)
    equal = np.full((3, 2, 4), 0.25)
    assert np.abs(divergence(equal)).max() < 1e-12
    assert np.abs(pairwise_divergence(equal)).max() < 1e-12
    q = np.array([[[0.5, 0.5]], [[0.25, 0.75]]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert pairwise_divergence(q)[0, 1] == pytest.approx(expected, abs=1e-6)


def test_ties_go_to_the_lower_layer() -> None:
    assert top_layers(np.array([[1.0, 2.0, 2.0, 0.0, 2.0]]), 2).tolist() == [[1, 2]]


def test_a_group_without_choices_is_refused() -> None:
    counts = counts_of(0)
    counts[1, 2] = 0
    with pytest.raises(ValueError, match="no choices"):
        shares(counts)


def test_expert_overlap_by_hand() -> None:
    p = shares(np.array([[[9.0, 8, 1, 1], [9, 8, 1, 1]], [[9, 1, 8, 1], [1, 1, 8, 9]]]))
    np.testing.assert_allclose(expert_overlap(p, 2), [1 / 3, 0])
    assert [usual_top_experts(e) for e in (256, 32, 8, 4, 2)] == [16, 16, 2, 1, 1]


# --- chance ---------------------------------------------------------------------------------------


def documents(
    seed: int,
    groups: int = 4,
    each: int = 30,
    planted: dict[int, float] | None = None,
    concentration: float = 2.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(choices (n, 6, 8), labels, tokens): prompts of 20 to 60 tokens, each with a taste of its
    own, strongest in layer 5; planted: layer -> share of tokens that go to the expert of the
    group's number.
    """
    rng = np.random.default_rng(seed)
    n = groups * each
    labels, tokens = np.repeat(np.arange(groups), each), rng.integers(20, 60, n)
    found = np.zeros((n, 6, 8))
    for i in range(n):
        for layer in range(6):
            taste = rng.dirichlet(np.full(8, concentration if layer == 5 else 30.0))
            share = (planted or {}).get(layer, 0.0)
            taste = (1 - share) * taste + share * np.eye(8)[labels[i]]
            found[i, layer] = rng.multinomial(tokens[i], taste)
    return found, labels, tokens


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(0, 99))
def test_labels_are_shuffled_among_like_lengths_alone(sizes: list[int], seed: int) -> None:
    lengths, rng = np.array(sizes), np.random.default_rng(seed)
    labels, strata = rng.integers(0, 3, len(sizes)), length_strata(lengths)
    for stratum in range(strata.max() + 1):
        inside = lengths[strata == stratum]
        assert inside.max() <= 1.25 * inside.min()
        assert (lengths[strata > stratum] > inside.max()).all()
    dealt = shuffle_within(strata, labels, rng)
    pairs = [sorted(zip(strata, of, strict=True)) for of in (labels, dealt)]
    assert pairs[0] == pairs[1]


def test_lengths_that_no_two_groups_share_decide_nothing() -> None:
    labels = np.repeat([0, 1], 8)
    strata = length_strata(np.where(labels == 0, 10, 40))
    assert comparable(strata, labels) == 0
    assert comparable(length_strata(np.where(labels == 0, 10, 12)), labels) == 16
    found = np.random.default_rng(0).random((16, 3, 4)) + labels[:, None, None]
    null = shuffled(found, labels, strata, 2, (1,), 2, 20, seed=0)
    real = measure(group_counts(found, labels, 2), (1,), 2)
    assert p_value(real.mean_kl, null.mean_kl) == 1
    assert adjusted_p_values(real.kl.mean(axis=0), null.layer_kl) == [1, 1, 1]


@pytest.mark.parametrize("name", [*LENGTHS][1:])
def test_unequal_lengths_are_no_difference_of_routing(name: str) -> None:
    """At a small size; benchmarks/profile_false_positives.py has the rates of 200 simulations."""
    mean, layer = rates(name, "strata of 1.25 times", 12)
    assert max(mean, layer) <= 3  # one in 25 each: more than 3 of 12 has a chance of 0.1%


def test_planted_layers_are_found_and_shuffled_labels_are_not() -> None:
    found, labels, tokens = documents(1, planted={1: 0.3, 3: 0.2})
    ks, groups = (1, 2, 3), 4
    real = measure(group_counts(found, labels, groups), ks, 2)
    strata = length_strata(tokens)
    null = shuffled(found, labels, strata, groups, ks, 2, 60, seed=0)
    assert {tuple(sorted(top)) for top in real.top[2].tolist()} == {(1, 3)}
    assert p_value(real.mean_kl, null.mean_kl) == 1 / 61
    adjusted = adjusted_p_values(real.kl.mean(axis=0), null.layer_kl)
    assert {place for place, p in enumerate(adjusted) if p < 0.05} == {1, 3}
    # The same prompts under labels of chance: nothing.
    chance = shuffle_within(strata, labels, np.random.default_rng(5))
    none = measure(group_counts(found, chance, groups), ks, 2)
    assert p_value(none.mean_kl, null.mean_kl) > 0.05
    assert min(adjusted_p_values(none.kl.mean(axis=0), null.layer_kl)) > 0.05


def test_shuffled_labels_share_the_layer_that_spreads_most() -> None:
    """Why a mean Jaccard needs more than random layers beside it."""
    found, labels, tokens = documents(2, concentration=0.2)
    real = measure(group_counts(found, labels, 4), (1,), 2)
    null = shuffled(found, labels, length_strata(tokens), 4, (1,), 2, 60, seed=0)
    assert real.top[1].tolist() == [[5]] * 4
    assert real.jaccard[1] == 1.0
    assert null.jaccard[1].mean() > 0.9 > chance_jaccard(1, 6)
    assert p_value(real.mean_kl, null.mean_kl) > 0.05


def test_expected_bias_is_that_of_independent_choices() -> None:
    rng, p = np.random.default_rng(0), np.full(16, 1 / 16)
    kl = [divergence(shares(rng.multinomial(400, p, (5, 1)))).mean() for _ in range(200)]
    assert np.mean(kl) == pytest.approx(expected_bias(5, 16, 400), rel=0.06)


def test_the_least_excess_is_found_four_times_in_five() -> None:
    """Four groups, three layers, 16 experts; of one layer's expert 0 half of the groups take more.

    At the least excess the mean divergence lies above 95% of what equal groups give in 80%.
    """
    rng, choices, layers = np.random.default_rng(1), 2000, 3
    least = least_excess(4, 16, layers, choices, 0.05)
    assert least_excess(4, 16, layers, 2 * choices, 0.05) == pytest.approx(least / 2)

    def means(p: np.ndarray) -> np.ndarray:  # p (S, L, E)
        drawn = rng.multinomial(choices, p, (400, *p.shape[:2]))
        return np.array([divergence(shares(one)).mean() for one in drawn])

    equal = np.full((4, layers, 16), 1 / 16)
    low, high = 0.0, 0.06
    for _ in range(40):  # the tilt whose true divergence is the least excess
        tilt = (low + high) / 2
        planted = equal.copy()
        planted[:2, 0, 0] += tilt
        planted[:2, 0, 1] -= tilt
        low, high = (tilt, high) if divergence(planted).mean() < least else (low, tilt)
    bar = np.quantile(means(equal), 0.95)
    assert np.mean(means(planted) > bar) == pytest.approx(0.8, abs=0.08)
    assert np.mean(means(equal)) == pytest.approx(expected_bias(4, 16, choices), rel=0.06)
    with pytest.raises(ValueError, match="got alpha 0"):
        least_excess(4, 16, 3, 100, 0)


def test_halves_of_one_group_agree_where_groups_differ() -> None:
    # Each group has a layer of its own in which it goes to expert 0.
    found, labels, _ = documents(3)
    found[:, 5] = found[:, 4]
    for group in range(4):
        rows = np.flatnonzero(labels == group)
        found[rows, group] = 0
        found[rows, group, 0] = 40
    assert split_halves(found, labels, 4, 1, 5, seed=0) == (1.0, 0.0)
    assert split_halves(found[:, 4:], labels, 4, 1, 5, seed=0) == (
        1.0,
        1.0,
    )  # equal layers: the lower one, always


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1))
def test_p_values_lie_above_nothing(null: list[float], found: float) -> None:
    p = p_value(found, np.array(null))
    assert 1 / (1 + len(null)) <= p <= 1
