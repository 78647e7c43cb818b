"""Hostile programs in the sandbox: with everything on, and with each way alone that may have to do.

Run: pytest tests/sandbox/test_sandbox.py   (Linux; the macOS profile is only read, not run)
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxstacks.sandbox import run as sandbox
from mlxstacks.sandbox.run import (
    MECHANISMS,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    macos_profile,
    run_untrusted,
)

# Everything; namespaces without the filter; what is left where namespaces are refused.
WAYS = {
    "all": MECHANISMS,
    "namespaces": ("namespaces",),
    "no-namespaces": ("landlock", "seccomp"),
}
SMALL = SandboxLimits(
    wall_seconds=60, cpu_seconds=20, memory_bytes=256 << 20, file_bytes=1 << 20,
    disk_bytes=2 << 20, output_bytes=20_000, tasks=16,
)  # fmt: skip


def run(program: str, way: str = "all", limits: SandboxLimits = SMALL) -> SandboxResult:
    """Skips where this system does not offer that way."""
    try:
        return run_untrusted(program, limits, allowed=True, mechanisms=WAYS[way])
    except SandboxError as error:
        pytest.skip(str(error))


# Each entry is tried; what it comes to is printed: an exception's name, or what it got.
ATTACKS = r"""
import ctypes, fcntl, glob, json, os, resource, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)

def unlimited():
    resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))
def large_file():
    with open("large", "wb") as file:
        for _ in range(64): file.write(bytes(1 << 17))
def remove_outside():
    os.remove(VICTIM)
def connect():
    with socket.create_connection(("127.0.0.1", PORT), 2) as s: return s.recv(5).decode()
def unix_socket():
    s = socket.socket(socket.AF_UNIX); s.connect("\0" + ABSTRACT); return "connected"
def fork():
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    return "forked"
def system():
    return os.system("touch " + NEW)
def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL); return "sent"
def kill_caller():
    os.kill(CALLER, signal.SIGTERM); return "sent"
def kill_all():
    os.kill(-1, signal.SIGKILL); return "sent"
def kill_group():
    os.killpg(0, 0); return "group"
def trace():
    if libc.ptrace(16, CALLER, 0, 0) < 0: raise OSError(ctypes.get_errno(), "ptrace")
def new_user():
    if libc.unshare(0x10000000) < 0: raise OSError(ctypes.get_errno(), "unshare")
def mount():
    if libc.mount(b"none", b"/", b"tmpfs", 0, None) < 0: raise OSError(ctypes.get_errno(), "mount")
def failed(name, result):
    if result < 0: raise OSError(ctypes.get_errno(), name)
    return result
def watch():
    seen = failed("inotify_init", libc.inotify_init())
    try: return failed("inotify_add_watch", libc.inotify_add_watch(seen, VICTIM.encode(), 2))
    finally: os.close(seen)
def signal_by_descriptor():
    one, two = socket.socketpair()
    fcntl.fcntl(one, fcntl.F_SETOWN, CALLER)
    return "its signals go to the caller"
def become_root():
    os.setuid(0); return os.getuid()
def descriptors():
    found = []
    for fd in range(256):
        try: os.fstat(fd); found.append(fd)
        except OSError: pass
    return found
def read(path):
    with open(path) as file: return file.read(20)
def write(path):
    with open(path, "w") as file: file.write("x")
    return "written"

attempts = {
    "read passwd": lambda: read("/etc/passwd"),
    "read home": lambda: read(VICTIM),
    "list home": lambda: os.listdir(os.path.dirname(VICTIM)),
    "read caller": lambda: read(f"/proc/{CALLER}/environ"),
    "read by link": lambda: (os.symlink(VICTIM, "link"), read("link"))[1],
    "read by way up": lambda: read("../" * 12 + VICTIM.lstrip("/")),
    "write outside": lambda: write(NEW),
    "cut outside": lambda: os.truncate(VICTIM, 0),
    "overwrite": lambda: write(VICTIM),
    "remove": remove_outside,
    "mode": lambda: os.chmod(VICTIM, 0o777),
    "write libraries": lambda: write(os.path.join(os.path.dirname(os.__file__), "planted.py")),
    "write usr": lambda: write("/usr/lib/planted"),
    "write root": lambda: write("/planted"),
    "write tmp": lambda: write("/tmp/planted-by-sandbox-test"),
    "large file": large_file,
    "connect": connect,
    "abstract socket": unix_socket,
    "system": system,
    "run": lambda: subprocess.run(["/bin/true"]),
    "execute": lambda: os.execv(sys.executable, [sys.executable, "-c", "print(1)"]),
    "kill caller": kill_caller,
    "limits of caller": lambda: resource.prlimit(CALLER, resource.RLIMIT_CORE),
    "limit caller": lambda: resource.prlimit(CALLER, resource.RLIMIT_CORE, (0, 0)),
    "slow caller": lambda: os.setpriority(os.PRIO_PROCESS, CALLER, 19),
    "place caller": lambda: os.sched_setaffinity(CALLER, {0}),
    "signal by descriptor": signal_by_descriptor,
    "attach memory": lambda: failed("shmat", libc.shmat(SHARED, None, 0)),
    "remove memory": lambda: failed("shmctl", libc.shmctl(SHARED, 0, None)),
    "watch outside": watch,
    "trace": trace,
    "mount": mount,
    "raise limit": unlimited,
    "become root": become_root,
    # not denied everywhere, but without effect: see below
    "fork": fork, "kill parent": kill_parent, "new user": new_user, "kill group": kill_group,
    "environment": lambda: dict(os.environ), "descriptors": descriptors,
    "directory": lambda: os.listdir("."), "write inside": lambda: write("mine"),
    "path": lambda: sys.path, "flags": lambda: [sys.flags.isolated, sys.flags.no_site],
    "modules": lambda: __import__("decimal").Decimal("0.1") + 1 and "decimal",
}
outcomes = {}
for name, attempt in attempts.items():
    try: outcomes[name] = attempt()
    except BaseException as error: outcomes[name] = f"{type(error).__name__}"
print("OUTCOMES" + json.dumps(outcomes, default=str))
"""
REFUSED = {
    "OSError", "PermissionError", "FileNotFoundError", "ProcessLookupError", "BlockingIOError",
    "ConnectionRefusedError", "ValueError", "NotADirectoryError",
}  # fmt: skip
# What is no attack, or does nothing there.
ALLOWED = {
    "fork", "kill parent", "new user", "kill group", "environment", "descriptors", "directory",
    "write inside", "path", "flags", "modules",
}  # fmt: skip


@contextmanager
def shared_memory() -> Iterator[int]:
    """A System V segment, which any process of the user may attach; its number."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = libc.shmget(0, 4096, 0o1600)
    assert number >= 0, os.strerror(ctypes.get_errno())
    try:
        yield number
        assert libc.shmctl(number, 2, ctypes.create_string_buffer(256)) == 0, "it was removed"
    finally:
        libc.shmctl(number, 0, None)


@pytest.fixture(scope="module", params=WAYS)
def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, SandboxResult, dict[str, object], Path]:
    """All attacks in one program, against a file, a server and this very process."""
    import socket

    way: str = request.param
    directory = tmp_path_factory.mktemp("home")
    victim = directory / "secret.txt"
    victim.write_text("secret")
    victim.chmod(0o644)
    abstract = f"mlxstacks-test-{os.getpid()}-{way}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        shared_memory() as shared,
    ):
        unix.bind("\0" + abstract)
        unix.listen()
        names = {
            "VICTIM": str(victim), "NEW": str(directory / "new"), "CALLER": os.getpid(),
            "PORT": server.getsockname()[1], "ABSTRACT": abstract, "SHARED": shared,
        }  # fmt: skip
        head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        os.environ["A_SECRET_OF_THE_CALLER"] = "1"
        result = run(head + ATTACKS, way)
    lines = [line for line in result.output.splitlines() if line.startswith("OUTCOMES")]
    assert lines, result
    return way, result, json.loads(lines[-1].removeprefix("OUTCOMES")), victim


def test_every_attack_is_refused(
    attacked: tuple[str, SandboxResult, dict[str, object], Path],
) -> None:
    _, result, outcomes, victim = attacked
    got_through = {
        name: outcome
        for name, outcome in outcomes.items()
        if name not in ALLOWED and outcome not in REFUSED
    }
    # A shell that cannot be started: an exit status, not an exception.
    if got_through.get("system") not in (None, 0):
        del got_through["system"]
    # nobody but root may become root; where it is root already, it has no capabilities
    if outcomes["become root"] == 0 and "landlock" in str(result.protections.active["filesystem"]):
        del got_through["become root"]
    assert got_through == {}
    assert result.status == "finished"
    assert victim.read_text() == "secret"
    assert oct(victim.stat().st_mode & 0o777) == "0o644"
    assert [path.name for path in victim.parent.iterdir()] == ["secret.txt"]
    assert not Path("/tmp/planted-by-sandbox-test").exists()
    assert not Path("/usr/lib/planted").exists()
    assert not Path("/planted").exists()


def test_inside_is_empty_and_usable(
    attacked: tuple[str, SandboxResult, dict[str, object], Path],
) -> None:
    way, result, outcomes, _ = attacked
    assert "A_SECRET_OF_THE_CALLER" not in str(outcomes["environment"])
    assert len(outcomes["descriptors"]) == 4  # type: ignore[arg-type] # input, 2 outputs, token
    assert outcomes["write inside"] == "written"
    assert outcomes["modules"] == "decimal"
    assert outcomes["flags"] == [1, 1]
    assert not any("site-packages" in path for path in outcomes["path"])  # type: ignore[attr-defined]
    assert result.protections.missing == []
    if "seccomp" in WAYS[way]:
        for name in ("fork", "kill parent", "new user"):
            assert outcomes[name] == "PermissionError", name


def test_protections_are_named(
    attacked: tuple[str, SandboxResult, dict[str, object], Path],
) -> None:
    way, result, _, _ = attacked
    active = result.protections.active
    # "all" does without namespaces where the system refuses them (Docker, GitHub's runners).
    refused = any(note.startswith("no namespaces") for note in result.protections.notes)
    namespaces = "namespaces" in WAYS[way] and not refused
    assert ("own root" in active["filesystem"]) == namespaces
    assert ("landlock" in active["filesystem"]) == ("landlock" in WAYS[way])
    assert ("seccomp" in active["network"]) == ("seccomp" in WAYS[way])
    assert ("namespace" in active["network"]) == namespaces


FORK_BOMB = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            while True: time.sleep(1)
        made += 1
except OSError as error:
    print("made", made)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_fork_bomb_ends_at_the_limit(way: str) -> None:
    result = run(FORK_BOMB, way)
    made = int(result.output.split()[-1])
    assert made == 0 if "seccomp" in WAYS[way] else made < SMALL.tasks


@pytest.mark.parametrize("way", ["all", "no-namespaces"])
def test_a_memory_bomb_meets_its_limit(way: str) -> None:
    result = run("kept = []\nwhile True: kept.append(bytearray(1 << 24))", way)
    assert result.status in ("failed", "killed")
    assert "MemoryError" in result.output


def test_disk_has_a_limit_of_all_files_together() -> None:
    program = """
written = 0
try:
    for number in range(100):
        with open(f"file{number}", "wb") as file: written += file.write(bytes(1 << 19))
except OSError as error:
    print(type(error).__name__, written)
"""
    result = run(program, "namespaces")
    name, written = result.output.split()
    assert name == "OSError"
    assert int(written) <= SMALL.disk_bytes


@pytest.mark.parametrize("way", WAYS)
def test_ordinary_programs_run(way: str) -> None:
    """Threads, an event loop, extension modules, files of its own, the system's randomness."""
    program = """
import asyncio, hashlib, json, random, tempfile, threading
done = []
thread = threading.Thread(target=done.append, args=(1,))
thread.start(); thread.join()
async def two(): await asyncio.sleep(0); done.append(2)
asyncio.run(two())
with open("mine", "w+") as file: file.write("3"); file.seek(0); done.append(int(file.read()))
hashlib.sha256(b"").hexdigest(), random.SystemRandom().random()
print(json.dumps(done))
"""
    result = run(program, way)
    assert (result.status, result.output) == ("finished", "[1, 2, 3]\n")


def test_what_ends_by_its_cpu_time_or_by_the_clock_is_out_of_time() -> None:
    loop = run("import signal\nsignal.raise_signal(signal.SIGXCPU)")
    assert (loop.status, loop.exit_code) == ("out of time", None)
    asleep = run("import time\ntime.sleep(600)", limits=SandboxLimits(wall_seconds=0.5))
    assert (asleep.status, asleep.exit_code) == ("out of time", None)


def test_a_program_that_ignores_signals_is_ended() -> None:
    """Of CPU time it gets a second, then a signal, then another second."""
    program = """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.signal(signal.SIGXCPU, lambda *_: print("a second", flush=True))
while True: pass
"""
    result = run(program, limits=SandboxLimits(wall_seconds=60, cpu_seconds=1))
    assert (result.status, result.exit_code) == ("killed", -signal.SIGKILL)
    assert result.output == "a second\n"


def test_huge_output_is_cut() -> None:
    result = run("while True: print('x' * 10000)")
    assert result.status == "too much output"
    assert len(result.output) == SMALL.output_bytes


def test_only_reaching_the_end_counts_as_finished() -> None:
    """An early exit with code 0 is no success: tests after it have not run."""
    ends = """
import os, sys
def check(): assert 1 + 1 == 2
check()
print("done")
"""
    finished = run(ends)
    assert (finished.status, finished.exit_code, finished.output) == ("finished", 0, "done\n")
    early = run("import os\nos._exit(0)\n")
    assert (early.status, early.exit_code) == ("failed", 0)
    asked = run("raise SystemExit(0)")
    assert asked.status == "failed"
    wrong = run("assert 1 + 1 == 3, 'sums'")
    assert (wrong.status, wrong.exit_code) == ("failed", 1)
    assert "AssertionError: sums" in wrong.output
    told = run("import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'x' * 9999)\n"
               "  except OSError: pass\nos._exit(0)")  # fmt: skip
    assert told.status == "failed"
    crashed = run("import os\nos.abort()")
    assert (crashed.status, crashed.exit_code) == ("killed", -signal.SIGABRT)
    assert run("this is no Python").status == "failed"


def test_nothing_runs_unasked_or_unprotected(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="not run unasked"):
        run_untrusted(f"open({str(tmp_path / 'a')!r}, 'w')")
    program = f"open({str(tmp_path / 'b')!r}, 'w')"
    with pytest.raises(SandboxError, match="nothing was run: no protection of filesystem, net"):
        run_untrusted(program, allowed=True, mechanisms=())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "plan9")
    with pytest.raises(SandboxError, match="no sandbox is known for plan9"):
        run_untrusted("", allowed=True)


def test_the_macos_profile_denies_by_default(tmp_path: Path) -> None:
    """Its text only: nothing here can run it."""
    profile = macos_profile(tmp_path / "work")
    assert profile.startswith("(version 1)\n(deny default)\n")
    assert profile.count("(") == profile.count(")")
    writes = [line for line in profile.splitlines() if "file-write" in line]
    assert writes == [
        '(allow file-write-data (literal "/dev/null"))',
        f'(allow file-write* (subpath "{tmp_path}/work"))',
    ]
    assert "network" not in profile
    assert "process-fork" not in profile
    assert sandbox.resident_bytes(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_process_outlives_the_caller(tmp_path: Path) -> None:
    """The caller is killed while a program runs; launcher, init and program end with it."""
    code = (
        "from mlxstacks.sandbox.run import *\n"
        "l = SandboxLimits(wall_seconds=300, cpu_seconds=300)\n"
        "run_untrusted('import time\\nwhile True: time.sleep(1)', l, allowed=True)"
    )
    run("")  # skips where nothing runs
    here = os.environ | {"TMPDIR": str(tmp_path)}  # a killed caller cannot tidy up
    caller = subprocess.Popen([sys.executable, "-c", code], env=here)
    try:
        below: list[int] = []
        for _ in range(1200):
            below = _descendants(caller.pid)
            if len(below) >= 2:
                break
            time.sleep(0.05)
        assert len(below) >= 2
    finally:
        caller.kill()
        caller.wait()
    for _ in range(1200):
        if not any(Path(f"/proc/{pid}").exists() for pid in below):
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {below}")


def _descendants(pid: int) -> list[int]:
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found += [child, *_descendants(child)]
    return found
