"""A fuse that keeps sizes clones its shards and writes what changes. Run: pytest
tests/fuse/test_in_place.py
"""

import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import TargetError
from mlxstacks.files import side_files
from mlxstacks.files.shards import ShardPatcher, ShardWriter, read_header
from mlxstacks.fuse import rewrite
from tests.files.raw import reflink_disk
from tests.fuse.cases import copied, fuse
from tests.tiny_models import random_adapter, write_qwen_moe

DOWN = "mlp.switch_mlp.down_proj"


@pytest.fixture
def clones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that clones."""
    monkeypatch.setattr(side_files, "clone", copied)
    monkeypatch.setattr(rewrite, "clone", copied)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mx.set_default_device(mx.cpu)
    return write_qwen_moe(tmp_path_factory.mktemp("base") / "model", hidden_size=64)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return random_adapter(model, [DOWN, "self_attn.q_proj"], rank=2, std=0.01)


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("model*.safetensors")}


@pytest.mark.usefixtures("clones")
@pytest.mark.parametrize("requant", ["refit", "keep", "nearest", "stochastic"])
def test_a_patched_shard_has_the_bytes_of_a_rewritten_one(
    model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    patched = fuse(model, adapter, tmp_path / "patched", requant=requant)
    rewritten = fuse(model, adapter, tmp_path / "rewritten", requant=requant, copy_shards=True)
    assert shards(tmp_path / "patched") == shards(tmp_path / "rewritten")
    hows = {file["how"] for file in patched.files}
    assert "patched" in hows
    assert "rewritten" not in hows
    assert {file["how"] for file in rewritten.files} <= {"rewritten", "copied"}
    assert 0 < patched.written_bytes <= rewritten.written_bytes


@pytest.mark.usefixtures("clones")
def test_what_does_not_change_is_not_written(model: Path, adapter: Path, tmp_path: Path) -> None:
    report = fuse(model, adapter, tmp_path / "zero", requant="nearest", zero_delta=True)
    assert report.written_bytes == 0
    assert shards(tmp_path / "zero") == shards(model)


@pytest.mark.usefixtures("clones")
def test_a_shard_whose_tensors_grow_is_written_anew(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, adapter, tmp_path / "wider", requant="promote")
    assert "patched" not in {file["how"] for file in report.files}


@pytest.mark.usefixtures("clones")
def test_a_full_disk_while_patching_leaves_nothing(
    model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shards(model)

    def full(self: ShardPatcher, data: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardPatcher, "_put", full)
    with pytest.raises(TargetError, match="the disk is full"):
        fuse(model, adapter, tmp_path / "out", requant="keep")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert shards(model) == before


def test_on_a_file_system_with_clones_the_source_stays(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    """The real thing: XFS with copy-on-write, where the tools and rights for it are there."""
    with reflink_disk(tmp_path / "disk") as disk:
        shutil.copytree(model, disk / "model")
        before = shards(disk / "model")
        report = fuse(disk / "model", adapter, disk / "out", requant="nearest")
        assert "patched" in {file["how"] for file in report.files}
        assert shards(disk / "model") == before
        fuse(model, adapter, tmp_path / "elsewhere", requant="nearest", copy_shards=True)
        assert shards(disk / "out") == shards(tmp_path / "elsewhere")


def test_patches_are_blocks_that_differ(tmp_path: Path) -> None:
    values = np.arange(1 << 18, dtype=np.uint32)  # 1 MiB
    with ShardWriter(tmp_path / "a", [("x", "U32", values.shape), ("y", "U32", (2,))]) as writer:
        writer.write("x", values)
        writer.write("y", np.zeros(2, np.uint32))
    copied(tmp_path / "a", tmp_path / "b")
    values[5], values[-1] = 7, 7
    with ShardPatcher(tmp_path / "b", read_header(tmp_path / "a")) as patcher:
        patcher.write("x", values[:1000])
        patcher.write("x", values[1000:])
        patcher.copy(read_header(tmp_path / "a").tensors["y"])
        written = patcher.close()
    assert 0 < written <= 4000 + (1 << 16)
    found = mx.load(str(tmp_path / "b"), format="safetensors")
    assert isinstance(found, dict)
    np.testing.assert_array_equal(np.array(found["x"]), values)
    with pytest.raises(ValueError, match="incomplete"):
        ShardPatcher(tmp_path / "b", read_header(tmp_path / "a")).close()
    with pytest.raises(ValueError, match="has other tensors"):
        ShardWriter(tmp_path / "c", [("x", "U32", (1,))], like=read_header(tmp_path / "a"))
