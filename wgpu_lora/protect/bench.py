"""What protected training costs: raw and protected segments of the same training, in one process on one device."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.overhead import ORDERS, RAW_FIRST, VERIFIED, ZEROIZED, Row, Segment, row_of
from wgpu_lora.bench.overhead_results import result_file, write_results
from wgpu_lora.bench.results import header
from wgpu_lora.bench.step import TRAINING, own_words
from wgpu_lora.bench.training import Work, prepared
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.names.naming import flag
from wgpu_lora.protect import check, job, run
from wgpu_lora.protect.owner import Owner
from wgpu_lora.protect.policy import Policy
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.records import RunRecord

SCHEMA = "wgpu-lora-overhead-environment/1"
STABILITY: dict[str, Any] = {"compute_dtype": "bf16", "learning_rate": 5e-5, "max_grad_norm": 1.0}  # as published
ROWS, SAVE_STEPS, WARM_STEPS = 64, 50, 4  # of a shape: rows of its data, steps between checkpoints; of the warm-up
LEFT_OUT = ("model", "data", "eval_data", "output", "resume", "run_log", "report_to", "device")  # of a job's options


@dataclass(frozen=True)
class Measuring:
    """What to measure.

    orders: of the segments of rows; each is run `repeat` times. own: the training has the options of its recipe, instead
    of the published stability settings.
    """

    work: Work
    target_seconds: float = 180.0
    orders: Sequence[str] = ORDERS
    repeat: int = 1
    own: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.target_seconds < 1e6:
            raise UserError(f"{flag('target_seconds')} is {self.target_seconds:g}: give seconds between 0 and 1,000,000.")
        if self.repeat < 1:
            raise UserError(f"{flag('repeat')} must be at least 1, not {self.repeat}.")


@dataclass
class Bench:
    """One benchmark: a model on a device, and an owner with a broker. rows: those measured so far."""

    measuring: Measuring
    args: TrainingArguments
    model: LoadedModel
    place: Path
    owner: Owner
    rows: list[Row] = field(default_factory=list)
    initial: str = ""
    _job: Path | None = None

    # -- segments ------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """A few raw steps without learning, after which tilings are chosen, kernels are compiled, and the digest of the
        initial adapter is known: neither segment is the first to do anything."""
        record = self._train("warm-up", learning_rate=0.0, target_seconds=None, max_steps=WARM_STEPS, eval_steps=0)
        self.initial = record.adapter_sha256

    def raw(self, name: str) -> Segment:
        begin = time.perf_counter()
        record = self._train(name)
        return _segment(record, time.perf_counter() - begin)

    def _train(self, name: str, **changes: Any) -> RunRecord:
        args = replace(self.args, output=str(self.place / "raw" / name), **changes)
        return _uninterrupted(prepare_job(args, self.model).train())

    def protected(self, name: str, broker: str) -> tuple[Segment, str, str]:
        """The segment, what was found of its attestation, and its state at the end."""
        begin = time.perf_counter()
        done = run.finetune(job.read(self._job_file(name, broker)), model=self.model)
        segment = _segment(_uninterrupted(done.run), time.perf_counter() - begin)
        found = check.check(done.directory, self.owner.broker_public, Policy.read(self.policy))
        attestation = VERIFIED if not found.failures else f"not verified: {found.failures[0]}"
        left = done.cleanup.failures
        return segment, attestation, ZEROIZED if not left else f"not zeroized: {left[0]}"

    # -- files ---------------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Path:
        return self.owner.place / "policy.toml"

    def _job_file(self, name: str, broker: str) -> Path:
        raise NotImplementedError


def _segment(record: RunRecord, whole: float) -> Segment:
    state = record.state
    return Segment(
        target_sec=record.options.target_seconds or 0.0,
        elapsed_sec=state.elapsed_seconds,
        steps=state.step,
        step_budget=state.total_steps,
        stop_reason=record.stop_reason,
        final_loss=record.loss,
        adapter_sha256=record.adapter_sha256,
        outside_sec=whole - state.elapsed_seconds,
    )
