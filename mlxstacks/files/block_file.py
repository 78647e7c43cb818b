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
    HeadedFile,
    Small,
    Text,
    read_file,
    write_file,
)
from mlxstacks.files.strict_json import JsonObject

METADATA_KEY = "mlxstacks-block"


@dataclass(frozen=True)
class BlockHeader(FileHeader):
    """What a block is. num_layers: as those of the base; stack: the settings of the experts beside
    their projections. arrays: shape of each, by name.
    """

    KIND: ClassVar[str] = "capability block"
    KEY: ClassVar[str] = METADATA_KEY
    REPAIR: ClassVar[str] = REPAIR
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


BlockFile = HeadedFile[BlockHeader]


def write_block(path: str | Path, tensors: Mapping[str, mx.array], header: BlockHeader) -> str:
    """As `stack_file.write_file`."""
    return write_file(path, tensors, header, f"block {header.name}")


def read_block(path: str | Path, expected_sha256: str | None = None) -> BlockFile:
    """As `stack_file.read_file`."""
    return read_file(path, BlockHeader, expected_sha256)
