"""Bricks of a training step beside its layers: the loss, the update, packing the base, and the whole step."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from wgpu_lora.bench.check import Checked, check, poison
from wgpu_lora.bench.recording import Fill, Recording, fixed, normal
from wgpu_lora.bench.stats import Timings
from wgpu_lora.bench.workload import (
    Context,
    Extra,
    ProgramWorkload,
    Workload,
)
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.program import Program, missing_bytes
from wgpu_lora.gpu.tensor import NUMPY, Tensor, persistent
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.models.config import MATRIX
from wgpu_lora.models.inputs import Segment
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.ops.loss import Targets, seed, sum_by_slot, token_logprobs
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.base import Group, Scoring
from wgpu_lora.train.optimizer import Optimizer, SlotUpdate
from wgpu_lora.train.optimizers.base import State
from wgpu_lora.train.session import Session
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.nf4 import nf4_absmax, nf4_encode, piece_rows
from wgpu_lora.weights.nf4_codes import BLOCK

ROW = 128  # tokens of a row of data in train_step, as in docs/performance.md
DEVICE_RUNS = 3  # of the device's own time of a step
EARLY = SlotUpdate(3, 1e-4, TrainingArguments(weight_decay=0.01))  # a usual step for kernels to be checked in


def loss(context: Context) -> Iterator[Workload]:
    """LM head and cross-entropy over every row, forward and backward; the head is bf16, as checkpoints have it."""
    config, tokens = context.config, context.tokens
    recording = Recording(context.device)
    head = recording.weight((config.vocab_size, config.hidden_size), "bf16", "head")
    assert isinstance(head, DenseWeight)

    def input(name: str, values: np.ndarray, dtype: str = "u32") -> Tensor:
        return recording.input(values.shape, fixed(values), dtype, name)

    targets = Targets(
        rows=input("rows", np.arange(tokens)),
        ids=recording.input((tokens,), lambda rng, s: rng.integers(0, config.vocab_size, s), "u32", "targets"),
        count=input("count", np.array([tokens])),
    )
    scoring = Scoring(input("weights", np.full(tokens, 1 / tokens), "f32"), input("ranges", np.array([[0, tokens]])))
    rec = recording.rec
    logprobs = token_logprobs(rec, recording.tracked((tokens, config.hidden_size), "hidden"), head, targets)
    score = objective_of(TrainingArguments()).score(rec, logprobs, scoring)
    rec.dispatch(sum_by_slot, score.losses, scoring.loss_ranges, recording.input((1,), name="total"), slots=1)
    seed(rec, logprobs, score.weights)
    rec.backward()
    yield ProgramWorkload(recording, recording.forward)


def optimizer(context: Context) -> Iterator[Workload]:
    """Gradient norm, clipping and the update of the adapters of every layer, on all that may carry one."""
    adapters = adapter_set(context, 1)
    update = Optimizer(context.device, adapters, persistent((1,), "f32", "optimizer", "loss total"))
    recording = Recording(context.device)
    tensors = {
        **dict.fromkeys((*adapters.params, *adapters.grads), normal()),
        **{page: state_fill(state) for state, pages in update.state.items() for page in pages},
        update.block_slots: fixed(np.concatenate(adapters.block_slots)),
        **{tensor: fixed(values) for tensor, values in update.settings({0: EARLY}).items()},
        update.total: normal(),
        update.report: fixed(np.full(update.report.shape, np.nan)),
    }
    for tensor, fill in tensors.items():
        recording.adopt(tensor, fill)
    recording.forward.dispatches += update.program.dispatches
    yield ProgramWorkload(recording, recording.forward)


def quantize(context: Context) -> Iterator[Workload]:
    """Packing the matrices of a layer from bf16 to NF4 codes, in loading's own pieces, upload left out."""
    recording = Recording(context.device)
    matrices = [(name, item.shape) for name, item in context.config.layer(0).items() if item.kind == MATRIX]
    for module, (out, size_in) in matrices:
        codes = recording.rec.temp((-(-size_in // 8), out), "u32", "codes")
        for first in range(0, out, piece_rows(size_in)):
            rows = min(piece_rows(size_in), out - first)
            size = rows * size_in
            w = recording.input((size + size % 2,), normal(0.02), "bf16", f"{module} {first}")
            absmax = recording.rec.temp((-(-size // BLOCK),), name="absmax")
            recording.rec.dispatch(nf4_absmax, w, absmax, size=size, b_type="bf16")
            shape = {"rows": rows, "first": first, "out": out, "size_in": size_in}
            recording.rec.dispatch(nf4_encode, w, absmax, codes, b_type="bf16", **shape)
    yield ProgramWorkload(recording, recording.forward)


def train_step(context: Context) -> Iterator[Workload]:
    yield TrainStep(context)


class TrainStep:
    """An optimizer step as the trainer takes it: upload, forward, backward, update, and reading the report back."""

    case = ""
    clock = "host"

    def __init__(self, context: Context):
        self._context = context
        self._adapters = adapter_set(context, 1)
        tokens = context.tokens
        self._rows = [min(ROW, tokens - start) for start in range(0, tokens, ROW)]
        self._session = Session(
            context.model, self._adapters, [tokens], positions=max(self._rows), compute_dtype=context.compute_dtype
        )
        self._batch = self._session.steps[tokens]
        self._program = self._batch.program
        self.keys = {
            "pairs": float(sum(n * (n + 1) // 2 for n in self._rows)),
            "trained": float(sum(n - 1 for n in self._rows)),
        }
        self._steps = 0
        self._rng = np.random.default_rng(0)

    def nbytes(self) -> int:
        session, model = self._session, self._context.model
        needed = missing_bytes(session.storages())
        activations = session.memory().groups["activations"]
        return max(needed + activations, model.bytes_to_load())

    def programs(self) -> list[Program]:
        return self._session.programs()

    def open(self, choices: Choices = NO_CHOICES) -> None:
        device = self._context.device
        device.peak_allocated = device.allocated  # of this step, not of bricks before
        self._session.allocate(choices=choices)
        self._session.batch_for(self._groups())

    def check(self, rng: np.random.Generator) -> Checked:
        session, device = self._session, self._context.device
        self._rng = rng
        assert session.arena is not None, "open() first"
        for buffer in session.arena.buffers:
            poison(device, buffer)
        for page in (*self._adapters.params, *self._adapters.grads):
            values = np.float32(0.02) * rng.standard_normal(page.shape, np.float32)
            device.write(page.storage.buffer, values)
        session.begin()
        self._batch.upload(self._groups())
        found = check(self._program)
        for tensor, values in session.optimizer.settings({0: EARLY}).items():
            device.write(tensor.storage.buffer, values)
        return check(session.optimizer.program, found)

    def _groups(self) -> list[Group]:
        """New random rows."""
        rows = [self._rng.integers(0, self._context.config.vocab_size, n) for n in self._rows]
        weight = 1 / max(1.0, self.keys["trained"])
        return [Group((Segment(ids, ids),), weight=weight) for ids in rows]

    def run(self) -> float:
        session, device = self._session, self._context.device
        begin = time.perf_counter()
        self._steps += 1
        session.begin()
        self._batch.upload(self._groups())
        self._program.run()
        session.optimizer.apply(device, {0: SlotUpdate(self._steps, 1e-4)})
        return time.perf_counter() - begin

    def extra(self, timings: Timings) -> Extra:
        device = self._context.device
        found = {"tokens_per_second": self._context.tokens / timings.median, "peak_bytes": float(device.peak_allocated)}
        timer = Timer(device)
        if timer.clock == "timestamps":
            programs = (self._program, self._session.optimizer.program)
            pairs = [(self.run(), sum(map(timer.run, programs))) for _ in range(DEVICE_RUNS)]  # by turns
            whole, device_seconds = np.median(pairs, axis=0)
            host_share = max(0.0, 1 - device_seconds / whole)  # two measurements: noise can have the part the larger
            found |= {"device_seconds": float(device_seconds), "host_share": float(host_share)}
        timer.free()
        return found

    def close(self) -> None:
        self._session.close()


def adapter_set(context: Context, slots: int) -> AdapterSet:
    """Adapters of the run's rank on every module that may carry one."""
    config = context.config
    scaling = dict.fromkeys(config.lora_modules, 2.0)
    return AdapterSet.declare(config, [SlotSpec(context.rank, scaling)] * slots, context.device.max_binding)


def state_fill(state: State) -> Fill:
    """Values that an optimizer may have come to keep."""
    if state.dtype != "f32":
        return lambda rng, shape: np.zeros(shape, NUMPY[state.dtype])
    if state.least is None:
        return normal()
    least = np.float32(state.least)
    return lambda rng, shape: least + rng.random(shape, np.float32)
