"""Pairs for `mlxstacks align`; one question in five is held out.

    python -m benchmarks.preference_pairs bench_truthfulqa.jsonl pairs
    python -m benchmarks.preference_pairs gsm8k_test.jsonl pairs

TruthfulQA: the best answer to a question, preferred to the first incorrect one. GSM8K: a solution,
preferred to itself with another result of its last calculation, off by 1 to 10 or a tenth.

Writes pairs/train.jsonl and pairs/valid.jsonl.
"""

import json
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path


def pair_of(row: Mapping[str, str], chance: random.Random) -> dict[str, str] | None:
    if "Best Answer" in row:
        rejected = row["Incorrect Answers"].split("; ")[0]
        return {"prompt": row["Question"], "chosen": row["Best Answer"], "rejected": rejected}
    solution, _, result = row["answer"].rpartition("\n#### ")
    last = solution.rfind(f"={result}>>{result}")
    if last < 0:  # the result is not that of a calculation, or is written in another way there
        return None
    off = chance.choice([-1, 1]) * chance.choice([1, 2, 10, max(1, int(result) // 10)])
    wrong = str(abs(int(result) + off) or int(result) + 3)
    ending = re.sub(rf"(?<![\d.]){result}(?![\d.]*\d)", wrong, solution[last:])
    rejected = f"{solution[:last]}{ending}\n#### {wrong}"
    return {"prompt": row["question"], "chosen": row["answer"], "rejected": rejected}


def main() -> None:
    source, directory = map(Path, sys.argv[1:])
    directory.mkdir(parents=True)
    chance, kept = random.Random(0), 0
    files = {name: (directory / f"{name}.jsonl").open("w") for name in ("train", "valid")}
    for line in source.read_text(encoding="utf-8").splitlines():
        pair = pair_of(json.loads(line), chance)
        if pair is not None:
            files["train" if kept % 5 else "valid"].write(json.dumps(pair) + "\n")
            kept += 1


if __name__ == "__main__":
    main()
