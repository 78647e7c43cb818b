"""Programs that a model wrote, run where they can harm little; only with an explicit flag.

    result = run_untrusted(program, allowed=True)
    result.status == "finished"     # it came to its end without an exception

The program runs in a process of its own (`python -I -S`, no environment, no open descriptors but
its output) with limits of CPU time, wall time, memory, file size, disk and output, in an empty
directory, without network, other processes or the caller's files. How, by system:

    Linux    own user, mount, process, network and IPC namespaces, a root directory that holds only
             Python's libraries (read-only) and /work in memory; on top of them Landlock and a
             filter of system calls (seccomp). Where namespaces are refused (containers, some
             distributions), Landlock and seccomp alone.
    macOS    sandbox-exec with the profile below; the memory of the process is watched from outside,
             since macOS does not hold that limit. Written from Apple's documentation; no test has
             run it.

Not bubblewrap: it needs user namespaces, which Docker's default profile and Ubuntu 24.04 (GitHub's
runners) refuse; Landlock and seccomp are all there is then, and refuse the same attacks. With
bubblewrap 0.8 alone three attacks of the tests get through: a new program (its own filter cannot
deny execve, by which it starts the interpreter), raised limits, files in the root. Limits, Landlock
and the filter would have to stay; only namespaces.py could go.

`result.protections` says which of them were active, measured in the very process before the program
began. Where an essential one is missing nothing runs.

What this does not hold: a hole in the kernel or in the processor (side channels); the libraries of
the system can be read; with Landlock alone the program can learn which paths exist and fill the
disk with many files of the largest size; CPU and memory are used up to their limits. "Finished" is
told by the process in which the program ran: a program that looks for it can say so of itself. What
a program is worth is for another process to say, in which it never ran: two programs that share a
`channel`, one with the code and one with its tests (calls.py).
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlxstacks
from mlxstacks.errors import InputError

ESSENTIAL = ("filesystem", "network", "processes", "signals", "memory", "cpu", "file size")
MECHANISMS = ("namespaces", "landlock", "seccomp")
Status = Literal["finished", "failed", "out of time", "killed", "too much output"]
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1));"
    "from mlxstacks.sandbox.launcher import main; main()"
)
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_START_SECONDS = 60.0  # for the sandbox itself, on a busy machine
_MEMORY_POLL_SECONDS = 0.2
_TOKEN_CHARACTERS = 32


class SandboxError(InputError):
    """Nothing was run: not allowed, or a protection that must be there is missing."""


@dataclass(frozen=True)
class SandboxLimits:
    """cpu_seconds: whole ones; wall_seconds: from the program's start; disk_bytes: of all files
    together (namespaces only); tasks: threads, and processes where they are possible at all.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 8 << 20
    disk_bytes: int = 32 << 20
    output_bytes: int = 64 << 10
    tasks: int = 32


@dataclass(frozen=True)
class Protections:
    """active: protection -> mechanisms that give it; notes: what could not be put on, and why."""

    active: dict[str, list[str]]
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Of the essential ones."""
        return [name for name in ESSENTIAL if not self.active.get(name)]


@dataclass(frozen=True)
class SandboxResult:
    """exit_code: minus the signal that killed it, None where it was stopped from outside. output:
    standard output and error together, cut at the limit.
    """

    status: Status
    exit_code: int | None
    output: str
    protections: Protections


def run_untrusted(
    program: str,
    limits: SandboxLimits | None = None,
    *,
    allowed: bool = False,
    mechanisms: Collection[str] = MECHANISMS,
    channel: Collection[int] = (),
) -> SandboxResult:
    """Run Python source to its end, to a limit, or not at all.

    allowed: the caller's explicit consent to run code that nobody has read.
    mechanisms: which to try (Linux). channel: descriptors that the program gets besides its output;
    their numbers are in `sys.argv`.

    Raises:
        SandboxError: not allowed; a system without a sandbox; an essential protection is missing.
        RuntimeError: the sandbox itself failed.
    """
    if not allowed:
        raise SandboxError(
            "code written by a model is not run unasked; say so explicitly to run it in a sandbox"
        )
    limits = limits or SandboxLimits()
    token = secrets.token_hex(_TOKEN_CHARACTERS // 2)
    package = str(Path(mlxstacks.__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as name:
        box = Path(name).resolve()
        for part in ("root", "work"):
            (box / part).mkdir()
        (box / "canary").write_text("outside")
        specification = {
            "program": program,
            "limits": asdict(limits),
            "root": str(box / "root"),
            "work": str(box / "work"),
            "canary": str(box / "canary"),
            "libraries": libraries(),
            "package": package,
            # macOS does not hold a limit of memory: `_Watch` does
            "essential": sorted({*ESSENTIAL} - ({"memory"} if sys.platform == "darwin" else set())),
            "mechanisms": [*mechanisms],
            "channel": [*channel],
            "token": token,
        }
        boot = [*confining_command(box), sys.executable, "-I", "-S", "-B", "-c", _BOOT, package]
        watch, why, code = _watched(boot, box, channel, json.dumps(specification), limits)
    return _result(watch, why, code, token)


def _watched(
    boot: list[str], box: Path, channel: Collection[int], specification: str, limits: SandboxLimits
) -> tuple["_Watch", Status | None, int]:
    """What the child sent, why it was ended (None: by itself), its exit code."""
    status, status_end = os.pipe()
    token, token_end = os.pipe()
    child = subprocess.Popen(
        [*boot, str(status_end), str(token_end)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        pass_fds=(status_end, token_end, *channel), env={}, cwd=box, start_new_session=True,
    )  # fmt: skip
    os.close(status_end)
    os.close(token_end)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(specification.encode() + b"\n")
            child.stdin.flush()
        watch = _Watch(child, limits, {"status": status, "token": token})
        why = watch.until_done()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdin.close()
        child.stdout.close()
        os.close(status)
        os.close(token)
    return watch, why, child.returncode


def _result(watch: "_Watch", why: Status | None, exit_code: int, token: str) -> SandboxResult:
    messages: dict[str, Any] = {}
    for line in bytes(watch.read["status"]).splitlines():
        messages |= json.loads(line)
    output = bytes(watch.read["output"][: watch.limits.output_bytes]).decode(errors="replace")
    if "active" not in messages:
        reason = messages.get("failed") or output or "it said nothing"
        raise RuntimeError(f"the sandbox failed to start ({why or exit_code}): {reason}")
    active, code = messages["active"], None
    if sys.platform == "darwin":
        active["memory"], code = ["watched from outside"], exit_code
    elif "ended" in messages:
        code = os.waitstatus_to_exitcode(messages["ended"])
    protections = Protections(active, tuple(messages["notes"]))
    if protections.missing:
        missing = ", ".join(protections.missing)
        notes = "".join(f"\n  {note}" for note in protections.notes)
        raise SandboxError(f"nothing was run: no protection of {missing} on this system{notes}")
    if why is None and code == -signal.SIGXCPU:
        why = "out of time"
    finished = why is None and code == 0 and watch.read["token"] == token.encode()
    how: Status = "killed" if code is None or code < 0 else "failed"
    status: Status = "finished" if finished else why or how
    return SandboxResult(status, None if why else code, output, protections)


@dataclass
class _Watch:
    """Reads what the child sends until it ends or must be ended."""

    child: "subprocess.Popen[bytes]"
    limits: SandboxLimits
    descriptors: dict[str, int]
    read: dict[str, bytearray] = field(default_factory=dict)

    def until_done(self) -> Status | None:
        """None: it ended by itself."""
        assert self.child.stdout is not None
        sources = {**self.descriptors, "output": self.child.stdout.fileno()}
        self.read = {name: bytearray() for name in sources}
        deadline, begun = time.monotonic() + _START_SECONDS, False
        with selectors.DefaultSelector() as selector:
            for name, descriptor in sources.items():
                selector.register(descriptor, selectors.EVENT_READ, name)
            while selector.get_map():
                if not begun and b"\n" in self.read["status"]:
                    begun, deadline = True, time.monotonic() + self.limits.wall_seconds
                left = deadline - time.monotonic()
                if left <= 0:
                    return "out of time"
                for key, _ in selector.select(min(left, _MEMORY_POLL_SECONDS)):
                    data = os.read(key.fd, 1 << 16)
                    self.read[key.data] += data
                    if not data:
                        selector.unregister(key.fd)
                # the program has this descriptor, and may write to it what it likes
                del self.read["token"][_TOKEN_CHARACTERS + 1 :]
                if len(self.read["output"]) > self.limits.output_bytes:
                    return "too much output"
                if sys.platform == "darwin":
                    used = resident_bytes(self.child.pid)
                    if used is not None and used > self.limits.memory_bytes:
                        return "killed"
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(max(0.1, deadline - time.monotonic()))
            return None
        return "out of time"


def resident_bytes(pid: int) -> int | None:
    """Memory of a process by `ps`; None where it has ended."""
    done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=False)
    return int(done.stdout) * 1024 if done.stdout.strip() else None


def libraries() -> list[str]:
    """Directories that an interpreter needs to import its standard library, none twice."""
    base = os.path.join(sys.base_prefix, "lib")
    wanted = [*_LIBRARIES, sysconfig.get_path("stdlib"), base]
    kept: list[str] = []
    for path in sorted({path for path in wanted if os.path.isdir(path)}, key=len):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


def confining_command(box: Path) -> list[str]:
    """What the interpreter is started through. Raises: SandboxError on an unknown system."""
    if sys.platform == "linux":
        return []  # the launcher confines itself
    if sys.platform == "darwin":
        return ["/usr/bin/sandbox-exec", "-p", macos_profile(box / "work")]
    raise SandboxError(f"no sandbox is known for {sys.platform}; code is not run here")


def macos_profile(work: Path) -> str:
    """Apple's sandbox language: deny all; read libraries and the package; write only to `work`."""
    package = str(Path(mlxstacks.__file__).parent)
    read = [sys.base_prefix, sys.prefix, package, "/usr/lib", "/System", "/private/var/db/dyld"]
    paths = "\n".join(f"  (subpath {json.dumps(os.path.realpath(path))})" for path in read)
    return f"""(version 1)
(deny default)
(allow process-exec
  (literal {json.dumps(os.path.realpath(sys.executable))})
  (subpath {json.dumps(os.path.realpath(sys.base_prefix))}))
(allow process-info* (target self))
(allow signal (target self))
(allow sysctl-read)
(allow file-read-metadata)
(allow file-read*
  (literal "/") (literal "/dev/null") (literal "/dev/urandom")
  (subpath {json.dumps(str(work))})
{paths})
(allow file-write-data (literal "/dev/null"))
(allow file-write* (subpath {json.dumps(str(work))}))
"""
