"""A run that has been trained, opened again: its very programs, on its device, in the tilings that it chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from wgpu_lora.formats.peft import Matrices, read_adapter
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.objectives.base import Group
from wgpu_lora.train.records import RunRecord
from wgpu_lora.train.session import Session
from wgpu_lora.train.slot import AdapterRun


@dataclass(frozen=True)
class Trained:
    """session: allocated, with no adapter placed yet."""

    session: Session
    run: AdapterRun
    adapter: Matrices

    def first_step(self) -> tuple[list[list[Group]], int]:
        """The micro-batches of the run's first step, weighted for the step's mean, and what that is a mean over.

        Those of a resumed, or any later, step depend on nothing but the options either (see train.stream).
        """
        stream = self.run.stream
        step = next(stream.steps())
        return stream.groups(step), stream.units(step.samples)


@contextmanager
def reopened(directory: Path, device: int) -> Iterator[Trained]:
    """The run in a directory; what is written to it by this is nothing."""
    record = RunRecord.read(directory)
    args = replace(record.options, device=str(device), resume=False)
    job = prepare_job(args, planning=True)
    session = job.session
    try:
        session.allocate(choices=record.state.tiles)
        yield Trained(session, job.run, read_adapter(directory)[1])
    finally:
        session.close()
