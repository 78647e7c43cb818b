"""One LoRA step: mlx-lm's trainer, compiled as shipped and eager, beside the trainer core.

    python -m benchmarks.bench_train [--rounds 5] [--tokens 512] [--without compiled ...]

DESIGN section 10: T=512, 8 layers of qwen3_5_moe, hidden 256, 16 experts top-4, rank 8 on mlx-lm's
default keys. All ways start from the same weights, with mlx-lm's own LoRA modules and the same
AdamW, on the same row. Each run is a process of its own that takes two steps; the second one
counts. The processes take turns. Time is that of the process, all its threads (on a busy machine it
says more than the clock, which is printed too). Bytes are MLX's peak above what was held before the
step.

Results are compared first, at equal weights and for both steps: loss and gradients of the loop and
of the trainer core, before and after a step that the loop's gradients make. The losses of the timed
second steps are printed, not compared: each way took its own first step, and the loss after a step
of Adam is sensitive to rounding here. Of eight draws that move every weight by one float32 ulp,
mlx-lm's own loop was off by 3e-6 to 2e-4 in seven and by 4e-3 in one, and so was the trainer core.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.timing import machine, spread
from mlxstacks import base_model
from mlxstacks.data import Batch
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.loop import train
from mlxstacks.training.modes import set_training_modes
from mlxstacks.training.settings import OptimizerSettings
from mlxstacks.training.step import GradientStep, StepGradients, cross_entropy_loss

LAYERS, VOCAB, RATE = 8, 1024, 1e-5
# Our step against mlx-lm's: time against its compiled and eager step, bytes against the smaller.
BARS = {"compiled": 5.0, "eager": 2.5, "bytes": 4.0}
# At equal weights: loss in nats, and each tensor's gradient relative to its norm.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3


def config() -> dict[str, Any]:
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": VOCAB, "hidden_size": 256,
        "num_hidden_layers": LAYERS, "full_attention_interval": 4, "intermediate_size": 128,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "rope_parameters": {
            "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": text}


def make_model() -> nn.Module:
    """Random weights from a seed; LoRA where mlx-lm's default puts it, lora_b not zero."""
    model = base_model.build_model(config())
    base_model.attach_lora(model, LAYERS, rank=8, scale=20.0, keys=None)
    rng = np.random.default_rng(0)
    drawn = []
    for name, value in sorted(tree_flatten(model.parameters())):
        values = rng.normal(0, value.shape[-1] ** -0.5, value.shape)
        if name.endswith("lora_b"):
            values *= 0.05
        elif value.ndim == 1:
            values = 1 + 0.1 * values
        drawn.append((name, mx.array(values.astype(np.float32))))
    model.load_weights(drawn)
    model.train()
    mx.eval(model.parameters())
    return model


def tokens_of(length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (1, length + 1)).astype(np.int32)


def batch_of(length: int) -> Batch:
    return Batch(tokens_of(length), np.ones((1, length + 1), np.float32))


# --- the ways -------------------------------------------------------------------------------------

Lap = Callable[[float], None]
"""Called with the loss after each of two steps."""
Way = Callable[[nn.Module, int, Lap], None]


def mlx_lm_steps(compiled: bool) -> Way:
    """mlx-lm's trainer: its loss, its update, its state of the compiled step."""

    def run(model: nn.Module, length: int, lap: Lap) -> None:
        from mlx_lm.tuner.trainer import default_loss

        optimizer = _adam()
        gradient = nn.value_and_grad(model, default_loss)
        batch, lengths = mx.array(tokens_of(length)), mx.array([[0, length + 1]])

        def step(batch: mx.array, lengths: mx.array) -> mx.array:
            (loss, _), gradients = gradient(model, batch, lengths)
            optimizer.update(model, gradients)
            return loss

        state = [model.state, optimizer.state, mx.random.state]
        if compiled:
            step = mx.compile(step, inputs=state, outputs=state)
        for _ in range(2):
            loss = step(batch, lengths)
            mx.eval(state, loss)
            lap(loss.item())

    return run


def our_steps(checkpointed: bool, compiled: bool = False) -> Way:
    """The trainer core with the chunked recurrence; clipping as good as off, as mlx-lm has none."""

    def run(model: nn.Module, length: int, lap: Lap) -> None:
        base_model.install_gated_delta()
        set_training_modes(model)
        if checkpointed:
            checkpoint_layers(model)
        settings = OptimizerSettings(
            steps=2, learning_rate=RATE, schedule="constant", beta2=0.999, weight_decay=0,
            clip_norm=1e9,
        )  # fmt: skip
        batch = [batch_of(length)]
        train(
            model, cross_entropy_loss(), lambda _: batch, settings, compiled=compiled,
            on_step=lambda _, record: lap(record["loss"]),
        )  # fmt: skip

    return run


WAYS: dict[str, Way] = {
    "mlx-lm compiled": mlx_lm_steps(compiled=True),
    "mlx-lm eager": mlx_lm_steps(compiled=False),
    "ours": our_steps(checkpointed=False),
    "ours checkpointed": our_steps(checkpointed=True),
    "ours compiled": our_steps(checkpointed=False, compiled=True),
}


# --- comparing ------------------------------------------------------------------------------------


def _adam() -> optim.Optimizer:
    return optim.AdamW(
        learning_rate=RATE, betas=[0.9, 0.999], weight_decay=0.0, bias_correction=True
    )


def compare(length: int) -> dict[str, float]:
    """Differences of the trainer core from mlx-lm's loop, in two steps at the loop's weights."""
    from mlx_lm.tuner.trainer import default_loss

    model, optimizer, found = make_model(), _adam(), {}
    batch, lengths = mx.array(tokens_of(length)), mx.array([[0, length + 1]])
    for number in (1, 2):
        (loss, _), gradients = nn.value_and_grad(model, default_loss)(model, batch, lengths)
        mx.eval(loss, gradients)
        expected = dict(tree_flatten(gradients))
        for name, made in _our_gradients(model, length).items():
            errors = [
                (
                    mx.linalg.norm((g - expected[k]).flatten())
                    / mx.linalg.norm(expected[k].flatten())
                )
                for k, g in tree_flatten(made.gradients)
            ]
            found[f"step {number}, {name}: loss"] = abs(made.loss.item() - loss.item())
            found[f"step {number}, {name}: gradient"] = max(error.item() for error in errors)
        optimizer.update(model, gradients)
    return found


def _our_gradients(model: nn.Module, length: int) -> dict[str, StepGradients]:
    with base_model.gated_delta_installed():
        set_training_modes(model)
        step = GradientStep(model, cross_entropy_loss())
        plain = step([batch_of(length)], seed=0, step=0)
        with checkpoint_layers(model):
            checkpointed = step([batch_of(length)], seed=0, step=0)
    return {"ours": plain, "ours checkpointed": checkpointed}


def measure(way: str, length: int) -> dict[str, float]:
    """In this process: the second of two steps."""
    model = make_model()
    laps = [(time.perf_counter(), time.process_time(), 0.0, 0.0)]
    held = [mx.get_active_memory()]

    def lap(loss: float) -> None:
        peak = mx.get_peak_memory() - held[0]
        laps.append((time.perf_counter(), time.process_time(), peak, loss))
        held[0] = mx.get_active_memory()
        mx.reset_peak_memory()

    WAYS[way](model, length, lap)
    (start, _, _, _), (first, cpu, _, first_loss), (second, cpu_after, peak, loss) = laps
    return {
        "cpu_seconds": cpu_after - cpu,
        "wall_seconds": second - first,
        "first_step_seconds": first - start,
        "peak_bytes": peak,
        "first_loss": first_loss,
        "loss": loss,
    }


def measure_apart(way: str, length: int) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_train", "--one", way, "--tokens"]
    done = subprocess.run(
        [*command, str(length)], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_rounds(ways: Sequence[str], rounds: int, length: int) -> dict[str, list[dict[str, float]]]:
    costs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for index in range(rounds):
        turn = index % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            costs[way].append(measure_apart(way, length))
            cost = costs[way][-1]
            print(
                f"round {index + 1}/{rounds} {way}: cpu {cost['cpu_seconds']:.2f} s, wall "
                f"{cost['wall_seconds']:.2f} s, {cost['peak_bytes'] / 1e6:.0f} MB",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return costs


def summary(costs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Medians, and how many times mlx-lm's figures are ours, pair by pair."""
    table: dict[str, dict[str, Any]] = {}
    for way, runs in costs.items():
        row: dict[str, Any] = {
            "cpu_seconds": vars(spread([run["cpu_seconds"] for run in runs])),
            "wall_seconds": vars(spread([run["wall_seconds"] for run in runs])),
            "first_step_seconds": spread([run["first_step_seconds"] for run in runs]).median,
            "peak_bytes": int(max(run["peak_bytes"] for run in runs)),
            "loss": runs[-1]["loss"],
        }
        for anchor in ("compiled", "eager"):
            theirs = costs.get(f"mlx-lm {anchor}", [])
            pairs = list(zip(theirs, runs, strict=False))
            for what in ("cpu", "wall"):
                ratios = [a[f"{what}_seconds"] / b[f"{what}_seconds"] for a, b in pairs]
                if ratios:
                    row[f"{anchor}_over_{what}"] = vars(spread(ratios))
        anchors = [c["peak_bytes"] for w, cs in costs.items() if w.startswith("mlx") for c in cs]
        row["mlx_lm_over_bytes"] = min(anchors) / row["peak_bytes"] if anchors else None
        table[way] = row
    return table


def show(table: dict[str, dict[str, Any]]) -> None:
    print("\n| step | cpu s (p20 to p80) | wall s | first step s | compiled / it | eager / it | MB "
          "| mlx-lm's least MB / it | loss |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for way, row in table.items():
        cpu = row["cpu_seconds"]
        ratios = [
            f"{row[key]['median']:.1f}" if (key := f"{anchor}_over_cpu") in row else "-"
            for anchor in ("compiled", "eager")
        ]
        print(
            f"| {way} | {cpu['median']:.2f} ({cpu['p20']:.2f} to {cpu['p80']:.2f}) "
            f"| {row['wall_seconds']['median']:.2f} | {row['first_step_seconds']:.1f} "
            f"| {ratios[0]} | {ratios[1]} | {row['peak_bytes'] / 1e6:.0f} "
            f"| {row['mlx_lm_over_bytes'] or 0:.1f} | {row['loss']:.6f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--without", nargs="*", default=[], choices=list(WAYS))
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.one:
        print(json.dumps(measure(settings.one, settings.tokens)))
        return
    errors = compare(settings.tokens)
    for name, error in errors.items():
        limit = LOSS_TOLERANCE if name.endswith("loss") else GRADIENT_TOLERANCE
        print(f"{name} differs by {error:.1e}, allowed {limit:.0e}")
        if not error <= limit:
            sys.exit("the steps do not agree: nothing is timed")
    ways = [way for way in WAYS if way not in settings.without]
    costs = run_rounds(ways, settings.rounds, settings.tokens)
    first = [cost["first_loss"] for runs in costs.values() for cost in runs]
    if max(first) - min(first) > LOSS_TOLERANCE:
        sys.exit(f"the timed runs differ in their first loss: {sorted(set(first))}")
    table = summary(costs)
    show(table)
    document = {
        "benchmark": "train", "machine": machine(), "tokens": settings.tokens, "errors": errors,
        "bars": BARS, "result": table,
    }  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
