"""Three small domains for a tiny hybrid model, and settings of a short run of `stack`.

As a program: a run with the settings that are given, as JSON.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from mlxstacks.files.store import Store
from mlxstacks.studies.stack.run import run
from mlxstacks.training.settings import StackRunSettings
from tests.studies.train_cases import WORDS, write_rows, write_tiny_model

DOMAINS = ("alpha", "beta", "gamma")
# Changes of `settings_for`: two domains on one kind of projection.
TWO: dict[str, Any] = {
    "domains": ("alpha", "beta"),
    "iters": 6,
    "validation_rows": 4,
    "keys": ("q_proj",),
}
# What comes of two words, one rule a domain.
_RULES = {
    "alpha": lambda first, second: f"{second} {first}",
    "beta": lambda first, second: first[::-1],
    "gamma": lambda first, second: f"{first[0]}{second[0]}",
}


def domain_rows(name: str, count: int = 24, start: int = 0) -> list[dict[str, Any]]:
    """Rows that no other domain has; `start` gives others of the same domain."""
    rows = []
    for index in range(start, start + count):
        first, second = WORDS[index % 8], WORDS[(index // 8 + index) % 8]
        question = f"{name} {index}: {first} {second}"
        rows.append({"prompt": question, "completion": _RULES[name](first, second)})
    return rows


def write_domains(directory: Path, names: tuple[str, ...] = DOMAINS, count: int = 24) -> Path:
    for name in names:
        write_rows(directory / f"{name}.jsonl", domain_rows(name, count))
    return directory


def write_places(directory: Path) -> tuple[Path, Path]:
    """A model and its data."""
    return write_tiny_model(directory / "model"), write_domains(directory / "data")


def settings_for(model: Path, data: Path, save_path: Path, **changes: Any) -> StackRunSettings:
    """Two rounds of four short steps each domain, evaluated and saved on the way."""
    values: dict[str, Any] = {
        "model": str(model), "data": str(data), "save_path": str(save_path), "iters": 4,
        "validation_rows": 6, "batch_size": 2, "learning_rate": 1e-2, "max_seq_length": 64,
        "keys": ("q_proj", "linear_attn.out_proj", "switch_mlp.down_proj"),
        "stack": {"rank": 2, "num_experts": 3}, "min_loss_delta": 1e-4, "steps_per_eval": 4,
        "null_space": {"directions": 4, "samples": 8}, "save_every": 3, "steps_per_report": 2,
        "guard": "off",
    }  # fmt: skip
    return StackRunSettings.model_validate(values | changes)


def train_store(places: tuple[Path, Path], target: Path, **changes: Any) -> Store:
    run(settings_for(*places, target, **changes))
    return Store.open(target)


def domain_of(store: Store, name: str) -> Any:
    """A domain's record, its JSON taken for what it is."""
    return store.domain_named(name)


def hashes(directory: Path) -> dict[str, str]:
    """File -> SHA-256 of everything in a store that two equal runs have equal."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        # hidden: the lock, and what a killed writer left half-written
        and not path.name.startswith((".", "base.json", "log.jsonl", "metrics.csv", "result."))
    }


def log_of(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target / "log.jsonl").read_text().splitlines()]


def main() -> None:
    run(StackRunSettings.model_validate_json(sys.argv[1]))


if __name__ == "__main__":
    main()
