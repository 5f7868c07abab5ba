"""runs.jsonl, the log of all runs of a user: a JSON object per line, appended under a lock and never rewritten.

A line has the id of its run and some fields of `RunEntry`; later lines of the same id add to them or replace them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any

from platformdirs import user_data_dir

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_object, read_bytes, to_json
from wgpu_lora.files.locks import lock_file
from wgpu_lora.files.paths import working_folder
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.choices import RUN_STATUSES
from wgpu_lora.processes.process_identity import boot_id, host_id, process_start
from wgpu_lora.train.track.secret_masking import masked

NAME = "runs.jsonl"
LOCK_SECONDS = 10.0
SCHEMA = 1
FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
DIGESTS = ("git", "process", "id", "date")  # fields that cannot hold a secret, but look like one


def data_directory() -> Path:
    """The user's data directory: WGPU_LORA_DATA_DIR if it is set, else that of the system."""
    override = os.environ.get("WGPU_LORA_DATA_DIR")
    return Path(override) if override else Path(user_data_dir("wgpu-lora"))


def run_log_enabled(requested: bool = True) -> bool:
    """Whether runs are logged: the user's choice, unless WGPU_LORA_NO_RUN_LOG turns it off everywhere."""
    return requested and not os.environ.get("WGPU_LORA_NO_RUN_LOG")


@dataclass(frozen=True)
class Runs:
    """The runs of a log, the oldest first, and the number of lines that cannot be read."""

    entries: list[RunEntry]
    damaged: int


class RunLog:
    """The log at a path, by default runs.jsonl in the user's data directory."""

    def __init__(self, path: Path | None = None):
        self.path = path or data_directory() / NAME

    def append(self, facts: dict[str, Any]) -> None:
        """Append a line, masked, on disk when this returns.

        If a process was killed while it wrote the last line, that line is ended first, so that only it is lost.

        Raises:
            OSError: the file cannot be written, or is locked for LOCK_SECONDS; it is then as before.
        """
        values = {name: value if name in DIGESTS else masked(value) for name, value in facts.items()}
        line = to_json({"schema": SCHEMA, **values}, ensure_ascii=True, default=str).encode() + b"\n"
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (
            lock_file(self.path.with_name(f".{NAME}.lock"), LOCK_SECONDS),
            os.fdopen(os.open(self.path, FLAGS, 0o600), "r+b", buffering=0) as file,
        ):
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(-1, os.SEEK_END)
                line = (b"" if file.read(1) == b"\n" else b"\n") + line
            try:
                _write(file.fileno(), line)
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(end)  # a full disk leaves no half line
                raise

    def read(self) -> Runs:
        """All runs; a missing file has none.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return Runs([], 0)
        except OSError as error:
            raise UserError(
                f"The run log {self.path} cannot be read ({error.strerror}): fix that, or set WGPU_LORA_DATA_DIR to "
                "another directory."
            ) from None
        facts_by_id: dict[str, dict[str, Any]] = {}
        damaged = 0
        for line in content.split(b"\n"):
            if not line.strip():
                continue
            facts = _facts(line)
            if facts is None:
                damaged += 1
                continue
            run = facts_by_id.setdefault(facts["id"], facts)
            run.update({name: value for name, value in facts.items() if name != "date"})
        entries = []
        for facts in facts_by_id.values():
            try:
                entries.append(typed(RunEntry, facts))
            except ValueError:  # its first line is lost, or not ours
                damaged += 1
        return Runs(sorted(entries, key=lambda entry: entry.date), damaged)  # of a second: in the order of lines


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]


def _facts(line: bytes) -> dict[str, Any] | None:
    try:
        facts = parse_object(line, "the line")
    except UserError:
        return None
    return facts if isinstance(facts.get("id"), str) else None


def facts_of(entry: RunEntry) -> dict[str, Any]:
    """All fields of an entry as JSON values."""
    result: dict[str, Any] = json.loads(
        to_json({item.name: getattr(entry, item.name) for item in fields(entry)}, default=vars)
    )
    return result


RUNNING, FINISHED, STOPPED, INTERRUPTED, FAILED, KILLED = RUN_STATUSES
HELD_OUT, TRAINING, REWARD = "held-out", "training", "reward"  # what losses are of


def now() -> str:
    """The time in UTC, as ISO 8601 has it: 2026-11-22T14:05:09Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_id() -> str:
    """An id that sorts by date: 20261122-140509-1f3a9c."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Process:
    """A process, as `process_identity` identifies it."""

    host: str
    boot: str
    pid: int
    started: int | None

    @classmethod
    def current(cls) -> Process:
        pid = os.getpid()
        return cls(host_id(), boot_id(), pid, process_start(pid))

    @property
    def dead(self) -> bool:
        """Whether it has ended; False for processes of other hosts, which are not visible."""
        if self.host != host_id():
            return False
        return self.boot != boot_id() or process_start(self.pid) != self.started


@dataclass(frozen=True)
class Losses:
    """Losses of `of` rows: held-out or, without any, training; or rewards, of which the largest is the best. initial:
    before the first step, or of the first logged ones."""

    of: str = TRAINING
    initial: float | None = None
    best: float | None = None
    final: float | None = None

    @property
    def label(self) -> str:
        return REWARD if self.of == REWARD else f"{self.of} loss"

    @property
    def improvement(self) -> float | None:
        """By how many percent of the initial loss the final one is lower, or a reward higher; None if unknown."""
        if self.initial is None or self.final is None or self.initial <= 0:
            return None
        return (-100 if self.of == REWARD else 100) * (self.initial - self.final) / self.initial


@dataclass(frozen=True)
class DataFile:
    """Data of a run: path or name, and SHA-256."""

    path: str
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """A run as the log has it after its last line.

    Attributes:
        date, ended: UTC, as `now` has it. resumed: when it was resumed last.
        kind: finetune, evaluate, or bench and its command. name: of `run_name`.
        recorded: the last logged status; see `status`.
        adapter, pipeline: in a pipeline, the adapter's name, and its directory.
        command: without secrets. directory: the working folder.
        seconds, steps, tokens: of the run; trained tokens.
        outputs: directories and files that it wrote.
        results: figures of benchmarks and evaluations.
        error: the message, if it failed.
    """

    id: str
    date: str
    kind: str
    name: str
    recorded: str = RUNNING
    objective: str | None = None
    adapter: str | None = None
    pipeline: str | None = None
    goal: str | None = None
    notes: str | None = None
    command: list[str] = field(default_factory=list)
    directory: str | None = None
    git: Git | None = None
    process: Process | None = None
    device: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    data: DataFile | None = None
    eval_data: DataFile | None = None
    resumed: str | None = None
    ended: str | None = None
    losses: Losses = field(default_factory=Losses)
    improvement: float | None = None
    seconds: float | None = None
    steps: int | None = None
    tokens: int | None = None
    outputs: list[str] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def model(self) -> str:
        """The model's short name; '' if it is not known."""
        model = self.config.get("shape") or self.config.get("model")
        return short_name(model) if model or self.kind == "finetune" else ""

    @property
    def status(self) -> str:
        """The logged status, or killed if its process has ended without a word."""
        killed = self.recorded == RUNNING and self.process is not None and self.process.dead
        return KILLED if killed else self.recorded


def run_name(model: str | None, quant: str, adapter: bool, rslora: bool, objective: str, dtype: str) -> str:
    """The name by convention, {model}_{quant}_{variant}_{objective}_{dtype}: Qwen3-0.6B_nf4_lora_sft_f32.

    model: a path, a hub id or a shape; None is the demo. adapter: False is the base model alone, `base`.
    """
    variant = "base" if not adapter else "rslora" if rslora else "lora"
    return f"{short_name(model)}_{quant}_{variant}_{objective}_{dtype}"


def short_name(model: str | None) -> str:
    """A model's path or hub id without what stands before its last part, and without .gguf."""
    return PurePath((model or "demo").removeprefix("shape ")).name.removesuffix(".gguf")


OBJECT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # the name of a commit
MAX_LINE, MAX_REFS = 4096, 16 << 20  # bytes of git's files


@dataclass(frozen=True)
class Git:
    """commit: the checked-out one. dirty: whether files differed from it, as earlier versions recorded."""

    commit: str
    dirty: bool | None = None


def git_state(folder: Path | None = None) -> Git | None:
    """The commit of a folder, by default the current one; None outside of a repository, and before the first commit.

    It is read from files, since git runs programs that the folder's .git/config names.
    """
    directory = folder or working_folder()
    with suppress(UserError, OSError, StopIteration):
        git = next(path / ".git" for path in (directory, *directory.parents) if (path / ".git").exists())
        if git.is_file():  # a worktree or a submodule
            git = git.parent / _line(git).removeprefix("gitdir: ")
        head = _line(git / "HEAD")
        common = git / _line(git / "commondir") if (git / "commondir").exists() else git
        ref = head.removeprefix("ref: ")
        if ref != head:
            loose = next((path for path in (git / ref, common / ref) if path.exists()), None)
            head = _line(loose) if loose else _packed_refs(common / "packed-refs").get(ref, "")
        return Git(head) if OBJECT.fullmatch(head) else None
    return None


def _line(path: Path) -> str:
    return read_bytes(path, MAX_LINE).decode("utf-8", "replace").strip()


def _packed_refs(path: Path) -> dict[str, str]:
    lines = read_bytes(path, MAX_REFS).decode("utf-8", "replace").splitlines()
    return {ref: commit for commit, _, ref in (line.partition(" ") for line in lines)}
