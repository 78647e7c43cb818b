"""Pairs for `mlxstacks align` from TruthfulQA: the best answer to a question, preferred to the
first incorrect one; one question in five is held out.

    python -m benchmarks.preference_pairs bench_truthfulqa.jsonl pairs

Writes pairs/train.jsonl and pairs/valid.jsonl.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    source, directory = map(Path, sys.argv[1:])
    directory.mkdir(parents=True)
    files = {name: (directory / f"{name}.jsonl").open("w") for name in ("train", "valid")}
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        pair = {
            "prompt": row["Question"],
            "chosen": row["Best Answer"],
            "rejected": row["Incorrect Answers"].split("; ")[0],
        }
        files["train" if number % 5 else "valid"].write(json.dumps(pair) + "\n")


if __name__ == "__main__":
    main()
