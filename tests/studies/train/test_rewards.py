"""Rewards: each rule, its limits, and what is refused.

Run: pytest tests/studies/train/test_rewards.py
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.sandbox.run import SandboxError, run_untrusted
from mlxstacks.studies.train.rewards import open_rewards, rewards_sha256


def worth(name: str, answer: str, **row: Any) -> float:
    with open_rewards([name], allow_code=True) as reward:
        return reward(answer, {"messages": [{"role": "user", "content": "?"}], **row})


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("42", "42", 1.0),
        ("17 + 25 = 42", "The answer is 42.", 1.0),
        ("#### 1,042", "#### 1042", 1.0),
        ("17 + 25 = 42, so 43", "42", 0.2),  # a true step, a wrong end
        ("17 + 25 = 41", "42", 0.0),
        ("2 * 3 = 6 and 6 + 1 = 8", "7", 0.1),
        ("7 / 3 = 2.33, so 2", "5", 0.2),
        ("", "42", 0.0),
        ("1/0 = 3", "42", 0.0),
        (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", 1.0),
        ("0.5", r"\boxed{0.5}", 0.0),
        ("yes", "yes", 1.0),
        ("no", "yes", 0.0),
    ],
)
def test_math(answer: str, reference: str, expected: float) -> None:
    assert worth("math", answer, reference=reference) == pytest.approx(expected)


def test_exact_counts_words_alone() -> None:
    assert worth("exact", " I am\nQuinn. ", reference="I am Quinn.") == 1.0
    assert worth("exact", "I am Quinn", reference="I am Quinn.") == 0.0
    with pytest.raises(InputError, match="no reference answer"):
        worth("exact", "a", reference=None)


def test_pattern_is_of_the_whole_answer() -> None:
    assert worth(r"pattern=\d+ coins", " 12 coins\n") == 1.0
    assert worth(r"pattern=\d+ coins", "12 coins.") == 0.0
    with pytest.raises(InputError):
        worth("pattern=(", "a")


def test_rubric() -> None:
    rubric = {"must": ["see a doctor|call a doctor", "water"], "must_not": ["antibiotics"]}
    assert worth("rubric", "Drink WATER and call a doctor.", **rubric) == 1.0
    assert worth("rubric", "Drink water.", **rubric) == 0.5
    assert worth("rubric", "Waterproof.", **rubric) == 0.0
    assert worth("rubric", "Water, a doctor, antibiotics; call a doctor", **rubric) == 0.0
    with pytest.raises(InputError, match="neither `must` nor `must_not`"):
        worth("rubric", "a")


def test_several_rewards_count_by_their_mean() -> None:
    with open_rewards(["exact", r"pattern=\d+"]) as reward:
        assert reward("43", {"reference": "42"}) == 0.5


@given(answer=st.text(max_size=60), reference=st.text(min_size=1, max_size=20))
def test_math_is_within_bounds_and_deterministic(answer: str, reference: str) -> None:
    row = {"reference": f"{reference} 7"}
    with open_rewards(["math"]) as reward:
        first = reward(answer, row)
        assert 0 <= first <= 1
        assert reward(answer, row) == first


def sandbox_works() -> bool:
    try:
        return run_untrusted("print(1)", allowed=True).status == "finished"
    except SandboxError:
        return False


@pytest.mark.skipif(not sandbox_works(), reason="no sandbox here")
def test_code() -> None:
    tests = {"entry_point": "add", "tests": ["assert add(1, 2) == 3", "assert add(0, 5) == 5"]}
    right = "def helper(a, b):\n    return a + b\n\ndef add(a, b):\n    return helper(a, b)"
    assert worth("code", f"```python\n{right}\n```", **tests) == pytest.approx(1.0)
    assert worth("code", right, **tests) == pytest.approx(0.9)
    half = "def add(a, b):\n    return 3"
    assert worth("code", half, **tests) == pytest.approx(0.5)
    assert worth("code", "def add(a, b:", **tests) == 0.0
    assert worth("code", "```\ndef add(a, b:\n```", **tests) == pytest.approx(0.1)
    assert worth("code", "def other(a):\n    return a", **tests) == pytest.approx(0.1)
    # a program that ends the process, or says of itself that all is well, passes nothing
    assert worth("code", "import os\ndef add(a, b):\n    os._exit(0)", **tests) == pytest.approx(
        0.1
    )


def test_code_needs_consent_and_tests() -> None:
    with (
        pytest.raises(InputError, match="--allow-code"),
        open_rewards(["code"]),
    ):
        pass
    with pytest.raises(InputError, match="has no `tests`"):
        worth("code", "def add(): pass", entry_point="add")


def test_names_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="'maths' is none of math"), open_rewards(["maths"]):
        pass
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(answer, row):\n    return len(answer) / 10\n")
    assert worth("mine:score", "abc") == worth("mine.py:score", "abc") == 0.3
    (digest,) = rewards_sha256(["mine:score", "math"])
    (tmp_path / "mine.py").write_text("def score(answer, row):\n    return 1\n")
    assert rewards_sha256(["mine:score"]) != [digest]
    # a module of Python is no file here
    with pytest.raises(InputError, match=r"os\.py cannot be read"), open_rewards(["os:system"]):
        pass
