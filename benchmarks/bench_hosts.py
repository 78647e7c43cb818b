"""Tokens a second of `guard --hosts`, checked against two processes of this machine.

    python -m benchmarks.bench_hosts [--tokens 24] [--repeats 5]

Random Llamas of several sizes, float32, an adapter of rank 8 on the guard's usual projections,
write tokens in one process and split over two that MLX's ring joins. What the guard assumes is
measured here: weights read a second, by what the largest costs more than the smallest, in two
processes at once, for they share this machine's memory; the time of a message, by sums of one
number with a product between them; the speed of the link, by sums of 8 MB. From these the guard's
formula gives two processes, without and with the time of one as `tokens_per_second`, and the table
has what they did. Last line: JSON. Two idle cores are needed, and OpenBLAS with one thread, so that
each process has one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from benchmarks.bench_serve import free_port
from benchmarks.timing import machine
from mlxstacks import base_model
from mlxstacks.guard.build import adapted_model
from mlxstacks.guard.hosts import plan_hosts
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.sharded import shard
from mlxstacks.processes import current_group

WIDTHS, LAYERS = (256, 512, 1024, 2048), 8
LARGE = 2_000_000  # numbers in a sum by which the link is timed


@dataclass(frozen=True)
class Times:
    """Seconds, medians: of a token, of a sum of one number, of a sum of LARGE."""

    token: float
    small_sum: float
    large_sum: float


def config_of(width: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": LAYERS,
        "intermediate_size": 3 * width, "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128, "rms_norm_eps": 1e-5, "vocab_size": 8192,
        "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip


def settings_of(config: Path, **assumed: float) -> GuardSettings:
    return GuardSettings.model_validate({"model": str(config), "hosts": 2} | assumed)


def seconds(work: Callable[[], mx.array], repeats: int) -> float:
    """Median; each time begins when all processes have ended the last."""
    took = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        mx.eval(work())
        if number:  # the first warms up
            took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(config: Path, tokens: int, repeats: int) -> Times:
    """In this process, with those that it is joined to."""
    group = current_group()
    model, _ = adapted_model(json.loads(config.read_text()), settings_of(config))
    model.eval()
    mx.random.seed(0)
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.02, model.parameters()))
    mx.eval(model.parameters())
    if group is not None:
        shard(model, group)
        mx.eval(model.parameters())

    def write() -> mx.array:
        cache, token = base_model.make_prompt_cache(model), mx.zeros((1, 1), mx.int32)
        for _ in range(tokens):
            token = mx.argmax(model(token, cache=cache), axis=-1)
            mx.eval(token)
        return token

    def sums(numbers: int, count: int) -> Callable[[], mx.array]:
        def work() -> mx.array:
            x = mx.zeros(numbers)
            for _ in range(count):  # with a step of MLX's other thread between them, as layers have
                x = mx.distributed.all_sum(x, group=group) * 0.5
            return x

        return work

    return Times(
        seconds(write, repeats) / tokens,
        seconds(sums(1, 1000), repeats) / 1000,
        seconds(sums(LARGE, 4), repeats) / 4,
    )


def measured(config: Path, options: argparse.Namespace, *, joined: bool) -> Times:
    """Of the first of two processes. They are started here: `mlx.launch` looks at its processes
    without a rest, which takes a core.
    """
    words = ["--worker", str(config), f"--tokens={options.tokens}", f"--repeats={options.repeats}"]
    command = [sys.executable, "-m", "benchmarks.bench_hosts", *words]
    hosts = config.with_suffix(".hosts")
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    group = {"MLX_HOSTFILE": str(hosts)} if joined else {}
    first, second = (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True,
            env=os.environ | group | ({"MLX_RANK": str(rank)} if joined else {}),
        )
        for rank in range(2)
    )  # fmt: skip
    printed, _ = first.communicate()
    codes = [process.wait() for process in (first, second)]
    if any(codes):
        raise RuntimeError(f"{' '.join(command)} failed")
    return Times(**json.loads(printed))


def compare(options: argparse.Namespace, place: Path) -> Iterator[dict[str, Any]]:
    configs = {width: place / f"{width}.json" for width in WIDTHS}
    for width, config in configs.items():
        config.write_text(json.dumps(config_of(width)))
    alone = {width: measured(configs[width], options, joined=False) for width in WIDTHS}
    read = {
        width: plan_hosts(config_of(width), settings_of(config))[0].read_bytes
        for width, config in configs.items()
    }
    small, large = WIDTHS[0], WIDTHS[-1]
    rate = (read[large] - read[small]) / (alone[large].token - alone[small].token)
    for width, config in configs.items():
        split = measured(config, options, joined=True)
        assumed = {
            "memory_gbps": rate / 1e9, "link_latency_us": split.small_sum / 2 * 1e6,
            # each sends half of the numbers twice
            "link_gbps": 8 * 4 * LARGE / (split.large_sum - split.small_sum) / 1e9,
        }  # fmt: skip
        _, free = plan_hosts(config_of(width), settings_of(config, **assumed))
        _, whole = plan_hosts(
            config_of(width),
            settings_of(config, tokens_per_second=1 / alone[width].token, **assumed),
        )
        yield {
            "width": width, "read_bytes": read[width], "messages": free.messages, **assumed,
            "alone": 1 / alone[width].token, "computing_free": free.ring_tokens_per_second,
            "predicted": whole.ring_tokens_per_second, "measured": 1 / split.token,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(asdict(measure(options.worker, options.tokens, options.repeats))))
        return
    with tempfile.TemporaryDirectory() as place:
        rows = list(compare(options, Path(place)))
    print("| width | read a token, MB | messages | tokens/s in one process | two, computing free "
          "| two, by `tokens_per_second` | two, measured | ratio |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['width']} | {row['read_bytes'] / 1e6:.0f} | {row['messages']} "
              f"| {row['alone']:.1f} | {row['computing_free']:.1f} | {row['predicted']:.1f} "
              f"| {row['measured']:.1f} | {row['measured'] / row['predicted']:.2f} |")  # fmt: skip
    print(json.dumps({"benchmark": "hosts", "machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
