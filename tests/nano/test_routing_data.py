"""nano's routing data: labels by file, disjoint from what is trained and tested, right answers.

Run: pytest tests/nano/test_routing_data.py
"""

import itertools
import json
import random
from pathlib import Path

import pytest

from mlxstacks.nano.exports import ASSETS, NanoPaths
from mlxstacks.nano.settings import HELD_OUT
from tools.nano.corpus import split_of
from tools.nano.curriculum import curriculum_documents, curriculum_items, is_item
from tools.nano.curriculum_domains import GENERATORS
from tools.nano.curriculum_settings import DOMAINS
from tools.nano.domains import DOMAINS as OWN_DOMAINS
from tools.nano.routing_data import (
    MIXED_ROWS,
    OPENINGS,
    OTHER_ROWS,
    SINGLE_ROWS,
    other_documents,
    routing_files,
)

PAIRS = ["+".join(pair) for pair in itertools.combinations(DOMAINS, 2)]


@pytest.fixture(scope="module")
def files() -> dict[str, list[tuple[str, str]]]:
    """Name without suffix -> (prompt, answer) of each row."""
    return {
        name.removesuffix(".jsonl"): [pair_of(line) for line in text.splitlines()]
        for name, text in routing_files().items()
    }


@pytest.fixture(scope="module")
def trained() -> set[str]:
    return {d.prompt for domain in (*DOMAINS, HELD_OUT) for d in curriculum_documents(domain)}


def pair_of(line: str) -> tuple[str, str]:
    user, assistant = json.loads(line)["messages"]
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    return user["content"], assistant["content"]


def question_in(prompt: str) -> str:
    """The question without what may stand around it."""
    for opening in sorted(set(OPENINGS), key=len, reverse=True):
        before, after = opening.split("{q}")
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt.removeprefix(before).removesuffix(after)
    raise AssertionError(prompt)


def test_there_is_a_file_a_label(files) -> None:
    counts = dict.fromkeys(DOMAINS, SINGLE_ROWS) | dict.fromkeys(PAIRS, MIXED_ROWS)
    assert {name: len(rows) for name, rows in files.items()} == counts | {"others": OTHER_ROWS}
    assert routing_files(1) != routing_files(0)


def test_islands_gives_every_question_that_is_left(files, trained) -> None:
    rng = random.Random(5)
    asked = {GENERATORS["islands"](rng).prompt for _ in range(20_000)}
    left = {text for text in asked if not is_item(text) and text not in trained}
    given = {question_in(prompt) for prompt, _ in files["islands"]}
    assert given <= left
    assert len(given) >= 0.9 * len(left)


def test_every_label_comes_with_every_opening(files) -> None:
    """Else a router could go by the first word."""
    for name in (*DOMAINS, "others"):
        used = {prompt.replace(question_in(prompt), "{q}") for prompt, _ in files[name]}
        assert used == set(OPENINGS), name


def test_every_prompt_has_one_label(files) -> None:
    prompts = [prompt for rows in files.values() for prompt, _ in rows]
    assert len(set(prompts)) == len(prompts)


def test_nothing_was_trained_validated_or_tested(files, trained) -> None:
    """Items of any seed are told by their text; rows are those of the curriculum's files."""
    for domain in DOMAINS:
        prompts = {question_in(prompt) for prompt, _ in files[domain]}
        assert not prompts & trained
        assert not any(is_item(prompt) for prompt in prompts)
        assert not prompts & {item.prompt for item in curriculum_items(domain, 70)}


def test_mixed_prompts_are_two_such_questions_in_either_order(files) -> None:
    answers = {domain: dict(files[domain]) for domain in DOMAINS}
    for pair in PAIRS:
        first, second = pair.split("+")
        orders = set()
        for prompt, answer in files[pair]:
            parts = [
                (order, a, b)
                for order in ((first, second), (second, first))
                for a in answers[order[0]]
                if prompt.startswith(f"{a} ")
                for b in answers[order[1]]
                if prompt == f"{a} {b}"
            ]
            assert len(parts) == 1, prompt
            order, a, b = parts[0]
            assert answer == f"{answers[order[0]][a]} {answers[order[1]][b]}"
            orders.add(order)
        assert len(orders) == 2, pair


def test_the_held_out_domain_is_nowhere(files) -> None:
    rng = random.Random(1)
    music = {GENERATORS[HELD_OUT](rng).prompt for _ in range(20_000)}
    for rows in files.values():
        for prompt, _ in rows:
            assert not any(question in prompt for question in music)


def test_others_are_what_the_base_was_trained_on(files) -> None:
    documents = other_documents()
    assert [(d.prompt, d.answer) for d in documents] == files["others"]
    share = OTHER_ROWS // len(OWN_DOMAINS)
    assert {d: sum(x.domain == d for x in documents) for d in OWN_DOMAINS} == dict.fromkeys(
        OWN_DOMAINS, share
    )
    own = [d for d in documents if d.domain != "chat"]  # chat holds questions about identity too
    assert {split_of(question_in(d.prompt)) for d in own} == {"train"}


def test_the_cache_holds_them_and_is_made_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path))
    paths = NanoPaths(ASSETS / "model", ASSETS / "adapter", ASSETS / "store")
    directory = paths.routing_path
    expected = routing_files()
    assert {path.name: path.read_text() for path in directory.glob("[!.]*")} == expected
    stamp = (directory / "others.jsonl").stat().st_mtime_ns
    assert paths.routing_path == directory
    assert (directory / "others.jsonl").stat().st_mtime_ns == stamp
