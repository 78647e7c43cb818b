"""A filter of system calls: no new processes, programs, sockets, signals to others, or privileges.

A list of what is denied, not of what is allowed: Python and its extension modules need too many
calls to list. It closes what pure computing never needs, and the calls through which most kernels
were broken. Threads stay possible; so do pairs of sockets without a name (asyncio makes one).
"""

import ctypes
import errno
import os

from mlxstacks.sandbox.syscalls import number, prctl

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


def program(own_pid: int) -> list[Instruction]:
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
        if (found := number(name)) is not None:
            lines += [(_EQUAL, 0, 1, found), (_RETURN, 0, 0, _DENY)]
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


def install() -> None:
    """For this process, for good; needs no_new_privs. Raises: OSError where there is no seccomp."""
    number("clone")  # before _ARCHITECTURES is asked: says what is not supported
    lines = program(os.getpid())
    filters = (_Filter * len(lines))(*(_Filter(*line) for line in lines))
    prctl(_SET_SECCOMP, _MODE_FILTER, _Program(len(lines), filters))
