"""Two programs on the same work, taking turns: each in a process of its own, which waits while the other computes.

A side is a process that answers requests, one JSON object a line: `Side` asks, `answer` is its other end. `OurSide` is
what this package answers with; the PyTorch one is in scripts/bench_reference.py, since nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from wgpu_lora.errors import UserError

Record = dict[str, Any]
THREADS = ("LP_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class ReferenceWork:
    """A training step that both sides take: `rows` rows of `tokens` tokens, every token trained, all projections.

    base_dtype: what the side's own frozen weights are.
    """

    shape: str
    layers: int | None
    rows: int
    tokens: int
    rank: int
    base_dtype: str
    device: str | None = None


# -- asking ------------------------------------------------------------------------------------------------------------


class Side:
    """A child process that answers. Raises UserError with its last words where it ends instead."""

    def __init__(self, name: str, command: Sequence[str], threads: int | None = None):
        self.name = name
        environment = os.environ | ({} if threads is None else dict.fromkeys(THREADS, str(threads)))
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def ask(self, request: str, **values: Any) -> Record:
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):  # it has ended: reading says so too
            self._process.stdin.write(json.dumps({"request": request, **values}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended with {self._process.wait()}: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing."

    def close(self) -> None:
        """Lets the process end; one that does not is killed."""
        assert self._process.stdin
        assert self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def take_turns(sides: Mapping[str, Side], rounds: int, steps: int) -> dict[str, Record]:
    """Prepares every side, then has each take `steps` steps in every round, one side at a time.

    Returns:
        side -> what it said of itself, and `seconds` of all its steps; `not_run` and why, for a side that ended.
    """
    found: dict[str, Record] = {}

    def asked(name: str, request: str, **values: Any) -> Record | None:
        if "not_run" in found.get(name, {}):
            return None
        try:
            return sides[name].ask(request, **values)
        except UserError as error:
            found[name] = {"not_run": str(error)}
            return None

    for name in sides:
        prepared = asked(name, "prepare")
        if prepared is not None:
            found[name] = {**prepared, "seconds": []}
    for _ in range(rounds):
        for name in sides:
            took = asked(name, "steps", count=steps)
            if took is not None:
                found[name]["seconds"] += took["seconds"]
    for name in sides:
        memory = asked(name, "memory")
        if memory is not None:
            found[name] |= memory
    return found


def compared(found: Mapping[str, Record], tokens: int, reference: str) -> list[Record]:
    """A row for each side: median seconds, tokens/s, and its speed as a share of the reference side's."""
    speeds = {name: tokens / statistics.median(side["seconds"]) for name, side in found.items() if side.get("seconds")}
    rows = []
    for name, side in found.items():
        row = {"side": name, **side}
        if name in speeds:
            ratio = speeds[name] / speeds[reference] if reference in speeds else None
            row |= {"step_seconds": statistics.median(side["seconds"]), "tokens_per_second": speeds[name]}
            row |= {"ratio": ratio, "steps": len(side["seconds"])}
        rows.append(row)
    return rows


# -- answering ---------------------------------------------------------------------------------------------------------


def answer(side: Any) -> None:
    """Answers requests by the methods of `side` until there are no more. What else is printed goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        found = getattr(side, request.pop("request"))(**request)
        replies.write(json.dumps(found) + "\n")
        replies.flush()


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def forget_peak() -> None:
    """From now on, `peak_resident_bytes` is of what comes; where the system cannot do that, of all before too."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """The most memory that this process has held."""
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class OurSide:
    """This package on a piece of reference work: training steps, and serving the same model."""

    def __init__(self, work: ReferenceWork):
        from wgpu_lora.bench.step import TrainingStep, check_fits, chosen_model
        from wgpu_lora.gpu.device import Device

        self._after_imports = resident_bytes()
        self._work = work
        self._model = chosen_model(None, work.shape, work.layers, Device(work.device), work.base_dtype)

        def declared(model: Any) -> TrainingStep:
            return TrainingStep(model, work.rows, work.tokens, work.rank)

        check_fits(self._model, lambda model: declared(model).session.memory().peak)
        self._step = declared(self._model)

    def prepare(self) -> Record:
        """Loads, and takes the steps that compile. first_loss is of the untrained adapter."""
        from wgpu_lora.bench.step import WARMUP
        from wgpu_lora.train.output import environment

        device = self._model.device
        self._model.load_weights()
        forget_peak()
        device.peak_allocated = device.allocated
        self._step.allocate()
        loss = self._step.run()
        self._step.seconds(0, WARMUP - 1)
        return {"first_loss": loss, "environment": asdict(environment(device))}

    def steps(self, count: int) -> Record:
        return {"seconds": self._step.seconds(count)}

    def memory(self) -> Record:
        """planned, allocated: bytes on the device. resident: what the process grew by, a software device included."""
        planned = self._step.session.memory().training
        allocated = self._model.device.peak_allocated
        return {"planned": planned, "allocated": allocated, "resident": peak_resident_bytes() - self._after_imports}

    def serve(self, prompt: int, new: int, runs: int) -> Record:
        """Tokens/s of a prompt of `prompt` tokens and of `new` tokens after it, medians of `runs` after two more."""
        from wgpu_lora.bench.step import synthetic_rows
        from wgpu_lora.infer.generate import Generator

        (ids,) = synthetic_rows(1, prompt, self._model.config.vocab_size).tolist()
        prefill, decode = [], []
        with Generator(self._model, capacity=prompt + new, buckets=(prompt,)) as generator:
            for run in range(2 + runs):
                (made,) = generator.generate([ids], max_new_tokens=new)
                if run >= 2:
                    prefill.append(made.prefill_speed)
                    decode.append(made.decode_speed)
        return {"prefill": statistics.median(prefill), "decode": statistics.median(decode), "runs": runs}


def timed_steps(run: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds


def as_argument(work: ReferenceWork) -> str:
    """A piece of work as a child's command line takes it."""
    return json.dumps(asdict(work))


def from_argument(text: str) -> ReferenceWork:
    return ReferenceWork(**json.loads(text))
