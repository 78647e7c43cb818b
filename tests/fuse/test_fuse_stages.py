"""Several adapters in order: decisions, verdict and gate speak of every stage.

Run: pytest tests/fuse/test_fuse_stages.py
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import AdapterError, CheckpointError, TargetError
from mlxstacks.files.adapters import read_adapter, write_adapter
from mlxstacks.files.checkpoint import INDEX_NAME, open_checkpoint
from mlxstacks.files.lora_modules import FINGERPRINT_KEY
from mlxstacks.files.shards import ShardWriter, read_header
from mlxstacks.files.stored_weight import stored_weight
from mlxstacks.fuse import decide
from mlxstacks.fuse.blocks import measure
from mlxstacks.fuse.fidelity import Fidelity
from mlxstacks.ops.policies import Groups
from mlxstacks.study.result import Result
from tests.files.raw import mounted
from tests.fuse.cases import assert_same_bytes, fuse
from tests.tiny_models import random_adapter, write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mx.set_default_device(mx.cpu)
    return write_llama(tmp_path_factory.mktemp("base") / "model", bits=4, shards=2)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return random_adapter(model, ["self_attn.q_proj", "mlp.down_proj"], std=0.01)


@pytest.fixture(scope="module")
def zeros(model: Path) -> Path:
    return random_adapter(model, ["mlp.down_proj"], std=0.0, seed=5)


def test_nearest_is_decided_on_all_rows_in_a_first_stage(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module larger than the sample, and a delta large enough for nearest, in two stages."""
    monkeypatch.setattr(decide, "_SAMPLE_WEIGHTS", 4096)
    large = [
        random_adapter(model, ["mlp.down_proj"], std=0.2, seed=seed, directory=tmp_path / str(seed))
        for seed in (1, 2)
    ]
    report = fuse(model, large, tmp_path / "out")
    assert [s.modules[0].policy for s in report.stages] == ["nearest", "nearest"]


@pytest.mark.parametrize(("std", "factor", "target"), [(0.01, 0.0, 0.95), (0.05, 0.1, 0.98)])
def test_a_nearest_that_a_sample_shows_is_confirmed_on_all_rows(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    std: float,
    factor: float,
    target: float,
) -> None:
    """The sampled rows say "near enough", or that there is nothing to add; the others do not."""
    monkeypatch.setattr(decide, "_SAMPLE_WEIGHTS", 4096)
    adapter = read_adapter(
        random_adapter(model, ["mlp.down_proj"], std=std, directory=tmp_path / "even")
    )
    modules = {}
    for name, module in adapter.modules.items():
        lora_b = module.lora_b.copy()  # (R, N)
        sampled = np.zeros(lora_b.shape[1], bool)
        for first, last in decide._row_runs(len(sampled), module.lora_a.shape[0], 4096):
            sampled[first:last] = True
        assert sampled.mean() < 0.5
        lora_b[:, sampled if factor == 0 else ~sampled] *= factor
        modules[name] = replace(module, lora_b=lora_b)
    write_adapter(replace(adapter, modules=modules), tmp_path / "uneven")
    report = fuse(model, [tmp_path / "uneven"], tmp_path / "out", target_correlation=target)
    for fused in report.stages[0].modules:
        assert fused.policy.startswith("promote-")
        estimate = fused.tried["nearest"].correlation
        assert estimate is not None
        assert estimate < target
        assert fused.tried["nearest"].weights == weight_of(model, fused.path).size


class Estimates:
    """Stands for a sample: candidate -> (correlation, error)."""

    def __init__(
        self, bits: int, found: Mapping[str, tuple[float, float | None]], is_whole: bool = False
    ) -> None:
        codes = np.zeros((1, 64), np.uint8)
        self.state = Groups(codes, np.ones(1), np.zeros(1), bits, "F32")
        self.found, self.is_whole = found, is_whole

    def estimate(self, decision: decide.Decision) -> Fidelity:
        correlation, error = self.found[decide.policy_name(decision)]
        return Fidelity(1, 0.1, 1.0, correlation, error, 0.1, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("is_whole", "bits"), [(True, 5), (False, 6)])
def test_a_sampled_promotion_has_to_clear_the_target_by_a_margin(is_whole: bool, bits: int) -> None:
    """A tenth of what is missing to 1: 0.982 for a target of 0.98."""
    found = {"promote-5": (0.981, 0.2), "promote-6": (0.983, 0.2), "promote-8": (0.999, 0.1)}
    sample: Any = Estimates(4, found, is_whole)
    assert decide.promotion(sample, 0.98, {}) == decide.Decision("promote", bits)


@pytest.mark.parametrize(
    ("plain", "nearest", "policy"),
    [(0.1, 0.2, "dequantize"), (0.2, 0.1, "nearest"), (0.1, 0.1, "nearest"),
     (None, None, "nearest")],
)  # fmt: skip
def test_of_eight_bits_and_plain_the_closer_is_taken(
    plain: float | None, nearest: float | None, policy: str
) -> None:
    sample: Any = Estimates(8, {"dequantize": (0.9, plain), "nearest": (0.9, nearest)})
    tried: dict[str, Fidelity] = {}
    assert decide.promotion(sample, 0.98, tried).policy == policy
    assert tried.keys() == {"dequantize", "nearest"}


def test_a_promoted_code_is_changed_where_it_is_not_the_old_one_widened() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16
    before = Groups(codes, np.full(1, 0.5, np.float32), np.zeros(1, np.float32), 4, "F32")
    wide = codes << np.uint8(2)
    wide[0, :3] += 1
    after = Groups(wide, before.scales / 4, before.biases, 6, "F32")
    sums = measure(before, after, np.zeros((1, 64), np.float32), None)
    assert (sums.codes, sums.codes_changed, sums.codes_changed_at_zero) == (64, 3, 0)


@pytest.mark.parametrize("requant", ["refit", "dequantize"])
def test_zero_verdict_does_not_hide_an_earlier_stage(
    model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    """The second stage changes nothing any more; the first one did."""
    report = fuse(model, [adapter] * 2, tmp_path / "out", requant=requant, zero_delta=True)
    artifacts = [stage.total.artifact for stage in report.stages if stage.total]
    assert artifacts[0]
    assert not artifacts[1]
    assert "the fuse itself changed the weights by" in report.verdict
    assert "in stage 1, 0% in stage 2" in report.verdict


def test_verdict_and_gate_see_every_stage(
    model: Path, adapter: Path, zeros: Path, tmp_path: Path
) -> None:
    report = fuse(model, [adapter, zeros], tmp_path / "out", requant="keep", fail_under=0.95)
    assert report.verdict.startswith("stage 1: correlation 0.")
    assert "; stage 2: nothing to add; " in report.verdict
    assert report.failed_gate is not None
    assert report.failed_gate.startswith("total correlation of stage 1 ")
    assert "the delta of stage 2 is zero: no correlation" in report.failed_gate


@pytest.mark.parametrize("requant", ["refit", "auto", "dequantize", "stochastic"])
def test_the_total_is_what_all_stages_kept(
    model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    """Against the weights of both models in float64; the second takes back part of the first."""
    second = random_adapter(
        model, ["mlp.down_proj", "self_attn.v_proj"], std=0.05, seed=3,
        directory=tmp_path / "second",
    )  # fmt: skip
    report = fuse(model, [adapter, second], tmp_path / "out", requant=requant)
    control = fuse(model, [adapter, second], tmp_path / "zero", requant=requant, zero_delta=True)
    deltas: dict[str, np.ndarray] = {}
    for path in (adapter, second):
        for name, module in read_adapter(path).modules.items():
            product = np.float64(module.scale) * (module.lora_a @ module.lora_b).T
            deltas[name] = deltas.get(name, 0.0) + product
    fd = dd = ff = zz = ww = 0.0
    for name, delta in deltas.items():
        old, new, zero = (
            weight_of(at, name) for at in (model, tmp_path / "out", tmp_path / "zero")
        )
        fd, dd, ff = (
            fd + ((new - old) * delta).sum(), dd + (delta**2).sum(), ff + ((new - old) ** 2).sum()
        )  # fmt: skip
        zz, ww = zz + ((zero - old) ** 2).sum(), ww + (old**2).sum()
    total = report.total
    assert total is not None
    assert total.survival == pytest.approx(fd / dd, rel=1e-4)
    assert total.correlation == pytest.approx(fd / math.sqrt(ff * dd), rel=1e-4)
    if all(m.policy in (requant, "add") for stage in control.stages for m in stage.modules):
        assert total.artifact == pytest.approx(math.sqrt(zz / ww), rel=1e-4, abs=1e-9)
    assert f"; all 2 together: correlation {total.correlation:.3f} " in report.verdict
    result = Result.open(tmp_path / "out")
    assert result.data["total"] == total.as_json()
    assert result.table("together").correlation[0] == total.correlation
    assert "sum of the adapters" in str(result)


def weight_of(directory: Path, name: str) -> np.ndarray:
    stored = stored_weight(open_checkpoint(directory), name)
    raw = mx.load(str(stored.weight.file))
    weight, scales = raw[f"{name}.weight"], raw.get(f"{name}.scales")
    if scales is not None:
        grid = (scales.astype(mx.float32), raw[f"{name}.biases"].astype(mx.float32))
        weight = mx.dequantize(weight, *grid, stored.group_size, stored.bits)
    return np.array(weight.astype(mx.float32), np.float64)


def test_a_zero_adapter_is_called_so(model: Path, zeros: Path, tmp_path: Path) -> None:
    report = fuse(model, [zeros], tmp_path / "out")
    assert report.verdict.startswith("the delta is zero, or too small for float32; at zero delta")


def test_promote_stays_at_the_bits_that_were_asked_for(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, [adapter] * 2, tmp_path / "out", requant="promote", bits=("*=6",))
    policies = [[m.policy for m in stage.modules] for stage in report.stages]
    assert policies == [["promote-6"] * 4, ["nearest"] * 4]


def test_a_high_target_can_be_reached_from_a_sample(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The margin of a sampled promotion must not lift the target above 1."""
    monkeypatch.setattr(decide, "_SAMPLE_WEIGHTS", 4096)
    large = random_adapter(model, ["mlp.down_proj"], std=0.1, seed=9, directory=tmp_path / "large")
    report = fuse(model, [large], tmp_path / "out", requant="promote", target_correlation=0.999)
    assert {m.bits_after for m in report.stages[0].modules} == {6}


@pytest.mark.parametrize("metadata", ["text", 5, [1], None])
def test_odd_index_metadata_is_left_behind(
    model: Path, adapter: Path, tmp_path: Path, metadata: object
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    index = json.loads((odd / INDEX_NAME).read_text())
    (odd / INDEX_NAME).write_text(json.dumps({**index, "metadata": metadata}))
    fuse(odd, [adapter], tmp_path / "out")
    written = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert written["metadata"].keys() == {"total_size"}


def test_a_config_nested_without_end_is_refused(model: Path, adapter: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    config = (odd / "config.json").read_text().rstrip().removesuffix("}")
    (odd / "config.json").write_text(config + ', "x": ' + "[" * 600 + "]" * 600 + "}")
    with pytest.raises(CheckpointError, match=r"config\.json: nested more than 100 levels"):
        fuse(odd, [adapter], tmp_path / "out")


def test_files_behind_the_links_of_a_hub_cache_are_not_replaced(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    shutil.copytree(model, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    with pytest.raises(TargetError, match="is or holds"):
        fuse(snapshot, [adapter], blobs, force=True)
    assert_same_bytes(model, blobs)


def test_plan_counts_the_copies_on_another_file_system(model: Path, tmp_path: Path) -> None:
    first_shard = random_adapter(
        model, ["model.embed_tokens"], std=0.01, directory=tmp_path / "first"
    )
    with mounted(tmp_path / "other", "-t", "tmpfs", "tmpfs") as other:
        plan = fuse(model, [first_shard], other / "out", dry_run=True)
        done = fuse(model, [first_shard], other / "out")
    assert [file["how"] for file in plan.files] == ["rewritten", "copied"]
    assert [file["how"] for file in done.files] == ["rewritten", "copied"]
    assert plan.files[1]["written_bytes"] == done.files[1]["written_bytes"]


def test_sub_byte_tensors_beside_a_touched_module_are_kept(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """F4 can be copied, not read; its bytes count in the plan and in the index."""
    odd = tmp_path / "odd"
    shutil.copytree(model, odd)
    path = sorted(odd.glob("model*.safetensors"))[0]
    header = read_header(path)
    entries = [(i.name, i.dtype, i.shape) for i in header.tensors.values()]
    with ShardWriter(tmp_path / "new", [*entries, ("extra.packed", "F4", (2, 4))]) as writer:
        for info in header.tensors.values():
            writer.copy(info)
        writer.write("extra.packed", b"abcd")
    (tmp_path / "new").replace(path)
    fuse(odd, [adapter], tmp_path / "out")
    written = read_header(tmp_path / "out" / path.name).tensors["extra.packed"]
    assert (written.dtype, written.shape, written.nbytes) == ("F4", (2, 4), 4)
    assert written.file.read_bytes()[written.start : written.end] == b"abcd"
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    headers = [read_header(file) for file in (tmp_path / "out").glob("model*.safetensors")]
    total = sum(info.nbytes for header in headers for info in header.tensors.values())
    assert index["metadata"]["total_size"] == total


def test_another_base_is_fused_on_request_and_marked(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    marked = replace(read_adapter(adapter), metadata={FINGERPRINT_KEY: "0" * 64})
    write_adapter(marked, tmp_path / "marked")
    with pytest.raises(AdapterError, match="--allow-base"):
        fuse(model, [tmp_path / "marked"], tmp_path / "out")
    report = fuse(model, [adapter, tmp_path / "marked"], tmp_path / "out", allow_base=True)
    assert {m.base for m in report.stages[1].modules} == {"overridden"}
    assert len(report.notes) == 1
    assert str(tmp_path / "marked") in report.notes[0]
    assert fuse(model, [adapter], tmp_path / "plain").notes == []
