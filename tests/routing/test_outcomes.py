"""Search over scripted losses: thresholds, soft boost, floor, the published in-pass rule; targets.

Run: pytest tests/routing/test_outcomes.py
"""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.routing.outcomes import (
    BASE,
    DomainSet,
    Found,
    Rules,
    blended,
    improves,
    replay,
    search_all,
    subsets,
    targets_of,
)

ABC = ("a", "b", "c")


def table(losses: Mapping[str, float], default: float = 9.0) -> dict[DomainSet, float]:
    """Losses by letters, "" being the base; sets that are not listed have `default`."""
    every = {BASE: default} | dict.fromkeys(subsets(("a", "b", "c", "d")), default)
    return every | {frozenset(letters): loss for letters, loss in losses.items()}


def find(losses: Mapping[str, float], rules: Rules | None = None) -> Found:
    return replay(rules or Rules(ABC), table(losses))


def letters(on: DomainSet) -> str:
    return "".join(sorted(on))


def test_nothing_beats_the_base() -> None:
    found = find({"": 1.0, "a": 1.0, "b": 1.2, "c": 3.0})
    assert (found.best, found.best_loss, found.path) == (BASE, 1.0, (BASE,))
    assert len(found.losses) == 4


def test_the_first_domain_needs_no_threshold() -> None:
    found = find({"": 1.0, "a": 0.9999, "b": 0.99991})
    assert letters(found.best) == "a"
    assert found.best_loss == 0.9999


@pytest.mark.parametrize(
    ("best", "added"), [(1.0, 0.99), (0.5, 0.49), (2.3, 2.29), (0.03, 0.02), (7.13, 7.12)]
)
def test_an_improvement_of_exactly_the_threshold_is_not_accepted(best: float, added: float) -> None:
    found = find({"": 9.5, "a": best, "ab": added})
    assert letters(found.best) == "a"
    assert not improves(added, best, 0.01)
    assert letters(find({"": 9.5, "a": best, "ab": added - 1e-6}).best) == "ab"


def test_a_pass_takes_its_best_addition_not_its_first() -> None:
    losses = {"": 3.0, "a": 2.0, "ab": 1.9, "ac": 1.5, "abc": 1.495}
    found = find(losses)
    assert letters(found.best) == "ac"  # b improves abc by less than the threshold
    assert [letters(on) for on in found.path] == ["", "a", "ac"]


def test_published_rule_takes_additions_inside_a_pass() -> None:
    losses = {"": 3.0, "a": 2.0, "ab": 1.9, "ac": 1.5, "abc": 1.495}
    first = find(losses, Rules(ABC, search="greedy_first"))
    assert letters(first.best) == "abc"
    assert [letters(on) for on in first.path] == ["", "a", "ab", "abc"]
    assert frozenset("ac") not in first.losses


def test_published_rule_makes_another_pass_after_an_addition() -> None:
    """b fails first, and helps once c is in."""
    losses = {"": 3.0, "a": 2.0, "ab": 2.5, "ac": 1.5, "abc": 1.0}
    found = find(losses, Rules(ABC, search="greedy_first"))
    assert [letters(on) for on in found.path] == ["", "a", "ac", "abc"]


def test_order_of_the_domains_breaks_ties() -> None:
    losses = {"": 3.0, "a": 2.0, "b": 2.0, "c": 2.0, "ab": 1.0, "ac": 1.0, "bc": 1.0}
    assert letters(find(losses).best) == "ab"
    assert letters(find(losses, Rules(("c", "b", "a"))).best) == "bc"


def test_all_domains_may_be_in() -> None:
    found = find({"": 3.0, "a": 2.0, "ab": 1.0, "abc": 0.5})
    assert letters(found.best) == "abc"


def test_soft_domain_is_added_by_any_improvement_at_half_a_target() -> None:
    rules = Rules(ABC, soft=("c",))
    found = find({"": 3.0, "a": 2.0, "ac": 1.999, "b": 2.5}, rules)
    assert (letters(found.best), letters(found.soft)) == ("ac", "c")
    assert found.best_loss == 1.999
    assert targets_of(rules, found) == {"a": 1.0, "b": 0.0, "c": 0.5}


def test_soft_domain_without_an_improvement_stays_out() -> None:
    rules = Rules(ABC, soft=("c",))
    found = find({"": 3.0, "a": 2.0, "ac": 2.0}, rules)
    assert (letters(found.best), found.soft) == ("a", BASE)


def test_soft_domain_in_the_set_keeps_its_whole_target() -> None:
    rules = Rules(ABC, soft=("c",))
    found = find({"": 3.0, "c": 2.0}, rules)
    assert targets_of(rules, found) == {"a": 0.0, "b": 0.0, "c": 1.0}


def test_soft_boost_is_not_tried_where_nothing_beats_the_base() -> None:
    found = find({"": 1.0, "c": 1.0}, Rules(ABC, soft=("c",)))
    assert (found.best, found.soft) == (BASE, BASE)


def test_two_soft_domains_are_tried_one_on_top_of_the_other() -> None:
    rules = Rules(ABC, soft=("b", "c"))
    found = find({"": 3.0, "a": 2.0, "ab": 1.999, "ac": 1.9985, "abc": 1.998}, rules)
    assert letters(found.soft) == "bc"


def test_chat_has_its_floor_in_every_run_but_the_base() -> None:
    rules = Rules(("math", "chat"), chat_domain="chat", chat_floor=0.2)
    assert rules.weights(BASE) == {}
    assert rules.weights(frozenset(["math"])) == {"math": 1.0, "chat": 0.2}
    assert rules.weights(frozenset(["math", "chat"])) == {"math": 1.0, "chat": 1.0}
    assert rules.floor_alone() == {"chat": 0.2}
    without = Rules(("math", "code"), chat_domain=None)
    assert without.weights(frozenset(["math"])) == {"math": 1.0}
    assert without.floor_alone() == {}


def test_empty_set_leaves_the_floor_as_the_only_target() -> None:
    rules = Rules(("chat", "math"), chat_domain="chat", chat_floor=0.2)
    nothing = Found(1.0, 1.0, BASE, BASE)
    targets = targets_of(rules, nothing)
    assert targets == {"chat": 0.2, "math": 0.0}
    assert blended(rules, targets, ["math"]) == pytest.approx({"chat": 0.16, "math": 0.2})


@pytest.mark.parametrize(
    ("t", "label", "final"), [(1.0, True, 1.0), (1.0, False, 0.8), (0.5, True, 0.6),
                              (0.5, False, 0.4), (0.0, True, 0.2), (0.0, False, 0.0)]
)  # fmt: skip
def test_blend_of_target_and_label(t: float, label: bool, final: float) -> None:
    assert blended(Rules(("a",)), {"a": t}, ["a"] if label else [])["a"] == pytest.approx(final)


def test_blend_stays_in_0_to_1() -> None:
    """At a share of one third 2/3 + 1/3 may round above 1."""
    for share in (1 / 3, 0.1, 0.7, 0.0, 1.0):
        assert 0 <= blended(Rules(("a",), label_share=share), {"a": 1.0}, ["a"])["a"] <= 1


def test_exhaustive_finds_what_greedy_cannot_reach() -> None:
    losses = {"": 3.0, "a": 2.0, "b": 2.9, "c": 2.9, "bc": 1.0}
    best = find(losses, Rules(ABC, search="exhaustive"))
    assert (letters(best.best), best.best_loss, len(best.losses)) == ("bc", 1.0, 8)
    greedy = replay(Rules(ABC), best.losses)
    assert (letters(greedy.best), greedy.best_loss) == ("a", 2.0)


def test_exhaustive_takes_the_smallest_of_equal_sets_and_nothing_at_the_base() -> None:
    rules = Rules(ABC, search="exhaustive")
    assert letters(find({"": 3.0, "ab": 1.0, "b": 1.0, "abc": 1.0}, rules).best) == "b"
    assert find({"": 1.0, "a": 1.0}, rules).best == BASE


def test_forward_passes_of_five_domains_are_those_of_the_spec() -> None:
    """1 + 5 + 4 + 3 + 2 + 1 + the soft one at most: 17."""
    domains = ("a", "b", "c", "d", "e")
    losses = {BASE: 10.0} | {on: 10.0 - len(on) for on in subsets(domains)}
    found = replay(Rules(domains), losses)
    assert len(found.losses) == 1 + 5 + 4 + 3 + 2 + 1
    soft = {on: loss + 5 * ("e" in on and len(on) > 1) for on, loss in losses.items()}
    assert len(replay(Rules(domains, soft=("e",)), soft).losses) == 1 + 5 + 4 + 3 + 2 + 1


losses_of_sets = st.lists(st.floats(0.1, 10.0, allow_nan=False), min_size=8, max_size=8).map(
    lambda values: dict(zip([BASE, *subsets(ABC)], values, strict=True))
)


@given(
    tables=st.lists(losses_of_sets, min_size=1, max_size=5),
    name=st.sampled_from(["greedy", "greedy_first", "exhaustive"]),
)
def test_searches_side_by_side_find_what_each_finds_alone(
    tables: list[dict[DomainSet, float]], name: str
) -> None:
    rules = Rules(ABC, search=name, soft=("b",))  # type: ignore[arg-type]
    asked: list[tuple[int, DomainSet]] = []

    def losses_of(wanted: list[tuple[int, DomainSet]]) -> Sequence[float]:
        asked.extend(wanted)
        return [tables[number][on] for number, on in wanted]

    together = search_all(rules, len(tables), losses_of)
    assert together == [replay(rules, one) for one in tables]
    assert len(asked) == len(set(asked)), "no loss is asked for twice"


@given(losses_of_sets)
def test_what_is_found_is_never_above_the_base_nor_below_the_best(
    losses: dict[DomainSet, float],
) -> None:
    every = replay(Rules(ABC, search="exhaustive"), losses)
    for name in ("greedy", "greedy_first"):
        found = replay(Rules(ABC, search=name), losses)
        assert every.best_loss <= found.best_loss <= losses[BASE]
        assert found.best_loss == losses[found.best]
        assert (found.best == BASE) == (min(losses[frozenset(d)] for d in ABC) >= losses[BASE])
