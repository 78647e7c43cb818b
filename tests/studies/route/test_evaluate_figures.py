"""Intervals, differences and words of `mlxstacks route evaluate`, without a model.

Run: pytest tests/studies/route/test_evaluate_figures.py
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.interval_coverage import coverage
from mlxstacks.routing.outcomes import RouterExample
from mlxstacks.routing.router import Route
from mlxstacks.studies.route.data import MIXED, OTHER, EvaluatedRow
from mlxstacks.studies.route.evaluate import MODES, weights_of
from mlxstacks.studies.route.evaluate_figures import (
    ALL,
    DomainLosses,
    Matrix,
    compared_words,
    gap_summary,
    loss_matrix,
    over_routers,
    router_metrics,
    sign,
)


def losses(seed: int, n: int, gain: float) -> DomainLosses:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 9, n).astype(float)
    base = tokens * rng.normal(2, 0.5, n)
    return DomainLosses(tokens, {"base": base, "routed": base - gain * tokens})


def differences(groups: dict[str, DomainLosses], mode: str, against: str, seed: int = 0) -> Matrix:
    return loss_matrix(groups, [mode, against], ["a"], 100, seed, against)


def test_a_loss_is_the_mean_over_tokens_not_over_rows() -> None:
    one = DomainLosses(np.array([1.0, 3.0]), {"base": np.array([4.0, 3.0])})
    found = loss_matrix({"a": one}, ["base"], ["a"], 200, 0)["base"]
    assert found["a"]["value"] == 7 / 4
    # deviations are 9/4 and -9/4; of two rows the interval is Student's
    half = 12.7062 * 2**0.5 * (2 * (9 / 4) ** 2) ** 0.5 / 4
    bounds = (found["a"]["low"], found["a"]["high"])
    assert bounds == pytest.approx((7 / 4 - half, 7 / 4 + half), rel=1e-5)


def test_the_mean_over_domains_counts_each_alike_and_leaves_the_others_out() -> None:
    groups = {"a": losses(0, 50, 0.1), "b": losses(1, 5, 0.1), "mixed prompts": losses(2, 9, 0.1)}
    found = loss_matrix(groups, ["base"], ["a", "b"], 200, 0)["base"]
    values = [found[name]["value"] or 0.0 for name in ("a", "b")]
    assert found[ALL]["value"] == pytest.approx(sum(values) / 2)


@given(st.integers(0, 1000), st.integers(2, 30), st.floats(-1, 1))
def test_differences_are_of_pairs(seed: int, n: int, gain: float) -> None:
    """Laws: an equal gain in every row has an interval of no width, however the rows differ; a mode
    does not differ from itself; a difference turned round changes its sign.
    """
    groups = {"a": losses(seed, n, gain)}
    found = differences(groups, "routed", "base", seed)
    assert list(found) == ["routed"]
    one = found["routed"]["a"]
    assert [*one.values()] == pytest.approx([-gain, -gain, -gain], abs=1e-9)
    back = differences(groups, "base", "routed", seed)["base"]["a"]
    assert back["value"] == pytest.approx(-(one["value"] or 0.0))
    base = groups["a"].sums["base"]
    same = {"a": DomainLosses(groups["a"].tokens, {"x": base, "y": base})}
    zero = differences(same, "x", "y", seed)["x"]["a"]
    assert (*zero.values(), sign(zero)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("shape", "n", "least"),
    [("normal", 3, 0.93), ("exponential", 5, 0.91), ("exponential", 24, 0.91)],
)
def test_intervals_cover_what_they_should(shape: str, n: int, least: float) -> None:
    """Of 300 samples some 95% of the intervals hold the true mean, few rows or many, skewed or not;
    seeds are fixed. Percentiles of drawn means hold it in 86% of five exponential losses.
    """
    assert least <= coverage("studentized", shape, n, 300) <= 0.99


def test_one_row_has_no_interval_and_tells_nothing_apart() -> None:
    found = differences({"a": losses(0, 1, 5.0)}, "routed", "base")["routed"]["a"]
    assert (found["low"], sign(found)) == (None, 0)


def test_words_say_what_the_intervals_allow() -> None:
    rows = {"a": (-0.2, -0.3, -0.1), "b": (0.2, 0.1, 0.3), "c": (-0.2, -0.5, 0.1),
            ALL: (-0.1, -0.2, -0.1)}  # fmt: skip
    keys = ("value", "low", "high")
    estimates = {name: dict(zip(keys, row, strict=True)) for name, row in rows.items()}
    text = compared_words(estimates, "better on", "worse on", "unclear on")
    assert text == "better on a (-0.200); worse on b (+0.200); unclear on c (-0.200)"


# --- modes ----------------------------------------------------------------------------------------


def test_modes_are_weights_of_domains() -> None:
    route = Route("routed", weights={"a": 0.5, "c": 0.2})

    def weights(mode: str, *label: str) -> dict[str, float]:
        return weights_of(mode, label, ("a", "b", "c"), route)

    assert {mode: weights(mode, "b", "c") for mode in MODES} == {
        "base": {},
        "ungated": {"a": 1, "b": 1, "c": 1},
        "routed": {"a": 0.5, "c": 0.2},
        "routed_hard": {"a": 1, "c": 1},
        "oracle_domain": {"b": 1, "c": 1},
        "random_stack": {"random:b": 1, "random:c": 1},
        "prefix": {"a": 1},
    }
    assert weights("oracle_domain") == {}


# --- the router's metrics and gaps ----------------------------------------------------------------


def row(label: tuple[str, ...], group: str = "") -> EvaluatedRow:
    kind = {0: "other", 1: "single"}.get(len(label), "mixed")
    example = RouterExample("p", "a", label, kind, f"{label}")  # type: ignore[arg-type]
    return EvaluatedRow(example, group or (label[0] if len(label) == 1 else MIXED), None)


def test_metrics_are_of_labels_and_leave_unseen_rows_out() -> None:
    rows = [row(("a",)), row(("b",)), row(("a", "b")), row((), OTHER), row((), "unseen x")]
    scores = [{"a": 0.9, "b": 0.1}, {"a": 0.6, "b": 0.5}, {"a": 0.7, "b": 0.8},
              {"a": 0.1, "b": 0.1}, {"a": 1.0, "b": 1.0}]  # fmt: skip
    found = router_metrics(rows, scores, ("a", "b"), 0.12)
    assert (found["single_top1"]["count"], found["single_top1"]["n"]) == (1, 2)
    assert (found["mixed_set"]["count"], found["mixed_set"]["n"]) == (1, 1)
    right = [0.9, 0.9, 0.4, 0.5, 0.7, 0.8, 0.9, 0.9]
    assert found["bce"] == pytest.approx(-np.mean(np.log(right)))
    assert found["calibration"]["count"] == 8
    assert found["domains"]["a"]["precision"]["count"] == 2
    assert found["domains"]["a"]["chosen"] == 3


def test_a_label_that_the_router_does_not_know_is_not_held_against_it() -> None:
    found = router_metrics([row(("new",)), row(("a",))], [{"a": 0.2}, {"a": 0.9}], ("a",), 0.12)
    assert (found["single_top1"]["count"], found["single_top1"]["n"]) == (1, 1)


def test_gaps_are_detected_on_unseen_rows_and_false_on_known_ones() -> None:
    flags = {"a": [True, False], MIXED: [False, False], OTHER: [True], "unseen x": [True, True]}
    found = gap_summary(flags)
    assert (found["detection"]["count"], found["detection"]["n"]) == (2, 2)
    assert (found["false_alarms"]["count"], found["false_alarms"]["n"]) == (1, 4)
    assert (found["others"]["count"], found["others"]["n"]) == (1, 1)
    assert found["by_group"]["a"]["rate"] == 0.5
    assert gap_summary({"a": [False]})["detection"] is None


def test_several_routers_have_a_mean_with_an_interval() -> None:
    def router(value: float) -> dict[str, object]:
        rate = {"rate": value, "count": 1, "n": 1, "low": 0.0, "high": 1.0}
        metrics = {"bce": value, "calibration_error": value, "single_top1": rate, "mixed_set": None}
        to = {mode: {ALL: {"value": -value}} for mode in ("routed", "routed_hard")}
        return {"metrics": metrics, "differences": {"base": to, "ungated": to}}

    assert over_routers([router(0.5)]) is None
    found = over_routers([router(v) for v in (0.4, 0.5, 0.6)])
    assert found is not None
    assert found["single_top1"]["mean"] == pytest.approx(0.5)
    assert found["routed_to_base"]["mean"] == pytest.approx(-0.5)
    assert found["bce"]["low"] < 0.5 < found["bce"]["high"]
    assert "mixed_set" not in found
