"""Items for `mlxstacks confound` from rows of ARC and MedMCQA, as JSON lines in the form that
`--items` reads.

    python -m benchmarks.confound_items FILE [FILE ...] > items.jsonl

Rows are those of the hub, or {query or question, choices or options, and the answer as gold,
answer_idx, ...}. The name of a file is the category of its items.
"""

import argparse
import json
import string
from pathlib import Path

from mlxstacks.data.formats import answer_of, options_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=argparse.FileType("rb"))
    for file in parser.parse_args().files:
        category = Path(file.name).stem.removeprefix("bench_")
        for number, line in enumerate(file):
            try:
                row = json.loads(line)
                if "opa" in row:  # MedMCQA on the hub
                    row["options"], row["gold"] = [row[f"op{x}"] for x in "abcd"], row["cop"]
                options = options_of(row.get("choices") or row.get("options"))
                place = [*options.texts].index(answer_of(row, options) or "")
                question = row.get("query", row.get("question")).removeprefix("Question: ")
            except (AttributeError, KeyError, ValueError) as error:
                parser.error(f"{file.name}, line {number + 1} is no item: {error}")
            item = {
                "question_id": f"{category}-{number}", "question": question,
                "options": [*options.texts.values()], "answer": string.ascii_uppercase[place],
                "category": category,
            }  # fmt: skip
            print(json.dumps(item, ensure_ascii=False))


if __name__ == "__main__":
    main()
