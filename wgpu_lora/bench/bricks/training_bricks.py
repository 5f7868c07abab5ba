"""Bricks of training other than its layers: the loss, the update, packing the base, and the whole step."""

from __future__ import annotations

from functools import partial

import numpy as np

from wgpu_lora.bench.brick import Context, Extra, SessionWorkload, Workload
from wgpu_lora.bench.contract import numbers_of
from wgpu_lora.bench.recorded_brick import ProgramWorkload, normal
from wgpu_lora.bench.reference_check import ReferenceErrors
from wgpu_lora.bench.timing import Timings, repeat, run_seconds
from wgpu_lora.bench.training_step import SlotStep, adapter_set, fill_adapters, fill_update, fill_with_random_state
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.model_config import MATRIX
from wgpu_lora.models.published_shapes import cut
from wgpu_lora.ops.loss.loss import Targets, VocabularyGradient, seed, sum_by_slot, vocabulary_logprobs
from wgpu_lora.train.objectives import objective_of
from wgpu_lora.train.objectives.objective import Scoring
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session.optimizer_update import Optimizer
from wgpu_lora.weights.base import Shared
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.nf4.nf4 import NF4

ROW = 128  # tokens of a row of data in train_step, as in docs/performance.md
DEVICE_RUNS = 3  # to measure the device's time of a step


def loss(context: Context) -> Workload:
    """LM head and cross-entropy over all rows, forward and backward; the head is bf16, as in checkpoints."""
    config, tokens = context.config, context.tokens
    workload = ProgramWorkload(context)
    head = DenseWeight.declare((config.vocab_size, config.hidden_size), "bf16", "head", context.device.max_binding)
    for part in head.parts:
        workload.adopt(part, lambda rng, shape: 0.02 * normal(rng, shape))

    def input(name: str, values: np.ndarray, dtype: str = "u32") -> Tensor:
        return workload.input(values.shape, values, dtype, name)

    targets = Targets(
        rows=input("rows", np.arange(tokens)),
        ids=workload.input((tokens,), lambda rng, s: rng.integers(0, config.vocab_size, s), "u32", "targets"),
        count=input("count", np.array([tokens])),
    )
    scoring = Scoring(input("weights", np.full(tokens, 1 / tokens), "f32"), input("ranges", np.array([[0, tokens]])))
    rec = workload.rec
    vocabulary = vocabulary_logprobs(rec, workload.tracked((tokens, config.hidden_size), "hidden"), head, targets)
    score = objective_of(TrainingArguments()).score_vocabulary(rec, vocabulary, scoring)
    rec.dispatch(sum_by_slot, score.losses, scoring.loss_ranges, workload.input((1,), name="total"), slots=1)
    assert score.weights is not None
    seed(vocabulary, VocabularyGradient({1.0: score.weights}))
    rec.backward()
    return workload


def optimizer(context: Context) -> Workload:
    """Gradient norm, clipping and update of the adapters on all linear layers."""
    workload, device = ProgramWorkload(context), context.device
    adapters = adapter_set(context.config, device, context.rank)
    update = Optimizer(device, adapters, workload.input((1,), name="loss total"))
    workload.forward.dispatches += update.program.dispatches
    workload.fillers += [partial(fill_adapters, device, adapters), partial(fill_update, device, update)]
    return workload


def quantize(context: Context) -> Workload:
    """Packing the matrices of a layer from bf16 to NF4 codes, in the same pieces as loading, without the upload."""
    workload = ProgramWorkload(context)
    workload.keys = numbers_of(cut(context.config, 1))
    matrices = [(name, item.shape) for name, item in context.config.layer(0).items() if item.kind == MATRIX]
    for module, (out, size_in) in matrices:
        weight = NF4.declare((out, size_in), module, Shared(context.device.max_binding))
        for first, rows in weight.pieces():
            size = rows * size_in
            w = workload.input((size + size % 2,), normal, "bf16", f"{module} {first}")
            absmax = workload.rec.temp((weight.blocks(rows),), name="absmax")
            weight.record_packing(workload.forward, w, absmax, first, rows, "bf16")
    return workload


class TrainStep(SessionWorkload):
    """An optimizer step as in training: upload, forward, backward, update, and readback of the report."""

    def __init__(self, context: Context):
        tokens = context.tokens
        rows = [min(ROW, tokens - start) for start in range(0, tokens, ROW)]
        self._context = context
        self._session = context.session([tokens], positions=max(rows))
        super().__init__(self._session)
        self._step = SlotStep(self._session, [(0, row) for row in rows])
        self.keys = {"pairs": float(sum(n * (n + 1) // 2 for n in rows)), "trained": float(self._step.trained)}

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        return self._step.check(rng, ReferenceErrors())

    def run(self) -> float:
        return run_seconds(self._step.run)

    def extra(self, timings: Timings) -> Extra:
        device, timer = self._session.device, self._context.timer
        result = {"tokens_per_second": self._step.tokens / timings.seconds, "peak_bytes": float(device.peak_allocated)}
        if timer.clock == "timestamps":
            programs = self._session.programs()
            pairs = [(self.run(), sum(map(timer.run, programs))) for _ in range(DEVICE_RUNS)]  # alternating
            total, device_seconds = np.median(pairs, axis=0)
            host_share = max(0.0, 1 - device_seconds / total)  # due to noise, the part may be larger
            result |= {"device_seconds": float(device_seconds), "host_share": float(host_share)}
        return result


# -- device_speed: how fast a device trains, and how much faster several adapters at once, for decisions where to ------

ADAPTERS = 3
SHORT_ROW = 64  # tokens
CV = 0.05  # of the time of a turn, below which no more are taken


class DeviceSpeed(SessionWorkload):
    """A step of one adapter, and one of three adapters at once that have a third of its tokens each; a step of one of
    these thirds alone is taken three times, as adapters that are trained one after another are."""

    def __init__(self, context: Context):
        rows = max(1, context.tokens // (ADAPTERS * SHORT_ROW))
        lengths = [min(SHORT_ROW, context.tokens)] * rows
        self._third = sum(lengths)
        alone = context.session([self._third, ADAPTERS * self._third], positions=lengths[0])
        together = context.session([ADAPTERS * self._third], ADAPTERS, positions=lengths[0])
        super().__init__(alone, together)
        self.steps = {
            "alone": SlotStep(alone, [(0, length) for length in lengths * ADAPTERS]),
            "third": SlotStep(alone, [(0, length) for length in lengths]),
            "together": SlotStep(together, [(slot, length) for slot in range(ADAPTERS) for length in lengths]),
        }
        row_lengths = lengths * ADAPTERS
        pairs = sum(n * (n + 1) // 2 for n in row_lengths)
        tokens = float(sum(row_lengths))
        self.keys = {"step_tokens": tokens, "pairs": float(pairs), "trained": tokens - len(row_lengths)}
        self.turns: list[dict[str, float]] = []  # seconds

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        result = ReferenceErrors()
        for step in self.steps.values():
            step.check(rng, result)
        return result

    def measure(self, iterations: int, limit: float) -> Extra:
        """The figures without comparisons with references, of at least `iterations` turns, or more for up to `limit`
        seconds while their times vary."""
        rng = np.random.default_rng(0)
        for session in self.sessions:
            fill_with_random_state(session, rng)
        for step in self.steps.values():
            step.fill_random(rng)
        self.run()  # compiles
        return self.figures(len(repeat(self.run, iterations, CV, limit)))

    def run(self) -> float:
        """A turn of all steps, in alternating order, so that a machine that slows down favours none."""
        order = list(self.steps)[:: -1 if len(self.turns) % 2 else 1]
        seconds = {name: sum(self.steps[name].seconds(ADAPTERS if name == "third" else 1)) for name in order}
        self.turns.append(seconds)
        return seconds["alone"]

    def figures(self, iterations: int) -> Extra:
        """Of the last turns. tokens_per_second: processed tokens of one adapter. joined_speedup: of three adapters at
        once over one after another, the median of the ratios of each turn."""
        turns = self.turns[-iterations:]
        return {
            "tokens_per_second": self.keys["step_tokens"] / float(np.median([turn["alone"] for turn in turns])),
            "joined_speedup": float(np.median([turn["third"] / turn["together"] for turn in turns])),
        }

    def extra(self, timings: Timings) -> Extra:
        return self.figures(timings.iterations)
