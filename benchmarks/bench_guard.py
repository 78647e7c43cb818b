"""`mlxstacks guard` on Qwen3.5-35B-A3B: its figures beside the published ones, time and memory.

    python -m benchmarks.bench_guard [--quick]

Buffers are counts, so nothing is timed but the last part: the whole command as a user types it.
The published figures are predictions too, made with a prototype: the same rules, row lengths of 64
and 128, and a chunked recurrence of its own.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from benchmarks.timing import machine, run_process
from mlxstacks.guard.build import lazy_model
from mlxstacks.guard.run import predict_training
from mlxstacks.guard.settings import CheckpointingName, GuardSettings, RecurrenceName

LENGTHS = (512, 1024, 2048)
THREE, ALL = "8,14,20", "all"
# A published cell and its own differ by no more, or the row says why.
WITHIN = 0.05

# The public architecture of Qwen3.5-35B-A3B, at 3 bits.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "full_attention_interval": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
    },
    "quantization": {"group_size": 64, "bits": 3, "mode": "affine"},
}
CHUNKS = "another chunked recurrence: segments of 512, each computed again in the backward pass"
ROUNDED = "published in thousands, or in whole GB"
STAND_IN = (
    "bytes: the prototype had them from a stand-in (custom functions cannot be exported); here "
    "they are of the true graph"
)


@dataclass(frozen=True)
class Row:
    """One variant with its published cells (None: not published) at LENGTHS."""

    layers: str
    checkpointing: CheckpointingName
    recurrence: RecurrenceName = "loop"
    compile: bool = False
    buffers: tuple[float | None, ...] = (None, None, None)
    growth_gb: tuple[float | None, ...] = (None, None, None)
    why: str = ""

    @property
    def name(self) -> str:
        kind = {"none": "", "mlx": ", mlx checkpoint", "layers": ", own checkpoint"}
        where = "{8,14,20}" if self.layers == THREE else "all layers"
        compiled = ", compiled" if self.compile else ""
        return f"{where}, {self.recurrence}{kind[self.checkpointing]}{compiled}"


ROWS = (
    Row(THREE, "none", buffers=(158073, 312185, 620409), growth_gb=(56, 112, 224)),
    Row(THREE, "mlx", buffers=(89914, 176954, 351034), growth_gb=(21, 41, 82), why=STAND_IN),
    Row(THREE, "layers", buffers=(66974, 130974, 258974), growth_gb=(5, 10, 20), why=STAND_IN),
    Row(ALL, "none", buffers=(199499, 393e3, 782e3), growth_gb=(70, 141, 281), why=ROUNDED),
    Row(ALL, "mlx", buffers=(93e3, 181e3, 358e3), growth_gb=(9, 18, 36), why=STAND_IN),
    Row(ALL, "layers", buffers=(83e3, 163e3, 322e3), growth_gb=(4.7, 9.3, 18.6), why=STAND_IN),
    Row(THREE, "none", compile=True, buffers=(87e3, 171e3, 339e3), why=ROUNDED),
    Row(THREE, "mlx", compile=True, buffers=(37e3, 71e3, 141e3), why=ROUNDED),
    Row(THREE, "layers", compile=True, buffers=(7e3, 12e3, 22e3), why=ROUNDED),
    Row(THREE, "none", "chunked", buffers=(9.3e3, 13.7e3, 22.5e3),
        growth_gb=(14.4, 25.8, None), why=CHUNKS),
    Row(THREE, "layers", "chunked", buffers=(9.8e3, 15.7e3, 27.5e3),
        growth_gb=(5.7, None, 12.5), why=CHUNKS),
    Row(ALL, "none", "chunked", buffers=(12.1e3, 17.6e3, 28.7e3), why=CHUNKS),
)  # fmt: skip


def predicted(row: Row) -> Iterator[tuple[int, int, int | None]]:
    """(tokens, buffers, bytes over the weights) at LENGTHS; what is linear is simulated once."""
    settings = GuardSettings(
        max_seq_length=max(LENGTHS), rank=2, layers=row.layers, keys=("switch_mlp.down_proj",),
        checkpointing=row.checkpointing, recurrence=row.recurrence, compile=row.compile,
        loss="whole", optimizer="adam", adapter_copies=0,
    )  # fmt: skip
    model = lazy_model(CONFIG)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    found = predict_training(CONFIG, settings)
    for tokens in LENGTHS:
        at = found
        if not found.extrapolated and tokens != found.tokens:
            at = predict_training(CONFIG, settings.model_copy(update={"max_seq_length": tokens}))
        nbytes = at.bytes_at(tokens)
        yield tokens, at.buffers_at(tokens), None if nbytes is None else nbytes - weights


@dataclass(frozen=True)
class Cell:
    """One row length of a variant; growth in bytes is over the weights."""

    tokens: int
    buffers: int
    growth_gb: float | None
    published_buffers: float | None
    published_growth_gb: float | None

    def __str__(self) -> str:
        text = f"  T={self.tokens:<5} {_beside(self.buffers, self.published_buffers, ',.0f')}"
        if self.growth_gb is not None:
            text += f"   {_beside(self.growth_gb, self.published_growth_gb, '.1f')} GB"
        return text


def _beside(value: float, published: float | None, form: str) -> str:
    if published is None:
        return f"{value:{form}} (-)"
    return f"{value:{form}} ({published:{form}}, {value / published - 1:+.1%})"


def compare(row: Row) -> dict[str, Any]:
    """Print a row beside what was published; the figures for the last line."""
    cells = [
        Cell(tokens, buffers, None if grown is None else grown / 1e9, count, growth)
        for (tokens, buffers, grown), count, growth in zip(
            predicted(row), row.buffers, row.growth_gb, strict=True
        )
    ]
    print(row.name)
    for cell in cells:
        print(cell)
    counts = [abs(c.buffers / c.published_buffers - 1) for c in cells if c.published_buffers]
    grown = [
        abs(c.growth_gb / c.published_growth_gb - 1)
        for c in cells
        if c.growth_gb and c.published_growth_gb
    ]
    if max(counts + grown, default=0.0) > WITHIN:
        print(f"  more than {WITHIN:.0%} off: {row.why or 'NOT EXPLAINED'}")
    return {"variant": row.name, "why": row.why, "cells": [asdict(cell) for cell in cells]}


def whole_command(rounds: int) -> dict[str, Any]:
    """Seconds and memory of the command, start-up and the search for a change included."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(CONFIG))
        costs = {}
        for extra in ([], ["--checkpointing", "layers"], ["--recurrence", "chunked"]):
            command = [
                sys.executable, "-m", "mlxstacks", "guard", "--model", str(path), "--layers",
                THREE, "--keys", "switch_mlp.down_proj", "--rank", "2", "--force", *extra,
            ]  # fmt: skip
            runs = [run_process(command) for _ in range(rounds)]
            best = min(runs, key=lambda cost: cost.wall_seconds)
            name = " ".join(extra) or "defaults"
            costs[name] = {"wall_seconds": best.wall_seconds, "cpu_seconds": best.cpu_seconds,
                           "peak_bytes": best.peak_bytes}  # fmt: skip
            print(f"guard, {name}: {best.wall_seconds:.1f} s ({best.cpu_seconds:.1f} s of CPU), "
                  f"{best.peak_bytes / 1e6:.0f} MB at the peak")  # fmt: skip
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three variants, one round")
    options = parser.parse_args()
    costs = whole_command(1 if options.quick else 3)
    started = time.perf_counter()
    print("buffers (published, difference)   growth in bytes over the weights (published)")
    rows = [compare(row) for row in (ROWS[:3] if options.quick else ROWS)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"table: {time.perf_counter() - started:.0f} s, {peak / 1e3:.0f} MB")
    print(json.dumps({"machine": machine(), "command": costs, "rows": rows}))


if __name__ == "__main__":
    main()
