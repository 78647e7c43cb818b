"""What a refit of zeros does to answers, at each width of the codes: flips by margin.

    python -m benchmarks.artifact_by_width --items FILE --adapter-path DIR MODEL [MODEL ...]

FILE: rows of query, choices and gold. Each model answers all items by the likeliest choice (the sum
of log p of its tokens), then again after `fuse --requant refit --zero-delta` in memory, of the
modules that the adapter names. Margin: log p of the first choice less that of the second, before.
An answer that is moved goes to the second choice or further; of the wrong answers, those whose
second choice is right are what a blind move can correct. One line of JSON a model.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks import base_model
from mlxstacks.evaluate import ChoiceItem, score_continuations
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.stats import wilson_interval
from mlxstacks.training.modes import evaluating, prepare_base

EDGES = (0.25, 0.5, 1.0, 2.0, 4.0)  # nats


def read_items(file: Path, tokenizer: Any, count: int) -> list[ChoiceItem]:
    items = []
    for line in file.read_text().splitlines()[:count]:
        row = json.loads(line)
        context = tokenizer.encode(f"{row['query']}\nAnswer:")
        choices = [
            tokenizer.encode(f" {choice}", add_special_tokens=False) for choice in row["choices"]
        ]
        items.append(
            ChoiceItem(
                tuple(context), tuple(map(tuple, choices)), tuple(map(len, row["choices"])),
                row["gold"],
            )
        )  # fmt: skip
    return items


def share(count: int, n: int) -> list[float] | None:
    """With its 95% interval."""
    if n == 0:
        return None
    interval = wilson_interval(count, n)
    return [count / n, interval.low, interval.high]


def measure(path: str, adapter: str, file: Path, count: int) -> dict[str, Any]:
    model, tokenizer, _ = base_model.load(Path(path), lazy=True)
    prepare_base(model, "float32", [])
    items = read_items(file, tokenizer, count)
    gold = np.array([item.answer_index for item in items])

    def ordered() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First and second choice, and the margin between them."""
        with evaluating(model), base_model.gated_delta_installed():
            scores = score_continuations(model, items)
        order = [np.argsort(-np.array(s), kind="stable") for s in scores]
        margin = [s[o[0]] - s[o[1]] for s, o in zip(scores, order, strict=True)]
        return np.array([o[0] for o in order]), np.array([o[1] for o in order]), np.array(margin)

    first, second, margin = ordered()
    fuse = fuse_in_memory(
        model,
        FuseSettings(
            model=path, adapter_path=(adapter,), requant="refit", zero_delta=True,
            allow_base=True, judge="none",
        ),
    )  # fmt: skip
    total = fuse.stages[0].total
    after, _, _ = ordered()
    moved, wrong = after != first, first != gold
    place = np.searchsorted(EDGES, margin, side="right")
    return {
        "model": Path(path).name, "items": len(items),
        "accuracy": share(int((~wrong).sum()), len(items)),
        "accuracy_after": share(int((after == gold).sum()), len(items)),
        "artifact": total and total.artifact,
        "codes_changed": total and total.codes_changed_at_zero,
        "moved": share(int(moved.sum()), len(items)),
        "moved_by_margin": [
            share(int(moved[place == p].sum()), int((place == p).sum()))
            for p in range(len(EDGES) + 1)
        ],
        "to_the_second_choice": share(int((after == second)[moved].sum()), int(moved.sum())),
        "wrong": int(wrong.sum()),
        "fixed_of_wrong": share(int((after == gold)[wrong].sum()), int(wrong.sum())),
        "second_choice_is_right_of_wrong": share(
            int((second == gold)[wrong].sum()), int(wrong.sum())
        ),
        "broken_of_right": share(int((after != gold)[~wrong].sum()), int((~wrong).sum())),
        "median_margin_right_wrong": [
            float(np.median(margin[~wrong])), float(np.median(margin[wrong]))
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--items", type=Path, required=True)
    parser.add_argument("--adapter-path", required=True)
    parser.add_argument("--count", type=int, default=400)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for model in options.models:
        found = measure(model, options.adapter_path, options.items, options.count)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
