"""Namespaces of one's own: a user, a network without interfaces, processes, and a root directory
that holds Python's libraries, read-only, and an empty /work.

    launcher (outside)  -> maker: unshares, waits for its user map
                           -> init, process 1 of the new namespace: builds the root
                              -> the program
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable

from mlxstacks.sandbox.kernel import call, prctl

_NEW_NAMESPACES = (
    0x00020000  # mounts
    | 0x02000000  # control groups
    | 0x04000000  # host name
    | 0x08000000  # System V memory and queues
    | 0x10000000  # users
    | 0x20000000  # processes
    | 0x40000000  # network
)
_PRIVATE, _BIND, _RECURSIVE = 1 << 18, 1 << 12, 1 << 14
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS = 1, 2, 4, 8
_DETACH = 2
_HERE, _ALL_BELOW = -100, 0x8000
_DEATH_SIGNAL = 1
NOBODY = 65534
WORK = "/work"


def end_with_parent() -> None:
    """Linux kills this process when its parent ends; changes of the user forget it."""
    prctl(_DEATH_SIGNAL, signal.SIGKILL)


def run(
    root: str, libraries: Iterable[str], disk_bytes: int, body: Callable[[], None],
    ended: Callable[[int], None],
) -> int:  # fmt: skip
    """Start `body` inside; returns the process to wait for.

    root: an empty directory. body: does not return. ended: told body's wait status, by init.
    Raises: OSError saying which step the system refused; nothing has been started then.
    """
    reports, tell = os.pipe()
    mapped, map_ready = os.pipe()
    maker = os.fork()
    if maker == 0:
        try:
            os.close(map_ready)
            _maker(root, libraries, disk_bytes, body, ended, tell, mapped)
        except BaseException as error:
            os.write(tell, f"E{error}"[:400].encode())
        finally:
            os._exit(97)
    os.close(tell)
    os.close(mapped)
    try:
        _expect(reports, b"U")
        _map_users(maker)
        os.write(map_ready, b"M")
        _expect(reports, b"R")
    except OSError:
        os.close(map_ready)
        os.kill(maker, signal.SIGKILL)
        os.waitpid(maker, 0)
        raise
    finally:
        os.close(reports)
    os.close(map_ready)
    return maker


def _expect(reports: int, wanted: bytes) -> None:
    word = os.read(reports, 400)
    if word != wanted:
        raise OSError(word[1:].decode(errors="replace") or "the process ended")


def _map_users(pid: int) -> None:
    """Root gets a second user, nobody, to run the program as; anybody else has only one."""
    if os.geteuid() == 0:
        lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n"
        try:
            _write(f"/proc/{pid}/uid_map", lines)
            _write(f"/proc/{pid}/gid_map", lines)
            return
        except OSError:
            pass  # root of a container that may not; as anybody else, then
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"{NOBODY} {os.geteuid()} 1\n")
    _write(f"/proc/{pid}/gid_map", f"{NOBODY} {os.getegid()} 1\n")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _maker(
    root: str, libraries: Iterable[str], disk_bytes: int, body: Callable[[], None],
    ended: Callable[[int], None], tell: int, mapped: int,
) -> None:  # fmt: skip
    end_with_parent()
    call("unshare", _NEW_NAMESPACES)
    os.write(tell, b"U")
    if os.read(mapped, 1) != b"M":
        return
    init = os.fork()
    if init == 0:
        end_with_parent()
        build_root(root, libraries, disk_bytes)
        child = os.fork()
        if child == 0:
            os.close(tell)
            body()
        os.write(tell, b"R")
        while True:
            pid, status = os.wait()
            if pid == child:
                ended(status)
                os._exit(0)  # what is left in the namespace ends with its process 1
    os.close(tell)
    os.waitpid(init, 0)


def build_root(root: str, libraries: Iterable[str], disk_bytes: int) -> None:
    """In mount and user namespaces of one's own. Raises: OSError naming the call."""
    call("mount", None, b"/", None, _PRIVATE | _RECURSIVE, None)
    small = b"mode=755,size=1m,nr_inodes=1k"
    call("mount", b"tmpfs", os.fsencode(root), b"tmpfs", _NO_SUID | _NO_DEVICES, small)
    for path in libraries:
        _show(path, root)
    work = root + WORK
    os.mkdir(work)
    options = f"mode=1777,size={disk_bytes},nr_inodes=1k".encode()
    flags = _NO_SUID | _NO_DEVICES | _NO_PROGRAMS
    call("mount", b"tmpfs", os.fsencode(work), b"tmpfs", flags, options)
    os.chdir(root)
    # The old root lands on top of the new one and is taken away from there.
    call("pivot_root", b".", b".")
    call("umount2", b".", _DETACH)
    os.chdir("/")
    _add_flags(b"/", _READ_ONLY | _NO_SUID | _NO_DEVICES, 0)


def _show(path: str, root: str) -> None:
    """A directory of libraries at the same path, read-only; a link as the same link."""
    place = root + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    os.makedirs(place, exist_ok=True)
    source, target = os.fsencode(path), os.fsencode(place)
    call("mount", source, target, None, _BIND | _RECURSIVE, None)
    _add_flags(target, _READ_ONLY | _NO_SUID | _NO_DEVICES, _ALL_BELOW)


def _add_flags(path: bytes, flags: int, below: int) -> None:
    """Flags on top of those that a mount has; Linux 5.12."""
    call("mount_setattr", _HERE, path, below, (ctypes.c_uint64 * 4)(flags), 32)
