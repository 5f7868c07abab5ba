"""Linux namespaces: no files, no network, no other processes, and user nobody.

Each namespace is tried separately, since the kernel may refuse some, and those entered are reported. They are entered
before the seccomp filter, which refuses the same operations again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from contextlib import suppress

from wgpu_lora.processes.seccomp import prctl

CLONE_NEWUSER = 0x10000000
CLONE = {
    "mount": 0x20000,
    "cgroup": 0x2000000,
    "UTS": 0x4000000,
    "IPC": 0x8000000,
    "PID": 0x20000000,
    "network": 0x40000000,
}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
CAPABILITIES = (0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
NOBODY = 65534


def enter() -> list[str]:
    """Enter all permitted namespaces and return their kinds. The process that returns may be a child."""
    entered = []
    # A privileged process can enter the others without a user namespace, and then change to nobody. Otherwise the user
    # namespace grants the privilege.
    privileged = os.geteuid() == 0 and _unshare(CLONE["mount"])
    if not privileged and _unshare(CLONE_NEWUSER):
        entered.append("user")
        with suppress(OSError):
            _map_user()
    for kind, flag in CLONE.items():
        if (kind == "mount" and privileged) or _unshare(flag):
            entered.append(kind)
    if "mount" in entered:
        try:
            _empty_root()
        except OSError:
            entered.remove("mount")
    if "PID" in entered:
        _go_on_in_child()
    if privileged or os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    if "user" not in entered and _unshare(CLONE_NEWUSER):
        entered.append("user")
    header = (ctypes.c_uint32 * 2)(*CAPABILITIES)
    with suppress(OSError, AttributeError):
        _checked("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # last, since a change of user resets it
    return entered


def _unshare(flag: int) -> bool:
    try:
        _checked("unshare", ctypes.c_int(flag))
    except OSError:
        return False
    return True


def _map_user() -> None:
    """Map the user to its own number, so that it owns the mounts."""
    user, group = os.geteuid(), os.getegid()
    for name, text in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _empty_root() -> None:
    """Make an empty read-only file system the root, and detach everything else."""
    _checked("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)  # do not propagate mounts
    directory = os.fsencode(os.path.dirname(os.__file__))  # any existing directory
    flags = ctypes.c_ulong(MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _checked("mount", b"none", directory, b"tmpfs", flags, b"size=4k,nr_inodes=2,mode=555")
    os.chdir(directory)
    try:
        _checked("syscall", ctypes.c_long(PIVOT_ROOT[platform.machine()]), b".", b".")
    except (OSError, KeyError):  # pivot_root fails on the initial RAM disk
        os.chroot(".")
    else:
        _checked("umount2", b".", ctypes.c_int(MNT_DETACH))  # the old root, mounted on top
    os.chdir("/")


def _go_on_in_child() -> None:
    """Fork, since only children are in a new PID namespace.

    This process waits and exits with the child's status; on SIGTERM it kills the child.
    """
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.close(0)
    os.close(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _checked(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
