"""Runs Metal kernels without a Metal device: MLX's text as C++, thread by thread on the CPU.

`metal_kernel` takes the place of `mx.fast.metal_kernel`. A launch runs in the current `Variant`;
`VARIANTS` are the ways in which a kernel should be run to be trusted, see tests/emulator.

    with emulated():                       # what mlxstacks.ops launches runs here
        result = requant(..., use_kernel=True)

    @pytest.mark.parametrize("chosen", VARIANTS, ids=str)
    def test_bits(emulator, chosen):
        with variant(chosen):
            ...
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxstacks.ops import kernels
from tests.emulator import library
from tests.emulator.arrays import Input
from tests.emulator.compiler import CompileError, find, unavailable
from tests.emulator.launch import LARGEST_THREADGROUP, KernelError, launch
from tests.emulator.lint import lint
from tests.emulator.text import TYPE_NAMES, InputType, Instance, Source, Template
from tests.emulator.variants import VARIANTS, Variant, current, variant

__all__ = [
    "VARIANTS",
    "CompileError",
    "Kernel",
    "KernelError",
    "Variant",
    "emulated",
    "gathered",
    "generated_text",
    "lint",
    "metal_kernel",
    "models_contraction",
    "prepare",
    "unavailable",
    "variant",
]

Size = tuple[int, int, int]
_LARGEST = 2**31 - 1  # MLX takes sizes as 32-bit numbers with a sign
_MATH_MODES = ("safe", "relaxed", "fast")
_gathering: list[list[Instance]] = []


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
) -> "Kernel":
    """A kernel as `mx.fast.metal_kernel` makes it, for the CPU.

    Math modes other than "safe" run as "safe": what they may change is not modelled.
    """
    mode = (compile_options or {}).get("math_mode", "safe")
    if mode not in _MATH_MODES:
        raise ValueError(f"math_mode {mode!r} is not one of {', '.join(_MATH_MODES)}")
    return Kernel(
        Source(
            name,
            tuple(input_names),
            tuple(output_names),
            source,
            header,
            ensure_row_contiguous,
            atomic_outputs,
        )
    )


@dataclass(frozen=True)
class Kernel:
    """What `metal_kernel` returns: call it, or ask for its text."""

    source: Source

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Size,
        threadgroup: Size,
        template: Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Outputs that no `init_value` fills hold poison where the kernel does not write.

        Raises: ValueError for arguments that MLX or Metal would refuse, CompileError,
            KernelError.
        """
        instance = self.instance(inputs, output_dtypes, template)
        shapes = [tuple(shape) for shape in output_shapes]
        _check(self.source, shapes, grid, threadgroup)
        if verbose:
            print(f"Generated source code for `{self.source.name}`:\n```\n{instance.text}\n```")
        if _gathering:
            _gathering[-1].append(instance)
            return [mx.zeros(s, d) for s, d in zip(shapes, output_dtypes, strict=True)]
        arrays = [_array(value) for value in inputs]
        passed = [Input.of(array, self.source.ensure_row_contiguous) for array in arrays]
        return launch(instance, passed, grid, threadgroup, shapes, init_value, current())

    def instance(
        self,
        inputs: Sequence[Any],
        output_dtypes: Sequence[mx.Dtype],
        template: Template | None = None,
    ) -> Instance:
        """The text that MLX makes for these types, sizes and template values."""
        if len(inputs) != len(self.source.input_names):
            wanted = len(self.source.input_names)
            raise ValueError(f"`inputs` needs {wanted} entries, not {len(inputs)}")
        if len(output_dtypes) != len(self.source.output_names):
            wanted = len(self.source.output_names)
            raise ValueError(f"`output_dtypes` needs {wanted} entries, not {len(output_dtypes)}")
        values = tuple((name, value) for name, value in template or ())
        for name, value in values:
            if not isinstance(value, (mx.Dtype, int)):
                raise ValueError(f"template value {name} is a {type(value)}: int, bool or Dtype")
        types = tuple(InputType.of(_array(value)) for value in inputs)
        dtypes = [kind.dtype for kind in types] + list(output_dtypes)
        dtypes += [value for _, value in values if isinstance(value, mx.Dtype)]
        for dtype in dtypes:
            if dtype not in TYPE_NAMES:
                raise ValueError(f"{self.source.name}: Metal has no {dtype}")
        return Instance(self.source, types, tuple(output_dtypes), values)


def generated_text(kernel: Kernel, **call: Any) -> str:
    """The Metal text that MLX prints for a call with `verbose=True`; takes the call's arguments."""
    return kernel.instance(call["inputs"], call["output_dtypes"], call.get("template")).text


def prepare(
    calls: Sequence[tuple[Kernel, Mapping[str, Any]]], variants: Sequence[Variant] = VARIANTS
) -> int:
    """Compiles what these calls need, several to an object; returns how many were not there.

    calls: (kernel, arguments); of the arguments inputs, output_dtypes and template matter.
    """
    instances = [
        kernel.instance(call["inputs"], call["output_dtypes"], call.get("template"))
        for kernel, call in calls
    ]
    return library.prepare(instances, [(v.contraction, v.traps) for v in variants])


@contextmanager
def gathered(variants: Sequence[Variant] = VARIANTS) -> Iterator[None]:
    """Launches of the block give zeros and do not run; at its end all they need is compiled."""
    _gathering.append([])
    try:
        yield
    finally:
        instances = _gathering.pop()
    library.prepare(instances, [(v.contraction, v.traps) for v in variants])


def emulated() -> AbstractContextManager[None]:
    """The kernels of mlxstacks.ops run here for the length of a `with` block."""
    return kernels.substitute("emulator", metal_kernel)


def models_contraction() -> bool:
    """Whether a variant with contraction differs: clang, and a processor that fuses."""
    compiler = find()
    return compiler is not None and compiler.models_contraction


def _array(value: Any) -> mx.array:
    return value if isinstance(value, mx.array) else mx.array(value)


def _check(
    source: Source, shapes: Sequence[tuple[int, ...]], grid: Size, threadgroup: Size
) -> None:
    if len(shapes) != len(source.output_names):
        wanted = len(source.output_names)
        raise ValueError(f"`output_shapes` needs {wanted} entries, not {len(shapes)}")
    for shape in shapes:
        if not all(isinstance(n, int) and 0 <= n <= _LARGEST for n in shape):
            raise ValueError(f"{source.name}: {shape} is not the shape of an array")
    for what, size in (("grid", grid), ("threadgroup", threadgroup)):
        if len(size) != 3 or not all(isinstance(n, int) and 1 <= n <= _LARGEST for n in size):
            raise ValueError(
                f"{source.name}: {what} {size} is not three numbers from 1 to {_LARGEST}"
            )
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > LARGEST_THREADGROUP:
        raise ValueError(
            f"{source.name}: {threads} threads in a threadgroup, {LARGEST_THREADGROUP} at most"
        )
    groups = math.prod(-(-g // t) for g, t in zip(grid, threadgroup, strict=True))
    if groups > _LARGEST:
        raise ValueError(f"{source.name}: {groups} threadgroups, {_LARGEST} at most")
