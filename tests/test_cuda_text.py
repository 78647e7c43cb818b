"""Every kernel body compiles as CUDA: through cuda_shim.h, in the form that MLX gives to NVRTC.

    python -m pytest tests/test_cuda_text.py -s      prints registers and shared memory

nvcc compiles to machine code for sm_80 and sm_90 where it is installed, NVRTC with MLX's own
options where its library can be loaded; no device is needed for either. The instances are those
that the operators launch at Qwen3.5-35B-A3B's shapes, noted from real calls.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks.ops import kernels
from mlxstacks.ops.dequant import dequant
from mlxstacks.ops.expert_delta import expert_delta
from mlxstacks.ops.requant import requant
from mlxstacks.ops.stack_sum import stack_sum
from mlxstacks.resources import resource_dir
from tests.cuda_text import (
    Launch,
    compile_with_nvcc,
    compile_with_nvrtc,
    nvcc,
    nvrtc,
    recorder,
    unit_text,
)

EXPERTS, OUTPUTS, INPUTS, GROUP, RANK = 256, 2048, 512, 64, 8  # down_proj of 35B-A3B
DTYPES = (mx.bfloat16, mx.float16, mx.float32)
STEMS = sorted(path.stem for path in resource_dir("kernels").glob("*.metal"))
# A multiprocessor of sm_80 and sm_90 has 65536 registers; Metal and CUDA give 32 and 48 KiB.
REGISTERS, SHARED_BYTES, THREADS = 65536, 32768, 256
# All instances are compiled for this one, a quarter of them for another.
MAIN_ARCHITECTURE = "sm_90"

needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc here")


def _quantized(bits: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Packed codes, scales and biases of the right shape; zeros, never evaluated."""
    packed = mx.zeros((EXPERTS, OUTPUTS, INPUTS * bits // 32), mx.uint32)
    groups = mx.zeros((EXPERTS, OUTPUTS, INPUTS // GROUP), dtype)
    return packed, groups, groups


def _launch_requant() -> None:
    """All policies at 3 and 4 bits, keep and refit at the other widths and dtypes."""
    kinds = [(bits, mx.bfloat16) for bits in (2, 3, 4, 5, 6, 8)]
    for bits, dtype in [*kinds, (4, mx.float16), (4, mx.float32)]:
        a = mx.zeros((EXPERTS, RANK, INPUTS), dtype)
        b = mx.zeros((EXPERTS, OUTPUTS, RANK), dtype)
        launch = partial(requant, *_quantized(bits, dtype), group_size=GROUP, bits=bits)
        low_rank = partial(launch, a, b, 20.0, use_kernel=True)
        low_rank(policy="keep")
        low_rank(policy="refit", control=bits == 3)
        if (bits, dtype) in kinds[1:3]:
            low_rank(policy="nearest")
            low_rank(policy="promote", new_bits=2 * bits)
            low_rank(policy="stochastic", uniform=mx.zeros((EXPERTS, OUTPUTS, INPUTS)))
            dense = mx.zeros((EXPERTS, OUTPUTS, INPUTS))
            launch(None, None, 1.0, policy="keep", delta=dense, use_kernel=True)


def _launch_dequant() -> None:
    for bits in (2, 3, 4, 5, 6, 8):
        for dtype in DTYPES:
            dequant(*_quantized(bits, dtype), group_size=GROUP, bits=bits, use_kernel=True)


def _launch_expert_delta() -> None:
    indices = mx.zeros((1, 1, 8), mx.uint32)
    for dtype in DTYPES:
        for rank in (RANK, 64):
            a = mx.zeros((EXPERTS, rank, OUTPUTS), dtype)
            b = mx.zeros((EXPERTS, INPUTS, rank), dtype)
            x = mx.zeros((1, 1, 1, 1, OUTPUTS), dtype)
            for gates in (None, mx.zeros((1, 1, 1, 1, 4))):
                expert_delta(x, a, b, indices, gates, 2.0, False, use_kernel=True)
    # Prefill: sorted rows, each with its own input.
    rows = mx.zeros((512, 1, INPUTS), mx.bfloat16)
    a = mx.zeros((EXPERTS, RANK, INPUTS), mx.bfloat16)
    b = mx.zeros((EXPERTS, OUTPUTS, RANK), mx.bfloat16)
    expert_delta(rows, a, b, mx.zeros((512,), mx.uint32), None, 2.0, True, use_kernel=True)


def _launch_stack_sum() -> None:
    stacks, experts, rank = 10, 4, 16
    for dtype in DTYPES:
        a = mx.zeros((stacks * experts * rank, OUTPUTS), dtype)
        b = mx.zeros((OUTPUTS, stacks * experts * rank), dtype)
        for tokens in (1, 3, 8, 256):
            x = mx.zeros((1, tokens, OUTPUTS), dtype)
            gates = mx.zeros((1, tokens, stacks, experts))
            stack_sum(x, a, b, gates, 2.0, use_kernel=True)


LAUNCHERS: dict[str, Callable[[], None]] = {
    "requant": _launch_requant,
    "dequant": _launch_dequant,
    "expert_delta": _launch_expert_delta,
    "stack_sum": _launch_stack_sum,
}


def _launches(stem: str) -> list[Launch]:
    """The launches of one kernel, one of each instance."""
    noted: list[Launch] = []
    with kernels.substitute("cuda", recorder(noted)):
        LAUNCHERS[stem]()
    return list({launch.function: launch for launch in noted if launch.stem == stem}.values())


def test_every_kernel_has_launches_here() -> None:
    assert sorted(LAUNCHERS) == STEMS


def test_both_shims_have_the_same_names() -> None:
    folder = resource_dir("kernels")
    pattern = re.compile(r"^HELPER \w+ (\w+)\(|^#define (\w+)", re.MULTILINE)
    texts = [(folder / name).read_text() for name in ("metal_shim.h", "cuda_shim.h")]
    metal, cuda = ({a or b for a, b in pattern.findall(text)} for text in texts)
    assert metal == cuda - {"MLXSTACKS_CUDA"}


@pytest.mark.parametrize("stem", STEMS)
def test_dtype_of_every_input_is_in_the_name(stem: str) -> None:
    """MLX's CUDA back-end takes name and template values for the identity of a kernel."""
    signatures: dict[str, tuple] = {}
    noted: list[Launch] = []
    with kernels.substitute("cuda", recorder(noted)):
        LAUNCHERS[stem]()
    for launch in noted:
        dtypes = tuple(d for _, d, _ in launch.inputs), tuple(d for _, d in launch.outputs)
        assert signatures.setdefault(launch.function, dtypes) == dtypes


@pytest.mark.parametrize("stem", STEMS)
def test_launches_are_within_the_limits_of_both_devices(stem: str) -> None:
    for launch in _launches(stem):
        assert 32 <= launch.threads <= THREADS, launch.function
        assert launch.threads % kernels.LANES == 0, launch.function
        # Metal launches exactly the grid and CUDA whole groups: the same only if it is padded.
        for threads, group in zip(launch.grid, launch.threadgroup, strict=True):
            assert threads % group == 0, launch.function
        # One group of Metal's grid, y and z, is CUDA's block index, which ends at 65535.
        assert (
            max(n // t for n, t in zip(launch.grid[1:], launch.threadgroup[1:], strict=True))
            <= 65535
        )


@needs_nvcc
@pytest.mark.parametrize(
    "architecture", [MAIN_ARCHITECTURE, pytest.param("sm_80", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("stem", STEMS)
def test_body_compiles_without_spills(stem: str, architecture: str, tmp_path: Path) -> None:
    launches = _launches(stem)
    if architecture != MAIN_ARCHITECTURE:
        launches = launches[::4]
    usages = compile_with_nvcc(unit_text(launches), tmp_path, architecture)
    assert usages.keys() == {launch.function for launch in launches}
    for launch in launches:
        usage = usages[launch.function]
        print(f"{architecture} {launch.function}: {usage}")
        assert usage.spill_bytes == 0, launch.function
        # An array that is indexed at run time would lie in memory, not in registers.
        assert usage.stack_bytes == 0, launch.function
        assert usage.registers * launch.threads <= REGISTERS, launch.function
        assert usage.shared_bytes <= SHARED_BYTES, launch.function


@pytest.mark.parametrize("stem", STEMS)
def test_body_compiles_as_mlx_compiles_it(stem: str) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("no NVRTC library here")
    assert compile_with_nvrtc(library, unit_text(_launches(stem)), "sm_90") > 0


# --- the check itself ---------------------------------------------------------------------------

_SHIM_BODY = """
SHARED_ARRAY(float, partial, 32);
const uint i = thread_position_in_grid.x;
float v = round_to<T>(mul_rn(static_cast<float>(numbers[i]), 1.5f));
v = tree_sum(fma_rn(v, v, sub_rn(v, 1.0f)), 32u);
v = larger(magnitude(v), smaller(rint_even(v), floor_whole(div_rn(v, 3.0f))));
if (thread_index_in_simdgroup == 0u) {
  partial[simdgroup_index_in_threadgroup] = v;
}
BARRIER();
const uint sizes = threads_per_threadgroup.x + threadgroups_per_grid.x
    + threadgroup_position_in_grid.x
    + thread_position_in_threadgroup.x + thread_index_in_threadgroup;
result[i] = static_cast<T>(add_rn(partial[0], static_cast<float>(sizes + numbers_shape[0])));
"""


def _shim_launches(extra: str = "") -> Iterator[Launch]:
    folder = resource_dir("kernels")
    header = "\n".join((folder / name).read_text() for name in ("cuda_shim.h", "affine.h"))
    for dtype in DTYPES:
        yield Launch(
            stem="shim",
            header=header,
            source=kernels._CUDA_ATTRIBUTES + _SHIM_BODY + extra,
            inputs=(("numbers", dtype, 1),),
            outputs=(("result", dtype),),
            template=(("T", dtype), ("N", 3), ("FLAG", True)),
            grid=(256, 1, 1),
            threadgroup=(256, 1, 1),
        )


@needs_nvcc
def test_every_name_of_the_shim_compiles(tmp_path: Path) -> None:
    usages = compile_with_nvcc(unit_text(list(_shim_launches())), tmp_path, "sm_90")
    assert set(usages) == {
        f"custom_kernel_shim_{dtype}_3_t" for dtype in ("bfloat16_t", "float16_t", "float32_t")
    }
    assert {usage.shared_bytes for usage in usages.values()} == {128}


@needs_nvcc
def test_a_mixed_expression_is_refused(tmp_path: Path) -> None:
    mixed = next(_shim_launches("result[i] = numbers[i] * 1.5f;"))
    with pytest.raises(RuntimeError, match="operator"):
        compile_with_nvcc(unit_text([mixed]), tmp_path, "sm_90")


@needs_nvcc
def test_spills_are_noticed(tmp_path: Path) -> None:
    """A thread that holds 400 floats at once cannot keep them in 255 registers."""
    hoard = """
    float held[400];
    #pragma unroll
    for (int k = 0; k < 400; ++k) { held[k] = static_cast<float>(numbers[i * 400u + k]); }
    BARRIER();
    #pragma unroll
    for (int k = 0; k < 400; ++k) { result[i * 400u + k] = static_cast<T>(mul_rn(held[k], v)); }
    """
    text = unit_text([next(_shim_launches(hoard))])
    (usage,) = compile_with_nvcc(text, tmp_path, "sm_90").values()
    assert usage.spill_bytes > 0
