"""Answers to one prompt drawn together beside one by one: tokens a second.

    python -m benchmarks.bench_drawing --model DIR [--group-size 8] [--tokens 64] [--rounds 5]

In one process, taking turns; a round's ratio is taken within the round. float32 on a CPU, the
model's own dtype elsewhere. No end mark counts, so all answers have the same tokens.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from benchmarks.timing import machine, spread
from mlxstacks import base_model
from mlxstacks.training.grpo import sample_answers
from mlxstacks.training.modes import prepare_base

PROMPT = "Name three things that one can see from the window of a train."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, tokenizer, _ = base_model.load(Path(options.model))
    if mx.default_device().type == mx.DeviceType.cpu:
        prepare_base(model, "float32", [])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    count = options.group_size

    def draw(group: int, seed: int) -> None:
        for number in range(count // group):
            key = mx.random.key(1000 * seed + number)
            answers = sample_answers(model, prompt, group, options.tokens, (), key)
            assert [len(answer.tokens) for answer in answers] == [options.tokens] * group

    def rate(group: int, seed: int) -> float:
        begin = time.perf_counter()
        draw(group, seed)
        return count * options.tokens / (time.perf_counter() - begin)

    ways: dict[str, Callable[[int], float]] = {
        "one by one": lambda seed: rate(1, seed),
        "together": lambda seed: rate(count, seed),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(options.rounds + 1):
        for name in list(ways)[:: 1 if seed % 2 else -1]:
            found = ways[name](seed)
            if seed:  # a first round does not count
                taken[name].append(found)
    pairs = zip(taken["together"], taken["one by one"], strict=True)
    ratio = spread([together / alone for together, alone in pairs])
    for name, rates in taken.items():
        print(f"{name}: {spread(rates).median:.1f} tokens a second")
    print(f"{count} together: {ratio.median:.2f} times ({ratio.p20:.2f} to {ratio.p80:.2f})")
    result = {"tokens_a_second": taken, "ratio": asdict(ratio)}
    print(json.dumps({"benchmark": "drawing", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()
