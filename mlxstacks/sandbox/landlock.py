"""Landlock: a process gives up the file system, but for the directories it names. No root needed.

Not held by it: looking whether a path exists (stat). Owners, modes and times are the filter's work
(seccomp.py).
"""

import ctypes
import os
from collections.abc import Iterable

from mlxstacks.sandbox.syscalls import call

# rights by version: 13 at first; + refer 2, + truncate 3, + ioctl of devices 5
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_RIGHTS = 16
_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 2, 1 << 3
_TCP = 0b11  # bind, connect; since version 4
_SCOPES = 0b11  # abstract sockets, signals; since version 6
_PATH_BENEATH, _VERSION = 1, 1
# Before version 3 a file that may not be written could still be cut to nothing.
LEAST_VERSION = 3
HOLDS_SIGNALS = 6


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32)]


def version() -> int:
    """Of this kernel. Raises: OSError where there is no Landlock."""
    return call("landlock_create_ruleset", None, 0, _VERSION)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> int:
    """From now on: these directories, nothing else. Returns the version.

    Needs no_new_privs. Raises: OSError where there is no Landlock, or one that is too old.
    """
    found = version()
    if found < LEAST_VERSION:
        raise OSError(f"Landlock {found}; version {LEAST_VERSION} needed")
    everything = (1 << _RIGHTS.get(found, _ALL_RIGHTS)) - 1
    attributes = _Ruleset(everything, _TCP if found >= 4 else 0, _SCOPES if found >= 6 else 0)
    # An older kernel does not know the later fields, even as zeros beyond its size.
    size = 24 if found >= 6 else 16 if found >= 4 else 8
    ruleset = call("landlock_create_ruleset", attributes, size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIRECTORY)
        for path in writable:
            _allow(ruleset, path, everything & ~_EXECUTE)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return found


def _allow(ruleset: int, path: str, rights: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call("landlock_add_rule", ruleset, _PATH_BENEATH, _PathBeneath(rights, directory), 0)
    finally:
        os.close(directory)
