"""The models of the arms: a trained adapter's controls, and what a policy fuses of all three.

A trained adapter (a1), its zero-delta control (a0), a random delta of equal norm and an adapter
that was trained on shuffled answers go through the same code with the trained one's own decisions,
so that nothing but the delta differs between them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.files.adapters import read_adapter, write_adapter, zero_adapter
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.lora_modules import Adapter, LoraModule, widened
from mlxstacks.files.shards import read_tensor
from mlxstacks.files.stored_weight import stored_weight
from mlxstacks.fuse.report import FuseReport
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.ops.affine import unpack

# --- adapters -------------------------------------------------------------------------------------


def write_controls(trained: Path, zero: Path, random: Path, seed: int) -> None:
    """Write the zeroed and the random copy of an adapter; one that is there is kept."""
    adapter = read_adapter(trained)
    if not zero.exists():
        write_adapter(zero_adapter(adapter), zero)
    if not random.exists():
        write_adapter(random_adapter(adapter, seed), random)


def random_adapter(adapter: Adapter, seed: int) -> Adapter:
    """The same modules, rank and scale with Gaussian factors, as float32.

    Law: the delta of each module, and of each of its experts, has the Frobenius norm that it has
    in `adapter` (to float32 rounding); where that is 0 it is 0.
    """
    generator = np.random.default_rng(seed)
    modules = {}
    for path, packed in adapter.modules.items():
        module = widened(packed)
        a = generator.standard_normal(module.lora_a.shape).astype(np.float32)
        b = generator.standard_normal(module.lora_b.shape).astype(np.float32)
        drawn = replace(module, lora_a=a, lora_b=b)
        ratio = expert_norms(module) / expert_norms(drawn)  # (E,) or ()
        if module.is_switch:
            ratio = ratio[:, None, None]
        modules[path] = replace(drawn, lora_b=(b * ratio).astype(np.float32))
    return replace(adapter, modules=modules)


def write_scaled(adapter: Path, directory: Path, scale: float) -> None:
    """Write the adapter with its delta times `scale`, as float32."""
    given = read_adapter(adapter)
    modules = {}
    for path, packed in given.modules.items():
        module = widened(packed)
        modules[path] = replace(module, lora_b=(module.lora_b * np.float32(scale)))
    write_adapter(replace(given, modules=modules), directory)


def expert_norms(module: LoraModule) -> np.ndarray:
    """Frobenius norms of B A, (E,) for experts and () for a dense pair, float64; without scale."""
    a, b = module.lora_a.astype(np.float64), module.lora_b.astype(np.float64)
    if module.is_switch:
        grams = a @ a.swapaxes(1, 2), b.swapaxes(1, 2) @ b  # (E, R, R) each
    else:
        grams = a.T @ a, b @ b.T  # (R, R) each
    squares = np.sum(grams[0] * grams[1], axis=(-2, -1))
    return np.sqrt(np.maximum(squares, 0.0))


# --- fuses ----------------------------------------------------------------------------------------


def fuse_all(
    model: Path,
    adapters: Mapping[str, Path],
    directory: Path,
    policy: PolicyName,
    target_correlation: float,
    seed: int,
) -> dict[str, Any]:
    """Fuse the adapters and a zero-delta control into `directory`/KIND; returns the figures of
    each, as in a fuse's result, how many codes differ between them, and the bits that a1 decided.

    adapters: a1, and by their kinds those that are fused with its decisions.
    """
    trained = FuseSettings(
        model=str(model), adapter_path=(str(adapters["a1"]),), save_path=str(directory / "a1"),
        requant=policy, target_correlation=target_correlation, seed=seed, force=True,
    )  # fmt: skip
    a1 = fuse(trained)
    zero = {"save_path": str(directory / "a0"), "zero_delta": True}
    figures = {"a1": _figures(a1), "a0": _figures(fuse(trained.model_copy(update=zero)))}
    modules = a1.stages[-1].modules
    # Promotion chooses bits by the delta; the others get those of the adapter.
    bits = tuple(
        f"{module.path}={module.bits_after}"
        for module in modules
        if module.bits_after is not None
        and (policy == "auto" or (policy == "promote" and module.bits_after != module.bits_before))
    )
    for kind, adapter in adapters.items():
        if kind != "a1":
            figures[kind] = fuse_alike(
                model, adapter, directory / kind, policy, target_correlation, seed, bits
            )
    after = {module.path: module.bits_after for module in modules}
    return {
        **figures,
        "bits_of_a1": list(bits),
        "codes_that_differ": {
            "a1_and_a0": codes_that_differ(directory / "a1", directory / "a0", after),
            "a0_and_unfused": codes_that_differ(directory / "a0", model, after),
        },
    }


def fuse_alike(
    model: Path, adapter: Path, save_path: Path, policy: PolicyName, target_correlation: float,
    seed: int, bits: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Fuse one adapter with what another one decided; returns its figures. bits: `bits_of_a1`."""
    settings = FuseSettings(
        model=str(model), adapter_path=(str(adapter),), save_path=str(save_path), requant=policy,
        target_correlation=target_correlation, seed=seed, force=True, bits=tuple(bits),
    )  # fmt: skip
    return _figures(fuse(settings))


def _figures(report: FuseReport) -> dict[str, Any]:
    modules = report.stages[-1].modules
    return {
        "total": report.total.as_json() if report.total else None,
        "by_module": {m.path: m.fidelity.as_json() for m in modules if m.fidelity},
        "policies": {m.path: m.policy for m in modules},
        "bits": {m.path: m.bits_after for m in modules},
        "extra_bytes": report.extra_bytes,
        "verdict": report.verdict,
    }


def codes_that_differ(first: Path, second: Path, bits: Mapping[str, int | None]) -> float | None:
    """Share of the packed codes (plain weights: of the numbers) of some modules that differ.

    bits: module path -> its bits in `first`, None where it is plain. The result is None where a
    module lies at other bits in `second`: codes of two grids do not compare.
    """
    checkpoints = open_checkpoint(first), open_checkpoint(second)
    different = count = 0
    for module, width in bits.items():
        a, b = (stored_weight(checkpoint, module).weight for checkpoint in checkpoints)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return None
        raw = read_tensor(a), read_tensor(b)
        codes = raw if width is None else tuple(unpack(packed, width) for packed in raw)
        different += int(np.count_nonzero(codes[0] != codes[1]))
        count += codes[0].size
    return different / count
