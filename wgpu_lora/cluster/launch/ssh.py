"""Commands on a host, and a tunnel to a cluster, by OpenSSH: host keys are checked, and there are no prompts."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.errors import UserError, reason

LOCAL = "127.0.0.1"
OPTIONS = {
    "BatchMode": "yes",  # no questions: a password cannot be typed here
    "StrictHostKeyChecking": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "3",
    "ExitOnForwardFailure": "yes",
}
_MEANINGS = {  # of what ssh prints; {login} is what to give to ssh by hand
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "has another host key than the one that is known here, so something else "
    "may be answering: find out why, and if it is right remove the old key with 'ssh-keygen -R {host}'",
    "Host key verification failed": "has a host key that is not known here: run 'ssh{login}' once and compare the "
    "fingerprint that it shows",
    "UNPROTECTED PRIVATE KEY": "was not tried, since others may read its SSH key: run 'chmod 600' on the key",
    "Permission denied": "does not let this user in: set its 'user' and 'ssh_key' so that 'ssh{login}' works without a "
    "password",
}


def ssh(host: HostSpec, *options: str) -> list[str]:
    """The beginning of a command line of ssh, up to the host; a command of its user's shell may follow."""
    argv = ["ssh", "-T", *(f"-o{name}={value}" for name, value in OPTIONS.items()), *options]
    if host.ssh_key:
        argv += ["-oIdentitiesOnly=yes", "-i", host.ssh_key.replace("%", "%%")]  # ssh expands %d and others
    return [*argv, *(["-l", host.user] if host.user else []), "--", host.host]


def run(host: HostSpec, command: str, text: str = "", seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command, of which no part needs quotes, in the user's shell on a host, with a text as its input.

    Raises:
        UserError: the host cannot be reached, does not let us in, or does not end in time.
    """
    try:
        process = subprocess.run([*ssh(host), command], input=text, capture_output=True, encoding="utf-8",
                              errors="replace", timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"{host.host} has not answered within {seconds:.0f} s: try 'ssh {host.host}'.") from None
    except OSError as error:
        raise UserError(f"ssh cannot be run ({reason(error)}): install OpenSSH's client.") from None
    if process.returncode == 255:
        raise UserError(refusal(host, process.stderr))
    return process


def refusal(host: HostSpec, stderr: str) -> str:
    """A sentence about what ssh printed when it could not connect."""
    name = f"{host.user}@{host.host}" if host.user else host.host
    login = f"{f' -i {shlex.quote(host.ssh_key)}' if host.ssh_key else ''} {name}"
    for text, meaning in _MEANINGS.items():
        if text in stderr:
            return f"{host.host} {meaning.format(host=name, login=login)}."
    return f"{host.host} cannot be reached by SSH ({last_line(stderr)}): make 'ssh{login}' work."


def last_line(text: str) -> str:
    """The last line that says something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "without a word"


def folder_on(spec: ClusterFile, host: HostSpec) -> str:
    """The folder of a cluster on one of its hosts, below the home there, which several hosts may share."""
    return f"~/.local/state/wgpu-lora/nodes/{spec.name}/{host.host}"


@contextmanager
def tunnel(spec: ClusterFile) -> Iterator[tuple[str, str]]:
    """The address `ray://127.0.0.1:PORT` of a cluster, from anywhere, while the context lasts, and its token.

    ssh reads from a pipe of this process, so that it ends with it whatever happens.

    Raises:
        UserError: the head cannot be reached, or the cluster is not up.
    """
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        port = probe.getsockname()[1]
    head = spec.head
    advice = f"start it with 'wgpu-lora cluster up -f {spec.path}'"
    forward = f"{LOCAL}:{port}:{spec.address_of(head)}:{spec.ports['ray-client-server']}"
    argv = [*ssh(head, "-L", forward), f"cat {folder_on(spec, head)}/token && echo && cat > /dev/null"]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                                       start_new_session=True)  # fmt: skip
        except OSError as error:
            raise UserError(f"ssh cannot be run ({reason(error)}): install OpenSSH's client.") from None
        with process:
            try:
                lines = map(str.strip, iter(process.stdout.readline, ""))  # type: ignore[union-attr]
                token = next((line for line in lines if re.fullmatch(r"[0-9a-f]{64}", line)), None)
                if token is None:
                    errors.seek(0)
                    if process.wait() == 255:
                        raise UserError(refusal(head, errors.read(1 << 16)))
                    raise UserError(f"The cluster {spec.name} is not up on {head.host}: {advice}.")
                yield f"ray://{LOCAL}:{port}", token
            finally:
                process.kill()
