"""The reference of all samples, computed before training: the same batches in every run, so that resuming is exact."""

from __future__ import annotations

from dataclasses import replace

from wgpu_lora.data import pack
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.train.session import Session
from wgpu_lora.train.stream import DataStream


def precompute(session: Session, stream: DataStream, slot: int, events: Events, name: str | None) -> None:
    """Fill `stream.references`."""
    assert session.frozen is not None
    every = range(len(stream.lengths))
    at = Evaluating(0, len(stream.prepared.rows), adapter=name)
    events.evaluating(at)
    for together in pack(stream.lengths, every, max(session.frozen.passes)):
        groups = session.referenced([stream.group(sample, 1.0, slot) for sample in together])
        found = {sample: group.reference for sample, group in zip(together, groups, strict=True) if group.reference}
        stream.references |= found
        at = replace(at, rows=at.rows + len(together) * stream.prepared.parts)
        events.evaluating(at)
