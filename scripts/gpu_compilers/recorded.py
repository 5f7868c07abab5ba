"""The compute pipelines of one layer of a named shape: of training steps, a prefill, a decoding step and a teacher."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wgpu_lora.bench.step import TrainingStep, adapter_set
from wgpu_lora.distill.teacher import Kept, Teacher
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.infer.step import Programs
from wgpu_lora.models.blocks.transformer import Transformer
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.inputs import Tables
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.models.synthetic import synthetic_model
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.objectives.kd import KD
from wgpu_lora.train.session import Session
from wgpu_lora.weights.registry import DEFAULT_FORMAT

CACHED = 1024  # tokens of the cache
HEADS_OF = "llama-3.2-1b"  # whose attention is recorded with other sizes of heads


@dataclass(frozen=True)
class Wanted:
    """What to compile: shapes by name, attention of these sizes of heads, and for a training step its options.

    candidates: whether to compile every tiling that the tuner may choose, or only the default.
    kernels: parts of names, () for all. tiling: is compiled beside a matching kernel's own, if it is tuned.
    """

    shapes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    tokens: int = 512
    rank: int = 16
    compute_dtype: str = "f32"
    candidates: bool = True
    kernels: tuple[str, ...] = ()
    tiling: dict[str, Any] | None = None
    activation_dtype: str = "f32"
    base_dtype: str = DEFAULT_FORMAT

    @classmethod
    def from_json(cls, text: str) -> Wanted:
        given: dict[str, Any] = json.loads(text)
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**given)


@dataclass
class Call:
    """A compute pipeline, and what uses it. default: whether it is used where nothing was tuned."""

    kernel: Kernel
    present: tuple[str, ...]
    constants: dict[str, Any]
    tiling: Tiling
    default: bool
    used_by: dict[str, list[str]] = field(default_factory=dict)  # shape -> of training, distillation, prefill and so on

    def to_json(self) -> dict[str, Any]:
        compiled_in = self.kernel.compiled_in(self.constants)
        return {
            "kernel": self.kernel.name,
            "constants": {name: value for name, value in compiled_in.items() if not isinstance(value, float)},
            "bindings": list(self.present),
            "tiling": self.tiling.to_json(),
            "default": self.default,
            "used_by": self.used_by,
        }


def calls(wanted: Wanted, device: Device) -> list[Call]:
    """All different compute pipelines, each once. Nothing is allocated on the device."""
    found: dict[Any, Call] = {}
    for shape, step, program in _programs(wanted, device):
        for dispatch in program.dispatches:
            for tiling in _tilings(dispatch, device, wanted):
                compiled_in = dispatch.kernel.compiled_in(dispatch.constants)
                key = dispatch.kernel.name, dispatch.present, tuple(sorted(compiled_in.items())), tiling
                default = tiling == dispatch.tiling
                of = dispatch.kernel, dispatch.present, dispatch.constants, tiling, default
                call = found.setdefault(key, Call(*of))
                call.default = call.default or default
                steps = call.used_by.setdefault(shape, [])
                if step not in steps:
                    steps.append(step)
    return list(found.values())


def _tilings(dispatch: Dispatch, device: Device, wanted: Wanted) -> list[Tiling]:
    kernel = dispatch.kernel
    if wanted.kernels and not any(part in kernel.name for part in wanted.kernels):
        return []
    offered: Sequence[Tiling] = [dispatch.tiling]
    if kernel.tuning and not dispatch.fixed:
        if wanted.candidates:
            offered = kernel.tilings(device.capabilities, dispatch.constants)
        if wanted.tiling:
            offered = [*offered, Tiling.from_json(wanted.tiling)]
    return list(offered)


def _programs(wanted: Wanted, device: Device) -> Iterator[tuple[str, str, Program]]:
    for shape in wanted.shapes:
        for step, program in _steps(shape_config(shape, 1), wanted, device):
            yield shape, step, program
    for dim in wanted.head_dims:
        config = shape_config(HEADS_OF, 1)
        assert isinstance(config, Transformer)
        config = replace(config, head_dim=dim)
        for step, program in _steps(config, wanted, device):
            program.dispatches = [one for one in program.dispatches if one.kernel.name.startswith("attention_")]
            yield f"head_dim {dim}", step, program


def _steps(config: ModelConfig, wanted: Wanted, device: Device) -> Iterator[tuple[str, Program]]:
    model = synthetic_model(config, device, wanted.base_dtype)
    args = TrainingArguments(
        per_device_train_batch_size=1,
        max_length=wanted.tokens,
        lora_r=wanted.rank,
        compute_dtype=wanted.compute_dtype,
        activation_dtype=wanted.activation_dtype,
    )
    for program in TrainingStep(model, args).session.programs():
        yield "training", program
    adapters, kd = adapter_set(config, device, wanted.rank), KD(teacher="demo", temperature=2.0, hard_full_weight=0.5)
    distilling = Session(model, adapters, [wanted.tokens], positions=wanted.tokens, objectives=[kd])
    for batch in distilling.steps.values():
        yield "distillation", batch.program
    programs = Programs.record(device, model.decoder, adapters, 1, CACHED, (wanted.tokens,))
    for step in programs.prefill:
        yield "prefill", step.program
    for program in (programs.decode.program, programs.head, programs.kept):
        yield "decode", program
    tables = Tables.declare(config.tables(), wanted.tokens)
    for program in Teacher(model, None, (wanted.tokens,), tables, Kept(), wanted.compute_dtype).programs():
        yield "teacher", program
