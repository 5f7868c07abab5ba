"""The loss on held-out rows, by the training objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wgpu_lora.data import pack
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.train.session.data_stream import DataStream
from wgpu_lora.train.session.session import Session


def heldout_loss(
    session: Session, stream: DataStream, slot: int, watch: Callable[[int], None] = lambda rows: None
) -> dict[str, float]:
    """The mean loss of a stream's samples under one slot's adapter, without dropout, and the objective's metrics.

    watch: called with the number of finished rows, first with 0.
    """
    batch = session.heldout
    assert batch is not None, "the session has no held-out batch"
    sums = dict.fromkeys(("loss", *stream.objective.metrics), 0.0)
    completed = 0
    watch(completed)
    packed = pack(stream.lengths, range(len(stream.lengths)), batch.tokens)
    for together, groups in zip(packed, session.with_kl_estimate(stream.heldout_groups(packed, slot)), strict=True):
        session.begin()
        with_targets = session.with_targets(groups)
        stream.references |= {i: g.reference for i, g in zip(together, with_targets, strict=True) if g.reference}
        batch.upload(with_targets)
        batch.program.run()
        # Summed in float64: a float32 total over many batches would lose precision.
        sums["loss"] += session.totals.read_loss(session.device, slot)
        for name, value in session.totals.read_metrics(session.device, slot, stream.objective).items():
            sums[name] += value
        completed += len(together) * stream.prepared.parts
        watch(completed)
    units = stream.units(range(len(stream.lengths)))
    return {"loss": sums.pop("loss") / units, **stream.objective.logged(sums, units)}


def precompute(session: Session, stream: DataStream, slot: int, events: Events, name: str | None) -> None:
    """Fill `stream.references`."""
    assert session.frozen is not None
    samples = range(len(stream.lengths))
    at = Evaluating(0, len(stream.prepared.rows), adapter=name)
    events.evaluating(at)
    for together in pack(stream.lengths, samples, max(session.frozen.passes)):
        groups = session.with_reference_logprobs([stream.group(sample, 1.0, slot) for sample in together])
        result = {sample: group.reference for sample, group in zip(together, groups, strict=True) if group.reference}
        stream.references |= result
        at = replace(at, rows=at.rows + len(together) * stream.prepared.parts)
        events.evaluating(at)
