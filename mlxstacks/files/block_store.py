"""A store of capability blocks: `blocks.json` and a file of float32 arrays for each block.

The manifest names the base by its fingerprint, and each block's file by its SHA-256: what was
changed since is refused when it is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from mlxstacks.errors import StoreError
from mlxstacks.files.outputs import write_json
from mlxstacks.files.stack_file import read_arrays, write_arrays
from mlxstacks.files.strict_json import read_object

MANIFEST = "blocks.json"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BlockRecord:
    """file: inside the store. settings: what the block's layers are made of."""

    name: str
    file: str
    sha256: str
    settings: dict[str, Any]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BlockStore:
    """config: of the base, whose layers a block copies in shape."""

    base_fingerprint: str
    config: dict[str, Any]
    blocks: tuple[BlockRecord, ...] = ()

    def named(self, name: str) -> BlockRecord:
        """Raises: StoreError."""
        for record in self.blocks:
            if record.name == name:
                return record
        known = ", ".join(record.name for record in self.blocks)
        raise StoreError(f"no block {name}; the store has {known or 'none'}")


_STORE = TypeAdapter(BlockStore)


def read_store(directory: Path) -> BlockStore:
    """Raises: StoreError: no manifest there, or a damaged one."""
    path = directory / MANIFEST
    try:
        return _STORE.validate_python(read_object(path.read_bytes()))
    except (OSError, ValueError, ValidationError) as error:
        raise StoreError(f"{path}: no manifest of blocks: {error}") from None


def add_block(
    directory: Path, store: BlockStore, name: str, arrays: Mapping[str, mx.array],
    settings: Mapping[str, Any],
) -> BlockStore:  # fmt: skip
    """The store with one block more, on disk: its file first, then the manifest that names it.

    Raises: StoreError: it has a block of that name; ValueError: arrays that are not finite float32.
    """
    if any(record.name == name for record in store.blocks):
        raise StoreError(f"{directory}: has a block {name}")
    directory.mkdir(parents=True, exist_ok=True)
    file = f"{name}.safetensors"
    (directory / file).unlink(missing_ok=True)  # of a run that was killed before its manifest
    record = BlockRecord(name, file, write_arrays(directory / file, arrays), dict(settings))
    store = BlockStore(store.base_fingerprint, store.config, (*store.blocks, record))
    write_json(directory / MANIFEST, _STORE.dump_python(store, mode="json"))
    return store


def read_block(directory: Path, store: BlockStore, name: str) -> dict[str, mx.array]:
    """Raises: StoreError: no such block, or its file is not the one that was written."""
    record = store.named(name)
    return read_arrays(directory / record.file, record.sha256)


def verify_blocks(directory: Path) -> tuple[str, ...]:
    """Names of all blocks, each read and compared with its hash. Raises: StoreError."""
    store = read_store(directory)
    for record in store.blocks:
        read_block(directory, store, record.name)
    return tuple(record.name for record in store.blocks)
