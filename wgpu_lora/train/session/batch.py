"""The program of a batch: the model's forward pass, the objectives' scores, and the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent, share_storage
from wgpu_lora.models.batch_inputs import StepInputs, Tables
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.ops.activation_storage import IN_F32, Saving, store
from wgpu_lora.ops.elementwise import add_forward
from wgpu_lora.ops.loss.loss import VocabularyGradient, VocabularyLogprobs, seed, sum_by_slot, vocabulary_logprobs
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.objectives.objective import Group, Objective, Scoring


class Totals:
    """Sums over a step for each slot: the loss, and metrics by name. f32 [slots] each."""

    def __init__(self, objectives: Sequence[Objective]):
        names = dict.fromkeys(name for objective in objectives for name in objective.metrics)
        tensors = [persistent((len(objectives),), "f32", "optimizer", name) for name in ("loss", *names)]
        self.loss, *metrics = share_storage(tensors, "totals")  # so that all are read at once
        self.metrics = dict(zip(names, metrics, strict=True))

    def storages(self) -> set[Storage]:
        return {self.loss.storage}

    def clear(self, device: Device) -> None:
        device.write(self.loss.storage.buffer, np.zeros(self.loss.storage.nbytes // 4, np.float32))

    def read_loss(self, device: Device, slot: int) -> float:
        return float(device.read(self.loss.storage.buffer).view(np.float32)[slot])

    def read_metrics(self, device: Device, slot: int, objective: Objective) -> dict[str, float]:
        """The metrics of the slot's objective."""
        if not objective.metrics:
            return {}
        values = device.read(self.loss.storage.buffer).view(np.float32)
        return {name: float(values[self.metrics[name].byte_offset // 4 + slot]) for name in objective.metrics}


class Batch:
    """A recorded program for up to `tokens` tokens, and its inputs. Recording allocates nothing.

    Args:
        objectives: one per slot.
        totals: sums that the program adds losses and metrics to.
        tables: the model's.
        training: also record the backward pass, which adds to the gradients of what is trained.
        saving: how activations are stored for it.
    """

    def __init__(
        self,
        model: LoadedModel,
        trained: ParameterSet,
        tokens: int,
        objectives: Sequence[Objective],
        totals: Totals,
        tables: Tables,
        *,
        training: bool = True,
        dropout: bool = False,
        recompute: bool = False,
        compute_dtype: str = "f32",
        saving: Saving = IN_F32,
    ):
        self.tokens, self.device, self._objectives = tokens, model.device, objectives
        slots = len(objectives)
        self.inputs = StepInputs.declare(model.config.row_inputs(), tokens, slots, tables, dropout)
        self.scoring = {o: Scoring.declare(o, tokens, slots) for o in dict.fromkeys(objectives)}
        self.program = Program(model.device, f"{'train' if training else 'held-out'} {tokens}")
        rec = Recorder(self.program, training, recompute, compute_dtype)
        trained.record_use(rec)
        hidden = model.decoder.hidden(rec, self.inputs, trained.bind(self.inputs))
        teacher_ids = [scoring.teacher.ids for scoring in self.scoring.values() if scoring.teacher]
        temperatures = {t for objective in objectives for t in objective.temperatures}
        vocabulary = vocabulary_logprobs(
            rec,
            hidden,
            model.decoder.head,
            self.inputs.targets,
            temperatures=sorted(temperatures, key=lambda t: (t != 1, t)),
            supports=teacher_ids,
            entropy=any(objective.needs_entropy for objective in objectives),
        )
        gradient = self._score(rec, vocabulary, totals)
        if training:
            seed(vocabulary, gradient)
            forward = len(self.program.dispatches)
            rec.backward()
            if saving != IN_F32:
                store(self.program, rec.saved_tensors, forward, saving)
        self.program.prune()

    def _score(self, rec: Recorder, vocabulary: VocabularyLogprobs, totals: Totals) -> VocabularyGradient:
        """Record all objectives; returns the derivatives of the sum of their losses."""
        weights: dict[float, Tensor] = {}
        rests: dict[float, list[Tensor]] = {}
        support_gradients: dict[Tensor, Tensor] = {}
        for objective, scoring in self.scoring.items():
            score = objective.score_vocabulary(rec, vocabulary, scoring)
            sums = {
                totals.loss: score.losses,
                **{totals.metrics[name]: score.metrics[name] for name in objective.metrics},
            }
            maxima = {totals.metrics[name] for name in objective.maxima}
            for total, values in sums.items():
                largest = total in maxima
                rec.dispatch(sum_by_slot, values, scoring.loss_ranges, total, slots=total.size, largest=largest)
            for temperature, tail in score.tail_logprobs.items():
                rests.setdefault(temperature, []).append(tail)
            support_gradients |= score.token_logprobs
            at, own = objective.temperatures[0], score.weights
            if own is None:
                continue
            if at in weights:
                weight_sum = rec.temp(own.shape, name="weights")
                rec.dispatch(add_forward, weights[at], own, weight_sum, size=weight_sum.size)
                own = weight_sum
            weights[at] = own
        return VocabularyGradient(weights, rests, support_gradients)

    def storages(self) -> set[Storage]:
        """All persistent storage that the program reads or writes, or that `upload` fills."""
        result = self.inputs.storages() | self.program.persistent_storages()
        return result | {tensor.storage for scoring in self.scoring.values() for tensor in scoring.tensors()}

    def upload(self, groups: Sequence[Group]) -> None:
        """Upload groups, which must fit into the batch."""
        segments = [segment for group in groups for segment in group.segments]
        spans = np.split(
            self.inputs.upload(self.device, segments), np.cumsum([len(group.segments) for group in groups])[:-1]
        )
        for objective, scoring in self.scoring.items():
            indices = [i for i, group in enumerate(groups) if self._objectives[group.slot] == objective]
            scoring.upload(self.device, [groups[i] for i in indices], [spans[i] for i in indices])
