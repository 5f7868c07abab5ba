"""Models that run beside the student and say what its objectives learn from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wgpu_lora.errors import NotFiniteError
from wgpu_lora.events import Events
from wgpu_lora.formats.peft_adapter import Matrices
from wgpu_lora.gpu.program import Arena, Program
from wgpu_lora.gpu.tensor import Storage
from wgpu_lora.gpu.tuning_cache import Choices
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec, fix_gains
from wgpu_lora.models.batch_inputs import Tables
from wgpu_lora.models.loaded_model import LoadedModel, staging_bytes
from wgpu_lora.train.distill.teacher import Teacher, TopK
from wgpu_lora.train.distill.teacher_logits import target_ids, teacher_rows
from wgpu_lora.train.objectives.objective import Group

Key = tuple[Path, str]  # of a model's weights: its path and base dtype


@dataclass(frozen=True, eq=False)
class LiveTeacher:
    """A slot's teacher. adapter: its spec, matrices and digest. temperature: of its distribution."""

    model: LoadedModel
    selection: TopK
    temperature: float
    adapter: tuple[SlotSpec, Matrices, str] | None = None

    @property
    def key(self) -> Key:
        """Equal for models that are loaded once."""
        return _key(self.model)

    def digest(self) -> str:
        """SHA-256 of what its logits depend on."""
        adapter = self.adapter[2] if self.adapter else ""
        parts = [self.model.checkpoint.digest(), self.model.config.digest(), adapter]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _key(model: LoadedModel) -> Key:
    return model.path.resolve(), model.decoder.base_dtype


class Teachers:
    """The live teachers of a session. Those with the same weights are one model, which may be the student's base.

    Args:
        by_slot: the teachers.
        buckets: batch sizes in tokens. positions: length of the longest row.
        tables: the student's.
        shared: whether the student's base is frozen, so that it may be a teacher's, too.
    """

    def __init__(
        self,
        student: LoadedModel,
        by_slot: Mapping[int, LiveTeacher],
        buckets: Sequence[int],
        positions: int,
        tables: Tables,
        compute_dtype: str,
        shared: bool = True,
    ):
        self.models: list[LoadedModel] = []  # other than the student
        self._by_slot, self._device = by_slot, student.device
        self.groups: list[_TeacherBatch] = []
        models, all_tables = dict[Key, LoadedModel](), dict[Key, Tables]()
        if shared:
            models[_key(student)], all_tables[_key(student)] = student, tables
        for live in by_slot.values():
            if live.key not in models:
                models[live.key] = live.model
                all_tables[live.key] = Tables.declare(live.model.config.tables(), positions)
                self.models.append(live.model)
                for storage in live.model.decoder.storages():
                    storage.group = "teacher"
        self._tables = [result for result in all_tables.values() if result is not tables]
        for key, selection in dict.fromkeys((live.key, live.selection) for live in by_slot.values()):
            group = {slot: live for slot, live in by_slot.items() if (live.key, live.selection) == (key, selection)}
            self.groups.append(_TeacherBatch(models[key], group, buckets, all_tables[key], selection, compute_dtype))

    def programs(self) -> list[Program]:
        return [program for group in self.groups for program in group.teacher.programs()]

    def storages(self) -> set[Storage]:
        result: set[Storage] = set()
        weights = (model.decoder.storages() for model in self.models)
        return result.union(*weights, *(t.storages() for t in self._tables), *(g.storages() for g in self.groups))

    def base_bytes(self, on_device: bool | None = None) -> int:
        """Bytes of the weights that are not the student's; of those that are on the device, if `on_device`."""
        models = [model for model in self.models if model.weights_loaded or not on_device]
        return sum(storage.nbytes for storage in {s for model in models for s in model.decoder.storages()})

    def staging_bytes(self) -> int:
        """Bytes that loading needs beside the weights, at most."""
        return max((staging_bytes(model.decoder) for model in self.models), default=0)

    def load(self, events: Events) -> None:
        """Load the weights. Raises UserError."""
        for model in self.models:
            try:
                model.load_weights(events)
            except NotFiniteError as error:
                raise NotFiniteError(f"In the teacher {model.name}, {error}") from None

    def weights_sha256(self, slot: int) -> str | None:
        """That of a slot's teacher, once loaded; None without."""
        result = [group.model.weights_sha256 for group in self.groups if slot in group.slots]
        return result[0] if result else None

    def place(self, arena: Arena, choices: Choices) -> None:
        """Upload adapters and tables, once everything is allocated."""
        for tables in self._tables:
            tables.upload(self._device)
        for group in self.groups:
            group.place(arena, choices)

    def close(self) -> None:
        for model in self.models:
            model.unload()

    def with_teacher_logits(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with what their teachers say, if they have one and it is not known."""
        result = list(groups)
        for teacher_group in self.groups:
            indices = [
                i for i, group in enumerate(groups) if group.slot in teacher_group.slots and group.teacher is None
            ]
            if not indices:
                continue
            segments = [groups[i].segments[0] for i in indices]
            supports = teacher_group.teacher.supports(
                [replace(segment, slot=teacher_group.slots[segment.slot or 0]) for segment in segments],
                [groups[i].index for i in indices],
            )
            for i, support in zip(indices, supports, strict=True):
                temperature = self._by_slot[groups[i].slot].temperature
                rows = teacher_rows(
                    support, target_ids(groups[i].segments[0].labels), teacher_group.teacher.vocab_size, temperature
                )
                result[i] = replace(groups[i], teacher=rows)
        return result


class _TeacherBatch:
    """Slots whose teachers have the same weights and keep the same tokens, but may have adapters of their own."""

    def __init__(
        self,
        model: LoadedModel,
        by_slot: Mapping[int, LiveTeacher],
        buckets: Sequence[int],
        tables: Tables,
        selection: TopK,
        compute_dtype: str,
    ):
        self.model = model
        adapters = {live.adapter[2]: live.adapter for live in by_slot.values() if live.adapter}
        self._matrices = [matrices for _, matrices, _ in adapters.values()]
        numbers = {digest: number for number, digest in enumerate(adapters)}
        self.slots = {slot: numbers[live.adapter[2]] if live.adapter else None for slot, live in by_slot.items()}
        specs = [spec for spec, _, _ in adapters.values()]
        limit = model.device.max_binding
        self.adapters = AdapterSet.declare(model.config, specs, limit, "teacher") if specs else None
        self.teacher = Teacher(model, self.adapters, buckets, tables, selection, compute_dtype)

    def storages(self) -> set[Storage]:
        return self.teacher.storages() | (self.adapters.storages() if self.adapters else set())

    def place(self, arena: Arena, choices: Choices) -> None:
        self.teacher.use(arena, choices)
        if self.adapters:
            self.adapters.upload_constants(self.teacher.device)
            for number, matrices in enumerate(self._matrices):
                self.adapters.write(self.teacher.device, number, matrices)
            fix_gains(self.model, self.adapters)
