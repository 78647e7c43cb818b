"""The content-free adapters beside a trained one: zero, and random of equal norm."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxstacks.files.adapters import read_adapter, write_adapter, zero_adapter
from mlxstacks.files.lora_modules import Adapter, LoraModule, widened


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
    modules = {
        path: _random(widened(module), generator) for path, module in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def _random(module: LoraModule, generator: np.random.Generator) -> LoraModule:
    a = generator.standard_normal(module.lora_a.shape).astype(np.float32)
    b = generator.standard_normal(module.lora_b.shape).astype(np.float32)
    drawn = replace(module, lora_a=a, lora_b=b)
    ratio = expert_norms(module) / expert_norms(drawn)  # (E,) or ()
    if module.is_switch:
        ratio = ratio[:, None, None]
    return replace(drawn, lora_b=(b * ratio).astype(np.float32))


def expert_norms(module: LoraModule) -> np.ndarray:
    """Frobenius norms of B A, (E,) for experts and () for a dense pair, float64; without scale."""
    a, b = module.lora_a.astype(np.float64), module.lora_b.astype(np.float64)
    if module.is_switch:
        grams = a @ a.swapaxes(1, 2), b.swapaxes(1, 2) @ b  # (E, R, R) each
    else:
        grams = a.T @ a, b @ b.T  # (R, R) each
    squares = np.sum(grams[0] * grams[1], axis=(-2, -1))
    return np.sqrt(np.maximum(squares, 0.0))
