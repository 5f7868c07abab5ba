"""What protected training costs: raw and protected segments of the same training, in turns on one device."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import Writer, header
from wgpu_lora.bench.training_runs import Work, prepared
from wgpu_lora.bench.training_step import TRAINING, benchmark_option_names
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.checking.check import check
from wgpu_lora.protect.overhead_results import ORDERS, SCHEMA, VERIFIED, ZEROIZED, Row, make_row, result_file
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.policy_template import policy_for
from wgpu_lora.protect.runs import protected_job, protected_run
from wgpu_lora.protect.sealed.keys import DataKey, PublicKey, SessionKeys, SigningKey, write_private
from wgpu_lora.protect.sealed.sealed_files import seal_path
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.words import count_noun

STABILITY: dict[str, Any] = {"compute_dtype": "bf16", "learning_rate": 5e-5, "max_grad_norm": 1.0}  # as published
ROWS, SAVE_STEPS = 64, 50  # of a shape: rows of its data, and steps between checkpoints
WARM_STEPS = 4
JOB = "bench-protected"  # beginning of the jobs' names
MAX_STEPS = 1_000_000  # a policy requires a bound
PATIENCE = 30.0  # seconds for a broker to start
SEALED = ("data", "eval_data", "init_adapter")
# Options that [training] of a job does not state.
UNSTATED = (*SEALED, "output", "resume", "overwrite", "run_log", "report_to", "device")


@dataclass(frozen=True)
class OverheadOptions:
    """What to measure.

    orders: of the segments of a row. repeat: rows in each order.
    """

    work: Work
    target_seconds: float = 180.0
    orders: Sequence[str] = ORDERS
    repeat: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.target_seconds <= 1e6:
            raise UserError(f"{flag('target_seconds')} is {self.target_seconds:g}: give more than 0, at most 1e6.")
        if wrong := next((order for order in self.orders if order not in ORDERS), None):
            raise UserError(f"{flag('order')} must be one of {', '.join(ORDERS)}, not {wrong!r:.80}.")
        if self.repeat < 1:
            raise UserError(f"{flag('repeat')} must be at least 1, not {self.repeat}.")

    def segments(self) -> list[tuple[str, str]]:
        """(name, order) of each row, whose two segments have this name."""
        return [(f"{number}-{order}", order) for number in range(self.repeat) for order in self.orders]


def measure_overhead(
    options: OverheadOptions, file: Path | None = None, events: Events = SILENT, opened: Device | None = None
) -> dict[str, Any]:
    """Measure rows, each a raw and a protected segment, and write the result file anew after each.

    Args:
        events: gets `measured` for {"kind": "header"}, which is `results.header`, and for {"kind": "row"} of each row.

    Returns:
        The content of the result file.

    Raises:
        UserError: an option is not suitable, the training cannot be sealed, or a segment is too short.
        KeyboardInterrupt: a segment was interrupted; rows measured so far are in the file.
    """
    rows: list[Row] = []
    with (
        Writer(file) as writer,  # refuses now what cannot be written
        benchmark_option_names(TRAINING),
        tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as directory,
    ):
        segments = _Segments(options, Path(directory), opened)
        environment = header(SCHEMA, segments.model.device)
        events.measured(environment)
        with segments.owner.broker(segments.policy) as segments.url:
            segments.warm_up()
            for name, order in options.segments():
                rows.append(segments.row(name, order))
                events.measured({"kind": "row", **rows[-1]})
                content = result_file(rows, segments.scope, environment)
                writer.text(to_json(content, indent=2) + "\n")
    return content


@dataclass(frozen=True)
class Owner:
    """A data owner on this machine: keys in `place`, sealed data, and a broker in a process of its own.

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
        log = self.place / "broker.log"  # not a pipe, which would fill
        command = [
            *(sys.executable, "-m", "wgpu_lora", "protect", "broker", "--port", "0", "--policy", str(policy)),
            *("--key", str(self.key), "--signing-key", str(self.signing_key), *options),
        ]
        with log.open("w") as sink:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment)
        try:
            deadline = time.monotonic() + PATIENCE
            while not (listening := re.search(r"Listening on (\S+)\n", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UserError(f"The broker did not start: {log.read_text()[-300:].strip() or 'no output'}")
                time.sleep(0.05)
            yield listening[1]
        finally:
            process.terminate()
            process.wait()


class _Segments:
    """The training, its sealed data and keys in `directory`, and the broker that releases the key."""

    def __init__(self, options: OverheadOptions, directory: Path, device: Device | None) -> None:
        self.options, self.directory, self.url = options, directory, "http://127.0.0.1:1"
        self.args, self.model = _training(options, directory, device)
        work, seconds = options.work, f"{options.target_seconds:g}"
        layers = f", {count_noun(work.layers, 'layer')}" if work.layers else ""
        # No paths.
        self.name = f"{work.shape} (synthetic weights{layers})" if work.shape else Path(self.model.name).name
        self.label = f"{self.name} {seconds}s"
        self.scope = (
            f"LoRA training of {self.name} for {seconds} s, raw and protected, in one process on "
            f"{self.model.device.info.name}"
        )
        self.owner = Owner.create(directory / "owner")
        self.sealed: dict[str, str] = {}
        for role in SEALED:
            if path := getattr(self.args, role):
                self.sealed[role] = f"{Path(path).name}.age"
                self.owner.seal(Path(path), directory)
        self.policy = self.owner.place / "policy.toml"
        self.policy.write_text(self._policy())

    def warm_up(self) -> None:
        """A few raw steps without learning: tilings are chosen and kernels compiled before either segment, and the
        adapter that it ends with is the initial one."""
        changes = {"learning_rate": 0.0, "lr_scheduler_min": 0.0, "target_seconds": None, "max_steps": WARM_STEPS}
        self.initial = self._train("warm-up", **changes, save_steps=0, save_minutes=0.0, eval_steps=0).adapter_sha256

    def row(self, name: str, order: str) -> Row:
        """A row of two segments."""
        figures: dict[str, Any] = {
            "label": self.label,
            "model": self.name,
            "gpuModel": self.model.device.info.name,
            "order": order,
            "targetSec": self.options.target_seconds,
            "initialAdapterSha256": self.initial,
            "stabilitySettings": stability(self.args),
            "totalParams": sum(math.prod(shape) for shape in self.model.config.parameter_shapes().values()),
            "trainableAdapterParams": self.trained,
        }
        segments = (self._raw, self._protected)
        for segment in segments if order == ORDERS[0] else reversed(segments):
            figures |= segment(name)
        return make_row(figures)

    def _train(self, name: str, **changes: Any) -> RunRecord:
        args = replace(self.args, output=str(self.directory / "raw" / name), **changes)
        record = _uninterrupted(prepare_job(args, self.model).train())
        self.trained = record.trainable_parameters
        return record

    def _raw(self, name: str) -> dict[str, Any]:
        begin = time.perf_counter()
        return _figures("raw", self._train(name), begin)

    def _protected(self, name: str) -> dict[str, Any]:
        begin, steps = time.perf_counter(), _LastStep()
        done = protected_run.finetune_protected(
            protected_job.read_job(self._job(name)), model=self.model, watch=lambda job: nullcontext(steps)
        )
        figures = _figures("protected", _uninterrupted(done.run), begin)
        evidence = check(done.directory, self.owner.broker_public, Policy.read(self.policy))
        return {
            **figures,
            "attestation": VERIFIED if evidence.verified else f"not verified ({evidence.failures[0]})",
            "runtimeState": runtime_state(done.cleanup),
            "protectionSec": sum(seconds for at, seconds in done.spent if at < steps.time),
        }

    def _job(self, name: str) -> Path:
        """A job file; each job has a name of its own, since a log of a run cannot begin twice."""
        path = self.directory / f"{name}.toml"
        protected = {
            **self.sealed,
            "name": f"{JOB}-{name}",
            "output": f"protected-{name}",
            "recipients": [self.owner.recipient],
            "broker": self.url,
            "broker_key": str(self.owner.broker_key),
        }
        usual, stated = TrainingArguments(), {}
        for item in fields(self.args):
            value = getattr(self.args, item.name)
            if item.name not in UNSTATED and value is not None and value != getattr(usual, item.name):
                stated[item.name] = value
        path.write_text("\n".join(["[protected]", *_toml(protected), "[training]", *_toml(stated)]) + "\n")
        return path

    def _policy(self) -> str:
        """A policy that accepts this machine and this training."""
        keys = SessionKeys.generate()
        try:
            base = claims.base_facts(self.model.name, self.model.checkpoint, self.model.config)
            stated, nonce = protected_job.read_job(self._job("reference")), uuid.uuid4().hex
            found = claims.gather(self.model.device.info, nonce=nonce, keys=keys, job=stated, base=base)
        finally:
            keys.wipe()
        jobs = [f"{JOB}-{name}" for name, _ in self.options.segments()]  # each segment is a job of its own
        return policy_for(found).replace(json.dumps([stated.name]), json.dumps(jobs))


class _LastStep(Events):
    """Records the time of the last step."""

    time = 0.0

    def step(self, result: StepResult) -> None:
        self.time = time.perf_counter()


def _training(
    options: OverheadOptions, directory: Path, device: Device | None
) -> tuple[TrainingArguments, LoadedModel]:
    """The options of the training, and its model. Without a recipe, it has the published stability settings."""
    work = options.work
    usual = {} if work.recipe else dict(STABILITY)
    usual |= {"max_steps": ROWS} if work.shape else {}
    args, model = prepared(replace(work, options={**usual, **work.options}), directory, device)
    changes: dict[str, Any] = {"target_seconds": options.target_seconds, "max_steps": MAX_STEPS}
    changes |= {"save_steps": work.options.get("save_steps", SAVE_STEPS)} if work.shape else {}
    return replace(args, **changes, run_log=False, report_to=None), model


def stability(args: TrainingArguments) -> dict[str, Any]:
    """The settings that published rows state, and what else decides about a run's stability."""
    return {
        "computeDtype": args.compute_dtype,
        "baseDtype": args.base_dtype,
        "learningRate": args.rate,
        "lrScheduler": args.lr_scheduler_type,
        "maxGradNorm": args.max_grad_norm,
        "optimizer": args.optim,
        "failOnNonfinite": True,  # always: the update is not applied, and the run ends
        "saveSteps": args.save_steps,
    }


def runtime_state(cleanup: Mapping[str, Any]) -> str:
    """ZEROIZED if a cleanup overwrote all its parts whole, the device's buffers as read back; else what failed."""
    return ZEROIZED if cleanup["complete"] else f"not zeroized ({cleanup['not_wiped'][0]})"


def _uninterrupted(record: RunRecord) -> RunRecord:
    if record.stop_reason == "interrupt":  # a signal, which ends the benchmark
        raise KeyboardInterrupt
    return record


def _figures(side: str, record: RunRecord, begin: float) -> dict[str, Any]:
    """A segment's fields of a row; `begin` is when all of it began."""
    state = record.state
    return {
        f"{side}ElapsedSec": state.elapsed_seconds,
        f"{side}Steps": state.step,
        f"{side}FinalLoss": record.loss,
        f"{side}AdapterSha256": record.adapter_sha256,
        f"{side}StepBudget": state.total_steps,
        f"{side}StopReason": record.stop_reason,
        f"{side}OutsideSec": time.perf_counter() - begin - state.elapsed_seconds,
    }


def _toml(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]
