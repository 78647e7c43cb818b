"""The kernel benchmark says what it did, and gives no speed to a kernel whose result differs.

python -m pytest tests/test_bench_metal.py
"""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks import bench_metal
from benchmarks.kernel_case import TINY, Case, float_comparison
from benchmarks.kernel_report import NOT_MEASURED, REFUSED, Row
from benchmarks.timing import Spread
from mlxstacks.ops import kernels
from tests import metal_emulator
from tests.cases import TOLERANCES

ROOT = Path(__file__).resolve().parents[1]
COPY = Spread(1e9, 0.9e9, 1.1e9)

no_metal = pytest.mark.skipif(mx.metal.is_available(), reason="this machine has a Metal device")


def _case(kernel: str, label: str = "") -> Case:
    found = (case for case in bench_metal.cases(TINY) if case.kernel == kernel)
    return next(case for case in found if case.label.startswith(label))


KERNELS = ("requant", "dequant", "expert_delta", "stack_sum")


@no_metal
def test_quick_run_without_a_metal_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert bench_metal.main(["--quick", "--rounds", "1", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No Metal device")
    assert lines[-1] == f"All figures: {file}"
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert {row["kernel"] for row in rows} == set(KERNELS)
    assert not any(row["ran_on"] == "metal" for row in rows)
    if result["machine"]["backend"] == "cpu":
        assert "Metal GPU: not measured" in lines
        # No number that could be taken for a kernel's speed.
        for row in rows:
            assert row["kernel_seconds"] is None
            assert row["kernel_peak_bytes"] is None
            assert set(row["bars"].values()) <= {NOT_MEASURED}
            assert row["composition_on"] == "cpu"
            assert row["composition_seconds"]["median"] > 0
        if metal_emulator.unavailable() is None:
            assert all(row["ran_on"] == "emulator" and row["agrees"] for row in rows)


def test_it_needs_only_what_its_target_installs() -> None:
    """`make bench-metal` installs mlx, numpy, rich and filelock."""
    code = (
        "import sys, benchmarks.bench_metal\n"
        "heavy = {'mlx_lm', 'pydantic', 'click', 'scipy', 'yaml'} & {*sys.modules}\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unknown_case_is_refused_with_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_metal.main(["--only", "no such kernel"])
    assert stop.value.code == 2
    assert "expert_delta" in capsys.readouterr().err


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernel_gets_a_speed(kernel: str) -> None:
    row = bench_metal.bench(_case(kernel), COPY, rounds=1, timed=True, barred=False)
    assert row.agrees is True
    assert row.kernel_seconds is not None
    assert row.share_of_copy == pytest.approx(row.needed_bytes / row.kernel_seconds.median / 1e9)
    assert row.largest_error is not None
    assert math.isfinite(row.largest_error)


def _corrupting(position: int) -> Callable[..., Callable[..., list[mx.array]]]:
    """A maker whose kernels change one element of output `position`."""

    def maker(*arguments: Any, **settings: Any) -> Callable[..., list[mx.array]]:
        right = metal_emulator.metal_kernel(*arguments, **settings)

        def call(**launch: Any) -> list[mx.array]:
            outputs: list[mx.array] = list(right(**launch))
            flat = outputs[position].flatten()
            flat[0] = (flat[0] * 2 + 1).astype(flat.dtype)
            outputs[position] = flat.reshape(outputs[position].shape)
            return outputs

        return call

    return maker


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("kernel", "label", "position", "differs"),
    [
        ("requant", "keep", 0, "codes"),
        ("requant", "keep", 3, "sums"),
        ("requant", "refit", 1, "scales"),
        ("requant", "promote", 2, "biases"),
        ("dequant", "", 0, "values"),
        ("expert_delta", "", 0, "outputs"),
        ("stack_sum", "", 0, "outputs"),
    ],
)
def test_planted_error_gets_no_speed(kernel: str, label: str, position: int, differs: str) -> None:
    with kernels.substitute("planted", _corrupting(position)):
        case = _case(kernel, label)
        row = bench_metal.bench(case, COPY, rounds=1, timed=True, barred=True)
    assert row.agrees is False
    assert row.failed
    assert row.differs == (differs,)
    assert f"differs from the reference in {differs};" in row.verdict()
    assert row.kernel_seconds is None
    assert row.kernel_peak_bytes is None
    assert row.bytes_per_second is None
    assert set(row.bars().values()) <= {NOT_MEASURED}


@pytest.mark.usefixtures("emulator")
def test_planted_error_ends_the_run_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = kernels.substitute("planted", _corrupting(0))
    monkeypatch.setattr(bench_metal, "where", lambda: ("cpu", planted))
    assert bench_metal.main(["--quick", "--rounds", "1", "--only", "dequant 3"]) == 1
    printed = capsys.readouterr().out
    assert REFUSED in printed
    assert "differs from the reference in values; largest error" in printed
    assert all(row["agrees"] is False for row in json.loads(printed.splitlines()[-1])["rows"])


def _maker(launch: Callable[..., list[mx.array]]) -> Callable[..., Any]:
    return lambda *_, **made: partial(launch, made["name"])


def _run(
    launch: Callable[..., list[mx.array]], monkeypatch: pytest.MonkeyPatch, *options: str
) -> int:
    """The benchmark at tiny shapes, with kernels that do what `launch` does."""
    planted = kernels.substitute("planted", _maker(launch))
    monkeypatch.setattr(bench_metal, "where", lambda: ("cpu", planted))
    return bench_metal.main(["--quick", "--rounds", "1", *options])


def test_kernel_that_cannot_be_built_is_reported_beside_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, **_: Any) -> list[mx.array]:
        raise RuntimeError(f"[metal::Device] Unable to build metal library\n{name}: error 7")

    assert _run(refused, monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert {row["kernel"] for row in result["rows"]} == set(KERNELS)
    for row in result["rows"]:
        assert row["agrees"] is None
        assert row["unchecked"].startswith("RuntimeError: [metal::Device] Unable to build")
        assert row["kernel_seconds"] is None
        assert row["composition_seconds"]["median"] > 0
    assert sum(line == "dequant: error 7" for line in lines) == 4
    assert any("no result, see below" in line for line in lines)


def test_result_that_is_not_a_number_is_null_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(_: str, **launch: Any) -> list[mx.array]:
        outputs = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
        return [mx.full(shape, mx.nan).astype(dtype) for shape, dtype in outputs]

    def unknown(constant: str) -> None:
        raise AssertionError(f"JSON has no {constant}")

    assert _run(nothing, monkeypatch, "--only", "expert_delta") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    for row in json.loads(last, parse_constant=unknown)["rows"]:
        assert (row["agrees"], row["largest_error"], row["relative_error"]) == (False, None, None)


def test_interrupted_run_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> list[mx.array]:
        raise KeyboardInterrupt

    assert _run(interrupted, monkeypatch, "--only", "DEQUANT 3 bit, Down") == 130
    printed = capsys.readouterr()
    assert printed.err.splitlines()[1:] == ["stopped: nothing is reported"]
    assert not any(line.startswith("{") for line in printed.out.splitlines())


def test_errors_of_floats_are_shares_of_what_they_may_be_a_share_of() -> None:
    wanted = mx.array([[100.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    relative, absolute = TOLERANCES[mx.bfloat16]
    near = float_comparison(mx.array([[100.5, 1, 0], [0, 0, 0]]).astype(mx.bfloat16), wanted)
    assert near.agrees
    assert near.largest_error == 0.5
    assert near.relative_error == pytest.approx(0.5 / (100 + absolute / relative * 100))
    assert near.allowed == relative
    for wrong in ([[100, 1.25, 0]], [[100, 1, absolute * 200]], [[100, 1, math.nan]]):
        found = mx.array([*wrong, [0.0, 0.0, 0.0]]).astype(mx.bfloat16)
        far = float_comparison(found, wanted)
        assert far.differs == ("outputs",)
        assert not far.relative_error <= relative  # type: ignore[operator]
    assert float_comparison(wanted[1:], wanted[1:]).relative_error == 0


def test_unchecked_kernel_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_metal, "unavailable", lambda: "no compiler")
    monkeypatch.setattr(kernels, "backend", lambda: None)
    row = bench_metal.bench(_case("dequant"), COPY, rounds=1, timed=True, barred=True)
    assert (row.agrees, row.unchecked, row.kernel_seconds) == (None, "no compiler", None)


# --- bars ---------------------------------------------------------------------------------------


def _row(kernel: str, case: str, seconds: float, **changes: Any) -> Row:
    even = Spread(seconds, seconds, seconds)
    row = Row(
        kernel=kernel,
        case=case,
        ran_on="cuda",
        agrees=True,
        largest_error=0.0,
        relative_error=None,
        allowed_error=0.0,
        differs=(),
        unchecked=None,
        needed_bytes=1_000_000_000,
        input_bytes=1_000_000,
        kernel_seconds=even,
        kernel_alone_seconds=even,
        kernel_peak_bytes=100,
        composition="",
        composition_on="cuda",
        composition_seconds=Spread(3.0, 3.0, 3.0),
        composition_alone_seconds=Spread(3.0, 3.0, 3.0),
        composition_peak_bytes=400,
        copy_bytes_per_second=2e9,
        barred=True,
    )
    return dataclasses.replace(row, **changes)


@pytest.mark.parametrize(
    ("row", "verdicts"),
    [
        (_row("dequant", "3 bit", 0.8), ["met"]),
        (_row("dequant", "3 bit", 0.9), ["not met"]),
        (_row("requant", "keep 3 bit", 1.0), ["met", "met", "met"]),
        (_row("requant", "promote 3 to 6 bit", 3.0), ["not met", "not met", "met"]),
        (_row("requant", "keep 3 bit", 1.0, kernel_peak_bytes=101), ["met", "met", "not met"]),
        (_row("requant", "keep 3 bit", 1.0, barred=False), [NOT_MEASURED] * 3),
        (_row("requant", "keep 3 bit", 1.0, kernel_seconds=None), [NOT_MEASURED] * 2 + ["met"]),
        (_row("requant", "refit 3 bit", 1.0), []),
        (_row("stack_sum", "1 token", 1.0), []),
    ],
)
def test_bars_of_the_design(row: Row, verdicts: Sequence[str]) -> None:
    assert list(row.bars().values()) == verdicts


def test_row_is_json_with_units_in_its_keys() -> None:
    text = json.dumps(_row("dequant", "3 bit", 0.8).as_json())
    parsed = json.loads(text)
    assert parsed["bytes_per_second"] == pytest.approx(1.25e9)
    assert parsed["share_of_copy"] == pytest.approx(0.625)
    assert parsed["speed_ratio"] == pytest.approx(3.75)
    assert parsed["bars"] == {"copy >= 60%": "met"}
