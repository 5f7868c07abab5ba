"""A TPM in software (swtpm) for tests of quotes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

MISSING = [name for name in ("swtpm",) if shutil.which(name) is None] + [
    name for name in ("tpm2_pytss",) if find_spec(name) is None
]


@contextmanager
def software_tpm(state: Path) -> Iterator[str]:
    """Starts swtpm with its state in this directory; gives the value of TPM2TOOLS_TCTI."""
    state.mkdir(exist_ok=True)
    server, control = (str(state / name) for name in ("server", "server.ctrl"))
    command = [
        "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={state}", "--flags", "not-need-init,startup-clear",
        "--server", f"type=unixio,path={server}", "--ctrl", f"type=unixio,path={control}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(control)
            yield f"swtpm:path={server}"
        finally:
            process.terminate()


def _wait_for(path: str) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
