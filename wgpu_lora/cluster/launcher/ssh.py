"""Commands on a host, by the ssh program: host keys are checked, and nothing is asked."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from wgpu_lora.cluster.cluster_file import HostSpec
from wgpu_lora.errors import UserError

CONNECT_SECONDS = 10
NODE = "wgpu_lora.cluster.launcher.node"
OPTIONS = {
    "BatchMode": "yes",  # no questions: a password cannot be typed here
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ExitOnForwardFailure": "yes",
}
# What ssh says, and what it means. {host} is the host's name, {key} the option that names the key.
_SAID = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "has another host key than the one that is known here, so something else may be answering: find out why, and "
        "if it is right remove the old key with 'ssh-keygen -R {host}'",
    ),
    (
        "Host key verification failed",
        "has a host key that is not known here: run 'ssh{key} {host}' once and compare the fingerprint that it shows",
    ),
    (
        "UNPROTECTED PRIVATE KEY",
        "was not tried, since others may read its SSH key: run 'chmod 600' on the key",
    ),
    (
        "Permission denied",
        "does not let this user in: set its 'user' and 'ssh_key' so that 'ssh{key} {host}' works without a password",
    ),
    (
        "Could not resolve hostname",
        "is not a name that this machine can resolve: correct 'host', or name it in ~/.ssh/config",
    ),
    ("onnection timed out", f"does not answer within {CONNECT_SECONDS} s: is it on, and is the way there open?"),
    ("Connection refused", "refuses SSH connections: start its SSH server"),
    ("No route to host", "cannot be reached: is it on, and is this machine in its network?"),
    ("Network is unreachable", "cannot be reached: is this machine in its network?"),
)


def ssh(host: HostSpec, *options: str) -> list[str]:
    """The beginning of a command line of ssh, before `--`, the host and the command."""
    made = ["ssh", "-T", *(word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")), *options]
    if host.key:
        made += ["-o", "IdentitiesOnly=yes", "-i", str(host.key).replace("%", "%%")]  # ssh expands %d and others
    return [*made, "-l", host.user] if host.user else made


def run(host: HostSpec, command: str, timeout: float = 60, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command in the user's shell on a host: only constant text and what `quoted` made of values.

    Raises:
        UserError: the host cannot be reached, does not let us in, or does not end in time; with `check`, also if the
            command failed.
    """
    argv = [*ssh(host), "--", host.host, command]
    try:
        found = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout,
                               stdin=subprocess.DEVNULL)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"{host.host} has not answered within {timeout:.0f} s: try 'ssh {host.host}'.") from None
    except OSError as error:
        raise UserError(f"ssh cannot be run ({error.strerror}): install OpenSSH's client.") from None
    if found.returncode == 255:
        raise UserError(refusal(host, found.stderr))
    if check and found.returncode:
        raise UserError(f"{host.host}: a command failed there ({last_line(found.stderr)}): {command}")
    return found


def refusal(host: HostSpec, said: str) -> str:
    """A sentence about what ssh said when it could not connect."""
    key = f" -i {shlex.quote(host.ssh_key)}" if host.ssh_key else ""
    name = f"{host.user}@{host.host}" if host.user else host.host
    for text, meaning in _SAID:
        if text in said:
            return f"{host.host} {meaning.format(host=name, key=key)}."
    return f"{host.host} cannot be reached by SSH ({last_line(said)}): make 'ssh{key} {name}' work."


def last_line(text: str) -> str:
    """The last line that says something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "without a word"


def quoted(path: str) -> str:
    """A path as a word of a shell, with a leading ~/ for the shell to expand."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") and len(path) > 2 else shlex.quote(path)


def node_command(host: HostSpec, *words: str) -> str:
    """The command that runs `launcher.node` in the host's Python; paths may begin with ~/."""
    return " ".join([quoted(host.python), "-P", "-m", NODE, *map(quoted, words)])


def user_of(host: HostSpec) -> str:
    """The user that ssh logs in as, by its own configuration.

    Raises:
        UserError: ssh cannot say.
    """
    if host.user:
        return host.user
    try:
        found = subprocess.run([*ssh(host), "-G", "--", host.host], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"ssh cannot be run ({error}): install OpenSSH's client.") from None
    for line in found.stdout.splitlines():
        name, _, value = line.partition(" ")
        if name == "user":
            return value
    raise UserError(f"ssh's configuration cannot be read ({last_line(found.stderr)}): correct ~/.ssh/config.")


def shown(argv: Sequence[str]) -> str:
    """A command line as a person would type it."""
    return shlex.join(argv)
