"""Shards: what is refused and how it is said, reading by rows, writing in streams.

The safetensors library and MLX are the judges of what the writer makes. Run:
    pytest tests/files/test_shards.py
"""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import CheckpointError, TargetError
from mlxstacks.files import shards
from mlxstacks.files.shards import (
    DTYPES,
    SUB_BYTE_DTYPES,
    ShardWriter,
    read_header,
    read_rows,
    read_tensor,
)
from tests.files.raw import entry, file_bytes, small_disk

ONE = {"a": entry("U8", [4], 0, 4)}
TWICE = b"{%s,%s}" % ((json.dumps(ONE).encode()[1:-1],) * 2)


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def deserialized(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What the safetensors library reads: name -> dtype, shape, bytes."""
    return {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(path.read_bytes())
    }


# --- headers ---------------------------------------------------------------------------------


def test_header_of_a_file_by_mlx_has_every_tensor(tmp_path: Path) -> None:
    arrays = {"b": mx.arange(6).reshape(2, 3), "a": mx.array(2.5), "empty": mx.zeros((0, 7))}
    mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays, {"format": "mlx"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == {"format": "mlx"}
    assert {name: info.shape for name, info in header.tensors.items()} == {
        "b": (2, 3),
        "a": (),
        "empty": (0, 7),
    }
    assert header.tensors["b"].size == 6
    assert header.tensors["b"].nbytes == 24
    assert header.file_bytes == (tmp_path / "x.safetensors").stat().st_size
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_tensor(header.tensors[name]), np.array(array))


def test_null_metadata_as_mlx_writes_it_is_none_at_all(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "x.safetensors"), {"a": mx.array([1.0])})
    assert b'"__metadata__":null' in (tmp_path / "x.safetensors").read_bytes()
    assert read_header(tmp_path / "x.safetensors").metadata == {}


def test_header_keeps_the_order_of_the_json(tmp_path: Path) -> None:
    table = {"z": entry("U8", [1], 1, 2), "a": entry("U8", [1], 0, 1)}
    assert [*read_header(put(tmp_path / "x", file_bytes(table, b"ab"))).tensors] == ["z", "a"]


@pytest.mark.parametrize("dtype", [*DTYPES, *SUB_BYTE_DTYPES])
def test_every_dtype_of_the_library_is_known(tmp_path: Path, dtype: str) -> None:
    nbytes = SUB_BYTE_DTYPES.get(dtype, 8 * DTYPES.get(dtype, (0,))[0])
    path = put(tmp_path / "x", file_bytes({"a": entry(dtype, [8], 0, nbytes)}, bytes(nbytes)))
    assert deserialized(path)["a"][0] == dtype
    info = read_header(path).tensors["a"]
    assert (info.dtype, info.nbytes) == (dtype, nbytes)


HUGE = 10**30
# One of each kind that the library refuses (test_fuzz_headers.py has the rest), whatever its
# words, and all that is refused beyond it.
BROKEN = "no whole safetensors file"
BAD_HEADERS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "header length 0"),
    "seven bytes": (bytes(7), "header length 0"),
    "length beyond the file": (file_bytes(ONE, b"abcd", length=5000), "header length 5000"),
    "length of 2**63": (
        file_bytes(ONE, b"abcd", length=2**63), "header length 9223372036854775808"
    ),
    "text file": (b"version https://git-lfs", "header length"),
    "too deep": (file_bytes(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), BROKEN),
    "key twice": (file_bytes(TWICE, b"abcd"), "'a' is given twice"),
    "entry is a list": (file_bytes({"a": [*ONE["a"].values()]}, b"abcd"), "tensor 'a': an entry"),
    "entry lacks offsets": (file_bytes({"a": {"dtype": "U8", "shape": []}}), BROKEN),
    "entry has more keys": (
        file_bytes({"a": {**ONE["a"], "z": 1}}, b"abcd"), "tensor 'a': an entry must"
    ),
    "empty name": (file_bytes({"": ONE["a"]}, b"abcd"), "printable"),
    "nul in name": (file_bytes({"a\0": ONE["a"]}, b"abcd"), "printable"),
    "unknown dtype": (file_bytes({"a": entry("Q4_K", [4], 0, 4)}, b"abcd"), BROKEN),
    "dtype is a map": (
        file_bytes({"a": entry({"U8": None}, [4], 0, 4)}, b"abcd"), "dtype must be one of"
    ),
    "shape of true": (file_bytes({"a": entry("U8", [True], 0, 1)}, b"a"), BROKEN),
    "negative shape": (file_bytes({"a": entry("U8", [-2, -2], 0, 4)}, b"abcd"), BROKEN),
    "dimension past 32 bits": (
        file_bytes({"a": entry("U8", [2**31, 0], 0, 0)}), "tensor 'a': shape must be"
    ),
    "33 dimensions": (file_bytes({"a": entry("U8", [1] * 33, 0, 1)}, b"a"), "shape must be"),
    "product past 64 bits beside a zero": (
        file_bytes({"a": entry("U8", [0] + [2**31 - 1] * 3, 0, 0)}), "too many elements"
    ),
    "product that wraps to 4": (
        file_bytes({"a": entry("U8", [2**30, 2**30, 16, 4], 0, 4)}, b"abcd"), BROKEN
    ),
    "half a byte": (file_bytes({"a": entry("F4", [3], 0, 2)}, b"ab"), BROKEN),
    "too few bytes for the shape": (file_bytes({"a": entry("F32", [4], 0, 4)}, b"abcd"), BROKEN),
    "offsets negative": (file_bytes({"a": entry("U8", [4], -4, 0)}, b"abcd"), BROKEN),
    "beyond the end": (file_bytes(ONE, b"abc"), BROKEN),
    "gap between": (
        file_bytes({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"abc"), BROKEN
    ),
    "overlap": (
        file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"abc"), BROKEN
    ),
    "bytes after the last": (file_bytes(ONE, b"abcdef"), BROKEN),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_header_is_one_clear_error(tmp_path: Path, name: str) -> None:
    content, fragment = BAD_HEADERS[name]
    path = put(tmp_path / "model.safetensors", content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message
    assert fragment in message
    assert "download or convert the file again" in message
    assert len(message) < 700


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header that is read is the one that the library has checked."""
    path = put(tmp_path / "x", file_bytes(ONE, b"abcd"))
    replacements = 2

    def replaced(*arguments: Any) -> Any:
        nonlocal replacements
        if replacements:
            replacements -= 1
            os.replace(put(tmp_path / "y", file_bytes(ONE, b"efgh")), path)
        return library(*arguments)

    library = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", replaced)
    assert [*read_header(path).tensors] == ["a"]
    replacements = 3
    with pytest.raises(CheckpointError, match="changed each time it was opened"):
        read_header(path)


def test_header_over_100_mb_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        file.truncate(200_000_000)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="header length 100000001, allowed: 100000000 bytes"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_header_of_millions_of_parts_is_refused_before_parsing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "MAX_HEADER_PARTS", 1000)
    path = put(tmp_path / "x", file_bytes(b'{"a":[' + b"[]," * 1000 + b"[]]}"))
    with pytest.raises(CheckpointError, match="JSON parts"):
        read_header(path)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, fragment in {
        "pipe": "not a regular file",
        "directory": "not a regular file",
        "link": "which is missing",
        "missing": "no such file",
        "loop": "cannot be opened",
        "nul\0": "cannot be opened",
    }.items():
        with pytest.raises(CheckpointError, match=fragment):
            read_header(tmp_path / name)


# --- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_bytes_of_the_file(tmp_path: Path, dtype: str) -> None:
    itemsize, numpy_dtype = DTYPES[dtype]
    data = bytes(np.random.default_rng(0).integers(0, 2, 5 * 3 * itemsize, dtype=np.uint8))
    path = put(tmp_path / "x", file_bytes({"a": entry(dtype, [5, 3], 0, len(data))}, data))
    info = read_header(path).tensors["a"]
    rows = read_rows(info, 1, 4)
    assert rows.shape == (3, 3)
    assert rows.dtype == numpy_dtype
    assert rows.tobytes() == data[3 * itemsize : 12 * itemsize]
    assert read_tensor(info).tobytes() == data


def test_rows_fill_a_given_buffer_and_leave_the_rest(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    path = put(tmp_path / "x", file_bytes({"a": entry("F32", [10, 4], 0, 160)}, values.tobytes()))
    info = read_header(path).tensors["a"]
    buffer = np.full((6, 4), np.nan, np.float32)
    rows = read_rows(info, 7, 10, out=buffer)
    assert rows.base is buffer
    np.testing.assert_array_equal(rows, values[7:])
    assert np.isnan(buffer[3:]).all()
    assert read_rows(info, 4, 4, out=buffer).shape == (0, 4)
    for unfit in (
        np.empty((2, 4), np.float32),
        np.empty((3, 5), np.float32),
        np.empty((3, 4), np.float64),
        np.empty((6, 8), np.float32)[:, ::2],
    ):
        with pytest.raises(ValueError, match="out must be"):
            read_rows(info, 7, 10, out=unfit)
    for first, last in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(ValueError, match="has no rows"):
            read_rows(info, first, last)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    table = {
        "e": entry("F32", [0, 3], 0, 0),
        "s": entry("U32", [], 0, 4),
        "t": entry("U8", [3, 0], 4, 4),
    }
    header = read_header(put(tmp_path / "x", file_bytes(table, struct.pack("<I", 7))))
    assert read_tensor(header.tensors["s"]).shape == ()
    assert int(read_tensor(header.tensors["s"])) == 7
    assert read_tensor(header.tensors["e"]).shape == (0, 3)
    assert read_rows(header.tensors["t"], 1, 3).shape == (2, 0)
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(header.tensors["s"], 0, 1)


def test_sub_byte_tensors_are_copied_but_not_read(tmp_path: Path) -> None:
    path = put(tmp_path / "x", file_bytes({"a": entry("F4", [2, 4], 0, 4)}, b"abcd"))
    info = read_header(path).tensors["a"]
    with pytest.raises(CheckpointError, match="F4, which can be copied, not read"):
        read_tensor(info)
    with ShardWriter(tmp_path / "y", [("a", "F4", (2, 4))]) as writer:
        writer.copy(info)
    assert deserialized(tmp_path / "y") == deserialized(path)


def test_file_that_shrank_since_its_header_was_read_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "x", file_bytes(ONE, b"abcd"))
    info = read_header(path).tensors["a"]
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(CheckpointError, match="tensor 'a': the file ends"):
        read_tensor(info)
    with (
        pytest.raises(CheckpointError, match="tensor 'a': the file ends"),
        ShardWriter(tmp_path / "y", [("a", "U8", (4,))]) as writer,
    ):
        writer.copy(info)
    path.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        read_tensor(info)


def test_streaming_allocates_only_the_block(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "x", [("a", "U8", (64, 1 << 20))]) as writer:
        for row in range(64):
            writer.write("a", np.full(1 << 20, row, np.uint8))
    info = read_header(tmp_path / "x").tensors["a"]
    block = np.empty((2, 1 << 20), np.uint8)
    tracemalloc.start()
    with ShardWriter(tmp_path / "y", [("a", "U8", (64, 1 << 20))]) as writer:
        for first in range(0, 64, 2):
            writer.write("a", read_rows(info, first, first + 2, out=block))
    with ShardWriter(tmp_path / "z", [("a", "U8", (64, 1 << 20))]) as writer:
        writer.copy(info)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert (tmp_path / "y").read_bytes() == (tmp_path / "z").read_bytes()
    assert (tmp_path / "y").read_bytes() == (tmp_path / "x").read_bytes()


# --- writing ---------------------------------------------------------------------------------


@st.composite
def shard_contents(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    names = draw(st.lists(st.text(min_size=1, max_size=6), max_size=6, unique=True))
    tensors = []
    for name in names:
        if not name.isprintable():
            continue
        dtype = draw(st.sampled_from([*DTYPES]))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        nbytes = DTYPES[dtype][0] * int(np.prod(shape))
        tensors.append((name, dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes))))
    return tensors


@given(
    tensors=shard_contents(),
    metadata=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=5),
        st.text(st.characters(codec="utf-8")),
        max_size=3,
    ),
    chance=st.randoms(use_true_random=False),
)
def test_written_files_read_back_here_and_in_the_library(
    tmp_path_factory: pytest.TempPathFactory, tensors: Any, metadata: dict[str, str], chance: Any
) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    writer = ShardWriter(path, [tensor[:3] for tensor in tensors], metadata)
    left = {name: data for name, _, _, data in tensors if data}
    while left:
        name = chance.choice(sorted(left))
        cut = chance.randint(1, len(left[name]))
        writer.write(name, left[name][:cut])
        left[name] = left[name][cut:]
        if not left[name]:
            del left[name]
    assert writer.close() == path.stat().st_size == writer.bytes_total
    expected = {name: (dtype, shape, data) for name, dtype, shape, data in tensors}
    assert deserialized(path) == expected
    header = read_header(path)
    assert header.data_start % 8 == 0
    assert header.metadata == metadata
    assert [*header.tensors] == [tensor[0] for tensor in tensors]
    for name, (_, shape, data) in expected.items():
        read = read_tensor(header.tensors[name])
        assert read.shape == shape
        assert read.tobytes() == data


def test_mlx_loads_what_is_written(tmp_path: Path) -> None:
    arrays = {
        "bf16": mx.random.normal((3, 8)).astype(mx.bfloat16),
        "f16": mx.random.normal((5,)).astype(mx.float16),
        "f32": mx.random.normal((2, 2, 2)),
        "u32": mx.array([1, 2**32 - 1], mx.uint32),
        "odd": mx.array([1, 2, 3], mx.uint8),
        "i64": mx.array([-1], mx.int64),
        "scalar": mx.array(1.5),
    }
    mx.save_safetensors(str(tmp_path / "a.safetensors"), arrays)
    source = read_header(tmp_path / "a.safetensors").tensors
    specs = [(name, source[name].dtype, source[name].shape) for name in arrays]
    with ShardWriter(tmp_path / "b.safetensors", specs, {"format": "mlx"}) as writer:
        for name in reversed(arrays):
            if name in {"f32", "odd"}:
                writer.copy(source[name])
            else:
                writer.write(name, read_tensor(source[name]))
    loaded, metadata = mx.load(str(tmp_path / "b.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert mx.array_equal(loaded[name], array)


@pytest.mark.parametrize("fault", ["none", "absent", "answers 0", *shards._NO_RANGE_COPY])
def test_copy_is_exact_however_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    data = os.urandom(10_007)
    table = {"pad": entry("U8", [7], 0, 7), "a": entry("U8", [10_000], 7, 10_007)}
    info = read_header(put(tmp_path / "x", file_bytes(table, data))).tensors["a"]
    monkeypatch.setattr(shards, "COPY_BYTES", 999)
    if fault == "absent":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif fault != "none":

        def broken(*_: Any) -> int:
            if fault == "answers 0":
                return 0
            raise OSError(fault, os.strerror(fault))

        monkeypatch.setattr(os, "copy_file_range", broken, raising=False)
    with ShardWriter(tmp_path / "y", [("b", "U8", (10_000,))]) as writer:
        writer.copy(info, "b")
    assert read_tensor(read_header(tmp_path / "y").tensors["b"]).tobytes() == data[7:]


def test_writer_refuses_what_would_make_a_wrong_file(tmp_path: Path) -> None:
    for tensors, fragment in (
        ([("a", "U8", (1,)), ("a", "U8", (1,))], "used once"),
        ([("", "U8", (1,))], "printable"),
        ([("__metadata__", "U8", (1,))], "printable"),
        ([("a", "Q8", (1,))], "dtype must be one of"),
        ([("a", "F6_E2M3", (1,))], "whole bytes"),
    ):
        with pytest.raises(ValueError, match=fragment):
            ShardWriter(tmp_path / "x", tensors)
    assert not (tmp_path / "x").exists()
    info = read_header(put(tmp_path / "s", file_bytes(ONE, b"abcd"))).tensors["a"]
    writer = ShardWriter(tmp_path / "x", [("a", "F32", (1,)), ("b", "U8", (8,))])
    with pytest.raises(ValueError, match="declared"):
        writer.copy(info)
    with pytest.raises(ValueError, match="not declared"):
        writer.write("c", b"1")
    with pytest.raises(ValueError, match="8 bytes given, 4 are left"):
        writer.write("a", bytes(8))
    with pytest.raises(ValueError, match="contiguous"):
        writer.write("b", np.zeros((8, 2), np.uint8)[:, 0])
    writer.write("b", bytes(6))
    with pytest.raises(ValueError, match=r"2 tensors incomplete: 'a' \(4 bytes\), 'b' \(2 bytes\)"):
        writer.close()


def test_writer_never_opens_an_existing_file_or_link(tmp_path: Path) -> None:
    precious = put(tmp_path / "precious", b"keep")
    os.link(precious, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(precious)
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    for name in ("precious", "hard", "soft", "dangling"):
        with pytest.raises(TargetError, match="exists"):
            ShardWriter(tmp_path / name, [("a", "U8", (1,))])
    assert precious.read_bytes() == b"keep"
    assert not (tmp_path / "elsewhere").exists()


def test_full_disk_says_what_is_needed_and_free(tmp_path: Path) -> None:
    data = bytes(3 << 20)
    source = put(tmp_path / "s", file_bytes({"a": entry("U8", [len(data)], 0, len(data))}, data))
    info = read_header(source).tensors["a"]
    with small_disk(tmp_path / "disk") as disk:
        for copy in (True, False):
            writer = ShardWriter(disk / f"x{copy}", [("a", "U8", info.shape)])
            with pytest.raises(TargetError, match=r"disk is full \(3145\d+ bytes needed, 0 free\)"):
                writer.copy(info) if copy else writer.write("a", data)
            writer.__exit__(TargetError, None, None)
            (disk / f"x{copy}").unlink()


def test_missing_directory_is_a_target_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No such file"):
        ShardWriter(tmp_path / "gone" / "x", [])


def test_file_size_limit_is_a_target_error(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from mlxstacks.errors import TargetError\n"
        "from mlxstacks.files.shards import ShardWriter\n"
        "writer = ShardWriter(sys.argv[1], [('a', 'U8', (1 << 20,))])\n"
        "try:\n    writer.write('a', bytes(1 << 20))\n"
        "except TargetError as error:\n    print(error)\n"
    )
    limit = (1 << 16, 1 << 16)
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ulimit -f" in result.stdout


def test_io_errors_while_reading_name_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = read_header(put(tmp_path / "x", file_bytes(ONE, b"abcd"))).tensors["a"]

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=r"tensor 'a' cannot be read: .*Input/output"):
        read_tensor(info)
