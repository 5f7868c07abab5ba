"""Trackio: a local database, or a Space if TRACKIO_SPACE_ID is set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import Context
from inspect import signature

from wgpu_lora.train.track.trackers import PROJECT, TrackedRun, Tracker


class Trackio(Tracker):
    module, extra = "trackio", "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        # Metrics of the system have charts of their own; ours are sampled with the log.
        quiet = {
            name: False
            for name in ("auto_log_gpu", "auto_log_cpu", "embed")
            if name in signature(trackio.init).parameters
        }
        space = os.environ.get("TRACKIO_SPACE_ID")
        # It knows runs by their names, so the id is in it.
        self._run = Context().run(  # its previous run would end otherwise
            trackio.init,
            project=project,
            name=f"{run.name} {run.id}",
            group=run.group,
            space_id=space,
            config=run.config,
            resume="allow",
            **quiet,
        )
        self.url = f"https://huggingface.co/spaces/{space}" if space else f"trackio show --project {project}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: str) -> None:
        self._run.finish()
