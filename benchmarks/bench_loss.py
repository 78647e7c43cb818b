"""A LoRA step with the logits of all tokens at once, and with the loss in pieces of tokens.

    python -m benchmarks.bench_loss [--rounds 3] [--tokens 1024] [--vocabulary 248320]

4 layers of qwen3_5_moe (bench_train's), hidden 256, tied embeddings, the vocabulary of Qwen3.5, one
row, recurrence in chunks; float32. `half masked` is a row whose first half, a prompt, carries no
loss weight. Losses and gradients are compared before anything is timed. Each run is a process of
its own that takes one step; the processes take turns. Time is that of the process, all its threads.
Bytes are MLX's peak above what was held before the step; `logits` is that peak in copies of all
float32 logits.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from benchmarks import bench_train
from benchmarks.timing import machine, spread
from mlxstacks import base_model
from mlxstacks.data import Batch
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.ops import token_loss
from mlxstacks.training.modes import set_training_modes
from mlxstacks.training.step import GradientStep, StepGradients, cross_entropy_loss

LAYERS = 4
# Nats, and each tensor's gradient relative to its norm.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-5
WAYS = {
    "whole": {},
    "pieces": {"pieces": True},
    "whole, half masked": {"masked": True},
    "pieces, half masked": {"pieces": True, "masked": True},
}


def batch_of(tokens: int, vocabulary: int, masked: bool) -> Batch:
    rows = np.random.default_rng(1).integers(0, vocabulary, (1, tokens + 1)).astype(np.int32)
    weights = np.ones(rows.shape, np.float32)
    if masked:
        weights[:, : tokens // 2 + 1] = 0
    return Batch(rows, weights)


def gradient_step(vocabulary: int, pieces: bool) -> GradientStep:
    bench_train.LAYERS, bench_train.VOCAB = LAYERS, vocabulary
    model = bench_train.make_model()
    base_model.install_gated_delta()
    set_training_modes(model)
    head, note = find_output_head(model) if pieces else (None, "")
    if note:
        sys.exit(note)
    return GradientStep(model, cross_entropy_loss(head=head))


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """In this process: one step."""
    chosen = WAYS[way]
    step = gradient_step(vocabulary, chosen.get("pieces", False))
    batch = [batch_of(tokens, vocabulary, chosen.get("masked", False))]
    mx.synchronize()
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    wall, cpu = time.perf_counter(), time.process_time()
    made = step(batch, seed=0, step=0)
    mx.synchronize()
    return {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": mx.get_peak_memory() - held,
        "loss": made.loss.item(),
    }


def measure_apart(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_loss", "--one", way]
    command += ["--tokens", str(tokens), "--vocabulary", str(vocabulary)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return json.loads(done.stdout.splitlines()[-1])


def compare(tokens: int, vocabulary: int) -> dict[str, float]:
    """Differences of the pieces from the whole form, at equal weights."""
    whole, pieces = (gradient_step(vocabulary, chosen) for chosen in (False, True))
    found = {}
    for masked in (False, True):
        batch = [batch_of(tokens, vocabulary, masked)]
        expected: StepGradients = whole(batch, seed=0, step=0)
        made: StepGradients = pieces(batch, seed=0, step=0)
        name = "half masked" if masked else "all tokens"
        found[f"{name}: loss"] = abs(made.loss.item() - expected.loss.item())
        there = dict(tree_flatten(expected.gradients))
        found[f"{name}: gradient"] = max(
            (mx.linalg.norm((g - there[k]).flatten()) / mx.linalg.norm(there[k].flatten())).item()
            for k, g in tree_flatten(made.gradients)
        )
    return found


def summary(costs: dict[str, list[dict[str, float]]], logits_bytes: int) -> dict[str, Any]:
    table = {}
    for way, runs in costs.items():
        whole = costs[way.replace("pieces", "whole")]
        peak = int(max(run["peak_bytes"] for run in runs))
        table[way] = {
            "cpu_seconds": vars(spread([run["cpu_seconds"] for run in runs])),
            "wall_seconds": vars(spread([run["wall_seconds"] for run in runs])),
            "peak_bytes": peak,
            "logits_copies": peak / logits_bytes,
            "of_whole_bytes": peak / max(run["peak_bytes"] for run in whole),
            "of_whole_cpu": vars(
                spread(
                    [a["cpu_seconds"] / b["cpu_seconds"] for a, b in zip(runs, whole, strict=True)]
                )
            ),
        }
    return table


def show(table: dict[str, Any]) -> None:
    print("\n| step | cpu s (p20 to p80) | of whole | wall s | MB | of whole | logits |")
    print("|---|---|---|---|---|---|---|")
    for way, row in table.items():
        cpu = row["cpu_seconds"]
        print(
            f"| {way} | {cpu['median']:.1f} ({cpu['p20']:.1f} to {cpu['p80']:.1f}) "
            f"| {row['of_whole_cpu']['median']:.2f} | {row['wall_seconds']['median']:.1f} "
            f"| {row['peak_bytes'] / 1e6:.0f} | {row['of_whole_bytes']:.3f} "
            f"| {row['logits_copies']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=248_320)
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    settings = parser.parse_args()
    shape = settings.tokens, settings.vocabulary
    if settings.one:
        print(json.dumps(measure(settings.one, *shape)))
        return
    # Fewer tokens: the whole form of all of them is what does not fit.
    errors = compare(max(settings.tokens // 4, 1), settings.vocabulary)
    for name, error in errors.items():
        limit = LOSS_TOLERANCE if name.endswith("loss") else GRADIENT_TOLERANCE
        print(f"{name} differs by {error:.1e}, allowed {limit:.0e}")
        if not error <= limit:
            sys.exit("the steps do not agree: nothing is timed")
    costs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for index in range(settings.rounds):
        names = list(WAYS)
        turn = index % len(names)
        for way in names[turn:] + names[:turn]:
            costs[way].append(measure_apart(way, *shape))
            print(f"round {index + 1} {way}: {costs[way][-1]}", file=sys.stderr, flush=True)
    logits_bytes = 4 * settings.tokens * settings.vocabulary
    table = summary(costs, logits_bytes)
    show(table)
    document = {
        "benchmark": "loss", "machine": machine(), "tokens": settings.tokens,
        "vocabulary": settings.vocabulary, "errors": errors, "result": table,
        "piece_tokens": token_loss.piece_tokens(settings.vocabulary),
    }  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
