"""References of earlier fuses, on disk: of a series of fuses of one adapter only the first asks it.

A reference lies in `references-UID` of the cache directory as `KEY-SHA256.safetensors`: the key of
all that decides what is in it, and the digest of its bytes. What no other user can have written is
believed, if it has that digest; what is damaged is removed and made anew, and what cannot be read
or written costs time, nothing else. Those that were used last stay, `MOST_BYTES` of them.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlxstacks
from mlxstacks import base_model, memory
from mlxstacks.agreement import TOP_K, Reference
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import cache_directory, is_made_private, user_path
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.write import environment

MOST_BYTES = 1 << 29  # eleven of the rows that ship, of a large vocabulary
# What a model directory holds besides weights and is read for an answer: tokenizer, template, ends.
_BESIDE = (".json", ".jinja", ".model", ".txt")
Referred = tuple[Reference, list[str]]
"""What the reference says, and notes on the rows it was asked."""


def reference_key(base: Path, adapters: Sequence[str], asked: Any) -> str:
    """Of all that decides what a reference says. asked: rows and settings, as JSON.

    Raises: CheckpointError, OSError: the model or an adapter is gone.
    """
    beside = [path for path in sorted(base.iterdir()) if path.suffix in _BESIDE]
    return json_sha256({
        "base": fingerprint(open_checkpoint(base)), "beside": _digests(beside),
        "adapters": [_digests(_weights(user_path(path))) for path in adapters],
        "asked": asked, "top_k": TOP_K,
        # The dtype that the base computes in follows from the device and its memory.
        "device": asdict(memory.device()), "versions": environment(None).versions,
        "code": _code_sha256(), "blas": os.environ.get("LD_PRELOAD"),
    })  # fmt: skip


def once(key: Callable[[], str], make: Callable[[], Referred]) -> Referred:
    """What is kept under a key, else what `make` gives, which is kept if the key is still that."""
    name = key()
    if (known := _find(name)) is None:
        known = make()
        if key() == name:
            _keep(name, *known)
    return known


def _find(key: str) -> Referred | None:
    with suppress(OSError, RuntimeError, ValueError, LookupError):
        for path in _directory().glob(f"{key}-*.safetensors"):
            if path.stem.rpartition("-")[2] == file_sha256(path):
                os.utime(path)
                return Reference.open(path), json.loads(base_model.load_arrays(path)[1]["notes"])
            path.unlink()
    return None


def _keep(key: str, reference: Reference, notes: list[str]) -> None:
    with suppress(OSError, RuntimeError):  # RuntimeError: MLX's writer; no home directory
        directory = _directory()
        new = directory / f"{os.getpid()}.new.safetensors"
        try:
            reference.save(new, {"notes": json.dumps(notes)})
            new.rename(directory / f"{key}-{file_sha256(new)}.safetensors")
        finally:
            new.unlink(missing_ok=True)
        left = MOST_BYTES
        for path in sorted(directory.iterdir(), key=lambda path: -path.stat().st_mtime_ns):
            left -= path.stat().st_size
            if left < 0:
                path.unlink(missing_ok=True)


def _directory() -> Path:
    """Raises: OSError: it cannot be made, or somebody else's; RuntimeError: no home directory."""
    path = cache_directory() / f"references-{os.getuid()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_made_private(path):
        raise PermissionError(path)
    return path


def _weights(adapter: Path) -> list[Path]:
    """The files of an adapter in any format. adapter: its directory, or a GGUF file."""
    if adapter.is_file():
        return [adapter]
    kinds = (".safetensors", ".gguf", ".json")
    return [path for path in sorted(adapter.iterdir()) if path.suffix in kinds]


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in paths if path.is_file()}


@cache
def _code_sha256() -> str:
    """Of this package, whose version a checkout keeps while its code changes."""
    code = sha256()
    for path in sorted(Path(mlxstacks.__file__).parent.rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()
