"""Sums and differences of numbers up to 20, for `mlxstacks train` and `align --reward math`; 60 of
590 are held out.

    python -m benchmarks.sums sums

Writes sums/train.jsonl and sums/valid.jsonl.
"""

import json
import random
import sys
from pathlib import Path


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    sums = []
    for a in range(1, 21):
        for b in range(1, 21):
            sums.append((f"{a} + {b}", a + b))
            if a > b:
                sums.append((f"{a} - {b}", a - b))
    random.Random(1).shuffle(sums)
    for name, part in (("valid", sums[:60]), ("train", sums[60:])):
        rows = [{"prompt": f"What is {s}?", "answer": f"{s} = {value}"} for s, value in part]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
