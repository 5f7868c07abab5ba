"""The first training step of a run once more, by the device's own clock where it has one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from wgpu_lora.gpu.timer import Timer
from wgpu_lora.proof.jobs.trained import reopened
from wgpu_lora.worker.child import Port

REPEATS = 3


def run(port: Port, *, directory: str, device: int) -> dict[str, Any]:
    """Device and host seconds of a step, and the step's loss, which the run's log has too."""
    with reopened(Path(directory), device) as trained:
        session = trained.session
        trained.run.place_initial(session)
        timer = Timer(session.device)
        batches, units = trained.first_step()
        steps = [(session.batch_for(groups), groups) for groups in batches]
        for _ in range(2):  # the first run compiles, the second finds where a long step is to be split
            for batch, groups in steps:
                batch.upload(groups)
                batch.program.run()
        device_seconds, host_seconds = [], []
        for _ in range(REPEATS):
            session.begin()
            begin, spent = time.perf_counter(), 0.0
            for batch, groups in steps:
                batch.upload(groups)
                spent += timer.run(batch.program)
            device_seconds.append(spent)
            host_seconds.append(time.perf_counter() - begin)
        timer.free()
        return {
            "clock": timer.clock,
            "dispatches": sum(len(batch.program.dispatches) for batch, _ in steps),
            "device_seconds": sorted(device_seconds)[REPEATS // 2],
            "host_seconds": sorted(host_seconds)[REPEATS // 2],
            "loss": session.totals.read_loss(session.device, 0) / units,
        }
