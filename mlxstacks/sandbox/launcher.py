"""The child of `sandbox/run.py`: puts on every protection there is, then runs a program.

    python -I -S -c BOOT STATUS TOKEN < specification

The specification is one line of JSON on standard input, which stays open as long as the caller
lives. STATUS is a descriptor that gets lines of JSON: which protections are active, how the program
ended; the program does not have it. TOKEN is one that gets the specification's token when the
program came to its end.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

# Programs import it, and can read no file of this package then.
import mlxstacks.sandbox.calls  # noqa: F401
from mlxstacks.sandbox import kernel, namespaces

_NO_NEW_PRIVILEGES = 38
_CAPABILITIES_VERSION = 0x20080522
_POLL_SECONDS = 0.02
Specification = dict[str, Any]
Active = dict[str, list[str]]


class Launcher:
    """One program. status, token: descriptors, see above."""

    def __init__(self, specification: Specification, status: int, token: int) -> None:
        self.given, self.status, self.token = specification, status, token
        self.active: Active = {}
        self.notes: list[str] = []

    def start(self) -> None:
        """Returns when the program has ended, or the caller has."""
        if sys.platform == "darwin":  # this process is confined already, by sandbox-exec
            self.run_program("seatbelt")
        pid = self._in_namespaces() if "namespaces" in self.given["mechanisms"] else None
        if pid is not None:
            _wait(pid)  # the program's end is told from inside
            return
        pid = os.fork()
        if pid == 0:
            self.run_program("plain")
        ended = _wait(pid)
        if ended is not None:
            self.tell(ended=ended)

    def _in_namespaces(self) -> int | None:
        def body() -> NoReturn:
            self.run_program("namespaces")

        try:
            return namespaces.run(
                self.given["root"], self.given["libraries"], self.given["limits"]["disk_bytes"],
                body, lambda status: self.tell(ended=status),
            )  # fmt: skip
        except OSError as error:
            self.notes.append(f"no namespaces: {error}")
            return None

    def tell(self, **message: Any) -> None:
        os.write(self.status, json.dumps(message).encode() + b"\n")

    def run_program(self, kind: str) -> NoReturn:
        """In the process that is the program's; never returns, whatever happens."""
        code = 98
        try:
            ready = self.confine(kind)
            self.tell(active=self.active, notes=self.notes)
            os.close(self.status)
            code = self.execute() if ready else 99
        except BaseException:
            import traceback

            self.tell(failed=traceback.format_exc(limit=3)[-1500:])
        finally:
            os._exit(code)

    # --- what protects ----------------------------------------------------------------------------

    def confine(self, kind: str) -> bool:
        """Whether all that is essential is active."""
        if kind == "namespaces":  # there is no /dev inside: an empty pipe reads like it
            null, writing = os.pipe()
            os.close(writing)
        else:
            null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(1, 2)
        kept = sorted({0, 1, 2, self.status, self.token, *self.given["channel"]})
        for low, high in zip(kept, [*kept[1:], 1 << 16], strict=True):
            os.closerange(low + 1, high)
        self.mark("descriptors", "closed")
        self.mark("environment", "cleared")
        os.chdir(namespaces.WORK if kind == "namespaces" else self.given["work"])
        self._limits()
        if kind == "namespaces":
            self.mark("network", "namespace")
            self.mark("signals", "namespace")
            self.mark("disk", "limit of its file system")
        if sys.platform == "linux":
            self._linux(kind)
        if kind == "seatbelt":
            for name in ("network", "processes", "signals"):
                self.mark(name, "sandbox-exec")
        self._filesystem(kind)
        return set(self.given["essential"]) <= self.active.keys()

    def mark(self, protection: str, mechanism: str) -> None:
        self.active.setdefault(protection, []).append(mechanism)

    def _limits(self) -> None:
        limits = self.given["limits"]
        table = {
            "cpu": (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
            "memory": (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
            "file size": (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
            "open files": (resource.RLIMIT_NOFILE, 64, 64),
            "core dumps": (resource.RLIMIT_CORE, 0, 0),
            "locked memory": (resource.RLIMIT_MEMLOCK, 0, 0),
            "tasks": (resource.RLIMIT_NPROC, limits["tasks"], limits["tasks"]),
        }
        for name, (which, soft, hard) in table.items():
            if sys.platform == "darwin" and name == "memory":
                continue  # macOS takes the limit and does not hold it: the caller looks instead
            try:
                resource.setrlimit(which, (soft, hard))
                self.mark(name, "limit")
            except (OSError, ValueError) as error:
                self.notes.append(f"no limit of {name}: {error}")
        # From here on Python turns a file that is too large into an OSError.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def _linux(self, kind: str) -> None:
        if kind == "namespaces" and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
            os.setresuid(namespaces.NOBODY, namespaces.NOBODY, namespaces.NOBODY)
            self.mark("privileges", "other user")
        namespaces.end_with_parent()
        self._try("privileges", "no new ones", lambda: kernel.prctl(_NO_NEW_PRIVILEGES, 1))
        if "landlock" in self.given["mechanisms"]:
            inside = kind == "namespaces"
            libraries = [path for path in self.given["libraries"] if os.path.isdir(path)]
            work = namespaces.WORK if inside else self.given["work"]
            version = self._try(
                "files", "landlock", lambda: kernel.restrict_files(libraries, [work])
            )
            if version is not None and version >= kernel.SIGNALS_SINCE:
                self.mark("signals", "landlock")
        self._try("privileges", "no capabilities", _drop_capabilities)
        if "seccomp" in self.given["mechanisms"]:
            done = self._try("processes", "seccomp", kernel.install_filter)
            if done is not False and "processes" in self.active:
                self.mark("network", "seccomp")
                self.mark("signals", "seccomp")
        # A user namespace counts its own tasks (Linux 5.14); root outside of one is not limited.
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        if kind == "namespaces" and "tasks" in self.active and release >= (5, 14):
            self.mark("processes", "limit")

    def _try(self, protection: str, mechanism: str, put_on: Any) -> Any:
        """None where the system refuses, with a note."""
        try:
            result = put_on()
        except OSError as error:
            self.notes.append(f"no {mechanism}: {error}")
            return None
        self.mark(protection, mechanism)
        return result or 0

    def _filesystem(self, kind: str) -> None:
        """Believed only when a file of the caller cannot be read any more."""
        landlocked = self.active.pop("files", [])
        names = {"namespaces": ["own root"], "seatbelt": ["sandbox-exec"]}.get(kind, [])
        try:
            with open(self.given["canary"]):
                self.notes.append("a file outside could be read")
        except OSError:
            for mechanism in [*names, *landlocked]:
                self.mark("filesystem", mechanism)

    # --- the program ------------------------------------------------------------------------------

    def execute(self) -> int:
        sys.path[:] = [path for path in sys.path if path != self.given["package"]]
        sys.argv = ["program", *map(str, self.given["channel"])]
        given, token = self.given["program"], self.given["token"].encode()
        self.given = {}
        code = 1
        try:
            exec(compile(given, "<program>", "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as error:
            print(f"SystemExit: {error}")  # noqa: T201 -- the program's own output
            code = 2
        except BaseException:
            sys.tracebacklimit = 8
            sys.__excepthook__(*sys.exc_info())
        sys.stdout.flush()
        if code == 0:
            os.write(self.token, token)
        return code


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    kernel.call("capset", header, (ctypes.c_uint32 * 6)())


def _wait(pid: int) -> int | None:
    """The process's wait status; None when the caller has ended (its end of the pipe closes)."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if select.select([0], [], [], _POLL_SECONDS)[0] and not os.read(0, 4096):
            os.killpg(0, signal.SIGKILL)


def main() -> None:
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 20) or b"\n"
    specification = json.loads(line)
    Launcher(specification, int(sys.argv[1]), int(sys.argv[2])).start()
