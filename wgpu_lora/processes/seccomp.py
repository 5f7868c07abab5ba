"""The seccomp filter of a process that only computes: it may use its own memory, two open pipes and clocks.

All other calls are refused with EPERM, which Python raises as PermissionError; calls of another architecture (i386 and
x32 on x86-64) end the process. It needs no privileges, and also works where namespaces are refused.

libseccomp would generate the same instructions, but it is not always installed and its Python binding is not on PyPI;
where it is installed, the tests compare these numbers with it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

# Name: number on x86-64 and on arm64, None if there is none.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "restart_syscall": (219, 128),
    "setitimer": (38, 103),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# Allowed only if the third argument does not request executable memory.
NOT_EXECUTABLE: dict[str, tuple[int, int]] = {"mmap": (9, 222), "mprotect": (10, 226)}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # SECCOMP_RET_*; 1 is EPERM
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_*
NUMBER, ARCHITECTURE, THIRD = 0, 4, 32  # offsets in struct seccomp_data; both architectures are little-endian
X32 = 0x40000000
PROT_EXEC = 4


class UnsupportedError(OSError):
    """This system has no seccomp filter."""


def program(machine: str) -> bytes:
    """The filter for an architecture, as BPF instructions. Raises UnsupportedError."""
    if machine not in ARCHITECTURES:
        raise UnsupportedError(f"there is no seccomp filter for {machine or 'this machine'}")
    column, architecture = ARCHITECTURES[machine]
    steps: list[tuple[int, int, int, int]] = [  # operation, jumps if true and if false, operand
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for numbers in NOT_EXECUTABLE.values():
        steps += [
            (EQUAL, 0, 4, numbers[column]),
            (LOAD, 0, 0, THIRD),
            (ANY_BIT, 0, 1, PROT_EXEC),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    steps.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def load() -> None:
    """Install the filter in this process, irreversibly.

    Raises:
        UnsupportedError: the system has no such filter, or does not apply it.
    """
    if sys.platform != "linux":
        raise UnsupportedError(f"{sys.platform} has no seccomp")
    if sys.maxsize < 2**32:
        raise UnsupportedError("there is no seccomp filter for a 32-bit Python")
    code = program(platform.machine())
    instructions = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    whole = Program(len(code) // 8, ctypes.addressof(instructions))
    prctl(PR_SET_DUMPABLE, 0)  # no ptrace by other processes of the user, and no core dumps
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(whole))
    if os.getppid() != -1:  # only the filter can make it fail
        raise UnsupportedError("the seccomp filter was accepted but does not refuse anything")


def prctl(option: int, *values: int) -> None:
    """Raises UnsupportedError."""
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])):
        raise UnsupportedError(f"prctl({option}) is refused ({os.strerror(ctypes.get_errno())})")
