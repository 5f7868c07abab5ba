"""A data owner's side on this machine, for benchmarks: keys, sealed data, and a broker in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wgpu_lora.assets import ROOT
from wgpu_lora.errors import UserError
from wgpu_lora.protect.sealed.files import seal_path
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SigningKey, write_private

LISTENING = "Listening on "
PATIENCE = 30.0  # seconds for a broker to start, or to end


@dataclass(frozen=True)
class Owner:
    """Files of the owner in `place`, which trainers do not read, but for those that are public.

    key, signing_key: private, for the broker. broker_key: public.
    """

    place: Path
    recipient: str
    broker_public: PublicKey

    @property
    def key(self) -> Path:
        return self.place / "data.key"

    @property
    def signing_key(self) -> Path:
        return self.place / "broker.pem"

    @property
    def broker_key(self) -> Path:
        return self.place / "broker.pub"

    @classmethod
    def create(cls, place: Path) -> Owner:
        """Make the keys, in a directory that only this user can read."""
        place.mkdir(mode=0o700, parents=True)
        data, signing = DataKey.generate(), SigningKey.generate()
        owner = cls(place, data.recipient, signing.public)
        write_private(owner.key, data.file_text())
        write_private(owner.signing_key, signing.private_pem())
        owner.broker_key.write_text(signing.public.pem)
        data.wipe()
        signing.wipe()
        return owner

    def seal(self, path: Path, to: Path) -> Path:
        """Seal a file to the data key; returns the sealed file."""
        sealed = to / f"{path.name}.age"
        seal_path(path, sealed, [self.recipient])
        return sealed

    @contextmanager
    def broker(self, policy: Path, *options: str) -> Iterator[str]:
        """A broker process with this policy; gives its URL.

        Args:
            options: of the command, besides those for the owner's files.

        Raises:
            UserError: the broker did not start.
        """
        command = [
            *(sys.executable, "-m", "wgpu_lora", "protect", "broker", "--port", "0", "--policy", str(policy)),
            *("--key", str(self.key), "--signing-key", str(self.signing_key), *options),
        ]
        said = self.place / "broker.log"
        with said.open("w") as log:  # not a pipe, which would fill
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment()
            )
        try:
            yield _listening(process, said)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _listening(process: subprocess.Popen[bytes], said: Path) -> str:
    """The URL of a broker. Raises UserError if it does not start."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        ended = process.poll() is not None
        for line in said.read_text().splitlines(keepends=True):
            if LISTENING in line and line.endswith("\n"):
                return line.partition(LISTENING)[2].strip()
        if ended:
            break
        time.sleep(0.05)
    raise UserError(f"The broker did not start: {said.read_text()[-300:].strip() or 'it said nothing'}")


def _environment() -> dict[str, str]:
    """This process's, with this package on a child's path."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
