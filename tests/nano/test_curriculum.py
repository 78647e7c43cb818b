"""nano's curriculum: determinism, disjoint parts, items that follow from what is taught, sizes.

Run: pytest tests/nano/test_curriculum.py
"""

import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from mlxstacks.data import DomainDataSettings, read_domains
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import ASSETS, NanoPaths
from mlxstacks.nano.settings import HELD_OUT, HELD_OUT_DIRECTORY
from tools.nano.corpus import Document, training_documents
from tools.nano.curriculum import (
    curriculum_documents,
    curriculum_items,
    is_item,
)
from tools.nano.curriculum_domains import (
    GENERATORS,
    ISLANDS,
    TIME_OF_PLACE,
)
from tools.nano.curriculum_settings import DOMAINS, ROWS, CurriculumTraining
from tools.nano.tokenizer import load_tokenizer

ALL = (*DOMAINS, HELD_OUT)
ITEMS = 60
PATHS = NanoPaths(ASSETS / "model", ASSETS / "adapter", ASSETS / "store")


@pytest.fixture(scope="module")
def documents() -> dict[str, list[Document]]:
    return {domain: curriculum_documents(domain) for domain in ALL}


@pytest.fixture(scope="module")
def items():
    return {domain: curriculum_items(domain, ITEMS) for domain in ALL}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXSTACKS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return PATHS.curriculum_path


@pytest.fixture(scope="module")
def split(directory: Path):
    training = CurriculumTraining()
    settings = {
        domain: DomainDataSettings(
            sources=(f"{HELD_OUT_DIRECTORY if domain == HELD_OUT else '.'}/{domain}.jsonl",),
            validation_rows=training.validation_rows,
        )
        for domain in ALL
    }
    return read_domains(settings, directory)


def question_of(record: dict) -> tuple[str, str]:
    """A single turn is read as prompt and answer."""
    return record["prompt"], record["answer"]


def test_every_domain_has_its_rows_and_every_row_another_question(documents) -> None:
    prompts = [d.prompt for rows in documents.values() for d in rows]
    assert {domain: len(rows) for domain, rows in documents.items()} == dict.fromkeys(ALL, ROWS)
    for domain in ALL:
        assert curriculum_documents(domain, 50, 3) != curriculum_documents(domain, 50, 4)
        assert curriculum_items(domain, 20, 3) != curriculum_items(domain, 20, 4)
    assert len(set(prompts)) == len(prompts)


def test_one_question_has_one_answer() -> None:
    for domain, generate in GENERATORS.items():
        rng, answers = random.Random(0), defaultdict(set)
        for _ in range(3000):
            question = generate(rng)
            assert question.domain == domain
            assert question.answer not in question.wrong
            assert len(set(question.wrong)) >= 3
            answers[question.prompt].add(question.answer)
        assert {len(found) for found in answers.values()} == {1}


def test_rows_items_and_nanos_own_questions_are_disjoint(documents, items) -> None:
    rows = {d.prompt for found in documents.values() for d in found}
    other_seed = {d.prompt for domain in ALL for d in curriculum_documents(domain, ROWS, 1)}
    tested = {item.prompt for found in items.values() for item in found}
    assert not (rows | other_seed) & tested
    assert all(is_item(prompt) for prompt in tested)
    assert not (rows | tested) & {d.prompt for d in training_documents(5_000, 0)}


def test_the_split_of_a_run_shares_no_question(split, items) -> None:
    trained = {question_of(e.record)[0]: name for name, d in split.items() for e in d.train}
    validated = {question_of(e.record)[0]: name for name, d in split.items() for e in d.validation}
    tested = {item.prompt for found in items.values() for item in found}
    assert not trained.keys() & validated.keys()
    assert not tested & (trained.keys() | validated.keys())
    wanted = CurriculumTraining().validation_rows
    assert Counter(validated.values()) == dict.fromkeys(ALL, wanted)
    assert Counter(trained.values()) == dict.fromkeys(ALL, ROWS - wanted)


def test_items_have_four_options_and_the_answer_anywhere(items) -> None:
    for found in items.values():
        assert len({item.prompt for item in found}) == len({item.item_id for item in found})
        assert all(len(set(item.options)) == 4 for item in found)
        assert set(Counter(item.answer_index for item in found)) == {0, 1, 2, 3}


def test_what_is_validated_and_tested_was_taught(split, items) -> None:
    """Each value of a fact is in a training row, in other words; so is each word of a skill."""
    taught = {name: [question_of(e.record) for e in d.train] for name, d in split.items()}
    asked = {
        name: [question_of(e.record) for e in d.validation]
        + [(i.prompt, i.options[i.answer_index]) for i in items[name]]
        for name, d in split.items()
    }
    facts = {(_island(q), kind_of(q), a) for q, a in taught["islands"]}
    assert facts >= {(_island(q), kind_of(q), a) for q, a in asked["islands"]}
    times = {(place, a) for q, a in taught["letters"] for place in TIME_OF_PLACE if place in q}
    times = {(place, found(r"at \w+", a)[0]) for place, a in times if "come at" in a}
    assert times == set(TIME_OF_PLACE.items())
    for name in ("tolu", "queries", "music"):
        known = {word for q, a in taught[name] for word in words(f"{q} {a}")}
        new = {word for q, a in asked[name] for word in words(f"{q} {a}")} - known
        assert not {word for word in new if not word.isdigit()}, name


def found(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    assert match is not None, (pattern, text)
    return match


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+|[<>=]", text.lower())


def _island(prompt: str) -> str:
    return next(island for island in ISLANDS if island in prompt)


def kind_of(prompt: str) -> str:
    return next(kind for kind in ("king", "food", "wind", "flag") if kind in prompt)


def test_rows_are_short_and_tokenized_alike_by_every_loader(documents) -> None:
    """33 tokens: the narrowest width of a batch. Loaders differ in how they cut line breaks and
    blanks, so rows hold none that matter.
    """
    tokenizer = load_tokenizer(ASSETS / "model")
    for rows in documents.values():
        for document in rows:
            assert "\n" not in document.prompt + document.answer
            assert "  " not in document.prompt + document.answer
            text = tokenizer.apply_chat_template(document.messages(), tokenize=False)
            assert len(tokenizer.encode(text, add_special_tokens=False)) <= 33


def test_too_many_rows_and_unknown_domains_are_refused() -> None:
    with pytest.raises(InputError, match="islands: 100000 rows asked for, it has 3"):
        curriculum_documents("islands", 100_000)
    with pytest.raises(InputError, match="there are letters"):
        curriculum_items("cooking", 1)
