"""The texts that a device gets for the kernels of a shape, each with a heading that says how it is called."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from wgpu_lora.bench.training_step import TrainingStep, adapter_set
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.infer.engine_programs import EngineLimits, Programs
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.ops.attention.attention import BLOCK
from wgpu_lora.train.options.training_arguments import TrainingArguments

TOKENS = 512
WIDTH = 100  # of a heading


@dataclass(frozen=True)
class KernelCall:
    """A call with a compute pipeline of its own, and the programs that have it. tilings: that its kernel offers."""

    dispatch: Dispatch
    tilings: Sequence[Tiling]
    programs: list[str]


def kernel_calls(shape: str, base_dtype: str, device: Device) -> list[KernelCall]:
    """The calls of a training step, a prompt and decoding for one layer of a named shape, by the kernels' names, the
    largest grid first. Nothing is allocated.

    Raises:
        UserError: the shape or the base format is not known.
    """
    result: dict[object, KernelCall] = {}
    for name, program in _programs(synthetic_model(shape_config(shape, 1), device, base_dtype)):
        for dispatch in sorted(program.dispatches, key=lambda item: -prod(item.groups)):
            tilings = dispatch.tilings(device.capabilities)
            call = result.setdefault(dispatch.shader, KernelCall(dispatch, tilings, []))
            if name not in call.programs:
                call.programs.append(name)
    return sorted(result.values(), key=lambda call: (call.dispatch.kernel.name, -prod(call.dispatch.groups)))


def _programs(model: LoadedModel) -> Iterator[tuple[str, Program]]:
    args = TrainingArguments(per_device_train_batch_size=1, max_length=TOKENS)
    for program in TrainingStep(model, args).session.programs():
        yield "training", program
    adapters = adapter_set(model.config, model.device, args.lora_r)
    limits = EngineLimits(1, 2 * TOKENS, cdiv(2 * TOKENS, BLOCK), (TOKENS,))
    generation = Programs(model.device, model.decoder, adapters, limits)
    yield "prefill", generation.prefill[TOKENS].program
    head = generation.heads[1]
    yield from (
        ("decode", decode_program)
        for decode_program in (generation.decode[1].program, head.logits, head.sample, generation.shared)
    )


def kernel_text(dispatch: Dispatch, tilings: Sequence[Tiling]) -> str:
    """The WGSL of a call under a heading of formula, bindings, constants, tiling and grid.

    tilings: that its kernel offers for the call.
    """
    kernel, c = dispatch.kernel, dispatch.constants
    text = kernel.source(dispatch.present, c, dispatch.tiling)
    bindings = [f"{i} {name} ({kernel.bindings[name]})" for i, name in enumerate(dispatch.present)]
    constants = ", ".join(f"{name} {value}" for name, value in c.items() if value not in (0, False))
    alternatives = ", ".join(tiling.label for tiling in tilings if tiling != dispatch.tiling)
    heading = {
        "kernel": f"{kernel.name}, {text.count(chr(10)) + 1} lines from shaders/{kernel.file}",
        "formula": " ".join((inspect.getdoc(kernel.reference) or "").split()),
        "bindings": ", ".join(bindings) + (f", {len(bindings)} dims (uniform)" if kernel.dims else ""),
        "constants": constants or "none",
        "tiling": dispatch.tiling.label + (f"; also {alternatives}" if alternatives else ""),
        "grid": " x ".join(map(str, dispatch.groups)) + f" workgroups of {dispatch.tiling.lanes}",
    }
    lines = [
        textwrap.fill(value, WIDTH, initial_indent=f"// {name:10}", subsequent_indent=f"// {'':10}")
        for name, value in heading.items()
    ]
    return "\n".join(lines) + "\n\n" + text
