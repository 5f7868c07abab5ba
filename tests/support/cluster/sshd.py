"""SSH servers on the hosts of a test, and a key that lets the first host in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from support.cluster.hosts import Host, Hosts, until

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def ssh_installed() -> bool:
    """Whether hosts can run SSH servers that the launcher can use: see scripts/install_cluster.sh."""
    return Path(SSHD).exists() and all(map(shutil.which, ("ssh", "ssh-keygen")))


def start_sshd(hosts: Hosts, server: Host) -> subprocess.Popen[Any]:
    """Starts an SSH server on a host. Commands that come by it find the host's environment, less Ray's token."""
    folder = hosts.shared / "ssh"
    key = make_key(folder / "host_key")
    env = {name: value for name, value in server.env.items() if name in _PASSED or name.startswith("WGPU_LORA_")}
    lines = [
        "Port 22",
        f"HostKey {key}",
        f"PidFile {folder / server.name}.pid",
        f'AuthorizedKeysFile "{hosts.shared}/authorized"',
        "StrictModes no",
        "UsePAM no",
        "PermitRootLogin yes",
        "PasswordAuthentication no",
        "PrintMotd no",
        "SetEnv " + " ".join(f'{name}="{value}"' for name, value in env.items()),
    ]
    config = folder / f"{server.name}.conf"
    config.write_text("\n".join([*lines, ""]))
    server.run(["mkdir", "-p", "/run/sshd"])
    process = server.start([SSHD, "-D", "-e", "-f", str(config)], stderr=subprocess.DEVNULL)
    until(lambda: "LISTEN" in server.run(["ss", "-ltn", "sport = :22"]).stdout, 20)
    return process


def make_client(hosts: Hosts, client: Host) -> Path:
    """Lets a host know the servers' keys; the path of the key that lets it in."""
    key = make_key(hosts.shared / "a key's folder" / "client")
    (hosts.shared / "authorized").write_text(key.with_suffix(".pub").read_text())
    host_key = make_key(hosts.shared / "ssh" / "host_key").with_suffix(".pub").read_text().rsplit(" ", 1)[0]
    folder = client.tmp / "home" / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "known_hosts").write_text("".join(f"{host.name} {host_key}\n" for host in hosts))
    return key


def make_key(path: Path) -> Path:
    """A key pair; the same for the same path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return path


_PASSED = ("PATH", "PYTHONPATH", "VK_DRIVER_FILES", *(f"RAY_health_check_{name}" for name in
           ("initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold")))  # fmt: skip
