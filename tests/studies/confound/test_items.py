"""Items, samples, splits, rows to train on. Run: pytest tests/studies/confound/test_items.py"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.arms.arm import answer_text, question_text, training_rows
from mlxstacks.arms.set_g import OUTCOMES, mine, split
from mlxstacks.errors import InputError
from mlxstacks.grading.extract import choice_letter
from mlxstacks.nano.exports import nano_paths
from mlxstacks.study.answers import Answer
from mlxstacks.study.items import (
    Item,
    items_sha256,
    read_items,
    stratified_sample,
)
from tests.studies.confound_cases import SUBJECTS, item_row
from tests.studies.train_cases import write_rows

MMLU_PRO = Path(__file__).parents[4] / "shared" / "data" / "mmlu_pro.jsonl"


def items_of(counts: dict[str, int]) -> list[Item]:
    return [
        Item(f"{subject}-{index}", subject, f"{subject} {index}?", ("x", "y", "z"), index % 3)
        for subject, count in counts.items()
        for index in range(count)
    ]


def test_items_are_read_whole(tmp_path: Path) -> None:
    unnamed = {key: value for key, value in item_row(5).items() if key != "question_id"}
    path = write_rows(tmp_path / "items.jsonl", [item_row(0), item_row(1), unnamed])
    first, second, third = read_items(str(path))
    assert (first.item_id, first.subject, first.letters) == ("0", "alpha", "ABC")
    assert second.options[second.answer_index] == item_row(1)["options"][1]
    assert third.item_id == "3"
    assert [item.item_id for item in read_items(str(path), ["beta"])] == ["1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (item_row(1, answer="D"), "answer is 'D', need a letter of its options"),
        (item_row(1, answer=None), "answer is None"),
        (item_row(1, answer=""), "answer is ''"),
        (item_row(1, answer_index=2), "answer B is option 1, answer_index 2"),
        (item_row(1, options=["one"]), "need 2 to 26 texts"),
        (item_row(1, options=["one", 2]), "need 2 to 26 texts"),
        (item_row(1, question=" "), "no question"),
        (item_row(1, category=None), "no category"),
        (item_row(1, category="all"), "'all' is what tables call the sum of all"),
        (item_row(1, question_id=None), "no question_id"),
        (item_row(0), "ids that occur twice: 0"),
    ],
)
def test_what_is_no_item_is_told_with_its_line(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    path = write_rows(tmp_path / "items.jsonl", [item_row(0), row])
    with pytest.raises(InputError) as caught:
        read_items(str(path))
    assert message in str(caught.value)
    assert "line 2" in str(caught.value) or "twice" in message


def test_every_problem_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    rows = [item_row(index, answer="Z") for index in range(12)]
    with pytest.raises(InputError, match="and 4 more"):
        read_items(str(write_rows(tmp_path / "items.jsonl", rows)))


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_items(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="not in the cache"):
        read_items("nobody/no-such-set")
    path = write_rows(tmp_path / "items.jsonl", [item_row(0)])
    with pytest.raises(InputError, match="no item of physics; there are alpha"):
        read_items(str(path), ["physics"])


@pytest.mark.skipif(not MMLU_PRO.exists(), reason="no ../shared/data")
def test_mmlu_pro_is_read_and_sampled_over_its_subjects() -> None:
    items = read_items(str(MMLU_PRO))
    counts = Counter(item.subject for item in items)
    assert (len(items), len(counts)) == (7261, 14)
    assert len(stratified_sample(items, 6000, seed=0)) == 6000


def test_nano_has_items_that_it_was_taught_and_some_that_it_was_not() -> None:
    items = read_items(str(nano_paths().items_path))
    subjects = Counter(item.subject for item in items)
    assert {"math", "medical", "islands", "queries"} <= subjects.keys()
    assert min(subjects.values()) >= 20  # a split leaves something of each
    assert len({item.question for item in items}) == len(items)


counts_of_subjects = st.dictionaries(
    st.sampled_from("abcdefgh"), st.integers(1, 40), min_size=1, max_size=6
)


@given(counts_of_subjects, st.integers(1, 60), st.integers(0, 5))
def test_a_sample_keeps_every_subjects_share(counts: dict[str, int], size: int, seed: int) -> None:
    items = items_of(counts)
    sample = stratified_sample(items, size, seed)
    assert len(sample) == min(size, len(items))
    assert sample == [item for item in items if item in sample]
    for subject, count in counts.items():
        found = sum(item.subject == subject for item in sample)
        assert abs(found - len(sample) * count / len(items)) < 1
    assert sample == stratified_sample(items, size, seed)


@given(counts_of_subjects, st.integers(0, 5))
def test_a_split_is_disjoint_whole_and_even_in_each_subject(
    counts: dict[str, int], seed: int
) -> None:
    items = items_of(counts)
    train, test = split(items, 0.7, seed)
    assert {i.item_id for i in train}.isdisjoint(i.item_id for i in test)
    assert sorted(i.item_id for i in train + test) == sorted(i.item_id for i in items)
    for subject, count in counts.items():
        assert abs(sum(i.subject == subject for i in train) - 0.7 * count) <= 0.5
    assert (train, test) == split(items, 0.7, seed)


def test_halves_are_rounded_up_though_floats_fall_short() -> None:
    for size in (5, 35, 45, 165, 1005):
        train, _ = split(items_of({"alpha": size}), 0.7, seed=0)
        assert 10 * len(train) == 7 * size + 5


def test_questions_that_are_asked_twice_are_not_split() -> None:
    """Else the test would be taught word for word; MMLU-Pro repeats some hundred."""
    items = items_of({"alpha": 40, "beta": 30})
    twins = [replace(item, item_id=f"{item.item_id}-again", question=f" {item.question.upper()}")
             for item in items[::2]]  # fmt: skip
    for seed in range(5):
        train, test = split(items + twins, 0.7, seed)
        sides = {item.item_id: side for side, part in enumerate((train, test)) for item in part}
        assert len(sides) == len(items) + len(twins)
        assert all(sides[twin.item_id] == sides[twin.item_id[:-6]] for twin in twins)
        assert abs(len(train) - 0.7 * len(sides)) <= 2


def test_a_question_of_another_subject_that_is_trained_on_is_told() -> None:
    items = items_of({"alpha": 10, "beta": 10})
    items = [replace(item, question=f"the same {n % 10}?") for n, item in enumerate(items)]
    nothing = answers(items, set())
    mined = mine(items, nothing, nothing, train_share=0.5, right_items=None, seed=0)
    [note] = mined.notes
    assert note.startswith(f"{len(mined.repeated)} of 10 test items ask a question")
    taught = {item.question for item in mined.train}
    assert len(mined.repeated) == sum(item.question in taught for item in mined.test) > 0


def answers(items: list[Item], right: set[int]) -> list[Answer]:
    return [
        Answer(
            i.item_id, i.subject, i.answer_index, i.answer_index if n in right else None, "none", 3
        )
        for n, i in enumerate(items)
    ]  # fmt: skip


def test_set_g_is_what_both_get_wrong() -> None:
    items = items_of(dict.fromkeys(SUBJECTS, 10))
    base, persona = answers(items, {0, 1, 2, 3, 10, 20}), answers(items, {2, 3, 4, 10, 21})
    mined = mine(items, base, persona, train_share=0.7, right_items=2, seed=0)
    assert dict(zip(OUTCOMES, mined.table["all"].values(), strict=True)) == {
        "both wrong": 22, "fixed": 2, "broken": 3, "both right": 3,
    }  # fmt: skip
    chosen = {item.item_id for item in mined.train + mined.test}
    assert chosen == {items[n].item_id for n in range(30) if n not in {0, 1, 2, 3, 4, 10, 20, 21}}
    assert len(mined.right) == 2
    assert {item.item_id for item in mined.right} <= {items[n].item_id for n in (2, 3, 10)}
    assert list(mined.table) == [*sorted(SUBJECTS), "all"]


def test_models_that_get_everything_right_leave_nothing_to_test() -> None:
    items = items_of({"alpha": 4})
    every = answers(items, {0, 1, 2, 3})
    with pytest.raises(InputError, match=r"nothing to test on: 0 items .*both right 4"):
        mine(items, every, every, train_share=0.7, right_items=None, seed=0)


def test_answers_to_other_items_are_not_mined() -> None:
    items = items_of({"alpha": 4})
    with pytest.raises(ValueError, match="to item alpha-0"):
        mine(items, answers(items[::-1], set()), answers(items, set()), train_share=0.5,
             right_items=None, seed=0)  # fmt: skip


def test_what_is_taught_is_what_extraction_finds() -> None:
    for index, item in enumerate(items_of({"alpha": 3})):
        taught = answer_text(item, index, "generate")
        found = choice_letter(taught, item.letters)
        assert (found.value, found.rule) == ("ABC"[index], "boxed")
        assert question_text(item, "generate").startswith("alpha")
        assert "\nB. y\n" in question_text(item, "generate")


def test_random_answers_are_drawn_not_right() -> None:
    items = items_of({"alpha": 300})
    right = training_rows(items, "likelihood", "right", 0)
    drawn = training_rows(items, "likelihood", "random", 0)
    assert [r["messages"][0] for r in right] == [r["messages"][0] for r in drawn]
    same = sum(a == b for a, b in zip(right, drawn, strict=True))
    assert 60 < same < 140  # a third of 300
    assert drawn == training_rows(items, "likelihood", "random", 0)
    assert json.dumps(drawn) != json.dumps(training_rows(items, "likelihood", "random", 1))


@given(counts_of_subjects, st.integers(0, 5), st.sampled_from(["right", "random"]))
def test_shuffled_answers_are_as_often_each_letter(
    counts: dict[str, int], seed: int, answers: Any
) -> None:
    """Everything is taught as often as before, in each number of options, to other questions."""
    items = items_of(counts)
    items = [replace(i, options=i.options[: 2 + (n % 2)], answer_index=i.answer_index % 2)
             for n, i in enumerate(items)]  # fmt: skip
    plain = training_rows(items, "generate", answers, seed)
    dealt = training_rows(items, "generate", answers, seed, shuffle=True)
    assert [row["messages"][0] for row in plain] == [row["messages"][0] for row in dealt]
    for options in (2, 3):
        letters = [
            Counter(
                row["messages"][1]["content"][:9]
                for row, item in zip(rows, items, strict=True)
                if len(item.options) == options
            )
            for rows in (plain, dealt)
        ]
        assert letters[0] == letters[1]


def test_a_justification_is_taught_with_the_right_letter_alone(tmp_path: Path) -> None:
    rows = [item_row(index, justification=f"Because\n of {index}.") for index in range(30)]
    items = read_items(str(write_rows(tmp_path / "items.jsonl", rows)))
    plain = [replace(item, justification="") for item in items]
    assert items_sha256(plain) != items_sha256(items)
    assert len(plain[0].as_json()) == 5  # the hash that items without one have always had

    def lines(answers: Any, shuffle: bool = False, of: list[Item] = items) -> list[str]:
        rows = training_rows(of, "generate", answers, 0, shuffle=shuffle)
        return [row["messages"][1]["content"] for row in rows]

    right = lines("right")
    assert right[4] == f"\\boxed{{{items[4].letters[items[4].answer_index]}}}\nBecause of 4."
    dealt = lines("right", shuffle=True)
    assert sorted(dealt) == sorted(right)
    assert dealt != right
    for item, text in zip(items, lines("random"), strict=True):
        is_right = text[7] == item.letters[item.answer_index]
        assert ("Because of" in text) == is_right
    assert lines("right", of=plain)[4].endswith(f"The answer is: {items[4].options[1]}")
    with pytest.raises(InputError, match="justification is 7, need a text"):
        read_items(str(write_rows(tmp_path / "bad.jsonl", [item_row(0, justification=7)])))


def test_a_shuffle_leaves_what_chance_leaves() -> None:
    items = items_of({"alpha": 300})
    right = training_rows(items, "likelihood", "right", 0)
    dealt = training_rows(items, "likelihood", "right", 0, shuffle=True)
    assert 60 < sum(a == b for a, b in zip(right, dealt, strict=True)) < 140  # a third of 300
