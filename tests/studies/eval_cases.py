"""Arms that answer without a model, items for them, and outcomes made by hand."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.settings import NORMALISATIONS
from mlxstacks.studies.benchmarks import run as eval_run
from mlxstacks.studies.benchmarks.analysis import Outcome
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied, Scored

SUBJECTS = ("alpha", "beta", "gamma")
# How much of what it is asked each arm knows.
KNOWS = {"base": 0.5, "ungated": 0.2, "routed": 0.85, "oracle": 0.85, "random": 0.5}
HASHES = {"model": "0" * 64}


def chance(*parts: object) -> float:
    """A number in [0, 1) that follows from the parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


class FakeArm:
    """Knows a share of the items. calls: how many items it was asked."""

    def __init__(self, name: str, settings: Any) -> None:
        self.name, self.settings = name, settings
        self.notes: Sequence[str] = [f"{name} is made up"]
        self.details = {"seed": settings.seed}
        self.calls = 0

    def knows(self, item: BenchItem) -> bool:
        return chance(self.name, item.item_id) < KNOWS.get(self.name, 0.5)

    def weights(self, item: BenchItem) -> Mapping[str, float]:
        return {} if self.name == "base" or item.domain is None else {item.domain: 1.0}

    def score(
        self, items: Sequence[BenchItem], candidates: str = "texts", as_reference: bool = False
    ) -> list[Scored]:
        """as_reference: as if the first candidate were one token."""
        self._work(items)
        found = []
        for item in items:
            texts = item.candidates if candidates == "texts" else item.letters
            right = item.gold if self.knows(item) else (int(item.gold) + 1) % len(texts)
            sums = tuple(-1.0 if place == right else -2.0 - place for place in range(len(texts)))
            if as_reference:
                sums = (0.0, *sums[1:])
            found.append(
                Scored(sums, (2,) * len(sums), tuple(map(len, texts)), weights=self.weights(item))
            )
        return found

    def reply(self, items: Sequence[BenchItem], max_tokens: int) -> list[Replied]:
        self._work(items)
        return [
            Replied(
                f"#### {item.gold if self.knows(item) else 'no idea'}", 5,
                "stop" if self.knows(item) else "length", weights=self.weights(item),
            )
            for item in items
        ]  # fmt: skip

    def _work(self, items: Sequence[BenchItem]) -> None:
        self.calls += len(items)


class FakeArms:
    """In the place of `open_arms`. opened: names, in order."""

    is_published_model = False

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.opened: list[str] = []
        self.made: list[FakeArm] = []

    def __call__(self, names: Sequence[str], settings: Any) -> Iterator[FakeArm]:
        for name in names:
            if self.stop_after is not None and len(self.opened) >= self.stop_after:
                raise KeyboardInterrupt
            self.opened.append(name)
            self.made.append(FakeArm(name, settings))
            yield self.made[-1]


def use(patch: pytest.MonkeyPatch, arms: FakeArms) -> FakeArms:
    """Let runs ask these arms; nothing of a model is looked at."""
    patch.setattr(eval_run, "open_arms", arms)
    patch.setattr(eval_run, "check_arms_fit", lambda settings, names: None)
    patch.setattr(eval_run, "hashes_of", lambda settings, names, recorded: dict(HASHES))
    patch.setattr(eval_run, "check_places", lambda settings: [])
    patch.setattr(eval_run, "is_published_model", lambda settings: arms.is_published_model)
    return arms


def item_row(index: int) -> dict[str, Any]:
    return {
        "question_id": index, "question": f"Question {index}?",
        "options": [f"answer {index} {letter}" for letter in "wxyz"], "answer": "ABCD"[index % 4],
        "category": SUBJECTS[index % 3],
    }  # fmt: skip


def write_places(directory: Path, items: int = 60) -> Path:
    """A directory with the files of four tasks."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = {
        "items.jsonl": [item_row(index) for index in range(items)],
        "mmlu_pro.jsonl": [item_row(index) for index in range(12)],
        "gsm8k_test.jsonl": [
            {"question": f"What is {index} and 1?", "answer": f"It is.\n#### {index + 1}"}
            for index in range(items)
        ],
        "bench_humaneval.jsonl": [
            {"task_id": f"HumanEval/{index}", "prompt": f"def f{index}(x):\n    \"\"\"One.\"\"\"\n",
             "entry_point": f"f{index}", "canonical_solution": "    return 1\n",
             "test": "def check(candidate):\n    assert candidate(0) == 1\n"}
            for index in range(3)
        ],
    }  # fmt: skip
    for name, found in rows.items():
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in found))
    return directory


def settings_for(data: Path, save_path: Path, /, **changes: Any) -> EvalSettings:
    values: dict[str, Any] = {
        "model": "made-up", "store_path": "made-up-store", "data": str(data), "tasks": ("items",),
        "arms": ("base", "ungated", "routed", "oracle", "random"), "items_per_task": None,
        "save_path": str(save_path), "save_every": 8, "plots": False,
        "domains": tuple(f"{name}={name}" for name in SUBJECTS),
    }  # fmt: skip
    return EvalSettings.model_validate(values | changes)


def outcome(index: int, correct: bool | None, **changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "item_id": str(index), "stratum": SUBJECTS[index % 3], "correct": correct, "value": "0",
        "rule": "likelihood", "seconds": 0.5,
        "by": {} if correct is None else dict.fromkeys(NORMALISATIONS, correct),
    }  # fmt: skip
    return Outcome(**values | changes)


def outcomes_of(marks: Sequence[bool | None]) -> list[Outcome]:
    return [outcome(index, correct) for index, correct in enumerate(marks)]
