"""The real sets beside the repository (chat, code, math, medical, reasoning); skipped without them.

Run: pytest tests/data/test_real_data.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.data import DomainData, DomainDataSettings, encode_examples, read_domains
from mlxstacks.nano.exports import ASSETS
from mlxstacks.nano.tokenizer import load_tokenizer

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="needs ../shared/data")

DOMAINS: dict[str, Any] = {
    "chat": {"sources": [{"path": "alpaca.jsonl", "cap": 1000}], "decontaminate": "words"},
    "code": {"sources": [{"path": "code_alpaca.jsonl", "cap": 1000}]},
    "math": {
        "sources": [{"path": "gsm8k_train.jsonl", "cap": 800}, "bench_math500.jsonl"],
    },
    "medical": {"sources": ["medqa.jsonl", "medmcqa.jsonl", "pubmedqa.jsonl"]},
    "reasoning": {"sources": [{"path": "logiqa.jsonl", "cap": 500}]},
    "stories": {"sources": [{"path": "tinystories.jsonl", "cap": 200}], "validation_rows": 10},
}


@pytest.fixture(scope="module")
def domains() -> dict[str, DomainData]:
    about = {name: DomainDataSettings.model_validate(value) for name, value in DOMAINS.items()}
    return read_domains(about, REAL)


def test_formats_are_found_by_keys(domains: dict[str, DomainData]) -> None:
    found = {
        source["source"]: list(source["formats"])
        for data in domains.values()
        for source in data.report["sources"]
    }
    assert found == {
        "alpaca.jsonl": ["alpaca"],
        "code_alpaca.jsonl": ["alpaca"],
        "gsm8k_train.jsonl": ["gsm8k"],
        "bench_math500.jsonl": ["openmath_cot"],
        "medqa.jsonl": ["medqa"],
        "medmcqa.jsonl": ["medqa"],
        "pubmedqa.jsonl": ["pubmedqa"],
        "logiqa.jsonl": ["medqa"],
        "tinystories.jsonl": ["text"],
    }


def test_every_row_is_accounted_for(domains: dict[str, DomainData]) -> None:
    for name, data in domains.items():
        report = data.report
        for source in report["sources"]:
            lost = sum(source["dropped"].values()) + source["duplicates"] + source["not_drawn"]
            assert source["rows_read"] == source["rows_kept"] + lost
            assert sum(source["formats"].values()) == source["rows_read"]
        kept = sum(source["rows_kept"] for source in report["sources"])
        across = report["duplicates"] - sum(s["duplicates"] for s in report["sources"])
        moved = sum(report.get("moved_from", {}).values()) - sum(
            report.get("moved_to", {}).values()
        )
        left = report["train_rows"] + report["validation_rows"]
        assert left + sum(report["left_out"].values()) == kept - across + moved, name
        assert all(len(digest) == 64 for s in report["sources"] for digest in s["sha256"].values())
        assert str(REAL) not in json.dumps(report)


def test_chat_rows_about_code_are_moved(domains: dict[str, DomainData]) -> None:
    moved = domains["chat"].report["moved_to"]
    assert set(moved) <= {"code", "math", "medical"}
    assert 5 <= moved["code"] <= 100
    assert {row["to"] for row in domains["chat"].report["moved_rows"]} <= set(moved)


def test_no_validation_row_is_trained_on(domains: dict[str, DomainData]) -> None:
    validation = {e.prompt_id for data in domains.values() for e in data.validation}
    assert not validation & {e.prompt_id for data in domains.values() for e in data.train}


def test_answers_of_medical_questions_are_their_options(domains: dict[str, DomainData]) -> None:
    rows = [e.record for e in domains["medical"].train if e.source == "medqa.jsonl"]
    assert all(row["answer"].removeprefix("The answer is ") in row["input"] for row in rows)


@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_all_of_it_encodes(domains: dict[str, DomainData], template: str) -> None:
    tokenizer: Any = load_tokenizer(ASSETS / "model")
    for name, data in domains.items():
        about = DomainDataSettings.model_validate(DOMAINS[name] | {"template": template})
        found = encode_examples(data.validation, tokenizer, about, max_tokens=4096)
        assert (found.cut, found.empty) == (0, 0)
        assert found.ids == [example.row_id for example in data.validation]
