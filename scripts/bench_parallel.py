"""Measure data-parallel training on this machine: seconds per step by number of devices, and what the exchange costs.

    LP_NUM_THREADS=1 .venv/bin/python -m scripts.bench_parallel --devices 1,2 --pin

Each device is the same one, opened by a process of its own. With --pin and LP_NUM_THREADS=1, each process of a software
driver has a core of its own, as a GPU has. Rounds of the numbers of devices take turns, so that what else the machine
does meets all of them; the best round and the median of all steps are printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from pathlib import Path

from wgpu_lora.cluster.parallel.process import LocalHelper
from wgpu_lora.cluster.parallel.relay import Relay

from wgpu_lora.assets import DEMO_TRAIN
from wgpu_lora.train.data_parallel import gradient_messages
from wgpu_lora.train.data_parallel.leader import DataParallelLeader, StepPart
from wgpu_lora.train.data_parallel.remote_worker import RemoteWorker
from wgpu_lora.train.finetune import FinetuneJob, prepare_job
from wgpu_lora.train.options.training_arguments import from_values
from wgpu_lora.train.session.optimizer_update import SlotUpdate

WARM = 6  # steps of a round that are not timed: kernels are compiled, and shares settle


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """On one core, as are processes that are started meanwhile."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class PinnedHelper(LocalHelper):
    """A helper on a core of its own."""

    core: int | None = None

    def ready(self) -> bytes:
        with pinned(self.core):
            return super().ready()


class Measured:
    """A leader with its helpers, ready to take steps."""

    def __init__(self, devices: int, options: dict[str, object], pin: bool, directory: Path):
        helpers = [PinnedHelper(options, lambda: 0) for _ in range(devices - 1)]
        for core, helper in enumerate(helpers, 1):
            helper.core = core if pin else None
        self.relay = Relay(helpers)
        links = [Client(link) for link in self.relay.links]
        from wgpu_lora.chain.chain_run import code_digest

        self.sharing = DataParallelLeader(links, code_digest())
        self.pin = pin
        with pinned(0 if pin else None):
            self.job: FinetuneJob = prepare_job(
                from_values({**options, "output": str(directory)}, "the benchmark"), sharing=self.sharing
            )
            self.job.session.allocate()
            self.job.run.prepare_directory()
            self.job.run.place(self.job.session)
        until = time.monotonic() + 600
        while len(self.sharing.ready()) < devices - 1 and time.monotonic() < until:
            time.sleep(0.1)
        self._steps = self.job.run.stream.steps()
        self._count = 0

    def step(self) -> float:
        """Seconds of the next step."""
        session, run = self.job.session, self.job.run
        step = next(self._steps)
        self._count += 1
        begin = time.perf_counter()
        self.sharing.accumulate(session, run, step)
        session.optimizer.apply(session.device, {0: SlotUpdate(self._count, 1e-4, run.args)})
        return time.perf_counter() - begin

    def exchanged(self) -> tuple[float, int, int]:
        """Seconds of an exchange in which a helper has nothing to compute, and bytes of question and answer."""
        session, run = self.job.session, self.job.run
        shared = StepPart(session, run, next(self._steps))
        helper: RemoteWorker = self.sharing._helpers[1]
        begin = time.perf_counter()
        question = gradient_messages.message(shared.question((0, 0)), gradient_messages.parameters(session))
        helper.ask(question, 0)
        answer = helper.answer(60)
        assert answer
        gradient_messages.write_gradients(
            session, gradient_messages.sum_gradients(gradient_messages.read_gradients(session), [answer.arrays])
        )
        seconds = time.perf_counter() - begin
        gradient_messages.clear_gradients(session)
        return seconds, len(question), sum(values.nbytes for values in answer.arrays.values())

    def close(self) -> None:
        self.sharing.close()
        self.relay.close()
        self.job.session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="1,2", help="numbers of devices to compare, with commas")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default=str(DEMO_TRAIN))
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--pin", action="store_true", help="a core for each process")
    given = parser.parse_args()
    os.environ["WGPU_LORA_NO_RUN_LOG"] = "1"
    options = {
        "model": given.model, "data": given.data, "lora_r": given.rank, "packing": False, "tune": False,
        "per_device_train_batch_size": given.rows, "gradient_accumulation_steps": 1, "max_steps": 1000,
    }  # fmt: skip
    counts = [int(count) for count in given.devices.split(",")]
    with tempfile.TemporaryDirectory(prefix="wgl-") as place:
        measured = {count: Measured(count, options, given.pin, Path(place, str(count))) for count in counts}
        try:
            report(measured, given.steps, given.rounds)
        finally:
            for one in measured.values():
                one.close()


def report(measured: dict[int, Measured], steps: int, rounds: int) -> None:
    seconds: dict[int, list[list[float]]] = {count: [] for count in measured}
    for number, (count, one) in itertools.product(range(rounds), measured.items()):
        with pinned(0 if one.pin else None):
            for _ in range(0 if number else WARM):
                one.step()
            seconds[count].append([one.step() for _ in range(steps)])
    first = next(iter(measured))
    for count in seconds:
        best = {c: min(statistics.median(one) for one in seconds[c]) for c in (first, count)}
        every = {c: statistics.median(itertools.chain(*seconds[c])) for c in (first, count)}
        print(
            f"{count} devices: best round {best[count]:.3f} s/step ({best[first] / best[count]:.2f}x), "
            f"all {every[count]:.3f} s/step ({every[first] / every[count]:.2f}x), {measured[count].sharing.facts()}"
        )
        if count > 1:
            exchanges = [measured[count].exchanged() for _ in range(10)]
            took, asked, answered = (statistics.median(values) for values in zip(*exchanges, strict=True))
            print(f"  exchange with one helper: {1000 * took:.1f} ms, {asked:,.0f} and {answered:,.0f} bytes")


if __name__ == "__main__":
    main()
