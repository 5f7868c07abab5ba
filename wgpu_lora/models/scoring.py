"""Log-probabilities under a frozen reference, by programs that only pass forward: they keep no activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from wgpu_lora.data.packing import pack
from wgpu_lora.gpu.program import Arena, Program
from wgpu_lora.gpu.tensor import Storage, persistent
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.models.batch_inputs import Segment, StepInputs, Tables
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.ops.loss.loss import target_logprobs, vocabulary_logprobs
from wgpu_lora.ops.recorder import Recorder


class ForwardPass(Protocol):
    """A recorded forward pass."""

    program: Program

    def storages(self) -> set[Storage]: ...


P = TypeVar("P", bound=ForwardPass)


class ForwardPasses(Generic[P]):
    """Forward passes by the number of tokens that they take, ascending. They keep no activations."""

    def __init__(self, passes: dict[int, P]):
        self.passes = passes
        self._built: set[int] = set()
        self._arena: Arena | None = None
        self._choices = NO_CHOICES

    def programs(self) -> list[Program]:
        return [item.program for item in self.passes.values()]

    def storages(self) -> set[Storage]:
        result: set[Storage] = set()
        return result.union(*(item.storages() for item in self.passes.values()))

    def use(self, arena: Arena, choices: Choices = NO_CHOICES) -> None:
        """Where the programs run; each is built before its first use."""
        self._arena, self._choices = arena, choices

    def batches(self, lengths: Sequence[int]) -> Iterator[tuple[Sequence[int], P]]:
        """(the indices of a batch, the smallest pass that takes it), for items of so many tokens; the longest must fit
        the last pass."""
        for together in pack(lengths, range(len(lengths)), max(self.passes)):
            need = sum(lengths[i] for i in together)
            size = min(tokens for tokens in self.passes if tokens >= need)
            if size not in self._built:
                assert self._arena is not None, "use() first"
                self.passes[size].program.build(self._arena, self._choices)
                self._built.add(size)
            yield together, self.passes[size]


class Forward:
    """A forward pass of up to `tokens` tokens, recorded on construction.

    logprobs: f32 [tokens] by temperature.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapters: ParameterSet | None,
        tokens: int,
        tables: Tables,
        compute_dtype: str,
        name: str,
        temperatures: Sequence[float] = (1.0,),
    ):
        slots = adapters.slots if adapters else 1
        self.inputs = StepInputs.declare(model.config.row_inputs(), tokens, slots, tables)
        label = f"{name} log-probabilities [{tokens}]"
        self.logprobs = {t: persistent((tokens,), "f32", "workspace", label) for t in temperatures}
        self.program = Program(model.device, f"{name} {tokens}")
        rec = Recorder(self.program, compute_dtype=compute_dtype)
        if adapters:
            adapters.record_use(rec)
        hidden = model.decoder.hidden(rec, self.inputs, adapters.bind(self.inputs) if adapters else {})
        first, *rest = temperatures
        targets = self.inputs.targets
        vocabulary = vocabulary_logprobs(
            rec, hidden, model.decoder.head, targets, self.logprobs[first], temperatures=temperatures
        )
        for t in rest:
            rec.dispatch(
                target_logprobs, vocabulary.states[t], targets.count, self.logprobs[t], rows=tokens, rate=1 / t
            )

    def storages(self) -> set[Storage]:
        return self.inputs.storages() | self.program.persistent_storages()


class Scorer(ForwardPasses[Forward]):
    """Scores segments with adapters that it does not train, or with the base model alone.

    Args:
        adapters: those of the segments' slots; None if no segment has one.
        buckets: batch sizes in tokens, ascending. The longest segment must fit the last.
        temperatures: of the softmaxes whose log-probabilities are computed.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapters: ParameterSet | None,
        buckets: Sequence[int],
        tables: Tables,
        compute_dtype: str,
        name: str,
        temperatures: Sequence[float] = (1.0,),
    ):
        self.device = model.device
        settings = tables, compute_dtype, name, temperatures
        super().__init__({n: Forward(model, adapters, n, *settings) for n in sorted({*buckets})})

    def logprobs(
        self, samples: Sequence[Sequence[Segment]], temperatures: Sequence[float] | None = None
    ) -> list[list[np.ndarray]]:
        """The log-probabilities of the targets of each segment, f32. A sample's segments stay in one batch.

        temperatures: of each sample, 1 by default.
        """
        sample_temperatures = [1.0] * len(samples) if temperatures is None else temperatures
        result: dict[int, list[np.ndarray]] = {}
        lengths = [sum(segment.tokens for segment in segments) for segments in samples]
        for together, forward in self.batches(lengths):
            segments = [replace(segment, draws=None) for i in together for segment in samples[i]]
            remaining = iter(forward.inputs.upload(self.device, segments))
            forward.program.run()
            buffers = {t: forward.logprobs[t].storage.buffer for t in {sample_temperatures[i] for i in together}}
            values = {t: self.device.read(buffer).view(np.float32) for t, buffer in buffers.items()}
            for i in together:
                spans = [next(remaining) for _ in samples[i]]
                result[i] = [values[sample_temperatures[i]][start:stop].copy() for start, stop in spans]
        return [result[i] for i in range(len(samples))]
