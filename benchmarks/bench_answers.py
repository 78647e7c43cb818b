"""Greedy answers of an arm, eight at a time beside one by one: tokens a second, and the same texts.

    python -m benchmarks.bench_answers --model DIR --data FILE [--rounds 3] [--items 16]

In one process, taking turns; a round's ratio is taken within the round. FILE: rows with `question`;
float32; 64 tokens an answer at most.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from benchmarks.timing import machine, spread
from mlxstacks import base_model
from mlxstacks.training.modes import prepare_base

TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--items", type=int, default=16)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, tokenizer, _ = base_model.load(Path(options.model))
    prepare_base(model, "float32", [])
    lines = options.data.read_text().splitlines()[: options.items]
    chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]

    def alone() -> list[str]:
        return [base_model.generate(model, tokenizer, chat, TOKENS) for chat in chats]

    def together() -> list[str]:
        return base_model.generate_all(model, tokenizer, chats, TOKENS)

    ratios = []
    for number in range(options.rounds):
        taken, texts = {}, {}
        for name, run in [("alone", alone), ("together", together)][:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            texts[name] = run()
            taken[name] = time.perf_counter() - start
        same = sum(a == b for a, b in zip(texts["alone"], texts["together"], strict=True))
        tokens = sum(len(tokenizer.encode(text)) for text in texts["together"])
        ratios.append(taken["alone"] / taken["together"])
        print(json.dumps({"seconds": taken, "tokens": tokens, "same": same, "of": len(chats)}))
    print(json.dumps({"machine": machine(), "ratio": asdict(spread(ratios))}))


if __name__ == "__main__":
    main()
