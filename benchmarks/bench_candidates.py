"""Candidates behind a context that goes in once, beside a context before each candidate.

    python -m benchmarks.bench_candidates [--rounds 7] [--items 4] [--model DIR]

Random tokens; 4 candidates of 10 tokens to a context of 50, 100, 200 and 400 (on nano, the default,
of 50 nothing is shared: it would not pay). In one process, taking turns; a round's ratio is taken
within the round. The sums of both are compared first. Process time is the sum over threads, wall
time what one waits: on a busy machine the first is the steadier.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks.timing import machine, spread
from mlxstacks import base_model
from mlxstacks.arms.scoring import Pair, PairScorer
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.benchmarks.arms import Loaded
from mlxstacks.studies.benchmarks.settings import ArmSettings
from mlxstacks.training.modes import evaluating, prepare_base

CONTEXTS, CANDIDATES, TOKENS = (50, 100, 200, 400), 4, 10
# Nats, of sums of ten log probabilities.
TOLERANCE = 1e-3


def draw(context: int, items: int, vocabulary: int) -> list[Pair]:
    """Pairs of so many items."""
    random = np.random.default_rng(context)

    def some(count: int) -> tuple[int, ...]:
        return tuple(random.integers(0, vocabulary, count).tolist())

    contexts = [some(context) for _ in range(items)]
    return [Pair(before, some(TOKENS)) for before in contexts for _ in range(CANDIDATES)]


def timed(scorer: PairScorer, pairs: list[Pair]) -> tuple[float, float, list[float]]:
    """(wall seconds, process seconds, sums); nothing is known from before."""
    fresh = replace(scorer, kept={})
    wall, process = time.perf_counter(), time.process_time()
    sums = fresh.sums(pairs)
    return time.perf_counter() - wall, time.process_time() - process, sums


def compare(whole: PairScorer, shared: PairScorer, pairs: list[Pair], rounds: int) -> dict:
    """Seconds of both, and their ratios round by round. Raises: AssertionError: other sums."""
    taken: dict[str, list[tuple[float, float, list[float]]]] = {"whole": [], "shared": []}
    scorers = {"whole": whole, "shared": shared}
    for index in range(rounds + 1):  # the first one does not count
        for name in list(scorers)[:: 1 if index % 2 else -1]:
            taken[name].append(timed(scorers[name], pairs))
    off = max(abs(a - b) for a, b in zip(taken["whole"][0][2], taken["shared"][0][2], strict=True))
    assert off < TOLERANCE, f"sums differ by {off:.1e} nats"
    both = list(zip(taken["whole"], taken["shared"], strict=True))[1:]
    return {
        "off_nats": off,
        "whole_seconds": asdict(spread([a[0] for a, _ in both])),
        "shared_seconds": asdict(spread([b[0] for _, b in both])),
        "ratio_wall": asdict(spread([b[0] / a[0] for a, b in both])),
        "ratio_process": asdict(spread([b[1] / a[1] for a, b in both])),
    }


def shown(values: dict[str, float], form: str = ".3f") -> str:
    return f"{values['median']:{form}} ({values['p20']:{form}} to {values['p80']:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--items", type=int, default=4)
    parser.add_argument("--model", help="directory; default: nano")
    size = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, tokenizer, config = base_model.load(Path(size.model or nano_paths().model_path))
    dtype = mx.float32 if prepare_base(model, "auto", []) else None
    model.eval()
    shared = Loaded(model, tokenizer, config, ArmSettings(), dtype).scorer()
    assert shared.cached is not None
    assert shared.head is not None
    print("| context | whole s (p20 to p80) | shared s | ratio, wall | ratio, process |")
    print("|---|---|---|---|---|")
    result = {}
    with evaluating(model), base_model.gated_delta_installed():
        for context in CONTEXTS:
            pairs = draw(context, size.items, shared.head.vocabulary_size)
            found = compare(replace(shared, cached=None), shared, pairs, size.rounds)
            print(f"| {context} | {shown(found['whole_seconds'])} | "
                  f"{shown(found['shared_seconds'])} | {shown(found['ratio_wall'])} | "
                  f"{shown(found['ratio_process'])} |", flush=True)  # fmt: skip
            result[context] = found
    print(json.dumps({"benchmark": "candidates", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()
