"""A model directory as mlx-lm opens it: config, shards, index, fingerprint.

mlx-lm loads every `model*.safetensors` and ignores the index, so the files decide what the model
is. Indices in public repositories name sidecars that no loader of text reads (`mtp.safetensors`),
and shards of the repository that a model was converted from. Where an index or the numbers in the
names of shards say that something is missing, mlx-lm is asked whether it needs that.

The fingerprint covers every byte of the tensors. `fingerprints-UID.json` in the cache directory
maps the state of all files of a model (each one's resolved path, device, inode, size, mtime, ctime;
hashed) to its digest. On file systems of Unix no program can set ctime, so a change is seen though
mtime was put back (but in the moment of a link of our own, see `linking`). The file is only
believed where no other user can have written it; what cannot be read or written costs time, nothing
else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from mlxstacks.command_line import command_line
from mlxstacks.errors import CheckpointError, TargetError
from mlxstacks.files.disk import cache_directory
from mlxstacks.files.manifest import FULL
from mlxstacks.files.outputs import write_json
from mlxstacks.files.shards import (
    AGAIN,
    ShardHeader,
    TensorInfo,
    open_regular,
    read_exactly,
    read_header,
    read_range,
)
from mlxstacks.files.strict_json import is_deeper, parse_object

if TYPE_CHECKING:
    from mlxstacks.base_model import LoadedWeight


INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 100_000_000
MAX_CONFIG_DEPTH = 100  # real ones have five levels; what follows walks them by recursion
MAX_NAME_BYTES = 255  # of a file, on every file system in use
WINDOWS, WINDOW_BYTES = 16, 4096
_PATH_KEYS = {"_name_or_path", "name_or_path"}
_NUMBERED = re.compile(r"(model.*-)(\d{5})-of-(\d{5})(\.safetensors)")
# Vision, audio and multi-token-prediction parts: mlx-lm's models of text drop them.
SIDE_PART = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|audio_tower)\.")

_HUB_LAYOUT = re.compile(r"\.(qweight|qzeros|g_idx|experts\.(gate_up_proj|down_proj|\d+\..+))$")


@dataclass(frozen=True)
class Checkpoint:
    """An opened model. `tensors` maps every name to the one file that holds it."""

    directory: Path
    config: dict[str, Any]
    headers: tuple[ShardHeader, ...]
    tensors: dict[str, TensorInfo]
    index: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def is_converted(self) -> bool:
        """Whether the files are in MLX's own layout, so that tensors are what mlx-lm computes with.

        Not so: files that another tool wrote, and experts or packed weights in a hub layout.
        """
        formats = {header.metadata.get("format", "mlx") for header in self.headers}
        return formats == {"mlx"} and not any(
            _HUB_LAYOUT.search(name) and not SIDE_PART.search(name) for name in self.tensors
        )

    @cached_property
    def loaded_weights(self) -> dict[str, LoadedWeight]:
        """What mlx-lm makes of the files: modules by their path in the model.

        Builds the model without reading its tensors, which takes a second or two the first time.
        Raises: CheckpointError where mlx-lm cannot load the model.
        """
        from mlxstacks.base_model import loaded_weights

        return loaded_weights(self.directory)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read and check config, headers and index of a model directory; reads no tensor.

    Law: no tensor name occurs in two files. Where a shard seems to be missing, the directory opens
    if and only if mlx-lm loads it.

    Raises:
        CheckpointError: naming the file, shard or tensor at fault and what to do.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; give a model directory or a hub id")
    if (directory / "adapter_config.json").exists() and not (directory / "config.json").exists():
        raise CheckpointError(
            f"{directory}: an adapter, not a model; are the model and the adapter swapped?"
        )
    files = _shard_files(directory)  # a directory of GGUF files has no config
    config = read_json_object(directory / "config.json", unique_keys=False)
    if is_deeper(config, MAX_CONFIG_DEPTH):
        raise CheckpointError(
            f"{directory / 'config.json'}: nested more than {MAX_CONFIG_DEPTH} levels deep; {AGAIN}"
        )
    index_path = directory / INDEX_NAME
    index = read_json_object(index_path) if os.path.lexists(index_path) else None
    headers = tuple(read_header(path) for path in files)
    checkpoint = Checkpoint(directory, config, headers, _gather(headers), index)
    absent = _absent_shard(checkpoint)
    if absent is not None:
        try:
            checkpoint.loaded_weights  # noqa: B018
        except CheckpointError as error:
            raise CheckpointError(f"{absent}. {error}") from None
    return checkpoint


def fingerprint(checkpoint: Checkpoint, like: str | None = None) -> str:
    """What a model is, whatever the number and names of its files: `full:` and a SHA-256 (hex).

    Hashed: the config as compact JSON with sorted keys, without `_name_or_path` and `name_or_path`
    at any depth; then `weights_sha256` of every byte of its tensors, a line each.
    like: a fingerprint to compare with. One without `full:` is of an earlier version, and gets the
    answer of that version, in which bytes between samples do not count.

    Raises: CheckpointError: a file is gone, cannot be read, or is being changed.
    """
    if like is not None and not like.startswith(FULL):
        return _sampled_fingerprint(checkpoint)
    digest = hashlib.sha256(_compact(_without_paths(checkpoint.config)))
    files = [header.path for header in checkpoint.headers]
    digest.update(weights_sha256(files, checkpoint.tensors).encode() + b"\n")
    return FULL + digest.hexdigest()


def check_unchanged(directory: Path, recorded: str) -> None:
    """Call once numbers of the model with the fingerprint `recorded` were read.

    Raises: CheckpointError: what is in the directory is no longer that model.
    """
    if fingerprint(open_checkpoint(directory), recorded) != recorded:
        raise CheckpointError(
            f"{directory}: changed during the run, which began with fingerprint {recorded[:12]}; "
            "put that model back, or start again with this one"
        )


def _sampled_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 (hex), as versions without `full:` knew a model.

    Hashed: the config as in `fingerprint`; then in order of their names, for each tensor, the line
    `[name, dtype, shape]` as compact JSON and 16 windows of 4 KiB, window i starting at byte
    `(nbytes - 4096) * i // 15` (tensors of up to 64 KiB are hashed whole).
    """
    digest = hashlib.sha256()
    digest.update(_compact(_without_paths(checkpoint.config)))
    with ExitStack() as stack:
        descriptors: dict[Path, int] = {}
        for _, info in sorted(checkpoint.tensors.items()):
            if info.file not in descriptors:
                descriptors[info.file] = open_regular(info.file)
                stack.callback(os.close, descriptors[info.file])
            digest.update(_compact([info.name, info.dtype, list(info.shape)]))
            starts, nbytes = [0], info.nbytes
            if nbytes > WINDOWS * WINDOW_BYTES:
                last, nbytes = nbytes - WINDOW_BYTES, WINDOW_BYTES
                starts = [last * i // (WINDOWS - 1) for i in range(WINDOWS)]
            for start in starts:
                window = bytearray(nbytes)
                read_exactly(descriptors[info.file], memoryview(window), info, info.start + start)
                digest.update(window)
    return digest.hexdigest()


def read_json_object(path: Path, *, unique_keys: bool = True) -> dict[str, Any]:
    """A JSON object from a file of at most 100 MB.

    Raises:
        CheckpointError: missing, too large, not UTF-8, not a JSON object, or (unique_keys) a key
            given twice.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        nbytes = os.fstat(descriptor).st_size
        if nbytes > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {nbytes} bytes, allowed: {MAX_JSON_BYTES}; {AGAIN}")
        try:
            return parse_object(file.read(nbytes).decode("utf-8"), unique_keys=unique_keys)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{path}: not valid: {error}; {AGAIN}") from None


def _shard_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("model*.safetensors"))
    if files:
        return files
    if (directory / "manifest.json").is_file() and (directory / "stacks").is_dir():
        raise CheckpointError(
            f"{directory}: a store of stacks, not a model; with the model that they were trained "
            f"on, `mlxstacks chat --model MODEL --store-path {shlex.quote(str(directory))}`"
        )
    others = sorted(
        path.name for path in directory.iterdir()
        if path.suffix in {".bin", ".pt", ".pth", ".npz", ".gguf", ".safetensors"}
    )  # fmt: skip
    if others:
        advice = (
            "nothing else is read: rename a safetensors file that is the whole model, else "
            "download the model as safetensors"
        )
        if gguf := next((name for name in others if name.endswith(".gguf")), None):
            source = directory / gguf
            command = command_line("mlxstacks convert", source, save_path=source.with_suffix(""))
            advice = f"convert it: `{command}`"
        raise CheckpointError(
            f"{directory}: no model*.safetensors, only {', '.join(others[:3])}; {advice}"
        )
    raise CheckpointError(f"{directory}: no model*.safetensors; download or convert the model")


def _absent_shard(checkpoint: Checkpoint) -> str | None:
    """What a shard that seems to be missing is called, and why; None where none does.

    Raises: CheckpointError for an index that maps no names to files in the directory or below it.
    """
    directory, index_path = checkpoint.directory, checkpoint.directory / INDEX_NAME
    loaded = {header.path.name for header in checkpoint.headers}
    weight_map = {} if checkpoint.index is None else checkpoint.index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_path}: weight_map must map tensors to files; {AGAIN}")
    absent: str | None = None
    for name, file in weight_map.items():
        fits = isinstance(file, str) and file.isprintable() and "\\" not in file
        fits = fits and len(file.encode()) <= MAX_NAME_BYTES
        if not fits or {"", ".", ".."} & set(file.split("/")):
            raise CheckpointError(
                f"{index_path}: tensor {name[:100]!a} is mapped to {ascii(file)[:200]}; only a "
                f"file in the same directory or below it is allowed; {AGAIN}"
            )
        if absent or name in checkpoint.tensors or file in loaded or SIDE_PART.search(name):
            continue
        absent = f"{directory / file}: shard is missing ({INDEX_NAME} names it); download it again"
        if (directory / file).exists():
            absent = (
                f"{directory / file}: named in {INDEX_NAME}, but mlx-lm loads only "
                "model*.safetensors; rename the file or convert the model again"
            )
    # Without an index the names still say how many shards there are.
    for name in () if weight_map else sorted(loaded):
        if match := _NUMBERED.fullmatch(name):
            before, _, count, after = match.groups()
            # stops at the first absent one: a hostile count costs at most len(loaded) steps
            for number in range(1, int(count) + 1):
                other = f"{before}{number:05d}-of-{count}{after}"
                if other not in loaded:
                    return (
                        f"{directory / other}: shard is missing ({name} is there); "
                        "download it again, or remove shards of another version"
                    )
    return absent


def _gather(headers: tuple[ShardHeader, ...]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name!r} is in two files, {tensors[name].file} and {header.path}, and "
                    "mlx-lm would load either; remove the file that does not belong to the model"
                )
            tensors[name] = info
    if not tensors:
        raise CheckpointError(f"{headers[0].path}: holds no tensors; {AGAIN}")
    return tensors


def _compact(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_paths(v) for k, v in value.items() if k not in _PATH_KEYS}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return value


# Of each user: what another one wrote is not believed.
CACHE_NAME = f"fingerprints-{os.getuid()}.json"
MAX_ENTRIES = 256  # models; the newest stay
# Files changed so recently are not remembered: another change could bear the same time, which some
# file systems keep in steps of this length.
CLOCK_STEP_NS = 2_000_000_000
_MAX_CACHE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20  # read and hashed at once, a thread
_LOCK_SECONDS = 5.0
_MOST_READS = 3
_SHA256 = re.compile(r"[0-9a-f]{64}")

# Of this process: where the cache cannot be written, a run still hashes its model once.
_known: dict[str, str] = {}


def weights_sha256(files: Sequence[Path], tensors: Mapping[str, TensorInfo]) -> str:
    """SHA-256 (hex) of all tensors. files: the safetensors files, whose headers say `tensors`.

    Where the files are as they were when they were hashed last, none of them is opened.

    Raises: CheckpointError: a file is gone, cannot be read, or is being changed.
    """
    # Again, since a link or a chmod by another process changes ctime too.
    for _ in range(_MOST_READS):
        now_ns = time.time_ns()
        state, changed_ns = _state(_numbers(files))
        if digest := _known.get(state) or _entries().get(state):
            return digest
        digest = _hash(files, tensors)
        if _state(_numbers(files))[0] == state:
            if changed_ns + CLOCK_STEP_NS < now_ns:
                _remember(state, digest)
            return digest
    raise CheckpointError(f"{files[0].parent}: changed each time it was read; {AGAIN}")


@contextmanager
def linking(files: Sequence[Path]) -> Iterator[None]:
    """A block that gives `files` further names, which changes their ctime and no byte: what is
    known of them stays known, if all else about them is as it was.
    """
    before = _numbers(files)
    yield
    after = _numbers(files)
    if [numbers[:-1] for numbers in before] == [numbers[:-1] for numbers in after]:
        state = _state(before)[0]
        if before != after and (digest := _known.get(state) or _entries().get(state)):
            _remember(_state(after)[0], digest)


def _numbers(files: Sequence[Path]) -> list[tuple[Any, ...]]:
    """Of each file: resolved path, device, inode, size, mtime, ctime."""
    states = []
    for path in sorted(files):
        try:
            info = os.stat(path)
            place = os.path.realpath(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; {AGAIN}") from None
        numbers = info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
        states.append((place, *numbers))
    return states


def _state(states: Sequence[tuple[Any, ...]]) -> tuple[str, int]:
    """Name of the state of all files, and when the last of them was changed (ns since 1970)."""
    changed_ns = max((numbers[-1] for numbers in states), default=0)
    return hashlib.sha256(json.dumps(states).encode()).hexdigest(), changed_ns


def _hash(files: Sequence[Path], tensors: Mapping[str, TensorInfo]) -> str:
    # Headers were read before the state was: they have to be of the same files.
    headers = {name: info for path in files for name, info in read_header(path).tensors.items()}
    if headers != tensors:
        raise CheckpointError(f"{files[0].parent}: changed since it was opened; {AGAIN}")
    ordered = [info for _, info in sorted(tensors.items())]
    total = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for info, digest in zip(ordered, threads.map(_tensor_sha256, ordered), strict=True):
            line = json.dumps([info.name, info.dtype, info.shape, digest], separators=(",", ":"))
            total.update(line.encode() + b"\n")
    return total.hexdigest()


def _tensor_sha256(info: TensorInfo) -> str:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(min(info.nbytes, _CHUNK_BYTES)))
    for start in range(0, info.nbytes, _CHUNK_BYTES):
        part = chunk[: info.nbytes - start]
        read_range(info, start, part)
        digest.update(part)
    return digest.hexdigest()


# --- the cache ------------------------------------------------------------------------------------


def _entries() -> dict[str, str]:
    """State -> digest, the oldest first; empty where the file is missing, damaged or not ours."""
    try:
        descriptor = os.open(
            cache_directory() / CACHE_NAME,
            os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
        )
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            ours = info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (stat.S_ISREG(info.st_mode) and ours and info.st_size <= _MAX_CACHE_BYTES):
                return {}
            values = parse_object(file.read(_MAX_CACHE_BYTES).decode())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory
        return {}
    return {
        state: digest
        for state, digest in values.items()
        if _SHA256.fullmatch(state) and isinstance(digest, str) and _SHA256.fullmatch(digest)
    }


def _remember(state: str, digest: str) -> None:
    _known[state] = digest
    # RuntimeError: no home directory, or a file system without locks
    with suppress(OSError, RuntimeError, TargetError):
        path = cache_directory() / CACHE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS, mode=0o600):
            entries = _entries() | {state: digest}
            newest = list(entries.items())[-MAX_ENTRIES:]
            write_json(path, dict(newest), mode=0o600)
