"""The walls around user code: what the kernel refuses a process from now on, whatever code runs in it.

Landlock decides over files, and a seccomp filter over system calls. Neither can be taken down again, by root either.

Hides how the kernel is told. It knows no model.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import raycloak.attestation
import raycloak.coordinator
import raycloak.metrics
import raycloak.workers
from raycloak.attestation.core.private_memory import keep_memory_private
from raycloak.metrics.errors import ConfigError

# From the kernel's headers prctl.h, landlock.h, seccomp.h, audit.h, bpf_common.h and sched.h.
_SET_PDEATHSIG: Final = 1
_SET_NO_NEW_PRIVS: Final = 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_ASKS_VERSION: Final = 1
LEAST_LANDLOCK: Final = 3
"""Landlock's interface of Linux 6.2, the first that also refuses to truncate a file."""
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_ALL_RIGHTS: Final = (1 << 15) - 1
"""All that ABI 3 can refuse: to execute, write, read, make, remove, move or truncate a file."""
_SECCOMP, _SET_FILTER = 317, 1
_X86_64: Final = 0xC000_003E
_LOAD, _EQUAL, _ANY_BIT, _ANSWER = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_STEP_BYTES: Final = 8
_THREAD: Final = 0x1_0000
_MOST_FILES: Final = 256
_SYSTEM: Final = (
    Path("/usr/lib"),
    Path("/lib64"),
    Path("/etc/ld.so.cache"),
    # By these, libraries choose their kernels late: without them, sums have other bits and take longer.
    Path("/proc/cpuinfo"),
    Path("/sys/devices/system/cpu"),
)

# The numbers of x86-64. Memory, time, threads, files that are open or that Landlock lets it read, and no more.
_ALLOWED: Final = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "access": 21, "sched_yield": 24, "mremap": 25, "madvise": 28,
    "dup": 32, "nanosleep": 35, "getpid": 39, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "exit": 60, "uname": 63,
    "ftruncate": 77, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "getuid": 102,
    "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131, "fstatfs": 138, "gettid": 186,
    "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "restart_syscall": 219,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262,
    "readlinkat": 267, "faccessat": 269, "ppoll": 271, "set_robust_list": 273, "getcpu": 309, "getrandom": 318,
    "memfd_create": 319, "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
_FCNTL, _OPENAT, _CLONE, _CLONE3, _PRLIMIT = 72, 257, 56, 435, 302
# Copies, flags and seals of a descriptor. Not its owner: F_SETOWN would send signals to other processes.
_FCNTL_COMMANDS: Final = (0, 1, 2, 3, 4, 1030, 1033, 1034)
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def raise_walls(*readable: Path) -> None:
    """Close this process in, for as long as it lives, with all threads and files that it makes later.

    Guarantee: afterwards the process opens no socket and connects to none, starts no process and executes no program,
    writes to no path, reads no file but those below the Python installation, the system's libraries and ``readable``,
    and reads no other process's memory. Only the descriptors that are open already lead anywhere. It is killed with
    the thread that started it.

    It can still use processor and memory, and see which files exist.

    Raises:
        ConfigError: ``sandbox_missing`` on another processor than x86-64, or if the kernel lacks Landlock or seccomp;
            ``sandbox_threads`` if another thread runs already, which Landlock would leave outside.
    """
    if os.uname().machine != "x86_64":
        raise _missing("the filter is written for x86-64")
    if (threads := len(list(Path("/proc/self/task").iterdir()))) != 1:
        raise ConfigError("sandbox_threads", f"{threads} threads run already.", "Close a process in before it has any.")
    keep_memory_private()
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
    libc = ctypes.CDLL(None, use_errno=True)
    _told(libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "a signal at its parent's end")
    # The kernel takes rules of a process without root's rights only after this.
    _told(libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _close_files(libc, [*_installed(), *readable])
    # Last: the filter refuses the calls before.
    program = ctypes.create_string_buffer(code := _program(), len(code))
    steps = struct.pack("HP", len(code) // _STEP_BYTES, ctypes.addressof(program))
    _told(_call(libc, _SECCOMP, _SET_FILTER, 0, steps), "seccomp filters")


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; negative if it has none."""
    return _call(ctypes.CDLL(None), _LANDLOCK_CREATE, None, 0, _ASKS_VERSION)


def _installed() -> list[Path]:
    """Return the folders of Python, its packages, this product's code and the system's libraries."""
    packages = (raycloak.attestation, raycloak.coordinator, raycloak.metrics, raycloak.workers)
    found = [*sysconfig.get_paths().values(), sys.base_prefix, *(each.__path__[0] for each in packages)]
    # A checkout holds its packages as links, beside much that is no code.
    own = [Path(__file__).parents[1], *(Path(each).resolve() for each in found)]
    return [each for each in [*own, *_SYSTEM] if each.exists()]


def _close_files(libc: Any, readable: Iterable[Path]) -> None:
    if landlock_version() < LEAST_LANDLOCK:
        raise _missing(f"the kernel has no Landlock of version {LEAST_LANDLOCK}")
    rules = _told(_call(libc, _LANDLOCK_CREATE, struct.pack("Q", _ALL_RIGHTS), 8, 0), "Landlock")
    try:
        for each in dict.fromkeys(readable):
            place = os.open(each, os.O_PATH | os.O_CLOEXEC)
            try:
                rights = _READ_FILE | (_READ_FOLDER if each.is_dir() else 0)
                _told(_call(libc, _LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, place), 0), f"a rule of {each}")
            finally:
                os.close(place)
        _told(_call(libc, _LANDLOCK_RESTRICT, rules, 0), "Landlock")
    finally:
        os.close(rules)


def _program() -> bytes:
    """Return the filter: an allowed call passes, any other fails with EPERM."""
    allow = [(_ANSWER, 0, 0, _ALLOW)]
    code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _X86_64), (_ANSWER, 0, 0, _KILL), _loaded(_NUMBER_AT)]
    for number in _ALLOWED.values():
        code += _if_call(number, allow)
    commands = [step for each in _FCNTL_COMMANDS for step in ((_EQUAL, 0, 1, each), *allow)]
    code += _if_call(_FCNTL, [_argument(1), *commands, _fails(errno.EPERM)])
    code += _if_call(_OPENAT, [_argument(2), (_ANY_BIT, 0, 1, _WRITING), _fails(errno.EACCES), *allow])
    code += _if_call(_CLONE, [_argument(0), (_ANY_BIT, 0, 1, _THREAD), *allow, _fails(errno.EPERM)])
    # Its flags are in memory, where no filter looks; the C library then takes clone.
    code += _if_call(_CLONE3, [_fails(errno.ENOSYS)])
    # To read a limit: the pointer to a new one is null, in both halves.
    null = [step for half in (0, 4) for step in (_argument(2, half), (_EQUAL, 1, 0, 0), _fails(errno.EPERM))]
    code += _if_call(_PRLIMIT, [*null, *allow])
    code.append(_fails(errno.EPERM))
    return b"".join(struct.pack("HBBI", *step) for step in code)


_Step = tuple[int, int, int, int]
"""An instruction of the filter: operation, steps to skip if true and if false, operand."""


def _if_call(number: int, then: Sequence[_Step]) -> list[_Step]:
    """Return the steps that are taken for one call alone; they end in an answer."""
    return [(_EQUAL, 0, len(then), number), *then]


def _loaded(offset: int) -> _Step:
    return _LOAD, 0, 0, offset


def _argument(index: int, half: int = 0) -> _Step:
    """Load the low half of an argument, or with 4 the high one."""
    return _loaded(_ARGUMENTS_AT + 8 * index + half)


def _fails(number: int) -> _Step:
    return _ANSWER, 0, 0, _FAIL | number


def _call(libc: Any, number: int, *arguments: Any) -> int:
    whole = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    found: int = libc.syscall(ctypes.c_long(number), *whole)
    return found


def _told(found: int, what: str) -> int:
    if found < 0:
        raise _missing(f"the kernel does not take {what}: {os.strerror(ctypes.get_errno())}")
    return found


def _missing(why: str) -> ConfigError:
    return ConfigError("sandbox_missing", f"{why}.", "Run on Linux 6.2 or later with Landlock and seccomp, on x86-64.")
