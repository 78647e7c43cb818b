"""The table of benchmarks; each form of a row; prompts. All on rows written here.

Run: pytest tests/studies/benchmarks/test_tasks.py
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.stats import wilson_interval
from mlxstacks.studies.benchmarks.tasks import (
    READERS,
    TASKS,
    TWELVE,
    BenchItem,
    RawItem,
    bench_item,
    options_inside,
    task_named,
)
from tests.studies.benchmarks.task_cases import ROWS


def item_of(task: str, row: dict[str, Any], reference: bool = False) -> BenchItem:
    raw = READERS[task](row)
    return bench_item(TASKS[task], raw, raw.item_id or "row", reference)


def test_the_twelve_and_what_the_paper_said_of_them() -> None:
    assert len(TWELVE) == 12
    assert {*TASKS} - {*TWELVE} == {"mmlu_pro", "items"}
    published = [TASKS[name].published for name in TWELVE]
    known = [scores for scores in published if scores is not None]
    assert len(known) == 8
    base = sum(scores.base for scores in known) / 8
    routed = sum(scores.routed for scores in known) / 8
    assert (round(base, 3), round(routed, 3)) == (0.486, 0.480)
    assert round(routed - base, 3) == -0.006
    signs = Counter((one.routed > one.base) - (one.routed < one.base) for one in known)
    assert signs == {1: 3, -1: 4, 0: 1}
    for one in known:  # "95% half-width about 0.07 at n=200"
        interval = wilson_interval(round(one.base * one.n), one.n)
        assert 0.06 < (interval.high - interval.low) / 2 < 0.07
        assert interval.low < one.routed < interval.high


def test_the_table_is_whole() -> None:
    for name, task in TASKS.items():
        assert task.name == name
        assert (task.kind == "generate") == (task.grader is not None) == (task.max_tokens > 0)
        assert name in READERS
        assert task.files
    assert {name for name, task in TASKS.items() if task.metric == "pass@1"} == {"humaneval"}
    assert TASKS["mmlu"].sources[0].label == "cais/mmlu/all/test"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("arc_esay", "arc_easy"), ("gpqa", "gpqa_diamond"), ("truthfulqa", "truthfulqa_mc1")],
)
def test_an_unknown_name_is_told_its_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"the nearest is {nearest}; there are hellaswag"):
        task_named(name)
    assert task_named(nearest).name == nearest
    with pytest.raises(InputError, match="'lm_eval/winogrande'"):
        task_named("lm-eval/winogrande")


LETTERED = "Question: Which organ?\nA. Heart\nB. Lung\nC. Liver\nD. Skin\nAnswer:"
FOUR = (" Heart", " Lung", " Liver", " Skin")
LETTERS = (" A", " B", " C", " D")


@pytest.mark.parametrize(
    ("task", "form", "expected"),
    [
        ("hellaswag", "hub", ("A man sits. he", 2, (" eats.", " sings.", " stands up.", " runs."))),
        ("arc_easy", "hub", ("Question: What is ice?\nAnswer:", 1, (" Fire", " Water", " Air"))),
        ("arc_easy", "local", ("Question: What is ice?\nAnswer:", 1, (" Fire", " Water", " Air"))),
        ("mmlu", "hub", (LETTERED, 2, FOUR, LETTERS)),
        ("medqa", "local", (LETTERED, 2, FOUR, LETTERS)),
        ("medmcqa", "hub", (LETTERED, 2, FOUR, LETTERS)),
        ("medmcqa", "local", (LETTERED, 2, FOUR, LETTERS)),
        ("gsm8k", "hub", ("Two and a thousand?", "1002")),
        ("gsm8k", "negative", ("Less?", "-3.5")),
    ],
)  # fmt: skip
def test_prompts_of_the_table(task: str, form: str, expected: tuple[Any, ...]) -> None:
    item = item_of(task, ROWS[task][form])
    found = (item.prompt, item.gold, item.candidates, item.letters)
    assert found[: len(expected)] == expected
    assert all(not rest for rest in found[len(expected) :])


def test_both_forms_of_arc_are_one_item() -> None:
    hub, local = (READERS["arc_easy"](ROWS["arc_easy"][form]) for form in ("hub", "local"))
    assert (hub.question, hub.options, hub.gold) == (
        local.question.strip(), local.options, local.gold,
    )  # fmt: skip
    assert (hub.item_id, local.item_id) == ("Mercury_1", None)


def test_reference_prompts() -> None:
    """HellaSwag without the blank; the right answer of TruthfulQA first; GSM8K under headings."""
    endings = item_of("hellaswag", ROWS["hellaswag"]["hub"], reference=True).candidates
    assert endings == ("eats.", "sings.", "stands up.", "runs.")
    for form in ("hub", "local"):
        item = item_of("truthfulqa_mc1", ROWS["truthfulqa_mc1"][form], reference=True)
        assert item.gold == 0
        assert item.candidates[0] == " Nothing happens"
    prompt = item_of("gsm8k", ROWS["gsm8k"]["hub"], reference=True).prompt
    assert prompt == "### Instruction:\nTwo and a thousand?\n\n### Response:\n"
    for task in ("arc_easy", "mmlu", "medqa", "math500", "humaneval", "gpqa_diamond"):
        row = next(iter(ROWS[task].values()))
        assert item_of(task, row, True) == item_of(task, row)


def test_prompts_that_ask_for_a_form() -> None:
    math = item_of("math500", ROWS["math500"]["hub"])
    assert "step by step" in math.prompt
    assert "\\boxed{\\frac{1}{2}}" in math.prompt  # the worked example
    assert math.prompt.endswith("Problem: What is $x$ in \\frac{x}{2} = {1}?")
    assert (math.gold, math.stratum, math.item_id) == ("2", "Algebra", "test/algebra/1.json")
    aime = item_of("aime2024", ROWS["aime2024"]["hub"])
    assert "000 to 999" in aime.prompt
    assert "\\boxed{}" in aime.prompt
    assert aime.gold == item_of("aime2024", ROWS["aime2024"]["local"]).gold == "33"
    code = item_of("humaneval", ROWS["humaneval"]["hub"])
    assert "only the indented body" in code.prompt
    assert code.prompt.endswith('"""Twice n."""')
    assert code.extra["prompt"] == ROWS["humaneval"]["hub"]["prompt"]
    assert {*code.extra} == {"prompt", "entry_point", "test"}


@pytest.mark.parametrize("form", ["original", "options", "inside", "inside one line"])
def test_gpqa_in_each_form(form: str) -> None:
    item = item_of("gpqa_diamond", ROWS["gpqa_diamond"][form])
    assert "ANSWER: LETTER" in item.prompt
    assert "A, B, C, D" in item.prompt
    question, options = item.prompt.split("\n\n", 1)[1].split("\n\n")
    assert question == "Which is the largest?"
    listed = dict(line.split(". ") for line in options.split("\n"))
    assert sorted(listed) == [*"ABCD"]
    assert sorted(listed.values()) == ["1 eV", "2 eV", "3 eV", "4 eV"]
    assert listed[str(item.gold)] == "4 eV"
    assert item.letters == LETTERS
    assert item.candidates == ()


def test_gpqa_whose_options_cannot_be_told_apart_stays_whole() -> None:
    row = {"question": "A. of B. is what? (A) x", "answer": "C"}
    raw = READERS["gpqa_diamond"](row)
    assert "could not be separated" in raw.remark
    item = bench_item(TASKS["gpqa_diamond"], raw, "row")
    assert item.prompt.endswith(row["question"])
    assert (item.gold, item.letters) == ("C", LETTERS)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Q?\nA. 1\nB. 2\nC. 3\nD. 4", ("1", "2", "3", "4")),
        ("Q?\n(A) 1\n(B) 2 A. Smith\n(C) 3\n(D) 4\nmore", ("1", "2 A. Smith", "3", "4\nmore")),
        ("Q?\n A) 1\n B) 2\n C) 3\n D) 4", ("1", "2", "3", "4")),
        ("Q? A. 1 B. 2 C. 3 D. 4", ("1", "2", "3", "4")),
        ("Q?\nA. 1\nB. 2\nC. 3", None),
        ("Q?\nA. 1\nB. 2\nC. 3\nD. 4\nA. 5", None),
        ("A. 1\nB. 2\nC. 3\nD. 4", None),
        ("Q?\nA. 1\nB. \nC. 3\nD. 4", None),
    ],
)
def test_options_inside_a_question(text: str, options: tuple[str, ...] | None) -> None:
    assert options_inside(text) == (None if options is None else ("Q?", options))


def truthful(index: int, wrong: int = 3) -> RawItem:
    return RawItem(f"q{index}", 0, ("right", *(f"wrong {place}" for place in range(wrong))))


@given(st.integers(0, 10**9), st.integers(1, 9))
def test_shuffling_keeps_the_options_and_the_right_one(index: int, wrong: int) -> None:
    raw = truthful(index, wrong)
    item = bench_item(TASKS["truthfulqa_mc1"], raw, str(index))
    assert sorted(item.candidates) == sorted(f" {option}" for option in raw.options)
    assert isinstance(item.gold, int)
    assert item.candidates[item.gold] == " right"


@pytest.mark.parametrize(
    ("task", "gold"),
    [("gpqa_diamond", [*"CDBCADDA"]), ("truthfulqa_mc1", [2, 3, 1, 2, 0, 3, 3, 0])],
)
def test_shuffling_is_the_same_for_ever(task: str, gold: list[int | str]) -> None:
    """In every process: Python hashes a text otherwise in each."""
    raw = RawItem("Which?", 0, ("one", "two", "three", "four"))
    assert [bench_item(TASKS[task], raw, str(n)).gold for n in range(8)] == gold


def test_the_right_answer_is_in_each_place_as_often() -> None:
    """2,000 items of four: each place 500 times, 4.5 standard deviations of 19.4 allowed."""
    items = [bench_item(TASKS["truthfulqa_mc1"], truthful(i), str(i)) for i in range(2000)]
    places = Counter(item.gold for item in items)
    assert all(abs(places[place] - 500) < 88 for place in range(4))


@pytest.mark.parametrize(
    ("task", "form", "changes", "message"),
    [
        ("hellaswag", "hub", {"label": ""}, "label is ''"),
        ("hellaswag", "hub", {"label": "4"}, "label is '4', need one of its 4 options"),
        ("hellaswag", "hub", {"label": -1}, "label is -1"),
        ("hellaswag", "hub", {"endings": ["one", " "]}, "need 2 to 26 texts"),
        ("hellaswag", "hub", {"endings": ["one"]}, "need 2 to 26 texts"),
        ("hellaswag", "hub", {"ctx": " "}, "ctx is ' ', need a text"),
        ("arc_easy", "hub", {"answerKey": "D"}, "answerKey is 'D', need one of the labels"),
        ("arc_easy", "hub", {"choices": None}, "choices.text is None"),
        ("arc_easy", "hub", {"choices": {"text": ["a", "b"], "label": 1}}, "of the labels []"),
        ("arc_easy", "hub", {"id": None}, "id is None"),
        ("arc_easy", "hub", {"choices": {"text": ["a", "b"], "label": ["2", "2"]}},
         "answerKey is '2', need one of the labels ['2', '2']"),
        ("arc_easy", "local", {"gold": True}, "gold is True"),
        ("arc_easy", "local", {"gold": None}, "gold is None"),
        ("truthfulqa_mc1", "hub", {"mc1_targets": {"choices": ["a", "b"], "labels": [0, 0]}},
         "need one 1 for the right one"),
        ("truthfulqa_mc1", "local", {"Incorrect Answers": " ; "}, "need 2 to 26 texts"),
        ("truthfulqa_mc1", "local", {"Best Answer": ""}, "Best Answer is ''"),
        ("mmlu", "hub", {"answer": "E"}, "answer is 'E', need one of its 4 options"),
        ("mmlu", "hub", {"answer": None}, "answer is None"),
        ("mmlu", "hub", {"question": None}, "question is None"),
        ("medqa", "local", {"answer_idx": "E"}, "answer_idx is 'E'"),
        ("medqa", "local", {"answer": "Lung"}, "answer_idx C is 'Liver', answer 'Lung'"),
        ("medqa", "local", {"options": {"A": "a", "C": "c"}}, "need texts by A, B"),
        ("medmcqa", "hub", {"cop": -1}, "cop is -1"),
        ("medmcqa", "hub", {"opb": None}, "opa to opd is"),
        ("humaneval", "hub", {"entry_point": "triple"}, "'triple' is no function of the prompt"),
        ("humaneval", "hub", {"test": ""}, "test is ''"),
        ("gsm8k", "hub", {"answer": "It is 5"}, "no number after ####"),
        ("math500", "hub", {"answer": " "}, "answer is ' '"),
        ("aime2024", "hub", {"Answer": 1000}, "answer is 1000, need a whole number"),
        ("aime2024", "local", {"answer": "x"}, "answer is 'x'"),
        ("gpqa_diamond", "original", {"Correct Answer": None}, "answers is"),
        ("gpqa_diamond", "inside", {"answer": "E"}, "answer is 'E', need one of its 4 options"),
        ("gpqa_diamond", "options", {"answer": None}, "answer is None"),
    ],
)  # fmt: skip
def test_what_is_no_item_is_said(
    task: str, form: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        READERS[task]({**ROWS[task][form], **changes})
    assert message in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(["", "A", "C", "a", "####1"]),
    lambda children: st.lists(children, max_size=4)
    | st.dictionaries(st.sampled_from(["A", "B", "text", "label", "choices", "labels"]), children),
    max_leaves=6,
)  # fmt: skip


@given(st.data())
def test_any_row_is_an_item_or_a_plain_error(data: st.DataObject) -> None:
    task = data.draw(st.sampled_from(sorted(READERS)))
    row = dict(data.draw(st.sampled_from(list(ROWS[task].values()))))
    for key in data.draw(st.lists(st.sampled_from(sorted(row)), max_size=3)):
        row[key] = data.draw(JSON)
    try:
        raw = READERS[task](row)
    except ValueError:
        return
    item = bench_item(TASKS[task], raw, "row")
    assert item.prompt.strip()
    if TASKS[task].kind == "likelihood":
        assert isinstance(item.gold, int)
        assert 0 <= item.gold < len(item.candidates)
        assert all(text[0] == " " and text.strip() for text in item.candidates)
    else:
        assert isinstance(item.gold, str)
        assert item.gold.strip()
