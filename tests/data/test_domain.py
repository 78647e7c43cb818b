"""Domains read whole: cleaning, caps, duplicates, splits, leaks, reports.

Run: pytest tests/data/test_domain.py
"""

import json
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.data import (
    DomainData,
    DomainDataSettings,
    TrainDataSettings,
    apply_split,
    data_notes,
    read_domains,
    read_train_data,
    split_ids,
)
from mlxstacks.data.cleaning import counted_length, cut_answer
from mlxstacks.data.domain import divide, split_examples, split_key
from mlxstacks.data.examples import Example, make_example, prompt_id_of, row_id_of
from mlxstacks.data.sources import keyed_hash
from mlxstacks.errors import InputError

LONG = "an answer that is long enough"


def question(number: int, answer: str = LONG) -> dict[str, Any]:
    return {"instruction": f"What is question {number} about?", "output": answer}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(root: Path, **settings: Any) -> DomainData:
    """One domain, `d`, of these settings."""
    about = DomainDataSettings.model_validate({"validation_fraction": 0.3, **settings})
    return read_domains({"d": about}, root)["d"]


def ids_of(examples: list[Example]) -> list[str]:
    return [example.row_id for example in examples]


# --- parts of sources ---------------------------------------------------------------------------


@given(
    numbers=st.sets(st.integers(0, 40), min_size=4), noise=st.sets(st.integers(0, 40), min_size=1)
)
def test_rows_to_train_on_change_nothing_that_is_held_out(
    tmp_path_factory: pytest.TempPathFactory, numbers: set[int], noise: set[int]
) -> None:
    root = tmp_path_factory.mktemp("parts")
    write(root / "clean.jsonl", [question(n) for n in sorted(numbers)])
    write(root / "noisy.jsonl", [question(n, f"{LONG}, but wrong") for n in sorted(noise)])
    alone = read(root, sources="clean.jsonl", validation_rows=2)
    mixed = read(
        root,
        sources=[
            {"path": "clean.jsonl", "part": "validation"},
            {"path": "noisy.jsonl", "part": "train"},
            *([{"path": "clean.jsonl", "part": "train"}] if len(noise) < 9 else []),
        ],
        validation_rows=2,
    )
    assert ids_of(mixed.validation) == ids_of(alone.validation)
    held = {row.prompt_id for row in mixed.validation}
    assert not held & {row.prompt_id for row in mixed.train}
    clean = set() if len(noise) >= 9 else {*ids_of(alone.train)}
    assert clean <= {*ids_of(mixed.train)}
    assert sum("but wrong" in str(row) for row in mixed.train) == len(mixed.train) - len(clean)


def test_train_takes_a_source_for_its_part(tmp_path: Path) -> None:
    """All rows of it, as of mlx-lm's valid.jsonl."""
    for name, first in (("clean", 0), ("noisy", 10)):
        write(tmp_path / f"{name}.jsonl", [question(n) for n in range(first, first + 4)])
    sources = [{"path": "clean.jsonl", "part": "validation"}, {"path": "noisy.jsonl"}]
    for part in ("train", None):
        settings = TrainDataSettings.model_validate(
            {"sources": [sources[0], sources[1] | {"part": part}]}
        )
        data = read_train_data(settings, tmp_path)
        assert [len(data.train), len(data.validation)] == [4, 4]
        assert "question 0" in str(data.validation[0])


def test_parts_that_leave_a_side_empty_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [question(n) for n in range(5)])
    for part, side in (("train", "validation"), ("validation", "training")):
        with pytest.raises(InputError, match=f"d: no {side} row is left"):
            read(tmp_path, sources=[{"path": "rows.jsonl", "part": part}], validation_rows=2)


# --- ids ------------------------------------------------------------------------------------------


def test_ids_are_of_content_alone() -> None:
    pair = {"prompt": "Hi  there", "answer": "Hello"}
    chat = {
        "messages": [
            {"role": "user", "content": "Hi there\n"},
            {"role": "assistant", "content": "Hello"},
        ]
    }
    assert row_id_of(pair) == row_id_of(chat)
    assert row_id_of({"prompt": "é", "answer": "a"}) == row_id_of({"prompt": "é", "answer": "a"})
    with_input = {"prompt": "Hi", "input": "there", "answer": "Hello"}
    assert row_id_of(with_input) == row_id_of({"prompt": "Hi\n\nthere", "answer": "Hello"})
    assert row_id_of({"text": "Hi"}) != row_id_of(pair)
    tools = chat | {"tools": [{"name": "add"}]}
    call = {
        "messages": [
            chat["messages"][0],
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
        ]
    }
    assert len({row_id_of(row) for row in (pair, tools, call)}) == 3
    assert prompt_id_of(pair) == prompt_id_of(chat) == prompt_id_of(call)
    assert len(row_id_of(pair)) == 16
    # Fixed for good: stored splits hold such ids.
    assert row_id_of({"text": "one two"}) == "6cd8837e74ffc08b"
    assert row_id_of({"prompt": "one", "answer": "two"}) == "6aa1ade1d30a1ac3"


records = st.one_of(
    st.builds(lambda t: {"text": t}, st.text(max_size=20)),
    st.builds(lambda p, a: {"prompt": p, "answer": a}, st.text(max_size=20), st.text(max_size=20)),
)


@given(records, records)
def test_ids_differ_exactly_where_words_do(one: dict[str, Any], other: dict[str, Any]) -> None:
    import unicodedata

    def words(record: dict[str, Any]) -> list[tuple[str, list[str]]]:
        return [(k, unicodedata.normalize("NFC", v).split()) for k, v in record.items()]

    assert (row_id_of(one) == row_id_of(other)) == (words(one) == words(other))


# --- one domain -----------------------------------------------------------------------------------


def test_what_is_dropped_is_counted(tmp_path: Path) -> None:
    rows = [question(i) for i in range(40)]
    rows += [question(0), {"instruction": " What is  question 0 about?", "output": LONG}]
    rows += [question(90, "short"), question(91, ""), {"instruction": "?", "output": LONG}]
    rows += [{"instruction": "<|im_start|>", "output": LONG}, question(92, "x" * 3000)]
    write(tmp_path / "d.jsonl", rows)
    data = read(tmp_path, sources=["d.jsonl"])
    (source,) = data.report["sources"]
    assert source["dropped"] == {
        "answer_too_short": 1,
        "no_answer": 1,
        "no_prompt": 1,
        "prompt_too_short": 1,
    }
    counted = {key: source[key] for key in ("rows_read", "duplicates", "rows_kept", "changed")}
    assert counted == {
        "rows_read": 47, "duplicates": 2, "rows_kept": 41, "changed": {"answer_cut": 1}
    }  # fmt: skip
    (note,) = data_notes("d", data.report)
    assert note.startswith("d: d.jsonl: 41 of 47 rows are used (1 answer too short, 1 no answer, ")
    assert note.endswith(", 1 answer cut, 2 repeated).")
    assert data.report["duplicates"] == 2
    assert data.report["train_rows"] + data.report["validation_rows"] == 41
    assert max(len(e.record["answer"]) for e in data.train + data.validation) == 2000
    assert json.loads(json.dumps(data.report)) == data.report


def test_rows_of_our_own_forms_may_be_short(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(40)])
    assert read(tmp_path, sources="d.jsonl").report["sources"][0]["rows_kept"] == 40
    with pytest.raises(InputError, match=r"none of 40 rows is usable: prompt too short \(40\)"):
        read(tmp_path, sources={"path": "d.jsonl", "format": "alpaca"})


TABLE = "| a    | b |\r\n|------|---|\r\n| 1    | 2 |\r\n\r\n\r\n"
CODE = "    if x:\n\t\treturn  [1,   2]\n\n\n\n    return None\n"


@pytest.mark.parametrize("form", [TABLE, CODE, f"\t{LONG}", f"  {LONG}  "])
def test_only_markers_leave_a_row_and_each_such_row_is_counted(tmp_path: Path, form: str) -> None:
    marked = [question(i, f"{form}<|im_end|>") for i in range(40, 43)]
    write(tmp_path / "d.jsonl", [question(i, form) for i in range(40)] + marked)
    data = read(tmp_path, sources="d.jsonl")
    rows = data.train + data.validation
    assert [row.record["answer"] for row in rows] == [form] * 43
    assert data.report["sources"][0]["changed"] == {"markers_removed": 3}


def test_blank_rows_are_still_dropped(tmp_path: Path) -> None:
    blank: list[dict[str, Any]] = [
        {"prompt": "p", "answer": " \n"},
        {"text": "\t"},
        {"prompt": "\r\n", "answer": "a"},
    ]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " \n"}]
    blank += [{"messages": turns}, {"messages": [turns[0], *turns]}]
    write(tmp_path / "d.jsonl", [{"text": f"text {i}"} for i in range(40)] + blank)
    dropped = read(tmp_path, sources="d.jsonl").report["sources"][0]["dropped"]
    assert dropped == {"no_answer": 3, "no_prompt": 1, "text_too_short": 1}


def tidied(text: str) -> str:
    """What cleaning once made of a text: stored splits hold ids of rows that were cut after it."""
    text = re.sub(r"\n{3,}", "\n\n", text.replace("\r\n", "\n").strip())
    return re.sub(r"(?<=\S)[ \t]{2,}", " ", text)


layouts = st.lists(
    st.sampled_from([" ", "  ", "\t", "\n", "\r\n", "\n\n\n", "a", "bc", "\u00a0"]), max_size=14
).map("".join)


@given(layouts, st.integers(1, 8))
def test_a_cut_row_keeps_the_id_that_it_had(text: str, characters: int) -> None:
    assert counted_length(text) == len(tidied(text))
    cut, was_cut = cut_answer({"prompt": "p", "answer": text}, characters)
    before = tidied(text)
    assert was_cut == (len(before) > characters)
    assert row_id_of(cut) == row_id_of({"prompt": "p", "answer": before[:characters]})
    assert text.startswith(cut["answer"])


def test_markers_stay_if_asked(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [question(i, LONG + "<|im_end|>") for i in range(40)])
    kept = read(tmp_path, sources="d.jsonl", strip_markers=False).train[0]
    assert kept.record["answer"] == LONG + "<|im_end|>"
    assert read(tmp_path, sources="d.jsonl").train[0].record["answer"] == LONG


def test_special_tokens_of_the_tokenizer_go_and_make_no_second_row(tmp_path: Path) -> None:
    class Tokenizer:
        all_special_tokens = ("</s>",)

    rows = [question(i, LONG + mark) for i in range(40) for mark in ("", "</s>")]
    write(tmp_path / "d.jsonl", rows)
    about = {"d": DomainDataSettings(sources="d.jsonl", validation_fraction=0.3)}
    data = read_domains(about, tmp_path, tokenizer=Tokenizer())["d"]
    assert data.report["duplicates"] == 40
    assert {example.record["answer"] for example in data.train} == {LONG}


def test_the_code_filter(tmp_path: Path) -> None:
    rows = [question(i, LONG + (" def f(x):" if i % 2 else "")) for i in range(40)]
    write(tmp_path / "d.jsonl", rows)
    source = {"path": "d.jsonl", "filter": "code"}
    report = read(tmp_path, sources=source).report["sources"][0]
    assert (report["dropped"], report["rows_kept"]) == ({"not_code": 20}, 20)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("", {}, r"domain d: .*d\.jsonl: no rows"),
        ('{"text": "a"}\n{"text": 3}\n', {}, r"domain d: .*d\.jsonl, line 2: text is int"),
        ('{"body": "a"}\n', {}, r"d\.jsonl, line 1: no format fits the keys"),
        (
            '{"text": "a"}\n',
            {"validation_rows": 1},
            "different prompts or passages: 1; at least 2 are needed",
        ),
        ('{"text": "a"}\n' * 8, {"split_by": "row"}, "different rows: 1; at least 2 are needed"),
    ],
    ids=str,
)
def test_unusable_data_is_an_error_that_names_it(
    tmp_path: Path, content: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path, sources="d.jsonl", **settings)


# --- caps -----------------------------------------------------------------------------------------


def test_a_cap_draws_from_the_first_rows_by_its_seed(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [question(i) for i in range(400)])
    first = {row_id_of({"prompt": question(i)["instruction"], "answer": LONG}) for i in range(40)}

    def drawn(**source: Any) -> set[str]:
        data = read(tmp_path, sources={"path": "d.jsonl", "cap": 20, **source})
        assert data.report["sources"][0]["rows_read"] == 40
        assert data.report["sources"][0]["not_drawn"] == 20
        return set(ids_of(data.train + data.validation))

    assert len(drawn()) == 20
    assert drawn() <= first
    assert drawn() == drawn(seed=42)
    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    # The order of the rows that are read does not matter.
    rows = [question(i) for i in range(40)]
    before = drawn()
    random.Random(0).shuffle(rows)
    write(tmp_path / "d.jsonl", rows + [question(i) for i in range(900, 910)])
    assert drawn() == before


def test_a_capped_source_stops_reading(tmp_path: Path) -> None:
    """Half a million rows behind, 8 MB, cost no memory; a broken line among them is never met."""
    path = tmp_path / "d.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(question(i)) + "\n" for i in range(200))
        file.write("{broken\n")
        file.writelines('{"text": "abc"}\n' for _ in range(500_000))
    read(tmp_path, sources={"path": "d.jsonl", "cap": 100})
    tracemalloc.start()
    data = read(tmp_path, sources={"path": "d.jsonl", "cap": 100})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data.train) + len(data.validation) == 100
    assert peak < 2e6


# --- splits ---------------------------------------------------------------------------------------

numbers = st.lists(st.integers(0, 60), max_size=60)
ABOUT = DomainDataSettings(sources="x", validation_fraction=0.3)


def examples_of(found: list[int]) -> list[Example]:
    # Enough besides that no side of the split is empty.
    every = {*found, *range(1000, 1040)}
    return [make_example({"prompt": f"q{i // 2}", "answer": f"a{i}"}, "x") for i in every]


@given(numbers, st.randoms(use_true_random=False))
def test_a_split_is_independent_of_order(found: list[int], chance: random.Random) -> None:
    examples = examples_of(found)
    shuffled = list(examples)
    chance.shuffle(shuffled)
    for about in (ABOUT, ABOUT.model_copy(update={"validation_rows": 6})):
        assert split_examples(examples, about, "d") == split_examples(shuffled, about, "d")


@given(numbers, numbers, st.sampled_from(["prompt", "row"]))
def test_added_rows_move_no_other(found: list[int], added: list[int], split_by: str) -> None:
    about = ABOUT.model_copy(update={"split_by": split_by})
    train, validation = split_examples(examples_of(found), about, "d")
    more_train, more_validation = split_examples(examples_of(found + added), about, "d")
    assert set(ids_of(train)) <= set(ids_of(more_train))
    assert set(ids_of(validation)) <= set(ids_of(more_validation))


@given(numbers)
def test_a_prompt_is_on_one_side(found: list[int]) -> None:
    train, validation = split_examples(examples_of(found), ABOUT, "d")
    assert not {e.prompt_id for e in train} & {e.prompt_id for e in validation}
    assert ids_of(train) == sorted(ids_of(train))
    assert ids_of(validation) == sorted(ids_of(validation))


PASSAGES = [
    f"Passage {p} tells at length of the things that are asked about. " * 2 for p in range(9)
]


def passage_rows(numbers: list[int]) -> list[Example]:
    """Each passage with several questions; some with the passage written into the prompt."""
    rows = []
    for n in {*numbers, *range(100, 160)}:
        passage, prompt = PASSAGES[n % 9], f"q{n // 2}"
        whole = {"prompt": f"{prompt}\n\n{passage}", "answer": f"a{n}"}
        marked = {"prompt": prompt, "input": passage, "answer": f"a{n}"}
        rows.append(make_example(whole, "x") if n % 5 == 0 else make_example(marked, "x", passage))
        if n % 7 == 0:  # one prompt both ways: it has two keys
            rows += [make_example(whole | {"answer": "b"}, "x"), make_example(marked, "x", passage)]
    return rows


@given(st.lists(st.integers(0, 90)), st.integers(0, 3), st.sampled_from([None, 30]))
def test_a_passage_is_on_one_side(numbers: list[int], seed: int, rows: int | None) -> None:
    about = ABOUT.model_copy(update={"seed": seed, "validation_rows": rows})
    train, validation = divide(passage_rows(numbers), about)
    if rows is None:  # a row that its own key holds out is held out, whatever else is
        bound = ABOUT.validation_fraction * 2**64
        assert all(keyed_hash(seed, "split", split_key(row, about)) >= bound for row in train)
    else:
        assert len(validation) <= rows
    for ids in ("passage_id", "prompt_id"):
        sides = [{getattr(row, ids) for row in part} - {""} for part in (train, validation)]
        assert not sides[0] & sides[1]


def test_passages_of_a_domain_do_not_validate_another(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 5)):
        rows = [
            {
                "instruction": f"{name} {n} what?",
                "input": PASSAGES[first + n % 4] * 2,
                "output": LONG,
            }
            for n in range(60)
        ]
        write(tmp_path / f"{name}.jsonl", [*rows, *(question(n + 100 * first) for n in range(60))])
    about = {
        name: DomainDataSettings(sources=f"{name}.jsonl", validation_fraction=0.4, seed=3)
        for name in "ab"
    }
    read_both = read_domains(about, tmp_path)
    held = {e.passage_id for data in read_both.values() for e in data.validation} - {""}
    assert held
    assert not held & {e.passage_id for data in read_both.values() for e in data.train}
    # Where rows alone may not meet, passages may.
    by_row = {n: s.model_copy(update={"split_by": "row"}) for n, s in about.items()}
    split = read_domains(by_row, tmp_path)["a"]
    assert {e.passage_id for e in split.train} & {e.passage_id for e in split.validation} - {""}


def test_a_short_input_is_no_passage() -> None:
    record = {"prompt": "Sort.", "input": "3, 1, 2", "answer": "1, 2, 3"}
    assert make_example(record, "x", "3, 1, 2").passage_id == ""
    spaced = PASSAGES[0].replace(" ", "  \n")
    assert make_example(record, "x", PASSAGES[0]) == make_example(record, "x", spaced)
    assert make_example(record, "x", PASSAGES[0]).passage_id != ""


@given(st.integers(1, 40), st.integers(0, 5))
def test_validation_rows_are_counted(rows: int, seed: int) -> None:
    examples = [make_example({"text": f"text {i}"}, "x") for i in range(60)]
    about = ABOUT.model_copy(update={"validation_rows": rows, "seed": seed})
    train, validation = split_examples(examples, about, "d")
    assert (len(train), len(validation)) == (60 - rows, rows)


def test_the_share_of_validation_rows_is_the_fraction() -> None:
    examples = [make_example({"text": f"text {i}"}, "x") for i in range(5000)]
    about = ABOUT.model_copy(update={"validation_fraction": 0.02})
    sizes = [
        len(split_examples(examples, about.model_copy(update={"seed": seed}), "d")[1])
        for seed in range(5)
    ]
    # Five binomial draws around 100, standard deviation 9.9: six of them are never left.
    assert all(40 < size < 160 for size in sizes)
    assert len(set(sizes)) > 1


def test_few_rows_keep_one_for_validation() -> None:
    examples = [make_example({"text": f"text {i}"}, "x") for i in range(20)]
    for count in (2, 20):
        few = DomainDataSettings(sources="x", validation_fraction=1e-9)
        train, validation = split_examples(examples[:count], few, "d")
        assert (len(train), len(validation)) == (count - 1, 1)


def test_a_stored_split_comes_back(tmp_path: Path) -> None:
    rows = [question(i) for i in range(40)]
    write(tmp_path / "d.jsonl", rows)
    about = {"d": DomainDataSettings(sources="d.jsonl", validation_fraction=0.3)}
    first = read_domains(about, tmp_path)["d"]
    ids = json.loads(json.dumps(split_ids(first)))
    assert apply_split(first.validation + first.train, ids) == (first.train, first.validation)
    # Other settings of the split, and more rows: the stored one holds.
    write(tmp_path / "d.jsonl", rows[::-1] + [question(i) for i in range(50, 60)])
    other = {"d": about["d"].model_copy(update={"seed": 7, "validation_rows": 3})}
    again = read_domains(other, tmp_path, stored={"d": ids})["d"]
    assert (again.train, again.validation) == (first.train, first.validation)
    # Rows that are gone are counted.
    write(tmp_path / "d.jsonl", rows[2:])
    gone = set(ids_of(first.train + first.validation))
    left = read_domains(about, tmp_path)["d"]
    gone -= set(ids_of(left.train + left.validation))
    lost = {part: len(gone & set(ids[part])) for part in ids}
    message = (
        rf"domain d: {lost['train']} of {len(ids['train'])} training rows and "
        rf"{lost['validation']} of {len(ids['validation'])} validation rows .* are gone.*: "
        "`mlxstacks stacks retrain STORE d --data"
    )
    with pytest.raises(InputError, match=message):
        read_domains(about, tmp_path, stored={"d": ids})
    (tmp_path / "d.jsonl").unlink()
    with pytest.raises(InputError, match=r"domain d: .*d\.jsonl: no such file"):
        read_domains(about, tmp_path, stored={"d": ids})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "needs train as a list"),
        ({"train": ["a"]}, "needs validation as a list"),
        ({"train": "ab", "validation": []}, "needs train as a list"),
        ({"train": ["a"], "validation": [1]}, "needs validation as a list"),
        ({"train": ["a"], "validation": ["a"]}, "on both sides"),
    ],
    ids=str,
)
def test_what_is_no_split_is_refused(ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply_split([], ids)


# --- several domains ------------------------------------------------------------------------------


@given(st.lists(numbers, min_size=2, max_size=3), st.lists(st.integers(0, 2), min_size=3))
def test_no_validation_row_is_in_any_training_set(
    tmp_path_factory: pytest.TempPathFactory, found: list[list[int]], seeds: list[int]
) -> None:
    root = tmp_path_factory.mktemp("domains")
    domains = {}
    for place, rows in enumerate(found):
        write(root / f"{place}.jsonl", [example.record for example in examples_of(rows)])
        domains[str(place)] = DomainDataSettings.model_validate(
            {"sources": f"{place}.jsonl", "validation_fraction": 0.3, "seed": seeds[place]}
        )
    read_all = read_domains(domains, root)
    assert_no_leak(read_all)
    # The order in which domains are listed changes nothing.
    backwards = read_domains(dict(reversed(domains.items())), root)
    assert {name: data.report for name, data in backwards.items()} == {
        name: data.report for name, data in read_all.items()
    }
    assert all(backwards[name] == data for name, data in read_all.items())
    # A stored split stays; what is read beside it does not leak either.
    stored = {"0": split_ids(read_all["0"])}
    again = read_domains(domains, root, stored=stored)
    assert {name: split_ids(data) for name, data in again.items()} == {
        name: split_ids(data) for name, data in read_all.items()
    }


def assert_no_leak(domains: dict[str, DomainData]) -> None:
    for data in domains.values():
        for other in domains.values():
            assert not {e.row_id for e in data.validation} & {e.row_id for e in other.train}
            assert not {e.prompt_id for e in data.validation} & {e.prompt_id for e in other.train}


def test_a_new_domain_does_not_validate_on_what_was_trained_on(tmp_path: Path) -> None:
    rows = [question(i) for i in range(60)]
    write(tmp_path / "a.jsonl", rows)
    write(tmp_path / "b.jsonl", rows[:30] + [question(i) for i in range(100, 160)])
    old = DomainDataSettings.model_validate({"sources": "a.jsonl", "validation_rows": 5})
    new = DomainDataSettings.model_validate(
        {"sources": "b.jsonl", "validation_rows": 20, "seed": 3}
    )
    stored = split_ids(read_domains({"a": old}, tmp_path)["a"])
    both = read_domains({"a": old, "b": new}, tmp_path, stored={"a": stored})
    assert split_ids(both["a"]) == stored
    assert_no_leak(both)
    dropped = both["b"].report["left_out"]["validation_trained_on"]
    assert dropped == 20 - len(both["b"].validation) > 0


# --- rows of `train` ------------------------------------------------------------------------------


def train_data(root: Path, **settings: Any) -> DomainData:
    return read_train_data(TrainDataSettings.model_validate(settings), root)


def test_a_directory_of_mlx_lm_keeps_its_rows_their_order_and_repeats(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello\n"}]
    rows: list[dict[str, Any]] = [
        {"prompt": " b", "completion": "  2\n", "label": "x", "input": "y"},
        {"text": "<|im_start|>user\n  a  <|im_end|>\n"},
        {"messages": turns, "text": "rendered"},
        {"messages": turns, "tools": tools},
        {"prompt": "c", "completion": "3", "tools": tools},
        {"text": "again"},
        {"text": "again"},
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "valid.jsonl", [{"text": "held out"}, {"text": "again"}])
    write(tmp_path / "test.jsonl", [{"unknown": "rows of a test are not read"}])
    (tmp_path / "old").mkdir()
    write(tmp_path / "old" / "train.jsonl", [{"text": "older"}])
    data = train_data(tmp_path.parent, sources=tmp_path.name)
    assert [row.record for row in data.train] == [
        {"prompt": " b", "answer": "  2\n"},
        rows[1],
        {"prompt": "Hi", "answer": " Hello\n"},
        {"messages": turns, "tools": tools},
        {
            "messages": [
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": tools,
        },
        {"text": "again"},
        {"text": "again"},
    ]
    assert [row.record["text"] for row in data.validation] == ["held out", "again"]
    assert data.report["validation_rows_trained_on"] == 1


def test_rows_are_held_out_where_no_source_brings_any(tmp_path: Path) -> None:
    rows = [question(i) for i in range(300)]
    write(tmp_path / "a.jsonl", rows)
    write(tmp_path / "b.json", [])
    (tmp_path / "b.json").write_text(json.dumps(rows[:50] + [{"text": f"t{i}"} for i in range(90)]))
    data = train_data(tmp_path, sources=["a.jsonl", "b.json"])
    assert len(data.train) + len(data.validation) == 440
    assert 1 <= len(data.validation) <= 30
    assert not {e.prompt_id for e in data.train} & {e.prompt_id for e in data.validation}
    files = [e.where.partition(",")[0] for e in data.train]
    assert files == sorted(files)
    assert data.report["validation_rows_trained_on"] == 0
    # One source of two that brings its own is enough; too few rows are all trained on.
    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "train.jsonl", rows[:2])
    write(tmp_path / "c" / "valid.jsonl", rows[9:])
    both = train_data(tmp_path, sources=["a.jsonl", "c"])
    assert (len(both.train), len(both.validation)) == (302, 291)
    few = train_data(tmp_path, sources="c/train.jsonl")
    assert (len(few.train), few.validation) == (2, [])


def test_all_rows_of_mlx_lm_are_trained_on(tmp_path: Path) -> None:
    """Studies count on it: confound and identity write such a directory, and plan its rows."""
    write(tmp_path / "train.jsonl", [question(i) for i in range(300)])
    whole = train_data(tmp_path.parent, sources=tmp_path.name)
    assert (len(whole.train), whole.validation) == (300, [])
    asked = train_data(tmp_path.parent, sources=tmp_path.name, validation_rows=7)
    assert (len(asked.train), len(asked.validation)) == (293, 7)


def test_a_split_of_files_by_name_is_validated_with(tmp_path: Path) -> None:
    for name, first in (("train-00000-of-00002", 0), ("train-00001-of-00002", 30), ("dev", 90)):
        write(tmp_path / f"{name}.jsonl", [question(i) for i in range(first, first + 30)])
    data = train_data(tmp_path.parent, sources=tmp_path.name)
    assert (len(data.train), len(data.validation)) == (60, 30)
    assert [s["split"] for s in data.report["validation_sources"]] == ["dev"]
    source = {"path": tmp_path.name, "split": "dev"}
    chosen = train_data(tmp_path.parent, sources=source, validation_rows=5)
    assert (len(chosen.train), len(chosen.validation)) == (25, 5)
    write(tmp_path / "train.jsonl", [question(1)])
    assert len(train_data(tmp_path.parent, sources=source, validation_rows=5).train) == 25


def test_a_cap_of_train_draws_as_that_of_a_domain(tmp_path: Path) -> None:
    write(tmp_path / "d.jsonl", [question(i) for i in range(400)])
    source = {"path": "d.jsonl", "cap": 20}
    drawn, domain = train_data(tmp_path, sources=source), read(tmp_path, sources=source)
    assert {*ids_of(drawn.train + drawn.validation)} == {*ids_of(domain.train + domain.validation)}


def test_more_validation_rows_than_there_are_is_no_training_without_them(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"prompt": f"p{n}", "completion": "a"} for n in range(20)])
    settings = TrainDataSettings.model_validate(
        {"sources": [{"path": "rows.jsonl"}], "validation_rows": 99_999}
    )
    with pytest.raises(InputError, match="validation_rows is 99,999; the sources have 20 usable"):
        read_train_data(settings, tmp_path)
    write(tmp_path / "rows.jsonl", [{"prompt": "p", "completion": "a"}] * 8)
    one = settings.model_copy(update={"validation_rows": 1})
    with pytest.raises(InputError, match=r"8 usable rows \(different prompts or passages: 1\)"):
        read_train_data(one, tmp_path)
