"""The header of GGUF files: as `gguf.GGUFReader` reads it, and nothing hostile goes through; the
five grids that GGUF shares with MLX, to the bit; other types by value.

Judge of blocks: `gguf.quants.dequantize`, the package's own reading.

Run: pytest tests/files/test_gguf_file.py
"""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import CheckpointError
from mlxstacks.files import gguf_file
from mlxstacks.files.gguf_file import MAX_ELEMENTS, GGUFFile, open_gguf
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


# --- blocks ---------------------------------------------------------------------------------------

ROWS, WIDTH = 6, 160
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}


def random_blocks(kind: str, seed: int = 0) -> np.ndarray:
    """Blocks of every possible code; scales and minima are any float16 up to 200, negative too."""
    generator = np.random.default_rng(seed)
    grid = gguf_file.GRIDS[kind]
    raw = generator.integers(0, 256, (ROWS, WIDTH // 32 * grid.block.itemsize), np.uint8)
    blocks = raw.view(grid.block)
    for part in {"d", "m"} & set(grid.block.names or ()):
        blocks[part] = generator.uniform(-200, 200, blocks[part].shape)
    return raw


def write_blocks(path: Path, raw: np.ndarray, kind: str) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("ordered", [False, True])
def test_codes_scales_and_biases_mean_the_same_to_the_bit(
    kind: str, ordered: bool, tmp_path: Path
) -> None:
    raw = random_blocks(kind)
    file = write_blocks(tmp_path / "t.gguf", raw, kind)
    order = np.arange(ROWS)[::-1] if ordered else None
    parts = dict(gguf_file.same_codes(file, file.tensors["t"], order))
    packed, scales, biases = (mx.array(parts[name]) for name in ("weight", "scales", "biases"))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    if order is not None:
        expected = expected[order]
    assert scales.dtype == biases.dtype == mx.float16
    assert packed.shape == (ROWS, WIDTH * BITS[kind] // 32)
    values = mx.dequantize(
        packed, scales.astype(mx.float32), biases.astype(mx.float32),
        group_size=32, bits=BITS[kind], stream=mx.cpu,
    )  # fmt: skip
    # + 0.0 makes zeros positive, the one thing that may differ
    assert (np.array(values) + 0.0).tobytes() == (expected + np.float32(0.0)).tobytes()


@pytest.mark.parametrize(
    ("kind", "scale"), [("Q4_1", np.inf), ("Q5_0", np.nan), ("Q8_0", 600.0), ("Q4_0", 9000.0)]
)
def test_a_scale_that_float16_cannot_hold_is_named(kind: str, scale: float, tmp_path: Path) -> None:
    raw = random_blocks(kind)
    raw.view(gguf_file.GRIDS[kind].block)["d"][2, 1] = scale
    file = write_blocks(tmp_path / "t.gguf", raw, kind)
    with pytest.raises(CheckpointError, match=r"t\.gguf: tensor 't': .* no finite float16"):
        list(gguf_file.same_codes(file, file.tensors["t"]))


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4", "BF16", "F16", "F32"])
def test_other_types_are_read_by_value(kind: str, tmp_path: Path) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    block, nbytes = gguf.GGML_QUANT_SIZES[quantization]
    width = max(512, block)
    generator = np.random.default_rng(1)
    if kind in ("BF16", "F16", "F32"):
        numbers = generator.standard_normal((3, width)).astype(np.float32)
        raw = gguf.quants.quantize(numbers, quantization)
    else:
        # bytes below 60 make finite scales in every layout
        raw = generator.integers(0, 60, (3, width // block * nbytes), np.uint8)
    file = write_blocks(tmp_path / "t.gguf", raw, kind)
    values = np.concatenate(list(gguf_file.float_values(file, file.tensors["t"])))
    assert values.shape == (3, width)
    assert np.array_equal(values, gguf.quants.dequantize(raw, quantization))


def test_what_the_package_cannot_read_is_refused(tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "t.gguf", np.zeros((2, 292), np.uint8), "Q8_K")
    with pytest.raises(CheckpointError, match="cannot read Q8_K"):
        list(gguf_file.float_values(file, file.tensors["t"]))


def test_not_a_number_is_named(tmp_path: Path) -> None:
    numbers = np.ones((2, 32), np.float32)
    numbers[1, 3] = np.nan
    file = write_blocks(tmp_path / "t.gguf", numbers, "F32")
    with pytest.raises(CheckpointError, match="tensor 't': NaN"):
        list(gguf_file.float_values(file, file.tensors["t"]))
