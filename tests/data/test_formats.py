"""Row formats: what is read of each, and which one the keys choose.

Run: pytest tests/data/test_formats.py
"""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.data.formats import FORMATS, row_reader, without_thoughts
from mlxstacks.data.settings import FormatName
from mlxstacks.errors import InputError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "Another."},
    {"role": "assistant", "content": "Blue."},
]
SHARED = [
    {"from": "System", "value": "Be brief."},
    {"from": "human", "value": "Name a colour."},
    {"from": "gpt", "value": "Red."},
]
FIRST_PAIR = {"prompt": "Name a colour.", "answer": "Red."}
MEDQA = {"question": "Which?", "options": {"A": "one", "B": "two"}}
SHOWN = {"prompt": "Which?", "input": "A. one\nB. two", "answer": "The answer is B. two"}


def ask(**rest: Any) -> dict[str, Any]:
    return {"question": "Which?", **rest}


REJECTED = [TURNS[1], {"role": "assistant", "content": "Loud."}]
PREFERRED = {"messages": TURNS[1:3], "rejected": REJECTED[1]}


# (format, row, record)
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("text", {"text": "Once."}, {"text": "Once."}),
    *(
        ("preference", row, PREFERRED)
        for row in (
            {"prompt": "Name a colour.", "chosen": "Red.", "rejected": "Loud."},
            {"prompt": TURNS[1:2], "chosen": "Red.", "rejected": "Loud."},
            {"prompt": TURNS[1:2], "chosen": TURNS[2:3], "rejected": REJECTED[1:]},
            {"chosen": TURNS[1:3], "rejected": REJECTED},
            {"prompt": "Name a colour.", "chosen": TURNS[1:3], "rejected": REJECTED, "score": 7},
        )
    ),
    ("prompt_completion", {"prompt": "p", "completion": "c"}, {"prompt": "p", "answer": "c"}),
    ("prompt_completion", {"prompt": "p", "answer": 70}, {"prompt": "p", "answer": "70"}),
    ("chat", {"messages": TURNS}, {"messages": TURNS}),
    ("chat", {"messages": TURNS[1:3]}, FIRST_PAIR),
    (
        "alpaca",
        {"instruction": "i", "input": "", "output": "o"},
        {"prompt": "i", "answer": "o"},
    ),
    (
        "alpaca",
        {"question": "q", "context": "c", "response": "r"},
        {"prompt": "q", "input": "c", "answer": "r"},
    ),
    ("gsm8k", {"question": "q", "answer": "#### 1"}, {"prompt": "q", "answer": "#### 1"}),
    ("messages", {"messages": TURNS}, FIRST_PAIR),
    ("nemotron_v2", {"messages": TURNS, "category": "chat"}, FIRST_PAIR),
    *(
        (name, {"conversations": SHARED, "system": "long"}, FIRST_PAIR)
        for name in ("openassistant", "openthoughts", "sky_t1")
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, TURNS[2]]},
        {"prompt": "Hi", "answer": "Red."},
    ),
    ("messages", {"messages": TURNS[2:4]}, {"prompt": "Another.", "answer": ""}),
    (
        "ultrafeedback_sft",
        {"prompt": "Name a colour.", "chosen": TURNS, "rejected": TURNS[:2]},
        FIRST_PAIR,
    ),
    (
        "opencodereasoning",
        {"input": "i", "output": "o", "solution": ""},
        {"prompt": "i", "answer": "o"},
    ),
    (
        "opencodereasoning",
        {"input": "i", "output": "o", "solution": "s"},
        {"prompt": "i", "answer": "s"},
    ),
    ("openmath_cot", {"problem": "p", "generated_solution": "g"}, {"prompt": "p", "answer": "g"}),
    ("openmath_cot", {"problem": "p", "answer": "4"}, {"prompt": "p", "answer": "4"}),
    (
        "openmath_tool",
        {"problem": "p", "solution": "s", "answer": "a"},
        {"prompt": "p", "answer": "s"},
    ),
    ("numina_cot", {"problem": "p", "solution": "s"}, {"prompt": "p", "answer": "s"}),
    ("numina_cot", {"problem": "p", "messages": TURNS}, {"prompt": "p", "answer": "Red."}),
    ("medqa", {**MEDQA, "answer_idx": "B", "answer": "two"}, SHOWN),
    ("medqa", {**MEDQA, "answer": "(b)"}, SHOWN),
    ("medqa", {**MEDQA, "answer": "two"}, SHOWN),
    ("medqa", {"question": "Which?", "options": ["one", "two"], "answer_index": 1}, SHOWN),
    (
        "medqa",
        {
            "question": "Which?",
            "options": [{"key": "A", "value": "one"}, {"key": "B", "value": "two"}],
            "answer_idx": "B",
        },
        SHOWN,
    ),
    ("medqa", {**MEDQA, "answer": "A", "explanation": "Because."}, {**SHOWN, "answer": "Because."}),
    (
        "medqa",
        {**MEDQA, "context": "A tale.", "answer": "B"},
        {**SHOWN, "input": "A tale.\n\nA. one\nB. two"},
    ),
    ("medqa", {**MEDQA, "answer": "C"}, {**SHOWN, "answer": ""}),
    # ARC, MMLU, CommonsenseQA, OpenBookQA, as llm-foundry writes them
    (
        "multiple_choice",
        ask(choices={"text": ["one", "two"], "label": ["A", "B"]}, answerKey="B"),
        SHOWN,
    ),
    ("multiple_choice", ask(choices=["one", "two"], answer=1), SHOWN),
    (
        "multiple_choice",
        ask(choices=[{"label": "A", "text": "one"}, {"label": "B", "text": "two"}], answerKey="B"),
        SHOWN,
    ),
    ("multiple_choice", {"query": "Which?", "choices": ["one", "two"], "gold": 1}, SHOWN),
    ("multiple_choice", {"question_stem": "Which?", "choices": ["one", "two"], "label": 1}, SHOWN),
    ("multiple_choice", ask(choices=["one", "two"], answer="two"), SHOWN),
    ("multiple_choice", ask(choices={"A": "one", "B": "two", "C": None}, answer="b."), SHOWN),
    # keys of the row win over places and texts
    (
        "multiple_choice",
        ask(options={"B": "two", "A": "one"}, answer="A"),
        {**SHOWN, "input": "B. two\nA. one", "answer": "The answer is A. one"},
    ),
    *(
        (
            "multiple_choice",
            ask(options={"1": "one", "2": "two"}, answer=answer),
            {**SHOWN, "input": "1. one\n2. two", "answer": "The answer is 1. one"},
        )
        for answer in (1, "1", "(1)", "one")
    ),
    (
        "multiple_choice",
        ask(choices={"text": ["one", "two"], "label": ["0", "1"]}, answerKey="1"),
        {**SHOWN, "input": "0. one\n1. two", "answer": "The answer is 1. two"},
    ),
    (
        "multiple_choice",
        ask(options={"A": "B", "B": "A"}, answer="A"),
        {**SHOWN, "input": "A. B\nB. A", "answer": "The answer is A. B"},
    ),
    # medqa has such a row: the texts of options are letters too
    (
        "multiple_choice",
        ask(options={"A": "B", "B": "C"}, answer_idx="A", answer="B"),
        {**SHOWN, "input": "A. B\nB. C", "answer": "The answer is A. B"},
    ),
    ("multiple_choice", ask(choices=["one", "two"], answer=-1), {**SHOWN, "answer": ""}),
    ("multiple_choice", ask(choices=["one", "two"], answer=""), {**SHOWN, "answer": ""}),
    (
        "multiple_choice",
        ask(choices=["one", "two"], article="  A tale.\n", answer=1),
        {**SHOWN, "input": "  A tale.\n\n\nA. one\nB. two"},
    ),
    (
        "medical_reasoning",
        {"Question": "q", "Complex_CoT": "long", "Response": "<think>a\n</THINK>r"},
        {"prompt": "q", "answer": "r"},
    ),
    (
        "medical_reasoning",
        {"Question": "q", "Complex_CoT": "cot", "Response": ""},
        {"prompt": "q", "answer": "cot"},
    ),
    (
        "pubmedqa",
        {"question": "q", "context": "c" * 400, "long_answer": "l", "final_decision": "yes"},
        {"prompt": "q", "input": "c" * 300, "answer": "l"},
    ),
    (
        "pubmedqa",
        {"question": "q", "context": {"contexts": ["one", "two"]}, "final_decision": "yes"},
        {"prompt": "q", "input": "one\ntwo", "answer": "yes"},
    ),
    ("fallback", {"messages": TURNS, "text": "x"}, FIRST_PAIR),
    ("fallback", {"text": "x" * 21}, {"text": "x" * 21}),
    ("fallback", {"text": "x" * 20}, {"text": ""}),
]


def test_what_becomes_of_a_text_beside_a_prompt_or_of_a_number_is_said() -> None:
    both = {"prompt": "p", "text": "t"}
    for row, form, change in (
        (both, "text", "prompt_left_out"),
        (both | {"completion": "c"}, "prompt_completion", "text_left_out"),
        ({"prompt": "p", "completion": 4.5}, "prompt_completion", "with_a_number_as_completion"),
    ):
        name, reading = row_reader("auto")(row)
        assert (name, reading.changes) == (form, (change,))


def test_every_name_of_the_settings_has_a_reader() -> None:
    assert {"auto", *FORMATS} == set(get_args(FormatName))


@pytest.mark.parametrize(("name", "row", "record"), CASES, ids=lambda value: str(value)[:40])
def test_a_format_reads_its_rows(name: str, row: dict[str, Any], record: dict[str, Any]) -> None:
    found, reading = row_reader(name)(row)
    assert (found, reading.record) == (name, record)


# A chat beside a problem can say something else: such rows are refused, below.
AUTOMATIC = [
    (name, row, record)
    for name, row, record in CASES
    if FORMATS[name].automatic and not (name == "numina_cot" and "messages" in row)
]


@pytest.mark.parametrize(("name", "row", "record"), AUTOMATIC, ids=lambda value: str(value)[:40])
def test_keys_choose_the_format(name: str, row: dict[str, Any], record: dict[str, Any]) -> None:
    found, reading = row_reader("auto")(row)
    assert reading.record == record
    assert found == name or FORMATS[found].read(row).record == record


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "i", "output": "o", "text": "t"},
        {"problem": "p", "solution": "s", "generated_solution": "g"},
        {"problem": "p", "solution": "s", "question": "q", "answer": "a"},
        {"conversations": TURNS, "text": "t"},
        {"messages": TURNS, "chosen": SHARED},
        {"problem": "p", "messages": TURNS},
    ],
    ids=lambda row: " ".join(row),
)
def test_keys_that_read_two_ways_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"fit the formats .* and .*; say which with the source's format"
    ):
        row_reader("auto")(row)


def test_two_formats_that_read_alike_are_no_ambiguity() -> None:
    row = {"problem": "p", "solution": "s", "messages": [
        {"role": "user", "content": " p"}, {"role": "assistant", "content": "s\n"}]}  # fmt: skip
    assert row_reader("auto")(row)[1].record == {"prompt": " p", "answer": "s\n"}


def test_a_column_without_a_value_says_nothing() -> None:
    row = {"text": None, "instruction": "i", "input": None, "output": "o"}
    found, reading = row_reader("auto")(row)
    assert (found, reading.record) == ("alpaca", {"prompt": "i", "answer": "o"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ask(choices=["one", "two"], answer=2), "answer 2 is no key, no place counted from 0"),
        (ask(choices=["one", "two"], answer="2"), "answer '2' is no key, no place"),
        (ask(options={"1": "a", "2": "b"}, answer=0), "answer 0 is no key, .* options 1, 2; give"),
        (ask(choices=["B", "A"], answer="A"), "answer 'A' can mean the options A and B"),
        (ask(choices=["a", "a"], answer="a "), "answer 'a ' can mean the options A and B"),
        (
            ask(choices=["a", "b"], answer="A", answer_index=1),
            "answer_index 1, answer 'A' can mean",
        ),
        (ask(choices=["a", "b"], answer=True), "answer is bool, must be a key, a text or a place"),
        (ask(choices=["a", "b"], answer=["A"]), "answer is list, must be a key"),
        (ask(choices={"text": ["a", "b"], "label": ["A"]}, answer="A"), "2 texts and the keys"),
        (ask(choices={"text": ["a", "b"], "label": ["A", "a"]}, answer="A"), "each needs its own"),
    ],
    ids=str,
)
def test_answers_that_cannot_be_decided_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        row_reader("auto")(row)


def test_what_a_format_leaves_out_is_named() -> None:
    long = {"question": "q", "context": "c" * 400, "long_answer": "l"}
    assert row_reader("auto")(long)[1].changes == ("context_cut",)
    thought = {"Question": "q", "Response": "<think>hm</think>\r\n\r\n    r"}
    reading = row_reader("auto")(thought)[1]
    assert (reading.record["answer"], reading.changes) == ("    r", ("thoughts_removed",))
    assert row_reader("messages")({"messages": TURNS[1:3]})[1].changes == ()


@pytest.mark.parametrize(
    ("row", "passage"),
    [
        ({"instruction": "i", "input": "p", "output": "o"}, "p"),
        (ask(options=["one", "two"], context="p", answer="A"), "p"),
        ({"question": "q", "context": "p" * 400, "long_answer": "l"}, "p" * 400),
        ({"question": "q", "passage": "p", "answer": "a"}, "p"),
        ({"instruction": "i", "output": "o"}, ""),
    ],
)
def test_what_a_row_asks_about_is_its_passage(row: dict[str, Any], passage: str) -> None:
    assert row_reader("auto")(row)[1].passage == passage


def test_mlx_lm_rows_are_read_as_mlx_lm_reads_them() -> None:
    """Whatever else is in them: it looks for prompt and completion, then messages, then text."""
    pair = {"prompt": "p", "completion": "c"}
    beside = {"text": "t", "messages": TURNS, "input": "i", "options": ["a"], "label": 1}
    assert row_reader("auto")({**pair, **beside})[1].record == {"prompt": "p", "answer": "c"}
    assert row_reader("auto")({"messages": TURNS, "text": "t"})[1].record == {"messages": TURNS}


def test_unknown_keys_are_refused_with_what_is_known() -> None:
    known = r"no format fits the keys \['body'\]; write rows .* Known are\n  text: text"
    with pytest.raises(InputError, match=known):
        row_reader("auto")({"body": "x"})


def test_an_alpaca_template_takes_the_first_pair_of_a_conversation() -> None:
    read = row_reader("auto", first_pair_only=True)
    name, reading = read({"messages": TURNS})
    assert (name, reading.record) == ("messages", FIRST_PAIR)
    assert reading.changes == ("turns_left_out",)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "q"}, r"no answer, but the keys \['question'\]"),
        ("gsm8k", {"question": ["q"], "answer": "a"}, "question is list, must be text"),
        ("gsm8k", {"question": True, "answer": "a"}, "question is bool, must be text"),
        ("messages", {"text": "t"}, "no messages or conversations"),
        ("messages", {"messages": "hello"}, "must be a list"),
        ("messages", {"messages": [3]}, "message 0 has no role"),
        ("ultrafeedback_sft", {"prompt": "p", "chosen": "c"}, "must be a list"),
        ("medqa", {"question": "q", "answer": "A"}, "options is NoneType"),
        ("medqa", {"question": "q", "options": [], "answer": "A"}, "at least one text"),
        ("medqa", {"question": "q", "options": {"A": ["x"]}, "answer": "A"}, "nothing but texts"),
        ("pubmedqa", {"question": "q", "context": 3, "long_answer": "l"}, "context is int"),
        ("numina_cot", {"problem": "p"}, "no solution or messages"),
        ("text", {"text": 3}, "text is int"),
        ("preference", {"chosen": "a", "rejected": "b"}, "no prompt"),
        ("preference", {"prompt": "p", "chosen": "a"}, "no rejected"),
        ("preference", {"prompt": "p", "chosen": TURNS[:2], "rejected": REJECTED}, "must end with"),
        ("preference", {"chosen": TURNS[:3], "rejected": REJECTED}, "answer one prompt"),
        ("preference", {"chosen": TURNS[2:3], "rejected": REJECTED[1:]}, "answer one prompt"),
        ("preference", {"prompt": "p", "chosen": "a", "rejected": REJECTED}, "both be texts"),
        ("fallback", {"body": "t"}, "no text"),
    ],
    ids=str,
)  # fmt: skip
def test_rows_that_do_not_fit_say_why(name: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        row_reader(name)(row)


thoughts = st.lists(st.sampled_from(["<think>", "</think>", "<THINK>", "a", "\n"])).map("".join)


@given(thoughts)
def test_no_think_tag_is_left(text: str) -> None:
    left = without_thoughts(text)
    assert "think" not in left.lower()
    assert without_thoughts(left) == left


def test_halves_of_a_thought_are_thoughts_too() -> None:
    assert without_thoughts("hm </think> yes") == "yes"
    assert without_thoughts("yes <think> or no") == "yes "
    assert without_thoughts("<think>a</think>one<think>b</think>two") == "onetwo"


@given(st.dictionaries(st.sampled_from(sorted({k for _, row, _ in CASES for k in row})), st.one_of(
    st.none(), st.text(max_size=5), st.integers(), st.lists(st.text(max_size=3), max_size=2),
    st.just(TURNS))))  # fmt: skip
def test_any_row_is_read_or_refused(row: dict[str, Any]) -> None:
    for name in get_args(FormatName):
        try:
            record = row_reader(name)(row)[1].record
        except InputError:
            continue
        assert record.keys() <= {"text", "prompt", "input", "answer", "messages", "tools", "row"}
