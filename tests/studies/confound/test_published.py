"""Numbers of the two published studies, recomputed (The Stacking Confound).

Run: pytest tests/studies/confound/test_published.py
"""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.arms.set_g import mine
from mlxstacks.studies.confound.plan import claims_of, data_of, plan_of, protocol_of
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.study.answers import Answer
from mlxstacks.study.items import Item, read_items

# Of 6,000 items, as base and persona answered them; everything published follows from these four.
BOTH_RIGHT, FIXED, BROKEN, BOTH_WRONG = 3497, 135, 56, 2312
SUBJECTS = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health",
    "history", "law", "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip


# Sizes of subjects in Set G are not published. These are some whose 70%, rounded in each, give the
# published 1,620 (2,312 x 0.7 is 1,618.4).
SET_G = (168,) * 4 + (160,) * 6 + (170,) * 4


def published_items() -> tuple[list[Item], list[Answer], list[Answer]]:
    """6,000 items of 14 subjects, and answers of base and persona with the published counts."""
    outcomes = (
        [(True, True)] * BOTH_RIGHT + [(False, True)] * FIXED
        + [(True, False)] * BROKEN + [(False, False)] * BOTH_WRONG
    )  # fmt: skip
    of_set_g = [name for name, size in zip(SUBJECTS, SET_G, strict=True) for _ in range(size)]
    subjects = [SUBJECTS[n % 14] for n in range(6000 - BOTH_WRONG)] + of_set_g
    items = [
        Item(str(n), subject, f"question {n}?", tuple("abcdefghij"), n % 10)
        for n, subject in enumerate(subjects)
    ]

    def answers(place: int) -> list[Answer]:
        return [
            Answer(i.item_id, i.subject, i.answer_index,
                   (i.answer_index + (not right[place])) % 10, "boxed", 10)
            for i, right in zip(items, outcomes, strict=True)
        ]  # fmt: skip

    return items, answers(0), answers(1)


def test_all_published_counts_fit_one_table() -> None:
    items, base, persona = published_items()
    assert sum(one.correct for one in base) == 3553
    assert sum(one.correct for one in persona) == 3632
    assert (round(3553 / 60, 2), round(3632 / 60, 2)) == (59.22, 60.53)
    mined = mine(items, base, persona, train_share=0.7, right_items=None, seed=0)
    assert mined.table["all"] == {
        "both wrong": 2312, "fixed": 135, "broken": 56, "both right": 3497,
    }  # fmt: skip
    assert len(mined.table) == 15
    assert FIXED - BROKEN == 3632 - 3553 == 79
    assert (len(mined.train), len(mined.test)) == (1620, 692)
    assert len(mined.right) == 692
    assert mined.repeated == []


# bits -> values that a second round of quantization changes, by how much (relative, Frobenius),
# error of the first round (relative).
ROUNDS = {
    2: (0.0, 0.0, 0.394), 3: (0.036, 0.038, 0.190), 4: (0.129, 0.034, 0.091),
    6: (0.113, 0.0086, 0.023), 8: (0.126, 0.0056, 0.008),
}  # fmt: skip


@pytest.mark.parametrize("bits", ROUNDS)
def test_what_requantization_does_to_weights(bits: int) -> None:
    values = np.random.default_rng(0).standard_normal((2048, 512)) * 0.02
    weights = mx.array(values.astype(np.float32)).astype(mx.bfloat16)

    def again(weight: mx.array) -> mx.array:
        return mx.dequantize(*mx.quantize(weight, 64, bits), group_size=64, bits=bits)

    def size(weight: mx.array) -> float:
        return float(mx.linalg.norm(weight.astype(mx.float32), stream=mx.cpu))

    first = again(weights)
    second = again(first)
    changed, relative, error = ROUNDS[bits]
    assert mx.mean(first != second).item() == pytest.approx(changed, abs=0.004)
    assert size(second - first) / size(first) == pytest.approx(relative, rel=0.03, abs=1e-9)
    assert size(first - weights) / size(weights) == pytest.approx(error, rel=0.05)
    if bits in (3, 4):  # a fixed point after one more round
        assert mx.array_equal(again(second), second).item()
    if bits == 3:
        # "about a fifth": rounding noise beside the first error; one step is "about 0.014"
        assert size(second - first) / size(first - weights) == pytest.approx(0.2, abs=0.02)
        _, scales, _ = mx.quantize(weights, 64, 3)
        assert mx.mean(mx.abs(scales)).item() == pytest.approx(0.014, abs=0.002)


def test_lower_bits_amplify_from_eight_to_three_and_not_at_two() -> None:
    relative = [row[1] for row in ROUNDS.values()]
    assert relative[1:] == sorted(relative[1:], reverse=True)
    assert relative[0] == 0


MMLU_PRO = Path(__file__).parents[4] / "shared" / "data" / "mmlu_pro.jsonl"


@pytest.mark.skipif(not MMLU_PRO.exists(), reason="no ../shared/data")
def test_the_random_floor_of_mmlu_pro() -> None:
    """Quoted as 10 to 13%."""
    items = read_items(str(MMLU_PRO))
    assert 0.10 < sum(1 / len(item.options) for item in items) / len(items) < 0.13


def test_the_published_plan_has_the_published_n_and_shares_its_error() -> None:
    items, base, persona = published_items()
    mined = mine(items, base, persona, train_share=0.7, right_items=None, seed=0)
    settings = ConfoundSettings()
    protocol = protocol_of(settings, {"base": "0" * 64}, items)
    plan = plan_of(settings, mined, data_of(mined, protocol, {"train_rows": "1" * 64}, "2" * 64))
    assert (plan.n, plan.thresholds) == (692, {"alpha": 0.05, "least_gain": 0.05})
    assert plan.claims == claims_of(settings)
    assert plan.claims[0] == ("a1_refit", "a0_refit")
    assert "alpha 0.0125:" in plan.power_lines()[1]
    of_another_persona = data_of(mined, protocol, {"train_rows": "1" * 64}, "3" * 64)
    assert plan_of(settings, mined, of_another_persona).sha256 != plan.sha256
