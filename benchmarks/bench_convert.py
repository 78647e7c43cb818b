"""Quantize a hub checkpoint of 1 GB to 4 bits: `mlx_lm.convert` beside `mlxstacks convert`.

    python -m benchmarks.bench_convert [--rounds 3]        whole processes, taking turns

The checkpoint is a `qwen3_5_moe` in the hub's layout: 5 layers, hidden 1024, 64 experts of width
512, bfloat16, four shards; its largest tensor has 134 MB. Tensors that both write are compared
first. The last line of output is one JSON object.
"""

import argparse
import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.timing import Cost, alternate, machine, run_process, spread
from tests.convert.hub_cases import CASES, write_hub_model
from tests.tiny_models import qwen_moe_config

PEER, OWN = "mlx_lm.convert", "mlxstacks convert"


def big_config() -> dict[str, Any]:
    """The benchmark's architecture, with the keys of the tiny one."""
    config = qwen_moe_config(hidden_size=1024, num_experts=64, moe_intermediate_size=512)
    config["text_config"] |= {"num_hidden_layers": 5, "vocab_size": 32000, "num_experts_per_tok": 8}
    return config


def measure(work: Path, rounds: int) -> dict[str, Any]:
    """Wall time and peak memory of both, with ratios to mlx_lm.convert of the same round."""
    CASES["big"] = (big_config(), *CASES["qwen3_5_moe"][1:])
    model, _ = write_hub_model(work / "model", "big", shards=4)
    targets = {PEER: work / "theirs", OWN: work / "ours"}
    commands = {
        PEER: ["mlx_lm", "convert", "--hf-path", str(model), "-q", "--mlx-path"],
        OWN: ["mlxstacks", "convert", str(model), "--bits", "4", "--save-path"],
    }

    def process(name: str) -> Cost:
        shutil.rmtree(targets[name], ignore_errors=True)
        return run_process([sys.executable, "-m", *commands[name], str(targets[name])])

    for name in commands:  # no speed without equality; the files are in the page cache then
        process(name)
    check_same_tensors(*targets.values())
    runs = {name: partial(process, name) for name in commands}
    costs = alternate(runs, rounds, lambda line: print(line, flush=True))
    return {
        "model_bytes": sum(f.stat().st_size for f in model.glob("*.safetensors")),
        "rows": {name: _row(costs, name) for name in commands},
    }


def check_same_tensors(theirs: Path, ours: Path) -> None:
    """Raises AssertionError where the models differ in a byte."""
    expected, converted = (mx.load(str(path / "model.safetensors")) for path in (theirs, ours))
    assert expected.keys() == converted.keys()
    for name, array in expected.items():
        assert mx.array_equal(array.view(mx.uint8), converted[name].view(mx.uint8)), name


def _row(costs: dict[str, list[Cost]], name: str) -> dict[str, Any]:
    pairs = list(zip(costs[name], costs[PEER], strict=True))
    return {
        "wall_seconds": spread([own.wall_seconds for own, _ in pairs]).__dict__,
        "cpu_seconds": spread([own.cpu_seconds for own, _ in pairs]).__dict__,
        "time_ratio": spread(
            [own.wall_seconds / peer.wall_seconds for own, peer in pairs]
        ).__dict__,
        "peak_bytes": max(own.peak_bytes for own, _ in pairs),
        "memory_ratio": spread([own.peak_bytes / peer.peak_bytes for own, peer in pairs]).__dict__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        result = measure(Path(work), options.rounds)
    print("| process | wall s (p20 to p80) | ratio | CPU s | peak MB | ratio |")
    print("|---|---|---|---|---|---|")
    for name, row in result["rows"].items():
        wall, ratio, memory = row["wall_seconds"], row["time_ratio"], row["memory_ratio"]
        print(f"| {name} | {wall['median']:.2f} ({wall['p20']:.2f} to {wall['p80']:.2f}) "
              f"| {ratio['median']:.3f} | {row['cpu_seconds']['median']:.1f} "
              f"| {row['peak_bytes'] / 1e6:.0f} "
              f"| {memory['median']:.3f} |")  # fmt: skip
    print(json.dumps({"benchmark": "convert", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()
