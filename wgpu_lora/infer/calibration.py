"""The mean squares of the inputs of all linear layers on calibration rows, by which quantisation weighs errors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from wgpu_lora.data import Row, pack
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.models.batch_inputs import Segment, StepInputs, Tables
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.layer_context import LayerWeights
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.ops.linear.linear import Linear, MeasuredMatrix
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import read


@with_option_advice("max_length")
def input_moments(
    model: LoadedModel, rows: Sequence[Row], batch_tokens: int = 512, events: Events = SILENT
) -> dict[str, np.ndarray]:
    """The mean square of each input [in] of every linear layer, by the name of its matrix; loads the model if needed.

    Args:
        rows: prompts and answers both count, whatever their labels.
        batch_tokens: tokens computed at a time; more if a single row is longer.
        events: receives `loading` and `evaluating`.

    Raises:
        UserError: the device has no room.
    """
    lengths = [len(row.input_ids) for row in rows]
    tokens = max([*lengths, min(batch_tokens, sum(lengths))])
    count = persistent((1,), "u32", "workspace", "calibration rows")
    squares: dict[str, Tensor] = {}
    decoder = _observed(model.decoder, count, squares)
    inputs = StepInputs.declare(model.config.row_inputs(), tokens, 1, Tables.declare(model.config.tables(), tokens))
    program = Program(model.device, "calibration")
    decoder.hidden(Recorder(program), inputs, {})
    program.prune()
    plan, device = program.plan(), model.device
    storages = (program.persistent_storages() | inputs.storages()) - model.decoder.storages()
    arena, stack = Arena(device), ExitStack()
    try:
        stack.enter_context(
            claim(device, model.bytes_to_load() + missing_bytes(storages) + sum(plan.sizes), "calibrating")
        )
        stack.enter_context(verdicts_of(device).reported_to(events))
        check_tilings(device, [program])
        model.load_weights(events)
        allocate(device, storages)
        arena = Arena(device, plan.sizes)
        program.build(arena)
        inputs.tables.upload(device)
        for tensor in squares.values():
            device.write(tensor.storage.buffer, np.zeros(tensor.size, np.float32))
        completed = 0
        for together in pack(lengths, range(len(rows)), tokens):
            inputs.upload(device, [Segment(rows[i].input_ids, None, None) for i in together])
            size = sum(lengths[i] for i in together)
            device.write(count.storage.buffer, np.array([size], np.uint32))
            program.run()
            completed += len(together)
            events.evaluating(Evaluating(completed, len(rows)))
        return {name: read(device, tensor) / sum(lengths) for name, tensor in squares.items()}
    finally:
        arena.free()
        release(device, storages)
        stack.close()


def _observed(decoder: Decoder, count: Tensor, squares: dict[str, Tensor]) -> Decoder:
    """The same model, whose matrices also sum up the squares of their inputs, by name."""

    def linear(name: str, item: Linear[Any]) -> Linear[Any]:
        out, size_in = item.weight.out_features, item.weight.in_features
        squares[name] = persistent((size_in,), "f32", "workspace", f"{name} squares")
        return replace(item, weight=MeasuredMatrix(out, size_in, item.weight, count, squares[name]))

    def layer(weights: LayerWeights) -> LayerWeights:
        result = {module: linear(f"{weights.path}.{module}.weight", item) for module, item in weights.linears.items()}
        return replace(weights, linears=result)

    return replace(decoder, layers=tuple(map(layer, decoder.layers)))
