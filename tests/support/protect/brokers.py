"""A data owner with keys and a policy, and trainers that attest to its broker."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.protect.policies import GIVEN, LEAST, OWNER
from wgpu_lora.protect.attestation.claims import LEVELS, PROFILE, attest
from wgpu_lora.protect.broker.broker import Broker
from wgpu_lora.protect.broker.release_token import Release, open_release
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, SessionKeys, SigningKey, write_private

JOB = "ward-7"


@dataclass
class Owner:
    """Files of a data owner: a policy, a data key and the broker's key."""

    directory: Path
    data: DataKey = field(default_factory=DataKey.generate)
    signing: SigningKey = field(default_factory=SigningKey.generate)

    def __post_init__(self) -> None:
        self.move(self.directory)
        self.write_policy()
        write_private(self.data_file, self.data.file_text())
        write_private(self.signing_file, self.signing.private_pem())

    def move(self, directory: Path) -> None:
        """Find the files in another directory."""
        self.directory = directory
        self.policy = self.directory / "policy.toml"
        self.state = self.directory / "policy.broker"
        self.log = self.state / "decisions-1.jsonl"
        self.data_file, self.signing_file = self.directory / "data.key", self.directory / "broker.pem"

    def write_policy(self, more: str = "") -> None:
        self.policy.write_text(LEAST.replace(OWNER, self.data.recipient) + more)

    def options(self) -> list[str]:
        """Of the broker's command."""
        files = {"--policy": self.policy, "--key": self.data_file, "--signing-key": self.signing_file}
        return [str(part) for pair in files.items() for part in pair]

    @contextmanager
    def broker(self) -> Iterator[Broker]:
        with Broker(self.state, Policy.read(self.policy), self.signing, self.data) as broker:
            yield broker

    def lines(self) -> list[bytes]:
        """Of the broker's log."""
        return self.log.read_bytes().splitlines(keepends=True)

    def stages(self) -> list[str]:
        """Of the log's lines, whose signatures are verified."""
        return [dsse.verify(line.rstrip(b"\n"), self.signing.public)["predicate"]["stage"] for line in self.lines()]


@dataclass
class Served:
    """A broker in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    output: list[str]

    def end(self, number: int) -> int:
        """Send it a signal, and wait. Its last lines are then in `output`."""
        self.process.send_signal(number)
        assert self.process.stdout
        self.output += self.process.stdout.readlines()
        return self.process.wait(20)


@contextmanager
def serving(owner: Owner, *more: str, **environment: str) -> Iterator[Served]:
    """`wgpu-lora protect broker` on a free port."""
    command = [sys.executable, "-m", "wgpu_lora", "protect", "broker", *owner.options(), "--port", "0"]
    process = subprocess.Popen(
        [*command, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    output: list[str] = []
    try:
        assert process.stdout
        for line in process.stdout:
            output.append(line)
            if match := re.search(r"Listening on (\S+)", line):
                yield Served(process, match[1], output)
                break
        else:
            raise AssertionError(f"the broker did not start: {output}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Trainer:
    """A session of a job. resume: (sequence, head) that it states."""

    owner: Owner
    job: str = JOB
    resume: tuple[int, str] | None = None
    keys: SessionKeys = field(default_factory=SessionKeys.generate)

    def claims(self, nonce: str) -> dict[str, Any]:
        claims = copy.deepcopy(GIVEN.claims)
        del claims["resume"]
        if self.resume:
            claims["resume"] = {"sequence": self.resume[0], "head": self.resume[1]}
        claims |= {"eat_nonce": nonce, "iat": int(time.time()), "eat_profile": PROFILE}
        claims |= {"level": "self-reported", "level_note": LEVELS["self-reported"]}
        claims["keys"] = {"recipient": self.keys.data.recipient, "signing": self.keys.signing.public.pem}
        claims["job"] |= {"name": self.job, "recipients": [self.owner.data.recipient]}
        return claims

    def evidence(self, nonce: str, **changed: Any) -> bytes:
        return attest({**self.claims(nonce), **changed}, self.keys, quote=False)

    def opened(self, token: str, evidence: bytes, nonce: str) -> Release:
        digest = hashlib.sha256(evidence).hexdigest()
        return open_release(token, self.owner.signing.public, digest, nonce, self.keys, time.time())
