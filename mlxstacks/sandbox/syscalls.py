"""Linux system calls that Python has no function for, by number, through ctypes."""

import ctypes
import os

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
