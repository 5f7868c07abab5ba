"""Jobs that measure: `bench`, bricks against their contracts, with the device's ceilings, each record an event
`measured`; `bench-training`; and `speed`, the brick `device_speed` without its checks and the ceilings."""

from __future__ import annotations

import os
from typing import Any

from wgpu_lora.bench.brick import Context
from wgpu_lora.bench.brick_run import bench
from wgpu_lora.bench.bricks import bricks_of
from wgpu_lora.bench.bricks.training_bricks import DeviceSpeed
from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
from wgpu_lora.bench.training_runs import Work, run_training
from wgpu_lora.bench.training_step import training_options
from wgpu_lora.cluster.worker.job_process import EventWriter, JobResult
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import Ledger, claim, device_key
from wgpu_lora.gpu.tuner import tuning_enabled
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.train.run.stop_reasons import FINISHED


def run_bench(
    port: EventWriter,
    *,
    bricks: list[str] | None = None,
    shape: str | None = None,
    model: str | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    rank: int | None = None,
    base_dtype: str | None = None,
    compute_dtype: str | None = None,
    tune: bool = True,
    device: str | int | None = None,
    time_limit: float | None = None,
) -> JobResult:
    """bricks: names, all that the model has if omitted. The exit code is 1 if a contract is broken."""
    if shape and model:
        raise UserError("'shape' and 'model' are both given: leave one of them out.")
    names = brick_names() if bricks is None else bricks
    brick_options = {option for name in names for option in load_contract(name).options}
    sizes: dict[str, Any] = {"tokens": tokens, "rank": rank, "base_dtype": base_dtype, "compute_dtype": compute_dtype}
    options = {name: value for name, value in {**sizes, "layers": layers}.items() if value is not None}
    idle = sorted((options.keys() & set(OPTIONS)) - brick_options)
    if idle:
        raise UserError(f"'{idle[0]}' does nothing with the bricks {', '.join(names)}: leave it out.")
    if shape:
        shape_config(shape, layers)
    opened = Device(device)
    options.pop("layers", None)
    context = Context.of(opened, shape, model, layers, tune=tuning_enabled(tune), **options)
    _, broken = bench(context, bricks_of(context.config) if bricks is None else names, time_limit, port)
    return JobResult({"broken": broken}, int(bool(broken)), "; ".join(broken))


OWN = ("port", "where", "repeat", "recipe", "shape", "layers")  # parameters that are not options of a training run


def run_bench_training(
    port: EventWriter,
    *,
    where: str,
    repeat: int = 2,
    recipe: str | None = None,
    shape: str | None = None,
    layers: int | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    data: str | None = None,
    model: str | None = None,
    rank: int | None = None,
    base_dtype: str | None = None,
    compute_dtype: str | None = None,
    tune: bool | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    device: str | int | None = None,
) -> JobResult:
    """The options are those of the command `bench training`. The exit code is 1 if a run did not finish."""
    options: dict[str, Any] = {name: value for name, value in locals().items() if name not in OWN}
    result = run_training(Work(recipe, shape, layers, training_options(options), where), repeat, port)
    reasons = [run["stop_reason"] for run in result["runs"] if run["stop_reason"] not in FINISHED]
    return JobResult(result["summary"], int(bool(reasons)), f"a run ended: {reasons[0]}" if reasons else "")


TURNS = 2  # of a measurement of speed, at least


def run_speed(
    port: EventWriter,
    *,
    device: str | int | None = None,
    shape: str = "tiny-qwen3",
    layers: int = 2,
    tokens: int = 384,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """The figures of the brick, and `beside`: who else held memory of the device before or after. The shape is the same
    for all devices, so that their figures can be compared."""
    context = Context.of(Device(device), shape, None, layers, tokens=tokens)
    ledger = Ledger(device_key(context.device.info))
    before, workload = _other_owners(ledger), DeviceSpeed(context)
    with claim(context.device, workload.nbytes(), "measuring the device's speed"):
        try:
            workload.open()
            figures = workload.measure(TURNS, seconds)
        finally:
            workload.close()
            context.close()
    return {**figures, "beside": list(dict.fromkeys([*before, *_other_owners(ledger)]))}


def _other_owners(ledger: Ledger) -> list[str]:
    entries = [entry for entry in ledger.read() if entry.is_of_this_host and entry.holds and not entry.dead]
    return [entry.owner for entry in entries if entry.pid != os.getpid()]
