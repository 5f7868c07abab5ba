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
    for together in pack(stream.lengths, range(len(stream.lengths)), batch.tokens):
        session.begin()
        batch.upload([stream.group(sample, 1.0, slot) for sample in together])
        batch.program.run()
        # Summed in float64: a float32 total over many batches would lose precision.
        sums["loss"] += session.totals.read_loss(session.device, slot)
        for name, value in session.totals.read_metrics(session.device, slot, stream.objective).items():
            sums[name] += value
        done += len(together) * stream.prepared.parts
        watch(done)
    units = stream.units(range(len(stream.lengths)))
    return {name: value / units for name, value in sums.items()}
