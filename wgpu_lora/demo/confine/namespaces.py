"""Linux namespaces of this process's own: no files, no network, no other processes, as nobody.

They are what the kernel lets this user have; each is tried for itself, and what was had is reported. They come before
the seccomp filter, which refuses the same things once more.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from contextlib import suppress

from wgpu_lora.demo.confine.seccomp import prctl

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
    """Enters all namespaces that it may, and returns their kinds. The process that returns may be a child."""
    had = []
    # With the privilege for it the others need no user namespace, and there is still a root to become nobody.
    # Without, the user namespace is what gives the privilege.
    privileged = os.geteuid() == 0 and _had(CLONE["mount"])
    if not privileged and _had(CLONE_NEWUSER):
        had.append("user")
        with suppress(OSError):
            _map_user()
    for kind, flag in CLONE.items():
        if (kind == "mount" and privileged) or _had(flag):
            had.append(kind)
    if "mount" in had:
        try:
            _empty_root()
        except OSError:
            had.remove("mount")
    if "PID" in had:
        _go_on_in_child()
    if privileged or os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    if "user" not in had and _had(CLONE_NEWUSER):
        had.append("user")
    header = (ctypes.c_uint32 * 2)(*CAPABILITIES)
    with suppress(OSError, AttributeError):
        _checked("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # last, because a change of user resets it
    return had


def _had(flag: int) -> bool:
    try:
        _checked("unshare", ctypes.c_int(flag))
    except OSError:
        return False
    return True


def _map_user() -> None:
    """The user keeps its number, so that the mounts are its own."""
    user, group = os.geteuid(), os.getegid()
    for name, text in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _empty_root() -> None:
    """Makes an empty file system that cannot be written the root, and lets go of everything else."""
    _checked("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)  # nothing of this gets out
    place = os.fsencode(os.path.dirname(os.__file__))  # some directory that there is
    flags = ctypes.c_ulong(MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _checked("mount", b"none", place, b"tmpfs", flags, b"size=4k,nr_inodes=2,mode=555")
    os.chdir(place)
    try:
        _checked("syscall", ctypes.c_long(PIVOT_ROOT[platform.machine()]), b".", b".")
    except (OSError, KeyError):  # the root cannot be changed where it is the initial RAM disk
        os.chroot(".")
    else:
        _checked("umount2", b".", ctypes.c_int(MNT_DETACH))  # the old root, which lies on top
    os.chdir("/")


def _go_on_in_child() -> None:
    """Forks, because a new PID namespace is the children's only.

    This process waits, and ends as its child does; SIGTERM has it kill the child.
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
    """Calls the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{name} failed")
