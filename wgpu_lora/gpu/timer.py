"""Times programs with the device's timestamp queries, or with the host's clock if the device has none."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import raise_device_lost
from wgpu_lora.gpu.program import Program

QUERIES = 2048  # timestamps per query set; WebGPU allows 4096


def clock_of(device: Device) -> str:
    """`timestamps`, or `host` on a device without timestamp queries."""
    return "timestamps" if "timestamp-query" in device.features else "host"


class Timer:
    """Times built programs.

    Attributes:
        clock: `timestamps` or `host`. The host's clock includes the wait for the device.
    """

    def __init__(self, device: Device):
        self.device = device
        self.clock = clock_of(device)
        if self.clock == "timestamps":
            self._period = device.webgpu.timestamp_period(device.raw)
            uses = device.webgpu.api.BufferUsage
            usage = uses.QUERY_RESOLVE | uses.COPY_SRC
            with raise_device_lost(device.info.name):
                self._set = device.raw.create_query_set(type="timestamp", count=QUERIES)
                self._resolved = device.raw.create_buffer(size=8 * QUERIES, usage=usage)

    def run(self, program: Program) -> float:
        """Runs the program once and returns the total time of its compute passes, in seconds."""
        return sum(self._timed(program, program.submits()))

    def dispatch_seconds(self, program: Program) -> list[float]:
        """Runs the program once with a compute pass per dispatch and returns the time of each, in seconds."""
        return self._timed(program, [(i, i + 1) for i in range(len(program.dispatches))])

    def _timed(self, program: Program, spans: list[tuple[int, int]]) -> list[float]:
        if self.clock == "host":
            return [self._by_host(program, start, stop) for start, stop in spans]
        seconds: list[float] = []
        for first in range(0, len(spans), QUERIES // 2):
            seconds += self._by_timestamps(program, spans[first : first + QUERIES // 2])
        return seconds

    def _by_host(self, program: Program, start: int, stop: int) -> float:
        begin = time.perf_counter()
        program.submit(start, stop)
        self.device.wait()
        return time.perf_counter() - begin

    def _by_timestamps(self, program: Program, spans: list[tuple[int, int]]) -> list[float]:
        for i, (start, stop) in enumerate(spans):
            writes: dict[str, Any] = {
                "query_set": self._set,
                "beginning_of_pass_write_index": 2 * i,
                "end_of_pass_write_index": 2 * i + 1,
            }
            program.submit(start, stop, writes)
            if stop - start > 1:
                self.device.wait()  # as `Program.run` does after each submit
        with raise_device_lost(self.device.info.name):
            encoder = self.device.raw.create_command_encoder()
            encoder.resolve_query_set(self._set, 0, 2 * len(spans), self._resolved, 0)
            self.device.raw.queue.submit([encoder.finish()])
            data = self.device.raw.queue.read_buffer(self._resolved, 0, 16 * len(spans))
        ticks = np.frombuffer(data, np.uint64).reshape(-1, 2).astype(np.int64)
        return [float(t) * self._period for t in ticks[:, 1] - ticks[:, 0]]

    def free(self) -> None:
        if self.clock == "timestamps":
            self._set.destroy()
            self._resolved.destroy()
