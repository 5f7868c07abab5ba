"""The way to a cluster from anywhere: a port of this machine that SSH forwards to Ray's client server on the head."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from wgpu_lora.cluster.cluster_file import ClusterFile
from wgpu_lora.cluster.launcher.config import address_of, ports_of
from wgpu_lora.cluster.launcher.ssh import refusal, ssh
from wgpu_lora.errors import UserError

SECONDS = 30.0
TRIES = 3
LOCAL = "127.0.0.1"


@contextmanager
def tunnel(spec: ClusterFile) -> Iterator[str]:
    """The address `ray://127.0.0.1:PORT` of a cluster while the context lasts. `authentication` has its token.

    ssh reads from a pipe of this process, so that it ends with it whatever happens.

    Raises:
        UserError: the head cannot be reached.
    """
    with tempfile.TemporaryFile() as said:
        process, port = _connected(spec, said)
        try:
            yield f"ray://{LOCAL}:{port}"
        finally:
            _end(process)


def _connected(spec: ClusterFile, said: Any) -> tuple[subprocess.Popen[bytes], int]:
    head, problem = spec.head, ""
    for _ in range(TRIES):  # another program may take the port before ssh does
        port = _free_port()
        forward = f"{LOCAL}:{port}:{address_of(spec, head)}:{ports_of(spec)['ray-client-server']}"
        argv = [*ssh(head, "-L", forward), "--", head.host, "cat > /dev/null"]
        said.truncate(0)
        said.seek(0)
        try:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said,
                                       start_new_session=True)  # fmt: skip
        except OSError as error:
            raise UserError(f"ssh cannot be run ({error.strerror}): install OpenSSH's client.") from None
        try:
            if _answers(process, port):
                return process, port
        except BaseException:
            _end(process)
            raise
        _end(process)
        said.seek(0)
        problem = said.read(1 << 16).decode(errors="replace")
        if "forwarding failed" not in problem and "Address already in use" not in problem:
            break
    raise UserError(refusal(head, problem))


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether ssh listens within the time that it has; the connection is ended again."""
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), socket.create_connection((LOCAL, port), 1):
            return process.poll() is None
        time.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    if process.stdin:
        process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((LOCAL, 0))
        return int(found.getsockname()[1])
