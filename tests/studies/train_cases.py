"""A tiny hybrid model on disk, data for it, and settings of a short run."""

import json
from pathlib import Path
from typing import Any

from mlxstacks.training.settings import TrainSettings
from tests.tiny_models import write_qwen_moe

WORDS = ("red", "blue", "green", "seven", "apple", "river", "stone", "cloud")


def chat_rows(count: int, shift: int = 0) -> list[dict[str, Any]]:
    """Questions whose answer is the second word of the question; lengths differ."""
    rows = []
    for index in range(count):
        words = [WORDS[(index * step + shift) % len(WORDS)] for step in range(1, 3 + index % 5)]
        question = {"role": "user", "content": " ".join(words)}
        rows.append({"messages": [question, {"role": "assistant", "content": words[1]}]})
    return rows


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_data(directory: Path, train: int = 20, valid: int = 6) -> Path:
    write_rows(directory / "train.jsonl", chat_rows(train))
    if valid:
        write_rows(directory / "valid.jsonl", chat_rows(valid, shift=3))
    return directory


def write_tiny_model(directory: Path) -> Path:
    return write_qwen_moe(directory, bits=4, hidden_size=64, shards=1)


def settings_for(model: Path, data: Path, save_path: Path, **changes: Any) -> TrainSettings:
    """Eight short steps, evaluated and saved on the way."""
    values: dict[str, Any] = {
        "model": str(model), "data": str(data), "save_path": str(save_path), "iters": 8,
        "batch_size": 2, "rank": 2, "learning_rate": 1e-2, "scale": 8.0, "steps_per_eval": 4,
        "save_every": 5, "steps_per_report": 2, "dropout": 0.1, "guard": "off",
    }  # fmt: skip
    return TrainSettings(**values | changes)
