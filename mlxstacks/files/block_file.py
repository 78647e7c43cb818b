"""One capability block in one safetensors file: float32 arrays and a JSON header.

The header is the safetensors metadata `mlxstacks-block`: JSON with sorted keys, no times; the
arrays stand in the order of their names, those of `layers.blocks.CapabilityBlock`. Equal blocks are
equal bytes. A store holds blocks in place of stacks: one for a domain, in `blocks/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import mlx.core as mx

from mlxstacks.files.manifest import DomainName, Fingerprint, StackName
from mlxstacks.files.stack_file import (
    REPAIR,
    Dim,
    FileHeader,
    Small,
    Text,
    check_hash,
    load_tensors,
    read_headed,
    write_headed,
)
from mlxstacks.files.strict_json import JsonObject

METADATA_KEY = "mlxstacks-block"


@dataclass(frozen=True)
class BlockHeader(FileHeader):
    """What a block is. num_layers: as those of the base; stack: the settings of the experts beside
    their projections. arrays: shape of each, by name.
    """

    KIND: ClassVar[str] = "capability block"
    # what a store compares with its record of a stack
    round: ClassVar[int] = 1
    shared_sha256: ClassVar[None] = None

    name: StackName
    domain: DomainName
    base_model: Text
    base_fingerprint: Fingerprint
    num_layers: Small
    stack: JsonObject
    arrays: dict[str, tuple[Dim, ...]]
    format_version: Literal[1] = 1

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor name -> (safetensors dtype, shape), in the order of the file."""
        return {name: ("F32", shape) for name, shape in sorted(self.arrays.items())}


@dataclass(frozen=True, eq=False)
class BlockFile:
    """A block that was read. tensors: name -> float32 array."""

    header: BlockHeader
    tensors: dict[str, mx.array]


def write_block(path: str | Path, tensors: Mapping[str, mx.array], header: BlockHeader) -> str:
    """Write a new file, synced to disk; returns its SHA-256 (hex).

    Law: `read_block` gives the same header and arrays, bit for bit; equal calls write equal bytes.
    Raises: as `stack_file.write_stack`.
    """
    return write_headed(Path(path), tensors, header, METADATA_KEY, f"block {header.name}")


def read_block(path: str | Path, expected_sha256: str | None = None) -> BlockFile:
    """A block with its arrays in memory.

    expected_sha256: what the file's bytes must hash to, where known.
    Raises: StoreError naming the file: missing, truncated, changed, no block, NaN or Inf.
    """
    path = Path(path)
    check_hash(path, expected_sha256, REPAIR)
    header, shard = read_headed(path, METADATA_KEY, BlockHeader, REPAIR)
    return BlockFile(header, load_tensors(shard, REPAIR, check_numbers=True))
