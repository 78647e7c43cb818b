"""`doctor` and the limits it prints. Run: pytest tests/test_doctor.py"""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from mlxstacks import memory, resources
from mlxstacks.doctor import Disk, DoctorSettings, Health, doctor, findings_of, look
from mlxstacks.study.render.console import print_result
from mlxstacks.study.result import Result


@pytest.fixture(scope="module")
def health() -> Health:
    return look(DoctorSettings())


@pytest.fixture(scope="module")
def result() -> Result:
    return doctor(DoctorSettings(measure=False))


def test_everything_is_said_and_is_json(health: Health) -> None:
    found = json.loads(json.dumps(asdict(health)))
    assert found["device"]["resource_limit"] > 0
    assert found["versions"]["mlx"]
    assert found["matmul_gflops"] > 0
    assert found["disks"][0]["free_bytes"] > 0


def test_table_fits_80_columns(health: Health, result: Result) -> None:
    stream = io.StringIO()
    print_result(Console(file=stream, width=80), result)
    assert max(map(len, stream.getvalue().splitlines())) <= 80
    assert health.device.name in stream.getvalue()
    assert result.outcome == "nothing that will be slow or fail" or result.outcome[0].isdigit()


def test_slow_machine_is_told_why_and_what_to_do(health: Health) -> None:
    cpu = replace(health.device, kind="cpu")
    slow = replace(health, device=cpu, matmul_gflops=3.0, blas="reference", compiler=None)
    found = {finding.what: finding for finding in findings_of(slow)}
    assert "LD_PRELOAD=" in found["float32 matmul at 3.0 GFLOP/s"].remedy
    assert found["no C++ compiler"].kind == "problem"
    fast = replace(slow, matmul_gflops=300.0, compiler="/usr/bin/c++")
    assert not any("matmul" in finding.what for finding in findings_of(fast))


@pytest.mark.parametrize("gflops", [3.0, 140.0, None])
def test_openblas_is_not_called_slow_even_on_a_busy_machine(
    health: Health, gflops: float | None
) -> None:
    cpu = replace(health.device, kind="cpu")
    loaded = replace(health, device=cpu, matmul_gflops=gflops, blas="openblas", compiler="c++")
    (finding,) = [f for f in findings_of(loaded) if "matmul" in f.what]
    assert finding.kind == "note"
    assert "float32 matmul is fast" in finding.what
    assert "quantized ones are not" in finding.what
    assert "LD_PRELOAD" not in finding.remedy


@pytest.mark.parametrize("is_there", [True, False])
def test_openblas_is_to_be_installed_only_where_it_is_not(
    health: Health, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = replace(health.device, kind="cpu")
    slow = replace(health, device=cpu, matmul_gflops=0.5, blas="reference", compiler="c++")
    monkeypatch.setattr(Path, "exists", lambda path: is_there)
    (finding,) = [f for f in findings_of(slow) if "matmul" in f.what]
    assert ("apt-get install" in finding.remedy) is not is_there
    assert "export LD_PRELOAD=/usr/lib/" in finding.remedy


def test_full_and_read_only_disks(health: Health) -> None:
    poor = [Disk("here", 3_000_000_000, None), Disk("there", 10**12, "copied")]
    found = [finding.what for finding in findings_of(replace(health, disks=poor))]
    assert [w for w in found if "here" in w] == ["3.0 GB free at here", "here cannot be written"]


def test_leaves_nothing_behind(work_dir: Path) -> None:
    doctor(DoctorSettings(measure=False))
    assert list(work_dir.iterdir()) == []


def test_limit_is_the_usual_one_without_a_metal_device() -> None:
    device = memory.device()
    if device.kind != "metal":
        assert (device.resource_limit, device.resource_limit_known) == (499_000, False)
    assert device.memory_bytes is None or device.memory_bytes > 0


@pytest.mark.metal
def test_limit_of_a_metal_device_is_its_own() -> None:
    device = memory.device()
    assert device.resource_limit_known
    assert device.working_set_bytes is not None


def test_counters_follow_an_allocation() -> None:
    import mlx.core as mx

    before = memory.counters().active_bytes
    held = mx.zeros((1024, 1024), dtype=mx.float32)
    mx.eval(held)
    assert memory.counters().active_bytes - before >= held.nbytes
    assert memory.peak_resident_bytes() > held.nbytes


def test_resources_are_found() -> None:
    assert (resources.resource_dir("kernels") / "README.md").is_file()
    assert list(resources.resource_dir("recipes").glob("*.yaml"))
    with pytest.raises(ValueError, match="allowed are kernels, recipes"):
        resources.resource_dir("recepies")
