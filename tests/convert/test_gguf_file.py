"""The header of GGUF files: as `gguf.GGUFReader` reads it, and nothing hostile goes through.

Run: pytest tests/convert/test_gguf_file.py
"""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest

from mlxstacks.convert.gguf_file import MAX_ELEMENTS, open_gguf
from mlxstacks.errors import CheckpointError
from tests.convert.gguf_cases import config_of, random_tensors, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = config_of("llama")
    extra = {
        "x.bool": True, "x.int": 7, "x.float": 0.1, "x.text": "Ünï", "x.floats": [0.5, 1.5],
        "x.ints": [1, -2, 3], "x.texts": ["a", "", "ü"],
    }  # fmt: skip
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, config, random_tensors(config), lambda name, _: _kind(name), extra)
    return path.read_bytes()


def _kind(name: str) -> str:
    return "Q4_1" if name.endswith("up_proj.weight") else "F32"


@pytest.fixture
def place(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_fields_and_tensors_are_those_of_the_package(
    whole: bytes, place: Callable[[bytes], Path]
) -> None:
    path = place(whole)
    file, reader = open_gguf(path), gguf.GGUFReader(path)
    assert len(file.fields) == len(reader.fields) - 3  # version and counts
    for name, value in file.fields.items():
        expected = reader.fields[name].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for known in reader.tensors:
        tensor = file.tensors[known.name]
        assert tensor.kind == known.tensor_type.name
        assert tensor.shape == tuple(int(size) for size in known.shape[::-1])
        raw = known.data.view(np.uint8)
        assert np.array_equal(file.read(tensor), raw.reshape(file.read(tensor).shape))


def test_every_truncation_is_refused(whole: bytes, place: Callable[[bytes], Path]) -> None:
    generator = np.random.default_rng(0)
    for cut in [0, 3, 4, 8, 23, 24, *generator.integers(24, len(whole), 60).tolist()]:
        with pytest.raises(CheckpointError, match=r"model\.gguf.*download"):
            open_gguf(place(whole[:cut]))


def test_changed_bytes_of_the_header_never_crash(
    whole: bytes, place: Callable[[bytes], Path]
) -> None:
    """A changed byte is refused in words or changes a value; nothing else comes out."""
    generator = np.random.default_rng(1)
    header = open_gguf(place(whole)).tensors["token_embd.weight"].start
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(int(generator.integers(1, 4))):
            content[int(generator.integers(0, header))] = int(generator.integers(0, 256))
        with suppress(CheckpointError):
            open_gguf(place(bytes(content)))


def _header(version: int, tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def _tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
    return head + sizes + struct.pack("<IQ", kind, offset)


_HUGE = 2**63
_PAD = bytes(256)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + _PAD, "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + _PAD, "big-endian"),
        (_header(1, 0, 0, _PAD), "version 1"),
        (_header(3, _HUGE, 0, _PAD), "tensors in the header, at most"),
        (_header(3, 0, _HUGE, _PAD), "keys in the header, at most"),
        (_header(3, 0, 1, struct.pack("<Q", _HUGE)), "key 1 of 1: ends at byte"),
        (_header(3, 0, 1, _key(b"a", 99, _PAD)), "key 'a': 99 is no type"),
        (_header(3, 0, 1, _key(b"a", 8, struct.pack("<Q", _HUGE))), "key 'a': ends at byte"),
        (_header(3, 0, 1, _key(b"a", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "not UTF-8"),
        (_header(3, 0, 1, _key(b"a", 9, struct.pack("<IQ", 8, _HUGE))), "elements; at most"),
        (
            _header(3, 0, 1, _key(b"a", 9, struct.pack("<IQ", 0, MAX_ELEMENTS)) + _PAD),
            "key 'a': ends at byte",
        ),
        (_header(3, 0, 1, _key(b"a", 9, struct.pack("<IQ", 9, 1)) + _PAD), "array of type 9"),
        (_header(3, 0, 2, 2 * _key(b"a", 0, b"\1")), "given twice"),
        (_header(3, 0, 1, _key(b"\n", 0, b"\1")), "printable"),
        (
            _header(3, 0, 1, _key(b"general.alignment", 4, struct.pack("<I", 24))),
            "general.alignment is 24",
        ),
        (
            _header(3, 0, 1, _key(b"split.count", 2, struct.pack("<H", 3))),
            "one of 3 parts; join them first",
        ),
        (_header(3, 1, 0, _tensor(b"t", (), 0, 0) + _PAD), "tensor 't': 0 dimensions"),
        (_header(3, 1, 0, _tensor(b"t", (2,) * 5, 0, 0) + _PAD), "5 dimensions"),
        (_header(3, 1, 0, _tensor(b"t", (_HUGE, 2), 0, 0) + _PAD), "its shape cannot be"),
        (_header(3, 1, 0, _tensor(b"t", (0, 2), 0, 0) + _PAD), "its shape cannot be"),
        (_header(3, 1, 0, _tensor(b"t", (8,), 4, 0) + _PAD), "its type, 4, is not known"),
        (_header(3, 1, 0, _tensor(b"t", (33, 2), 3, 0) + _PAD), "rows of 33 in Q4_1 blocks of 32"),
        (_header(3, 1, 0, _tensor(b"t", (999,), 0, 0) + _PAD), "truncated"),
        (_header(3, 1, 0, _tensor(b"t", (8,), 0, 2**60) + _PAD), "truncated"),
        (_header(3, 1, 0, _tensor(b"t", (8,), 0, 5) + _PAD), "truncated"),
        (
            _header(3, 2, 0, _tensor(b"t", (16,), 0, 0) + _tensor(b"u", (8,), 0, 32) + _PAD),
            "tensor 'u': overlaps",
        ),
        (_header(3, 2, 0, 2 * _tensor(b"t", (8,), 0, 0) + _PAD), "given twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    content: bytes, message: str, place: Callable[[bytes], Path]
) -> None:
    with pytest.raises(CheckpointError) as error:
        open_gguf(place(content))
    assert message in str(error.value)
    assert "model.gguf" in str(error.value)
