"""Namespaces of processes: how `hosts.py` makes, enters and ends them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

# Each is `sh -c`, with the arguments $1, $2, ... SIGCHLD is ignored so that the first process leaves no zombies.
FIRST = "exec env --ignore-signal=CHLD sleep infinity"
SWITCH = f"""set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add switch type bridge
ip link set switch up
ip address add 10.77.0.254/24 dev switch
{FIRST}"""
HOST = f"""set -e
hostname "$1"
ip link set lo up
mount -t tmpfs tmpfs /mnt
mkdir -p "/mnt${{2#/tmp}}" /mnt/home /mnt/etc
chmod 1777 /mnt
chmod 700 /mnt/home
cp "$3" /mnt/etc/hosts
sed 's|^root:\\(.*\\):/root:|root:\\1:/tmp/home:|' /etc/passwd > /mnt/etc/passwd
mount --bind "$2" "/mnt${{2#/tmp}}"
shift 3
for kept in "$@"; do  # the package and its environment, should they be in /tmp
  case "$kept" in /tmp/*) mkdir -p "/mnt${{kept#/tmp}}"; mount --bind "$kept" "/mnt${{kept#/tmp}}";; esac
done
mount --move /mnt /tmp
mount --bind /tmp/etc/hosts /etc/hosts
mount --bind /tmp/etc/passwd /etc/passwd
mount -t tmpfs tmpfs /dev/shm
cd /
{FIRST}"""


def dies_with_us() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]


@cache
def namespaces_allowed() -> bool:
    """Whether hosts can be made here: on Linux, as root or where users may make namespaces."""
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    tried = "ip link add switch type bridge && ip link add port type veth peer name eth0 && mount -t tmpfs tmpfs /mnt"
    return subprocess.run([*unshare(), "sh", "-c", tried], capture_output=True).returncode == 0


def nsenter(pid: int) -> list[str]:
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", "--target", str(pid), *user, "--net", "--mount", "--pid", "--uts"]


def children(pid: int) -> list[int]:
    try:
        return [
            int(word)
            for path in Path(f"/proc/{pid}/task").iterdir()
            for word in (path / "children").read_text().split()
        ]
    except OSError:
        return []


def descendant(pid: int, depth: int) -> int | None:
    for _ in range(depth):
        processes = children(pid)
        if not processes:
            return None
        pid = processes[0]
    return pid


def settled(pid: int | None) -> int | None:
    """pid, if its preparations are over: the shell has become `sleep`."""
    try:
        return pid if pid and Path(f"/proc/{pid}/comm").read_text() == "sleep\n" else None
    except OSError:
        return None
