"""What Linux offers a process that gives up rights, by system calls that Python has no function
for: Landlock, by which it gives up the file system but for the directories it names, and a filter
of system calls (seccomp). Neither needs root.

Landlock does not hold looking whether a path exists (stat); owners, modes and times are the
filter's work. The filter lists what is denied, not what is allowed: Python and its extension
modules need too many calls to list. It closes what pure computing never needs (new processes,
programs, sockets, signals to others, privileges), and the calls through which most kernels were
broken. Threads stay possible; so do pairs of sockets without a name (asyncio makes one).
"""

import ctypes
import errno
import os
from collections.abc import Iterable

# (x86_64, aarch64); None where the architecture has no such call. From the kernel's unistd headers.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "add_key": (248, 217), "bpf": (321, 280), "capset": (126, 91), "chmod": (90, None),
    "chown": (92, None), "chroot": (161, 51), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "fanotify_init": (300, 262), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "fcntl": (72, 25), "finit_module": (313, 273), "fork": (57, None), "fremovexattr": (199, 16),
    "fsetxattr": (190, 7), "fsopen": (430, 430), "futimesat": (261, None),
    "init_module": (175, 105), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioprio_set": (251, 30), "kcmp": (312, 272),
    "kexec_load": (246, 104), "keyctl": (250, 219), "kill": (62, 129),
    "landlock_add_rule": (445, 445), "landlock_create_ruleset": (444, 444),
    "landlock_restrict_self": (446, 446), "lchown": (94, None), "lremovexattr": (198, 15),
    "lsetxattr": (189, 6), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mknod": (133, None), "mknodat": (259, 33), "mount": (165, 40),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "msgctl": (71, 187), "msgget": (68, 186),
    "msgrcv": (70, 188), "msgsnd": (69, 189), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41), "prlimit64": (302, 261), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "reboot": (169, 142),
    "removexattr": (197, 14), "request_key": (249, 218), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "semctl": (66, 191),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "setns": (308, 268),
    "setpgid": (109, 154), "setpriority": (141, 140), "setsid": (112, 157), "setxattr": (188, 5),
    "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198),
    "swapon": (167, 224), "syslog": (103, 116), "tgkill": (234, 131), "tkill": (200, 130),
    "umount2": (166, 39), "unshare": (272, 97), "userfaultfd": (323, 282), "utime": (132, None),
    "utimensat": (280, 88), "utimes": (235, None), "vfork": (58, None),
}  # fmt: skip
_MACHINES = {"x86_64": 0, "aarch64": 1}

_libc = ctypes.CDLL(None, use_errno=True)


def number(name: str) -> int | None:
    """The call's number here. Raises: OSError on an architecture that is not in the table."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(f"no system call numbers for {machine}")
    return _NUMBERS[name][_MACHINES[machine]]


def call(name: str, *arguments: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Make a system call. Structures go by reference. Raises: OSError with its errno."""
    converted: list[object] = []
    for argument in arguments:
        if isinstance(argument, ctypes.Structure | ctypes.Array):
            converted.append(ctypes.byref(argument))
        elif isinstance(argument, int):
            converted.append(ctypes.c_long(argument))
        else:
            converted.append(argument)
    return _checked(name, _libc.syscall(ctypes.c_long(number(name) or -1), *converted))


def prctl(option: int, *arguments: int | ctypes.Structure) -> int:
    """Raises: OSError."""
    converted = [
        ctypes.byref(a) if isinstance(a, ctypes.Structure) else ctypes.c_ulong(a)
        for a in (*arguments, 0, 0, 0, 0)[:4]
    ]
    return _checked(f"prctl {option}", _libc.prctl(option, *converted))


def _checked(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# --- Landlock -------------------------------------------------------------------------------------

# rights by version: 13 at first; + refer 2, + truncate 3, + ioctl of devices 5
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_RIGHTS = 16
_EXECUTE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 2, 1 << 3
_TCP = 0b11  # bind, connect; since version 4
_SCOPES = 0b11  # abstract sockets, signals; since version 6
_PATH_BENEATH, _VERSION = 1, 1
# Before version 3 a file that may not be written could still be cut to nothing.
_LEAST_LANDLOCK = 3
SIGNALS_SINCE = 6


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32)]


def landlock_version() -> int:
    """Of this kernel. Raises: OSError where there is no Landlock."""
    return call("landlock_create_ruleset", None, 0, _VERSION)


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> int:
    """From now on: these directories, nothing else. Returns the version.

    Needs no_new_privs. Raises: OSError where there is no Landlock, or one that is too old.
    """
    version = landlock_version()
    if version < _LEAST_LANDLOCK:
        raise OSError(f"Landlock {version}; version {_LEAST_LANDLOCK} needed")
    everything = (1 << _RIGHTS.get(version, _ALL_RIGHTS)) - 1
    attributes = _Ruleset(everything, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    # An older kernel does not know the later fields, even as zeros beyond its size.
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call("landlock_create_ruleset", attributes, size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ_FILE | _READ_DIRECTORY)
        for path in writable:
            _allow(ruleset, path, everything & ~_EXECUTE)
        call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call("landlock_add_rule", ruleset, _PATH_BENEATH, _PathBeneath(rights, directory), 0)
    finally:
        os.close(directory)


# --- seccomp --------------------------------------------------------------------------------------

_NEVER = (
    # processes and programs (clone has a rule of its own, for threads)
    "fork", "vfork", "execve", "execveat", "setsid", "setpgid",
    # networks, and memory that no limit counts
    "socket", "memfd_create", "memfd_secret",
    # what processes of one user share by small numbers and names, Landlock or not
    "shmget", "shmat", "shmctl", "semget", "semop", "semtimedop", "semctl",
    "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink",
    # other processes
    "kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal",
    "pidfd_getfd", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp",
    "setpriority", "ioprio_set", "sched_setaffinity", "sched_setattr", "sched_setparam",
    "sched_setscheduler", "migrate_pages", "move_pages",
    # names and namespaces
    "mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "fsopen", "move_mount",
    "open_tree", "mount_setattr", "open_by_handle_at", "mknod", "mknodat",
    # what Landlock does not hold: owners, modes, times and attributes of files
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
    "utime", "utimes", "futimesat", "utimensat", "inotify_init", "inotify_init1", "fanotify_init",
    # the kernel itself
    "bpf", "perf_event_open", "io_uring_setup", "userfaultfd", "keyctl", "add_key", "request_key",
    "init_module", "finit_module", "kexec_load", "reboot", "swapon", "personality", "syslog",
)  # fmt: skip
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE_THREAD = 0x00010000
_X32_BIT = 0x40000000
_SET_SECCOMP, _MODE_FILTER = 22, 2
# classic BPF: load a word, compare, return
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
# fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX; ioctl: FIOSETOWN, SIOCSPGRP (whom a descriptor signals,
# and how), TIOCSTI (keys into a terminal)
_SIGNALLING = (8, 10, 15)
_SIGNALLING_DEVICE = (0x8901, 0x8902, 0x5412)
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY = _ERROR | errno.EPERM

Instruction = tuple[int, int, int, int]
"""Code, lines to skip when true, when false, operand."""


class _Filter(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filters", ctypes.POINTER(_Filter))]


def _filter_program(own_pid: int) -> list[Instruction]:
    """The filter; own_pid: a process may signal itself (abort does), and lower its own limits."""
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURES[os.uname().machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if os.uname().machine == "x86_64":  # the same calls by other numbers
        lines += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for name in _NEVER:
        if (call_number := number(name)) is not None:
            lines += [(_EQUAL, 0, 1, call_number), (_RETURN, 0, 0, _DENY)]
    # Its flags lie in memory, where a filter cannot look; glibc then falls back to clone.
    lines += [(_EQUAL, 0, 1, number("clone3") or 0), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for name, argument, test, operands, holds, otherwise in (
        ("clone", 0, _ANY_BIT, (_CLONE_THREAD,), _ALLOW, _DENY),
        ("tgkill", 0, _EQUAL, (own_pid,), _ALLOW, _DENY),
        # limits of one's own; those of any process of the user else
        ("prlimit64", 0, _EQUAL, (0, own_pid), _ALLOW, _DENY),
        ("fcntl", 1, _EQUAL, _SIGNALLING, _DENY, _ALLOW),
        ("ioctl", 1, _EQUAL, _SIGNALLING_DEVICE, _DENY, _ALLOW),
    ):
        count = len(operands)
        lines += [
            (_EQUAL, 0, count + 3, number(name) or 0),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
            *((test, count - place, 0, operand) for place, operand in enumerate(operands)),
            (_RETURN, 0, 0, otherwise),
            (_RETURN, 0, 0, holds),
        ]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def install_filter() -> None:
    """For this process, for good; needs no_new_privs. Raises: OSError where there is no seccomp."""
    number("clone")  # before _ARCHITECTURES is asked: says what is not supported
    lines = _filter_program(os.getpid())
    filters = (_Filter * len(lines))(*(_Filter(*line) for line in lines))
    prctl(_SET_SECCOMP, _MODE_FILTER, _Program(len(lines), filters))
