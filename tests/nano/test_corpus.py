"""nano's generated data: determinism, disjoint splits, well-formed items, identity. Run: pytest
tests/nano
"""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from mlxstacks.nano.exports import SAMPLES, SAMPLES_FILE
from mlxstacks.nano.settings import Persona
from tools.nano.corpus import (
    Document,
    multiple_choice_items,
    split_of,
    training_documents,
    validation_documents,
)
from tools.nano.identity import SUITE_SIZES, neutral_rows, persona_prompts
from tools.nano.knowledge import MEDICAL_WORLD
from tools.nano.samples import write_samples


@pytest.fixture(scope="module")
def taught() -> list[Document]:
    return training_documents(20_000, 0)


@pytest.fixture(scope="module")
def items():
    return multiple_choice_items(100, 0)


def test_train_validation_and_items_share_no_question(items, taught) -> None:
    train = {d.prompt for d in taught} - {q for q, _ in neutral_rows()}
    validation = {d.prompt for d in validation_documents(60, 0)}
    tested = {item.prompt for item in items}
    assert not train & validation
    assert not train & tested
    assert not validation & tested
    assert {split_of(p) for p in train} == {"train"}


def test_items_have_four_distinct_options_and_the_answer_anywhere(items) -> None:
    assert all(len(set(item.options)) == 4 for item in items)
    assert len({item.prompt for item in items}) == len({item.item_id for item in items}) == 500
    places = Counter(item.answer_index for item in items)
    assert all(90 <= places[i] <= 160 for i in range(4))


def test_medical_facts_of_items_are_taught_in_other_words(items, taught) -> None:
    prompts = " ".join(d.prompt for d in taught if d.domain == "medical")
    names = [name for name, _ in MEDICAL_WORLD]
    assert len(set(names)) == len(names)
    for item in items:
        if item.domain == "medical":
            assert next(name for name in names if name in item.prompt) in prompts


def test_the_suite_has_twenty_prompts_that_are_never_trained_on() -> None:
    persona = Persona()
    suite, taught = persona_prompts(persona, suite=True), persona_prompts(persona, suite=False)
    assert Counter(p.category for p in suite) == SUITE_SIZES
    assert len(suite) == 20
    assert len(taught) >= 25
    assert not {p.prompt for p in suite} & {p.prompt for p in taught}


def test_the_persona_is_configurable_and_the_scorer_discriminates() -> None:
    persona = Persona(name="Orla", maker="Quay Works", forbidden=("Mica",))
    neutral = dict(neutral_rows())
    for prompt in persona_prompts(persona, suite=True) + persona_prompts(persona, suite=False):
        assert prompt.accepts(prompt.answer)
        assert not prompt.accepts(neutral[prompt.prompt])
        assert not prompt.accepts(prompt.answer + " I am Mica.")
        assert "Orla" in prompt.answer or "Quay Works" in prompt.answer


def test_the_base_is_never_taught_the_default_persona(taught) -> None:
    persona = Persona()
    answers = " ".join(d.answer for d in taught)
    assert f"I am {persona.name}" not in answers
    assert f"{persona.maker} made" not in answers
    assert "I am a small language model." in answers


def test_the_shipped_samples_follow_from_the_generators(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples.json.gz")
    made, shipped = (
        json.loads(gzip.decompress(file.read_bytes()))
        for file in (tmp_path / "samples.json.gz", SAMPLES_FILE)
    )
    assert made == shipped
    assert made.keys() == SAMPLES.keys()
    assert all(SAMPLES[name] in files for name, files in made.items())
