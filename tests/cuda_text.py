"""CUDA text of our kernels in the form that MLX gives to NVRTC, and compilers for it.

MLX cannot print that text without its CUDA back-end, so its form is written down here: `recorder`
notes how the operators launch their kernels, `unit_text` writes the launches as one CUDA file, and
`compile_with_nvcc` and `compile_with_nvrtc` compile it. MLX's own header is replaced by a small
stand-in with the types that a body could see.
"""

import ctypes
import glob
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from tests.emulator.cache import compiler_says

# Like mlx/backend/cuda/device/utils.cuh: the float types, and Shape and Strides of fixed length.
UTILS = """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}  // namespace mlx::core::cu
"""
UTILS_NAME = "mlx/backend/cuda/device/utils.cuh"

_CUDA_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}

Template = Sequence[tuple[str, object]]


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: all that its generated text depends on, and its launch sizes."""

    stem: str
    header: str
    source: str
    inputs: tuple[tuple[str, mx.Dtype, int], ...]  # name, dtype, number of dimensions
    outputs: tuple[tuple[str, mx.Dtype], ...]
    template: tuple[tuple[str, object], ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]

    @property
    def function(self) -> str:
        """The name that MLX gives it: template values are part of it."""
        return f"custom_kernel_{self.stem}" + "".join(f"_{_value(v)}" for _, v in self.template)

    @property
    def threads(self) -> int:
        width, height, depth = self.threadgroup
        return width * height * depth


def recorder(launches: list[Launch]) -> Callable[..., Callable[..., list[mx.array]]]:
    """A maker for `kernels.substitute("cuda", ...)` that notes launches and returns zeros."""

    def maker(
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        **_: object,
    ) -> Callable[..., list[mx.array]]:
        def call(
            *,
            inputs: Sequence[mx.array],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: Sequence[Sequence[int]],
            output_dtypes: Sequence[mx.Dtype],
            template: Template | None = None,
            **_: object,
        ) -> list[mx.array]:
            launches.append(
                Launch(
                    stem=name,
                    header=header,
                    source=source,
                    inputs=tuple(
                        (n, x.dtype, x.ndim) for n, x in zip(input_names, inputs, strict=True)
                    ),
                    outputs=tuple(zip(output_names, output_dtypes, strict=True)),
                    template=tuple((key, value) for key, value in template or ()),
                    grid=grid,
                    threadgroup=threadgroup,
                )
            )
            shapes = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return call

    return maker


def unit_text(launches: Sequence[Launch]) -> str:
    """One CUDA file with a kernel for each launch; they share a header."""
    headers = {launch.header for launch in launches}
    if len(headers) != 1:
        raise ValueError(f"launches of {len(headers)} headers in one file; allowed: one")
    includes = f'#include "{UTILS_NAME}"\n\n#include <cooperative_groups.h>\n\n'
    opening = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    bodies = [
        f"{opening}{kernel_text(launch)}\n}} // namespace mlx::core::cu\n" for launch in launches
    ]
    return includes + headers.pop() + "\n" + "\n".join(bodies)


def kernel_text(launch: Launch) -> str:
    """The function: pointers for every input, 0-d ones too, then the outputs, then the template."""
    parameters = []
    for name, dtype, ndim in launch.inputs:
        parameters.append(f"const {_CUDA_TYPES[dtype]}* {name}")
        # MLX looks for the name anywhere in the text, in comments and in longer names too.
        for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if ndim and f"{name}_{suffix}" in launch.source:
                parameters.append(f"const __grid_constant__ {kind} {name}_{suffix}")
    parameters += [f"{_CUDA_TYPES[dtype]}* {name}" for name, dtype in launch.outputs]
    constants = []
    for name, value in launch.template:
        if isinstance(value, bool):
            constants.append(f"  constexpr bool {name} = {str(value).lower()};")
        elif isinstance(value, int):
            constants.append(f"  constexpr int {name} = {value};")
        else:
            constants.append(f"  using {name} = {_CUDA_TYPES[value]};")
    arguments = ",\n".join(f"    {p}" for p in parameters)
    return "\n".join(
        [
            f"__global__ void {launch.function}(\n{arguments}) {{",
            *constants,
            "",
            launch.source,
            "}\n",
        ]
    )


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int) else str(value).removeprefix("mlx.core.") + "_t"


# --- nvcc ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes from a multiprocessor."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def nvcc() -> str | None:
    """The CUDA compiler on PATH or in its usual place."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def compile_with_nvcc(text: str, folder: Path, architecture: str) -> dict[str, Usage]:
    """Compile for real hardware ("sm_90"); usage by function name.

    Contraction is on, as it is in MLX. Raises RuntimeError with the compiler's output.
    """
    compiler = nvcc()
    assert compiler is not None
    header = folder / UTILS_NAME
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(UTILS)
    options = ["-cubin", f"-arch={architecture}", "-std=c++17", "-Xptxas", "-v", "-x", "cu"]
    options += ["-diag-suppress", "177"]  # a thread attribute that a body does not use
    places = ["-I", str(folder), "-o", str(folder / f"unit.{architecture}.cubin"), "-"]
    code, printed = compiler_says([compiler, *options, *places], [*options, UTILS], text)
    if code:
        raise RuntimeError(f"{' '.join([compiler, *options, *places])} failed:\n{printed}")
    return read_usage(printed)


def read_usage(log: str) -> dict[str, Usage]:
    """Usage by function name, from what `ptxas -v` prints."""
    found: dict[str, Usage] = {}
    name, stack, spills = "", 0, 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = _unmangled(match[1])
        elif match := _SPILLS.search(line):
            stack, spills = int(match[1]), int(match[2]) + int(match[3])
        elif match := _REGISTERS.search(line):
            shared = _SHARED.search(match[2])
            found[name] = Usage(int(match[1]), stack, spills, int(shared[1]) if shared else 0)
    return found


def _unmangled(name: str) -> str:
    """The innermost name of `_ZN3mlx4core2cu<length><name>E...`."""
    rest, parts = name.removeprefix("_ZN"), []
    while match := re.match(r"\d+", rest):
        length = int(match[0])
        parts.append(rest[match.end() : match.end() + length])
        rest = rest[match.end() + length :]
    return parts[-1] if parts else name


# --- NVRTC --------------------------------------------------------------------------------------


def nvrtc() -> ctypes.CDLL | None:
    """The run-time compiler that MLX uses, where one can be loaded."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or []) if spec else []
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    names += [p for root in roots for p in sorted(glob.glob(f"{root}/*/lib/libnvrtc.so*"))]
    names += sorted(glob.glob("/usr/local/cuda*/lib64/libnvrtc.so*"))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def cuda_includes() -> list[str]:
    """Folders with cuda_bf16.h, cooperative_groups.h and cuda/std."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    # MLX's CUDA wheels bring cuda/std themselves.
    folders = [str(Path(mx.__file__).parent / "include")]
    for root in roots:
        if root:
            folders.append(f"{root}/include")
    cccl = [f"{folder}/cccl" for folder in folders]
    return [folder for folder in (*cccl, *folders) if Path(folder).is_dir()]


def compile_with_nvrtc(library: ctypes.CDLL, text: str, architecture: str) -> int:
    """Compile with MLX's options for an architecture ("sm_90"); the size of the result in bytes.

    Raises RuntimeError with NVRTC's log.
    """
    program = ctypes.c_void_p()
    header = (ctypes.c_char_p * 1)(UTILS.encode())
    header_name = (ctypes.c_char_p * 1)(UTILS_NAME.encode())
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), b"unit.cu", 1, header, header_name
        ),
    )
    options = [f"--gpu-architecture={architecture}"]
    options += [f"--include-path={path}" for path in cuda_includes()]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = library.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    if code:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC refused the text:\n{log.value.decode()}")
    _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    _check(library, library.nvrtcDestroyProgram(ctypes.byref(program)))
    return size.value


def _check(library: ctypes.CDLL, code: int) -> None:
    if code:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(library.nvrtcGetErrorString(code).decode())
