"""DPO, ORPO or GRPO of a LoRA: `mlx_lm_lora.train` beside `mlxstacks align`.

    pip install --no-deps mlx-lm-lora
    python -m mlx_lm convert --hf-path $REAL/dense --mlx-path model -d --dtype float32
    python -m benchmarks.preference_pairs gsm8k_test.jsonl pairs
    python -m benchmarks.bench_align model pairs [--method orpo|grpo] [--at-once 1] [--rounds 3]
        [--grad-checkpoint]

Both adapt the same projections of the last layers with rank 8 by AdamW, 4 pairs a step, answers cut
at 256 tokens. Each process trains on a few pairs and on many, and they take turns: a pair is what
many cost more, divided by their number; loading, validation and saving cancel out. CPU time,
because on a busy machine it says more than the clock. Memory is the peak of the longer process. The
last line of output is one JSON object.

GRPO has a prompt of the pairs a step and samples 8 answers of at most 64 tokens, which reach that
limit almost always; the reward is the share of an answer that is digits.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.timing import Cost, Spread, alternate, machine, run_process, spread

PEER, OWN = "mlx_lm_lora.train", "mlxstacks align"
FEW, MANY, STEP = 8, 40, 4  # pairs
FEW_PROMPTS, MANY_PROMPTS = 2, 8
ANSWERS, TOKENS = 8, 64  # to each prompt
_REWARD = "sum(letter.isdigit() for letter in answer) / max(1, len(answer))"
# It asks the device for what only Metal tells.
_PEER_MAIN = """
import mlx.core as mx
if not mx.metal.is_available():
    info = mx.device_info
    mx.device_info = lambda: {"max_recommended_working_set_size": 0, **info()}
    mx.set_wired_limit = lambda limit: 0
from mlx_lm_lora.train import main
main()
"""


def commands(options: argparse.Namespace, work: Path) -> dict[str, list[str]]:
    config = work / "lora.yaml"
    config.write_text(
        "optimizer: adamw\noptimizer_config: {adamw: {betas: [0.9, 0.999], weight_decay: 0.0}}\n"
        "lora_parameters: {rank: 8, dropout: 0.0, scale: 20.0}\n"
    )
    is_grpo = options.method == "grpo"
    data = write_prompts(options.pairs, work / "prompts") if is_grpo else options.pairs
    shared = [
        "--model", str(options.model), "--data", str(data),
        "--batch-size", str(options.at_once),
        "--num-layers", str(options.num_layers), "--max-seq-length", "256", "--val-batches", "1",
        "--learning-rate", "1e-5", "--beta", "0.1",
        *(["--grad-checkpoint"] if options.grad_checkpoint else []),
    ]  # fmt: skip
    accumulated = str(1 if is_grpo else STEP // options.at_once)
    peer = [
        "-c", _PEER_MAIN, "--train", "--train-mode", options.method, "--config", str(config),
        "--gradient-accumulation-steps", accumulated,
    ]  # fmt: skip
    own = [
        "-m", "mlxstacks", "align", "--method", options.method, "--force", "--no-resume",
        "--grad-accumulation-steps", accumulated,
    ]  # fmt: skip
    if is_grpo:
        rewards = work / "rewards.py"
        rewards.write_text(
            f"def digits(answer, row):\n    return {_REWARD}\n\n"
            "try:\n    from mlx_lm_lora.trainer.grpo_reward_functions import "
            "register_reward_function\n\n    @register_reward_function()\n"
            "    def share_of_digits(prompts, completions, answer, types=None):\n"
            "        return [digits(one, None) for one in completions]\n"
            "except ImportError:\n    pass\n"
        )
        shared += ["--group-size", str(ANSWERS)]
        peer += [
            "--max-completion-length", str(TOKENS), "--temperature", "1.0", "--reward-functions",
            "share_of_digits", "--reward-functions-file", str(rewards),
        ]  # fmt: skip
        own += ["--max-tokens", str(TOKENS), "--reward", f"{rewards}:digits"]
    return {
        PEER: [*peer, *shared, "--adapter-path", str(work / "theirs")],
        OWN: [*own, *shared, "--save-path", str(work / "ours")],
    }


def write_prompts(pairs: Path, directory: Path) -> Path:
    directory.mkdir()
    for name in ("train.jsonl", "valid.jsonl"):
        rows = map(json.loads, (pairs / name).read_text(encoding="utf-8").splitlines())
        lines = [json.dumps({"prompt": row["prompt"], "answer": row["chosen"]}) for row in rows]
        (directory / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """CPU seconds of a pair, or a prompt, and peak bytes, with ratios to the peer's of the same
    round.
    """
    is_grpo = options.method == "grpo"
    few, many = (FEW_PROMPTS, MANY_PROMPTS) if is_grpo else (FEW, MANY)

    def process(command: list[str], pairs: int) -> Cost:
        iters = pairs // options.at_once
        return run_process([sys.executable, *command, "--iters", str(iters)])

    runs = {
        f"{name}, {count} rows": partial(process, command, count)
        for name, command in commands(options, work).items()
        for count in (few, many)
    }
    costs = alternate(runs, options.rounds, lambda line: print(line, flush=True))

    def seconds_of(name: str) -> list[float]:
        shorter, longer = (costs[f"{name}, {count} rows"] for count in (few, many))
        return [
            (long.cpu_seconds - short.cpu_seconds) / (many - few)
            for short, long in zip(shorter, longer, strict=True)
        ]

    def peaks_of(name: str) -> list[float]:
        return [cost.peak_bytes for cost in costs[f"{name}, {many} rows"]]

    def ratio(own: list[float], peer: list[float]) -> Spread:
        return spread([x / y for x, y in zip(own, peer, strict=True)])

    return {
        name: {
            "cpu_seconds": spread(seconds_of(name)).__dict__,
            "time_ratio": ratio(seconds_of(name), seconds_of(PEER)).__dict__,
            "peak_bytes": max(peaks_of(name)),
            "memory_ratio": ratio(peaks_of(name), peaks_of(PEER)).__dict__,
        }
        for name in (PEER, OWN)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="unquantized, so that both compute the same")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--method", choices=["dpo", "orpo", "grpo"], default="dpo")
    parser.add_argument("--at-once", type=int, choices=[1, 2, 4], help="pairs; default 4, or 1")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--grad-checkpoint", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.at_once = options.at_once or (1 if options.method == "grpo" else 4)
    with tempfile.TemporaryDirectory() as work:
        result = measure(options, Path(work))
    print(
        "| process | CPU s a pair or prompt (p20 to p80) | ratio (p20 to p80) | peak MB | ratio |"
    )
    print("|---|---|---|---|---|")
    for name, row in result.items():
        seconds, ratio = row["cpu_seconds"], row["time_ratio"]
        print(f"| {name} | {seconds['median']:.2f} ({seconds['p20']:.2f} to {seconds['p80']:.2f}) "
              f"| {ratio['median']:.2f} ({ratio['p20']:.2f} to {ratio['p80']:.2f}) "
              f"| {row['peak_bytes'] / 1e6:.0f} "
              f"| {row['memory_ratio']['median']:.2f} |")  # fmt: skip
    print(json.dumps({"benchmark": "align", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()
