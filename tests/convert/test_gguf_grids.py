"""The five grids that GGUF shares with MLX, to the bit; other types by value.

Judge: `gguf.quants.dequantize`, the package's own reading of a block.
Run: pytest tests/convert/test_gguf_file.py
"""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.convert import gguf_file
from mlxstacks.convert.gguf_file import GGUFFile, open_gguf
from mlxstacks.errors import CheckpointError

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
