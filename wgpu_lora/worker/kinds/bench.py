"""The job `bench`: bricks against their contracts, with the device's ceilings; each record is an event `measured`."""

from __future__ import annotations

from typing import Any

from wgpu_lora.bench.contract import OPTIONS, brick_names, load_contract
from wgpu_lora.bench.run import bench
from wgpu_lora.bench.workload import Context
from wgpu_lora.bench.workloads import bricks_of
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tuner import wanted
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.worker.child import Ended, Port


def run(
    port: Port,
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
) -> Ended:
    """bricks: names, all that the model has if omitted. The exit code is 1 if a contract is broken."""
    if shape and model:
        raise UserError("'shape' and 'model' are both given: leave one of them out.")
    names = brick_names() if bricks is None else bricks
    taken = {option for name in names for option in load_contract(name).options}
    sizes: dict[str, Any] = {"tokens": tokens, "rank": rank, "base_dtype": base_dtype, "compute_dtype": compute_dtype}
    given = {name: value for name, value in {**sizes, "layers": layers}.items() if value is not None}
    idle = sorted((given.keys() & set(OPTIONS)) - taken)
    if idle:
        raise UserError(f"'{idle[0]}' does nothing with the bricks {', '.join(names)}: leave it out.")
    if shape:
        shape_config(shape, layers)
    opened = Device(device)
    given.pop("layers", None)
    context = Context.of(opened, shape, model, layers, tune=wanted(tune), **given)
    _, broken = bench(context, bricks_of(context.config) if bricks is None else names, time_limit, port)
    return Ended({"broken": broken}, int(bool(broken)), "; ".join(broken))
