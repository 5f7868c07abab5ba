"""The programs of one layer of a model whose kernels are compiled, by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from scripts.gpu_compilers.wanted import Wanted
from wgpu_lora.bench.training_step import TrainingStep, adapter_set
from wgpu_lora.distill.teacher import Teacher, TopK
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.infer.generation_programs import Programs
from wgpu_lora.models.batch_inputs import Tables
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.quant_constants import QuantConstants, quant_constants
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.ops.linear import input_squares
from wgpu_lora.train.objectives.kd import KD
from wgpu_lora.train.optimizers import OPTIMIZERS, optimizer_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session.optimizer_update import Optimizer
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.lowbit.lowbit import LowBitWeight
from wgpu_lora.weights.lowbit.lowbit_layout import scale_count, table_size
from wgpu_lora.weights.lowbit.lowbit_packing import record_packing

CACHED = 1024  # tokens of the cache


def steps_of(config: ModelConfig, wanted: Wanted, device: Device) -> Iterator[tuple[str, Program]]:
    """(what it is for, program) of each. Nothing is allocated."""
    model = synthetic_model(config, device, wanted.base_dtype)
    for step, record in STEPS.items():
        for program in record(model, wanted):
            yield step, program


def _arguments(wanted: Wanted) -> TrainingArguments:
    return TrainingArguments(
        per_device_train_batch_size=1,
        max_length=wanted.tokens,
        lora_r=wanted.rank,
        compute_dtype=wanted.compute_dtype,
        activation_dtype=wanted.activation_dtype,
        offload_activations=True,  # the kernel that copies, too
    )


def _training(model: LoadedModel, wanted: Wanted) -> list[Program]:
    return TrainingStep(model, _arguments(wanted)).session.programs()


def _dora(model: LoadedModel, wanted: Wanted) -> list[Program]:
    return TrainingStep(model, replace(_arguments(wanted), use_dora=True, lora_dropout=0.1)).session.programs()


def _distillation(model: LoadedModel, wanted: Wanted) -> list[Program]:
    objective = KD(teacher="demo", temperature=2.0, hard_full_weight=0.5)
    adapters = adapter_set(model.config, model.device, wanted.rank)
    session = Session(model, adapters, [wanted.tokens], positions=wanted.tokens, objectives=[objective])
    return [batch.program for batch in session.steps.values()]


def _constants(model: LoadedModel, wanted: Wanted) -> list[Program]:
    """Training of the base's constants, if it has any."""
    found = {name.removesuffix(".weight"): quant_constants(weight) for name, weight in model.decoder.matrices()}
    weights = {module: weight for module, weight in found.items() if weight}
    if not weights:
        return []
    constants = QuantConstants.declare(weights, model.device.max_binding)
    return Session(model, constants, [wanted.tokens], positions=wanted.tokens).programs()


def _loading(model: LoadedModel, wanted: Wanted) -> list[Program]:
    """The quantisation of low-bit matrices, with calibration."""
    weights = [weight for weight in model.decoder.weights() if isinstance(weight, LowBitWeight)]
    if not weights:
        return []
    rows, cols = wanted.tokens, weights[0].in_features
    calibration = Program(model.device, "calibration")
    x, squares = (persistent(shape, "f32", "workspace", "inputs") for shape in ((rows, cols), (cols,)))
    count = persistent((1,), "u32", "workspace", "count")
    calibration.dispatch(input_squares, x, count, squares, rows=rows, first=0, cols=cols)
    return [calibration, *(_fit(weight, model.device) for weight in weights)]


def _fit(weight: LowBitWeight, device: Device) -> Program:
    program, (out, size_in) = Program(device, "pack"), weight.shape
    bits, group = weight.scheme.bits, weight.scheme.group

    def scratch(*shape: int) -> Tensor | None:
        return persistent(shape, "f32", "workspace", "scratch") if all(shape) else None

    w, importance = scratch(out, size_in), scratch(size_in)
    assert w
    constants = scratch(out, table_size(bits)), scratch(out, scale_count(size_in, bits, group))
    record_packing(program, w, weight.codes, *constants, importance, first=0, out=out, bits=bits, group=group)
    return program


def _generation(model: LoadedModel, wanted: Wanted) -> Programs:
    adapters = adapter_set(model.config, model.device, wanted.rank)
    return Programs.record(model.device, model.decoder, adapters, 1, CACHED, (wanted.tokens,))


def _prefill(model: LoadedModel, wanted: Wanted) -> list[Program]:
    return [step.program for step in _generation(model, wanted).prefill]


def _decode(model: LoadedModel, wanted: Wanted) -> list[Program]:
    programs = _generation(model, wanted)
    return [programs.decode.program, programs.head, programs.kept]


def _teacher(model: LoadedModel, wanted: Wanted) -> list[Program]:
    tables = Tables.declare(model.config.tables(), wanted.tokens)
    return list(Teacher(model, None, (wanted.tokens,), tables, TopK(), wanted.compute_dtype).programs())


def _updates(model: LoadedModel, wanted: Wanted) -> list[Program]:
    """Of the other optimizers, for the first shape only: sizes make no difference to them."""
    if not wanted.shapes or model.config != shape_config(wanted.shapes[0], 1):
        return []
    adapters, loss = adapter_set(model.config, model.device, wanted.rank), persistent((1,), "f32", "optimizer", "loss")
    own = {"sgd": "momentum=0.9"}
    chosen = [TrainingArguments(optim=name, optim_args=own.get(name)) for name in OPTIMIZERS if name != "adamw"]
    return [Optimizer(model.device, adapters, loss, optimizer_of(args)).program for args in chosen]


STEPS: dict[str, Callable[[LoadedModel, Wanted], list[Program]]] = {
    "loading": _loading,
    "training": _training,
    "DoRA": _dora,
    "other optimizers": _updates,
    "quant-scales": _constants,
    "distillation": _distillation,
    "prefill": _prefill,
    "decode": _decode,
    "teacher": _teacher,
}
