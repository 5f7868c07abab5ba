"""An entry of the run log: what ran, on what, and how it ended."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

from wgpu_lora.names.allowed import RUN_STATUSES
from wgpu_lora.share.owner import boot_id, host_id, start_of
from wgpu_lora.track.git import Git

RUNNING, FINISHED, STOPPED, INTERRUPTED, FAILED, KILLED = RUN_STATUSES
HELD_OUT, TRAINING = "held-out", "training"  # what losses are of


def now() -> str:
    """The time in UTC, as ISO 8601 has it: 2026-11-22T14:05:09Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_id() -> str:
    """An id that sorts by date: 20261122-140509-1f3a9c."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Process:
    """A process, as share.owner identifies it."""

    host: str
    boot: str
    pid: int
    started: int | None

    @classmethod
    def this(cls) -> Process:
        pid = os.getpid()
        return cls(host_id(), boot_id(), pid, start_of(pid))

    @property
    def dead(self) -> bool:
        """Whether it has ended; False for processes of other hosts, which are not visible."""
        if self.host != host_id():
            return False
        return self.boot != boot_id() or start_of(self.pid) != self.started


@dataclass(frozen=True)
class Losses:
    """Losses of `of` rows: held-out or, without any, training. initial: before the first step, or of the first logged
    ones."""

    of: str = TRAINING
    initial: float | None = None
    best: float | None = None
    final: float | None = None

    @property
    def improvement(self) -> float | None:
        """By how many percent of the initial loss the final one is lower; None if one is unknown."""
        if self.initial is None or self.final is None or self.initial <= 0:
            return None
        return 100 * (self.initial - self.final) / self.initial


@dataclass(frozen=True)
class DataFile:
    """Data of a run: path or name, and SHA-256."""

    path: str
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
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
        named = self.config.get("shape") or self.config.get("model")
        return short_name(named) if named or self.kind == "finetune" else ""

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
