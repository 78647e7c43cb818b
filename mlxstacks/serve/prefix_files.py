"""Beginnings of prompts in files, for the next process: whole or not there.

Each is a file of its own, written beside its name and then renamed, so that what is killed while it
writes leaves nothing behind that is read. A file is for one base, one set of versions of stacks and
adapters, and one version of MLX and mlx-lm; all others are removed, as are files that are damaged.
"""

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxstacks import base_model
from mlxstacks.files.disk import mlx_write_errors, target_errors
from mlxstacks.files.outputs import acquire_lock, release_lock

_OWN = re.compile(r"prompt-[0-9a-f]{64}(\.new)?\.safetensors")


class PrefixFiles:
    """The files of one directory, which is this process's alone; others there are left alone.

    made_by: what has to be equal for a file to be of use. Call `close` at the end.

    Raises: TargetError: it cannot be written, or another process has it.
    """

    def __init__(self, directory: Path, made_by: str) -> None:
        self._directory, self._made_by = directory, made_by
        with target_errors(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = acquire_lock(directory / "lock", directory)

    def load(self, cache: Any, trim: Callable[[], None]) -> None:
        """Put all that is of use into an empty `base_model.prefix_cache`, the oldest first. trim:
        is called after each, to stay within a budget.
        """
        for path in sorted(self._own(), key=lambda path: path.stat().st_mtime):
            with suppress(RuntimeError, ValueError, LookupError, TypeError):  # damaged
                entries, about = base_model.load_prompt_cache(path)
                made_by, key, tokens, kind = json.loads(about)
                if made_by == self._made_by:
                    weights = tuple((version, weight) for version, weight in key)
                    cache.insert_cache(weights, tokens, entries, cache_type=kind)
                    trim()
        with target_errors(self._directory):
            self._remove_others(cache)

    def save_one(self, cache: Any) -> bool:
        """Write one beginning that has no file, and remove files of those that are no longer there;
        whether there was one. Raises: InputError, OSError, RuntimeError, ValueError.
        """
        names = self._remove_others(cache)
        for name, (about, entries) in names.items():
            path = self._directory / name
            if not path.exists():
                new = path.with_suffix(".new.safetensors")
                with target_errors(path), mlx_write_errors(path):
                    new.touch(mode=0o600)  # it tells what users wrote
                    base_model.save_prompt_cache(new, entries, about)
                    new.replace(path)
                return True
        return False

    def close(self) -> None:
        release_lock(self._lock)

    def _own(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if _OWN.fullmatch(path.name)]

    def _remove_others(self, cache: Any) -> dict[str, tuple[str, list[Any]]]:
        """Name -> what is in memory: what it is, as JSON, and its caches."""
        named = {}
        for key, tokens, entries, kind in base_model.prefix_entries(cache):
            about = json.dumps([self._made_by, key, list(tokens), kind])
            digest = hashlib.sha256(about.encode()).hexdigest()
            named[f"prompt-{digest}.safetensors"] = about, entries
        for path in self._own():
            if path.name not in named:
                path.unlink(missing_ok=True)
        return named
