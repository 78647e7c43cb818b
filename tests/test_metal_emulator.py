"""The Metal emulator: how a kernel is launched, what it is given, what it can do with others.

Small kernels whose results are known without Metal. Numbers, mistakes and MLX's text have files of
their own beside this one. Run: pytest tests/test_metal_emulator.py
"""

from collections.abc import Iterator
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import kernels
from tests.emulator.small import call_of, run
from tests.emulator.text import ATTRIBUTES, TYPE_NAMES
from tests.metal_emulator import (
    VARIANTS,
    KernelError,
    Variant,
    emulated,
    metal_kernel,
    models_contraction,
    unavailable,
    variant,
)

X = "uint e = thread_position_in_grid.x;\n"
NUMBERS = np.arange(1, 65, dtype=np.float32)
SMALLEST = np.float32(1e-40)  # subnormal


@pytest.fixture(autouse=True)
def compiler() -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture(params=VARIANTS, ids=str)
def chosen(request: pytest.FixtureRequest) -> Iterator[Variant]:
    with variant(request.param):
        yield request.param


GRID, THREADGROUP = (5, 3, 4), (2, 2, 12)


@cache
def attributes() -> np.ndarray:
    """(threads, attributes, 3): every attribute of every thread; single numbers stand in [0]."""
    lines = [
        "uint wide = threads_per_grid.x, high = threads_per_grid.y;",
        "uint3 p = thread_position_in_grid;",
        f"device uint* row = out + (p.x + wide * (p.y + high * p.z)) * {3 * len(ATTRIBUTES)};",
    ]
    for i, (name, kind) in enumerate(ATTRIBUTES.items()):
        parts = [f"{name}.{c}" for c in "xyz"] if kind == "uint3" else [name, "0", "0"]
        lines += [f"row[{3 * i + c}] = {part};" for c, part in enumerate(parts)]
    shape = (GRID[0] * GRID[1] * GRID[2], len(ATTRIBUTES), 3)
    given = {"unused": np.zeros(1, np.float32)}
    result = run("\n".join(lines), given, shape, mx.uint32, grid=GRID, threadgroup=THREADGROUP)
    return np.array(result)


def expected_attribute(name: str, at: tuple[int, int, int]) -> int | tuple[int, ...]:
    """Metal's definition. The last threadgroup of an axis is smaller; MLX clips z to the grid."""
    largest = (2, 2, 4)
    group = tuple(a // n for a, n in zip(at, largest, strict=True))
    inside = tuple(a % n for a, n in zip(at, largest, strict=True))
    size = tuple(min(n, g - i * n) for n, g, i in zip(largest, GRID, group, strict=True))
    index = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
    threads = size[0] * size[1] * size[2]
    values: dict[str, int | tuple[int, ...]] = {
        "dispatch_quadgroups_per_threadgroup": 4,
        "dispatch_simdgroups_per_threadgroup": 1,
        "dispatch_threads_per_threadgroup": largest,
        "grid_origin": (0, 0, 0),
        "grid_size": GRID,
        "quadgroup_index_in_threadgroup": index // 4,
        "quadgroups_per_threadgroup": -(-threads // 4),
        "simdgroup_index_in_threadgroup": index // 32,
        "simdgroups_per_threadgroup": 1,
        "thread_execution_width": 32,
        "thread_index_in_quadgroup": index % 4,
        "thread_index_in_simdgroup": index % 32,
        "thread_index_in_threadgroup": index,
        "thread_position_in_grid": at,
        "thread_position_in_threadgroup": inside,
        "threadgroup_position_in_grid": group,
        "threadgroups_per_grid": (3, 2, 1),
        "threads_per_grid": GRID,
        "threads_per_simdgroup": 32,
        "threads_per_threadgroup": size,
    }
    return values[name]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_of_every_thread(name: str) -> None:
    values = attributes()[:, list(ATTRIBUTES).index(name)]
    for i, value in enumerate(values):
        at = (i % 5, i // 5 % 3, i // 15)
        expected = expected_attribute(name, at)
        wanted = expected if isinstance(expected, tuple) else (expected, 0, 0)
        assert tuple(value) == wanted


def test_second_simd_group_has_an_index() -> None:
    body = X + "out[e] = simdgroup_index_in_threadgroup * 100 + simdgroups_per_threadgroup;"
    result = run(body, {"unused": NUMBERS}, (70,), mx.uint32, grid=70, threadgroup=70)
    assert result.tolist() == [3] * 32 + [103] * 32 + [203] * 6


def test_exactly_the_grid_runs(chosen: Variant) -> None:
    body = X + "out[e] = 7u;"
    result = np.array(run(body, {"unused": NUMBERS}, (100,), mx.uint32, grid=77, threadgroup=32))
    assert (result[:77] == 7).all()
    poison = 0xFFFFFFFF if chosen.poison == "nan" else 0xA5A5A5A5
    assert (result[77:] == poison).all()


STRIDED = {
    "as it is": lambda a: a,
    "transposed": lambda a: a.transpose(2, 0, 1),
    "reversed": lambda a: a[::-1, :, ::-1],
    "sliced": lambda a: a[1:, ::2, 1::3],
    "broadcast": lambda a: mx.broadcast_to(a[:, :1, :], a.shape),
}


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("how", STRIDED)
def test_strided_inputs(how: str, contiguous: bool) -> None:
    array = STRIDED[how](mx.arange(3 * 4 * 5).reshape(3, 4, 5).astype(mx.bfloat16))
    body = X + (
        "out[e] = float(array[elem_to_loc(int64_t(e), array_shape, array_strides, array_ndim)]) "
        "+ 1000 * array_ndim;"
    )
    options = {"grid": array.size, "ensure_row_contiguous": contiguous}
    result = run(body, {"array": array}, array.shape, **options)
    assert mx.array_equal(result, array.astype(mx.float32) + 3000)


def test_strides_are_those_of_the_copy_or_of_the_input() -> None:
    array = mx.zeros((3, 4)).T
    body = X + "if (e < 2) out[e] = int(array_strides[e]) * 100 + array_shape[e];"
    assert run(body, {"array": array}, (2,), mx.int32).tolist() == [304, 103]
    options = {"ensure_row_contiguous": False}
    assert run(body, {"array": array}, (2,), mx.int32, **options).tolist() == [104, 403]


def test_small_inputs_single_values_and_python_numbers() -> None:
    given = {"few": np.array([1, 2, 3], np.int32), "single": mx.array(4.5), "number": 7, "on": True}
    body = X + "out[e] = few[2] + single + number + on + few_shape[0];"
    assert run(body, given, (1,), grid=1).item() == 3 + 4.5 + 7 + 1 + 3


@pytest.mark.parametrize(
    "dtype",
    TYPE_NAMES,
    ids=str,
)
def test_every_dtype_travels_both_ways(dtype: mx.Dtype) -> None:
    values = mx.array(np.arange(-9, 24)).astype(dtype)
    body = X + "if (e < uint(N)) out[e] = FLIP ? T(values[N - 1 - e]) : values[e];"
    for flip in (False, True):
        template: list[tuple[str, bool | int | mx.Dtype]] = [("T", dtype), ("N", 33)]
        template.append(("FLIP", flip))
        result = run(body, {"values": values}, (33,), dtype, grid=64, template=template)
        assert result.dtype == dtype
        assert mx.array_equal(result, values[::-1] if flip else values)


def test_initial_values_and_atomics(chosen: Variant) -> None:
    body = X + "atomic_fetch_add_explicit(&out[e % 3], int(values[e]), memory_order_relaxed);"
    options = {"grid": 64, "init_value": 5, "atomic_outputs": True}
    result = run(body, {"values": NUMBERS}, (4,), mx.int32, **options)
    sums = [5 + int(NUMBERS[i::3].sum()) for i in range(3)]
    assert result.tolist() == [*sums, 5]


def test_threadgroup_memory_and_barriers(chosen: Variant) -> None:
    header = "#define SHARED(type, name, size) threadgroup type name[size]\n"
    body = """
    threadgroup float row[64], total;
    SHARED(float, doubled, 64);
    threadgroup vec<float, 2> pairs[(WIDTH + 1) / 2];
    uint i = thread_index_in_threadgroup, base = threadgroup_position_in_grid.x * 64;
    threadgroup float* other = doubled;
    row[i] = values[base + i];
    other[63 - i] = 2 * values[base + i];
    if (i % 2 == 0) pairs[i / 2] = float2(values[base + i], values[base + i + 1]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 40) { total = 0; for (int k = 0; k < 64; k++) total += row[k]; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[base + i] = row[63 - i] + 1000 * doubled[i] + 1e6f * pairs[31 - i / 2].y + total;
    """
    values = np.concatenate([NUMBERS, 3 * NUMBERS])
    result = run(
        body,
        {"values": values},
        (128,),
        header=header,
        grid=128,
        threadgroup=64,
        template=[("WIDTH", 64)],
    )
    for part, got in zip(np.split(values, 2), np.split(np.array(result), 2), strict=True):
        back = part[::-1].astype(np.float64)
        odd = np.repeat(back[::2], 2)
        assert np.array_equal(
            got, np.float32(back + 2000 * back + part.sum()) + np.float32(1e6 * odd)
        )


def test_threadgroup_memory_starts_poisoned_in_every_threadgroup(chosen: Variant) -> None:
    body = X + "threadgroup uint kept[32]; uint l = thread_index_in_threadgroup;\n"
    body += "out[e] = kept[l]; kept[l] = 3;"
    result = np.array(run(body, {"unused": NUMBERS}, (96,), mx.uint32, grid=96))
    assert (result == (0xFFFFFFFF if chosen.poison == "nan" else 0xA5A5A5A5)).all()


def test_threadgroup_memory_is_32_kilobytes() -> None:
    body = X + "threadgroup float a[N]; threadgroup float b[4096]; a[e] = e; b[e] = 1;\n"
    body += "out[e] = a[e] + b[e];"
    result = run(body, {"unused": NUMBERS}, (32,), template=[("N", 4096)])
    assert result.tolist() == [i + 1.0 for i in range(32)]
    with pytest.raises(KernelError, match="32784 bytes of threadgroup memory"):
        run(body, {"unused": NUMBERS}, (32,), template=[("N", 4097)])


def test_order_of_lanes_groups_and_sums() -> None:
    """A plain write shows who ran last; a sum of unlike terms shows how it was added up."""
    last, sums = [], []
    terms = np.array([1e8, 1, -1e8, 1] * 8, np.float32)
    for chosen in VARIANTS:
        with variant(chosen):
            body = "out[0] = thread_position_in_grid.x;"
            last.append(
                run(body, {"unused": NUMBERS}, (1,), mx.uint32, grid=96, threadgroup=96).item()
            )
            sums.append(run(X + "out[e] = simd_sum(terms[e]);", {"terms": terms}, (32,)).tolist())
    assert last[0] == last[3] == 95
    assert last[1] == last[4] == 0
    assert last[2] != last[5]
    assert all(set(s) == {s[0]} for s in sums)
    assert len({s[0] for s in sums}) == 3


def test_contraction_only_where_it_is_on() -> None:
    if not models_contraction():
        pytest.skip("this compiler or processor fuses nothing: contraction on means off")
    x = np.float32(1) + np.float32(2) ** -12
    body = "out[0] = x[0] * x[0] - y[0];"
    given = {"x": np.array([x]), "y": np.array([x * x])}
    fused = float(np.float64(x) * np.float64(x) - np.float64(x * x))
    assert fused != 0
    for header in ("", "#pragma METAL fp contract(off)\n"):
        for chosen in VARIANTS:
            with variant(chosen):
                result = run(body, given, (1,), grid=1, header=header).item()
            assert result == (fused if chosen.contraction and not header else 0.0)


def test_flush_to_zero_only_where_it_is_on(chosen: Variant) -> None:
    given = {"tiny": np.full(1, SMALLEST)}
    result = run("out[0] = tiny[0] * 0.5f;", given, (1,), grid=1).item()
    assert result == (0.0 if chosen.flush else SMALLEST * np.float32(0.5))
    assert np.float32(SMALLEST) * np.float32(0.5) > 0  # and nothing is left behind


def test_emulated_stands_in_for_a_device() -> None:
    before = kernels.backend()
    with emulated():
        assert kernels.backend() == "emulator"
        source = kernels.kernel("dequant", ["packed"], ["out"])
        assert type(source) is type(metal_kernel("k", [], ["out"], ""))
    assert kernels.backend() == before


def test_arguments_that_mlx_refuses() -> None:
    kernel, arguments = call_of("out[0] = 1;", {"a": NUMBERS}, (1,))
    for wrong, message in (
        ({"inputs": []}, "`inputs` needs 1"),
        ({"output_shapes": []}, "`output_shapes` needs 1"),
        ({"output_dtypes": []}, "`output_dtypes` needs 1"),
        ({"template": [("T", 1.5)]}, "template value T"),
        ({"template": [("T", mx.float64)]}, "Metal has no .*float64"),
        ({"inputs": [mx.zeros((3,), mx.float64)]}, "Metal has no .*float64"),
        ({"output_dtypes": [mx.float64]}, "Metal has no .*float64"),
        ({"output_shapes": [(-1,)]}, r"\(-1,\) is not the shape of an array"),
        ({"output_shapes": [(2, 2**31)]}, "is not the shape of an array"),
        ({"output_shapes": [(1.5,)]}, "is not the shape of an array"),
        ({"grid": (0, 1, 1)}, "grid"),
        ({"grid": (2**31, 1, 1)}, "grid .* is not three numbers from 1 to 2147483647"),
        ({"grid": (2**32 + 1, 1, 1)}, "grid"),
        ({"grid": (1.5, 1, 1)}, "grid"),
        ({"grid": (2**16, 2**16, 1), "threadgroup": (1, 1, 1)}, "4294967296 threadgroups"),
        ({"threadgroup": (32, 32, 2)}, "2048 threads"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(**{**arguments, **wrong})
    with pytest.raises(ValueError, match="math_mode"):
        metal_kernel("k", [], ["out"], "", compile_options={"math_mode": "loose"})
