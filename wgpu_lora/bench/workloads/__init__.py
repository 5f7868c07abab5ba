"""The cases of each brick: name -> a function of the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from wgpu_lora.bench.contract import brick_names
from wgpu_lora.bench.workload import Context, Workload
from wgpu_lora.bench.workloads import adapters, layer, serving, speed, training
from wgpu_lora.models.config import ModelConfig


def one(make: Callable[[Context], Workload]) -> Callable[[Context], Iterator[Workload]]:
    """The cases of a brick with only one."""
    return lambda context: iter((make(context),))


WORKLOADS: dict[str, Callable[[Context], Iterator[Workload]]] = {
    **{name: one(partial(layer.of_layer, name)) for name in layer.BRICKS},
    "loss": one(training.loss),
    "optimizer": one(training.optimizer),
    "quantize": one(training.quantize),
    "train_step": one(training.TrainStep),
    "multi_adapter_step": one(adapters.MultiAdapterStep),
    "multi_adapter_memory": one(adapters.MultiAdapterMemory),
    "device_speed": one(speed.DeviceSpeed),
    "ttft": serving.ttft,
    "throughput": serving.throughput,
    "batch": serving.batch,
    "load": one(serving.Load),
}


def bricks_of(config: ModelConfig) -> list[str]:
    """All bricks but those of parts that the model does not have."""
    return [name for name in brick_names() if layer.has_brick(config, name)]
