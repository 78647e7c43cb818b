"""A store of capability blocks: `blocks.json` and a file of float32 arrays for each block.

The manifest names the base by its fingerprint, and each block's file by its SHA-256: what was
changed since is refused when it is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from pydantic import BaseModel, ConfigDict, ValidationError

from mlxstacks.errors import StoreError
from mlxstacks.files.outputs import write_json
from mlxstacks.files.stack_file import read_arrays, write_arrays

MANIFEST = "blocks.json"


class BlockRecord(BaseModel):
    """settings: what the block's layers are made of."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sha256: str
    settings: dict[str, Any]


class BlockStore(BaseModel):
    """config: of the base, whose layers a block copies in shape. blocks: by name, as trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_fingerprint: str
    config: dict[str, Any]
    blocks: dict[str, BlockRecord] = {}


def read_store(directory: Path) -> BlockStore:
    """Raises: StoreError: no manifest there, or a damaged one."""
    path = directory / MANIFEST
    try:
        return BlockStore.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path}: no manifest of blocks: {error}") from None


def add_block(
    directory: Path,
    store: BlockStore,
    name: str,
    arrays: Mapping[str, mx.array],
    settings: Mapping[str, Any],
) -> BlockStore:
    """The store with one block more, on disk: its file first, then the manifest that names it.

    Raises: StoreError: it has a block of that name. ValueError: arrays that are not finite float32.
    """
    if name in store.blocks:
        raise StoreError(f"{directory}: has a block {name}")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.safetensors"
    path.unlink(missing_ok=True)  # of a run that was killed before its manifest
    record = BlockRecord(sha256=write_arrays(path, arrays), settings=dict(settings))
    store = store.model_copy(update={"blocks": {**store.blocks, name: record}})
    write_json(directory / MANIFEST, store.model_dump(mode="json"))
    return store


def read_block(directory: Path, store: BlockStore, name: str) -> dict[str, mx.array]:
    """Raises: StoreError: no such block, or its file is not the one that was written."""
    if name not in store.blocks:
        raise StoreError(f"no block {name}; the store has {', '.join(store.blocks) or 'none'}")
    return read_arrays(directory / f"{name}.safetensors", store.blocks[name].sha256)


def verify_blocks(directory: Path) -> tuple[str, ...]:
    """Names of all blocks, each read and compared with its hash. Raises: StoreError."""
    store = read_store(directory)
    for name in store.blocks:
        read_block(directory, store, name)
    return tuple(store.blocks)
