"""TensorBoard: event files in the run's directory, written by tensorboardX, which needs no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from wgpu_lora.train.track.trackers import TrackedRun, Tracker


class TensorBoard(Tracker):
    module, extra = "tensorboardX", "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self.url = str(Path(run.directory) / "tensorboard")
        # Files are named by the second, and a run that is resumed within it would overwrite the first file.
        suffix = f".{time.time_ns()}"
        # A resumed run repeats the steps after its checkpoint: TensorBoard then leaves out the first ones.
        purge = run.step + 1 if run.step else None
        self._writer = SummaryWriter(self.url, purge_step=purge, filename_suffix=suffix)
        if not run.step:
            self._writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()
