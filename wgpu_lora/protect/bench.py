"""What protected training costs: raw and protected segments of the same training, in one process on one device."""

from __future__ import annotations

import json
import math
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import Writer, header
from wgpu_lora.bench.overhead import ORDERS, RAW_FIRST, VERIFIED, ZEROIZED, Row, Segment, row_of
from wgpu_lora.bench.overhead_results import SCHEMA, result_file
from wgpu_lora.bench.training_runs import Work, prepared
from wgpu_lora.bench.training_step import TRAINING, benchmark_option_names
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.attestation import claims
from wgpu_lora.protect.checking.check import check
from wgpu_lora.protect.owner import Owner
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.template import policy_for
from wgpu_lora.protect.runs import job, run
from wgpu_lora.protect.sealed.keys import SessionKeys
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.words import count_noun

STABILITY: dict[str, Any] = {"compute_dtype": "bf16", "learning_rate": 5e-5, "max_grad_norm": 1.0}  # as published
ROWS, SAVE_STEPS = 64, 50  # of a shape: rows of its data, and steps between checkpoints
WARM_STEPS = 4
NAME = "bench-protected"  # of jobs, before a segment's own
MOST_STEPS = 1_000_000  # a policy wants a bound
SEALED = ("data", "eval_data", "init_adapter")
NOT_STATED = (*SEALED, "output", "resume", "overwrite", "run_log", "report_to", "device")  # in [training] of a job


@dataclass(frozen=True)
class Measuring:
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


def bench_protected(
    measuring: Measuring, file: Path | None = None, events: Events = SILENT, opened: Device | None = None
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
        Writer(file) as writer,  # refused now, if it cannot be written
        benchmark_option_names(TRAINING),
        tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as place,
        Bench.opened(measuring, Path(place), opened) as bench,
    ):
        environment = header(SCHEMA, bench.model.device)
        events.measured(environment)
        bench.warm_up()
        for name, order in measuring.segments():
            rows.append(bench.row(name, order))
            events.measured({"kind": "row", **rows[-1].to_json()})
            content = result_file(rows, bench.scope(), environment)
            writer.text(to_json(content, indent=2) + "\n")
    return content


@dataclass
class Bench:
    """A benchmark that is set up: the training, its sealed data, and the broker that releases its key."""

    measuring: Measuring
    args: TrainingArguments
    model: LoadedModel
    place: Path
    owner: Owner
    broker: str = ""
    initial: str = ""  # SHA-256 of the adapter that every segment begins with
    _sealed: dict[str, Path] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def opened(cls, measuring: Measuring, place: Path, device: Device | None = None) -> Iterator[Bench]:
        args, model = _training(measuring, place, device)
        bench = cls(measuring, args, model, place, Owner.create(place / "owner"))
        for role in SEALED:
            if path := getattr(args, role):
                bench._sealed[role] = bench.owner.seal(Path(path), place)
        bench.policy.write_text(bench._policy())
        with bench.owner.broker(bench.policy) as bench.broker:
            yield bench

    @property
    def policy(self) -> Path:
        return self.owner.place / "policy.toml"

    def scope(self) -> str:
        """What was measured, in a sentence."""
        return (
            f"LoRA training of {self._name()} for {self.measuring.target_seconds:g} s, raw and protected, in one "
            f"process on {self.model.device.info.name}"
        )

    def _name(self) -> str:
        work = self.measuring.work
        if not work.shape:
            return Path(self.model.name).name  # no paths
        layers = f", {count_noun(work.layers, 'layer')}" if work.layers else ""
        return f"{work.shape} (synthetic weights{layers})"

    # -- segments ------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """A few raw steps without learning: tilings are chosen and kernels compiled before either segment, and the
        adapter that it ends with is the initial one."""
        changes = {"learning_rate": 0.0, "lr_scheduler_min": 0.0, "target_seconds": None, "max_steps": WARM_STEPS}
        self.initial = self._train("warm-up", **changes, save_steps=0, save_minutes=0.0, eval_steps=0).adapter_sha256

    def row(self, name: str, order: str) -> Row:
        if order == RAW_FIRST:
            raw = self.raw(name)
            protected, spent, attestation, runtime_state = self.protected(name)
        else:
            protected, spent, attestation, runtime_state = self.protected(name)
            raw = self.raw(name)
        return row_of(
            raw,
            protected,
            attestation=attestation,
            runtime_state=runtime_state,
            protection_sec=spent,
            label=f"{self._name()} {self.measuring.target_seconds:g}s",
            model=self._name(),
            gpu_model=self.model.device.info.name,
            order=order,
            initial_adapter_sha256=self.initial,
            stability_settings=stability(self.args),
            total_params=_parameters(self.model),
            trainable_adapter_params=self.trained,
        )

    def raw(self, name: str) -> Segment:
        begin = time.perf_counter()
        record = self._train(name)
        return _segment(record, time.perf_counter() - begin)

    def _train(self, name: str, **changes: Any) -> RunRecord:
        args = replace(self.args, output=str(self.place / "raw" / name), **changes)
        record = _uninterrupted(prepare_job(args, self.model).train())
        self.trained = record.trainable_parameters
        return record

    def protected(self, name: str) -> tuple[Segment, float, str, str]:
        """The segment, seconds of it for the protection, what became of its attestation, and its state at the end."""
        begin, steps = time.perf_counter(), _Steps()
        done = run.finetune(job.read(self._job(name)), model=self.model, watch=lambda job: nullcontext(steps))
        segment = _segment(_uninterrupted(done.run), time.perf_counter() - begin)
        found = check(done.directory, self.owner.broker_public, Policy.read(self.policy))
        attestation = VERIFIED if found.verified else f"not verified ({found.failures[0]})"
        spent = sum(seconds for at, seconds in done.spent if at < steps.last)
        return segment, spent, attestation, runtime_state(done.cleanup)

    # -- the owner's files ---------------------------------------------------------------------------------------------

    def _job(self, name: str) -> Path:
        """A job file; each job has a name of its own, since a log of a run cannot begin twice."""
        path = self.place / f"{name}.toml"
        protected = {role: sealed.name for role, sealed in self._sealed.items()} | {
            "name": f"{NAME}-{name}",
            "output": f"protected-{name}",
            "recipients": [self.owner.recipient],
            "broker": self.broker or "http://127.0.0.1:1",
            "broker_key": str(self.owner.broker_key),
        }
        usual = TrainingArguments()
        stated = {
            item.name: value
            for item in fields(self.args)
            if item.name not in NOT_STATED
            and (value := getattr(self.args, item.name)) is not None
            and value != getattr(usual, item.name)
        }
        path.write_text("\n".join(["[protected]", *_toml(protected), "[training]", *_toml(stated)]) + "\n")
        return path

    def _policy(self) -> str:
        """A policy that accepts this machine and this training."""
        keys = SessionKeys.generate()
        try:
            base = claims.base_facts(self.model.name, self.model.checkpoint, self.model.config)
            stated = job.read(self._job("reference"))
            nonce = uuid.uuid4().hex
            found = claims.gather(self.model.device.info, nonce=nonce, keys=keys, job=stated, base=base)
        finally:
            keys.wipe()
        jobs = [f"{NAME}-{name}" for name, _ in self.measuring.segments()]  # each segment is a job of its own
        return policy_for(found).replace(json.dumps([stated.name]), json.dumps(jobs))


class _Steps(Events):
    """Notes the time of the last step."""

    last = 0.0

    def step(self, result: StepResult) -> None:
        self.last = time.perf_counter()


def _training(measuring: Measuring, place: Path, device: Device | None) -> tuple[TrainingArguments, LoadedModel]:
    """The options of the training, and its model. Without a recipe, it has the published stability settings."""
    work = measuring.work
    usual = {} if work.recipe else dict(STABILITY)
    usual |= {"max_steps": ROWS} if work.shape else {}
    args, model = prepared(replace(work, options={**usual, **work.options}), place, device)
    changes: dict[str, Any] = {"target_seconds": measuring.target_seconds, "max_steps": MOST_STEPS}
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


def _parameters(model: LoadedModel) -> int:
    """Of the base model."""
    return sum(math.prod(shape) for shape in model.config.parameter_shapes().values())


def _uninterrupted(record: RunRecord) -> RunRecord:
    if record.stop_reason == "interrupt":  # a signal, which ends the benchmark
        raise KeyboardInterrupt
    return record


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


def _toml(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {json.dumps(value)}" for name, value in values.items()]
