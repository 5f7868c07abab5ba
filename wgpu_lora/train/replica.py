"""Data-parallel training, the side of a replica: computes parts of steps for the leader."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wgpu_lora.data import Source
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT
from wgpu_lora.gpu.memory_leases import budget_bytes, claim
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.data_parallel import gradient_messages
from wgpu_lora.train.data_parallel.leader import StepPart, check_shared
from wgpu_lora.train.job import Job
from wgpu_lora.train.memory import check_adapters
from wgpu_lora.train.options.training_arguments import LENGTH_OPTIONS, TrainingArguments
from wgpu_lora.train.prepare_job import with_stored_dtype
from wgpu_lora.train.prepare_run import prepare_run
from wgpu_lora.train.prepare_session import prepare_session
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.session.data_stream import Step
from wgpu_lora.train.session.session import Session

# The entries of AdapterRun.identity that must agree, in words.
SAME = {
    "code": "version of wgpu-lora",
    "options": "options",
    "data": "rows",
    "base": "base model",
    "config": "configuration of the base model",
    "weights": "weights of the base model",
    "reference": "reference adapter",
    "teacher": "teacher",
    "teacher_weights": "weights of the teacher",
}


def prepare_worker(
    args: TrainingArguments, model: LoadedModel | None = None, rows: Mapping[str, Source] | None = None
) -> Job[Any]:
    """A job that `serve_gradients` uses, of the same options as the leader's; it writes nothing and holds out no rows.

    Raises:
        UserError: the options, the data, the model or the device are unsuitable.
    """
    model = model or open_model(args.model or "demo", args.device, args.base_dtype)
    args = with_stored_dtype(args, model)
    check_adapters([args], model.config, budget_bytes(model.device.info, args.budget()))
    run = prepare_run(args, model, rows=rows)
    run.heldout = None

    check_shared(args)
    session = prepare_session(model, [run], batch_tokens=run.stream.buckets()[-1])
    return Job(session, [run], lambda changes: session.memory().peak_device_bytes)  # no option may differ here


@contextmanager
def serve_gradients(job: Job[Any], code: str = "") -> Iterator[DataParallelWorker]:
    """Loads the model and what else a step needs; yields who computes parts.

    code: digest of the package's code.

    Raises:
        UserError: the device has too little memory, or cannot compute the run.
    """
    session, run = job.session, job.run
    job.check_memory()
    device, args = session.device, run.args
    budget = budget_bytes(device.info, args.budget())
    with claim(device, session.needs(), "a part of data-parallel training", budget, args.wait_seconds(), SILENT):
        try:
            session.allocate(SILENT, job.choose_tilings(SILENT))
            run.weights_sha256 = session.model.weights_sha256
            run.teacher_sha256 = session.teachers.weights_sha256(run.slot)
            if run.reference:
                session.place_reference(run.slot, run.reference.matrices)
            session.release_references()
            yield DataParallelWorker(session, run, code)
        finally:
            session.close()


@dataclass
class DataParallelWorker:
    """Answers a leader's questions. code: digest of the package's code."""

    session: Session
    run: AdapterRun
    code: str

    def answer(self, question: bytes) -> bytes:
        """Compute the losses and gradients of a part of a step with the parameters in the question.

        Raises:
            UserError: the leader has another run.
        """
        session, run = self.session, self.run
        try:
            header, arrays = gradient_messages.read_message(question)
            if "run" in header:
                self._check(header["run"])
                gradient_messages.write_offsets(session, _of(arrays, "offset"))
            gradient_messages.place_parameters(session, _of(arrays, "parameters"))
            run.stream.references.update(
                {int(sample): tuple(reference) for sample, reference in header["references"].items()}
            )
            shared = StepPart(session, run, self._step(header), header["estimate"])
            begin, end = header["span"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise UserError(
                f"A question of the leader of this data-parallel run cannot be answered ({error}): use the same "
                "version of wgpu-lora on all machines."
            ) from None
        session.begin()
        shared.accumulate((begin, end))
        result = gradient_messages.read_gradients(session)
        gradient_messages.clear_gradients(session)
        return gradient_messages.message({"say": "part"}, result)

    def _check(self, leader: dict[str, Any]) -> None:
        """Raise UserError if the leader has another run."""
        identity = json.loads(json.dumps({**self.run.identity(), "code": self.code}))
        for name, label in SAME.items():
            expected, actual = leader.get(name), identity.get(name)
            if name == "options":
                expected, actual = _fixed(expected or {}), _fixed(actual or {})
            if expected != actual:
                raise UserError(
                    f"This machine does not have the {label} of the leader of this data-parallel run: give both the "
                    "same files and options."
                )

    def _step(self, header: dict[str, Any]) -> Step:
        epoch, index = header["epoch"], header["index"]
        result = self.run.stream.epoch(epoch)
        step = Step(epoch, index, index == len(result) - 1, result[index])
        if len(step.samples) != header["samples"]:
            raise ValueError(f"the step has {len(step.samples)} samples here")
        return step


def _fixed(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that do not change the steps."""
    return {name: value for name, value in options.items() if name not in LENGTH_OPTIONS}


def _of(arrays: gradient_messages.Arrays, kind: str) -> gradient_messages.Arrays:
    return {name: values for name, values in arrays.items() if name.startswith(f"{kind} ")}
