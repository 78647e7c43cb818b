"""The real sets beside the repository (chat, code, math, medical, reasoning); skipped without them.

What each file there becomes is a table: its format, or the words with which it is refused.

Run: pytest tests/data/test_real_data.py
"""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.data import (
    DomainData,
    DomainDataSettings,
    encode_examples,
    read_domains,
    read_records,
)
from mlxstacks.data.formats import FORMATS
from mlxstacks.data.sources import read_source
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import ASSETS
from tools.nano.tokenizer import load_tokenizer

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


# file -> its format, or why it is refused
BECOMES = {
    "alpaca.jsonl": "alpaca",
    "bench_aime24.jsonl": "fit the formats gsm8k .* and openmath_cot .*; say which with",
    "bench_aime25.jsonl": "prompt_completion",
    "bench_arc_challenge.jsonl": "multiple_choice",
    "bench_arc_easy.jsonl": "multiple_choice",
    "bench_hellaswag.jsonl": "no format fits the keys .*'endings'.* write rows with the keys of",
    "bench_humaneval.jsonl": "no format fits the keys .*'canonical_solution'.* write rows with",
    "bench_math500.jsonl": "openmath_cot",
    "bench_truthfulqa.jsonl": "no format fits the keys .*'Best Answer'.* write rows with the keys",
    "code_alpaca.jsonl": "alpaca",
    "gsm8k_test.jsonl": "gsm8k",
    "gsm8k_train.jsonl": "gsm8k",
    "logiqa.jsonl": "multiple_choice",
    "medmcqa.jsonl": "multiple_choice",
    "medqa.jsonl": "multiple_choice",
    "mmlu_pro.jsonl": "multiple_choice",
    "pubmedqa.jsonl": "pubmedqa",
    "tinystories.jsonl": "text",
    "tinyshakespeare.txt": "text",
    "stories260K": r"config\.json, line 1: not JSON .*; each line must be one object",
}


def test_the_table_has_every_file() -> None:
    names = {path.name for path in REAL.iterdir() if path.name != "README.md"}
    assert names == set(BECOMES)


@pytest.mark.parametrize("name", BECOMES)
def test_each_file_is_one_format_or_refused(name: str) -> None:
    source, expected = {"path": name, "cap": 200}, BECOMES[name]
    about = DomainDataSettings.model_validate({"sources": source})
    if expected not in FORMATS:
        with pytest.raises(InputError, match=expected):
            read_source(about.sources[0], about, REAL)
        return
    rows, report = read_source(about.sources[0], about, REAL)
    assert list(report["formats"]) == [expected]
    assert len(rows) >= 30


def test_answers_of_human_eval_stay_python_behind_their_prompts(tmp_path: Path) -> None:
    tasks = read_records(REAL / "bench_humaneval.jsonl")
    rows = [{"instruction": t["prompt"], "output": t["canonical_solution"]} for t in tasks]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = DomainDataSettings.model_validate({"sources": "rows.jsonl"})
    examples, report = read_source(about.sources[0], about, tmp_path)
    assert (len(examples), report["changed"]) == (164, {})
    for example in examples.values():
        ast.parse(example.record["prompt"] + example.record["answer"])


@pytest.mark.parametrize("name", ["logiqa.jsonl", "pubmedqa.jsonl"])
def test_no_passage_is_on_both_sides(name: str) -> None:
    about = {"d": DomainDataSettings.model_validate({"sources": name, "validation_fraction": 0.2})}
    data = read_domains(about, REAL)["d"]
    passages = [{e.passage_id for e in part} - {""} for part in (data.train, data.validation)]
    assert min(map(len, passages)) > 100
    assert not passages[0] & passages[1]


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
