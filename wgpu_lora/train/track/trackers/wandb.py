"""Weights & Biases. Its own variables apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_API_KEY, WANDB_MODE=offline."""

from __future__ import annotations

import os
from collections.abc import Mapping

from wgpu_lora.train.track.trackers import PROJECT, TrackedRun, Tracker


class WandB(Tracker):
    module, extra = "wandb", "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            group=run.group,
            notes=run.notes,
            config=run.config,
            dir=run.directory,
            resume="allow",
            # Without git, which would run the programs that the folder's .git/config names.
            settings=wandb.Settings(console="off", reinit="create_new", disable_git=True, save_code=False),
        )
        # Steps of our own: those of wandb only increase, but a resumed run repeats some.
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        self.url = self._run.url or self._run.dir

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics))

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("finished", "stopped") else 1)
