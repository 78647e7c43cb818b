"""Requantization on one core: MLX's ops on the CPU device beside `ops.policies`, same weights.

    python -m benchmarks.bench_policies [--rounds 7]

Four million Gaussian weights, group 64, bf16 scales, a delta of a tenth of a step. The peer is the
composition that `mlx_lm.fuse` evaluates: mx.dequantize, add, mx.quantize. `refit` has to give its
bits exactly, and is checked before it is timed.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from benchmarks.timing import machine, spread
from mlxstacks.ops.affine import pack, round_to, unpack
from mlxstacks.ops.policies import Change, Groups, requantize

ROWS, WIDTH, GROUP_SIZE, AT_ONCE = 4096, 1024, 64, 2048


def mlx_refit(packed: mx.array, scales: mx.array, biases: mx.array, delta: mx.array, bits: int):
    """The peer's composition, evaluated."""
    weight = mx.dequantize(packed, scales, biases, GROUP_SIZE, bits)
    made = mx.quantize(weight + delta.astype(weight.dtype), GROUP_SIZE, bits)
    mx.eval(made)
    return made


def our_policy(
    packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, delta: np.ndarray, bits: int,
    policy: str, to_bits: int,
) -> np.ndarray:  # fmt: skip
    """Packed codes to packed codes, a block of groups at a time, as a fuse does it."""
    rows = AT_ONCE * GROUP_SIZE // WIDTH
    out = []
    for first in range(0, ROWS, rows):
        part = slice(first, first + rows)
        codes = unpack(packed[part], bits).reshape(-1, GROUP_SIZE)
        groups = Groups(codes, scales[part].ravel(), biases[part].ravel(), bits, "BF16")
        change = Change(delta[part].reshape(-1, GROUP_SIZE), bits=to_bits)
        out.append(pack(requantize(groups, change, policy).codes.reshape(rows, WIDTH), to_bits))
    return np.concatenate(out)


def million_weights_per_second(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median, p20 and p80 over the rounds, after one that does not count."""
    work()
    speeds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        speeds.append(ROWS * WIDTH / 1e6 / (time.perf_counter() - started))
    return spread(speeds).__dict__


def changed_at_zero_delta(bits: int) -> dict[str, float]:
    """Share of Gaussian weights whose value MLX's own round trip changes, and by our policies."""
    random = np.random.default_rng(0)
    weight = mx.array(random.standard_normal((ROWS, WIDTH)).astype(np.float32) * 0.02)
    packed = mx.quantize(weight.astype(mx.bfloat16), GROUP_SIZE, bits)
    before = mx.dequantize(*packed, GROUP_SIZE, bits)
    again = mx.dequantize(*mx.quantize(before, GROUP_SIZE, bits), GROUP_SIZE, bits)
    codes = unpack(np.array(packed[0]), bits).reshape(-1, GROUP_SIZE)
    scales, biases = (np.array(x.astype(mx.float32)).ravel() for x in packed[1:])
    groups = Groups(codes, scales, biases, bits, "BF16")
    zeros = np.zeros(codes.shape, dtype=np.float32)
    shares = {"MLX": float((before != again).astype(mx.float32).mean())}
    for policy in ("keep", "nearest", "promote"):
        change = Change(zeros, bits=8 if policy == "promote" else None)
        fused = requantize(groups, change, policy).values()
        shares[policy] = float((fused != groups.values()).mean())
    return shares


def compare(bits: int, rounds: int) -> dict[str, dict[str, float]]:
    """Speeds by name at one width."""
    random = np.random.default_rng(0)
    weight = mx.array(random.standard_normal((ROWS, WIDTH)).astype(np.float32) * 0.02)
    packed, scales, biases = mx.quantize(weight.astype(mx.bfloat16), GROUP_SIZE, bits)
    wide_scales, wide_biases = (np.array(x.astype(mx.float32)) for x in (scales, biases))
    step = float(np.abs(wide_scales).mean())
    delta = random.standard_normal((ROWS, WIDTH)).astype(np.float32) * np.float32(0.1 * step)
    round_to(delta, "BF16")
    stored = np.array(packed)
    peer = partial(mlx_refit, packed, scales, biases, mx.array(delta), bits)
    policies = {"refit": bits, "keep": bits, "nearest": bits, "promote": 8}
    ours = {
        p: partial(our_policy, stored, wide_scales, wide_biases, delta, bits, p, to)
        for p, to in policies.items()
    }
    np.testing.assert_array_equal(ours["refit"](), np.array(peer()[0]))
    return {
        name: million_weights_per_second(work, rounds)
        for name, work in {"MLX ops": peer, **ours}.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    mx.set_default_device(mx.cpu)
    result = {bits: compare(bits, rounds) for bits in (3, 4)}
    print("| bits | code | M weights/s (p20 to p80) | ratio to MLX ops |\n|---|---|---|---|")
    for bits, rows in result.items():
        for name, speed in rows.items():
            ratio = speed["median"] / rows["MLX ops"]["median"]
            print(f"| {bits} | {name} | {speed['median']:.0f} ({speed['p20']:.0f} to "
                  f"{speed['p80']:.0f}) | {ratio:.1f} |")  # fmt: skip
    print("| bits | values changed at zero delta: MLX | keep | nearest | promote |")
    print("|---|---|---|---|---|")
    for bits in (2, 3, 4, 5, 6):
        shares = changed_at_zero_delta(bits)
        print(
            f"| {bits} | " + " | ".join(f"{100 * share:.2f}%" for share in shares.values()) + " |"
        )
    print(json.dumps({"benchmark": "policies", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()
