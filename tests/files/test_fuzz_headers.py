"""Fuzzing: mutated headers and mutated model directories, judged by an oracle.

Whatever happens to a file, `read_header` and `open_checkpoint` either raise an InputError or return
what the safetensors library reads from the same bytes. Never another exception, a hang, or more
than 5 MB of memory. Run:

    pytest tests/files/test_fuzz_headers.py
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors

from mlxstacks import base_model  # noqa: F401  (which a message imports: not counted)
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import INDEX_NAME, fingerprint, open_checkpoint
from mlxstacks.files.shards import DTYPES, read_header, read_tensor, tensor_nbytes
from tests.files.raw import entry, file_bytes

HANG_SECONDS = 60
MAX_BYTES = 5_000_000

HOSTILE: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 4, 8, 16, 2**31, 2**32, 2**53, 2**63, 2**64, 10**40, 1e308),
    *(0.5, -0.0, "", "\0", "\ud800", "a" * 5000),
    *["U8", "F32", "BF16", "F4", "F6_E2M3", "NOPE", "../x"],
    *([], {}, [0], [[]], [0, 0], [0, 2**63], [2**31 - 1] * 4, [0] * 40, [0, 2**62], [1, 2, 3]),
    *({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, [True, False], [4.0], ["4"], {"": {}}),
]
SNIPPETS = [
    *b'{ } [ ] " , : \\ \0 \xff \\ud800 e99 NaN Infinity - 0 \n'.split(b" "),
    *b'null true "__metadata__":'.split(b" "),
    *(b" ", b"9" * 30, b"[" * 99),
]


def valid_parts() -> tuple[dict[str, Any], bytes]:
    table: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    shapes = {"F32": [2, 3], "BF16": [4], "U32": [2, 2, 2], "U8": [0, 5], "F16": [], "F4": [4]}
    position = 0
    for number, (dtype, shape) in enumerate(shapes.items()):
        nbytes = tensor_nbytes(dtype, tuple(shape))
        assert nbytes is not None
        table[f"layers.{number}.weight"] = entry(dtype, shape, position, position + nbytes)
        position += nbytes
    return table, bytes(range(position))


def mutate_bytes(chance: random.Random, content: bytes) -> bytes:
    """Flips, cuts, inserts, repeats, mostly in the length and the header."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data)) if data else 0
        kind = chance.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at:at] = chance.choice(SNIPPETS)
        elif kind == 2:
            del data[at : at + chance.randint(1, 20)]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data += bytes(chance.randint(1, 9))
        elif kind == 5 and len(data) > 8:
            data[chance.randrange(8)] = chance.choice([0, 1, 127, 128, 255])
        else:
            data[at:at] = data[at : at + chance.randint(1, 60)]
    return bytes(data)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutate_table(chance: random.Random, table: Any) -> None:
    """Values replaced, removed, renamed, copied, numbers nudged; offsets and shapes among them."""
    for _ in range(chance.randint(1, 3)):
        found = list(places(table))
        if not found:
            return
        container, key = chance.choice(found)
        old = container[key]
        kind = chance.randrange(6)
        if kind == 0:
            container[key] = copy.deepcopy(chance.choice(HOSTILE))
        elif kind == 1:
            del container[key]
        elif kind == 2 and isinstance(container, dict):
            container[str(chance.choice(HOSTILE))] = container.pop(key)
        elif kind == 3:
            other, place = chance.choice(found)
            container[key] = copy.deepcopy(other[place])
        elif type(old) is int:
            container[key] = old + chance.choice([-8, -4, -1, 1, 4, 8, 2**32, -(2**63)])
        elif isinstance(old, list):
            chance.shuffle(old)
        else:
            container[key] = [old]


def mutated_file(chance: random.Random) -> bytes:
    table, data = valid_parts()
    way = chance.choice(["harmless", "bytes", "bytes", "table", "table", "table", "both"])
    if way in {"table", "both"}:
        mutate_table(chance, table)
    names = list(table)
    if way == "harmless" or chance.random() < 0.1:
        chance.shuffle(names)
        data = chance.randbytes(len(data))
    content = file_bytes({name: table[name] for name in names}, data)
    return mutate_bytes(chance, content) if way in {"bytes", "both"} else content


def replace(path: Path, content: bytes) -> None:
    """Write a new file: ext4 waits for the disk when an existing one is overwritten."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Fails where the block hangs or allocates too much."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]

    def hangs(number: int, frame: object) -> None:
        raise TimeoutError(what)

    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
    assert tracemalloc.get_traced_memory()[1] - before < MAX_BYTES, what


def agree_with_the_library(path: Path) -> bool:
    """True where the file was accepted, and then as the safetensors library reads it."""
    header, refusal = None, ""
    try:
        header = read_header(path)
    except InputError as error:
        refusal = str(error)
    if header is None:
        assert str(path) in refusal
        assert len(refusal) < 1000
        return False
    expected = dict(safetensors.deserialize(path.read_bytes()))
    assert header.tensors.keys() == expected.keys()
    for name, info in header.tensors.items():
        assert (info.dtype, list(info.shape)) == (expected[name]["dtype"], expected[name]["shape"])
        if info.dtype in DTYPES:
            assert read_tensor(info).tobytes() == bytes(expected[name]["data"])
    return True


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_mutated_headers_are_refused_or_read_as_the_library_does(
    tmp_path: Path, campaign: Callable[[int], range]
) -> None:
    path, cases, accepted = tmp_path / "model.safetensors", campaign(5000), 0
    for case in cases:
        content = mutated_file(random.Random(case))
        replace(path, content)
        with bounded(f"case {case}: {content!r}"):
            accepted += agree_with_the_library(path)
    # some of each, or the mutations miss what they are for
    assert 0.02 < accepted / len(cases) < 0.5


def test_the_file_that_is_mutated_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(*valid_parts()))
    assert agree_with_the_library(path)


def write_directory(directory: Path) -> None:
    """Two shards and an index."""
    directory.mkdir()
    weight_map = {}
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        table, data = valid_parts()
        table = {name.replace("layers", shard[:11]): value for name, value in table.items()}
        table["__metadata__"] = table.pop("__metadata__")
        (directory / shard).write_bytes(file_bytes(table, data))
        weight_map.update({name: shard for name in table if name != "__metadata__"})
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps({"hidden_size": 64}))


def damage(chance: random.Random, directory: Path) -> None:
    path = directory / chance.choice([INDEX_NAME, INDEX_NAME, INDEX_NAME, *os.listdir(directory)])
    kind = chance.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.rename(
            directory / chance.choice(["model-x.safetensors", "model.bin", "x", "config.json"])
        )
    elif kind == 2 or path.suffix == ".safetensors":
        replace(path, mutate_bytes(chance, path.read_bytes()))
    else:
        value = json.loads(path.read_text())
        mutate_table(chance, value)
        replace(path, json.dumps(value).encode())


def refused_or_whole(directory: Path) -> bool:
    """True where the directory was accepted, and then every name is where it should be."""
    checkpoint, refusal = None, ""
    try:
        checkpoint = open_checkpoint(directory)
    except InputError as error:
        refusal = str(error)
    if checkpoint is None:
        assert str(directory) in refusal
        return False
    assert len(fingerprint(checkpoint)) == 69
    for name, info in checkpoint.tensors.items():
        assert info.file.parent == directory
        assert info.name == name
    # Without a model_type mlx-lm loads nothing, so no absent shard was forgiven.
    shards = {header.path.name for header in checkpoint.headers}
    for name, file in (checkpoint.index or {"weight_map": {}})["weight_map"].items():
        assert name in checkpoint.tensors or file in shards
    return True


def test_damaged_directories_are_refused_or_whole(
    tmp_path: Path, campaign: Callable[[int], range]
) -> None:
    whole = tmp_path / "whole"
    write_directory(whole)
    assert refused_or_whole(whole)
    cases, accepted = campaign(1000), 0
    for case in cases:
        directory = tmp_path / "damaged"
        shutil.copytree(whole, directory)
        damage(random.Random(case), directory)
        with bounded(f"case {case}"):
            accepted += refused_or_whole(directory)
        shutil.rmtree(directory)
    assert 0.02 < accepted / len(cases) < 0.7
