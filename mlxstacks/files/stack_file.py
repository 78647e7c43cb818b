"""One frozen stack in one safetensors file: half-precision pairs, float32 routers, a JSON header;
and what all safetensors files of a store share: written once under a plan, read only after checks.

The header is the safetensors metadata `mlxstacks`: JSON with sorted keys, no times; the tensors
stand in the order of their names. Equal stacks are equal bytes. Tensors of a projection at module
path p (letters as in `ProjectionShape`):

    form             p.lora_a      p.lora_b      p.router (only with E > 1)
    linear, shared   (E, R, K)     (E, N, R)     (E, K) float32
    per_expert       (M, E*R, K)   (M, N, E*R)   (E, K) float32

A latent stack has l in place of K and N.

A plan is tensor name -> (safetensors dtype, shape), in the order of the file. Messages end with a
`repair`: what to do about a bad file of that kind.
"""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import mlx.core as mx
import numpy as np
from pydantic import ConfigDict, Field

from mlxstacks.base_model import load_arrays
from mlxstacks.errors import CheckpointError, StoreError
from mlxstacks.files.manifest import DomainName, Fingerprint, Round, Sha256, StackName
from mlxstacks.files.shards import AGAIN, ShardHeader, ShardWriter, open_regular, read_header
from mlxstacks.files.strict_json import (
    STRICT,
    VersionedRecord,
    compact,
    read_object,
)

Plan = Mapping[str, tuple[str, tuple[int, ...]]]


class FileHeader(VersionedRecord):
    """A header that names every tensor of its file. KEY: of the file's metadata, under which it is
    JSON. REPAIR: see above.
    """

    KEY: ClassVar[str]
    REPAIR: ClassVar[str]

    @abstractmethod
    def tensors(self) -> Plan:
        """Tensor name -> (safetensors dtype, shape), in the order of the file."""


Header = TypeVar("Header", bound=FileHeader)


@dataclass(frozen=True, eq=False)
class HeadedFile(Generic[Header]):
    """A file that was read. tensors: name -> array."""

    header: Header
    tensors: dict[str, mx.array]


_MLX = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
_INFINITY = {mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.float32: 0x7F80_0000}


def write_tensors(
    path: Path, plan: Plan, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]
) -> None:
    """Write a new file, synced to disk. Raises: TargetError; nothing is left then."""
    writer = ShardWriter(path, [(name, *spec) for name, spec in plan.items()], metadata)
    done = False
    try:
        with writer:
            for name in plan:
                writer.write(name, raw_numbers(tensors[name]))
        done = True
    finally:
        if not done:
            path.unlink(missing_ok=True)


def read_headed(path: Path, header_type: type[Header]) -> tuple[Header, ShardHeader]:
    """The header that names every tensor of the file, and the file's own; reads no tensor. Raises:
    StoreError naming the file.
    """
    key, repair = header_type.KEY, header_type.REPAIR
    shard = open_shard(path, repair)
    text = shard.metadata.get(key)
    if text is None:
        raise StoreError(f"{path}: no {header_type.KIND}: its metadata has no key {key}; {repair}")
    try:
        header = header_type.from_json(read_object(text.encode()))
    except ValueError as error:
        raise StoreError(f"{path}: header: {error}; {repair}") from None
    if problems := differences(header.tensors(), plan_in(shard)):
        raise StoreError(f"{path}: {'; '.join(problems[:8])}; {repair}")
    return header, shard


def read_file(
    path: str | Path, header_type: type[Header], expected_sha256: str | None = None
) -> HeadedFile[Header]:
    """A file of this kind, with its arrays in memory.

    expected_sha256: what the file's bytes must hash to, where known.
    Raises: StoreError naming the file: missing, truncated, changed, of another kind, NaN or Inf.
    """
    path, repair = Path(path), header_type.REPAIR
    check_hash(path, expected_sha256, repair)
    header, shard = read_headed(path, header_type)
    return HeadedFile(header, load_tensors(shard, repair, check_numbers=True))


def write_file(
    path: str | Path, tensors: Mapping[str, mx.array], header: FileHeader, what: str
) -> str:
    """Write a new file that `read_file` reads, synced to disk; returns its SHA-256 (hex).

    Law: `read_file` gives the same header and arrays, bit for bit; equal calls write equal bytes.
    Raises: ValueError listing what the header contradicts in itself, and tensors that are missing,
        unexpected, of another dtype or shape than it says, or not finite. TargetError: the file
        exists, the disk is full or read-only. Nothing is left then.
    """
    path, value = Path(path), header.as_json()
    type(header).from_json(value)
    if problems := differences(header.tensors(), plan_of(tensors)) or non_finite(tensors):
        raise ValueError("\n  ".join([f"{what} cannot be written:", *problems[:20]]))
    write_tensors(path, header.tensors(), tensors, {header.KEY: compact(value).decode()})
    return hash_file(path, "write it again")


def open_shard(path: Path, repair: str) -> ShardHeader:
    """The checked header of a safetensors file. Raises: StoreError naming the file."""
    try:
        return read_header(path)
    except CheckpointError as error:
        raise StoreError(_in_a_store(error, repair)) from None


def load_tensors(shard: ShardHeader, repair: str, *, check_numbers: bool) -> dict[str, mx.array]:
    """Every tensor, in memory. Raises: StoreError: changed, shrunk or gone since its header was
    read; NaN or Inf.
    """
    try:
        loaded, _ = load_arrays(shard.path)
        if problems := differences(plan_in(shard), plan_of(loaded)):
            raise StoreError(f"{shard.path}: changed while it was read: {problems[0]}; {repair}")
        tensors = {name: loaded[name] for name in shard.tensors}
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:  # shrunk or gone
        raise StoreError(f"{shard.path}: cannot be read: {error}; {repair}") from None
    if check_numbers and (problems := non_finite(tensors)):
        raise StoreError(f"{shard.path}: {problems[0]}; {repair}")
    return tensors


def check_hash(path: Path, expected: str | None, repair: str) -> None:
    """Raises: StoreError where the file's bytes do not hash to `expected`, if that is known."""
    if expected is not None and (sha256 := hash_file(path, repair)) != expected:
        raise StoreError(
            f"{path}: its bytes changed: sha256 {sha256[:12]}, expected {expected[:12]}; {repair}"
        )


def hash_file(path: Path, repair: str) -> str:
    """SHA-256 (hex) of a regular file. Raises: StoreError naming a file that cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (CheckpointError, OSError) as error:
        raise StoreError(_in_a_store(error, repair)) from None


def plan_of(tensors: Mapping[str, mx.array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The plan that these arrays follow, in their order."""
    names = {dtype: name for name, dtype in _MLX.items()}
    return {
        name: (names.get(array.dtype, str(array.dtype)), array.shape)
        for name, array in tensors.items()
    }


def plan_in(shard: ShardHeader) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The plan that a file follows."""
    return {name: (info.dtype, info.shape) for name, info in shard.tensors.items()}


def differences(wanted: Plan, found: Plan) -> list[str]:
    """Tensors that are missing, unexpected, of another dtype or shape; one line each."""
    if wanted == found:  # tables of thousands, whenever a stack is read
        return []
    problems = [f"{name[:200]!a}: missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name[:200]!a}: unexpected" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name] != found[name]:
            (dtype, shape), (other, other_shape) = wanted[name], found[name]
            problems.append(
                f"{name[:200]!a}: {other} {list(other_shape)}, the header says {dtype} "
                f"{list(shape)}"
            )
    return problems


def non_finite(tensors: Mapping[str, mx.array]) -> list[str]:
    """Tensors with NaN or Inf and where, one line each."""
    largest = {}
    for name, array in tensors.items():
        # The bits of a number without its sign order as magnitudes do, Inf and NaN on top. On the
        # CPU this takes a twentieth of the time of mx.isfinite.
        wide = array.dtype == mx.float32
        unsigned = mx.uint32 if wide else mx.uint16
        if array.size:
            bits = array.view(unsigned) & mx.array(0x7FFF_FFFF if wide else 0x7FFF, unsigned)
            largest[name] = mx.max(bits)
    mx.eval(largest)
    problems = []
    for name, bits in largest.items():
        if bits.item() >= _INFINITY[tensors[name].dtype]:
            bad = np.argwhere(~np.isfinite(np.array(tensors[name].astype(mx.float32))))
            problems.append(f"{name}: NaN or Inf at index {bad[0].tolist()}")
    return problems


def raw_numbers(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's numbers for the file: bfloat16 as uint16, which NumPy has."""
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def _in_a_store(error: Exception, repair: str) -> str:
    """The message of a reader of checkpoints, with the advice that fits a store."""
    return f"{str(error).removesuffix(AGAIN).rstrip(' ;:')}; {repair}"


Form = Literal["linear", "shared", "per_expert"]
StorageDtype = Literal["float16", "bfloat16"]
_SAFETENSORS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}

Dim = Annotated[int, Field(ge=1, le=2**31 - 1)]
Small = Annotated[int, Field(ge=1, le=65_536)]
Text = Annotated[str, Field(max_length=4096)]


@dataclass(frozen=True)
class ProjectionShape:
    """One stack at one projection: E experts of R ranks, K input_dims, N output_dims of the base,
    M base_experts (None for a linear), l latent_dim. scale: the factor of the delta.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    form: Form
    num_experts: Small
    rank: Small
    experts_per_token: Small
    scale: float
    input_dims: Dim
    output_dims: Dim
    base_experts: Dim | None = None
    latent_dim: Dim | None = None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Leaf name -> shape of the tensors of this projection."""
        E, R = self.num_experts, self.rank
        K = self.latent_dim or self.input_dims
        N = self.latent_dim or self.output_dims
        if self.form == "per_expert":
            M = self.base_experts or 0
            shapes: dict[str, tuple[int, ...]] = {"lora_a": (M, E * R, K), "lora_b": (M, N, E * R)}
        else:
            shapes = {"lora_a": (E, R, K), "lora_b": (E, N, R)}
        return shapes | ({"router": (E, K)} if E > 1 else {})

    def problems(self) -> Iterator[str]:
        """What in these numbers contradicts itself."""
        if (self.form == "linear") != (self.base_experts is None):
            yield f"form {self.form} with base_experts {self.base_experts}"
        if self.experts_per_token > self.num_experts:
            yield f"{self.experts_per_token} experts per token of {self.num_experts}"
        if self.latent_dim is not None and self.form == "per_expert":
            yield "a latent stack has no form per_expert"


METADATA_KEY = "mlxstacks"
REPAIR = "restore this file from a copy, or remove its domain with `mlxstacks stacks remove`"


@dataclass(frozen=True)
class StackHeader(FileHeader):
    """What a stack is. data_sha256: source -> hash of the data it was trained on.

    shared_sha256: hash of the file that holds its latent projections, None without them.
    """

    KIND: ClassVar[str] = "stack"
    KEY: ClassVar[str] = METADATA_KEY
    REPAIR: ClassVar[str] = REPAIR

    name: StackName
    domain: DomainName
    round: Round
    base_model: Text
    base_fingerprint: Fingerprint
    projections: dict[str, ProjectionShape]
    alpha: float
    scale_rule: Literal["rslora", "lora"]
    projector_mode: Literal["folded", "train_only"] = "folded"
    storage: StorageDtype = "float16"
    data_sha256: dict[str, Sha256] = field(default_factory=dict)
    code_version: Annotated[str, Field(max_length=100)] = ""
    shared_sha256: Sha256 | None = None
    format_version: Literal[1] = 1

    def problems(self) -> Iterator[str]:
        """No projections, and what contradicts itself in one."""
        if not self.projections:
            yield "projections: a stack has at least one"
        for path, shape in self.projections.items():
            yield from (f"{path[:200]!a}: {problem}" for problem in shape.problems())

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor name -> (safetensors dtype, shape), in the order of the file."""
        half = _SAFETENSORS[self.storage]
        named = {
            f"{path}.{leaf}": ("F32" if leaf == "router" else half, shape)
            for path, projection in self.projections.items()
            for leaf, shape in projection.tensor_shapes().items()
        }
        return dict(sorted(named.items()))


# tensors: shapes in the module docstring.
StackFile = HeadedFile[StackHeader]


@dataclass(frozen=True, eq=False)
class StackIndex:
    """A stack's header, checked against what its file holds (`shard`)."""

    header: StackHeader
    shard: ShardHeader


def write_stack(path: str | Path, tensors: Mapping[str, mx.array], header: StackHeader) -> str:
    """As `write_file`."""
    return write_file(path, tensors, header, f"stack {header.name}")


def write_arrays(path: str | Path, arrays: Mapping[str, mx.array]) -> str:
    """Write a new file of float32 arrays that several stacks read; returns its SHA-256 (hex).

    Raises: ValueError: another dtype, NaN or Inf. TargetError as `write_stack`.
    """
    path = Path(path)
    plan = dict(sorted(plan_of(arrays).items()))
    problems = [
        f"{name}: {dtype}, must be F32" for name, (dtype, _) in plan.items() if dtype != "F32"
    ]
    if problems := problems or non_finite(arrays):
        raise ValueError("\n  ".join(["shared arrays cannot be written:", *problems[:20]]))
    write_tensors(path, plan, arrays, {})
    return file_sha256(path)


def read_stack_index(path: str | Path) -> StackIndex:
    """A stack's header, checked against its tensors' names, dtypes and shapes; reads none of them.

    Raises: StoreError naming the file and what is wrong.
    """
    return StackIndex(*read_headed(Path(path), StackHeader))


def read_stack(
    path: str | Path, expected_sha256: str | None = None, *, known: StackIndex | None = None
) -> StackFile:
    """As `read_file`. known: of this very file, where it was hashed before and has not changed
    since; what it holds is not checked again then.
    """
    if known is not None:
        return StackFile(known.header, load_tensors(known.shard, REPAIR, check_numbers=False))
    return read_file(path, StackHeader, expected_sha256)


def read_arrays(path: str | Path, expected_sha256: str | None = None) -> dict[str, mx.array]:
    """The inverse of `write_arrays`. Raises: StoreError naming the file and what is wrong."""
    path = Path(path)
    check_hash(path, expected_sha256, REPAIR)
    shard = open_shard(path, REPAIR)
    strange = [name for name, info in shard.tensors.items() if info.dtype != "F32"]
    if strange:
        raise StoreError(f"{path}: {strange[0][:200]!a} is not float32; {REPAIR}")
    return load_tensors(shard, REPAIR, check_numbers=True)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a regular file. Raises: StoreError naming a file that cannot be read."""
    return hash_file(path, REPAIR)
