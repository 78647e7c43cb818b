"""A short way to run a few lines of Metal, for tests of the emulator itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_emulator import Kernel, metal_kernel

Given = Mapping[str, Any]


def call_of(
    body: str,
    given: Given,
    shape: Sequence[int],
    dtype: mx.Dtype = mx.float32,
    *,
    name: str = "small",
    header: str = "",
    grid: tuple[int, int, int] | int = 32,
    threadgroup: tuple[int, int, int] | int = 32,
    template: list[tuple[str, bool | int | mx.Dtype]] | None = None,
    init_value: float | None = None,
    **settings: Any,
) -> tuple[Kernel, dict[str, Any]]:
    """A kernel with the inputs `given` by name and one output `out`, and the arguments to call it.

    grid, threadgroup: threads; a single number counts along x.
    """
    kernel = metal_kernel(name, list(given), ["out"], body, header, **settings)
    return kernel, {
        "inputs": [mx.array(v) if isinstance(v, np.ndarray) else v for v in given.values()],
        "template": template,
        "grid": (grid, 1, 1) if isinstance(grid, int) else grid,
        "threadgroup": (threadgroup, 1, 1) if isinstance(threadgroup, int) else threadgroup,
        "output_shapes": [tuple(shape)],
        "output_dtypes": [dtype],
        "init_value": init_value,
    }


def run(body: str, given: Given, shape: Sequence[int], *rest: Any, **options: Any) -> mx.array:
    """The output of `call_of`'s kernel."""
    kernel, arguments = call_of(body, given, shape, *rest, **options)
    return kernel(**arguments)[0]
