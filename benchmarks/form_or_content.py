"""How much of what a stack gains is form? A stack trained on a domain's rows, beside one trained on
the same rows whose content words have changed places with each other.

    python -m benchmarks.form_or_content --save-path DIR [--data FILE ...] [--model MODEL]
        [--set KEY=VALUE ...]

FILE: rows of one domain in any format that `stack` reads; nano's four where none is given.
KEY=VALUE: settings of the run, as in layers=27-29. The words of more than three letters that are no
function words are shuffled over all rows of a file, with their capitals and endings left where they
were: grammar, punctuation, digits, lengths and the domain's vocabulary stay, what is said does not.
Both stacks see as many rows and steps, and are measured on the same whole rows, which neither has
seen in any order. Prints, over seeds, the loss before, what either stack gains, and the share of
form and vocabulary in it (a ratio of means; Fieller's interval).
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.stats import t
from sklearn.feature_extraction.text import (  # type: ignore[import-untyped]
    ENGLISH_STOP_WORDS,
)

import mlxstacks as ms
from mlxstacks.nano.exports import nano_paths

WORD = re.compile(r"[A-Za-z]{4,}")
KEPT = {"role", "from"}  # who speaks
HELD_OUT = 24  # rows
SETTINGS: dict[str, Any] = {
    "rounds": 1, "layers": "3-5", "null_space": None, "iters": 24, "batch_size": 8, "warmup": 4,
    "stack": {"rank": 4, "alpha": 4.0, "num_experts": 2, "experts_per_token": 1},
    "learning_rate": 0.01, "lr_schedule": "cosine", "max_seq_length": 64, "steps_per_eval": 24,
}  # fmt: skip


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a row, but for who speaks."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for k, part in value.items() if k not in KEPT for text in texts_of(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in texts_of(part))


def permuted(rows: list[Any], seed: int) -> list[Any]:
    """The rows with their content words in each other's places."""

    def is_content(word: str) -> bool:
        return word.lower() not in ENGLISH_STOP_WORDS

    words = [
        w for row in rows for text in texts_of(row) for w in WORD.findall(text) if is_content(w)
    ]
    random.Random(seed).shuffle(words)
    left = iter(words)

    def exchanged(match: re.Match[str]) -> str:
        if not is_content(match[0]):
            return match[0]
        word = next(left)
        return word.capitalize() if match[0][0].isupper() else word.lower()

    def mapped(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: part if k in KEPT else mapped(part) for k, part in value.items()}
        if isinstance(value, list):
            return [mapped(part) for part in value]
        return WORD.sub(exchanged, value) if isinstance(value, str) else value

    return [mapped(row) for row in rows]


def ratio(part: np.ndarray, whole: np.ndarray) -> tuple[float, float, float]:
    """Mean of part over mean of whole, paired, with Fieller's 95% interval; NaN where none is."""
    n, quantile = len(part), t.ppf(0.975, len(part) - 1) if len(part) > 1 else np.nan
    (vp, cov), (_, vw) = np.cov(part, whole) / n if n > 1 else np.full((2, 2), np.nan)
    p, w = part.mean(), whole.mean()
    a, b, c = w**2 - quantile**2 * vw, p * w - quantile**2 * cov, p**2 - quantile**2 * vp
    root = np.sqrt(b**2 - a * c) if a > 0 and b**2 >= a * c else np.nan
    return p / w, (b - root) / a, (b + root) / a


def compare(file: Path, place: Path, model: str | None, changes: dict[str, Any], seeds: int) -> Any:
    """The result of `stack compare` on one domain."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    random.Random(1).shuffle(rows)
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    data = place / "rows"
    data.mkdir(parents=True, exist_ok=True)
    for name, part in {"held-out": held_out, "whole": rows, "form": permuted(rows, 0)}.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (data / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def trained_on(name: str) -> dict[str, Any]:
        sources = [
            {"path": "held-out.jsonl", "part": "validation"},
            {"path": f"{name}.jsonl", "part": "train"},
        ]
        about = {"validation_rows": HELD_OUT, "sources": sources}
        return {"domains": [{"name": file.stem, "data": about}]}

    return ms.run({
        "command": "stack compare", "save_path": str(place / "compare"), "data": str(data),
        "question": "How much of what a stack gains is form?", "seeds": list(range(seeds)),
        "arms": [{"name": "whole"}, {"name": "form", "change": trained_on("form")}],
        "equal": ["parameters", "steps"], "primary": "task_loss",
        "run": SETTINGS | trained_on("whole") | changes,
        **({"model": model} if model else {}),
    }, progress=False)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--save-path", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    files = options.data or sorted((nano_paths().curriculum_path).glob("*.jsonl"))
    changes = {
        key: yaml.safe_load(value) for key, _, value in (c.partition("=") for c in options.set)
    }
    print("| domain | loss before | gain, whole rows | gain, form alone | share of form (95%) |")
    print("|---|---|---|---|---|")
    for file in files:
        result = compare(file, options.save_path / file.stem, options.model, changes, options.seeds)
        gains: dict[str, list[float]] = {"whole": [], "form": []}
        for cell in result.data["cells"]:
            (first,) = cell["rounds"][file.stem]
            gains[cell["arm"]].append(first["loss_before"] - first["loss_after"])
        whole, form = (np.array(gains[arm]) for arm in ("whole", "form"))
        share, low, high = ratio(form, whole)
        print(
            f"| {file.stem} | {first['loss_before']:.3f} | {whole.mean():.3f} | {form.mean():.3f} "
            f"| {share:.0%} ({low:.0%} to {high:.0%}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
