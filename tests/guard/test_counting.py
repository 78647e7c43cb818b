"""The counter of live buffers, in this process: exact, its own library, clear where it cannot be.

Run: pytest tests/guard/test_counting.py
"""

import gc
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError
from mlxstacks.guard import counting

needs_compiler = pytest.mark.skipif(counting.compiler() is None, reason="no C++ compiler")


@needs_compiler
def test_counts_are_exact() -> None:
    buffers = counting.counter()
    assert counting.counter() is buffers
    gc.collect()
    mx.synchronize()
    before = buffers.live
    kept = [mx.full((300,), value) for value in range(40)]
    mx.eval(kept)
    mx.synchronize()
    buffers.reset()
    assert buffers.live == buffers.peak == before + 40
    held = buffers.peak_bytes
    mx.eval(more := mx.zeros((1000,)))
    mx.synchronize()
    assert buffers.live == before + 41
    assert buffers.peak_bytes >= held + 4000
    del kept, more
    assert buffers.live == before
    assert buffers.peak >= before + 41
    buffers.reset()
    assert buffers.peak == before


@needs_compiler
def test_bytes_agree_with_mlx() -> None:
    """MLX rounds small sizes up; of large ones both count the same."""
    buffers = counting.counter()
    mx.clear_cache()
    mx.synchronize()
    theirs = mx.get_active_memory()
    buffers.reset()
    ours = buffers.peak_bytes
    large = [mx.full((1 << 20,), value) for value in range(8)]
    mx.eval(large)
    mx.synchronize()
    assert buffers.peak_bytes - ours == pytest.approx(mx.get_active_memory() - theirs, rel=1e-3)


def test_why_it_cannot_count_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        patch.delenv("CXX", raising=False)
        with pytest.raises(InputError, match="takes a C\\+\\+ compiler; on macOS `xcode-select"):
            counting.built(counting.SOURCE, "count")
    if counting.compiler() is not None:
        (tmp_path / "x.cpp").write_text("no C++")
        with pytest.raises(InputError, match=r"does not compile .*x\.cpp for MLX"):
            counting.built(tmp_path / "x.cpp", "count")
        assert list((tmp_path / "cache").iterdir()) == []
