"""Protected trainings that are killed, and places that are searched for pieces of what they know."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from support import ROOT
from support.models import words_model
from support.protect.brokers import Owner
from support.protect.leaks import Leak, Pieces, identity_pieces
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.protect.sealed.sealed_files import seal_path

LOG = "evidence.jsonl"
WORDS, ROWS = 12, 16
PLACES = {  # what a process writes to without being told to
    "HOME": "home",
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "home/.cache",
    "XDG_CONFIG_HOME": "home/.config",
    "XDG_DATA_HOME": "home/.local/share",
    "XDG_STATE_HOME": "home/.local/state",
    "XDG_RUNTIME_DIR": "runtime",
    "WGPU_LORA_DATA_DIR": "data",
    "WGPU_LORA_SHARE_DIR": "share",
}
OPTIONS: dict[str, Any] = {
    "max_length": 16, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "packing": False, "lora_r": 4,
    "logging_steps": 4, "save_steps": 3, "max_steps": 30, "learning_rate": 1e-3, "tune": False,
}  # fmt: skip


@dataclass
class Ended:
    """A command that has ended. code: negative for a signal. seconds: that it took, and of processor time."""

    code: int
    seconds: float
    processor: float
    stderr: str


@dataclass
class Site:
    """A trainer's place, watched, and its owner's, which is not.

    pieces: of the rows and of all keys so far.
    """

    place: Path
    owner: Owner
    rows: list[str]
    pieces: Pieces
    broker: str = ""  # its URL
    server: subprocess.Popen[str] | None = None
    keys: int = 0  # read from the pipe
    _pipe: int = -1
    _partial_line: bytes = b""
    _stderr: Path = field(default_factory=Path)

    @property
    def watched(self) -> Path:
        """The trainer's directory, with its home, temporary files and so on."""
        return self.place / "trainer"

    def run(self, name: str) -> Path:
        """The directory of a job's run."""
        return self.watched / name

    def has_begun(self, name: str) -> bool:
        """Whether a run is to be resumed: its log has a line."""
        log = self.run(name) / LOG
        return log.exists() and b"\n" in log.read_bytes()

    def environment(self) -> dict[str, str]:
        own = {name: str(self.watched / below) for name, below in PLACES.items()}
        own |= {"WGPU_LORA_NO_TUNE": "1", "WGPU_LORA_NO_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def write_job(self, name: str) -> Path:
        """A job of this name, which is also that of its directory."""
        job = self.watched / f"{name}.toml"
        protected = {
            "name": name,
            "data": "rows.jsonl.age",
            "output": name,
            "recipients": [self.owner.data.recipient],
            "broker": self.broker or "http://127.0.0.1:1",
            "broker_key": str(self.owner.directory / "broker.pub"),
        }
        values = OPTIONS | {"model": str(self.place / "model")}
        job.write_text("\n".join(["[protected]", *_toml(protected), "", "[training]", *_toml(values)]) + "\n")
        return job

    def write_policy(self) -> None:
        """The least policy: what is tested here is not what evidence must state."""
        digest = file_digest(self.watched / "rows.jsonl.age")
        self.owner.policy.write_text(
            f"""
            [policy]
            name = "killed"
            version = 1
            [release]
            recipients = ["{self.owner.data.recipient}"]
            [attestation]
            level = "self-reported"
            [data]
            sha256 = ["{digest}"]
            [training]
            max_steps = {OPTIONS["max_steps"]}
            """
        )

    # -- processes -------------------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A server of commands, in the block."""
        self._pipe, write = os.pipe()
        os.set_blocking(self._pipe, False)
        self._stderr = self.place / "said.txt"
        command = [sys.executable, "-m", "support.serving.kill_server", str(write)]
        with self._stderr.open("w") as stderr:
            self.server = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=self.environment(), pass_fds=[write], cwd=self.watched,
            )  # fmt: skip
        os.close(write)
        try:
            assert self._answer() == {"ready": True}
            yield
        finally:
            assert self.server.stdin
            self.server.stdin.close()
            self.server.wait(30)
            os.close(self._pipe)

    def start(self, *arguments: str, kill_after: float | None = None) -> Ended:
        """Run a command; with `kill_after`, kill it after so many seconds, if it still runs.

        Then the keys that it generated are among the pieces, and nothing of it runs any more.
        """
        assert self.server
        assert self.server.stdin
        before, begin = self._stderr.stat().st_size, time.monotonic()
        self.server.stdin.write(json.dumps({"arguments": list(arguments)}) + "\n")
        self.server.stdin.flush()
        pid = self._answer()["pid"]
        if kill_after is not None:
            time.sleep(max(0.0, kill_after - (time.monotonic() - begin)))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = self._answer()
        seconds = time.monotonic() - begin
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its children
        self._hear_keys()
        with self._stderr.open() as stderr:
            stderr.seek(before)
            return Ended(ended["code"], seconds, ended["processor"], stderr.read())

    def _answer(self) -> dict[str, Any]:
        assert self.server
        assert self.server.stdout
        if line := self.server.stdout.readline():
            return json.loads(line)  # type: ignore[no-any-return]
        raise AssertionError(f"the server has ended: {self._stderr.read_text()[-2000:]}")

    def _hear_keys(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                self._partial_line += data
        *lines, self._partial_line = self._partial_line.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.keys += 1
            identity_pieces(self.pieces, f"the identity of session {self.keys}", message["identity"])
            self.pieces.data(f"the signing key of session {self.keys}", bytes.fromhex(message["scalar"]))

    # -- the search ------------------------------------------------------------------------------------------------

    def leaks(self) -> list[Leak]:
        """Pieces of rows and keys in all that is watched."""
        return self.pieces.leaks([self.watched])


def _toml(values: dict[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]


def make_site(place: Path, seed: int = 0) -> Site:
    """Keys, sealed rows of random words, and a model that knows these words."""
    rng = random.Random(seed)
    trainer = place / "trainer"
    for below in PLACES.values():
        (trainer / below).mkdir(parents=True, exist_ok=True)
    (trainer / "runtime").chmod(0o700)
    model = words_model(place / "model")
    (place / "owner").mkdir()
    owner = Owner(place / "owner")
    (place / "owner" / "broker.pub").write_text(owner.signing.public.pem)
    rows = [" ".join(f"w{rng.randrange(1, 211)}" for _ in range(WORDS)) for _ in range(ROWS)]
    plain = place / "owner" / "rows.jsonl"
    plain.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    seal_path(plain, place / "owner" / "rows.jsonl.age", [owner.data.recipient])
    shutil.copy(place / "owner" / "rows.jsonl.age", trainer)
    pieces, words = Pieces(), tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    for number, row in enumerate(rows):
        pieces.text(f"row {number}", row)
        pieces.tokens(f"the ids of row {number}", words.encode(row).ids)
    identity_pieces(pieces, "the data key", owner.data.text().decode())
    return Site(place, owner, rows, pieces)
