"""The loss on held-out rows, by the training objective."""

from __future__ import annotations

from collections.abc import Callable

from wgpu_lora.data import pack
from wgpu_lora.train.session import Session
from wgpu_lora.train.stream import DataStream


def heldout_loss(
    session: Session, stream: DataStream, slot: int, watch: Callable[[int], None] = lambda rows: None
) -> dict[str, float]:
    """The mean loss of a stream's samples under one slot's adapter, without dropout, and the objective's metrics.

    watch: called with the number of finished rows, first with 0.
    """
    batch = session.heldout
    assert batch is not None, "the session has no held-out batch"
    sums = dict.fromkeys(("loss", *stream.objective.metrics), 0.0)
    done = 0
    watch(done)
    packed = pack(stream.lengths, range(len(stream.lengths)), batch.tokens)
    for together, groups in zip(packed, session.estimated(stream.heldout_groups(packed, slot)), strict=True):
        session.begin()
        known = session.known(groups)
        stream.references |= {i: g.reference for i, g in zip(together, known, strict=True) if g.reference}
        batch.upload(known)
        batch.program.run()
        # Summed in float64: a float32 total over many batches would lose precision.
        sums["loss"] += session.totals.read_loss(session.device, slot)
        for name, value in session.totals.read_metrics(session.device, slot, stream.objective).items():
            sums[name] += value
        done += len(together) * stream.prepared.parts
        watch(done)
    units = stream.units(range(len(stream.lengths)))
    return {"loss": sums.pop("loss") / units, **stream.objective.logged(sums, units)}
