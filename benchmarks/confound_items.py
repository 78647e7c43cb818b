"""Items for `mlxstacks confound` from rows of ARC (query, choices, gold) and MedMCQA (question,
options, answer_idx), as JSON lines in the form that `--items` reads.

    python -m benchmarks.confound_items FILE [FILE ...] > items.jsonl

The name of a file is the category of its items.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        category = path.stem.removeprefix("bench_")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            if "query" in row:
                question = row["query"].removeprefix("Question: ")
                options, answer = row["choices"], "ABCDE"[row["gold"]]
            else:
                question, options = row["question"], list(row["options"].values())
                answer = row["answer_idx"]
            item = {
                "question_id": f"{category}-{number}", "question": question, "options": options,
                "answer": answer, "category": category,
            }  # fmt: skip
            print(json.dumps(item, ensure_ascii=False))


if __name__ == "__main__":
    main()
