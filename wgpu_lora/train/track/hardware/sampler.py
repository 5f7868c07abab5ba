"""Samples the status of a device in a thread that cannot hurt the run."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.train.track.hardware import ReadStatus, Status, find

INTERVAL = 3.0  # seconds between samples
KEPT = 2400  # samples: two hours
FULL, LOW, SPAN = 99.0, 0.3, 30.0  # percent in use, share of the power limit, and seconds of a device that is held back


@dataclass(frozen=True)
class Sample:
    at: float  # of time.monotonic
    status: Status


class Sampler:
    """Samples from `start` to `stop`. A device that cannot be read has no samples."""

    def __init__(
        self, info: DeviceInfo, interval: float = INTERVAL, source: Callable[[DeviceInfo], ReadStatus | None] = find
    ):
        self._info, self._interval, self._source = info, interval, source
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False

    def start(self) -> None:
        if self._thread is None and self._info.kind != "software":
            self._thread = threading.Thread(target=self._run, name="hardware status", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for a source that hangs."""
        self._stop.set()

    def _run(self) -> None:
        try:
            read = self._source(self._info)
            while read and not self._stop.is_set():
                self._samples.append(Sample(time.monotonic(), read()))
                self._stop.wait(self._interval)
        except Exception:  # of whatever library or driver: the run does not need it
            return

    def since(self, begin: float) -> dict[str, float]:
        """The means of the samples since a time of time.monotonic, by keys of the log; without unknown values."""
        result = [asdict(sample.status) for sample in list(self._samples) if sample.at >= begin]
        means: dict[str, float] = {}
        for item in fields(Status):
            values = [status[item.name] for status in result if _is_finite(status[item.name])]
            if values:
                means[f"gpu_{item.name}"] = round(statistics.fmean(values), 3)
        return means

    def warning(self) -> str:
        """A sentence, once, if the device has been fully in use for SPAN seconds at a low power; else empty."""
        samples = list(self._samples)
        seconds = 0.0
        for sample in reversed(samples):
            if not held_back(sample.status):
                break
            seconds = samples[-1].at - sample.at
        if self._warned or seconds < SPAN:
            return ""
        self._warned = True
        status = samples[-1].status
        return (
            f"{self._info.name} is in use all the time, but takes {status.power:.0f} W of {status.power_limit:.0f} W: "
            "another program may be using it, or it is throttled or waits for memory"
        )


def held_back(status: Status) -> bool:
    """Whether a device is fully in use, but at less than LOW of its power limit: it is shared, or throttled."""
    readings = _is_finite(status.busy), _is_finite(status.power), _is_finite(status.power_limit)
    if not all(readings):
        return False
    assert status.busy is not None
    assert status.power is not None
    assert status.power_limit is not None
    return status.busy >= FULL and status.power < LOW * status.power_limit


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
