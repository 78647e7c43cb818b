"""The door to custom GPU kernels: one body of text for Metal and for CUDA, and who may run it.

A kernel's body is `kernels/<stem>.metal`. On Metal it goes to `mx.fast.metal_kernel` behind
`metal_shim.h` and `affine.h`; on MLX's CUDA backend to `mx.fast.cuda_kernel` behind `cuda_shim.h`
and `affine.h`, with Metal's thread attributes as local variables. Elsewhere there is no backend,
unless `substitute` provides one: the tests put an emulator of Metal there.

Rules for a body are in kernels/README.md. MLX keys a compiled CUDA kernel by its name and template
values alone, so the dtype of every input must be one of the template values.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import mlx.core as mx

from mlxstacks.resources import resource_dir

# Takes what mx.fast.metal_kernel takes and returns what it returns.
Maker = Callable[..., Callable[..., list[mx.array]]]

LANES = 32  # threads of a SIMD group, on both kinds of device

_log = logging.getLogger("mlxstacks.kernels")
_substitute: tuple[str, Maker] | None = None
_logged: set[tuple[str, str]] = set()  # (operator, refusal)

# Metal's attributes as variables of a CUDA body. Lanes count along x first, as on Metal.
_CUDA_ATTRIBUTES = """
const uint3 thread_position_in_threadgroup = make_uint3(threadIdx.x, threadIdx.y, threadIdx.z);
const uint3 threadgroup_position_in_grid = make_uint3(blockIdx.x, blockIdx.y, blockIdx.z);
const uint3 threads_per_threadgroup = make_uint3(blockDim.x, blockDim.y, blockDim.z);
const uint3 threadgroups_per_grid = make_uint3(gridDim.x, gridDim.y, gridDim.z);
const uint3 thread_position_in_grid = make_uint3(
    blockIdx.x * blockDim.x + threadIdx.x,
    blockIdx.y * blockDim.y + threadIdx.y,
    blockIdx.z * blockDim.z + threadIdx.z);
const uint thread_index_in_threadgroup =
    threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
const uint thread_index_in_simdgroup = thread_index_in_threadgroup % 32u;
const uint simdgroup_index_in_threadgroup = thread_index_in_threadgroup / 32u;
"""


def backend() -> str | None:
    """Where a kernel would run now: "metal", "cuda", the name of a substitute, or None."""
    return _backend_and_maker()[0]


def _backend_and_maker() -> tuple[str | None, Maker | None]:
    """The two together: another thread may end a substitution between two questions."""
    replaced = _substitute
    if replaced is not None:
        return replaced
    if mx.default_device().type != mx.DeviceType.gpu:
        return None, None
    return "metal" if mx.metal.is_available() else "cuda", None


@contextmanager
def substitute(name: str, maker: Maker) -> Iterator[None]:
    """Build and run kernels with `maker` instead of a device, for the length of a `with` block."""
    global _substitute
    before, _substitute = _substitute, (name, maker)
    try:
        yield
    finally:
        _substitute = before


def use_kernel(wanted: bool | None, operator: str, refusal: str | None) -> bool:
    """Whether an operator takes its kernel now.

    wanted: None for "where it runs", False for never, True for "or raise".
    refusal: why the kernel cannot take these arguments; None when it can.
    A refusal on a device that could run kernels is logged at INFO, which `-v` shows, once for each
    operator and reason: an operator is called thousands of times.

    Raises: ValueError with the reason, for `wanted=True` where the kernel cannot run.
    """
    if wanted is not None and not wanted:
        return False
    if backend() is None:
        if wanted:
            raise ValueError(
                f"{operator}: use_kernel=True needs a Metal or CUDA device as MLX's default "
                "device; leave use_kernel away to let MLX's own operations do it"
            )
        return False
    if refusal is None:
        return True
    if wanted:
        raise ValueError(f"{operator}: use_kernel=True, but {refusal}")
    if (operator, refusal) not in _logged:
        _logged.add((operator, refusal))
        _log.info("%s runs as MLX operations: %s", operator, refusal)
    return False


def kernel(
    stem: str, input_names: Sequence[str], output_names: Sequence[str]
) -> Callable[..., list[mx.array]]:
    """The kernel of `kernels/<stem>.metal` for the current backend, built once.

    The result is called as a kernel of mx.fast.metal_kernel is: inputs, template, grid (threads),
    threadgroup, output_shapes, output_dtypes.

    Raises: ValueError where no backend can run it.
    """
    name, maker = _backend_and_maker()
    if name is None:
        raise ValueError(f"{stem}: no Metal or CUDA device is MLX's default device")
    return _build(stem, tuple(input_names), tuple(output_names), name, maker)


@cache
def _build(
    stem: str,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    name: str,
    maker: Maker | None,
) -> Callable[..., list[mx.array]]:
    target = "cuda" if name == "cuda" else "metal"
    header, body = kernel_text(stem, target)
    build = maker or (mx.fast.cuda_kernel if target == "cuda" else mx.fast.metal_kernel)
    return build(
        name=stem,
        input_names=list(input_names),
        output_names=list(output_names),
        source=body,
        header=header,
    )


def kernel_text(stem: str, target: str) -> tuple[str, str]:
    """(header, body) of a kernel for "metal" or "cuda", as MLX takes them."""
    folder = resource_dir("kernels")
    texts = [(folder / name).read_text() for name in (f"{target}_shim.h", "affine.h")]
    body = (folder / f"{stem}.metal").read_text()
    return "\n".join(texts), (_CUDA_ATTRIBUTES if target == "cuda" else "") + body
