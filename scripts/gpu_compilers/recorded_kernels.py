"""The compute pipelines of one layer of a named shape, each once, by the programs that they are for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from wgpu_lora.bench.training_step import TrainingStep, adapter_set
from wgpu_lora.gpu.backends import WGPU
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_list import MAPPABLE
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import Kernel, cdiv
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.infer.engine_programs import EngineLimits, Programs
from wgpu_lora.models.batch_inputs import Tables
from wgpu_lora.models.blocks.transformer_block import Transformer
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.quant_constants import QuantConstants
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.ops.attention.attention import BLOCK
from wgpu_lora.ops.linear.linear import input_squares
from wgpu_lora.ops.matmul.matmul_tuning import block
from wgpu_lora.ops.matmul.matrix_stack import sizes
from wgpu_lora.train.distill.teacher import Teacher, TopK
from wgpu_lora.train.objectives.kd import KD
from wgpu_lora.train.optimizers import OPTIMIZERS, optimizer_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session.optimizer_update import Optimizer
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT
from wgpu_lora.weights.lowbit.lowbit import LowBitWeight
from wgpu_lora.weights.lowbit.lowbit_layout import scale_count, table_size
from wgpu_lora.weights.lowbit.lowbit_packing import record_packing

CACHED = 1024  # tokens of the cache
HEADS_OF = "llama-3.2-1b"  # whose attention is recorded with other sizes of heads


@dataclass(frozen=True)
class Selection:
    """What to compile: shapes by name, attention of these sizes of heads, and for a training step its options.

    candidates: whether to compile every tiling that the tuner may choose, or only the default.
    kernels: parts of names, () for all. tiling: is compiled beside a matching kernel's own, if it is tuned.
    backend: the WebGPU implementation; only Dawn has matrix units.
    batch: rows of a training step, which then is recorded alone, with all layers, and whose work is counted; 0 for a
        layer of all programs.
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
    backend: str = WGPU
    batch: int = 0


@dataclass(frozen=True)
class Work:
    """What a dispatch of a training step does in one of its tilings.

    number: the same for all dispatches and tilings of equal calls.
    multiply_adds: of matrices, in what the call returns. issued: the same with those past the edges of its tiles.
    nbytes: read and written if each binding passes once. threads: of all workgroups.
    """

    number: int
    default: bool
    multiply_adds: int
    issued: float
    nbytes: int
    threads: int


@dataclass
class Call:
    """A compute pipeline, and what uses it. default: whether it is used where nothing was tuned."""

    kernel: Kernel
    present: tuple[str, ...]
    constants: dict[str, Any]
    tiling: Tiling
    default: bool
    used_by: dict[str, list[str]] = field(default_factory=dict)  # shape -> of training, distillation, prefill and so on
    work: Counter[Work] = field(default_factory=Counter)  # dispatches

    def to_json(self) -> dict[str, Any]:
        compiled_in = self.kernel.compiled_in(self.constants)
        return {
            "kernel": self.kernel.name,
            "constants": {name: value for name, value in compiled_in.items() if not isinstance(value, float)},
            "bindings": list(self.present),
            "tiling": self.tiling.to_json(),
            "default": self.default,
            "used_by": self.used_by,
            **({"work": [[asdict(work), count] for work, count in self.work.items()]} if self.work else {}),
        }


def calls(selection: Selection, device: Device) -> list[Call]:
    """All different compute pipelines, each once. Nothing is allocated on the device."""
    result: dict[Any, Call] = {}
    numbers: dict[Any, int] = {}
    pairs = selection.batch * math.comb(selection.tokens + 1, 2)
    for shape, step, program in _programs(selection, device):
        for dispatch in program.dispatches:
            for tiling in _tilings(dispatch, device, selection):
                compiled_in = dispatch.kernel.compiled_in(dispatch.constants)
                key = dispatch.kernel.name, dispatch.present, tuple(sorted(compiled_in.items())), tiling
                default = tiling == dispatch.tiling
                of = dispatch.kernel, dispatch.present, dispatch.constants, tiling, default
                call = result.setdefault(key, Call(*of))
                call.default = call.default or default
                steps = call.used_by.setdefault(shape, [])
                if step not in steps:
                    steps.append(step)
                if selection.batch:
                    work_key = dispatch.kernel.name, dispatch.present, tuple(sorted(dispatch.constants.items()))
                    number = numbers.setdefault(work_key, len(numbers))
                    call.work[work_of(dispatch.tiled(tiling), number, default, pairs)] += 1
    return list(result.values())


def _tilings(dispatch: Dispatch, device: Device, selection: Selection) -> list[Tiling]:
    kernel = dispatch.kernel
    if selection.kernels and not any(part in kernel.name for part in selection.kernels):
        return []
    tilings: Sequence[Tiling] = [dispatch.tiling]
    if kernel.tuning and not dispatch.fixed:
        if selection.candidates:
            tilings = kernel.tilings(device.capabilities, dispatch.constants)
        if selection.tiling:
            tilings = [*tilings, Tiling.from_json(selection.tiling)]
    return list(tilings)


def _programs(selection: Selection, device: Device) -> Iterator[tuple[str, str, Program]]:
    for shape in selection.shapes:
        config = shape_config(shape, None if selection.batch else 1)
        for step, program in steps_of(config, selection, device):
            yield shape, step, program
    for dim in selection.head_dims:
        config = shape_config(HEADS_OF, 1)
        assert isinstance(config, Transformer)
        config = replace(config, head_dim=dim)
        for step, program in steps_of(config, selection, device):
            program.dispatches = [
                dispatch for dispatch in program.dispatches if dispatch.kernel.name.startswith("attention_")
            ]
            yield f"head_dim {dim}", step, program


# -- the work of a dispatch --------------------------------------------------------------------------------------------

PRODUCTS = {"attention_forward": 2, "attention_backward_q": 3, "attention_backward_kv": 4}  # for a query and a key


def work_of(dispatch: Dispatch, number: int, default: bool, pairs: int) -> Work:
    """pairs: of a query and a key that it sees, in the whole batch."""
    kernel, c = dispatch.kernel, dispatch.constants
    sums, padding = 0, 1.0
    if kernel.name in PRODUCTS:
        sums = PRODUCTS[kernel.name] * pairs * c["kv_heads"] * c["group"] * c["dim"]
    elif {"m", "n", "k"} <= c.keys():
        outputs = c["m"] * sum(sizes(c, "n"))
        sums = outputs * (sum(sizes(c, "k")) + c.get("rank", 0))
        tiles = math.prod(dispatch.groups) * math.prod(block(dispatch.tiling))
        padding = tiles / (c["m"] * c["n"] if c.get("gated") else outputs)
    return Work(
        number, default, sums, sums * padding, moved(dispatch), math.prod(dispatch.groups) * dispatch.tiling.lanes
    )


def moved(dispatch: Dispatch) -> int:
    """Bytes of all bindings, twice of those declared as read and written. Of a table, the rows that are picked."""
    kernel, c = dispatch.kernel, dispatch.constants
    written_only = not c.get("accumulate", True) and "row_scale" not in dispatch.present
    total = 0
    for name, tensor in zip(dispatch.present, dispatch.tensors, strict=True):
        times = 2 if kernel.bindings[name] == "inout" and not written_only else 1
        share = min(1, c["rows"] / c["count"]) if (kernel.name, name) == ("embedding_rows", "b") else 1
        total += round(times * share * tensor.nbytes)
    return total


# -- the programs of a layer -------------------------------------------------------------------------------------------


def steps_of(config: ModelConfig, selection: Selection, device: Device) -> Iterator[tuple[str, Program]]:
    """(what it is for, program) of each. Nothing is allocated."""
    model = synthetic_model(config, device, selection.base_dtype)
    for step, record in (TRAINING if selection.batch else STEPS).items():
        for program in record(model, selection):
            yield step, program


def _arguments(model: LoadedModel, selection: Selection) -> TrainingArguments:
    return TrainingArguments(
        per_device_train_batch_size=selection.batch or 1,
        max_length=selection.tokens,
        lora_r=selection.rank,
        compute_dtype=selection.compute_dtype,
        activation_dtype=selection.activation_dtype,
        offload_activations=not selection.batch and MAPPABLE in model.device.features,  # the kernel that copies, too
    )


def _training(model: LoadedModel, selection: Selection) -> list[Program]:
    return TrainingStep(model, _arguments(model, selection)).session.programs()


def _dora(model: LoadedModel, selection: Selection) -> list[Program]:
    return TrainingStep(
        model, replace(_arguments(model, selection), use_dora=True, lora_dropout=0.1)
    ).session.programs()


def _distillation(model: LoadedModel, selection: Selection) -> list[Program]:
    objective = KD(teacher="demo", temperature=2.0, hard_full_weight=0.5)
    adapters = adapter_set(model.config, model.device, selection.rank)
    session = Session(model, adapters, [selection.tokens], positions=selection.tokens, objectives=[objective])
    return [batch.program for batch in session.steps.values()]


def _constants(model: LoadedModel, selection: Selection) -> list[Program]:
    """Training of the base's constants, if it has any."""
    by_module = {name.removesuffix(".weight"): weight.trainable for name, weight in model.decoder.matrices()}
    weights = {module: weight for module, weight in by_module.items() if weight}
    if not weights:
        return []
    constants = QuantConstants.declare(weights, model.device.max_binding)
    return Session(model, constants, [selection.tokens], positions=selection.tokens).programs()


def _loading(model: LoadedModel, selection: Selection) -> list[Program]:
    """The quantisation of low-bit matrices, with calibration."""
    weights = [weight for weight in model.decoder.weights() if isinstance(weight, LowBitWeight)]
    if not weights:
        return []
    rows, cols = selection.tokens, weights[0].in_features
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


def _generation(model: LoadedModel, selection: Selection) -> Programs:
    adapters = adapter_set(model.config, model.device, selection.rank)
    limits = EngineLimits(1, CACHED, cdiv(CACHED, BLOCK), (selection.tokens,))
    return Programs(model.device, model.decoder, adapters, limits)


def _prefill(model: LoadedModel, selection: Selection) -> list[Program]:
    return [step.program for step in _generation(model, selection).prefill.values()]


def _decode(model: LoadedModel, selection: Selection) -> list[Program]:
    programs = _generation(model, selection)
    return [programs.decode[1].program, programs.heads[1].logits, programs.heads[1].sample, programs.shared]


def _teacher(model: LoadedModel, selection: Selection) -> list[Program]:
    tables = Tables.declare(model.config.tables(), selection.tokens)
    return list(Teacher(model, None, (selection.tokens,), tables, TopK(), selection.compute_dtype).programs())


def _updates(model: LoadedModel, selection: Selection) -> list[Program]:
    """Of the other optimizers, for the first shape only: sizes make no difference to them."""
    if not selection.shapes or model.config != shape_config(selection.shapes[0], 1):
        return []
    adapters, loss = (
        adapter_set(model.config, model.device, selection.rank),
        persistent((1,), "f32", "optimizer", "loss"),
    )
    optim_args = {"sgd": "momentum=0.9"}
    runs = [TrainingArguments(optim=name, optim_args=optim_args.get(name)) for name in OPTIMIZERS if name != "adamw"]
    return [Optimizer(model.device, adapters, loss, optimizer_of(args)).program for args in runs]


TRAINING = {"training": _training}
STEPS: dict[str, Callable[[LoadedModel, Selection], list[Program]]] = {
    "loading": _loading,
    **TRAINING,
    "DoRA": _dora,
    "other optimizers": _updates,
    "quant-scales": _constants,
    "distillation": _distillation,
    "prefill": _prefill,
    "decode": _decode,
    "teacher": _teacher,
}
