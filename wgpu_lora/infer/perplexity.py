"""Held-out loss: the mean over the trained tokens of the rows, independent of packing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from wgpu_lora.data import Row, TokenizedData, pack
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Storage, persistent, share_storage
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.infer.exact_match import Comparison
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import Segment, StepInputs, Tables
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.ops.loss.loss import hits, sum_by_slot, vocabulary_logprobs
from wgpu_lora.ops.recorder import Recorder


@dataclass(frozen=True)
class Evaluation:
    """loss: mean over `tokens` trained tokens of `rows` rows, in nats; perplexity = exp(loss).

    max_length: maximum tokens per row.
    data: a one-line summary of the rows.
    objective: if it is not sft, the loss is that of the objective, and perplexity is None.
    metrics: its others by name; of sft, `mean_token_accuracy`, the share of targets that are the most likely token, and
        `exact_match`, the share of `comparisons` that match, if answers were asked for.
    """

    loss: float
    perplexity: float | None
    tokens: int
    rows: int
    seconds: float
    max_length: int
    data: str = ""
    objective: str = "sft"
    metrics: dict[str, float] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)


class Evaluator:
    """A forward-only program of fixed size, recorded on construction.

    The caller plans `program`, allocates `storages()`, and then calls `build`.

    Args:
        adapters: None evaluates the base model alone and records no LoRA.
        tokens: rows of the program, at least the longest data row.
    """

    def __init__(self, model: LoadedModel, adapters: AdapterSet | None, tokens: int):
        self.model, self.adapters, self.device, config = model, adapters, model.device, model.config
        slots = len(adapters.specs) if adapters else 1
        # Totals over all rows of a batch, of any slot: log-probabilities, and targets that are the most likely token.
        totals = [persistent((1,), "f32", "workspace", name) for name in ("evaluation total", "evaluation hits")]
        self._totals = share_storage(totals, "evaluation totals")  # so that both are read at once
        self._target_range = persistent((1, 2), "u32", "workspace", "evaluated targets")
        tables = Tables.declare(config.tables(), tokens)
        self.inputs = StepInputs.declare(config.row_inputs(), tokens, slots, tables)
        self.program = Program(model.device, "evaluation")
        recorder = Recorder(self.program)
        hidden = model.decoder.hidden(recorder, self.inputs, adapters.bind(self.inputs) if adapters else {})
        vocabulary = vocabulary_logprobs(recorder, hidden, model.decoder.head, self.inputs.targets)
        for values, total in zip((vocabulary.logprobs, hits(recorder, vocabulary)), self._totals, strict=True):
            recorder.dispatch(sum_by_slot, values, self._target_range, total, slots=1)

    def storages(self) -> set[Storage]:
        """All persistent storage that the program needs, including the model's weights and the adapters."""
        return self.program.persistent_storages() | self.inputs.storages()

    def build(self, arena: Arena, choices: Choices = NO_CHOICES) -> None:
        """Build the program in an arena that its plan fits into; its storages must be allocated."""
        self.program.build(arena, choices)
        self.inputs.tables.upload(self.device)

    def loss(
        self, rows: Sequence[Row], slot: int | None = None, watch: Callable[[int], None] = lambda rows: None
    ) -> tuple[float, float, int]:
        """(mean loss, share of targets that are the most likely token, trained tokens) of rows with one adapter, or
        with the base model alone.

        watch: called with the number of finished rows, first with 0.

        Raises:
            UserError: no row has a trained token.
        """
        assert slot is None or self.adapters, "there is no adapter to evaluate"
        sums, tokens, completed, storage = np.zeros(2), 0, 0, self._totals[0].storage
        watch(completed)
        for together in pack([len(row.input_ids) for row in rows], range(len(rows)), self.inputs.tokens):
            segments = [Segment(rows[i].input_ids, rows[i].labels, slot) for i in together]
            count = int(self.inputs.upload(self.device, segments).max())
            self.device.write(self._target_range.storage.buffer, np.array([0, count], np.uint32))
            self.device.write(storage.buffer, np.zeros(storage.nbytes // 4, np.float32))
            self.program.run()
            # Summed in float64: a float32 total over many batches would lose precision.
            sums += self.device.read(storage.buffer).view(np.float32)[
                [total.byte_offset // 4 for total in self._totals]
            ]
            tokens += count
            completed += len(together)
            watch(completed)
        if not tokens:
            raise UserError("The rows to evaluate have no trained tokens: check their labels, or use other data.")
        return float(-sums[0]) / tokens, float(sums[1]) / tokens, tokens


@with_option_advice("max_length")
def evaluate(
    model: LoadedModel,
    prepared: TokenizedData,
    adapters: AdapterSet | None = None,
    slot: int | None = None,
    batch_tokens: int = 1024,
    events: Events = SILENT,
) -> Evaluation:
    """The loss of prepared rows; loads the model's weights if needed.

    Args:
        slot: index in `adapters`; None is the base model alone.
        batch_tokens: tokens computed at a time; more if a single row is longer.
        events: receives `loading` and `evaluating`.

    Raises:
        UserError: there are no trained tokens, or the device has no room.
    """
    tokens = max([*prepared.lengths, min(batch_tokens, prepared.total_tokens)])
    evaluator = Evaluator(model, adapters if slot is not None else None, tokens)
    plan = evaluator.program.plan()
    storages = {s for s in evaluator.storages() - model.decoder.storages() if s.buffer is None}
    arena, stack = Arena(model.device), ExitStack()
    try:
        need = model.bytes_to_load() + missing_bytes(storages) + sum(plan.sizes)
        stack.enter_context(claim(model.device, need, "evaluating"))
        stack.enter_context(verdicts_of(model.device).reported_to(events))
        check_tilings(model.device, [evaluator.program])
        model.load_weights(events)
        begin = time.perf_counter()
        allocate(model.device, storages)
        arena = Arena(model.device, plan.sizes)
        evaluator.build(arena)
        total = len(prepared.rows)
        loss, accuracy, trained = evaluator.loss(
            prepared.rows, slot, lambda rows: events.evaluating(Evaluating(rows, total))
        )
    finally:
        arena.free()
        release(model.device, storages)
        stack.close()
    seconds = time.perf_counter() - begin
    metrics = {"mean_token_accuracy": accuracy}
    facts = trained, len(prepared.rows), seconds, prepared.max_length
    return Evaluation(loss, _perplexity(loss), *facts, metrics=metrics)


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
