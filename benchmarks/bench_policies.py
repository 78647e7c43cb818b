"""Requantization on one core: MLX's ops on the CPU device beside `ops.policies`, same weights.

    python -m benchmarks.bench_policies [--rounds 7]        (0: no speeds, only what changes)

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
from mlxstacks.fuse.blocks import Decision, StageInput, run_stages
from mlxstacks.fuse.fidelity import Fidelity, Sums, fidelity
from mlxstacks.ops import affine, float_grids
from mlxstacks.ops.affine import pack, round_to, unpack
from mlxstacks.ops.float_grids import MODES, FloatGroups
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


def fused_modes(
    policies: dict[str, int | None], size: float = 0.1
) -> dict[str, dict[str, Fidelity]]:
    """Gaussian weights at 4 bits and in each of MLX's other modes, a delta of `size` mean steps:
    figures by mode and policy. policies: name -> bits afterwards; None: as before.
    """
    random = np.random.default_rng(0)
    weight = random.standard_normal((ROWS, WIDTH)).astype(np.float32) * np.float32(0.02)
    round_to(weight, "BF16")
    noise = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    found: dict[str, dict[str, Fidelity]] = {}
    groups: Groups | FloatGroups
    for name in ("affine, 4 bits", *MODES):
        if name in MODES:
            mode = MODES[name]
            made = float_grids.quantize(weight.reshape(-1, mode.group_size), mode)
            groups = floats = FloatGroups(*made, mode, "BF16")
            step = float(floats.steps().mean())
        else:
            groups = Groups(*affine.quantize(weight.reshape(-1, 64), 4, "BF16"), 4, "BF16")
            step = float(np.abs(groups.scales).mean())
        delta = (noise * np.float32(size * step)).reshape(groups.codes.shape)
        found[name] = {}
        for policy, bits in policies.items():
            stage = Decision(policy, bits or groups.bits), delta, None, np.random.default_rng(1)
            found[name][policy] = fidelity(sum(run_stages(groups, [StageInput(*stage)])[1], Sums()))
    return found


def print_modes() -> None:
    policies: dict[str, int | None] = {
        "refit": None,
        "keep": None,
        "nearest": None,
        "stochastic": None,
        "promote": 8,
    }
    found = fused_modes(policies)
    print("| mode | values changed by a refit of zeros |", " | ".join(policies), "(8 bits) |")
    print("|---|---|" + "---|" * len(policies))
    for mode, by_policy in found.items():
        cells = [f"{f.correlation:.2f}, {100 * (f.survival or 0):.0f}%" for f in by_policy.values()]
        changed = 100 * (by_policy["refit"].codes_changed_at_zero or 0)
        print(f"| {mode} | {changed:.2f}% | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    mx.set_default_device(mx.cpu)
    print_modes()
    result = {bits: compare(bits, rounds) for bits in (3, 4)} if rounds else {}
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
