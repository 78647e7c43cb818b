"""The Metal emulator's text against MLX's own, the C++ made of it, and the cache of objects.

MLX prints the text of a custom kernel without a Metal device. Run:
pytest tests/test_metal_emulator_text.py
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator import compiler, library
from tests.emulator.small import call_of, run
from tests.emulator.text import ATTRIBUTES, TYPE_NAMES
from tests.emulator.third_party import printed_by_mlx
from tests.emulator.unit import metal_to_cpp
from tests.metal_emulator import (
    VARIANTS,
    gathered,
    generated_text,
    metal_kernel,
    prepare,
    unavailable,
    variant,
)

NUMBERS = np.arange(64, dtype=np.float32)


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


# Arguments of metal_kernel and of the call; what is left away is filled in below.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"source": "out[0] = array[0];"}, {}),
    "header without a line end": ({"header": "// array_shape", "source": "\n\n"}, {}),
    "header": ({"header": "#define A 1\n\n", "source": "thread_position_in_grid;\n"}, {}),
    "single value": ({"source": "array_shape array_ndim"}, {"inputs": [zeros()]}),
    "seven elements": ({"source": "array_strides"}, {"inputs": [zeros(7)]}),
    "eight elements": ({"source": "array_shape"}, {"inputs": [zeros(2, 4)]}),
    "no elements": ({"source": "array_ndim"}, {"inputs": [zeros(0, 3)]}),
    "names in a comment": ({"source": "// my_array_shape2 grid_size"}, {}),
    "all arguments": ({"source": "array_ndim array_shape array_strides"}, {}),
    "every attribute": ({"source": " ".join(ATTRIBUTES)}, {}),
    "atomic outputs": (
        {"atomic_outputs": True, "output_names": ["out", "more"]},
        {"output_dtypes": [mx.int32, mx.float32], "output_shapes": [(1,), ()]},
    ),
    "template": (
        {"source": "out[0] = T(N);"},
        {"template": [("T", mx.bfloat16), ("N", -5), ("ON", True), ("OFF", False), ("M", 64)]},
    ),
    "empty template": ({}, {"template": []}),
    "strided input": (
        {"ensure_row_contiguous": False, "source": "array_strides"},
        {"inputs": [mx.zeros((3, 4)).T]},
    ),
    "no inputs": ({"input_names": []}, {"inputs": []}),
    "every dtype": (
        {
            "input_names": [f"array{i}_" for i in range(len(TYPE_NAMES))],
            "output_names": [f"out{i}_" for i in range(len(TYPE_NAMES))],
        },
        {
            "inputs": [zeros(9, dtype=dtype) for dtype in TYPE_NAMES],
            "output_dtypes": list(TYPE_NAMES),
            "output_shapes": [(1,)] * len(TYPE_NAMES),
            "template": [(f"T{i}", dtype) for i, dtype in enumerate(TYPE_NAMES)],
        },
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_text_is_what_mlx_prints(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    changed_text, changed_call = CALLS[case]
    text: dict[str, Any] = {"name": "named", "source": ""}
    text |= {"input_names": ["array"], "output_names": ["out"]} | changed_text
    arguments: dict[str, Any] = {
        "inputs": [zeros(3, 4)],
        "output_shapes": [(1,)],
        "output_dtypes": [mx.float32],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
    } | changed_call
    with capsys.disabled():
        printed = printed_by_mlx(text, arguments)
    assert generated_text(metal_kernel(**text), **arguments) == printed


def test_verbose_prints_as_mlx_does(
    needs_compiler: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel, arguments = call_of("out[0] = array[0];", {"array": NUMBERS}, (1,), name="told")
    kernel(**arguments, verbose=True)
    expected = generated_text(kernel, **arguments)
    assert capsys.readouterr().out == f"Generated source code for `told`:\n```\n{expected}\n```\n"


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        ("threadgroup float a[4];", "EMULATOR_SHARED(a, [4], float);"),
        ("threadgroup T a[N][3], b;", "EMULATOR_SHARED(a, [N][3], T); EMULATOR_SHARED(b, , T);"),
        ("threadgroup vec<float, 4> v[2];", "EMULATOR_SHARED(v, [2], vec<float, 4>);"),
        ("#define S(t, s) threadgroup t n[s]\n", "#define S(t, s) EMULATOR_SHARED(n, [s], t)\n"),
        ("threadgroup float* p = a;", "threadgroup float* p = a;"),
        ("f(threadgroup float* a, uint n)", "f(threadgroup float* a, uint n)"),
        ("const threadgroup T& x = a[0];", "const threadgroup T& x = a[0];"),
        ("// a threadgroup of many\n", "// a threadgroup of many\n"),
        ("#pragma METAL fp contract(off)\n", "#pragma clang fp contract(off)\n"),
        ("x = 1.5h + .5bf * 2.0f + a.x0h;", "x = half(1.5) + bfloat(.5) * 2.0f + a.x0h;"),
        ("#include <metal_stdlib>\nfloat x;", "\nfloat x;"),
    ],
)  # fmt: skip
def test_spelling_of_metal_in_cpp(metal: str, cpp: str) -> None:
    assert metal_to_cpp(metal) == cpp


@pytest.fixture
def needs_compiler() -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def fresh_cache(needs_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk and in memory, with the headers of the real one."""
    made = compiler.tools()
    monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "tools", lambda: made)
    monkeypatch.setattr(library, "_compiled", {})
    monkeypatch.setattr(library, "_objects", {})
    return tmp_path / "objects"


def test_an_object_is_compiled_once(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def values() -> list[float]:
        return run("out[0] = array[0] + 1;", {"array": NUMBERS}, (1,)).tolist()

    assert values() == [1.0]
    assert len(list(fresh_cache.glob("*.so"))) == 1
    monkeypatch.setattr(library, "_compiled", {})

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "build", refuse)
    assert values() == [1.0]
    with pytest.raises(AssertionError, match="compiled again"):
        run("out[0] = array[0] + 1; ", {"array": NUMBERS}, (1,))
    with variant(VARIANTS[-1]), pytest.raises(AssertionError, match="compiled again"):
        values()


def test_prepare_puts_instances_into_one_object(fresh_cache: Path) -> None:
    calls = [
        call_of("out[0] = N * SCALE;", {"array": NUMBERS}, (1,), header=header, template=[("N", n)])
        for header in ("#define SCALE 2\n", "#define SCALE 3\n")
        for n in (1, 2, 3)
    ]
    assert prepare(calls, VARIANTS[:3]) == 6
    assert len(list(fresh_cache.glob("*.so"))) == 2  # one for each header
    assert prepare(calls, VARIANTS[:3]) == 0
    results = [kernel(**arguments)[0].item() for kernel, arguments in calls]
    assert results == [2, 4, 6, 3, 6, 9]
    assert len(list(fresh_cache.glob("*.so"))) == 2


def test_gathered_launches_are_compiled_and_not_run(fresh_cache: Path) -> None:
    def launch(n: int) -> float:
        body = "out[0] = 10 / array[0] + N;"
        return run(body, {"array": NUMBERS + 1}, (1,), template=[("N", n)]).item()

    with gathered(VARIANTS[:1]):
        assert [launch(1), launch(2), launch(1)] == [0, 0, 0]
    assert len(list(fresh_cache.glob("*.so"))) == 1
    assert [launch(1), launch(2)] == [11, 12]
    assert len(list(fresh_cache.glob("*.so"))) == 1


def test_equal_text_for_other_shapes_is_one_object(fresh_cache: Path) -> None:
    for size in (9, 100):
        run("out[0] = array[0];", {"array": np.ones(size, np.float32)}, (1,))
    assert len(list(fresh_cache.glob("*.so"))) == 1


@pytest.fixture
def search_again() -> Iterator[None]:
    caches = (compiler.find, compiler.unavailable, compiler.tools)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_reasons_why_it_cannot_run(search_again: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(unavailable())
    compiler.unavailable.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in str(unavailable())


def test_gcc_runs_kernels_without_contraction(
    search_again: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.which("g++")
    if path is None:
        pytest.skip("no g++")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: path if name == "g++" else None)
    monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "_compiled", {})
    found = compiler.find()
    assert found is not None
    if found.is_clang:
        pytest.skip("g++ is clang here")
    assert not found.models_contraction
    body = """
    threadgroup float row[64];
    uint e = thread_position_in_grid.x;
    row[63 - e] = simd_sum(array[e]) + float(bfloat(array[e])) / 3.0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[e] = row[e];
    """
    sums = np.repeat(NUMBERS.reshape(2, 32).sum(1), 32)
    for chosen in (VARIANTS[0], VARIANTS[-1]):
        with variant(chosen):
            result = run(body, {"array": NUMBERS}, (64,), grid=64, threadgroup=64)
        assert np.array_equal(np.array(result), (sums + NUMBERS / np.float32(3))[::-1])
