"""Compiled kernels: found in memory, on disk, or made now; several instances into one object.

An object is filed under the hash of its text, its options and the compiler. An instance that was
compiled together with others is filed as a small note that names the object and its entry in it.
"""

import ctypes
import json
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.emulator import compiler
from tests.emulator.text import Instance
from tests.emulator.unit import unit

# Enough to share the cost of starting the compiler and reading the header, few enough to use two
# processor cores.
BATCH = 8


@dataclass(frozen=True)
class Compiled:
    """One instance, ready to run."""

    object: ctypes.CDLL
    entry: int  # address

    @property
    def run(self) -> "ctypes._NamedFuncPointer":
        return self.object.emulator_run


Flavour = tuple[bool, bool]  # contraction, traps
_objects: dict[Path, ctypes.CDLL] = {}
_compiled: dict[tuple[Instance, Flavour], Compiled] = {}


def compiled(instance: Instance, flavour: Flavour) -> Compiled:
    """The instance in one flavour.

    Raises: CompileError when the compiler refuses it.
    """
    found = _compiled.get((instance, flavour)) or _load(instance, flavour)
    if found is None:
        _compile([instance], flavour)
        found = _load(instance, flavour)
        assert found is not None
    return _compiled.setdefault((instance, flavour), found)


def prepare(instances: Sequence[Instance], flavours: Sequence[Flavour]) -> int:
    """Compiles those that are not there yet, BATCH to an object; returns how many that were."""
    jobs: list[tuple[list[Instance], Flavour]] = []
    count = 0
    for flavour in dict.fromkeys(flavours):
        by_header: dict[str, list[Instance]] = {}
        for instance in dict.fromkeys(instances):
            if (instance, flavour) not in _compiled and _load(instance, flavour) is None:
                by_header.setdefault(instance.source.header, []).append(instance)
                count += 1
        for group in by_header.values():
            jobs += [(group[i : i + BATCH], flavour) for i in range(0, len(group), BATCH)]
    compiler.tools()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for done in [pool.submit(_compile, *job) for job in jobs]:
            done.result()
    return count


def _key(instances: Sequence[Instance], flavour: Flavour) -> str:
    return compiler.digest([compiler.tools().key, repr(flavour), unit(instances)])


def _folder() -> Path:
    folder = compiler.cache_dir() / "objects"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(instances: list[Instance], flavour: Flavour) -> None:
    folder = _folder()
    name = _key(instances, flavour) + ".so"
    compiler.build(unit(instances), folder / name, *flavour)
    for i, instance in enumerate(instances):
        note = json.dumps({"object": name, "entry": i})
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as draft:
            draft.write(note)
        os.replace(draft.name, folder / f"{_key([instance], flavour)}.json")


def _load(instance: Instance, flavour: Flavour) -> Compiled | None:
    folder = _folder()
    try:
        note = json.loads((folder / f"{_key([instance], flavour)}.json").read_text())
    except FileNotFoundError:
        return None
    path = folder / note["object"]
    if path not in _objects:
        try:
            _objects[path] = ctypes.CDLL(str(path))
        except OSError:
            return None  # a cache that was half deleted
    entry = getattr(_objects[path], f"emulator_entry_{note['entry']}")
    address = ctypes.cast(entry, ctypes.c_void_p).value
    assert address is not None
    return Compiled(_objects[path], address)
