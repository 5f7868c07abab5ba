"""What each brick runs: a contract's name -> its cases on a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wgpu_lora.bench.workload import Context, Workload
from wgpu_lora.bench.workloads import adapter_memory, adapters, layer, serving, training

WORKLOADS: dict[str, Callable[[Context], Iterator[Workload]]] = {
    **{name: layer.of_layer(name) for name in layer.BRICKS},
    "loss": training.loss,
    "optimizer": training.optimizer,
    "quantize": training.quantize,
    "train_step": training.train_step,
    "multi_adapter_step": adapters.multi_adapter_step,
    "multi_adapter_memory": adapter_memory.multi_adapter_memory,
    "ttft": serving.ttft,
    "throughput": serving.throughput,
    "batch": serving.batch,
    "load": serving.load,
}
