"""Fetched results in the run log of this machine, which has the runs that were trained here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.track.run_log import RunLog, run_log_enabled
from wgpu_lora.train.run.run_checkpoint import BEST
from wgpu_lora.train.run.run_tracking import logged_id


def log_place(output: Path) -> None:
    """Log where a result is now, if the run log here has its run: it was trained in a directory of the cluster, which
    is gone. A log that cannot be read or written is left as it is."""
    name = logged_id(output)
    if name is None or not run_log_enabled(True):
        return
    log = RunLog()
    places = [str(place.resolve()) for place in (output, output / BEST) if place.is_dir()]
    with suppress(UserError, OSError, NotImplementedError):
        if any(entry.id == name for entry in log.read().entries):
            log.append({"id": name, "outputs": places})
