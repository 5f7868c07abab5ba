"""TensorBoard: event files in the run's directory, written by tensorboardX, which needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from wgpu_lora.track.trackers.base import Tracked, Tracker


class TensorBoard(Tracker):
    module, extra = "tensorboardX", "tensorboard"

    def __init__(self, run: Tracked) -> None:
        from tensorboardX import SummaryWriter

        self.place = str(Path(run.directory) / "tensorboard")
        # A resumed run repeats the steps after its checkpoint: TensorBoard then leaves out the first ones.
        self._writer = SummaryWriter(self.place, purge_step=run.step + 1 if run.step else None)
        if not run.step:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()
