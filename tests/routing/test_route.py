"""Floor, threshold, hard weights and gaps. Run: pytest tests/routing/test_route.py"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.routing.router import decide, pinned

SCORES = st.dictionaries(
    st.sampled_from(["chat", "code", "math", "medical"]), st.floats(0, 1), min_size=1
)


def test_published_example() -> None:
    route = decide({"chat": 0.59, "code": 0.01, "math": 1.0, "medical": 1.0}, chat_domain="chat")
    assert dict(route.weights) == {"chat": 0.59, "math": 1.0, "medical": 1.0}
    assert route.mode == "routed"
    assert not route.gap


def test_the_threshold_itself_is_not_above_the_threshold() -> None:
    assert decide({"math": 0.12}).weights == {}
    assert decide({"math": 0.1200001}).weights == {"math": 0.1200001}


def test_chat_never_falls_below_its_floor_and_only_chat_has_one() -> None:
    scores = {"math": 0.05, "chat": 0.05}
    assert dict(decide(scores, chat_domain="chat").weights) == {"chat": 0.2}
    assert decide(scores).weights == {}
    assert decide({"math": 0.05}, chat_domain="chat").weights == {}


def test_gap_is_judged_before_the_floor_and_strictly() -> None:
    assert decide({"chat": 0.1, "math": 0.11}, chat_domain="chat").gap
    assert not decide({"chat": 0.1, "math": 0.12}, chat_domain="chat").gap
    assert not decide({}).gap


def test_hard_weights_are_one_for_the_same_domains() -> None:
    scores = {"chat": 0.0, "code": 0.3, "math": 0.1}
    soft, hard = (decide(scores, chat_domain="chat", hard=hard) for hard in (False, True))
    assert list(soft.weights) == list(hard.weights) == ["chat", "code"]
    assert set(hard.weights.values()) == {1.0}


def test_only_routable_domains_get_a_weight_and_all_keep_their_score() -> None:
    route = decide({"code": 0.9, "math": 0.8}, routable=["math"])
    assert dict(route.weights) == {"math": 0.8}
    assert dict(route.scores) == {"code": 0.9, "math": 0.8}


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_what_is_no_score_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        decide({"code": score, "math": 0.5})


@given(SCORES)
def test_weights_are_scores_above_the_threshold_in_their_order(scores: dict[str, float]) -> None:
    route = decide(scores, chat_domain="chat")
    assert all(weight > 0.12 for weight in route.weights.values())
    assert list(route.weights) == [name for name in scores if name in route.weights]
    for name, score in scores.items():
        floored = max(score, 0.2) if name == "chat" else score
        assert route.weights.get(name, 0.0) == (floored if floored > 0.12 else 0.0)
    assert route.gap == (max(scores.values()) < 0.12)


def test_other_modes_ask_no_router() -> None:
    assert dict(pinned(["b", "a"]).weights) == {"b": 1.0, "a": 1.0}
    assert pinned([]).mode == "pinned"
