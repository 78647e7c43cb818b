"""Compiled kernels: found in memory, on disk, or made now; several instances into one object.

An object is filed under the hash of its content. An instance is filed under the hash of its text,
its options and the compiler, as a small note that names the object and its entry in it.
"""

import ctypes
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.emulator import compiler
from tests.emulator.cache import content_hash, digest, keep, objects_dir, write_whole
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


def _note(instance: Instance, flavour: Flavour) -> Path:
    key = digest([compiler.tools().key, repr(flavour), unit([instance])])
    return objects_dir() / f"{key}.json"


def _compile(instances: list[Instance], flavour: Flavour) -> None:
    path = compiler.build(unit(instances), objects_dir(), *flavour)
    for i, instance in enumerate(instances):
        write_whole(_note(instance, flavour), json.dumps({"object": path.name, "entry": i}))


def _load(instance: Instance, flavour: Flavour) -> Compiled | None:
    """None when it is not there, or when what is there is damaged."""
    note = _note(instance, flavour)
    try:
        found = json.loads(note.read_text())
        path, entry = note.parent / str(found["object"]), int(found["entry"])
        if path not in _objects:
            # To load an object that was cut ends the process: a look inside comes first.
            if content_hash(path) != path.stem:
                return None
            _objects[path] = ctypes.CDLL(str(path))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for used in (note, path):
        keep(used)
    function = getattr(_objects[path], f"emulator_entry_{entry}")
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return Compiled(_objects[path], address)
