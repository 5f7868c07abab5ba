"""What protected training costs: raw and protected segments of the same training, in turns on one device."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.bench.brick_results import Writer, header
from wgpu_lora.bench.training_runs import Work, prepared
from wgpu_lora.bench.training_step import TRAINING, benchmark_option_names
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events, StepResult
from wgpu_lora.files.json_files import to_json
from wgpu_lora.gpu.device import Device
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import count_noun
from wgpu_lora.processes.child_process import python
from wgpu_lora.protect.check import check
from wgpu_lora.protect.overhead_results import ORDERS, SCHEMA, VERIFIED, ZEROIZED, Row, make_row, result_file
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.policies.policy_template import toml
from wgpu_lora.protect.runs.protected_job import SEALED, read_job
from wgpu_lora.protect.runs.protected_run import finetune_protected
from wgpu_lora.protect.sealed.keys import new_data_key, new_signing_key
from wgpu_lora.protect.sealed.sealed_files import seal_path
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.records import RunRecord

STABILITY: dict[str, Any] = {"compute_dtype": "bf16", "learning_rate": 5e-5, "max_grad_norm": 1.0}  # as published
ROWS, SAVE_STEPS = 64, 50  # of a shape: rows of its data, and steps between checkpoints
WARM_STEPS = 4
MAX_STEPS = 1_000_000  # a segment ends by its time
# Options that [training] of a job does not state.
UNSTATED = (*SEALED, "output", "resume", "overwrite", "run_log", "report_to", "device")


def measure_overhead(
    work: Work,
    seconds: float = 180.0,
    orders: Sequence[str] = ORDERS,
    repeat: int = 1,
    file: Path | None = None,
    events: Events = SILENT,
    opened: Device | None = None,
) -> dict[str, Any]:
    """Measure rows, each a raw and a protected segment, and write the result file anew after each.

    Args:
        work: what to train. seconds: of a segment. orders: of the segments of a row. repeat: rows in each order.
        events: gets `measured` for {"kind": "header"}, which is `brick_results.header`, and for {"kind": "row"} of each
            row.

    Returns:
        The content of the result file.

    Raises:
        UserError: an option is not suitable, the training cannot be sealed, or a segment is too short.
        KeyboardInterrupt: a segment was interrupted; rows measured so far are in the file.
    """
    if not 0 < seconds <= 1e6:
        raise UserError(f"{flag('target_seconds')} is {seconds:g}: give more than 0, at most 1e6.")
    if unknown_order := next((order for order in orders if order not in ORDERS), None):
        raise UserError(f"{flag('order')} must be one of {', '.join(ORDERS)}, not {unknown_order!r:.80}.")
    if repeat < 1:
        raise UserError(f"{flag('repeat')} must be at least 1, not {repeat}.")
    rows: list[Row] = []
    with (
        Writer(file) as writer,  # refuses now what cannot be written
        benchmark_option_names(TRAINING),
        tempfile.TemporaryDirectory(prefix="wgpu-lora-bench-") as directory,
    ):
        segments = _Segments(work, seconds, Path(directory), opened)
        environment = header(SCHEMA, segments.model.device)
        events.measured(environment)
        with segments.broker() as segments.url:
            segments.warm_up()
            for name, order in [(f"{n}-{order}", order) for n in range(repeat) for order in orders]:
                rows.append(segments.row(name, order))
                events.measured({"kind": "row", **rows[-1]})
                content = result_file(rows, segments.scope, environment)
                writer.text(to_json(content, indent=2) + "\n")
    return content


class _Segments:
    """The training, its sealed data, an owner's keys in `directory`, and a broker that releases the key."""

    def __init__(self, work: Work, seconds: float, directory: Path, device: Device | None) -> None:
        self.seconds, self.directory, self.url = seconds, directory, ""
        defaults = {} if work.recipe else dict(STABILITY)
        defaults |= {"max_steps": ROWS} if work.shape else {}
        args, self.model = prepared(replace(work, options={**defaults, **work.options}), directory, device)
        save_steps = work.options.get("save_steps", SAVE_STEPS) if work.shape else args.save_steps
        self.args = replace(
            args, target_seconds=seconds, max_steps=MAX_STEPS, save_steps=save_steps, run_log=False,
            report_to=None,
        )  # fmt: skip
        layers = f", {count_noun(work.layers, 'layer')}" if work.layers else ""
        # No paths.
        self.name = f"{work.shape} (synthetic weights{layers})" if work.shape else Path(self.model.name).name
        self.scope = (
            f"LoRA training of {self.name} for {seconds:g} s, raw and protected, in one process on "
            f"{self.model.device.info.name}"
        )
        self.recipient = new_data_key(directory / "data.key")
        self.broker_key = new_signing_key(directory / "broker.pem")
        sources = {role: Path(path) for role in SEALED if (path := getattr(self.args, role))}
        self.sealed = {role: f"{path.name}.age" for role, path in sources.items()}
        records = [seal_path(path, directory / self.sealed[role], [self.recipient]) for role, path in sources.items()]
        self.policy = directory / "policy.toml"
        self._write_toml(self.policy, {
            "policy": {"name": "bench", "version": 1},
            "release": {"recipients": [self.recipient]},
            "attestation": {"level": "self-reported"},
            "data": {"sha256": [record.sha256 for record in records if record]},
        })  # fmt: skip

    @staticmethod
    def _write_toml(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
        texts = [
            "\n".join([f"[{title}]", *(f"{key} = {toml(value)}" for key, value in table.items())])
            for title, table in tables.items()
        ]
        path.write_text("\n".join(texts) + "\n")

    @contextmanager
    def broker(self) -> Iterator[str]:
        """A broker in a process of its own; gives its URL. Raises UserError if it does not start."""
        keys = ["--key", str(self.directory / "data.key"), "--signing-key", str(self.directory / "broker.pem")]
        command = python("-u", "-m", "wgpu_lora", "protect", "broker", "--policy", str(self.policy), *keys)
        with subprocess.Popen(
            [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout
            lines = []
            try:
                for line in process.stdout:
                    lines.append(line)
                    if listening := re.match(r"Listening on (\S+)", line):
                        yield listening[1]
                        return
                raise UserError(f"The broker did not start: {''.join(lines)[-300:].strip() or 'no output'}")
            finally:
                process.terminate()

    def warm_up(self) -> None:
        """A few raw steps without learning: tilings are chosen and kernels compiled before either segment, and the
        adapter that it ends with is the initial one."""
        changes = {"learning_rate": 0.0, "lr_scheduler_min": 0.0, "target_seconds": None, "max_steps": WARM_STEPS}
        self.initial = self._train("warm-up", **changes, save_steps=0, save_minutes=0.0, eval_steps=0).adapter_sha256

    def row(self, name: str, order: str) -> Row:
        """A row of two segments."""
        segments = (self._raw, self._protected)
        figures: dict[str, Any] = {}
        for segment in segments if order == ORDERS[0] else reversed(segments):
            figures |= segment(name)
        args, shapes = self.args, self.model.config.parameter_shapes()
        return make_row({
            "label": f"{self.name} {self.seconds:g}s",
            "model": self.name,
            "gpuModel": self.model.device.info.name,
            "order": order,
            "targetSec": self.seconds,
            "initialAdapterSha256": self.initial,
            "stabilitySettings": {
                "computeDtype": args.compute_dtype,
                "baseDtype": args.base_dtype,
                "learningRate": args.rate,
                "lrScheduler": args.lr_scheduler_type,
                "maxGradNorm": args.max_grad_norm,
                "optimizer": args.optim,
                "failOnNonfinite": True,  # always: the update is not applied, and the run ends
                "saveSteps": args.save_steps,
            },
            "totalParams": sum(math.prod(shape) for shape in shapes.values()),
            "trainableAdapterParams": self.trained,
            **figures,
        })  # fmt: skip

    def _train(self, name: str, **changes: Any) -> RunRecord:
        args = replace(self.args, output=str(self.directory / "raw" / name), **changes)
        record = prepare_job(args, self.model).train()
        self.trained = record.trainable_parameters
        return record

    def _raw(self, name: str) -> dict[str, Any]:
        begin = time.perf_counter()
        return _figures("raw", self._train(name), begin)

    def _protected(self, name: str) -> dict[str, Any]:
        """A protected segment; its job has a name of its own, since a log of a run cannot begin twice."""
        begin, steps, defaults = time.perf_counter(), _LastStep(), TrainingArguments().as_dict()
        options = {key: value for key, value in self.args.as_dict().items() if key not in UNSTATED}
        job = self.directory / f"{name}.toml"
        self._write_toml(job, {
            "protected": {
                **self.sealed, "name": f"bench-protected-{name}", "output": f"protected-{name}",
                "recipients": [self.recipient], "broker": self.url, "broker_key": "broker.pem.pub",
            },
            "training": {key: value for key, value in options.items() if value not in (None, defaults[key])},
        })  # fmt: skip
        record = finetune_protected(read_job(job), model=self.model, watch=lambda _: nullcontext(steps))
        figures = _figures("protected", record.run, begin)
        evidence, clean = check(record.directory, self.broker_key, Policy.read(self.policy)), record.cleanup
        return {
            **figures,
            "attestation": VERIFIED if evidence.verified else f"not verified ({evidence.failures[0]})",
            "runtimeState": ZEROIZED if clean["complete"] else f"not zeroized ({clean['not_wiped'][0]})",
            "protectionSec": sum(seconds for at, seconds in record.protection_times if at < steps.time),
        }


class _LastStep(Events):
    """Records the time of the last step."""

    time = 0.0

    def step(self, result: StepResult) -> None:
        self.time = time.perf_counter()


def _figures(side: str, record: RunRecord, begin: float) -> dict[str, Any]:
    """A segment's fields of a row; `begin` is when all of it began."""
    if record.stop_reason == "interrupt":  # a signal, which ends the benchmark
        raise KeyboardInterrupt
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
