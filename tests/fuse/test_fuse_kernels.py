"""A fuse by the requant kernel writes the same files as by NumPy, and reports the same figures.

The kernel runs in the emulator. Run: pytest tests/fuse/test_fuse_kernels.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.cli import run as command_line
from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.fuse import decide, kernel_task, module, rewrite
from mlxstacks.fuse.delta import LowRankDelta, product_is_chain
from mlxstacks.fuse.report import FuseReport
from mlxstacks.ops import kernels
from mlxstacks.ops.low_rank import low_rank_delta
from tests.fuse.cases import fuse
from tests.metal_emulator import metal_kernel
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

DOWN = "mlp.switch_mlp.down_proj"
KEYS = [DOWN, "mlp.gate", "mlp.shared_expert.up_proj", "self_attn.q_proj"]
# Figures are roots and ratios of float32 sums of the same terms in another order.
FIGURE_RTOL = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 3-bit mixture of experts with 8-bit gates."""
    mx.set_default_device(mx.cpu)
    return write_qwen_moe(tmp_path_factory.mktemp("base") / "model", bits=3)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return random_adapter(model, KEYS, rank=3, std=0.02)


@pytest.fixture
def launches(emulator: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies of the tasks that went to the kernel."""
    seen: list[str] = []
    before = kernel_task.run_kernel_task

    def noted(task: Any) -> Any:
        seen.extend(decision.policy for decision, _, _ in task.stages.values())
        return before(task)

    monkeypatch.setattr(rewrite, "run_kernel_task", noted)
    return seen


@pytest.fixture
def chain_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """A CPU whose products are the kernels' chain, as by OpenBLAS; of each task of the kernel,
    whether it took the pair.
    """
    took: list[bool] = []
    before = kernel_task._requantized

    def chain(self: LowRankDelta, product: mx.array, first: int, last: int) -> np.ndarray:
        left, right = self.operands(first, last)
        return np.array(low_rank_delta(right, left, self.scale)).reshape(last - first, self.width)

    def noted(task: Any, *rest: Any) -> Any:
        took.append(task.low_rank is not None)
        return before(task, *rest)

    monkeypatch.setattr(LowRankDelta, "_float32", chain)
    monkeypatch.setattr(kernel_task, "_requantized", noted)
    product_is_chain.cache_clear()
    yield took
    product_is_chain.cache_clear()


def assert_same_files(first: Path, second: Path) -> None:
    """Every shard byte for byte, and the same config and index."""
    names = sorted(path.name for path in first.iterdir() if not path.name.startswith("result."))
    assert names == sorted(p.name for p in second.iterdir() if not p.name.startswith("result."))
    assert any(name.endswith(".safetensors") for name in names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def figures(report: FuseReport) -> Iterator[tuple[str, dict[str, float | None]]]:
    for number, stage in enumerate(report.stages):
        assert stage.total is not None
        yield f"stage {number}", stage.total.as_json()
        for fused in stage.modules:
            assert fused.fidelity is not None
            yield f"stage {number} {fused.path}", fused.fidelity.as_json()


def assert_same_figures(first: FuseReport, second: FuseReport) -> None:
    assert first.verdict == second.verdict
    for (where, left), (_, right) in zip(figures(first), figures(second), strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            wanted = right[name]
            assert (value is None) == (wanted is None), (where, name)
            if value is not None:
                assert value == pytest.approx(wanted, rel=FIGURE_RTOL, abs=1e-12), (where, name)


def by_both(model: Path, adapters: Path | list[Path], tmp_path: Path, **options: Any) -> FuseReport:
    """Fuse by NumPy and by the kernel, compare; the report of the kernel."""
    plain = fuse(model, adapters, tmp_path / "numpy", kernels=False, **options)
    made = fuse(model, adapters, tmp_path / "kernel", **options)
    assert (plain.kernels, made.kernels) == (None, "emulator")
    assert_same_files(tmp_path / "numpy", tmp_path / "kernel")
    assert_same_figures(made, plain)
    return made


@pytest.mark.parametrize("requant", ["refit", "keep", "nearest", "promote", "stochastic", "auto"])
def test_files_and_figures_are_those_of_numpy(
    launches: list[str],
    chain_products: list[bool],
    model: Path,
    adapter: Path,
    tmp_path: Path,
    requant: str,
) -> None:
    """All but refit hand the low-rank pair to the kernel."""
    report = by_both(model, adapter, tmp_path, requant=requant)
    assert set(chain_products) == {requant != "refit"}
    by_kernel = [m for m in report.stages[0].modules if m.policy != "dequantize"]
    assert len(launches) >= len(by_kernel) >= 5
    on_disk = json.loads((tmp_path / "kernel" / "result.json").read_text())["data"]
    assert on_disk["kernels"] == "emulator"
    by_numpy = json.loads((tmp_path / "numpy" / "result.json").read_text())["data"]
    assert by_numpy["kernels"] is None


@pytest.mark.parametrize(
    ("bits", "dtype", "lora_dtype", "zero_delta"),
    [
        (3, "bfloat16", "float32", False),
        (4, "float16", "bfloat16", False),
        (6, "float32", "float32", True),
    ],
)
def test_dequantize_by_its_kernel_is_that_of_numpy(
    launches: list[str],
    tmp_path: Path,
    bits: int,
    dtype: str,
    lora_dtype: str,
    zero_delta: bool,
) -> None:
    model = write_qwen_moe(tmp_path / "model", bits=bits, dtype=dtype)
    adapter = random_adapter(model, [DOWN, "mlp.gate"], rank=2, std=0.02, dtype=lora_dtype)
    report = by_both(model, adapter, tmp_path, requant="dequantize", zero_delta=zero_delta)
    assert set(launches) == {"dequantize"}
    assert report.total is not None
    assert (report.total.artifact == 0.0) == (dtype == "float32")


@pytest.mark.parametrize("requant", ["refit", "auto"])
def test_zero_delta_is_that_of_numpy(
    launches: list[str], model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    report = by_both(model, adapter, tmp_path, requant=requant, zero_delta=True)
    assert launches
    assert report.total is not None
    assert (report.total.artifact == 0.0) == (requant != "refit")


@pytest.mark.parametrize(
    ("bits", "group_size", "dtype", "lora_dtype"),
    [(4, 32, "float16", "bfloat16"), (2, 128, "bfloat16", "float16")],
)
def test_other_grids_and_adapters_are_those_of_numpy(
    launches: list[str], tmp_path: Path, bits: int, group_size: int, dtype: str, lora_dtype: str
) -> None:
    """Half-precision adapters: the rounded delta is not the cast of the intended one."""
    model = write_qwen_moe(tmp_path / "model", bits=bits, group_size=group_size, dtype=dtype)
    adapter = random_adapter(model, [DOWN, "mlp.gate"], rank=2, std=0.02, dtype=lora_dtype)
    by_both(model, adapter, tmp_path, requant="refit")
    assert set(launches) == {"refit"}


def test_a_cpu_that_sums_otherwise_multiplies_for_the_kernel(
    launches: list[str],
    chain_products: list[bool],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its product is rounded at each step, which moves last bits."""

    def rounded(self: LowRankDelta, product: mx.array, first: int, last: int) -> np.ndarray:
        left, right = (np.array(x) for x in self.operands(first, last))
        steps = [self.scale * left[..., [r]] * right[..., [r], :] for r in range(left.shape[-1])]
        return np.add.reduce(steps).astype(np.float32).reshape(last - first, self.width)

    monkeypatch.setattr(LowRankDelta, "_float32", rounded)
    adapter = random_adapter(model, [DOWN], rank=3, std=0.02, directory=tmp_path / "adapter")
    by_both(model, adapter, tmp_path, requant="keep")
    assert set(chain_products) == {False}


def test_two_stages_and_rows_in_pieces_are_those_of_numpy(
    launches: list[str], model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WEIGHTS_PER_TASK", 37 * 128)
    monkeypatch.setattr(module, "GROUPS_AT_ONCE", 11)
    second = random_adapter(model, [DOWN], std=0.05, seed=4, directory=tmp_path / "second")
    by_both(model, [adapter, second], tmp_path / "auto", requant="auto")
    by_both(model, [adapter, second], tmp_path / "stochastic", requant="stochastic", seed=3)
    assert {"promote", "stochastic"} <= set(launches)


def test_modules_that_the_kernel_cannot_take_go_by_numpy(
    launches: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain modules, `shift`, several adapters; the others of the same fuse take the kernel."""
    caplog.set_level("INFO", "mlxstacks")
    model = write_llama(tmp_path / "model", bits=4, unquantized=("q_proj",))
    adapter = random_adapter(model, ["self_attn.q_proj", "mlp.down_proj"], std=0.02)
    by_both(model, adapter, tmp_path, requant="keep")
    assert set(launches) == {"keep"}
    assert "q_proj is fused by NumPy: it is not quantized" in caplog.text
    report = fuse(model, [adapter, adapter], tmp_path / "plain", requant="dequantize")
    assert report.kernels is None
    assert "the kernel dequantizes for one adapter" in caplog.text
    report = fuse(model, adapter, tmp_path / "parity", requant="refit", device_parity=True)
    assert report.kernels is None
    assert "--device-parity asks for" in caplog.text


def test_without_a_backend_the_report_says_null(
    model: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kernels.backend() is not None:
        pytest.skip("a device is there")
    caplog.set_level("INFO", "mlxstacks")
    assert fuse(model, adapter, tmp_path / "out", requant="keep").kernels is None
    assert not caplog.messages


def _cannot_build(**made: Any) -> Any:
    def launch(**call: Any) -> list[mx.array]:
        raise RuntimeError("[metal::Device] Unable to build metal library\nerror: use of 'x'")

    return launch


def _last_code_off_by_one(**made: Any) -> Any:
    kernel = metal_kernel(**made)

    def launch(**call: Any) -> list[mx.array]:
        codes, *rest = kernel(**call)
        codes[-1, -1] = codes[-1, -1] ^ 1
        return [codes, *rest]

    return launch


@pytest.mark.parametrize(
    ("maker", "words"),
    [(_cannot_build, "Unable to build metal library"), (_last_code_off_by_one, "made other bytes")],
)
def test_a_device_that_fails_or_differs_is_not_used(
    emulator: None, model: Path, adapter: Path, tmp_path: Path, maker: Any, words: str
) -> None:
    plain = fuse(model, adapter, tmp_path / "numpy", requant="nearest", kernels=False)
    with kernels.substitute("faulty", maker):
        made = fuse(model, adapter, tmp_path / "kernel", requant="nearest")
    assert made.kernels is None
    assert [note for note in made.notes if words in note and "NumPy did the rest" in note]
    assert_same_files(tmp_path / "numpy", tmp_path / "kernel")
    assert_same_figures(made, plain)


@pytest.mark.parametrize(("flags", "name"), [(["--no-kernels"], None), ([], "emulator")])
def test_a_flag_turns_the_kernels_off(
    launches: list[str],
    model: Path,
    adapter: Path,
    work_dir: Path,
    capfd: pytest.CaptureFixture[str],
    flags: list[str],
    name: str | None,
) -> None:
    options = ["--model", str(model), "--adapter-path", str(adapter), "--save-path", "out"]
    capfd.readouterr()
    assert (
        command_line(["fuse", *options, "--requant", "keep", "--judge", "none", "--json", *flags])
        == 0
    )
    report = json.loads(capfd.readouterr().out)
    assert (report["data"]["kernels"], report["settings"]["kernels"]) == (name, not flags)
    assert bool(launches) == (name is not None)


@pytest.mark.parametrize(
    ("std", "requant", "kind", "message"),
    [
        (1e22, "keep", AdapterError, "beyond the range of float32"),
        (1e6, "refit", CheckpointError, "beyond the range of F16"),
    ],
)
def test_what_overflows_is_refused_by_the_kernel_too(
    launches: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    std: float,
    requant: str,
    kind: type[Exception],
    message: str,
) -> None:
    # The estimates would find it first, and then NumPy in the first task.
    monkeypatch.setattr(decide, "check_delta", lambda path, sums: None)
    monkeypatch.setattr(rewrite, "kernel_fault", lambda *task: None)
    model = write_qwen_moe(tmp_path / "model", bits=4, dtype="float16")
    adapter = random_adapter(model, [DOWN], rank=2, std=std)
    with pytest.raises(kind, match=message):
        fuse(model, adapter, tmp_path / "out", requant=requant)
    assert launches
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused_by_the_kernel_too(
    launches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a row that the estimates do not read."""
    monkeypatch.setattr(rewrite, "kernel_fault", lambda *task: None)
    for size in ("_SAMPLE_WEIGHTS", "_ALTERNATIVE_WEIGHTS"):
        monkeypatch.setattr(decide, size, 8 * 256)
    model = write_llama(tmp_path / "model", bits=4, shards=1)
    adapter = random_adapter(model, ["mlp.down_proj"], std=0.02)
    for shard in model.glob("model*.safetensors"):
        tensors, header = mx.load(str(shard), return_metadata=True)
        for name, value in tensors.items():
            if name.endswith("down_proj.biases"):
                value[63, 1] = mx.inf
        mx.eval(tensors)
        mx.save_safetensors(str(tmp_path / "damaged"), tensors, header)
        (tmp_path / "damaged.safetensors").replace(shard)
    with pytest.raises(CheckpointError, match=r"inf at \(63, 1\)"):
        fuse(model, adapter, tmp_path / "out", requant="keep")
    assert launches
