"""The cases of each brick: name -> a function of the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from wgpu_lora.bench.brick import Context, Workload
from wgpu_lora.bench.bricks import adapter_bricks, layer_bricks, serving_bricks, training_bricks
from wgpu_lora.bench.contract import brick_names
from wgpu_lora.models.model_config import ModelConfig


def single_case(make: Callable[[Context], Workload]) -> Callable[[Context], Iterator[Workload]]:
    """The cases of a brick with only one."""
    return lambda context: iter((make(context),))


WORKLOADS: dict[str, Callable[[Context], Iterator[Workload]]] = {
    **{name: single_case(partial(layer_bricks.of_layer, name)) for name in layer_bricks.BRICKS},
    "loss": single_case(training_bricks.loss),
    "optimizer": single_case(training_bricks.optimizer),
    "quantize": single_case(training_bricks.quantize),
    "train_step": single_case(training_bricks.TrainStep),
    "multi_adapter_step": single_case(adapter_bricks.MultiAdapterStep),
    "multi_adapter_memory": single_case(adapter_bricks.MultiAdapterMemory),
    "device_speed": single_case(training_bricks.DeviceSpeed),
    "ttft": serving_bricks.ttft,
    "throughput": serving_bricks.throughput,
    "batch": serving_bricks.batch,
    "load": single_case(serving_bricks.Load),
}


def bricks_of(config: ModelConfig) -> list[str]:
    """All bricks but those of parts that the model does not have."""
    return [name for name in brick_names() if layer_bricks.has_brick(config, name)]
