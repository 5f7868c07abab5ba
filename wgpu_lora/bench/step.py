"""Training steps on synthetic rows: what bricks, a profile, the search for a batch and comparisons measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from wgpu_lora.bench.check import Checked, check, poison
from wgpu_lora.bench.stats import timed
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import NUMPY
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.inputs import Segment
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.models.synthetic import synthetic_model
from wgpu_lora.models.targets import ALL, targeted
from wgpu_lora.names.naming import flag, naming, renamed, setting
from wgpu_lora.share import budget_bytes
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.initial import initial_matrices
from wgpu_lora.train.memory import both, check_adapters
from wgpu_lora.train.objectives.base import Group
from wgpu_lora.train.optimizer import Optimizer, SlotUpdate
from wgpu_lora.train.session import Session
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.words import counted

R = TypeVar("R")
WARMUP = 2  # steps that compile, and find where to split submits
LEARNING_RATE = 1e-4
SCALING = 2.0  # alpha / rank, the trainer's default
TILE = 16  # batches are padded to whole tiles of the matrix products, as the trainer pads them
EARLY = SlotUpdate(3, LEARNING_RATE, TrainingArguments(weight_decay=0.01))  # a usual step for kernels to be checked in
# What a training run's options are called by commands that take a step's sizes, and by those that train.
ROW = {"per_device_train_batch_size": "tokens", "max_length": "tokens", "lora_r": "rank"}
TRAINING = {
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "tokens",
    "lora_r": "rank",
}


def own_words(names: dict[str, str]) -> AbstractContextManager[None]:
    """What refuses a training run calls its options by these names meanwhile."""
    return naming(renamed(names))


def adapter_set(
    config: ModelConfig, device: Device, rank: int, slots: int = 1, target_modules: str = ALL
) -> AdapterSet:
    """Adapters of one rank on these modules."""
    spec = SlotSpec(rank, dict.fromkeys(targeted(target_modules, config), SCALING))
    return AdapterSet.declare(config, [spec] * slots, device.max_binding)


class SlotStep:
    """An optimizer step of all slots of a session as the trainer takes it, every token of its rows trained.

    rows: (slot, tokens) of each row.
    """

    def __init__(self, session: Session, rows: Sequence[tuple[int, int]]):
        self.session = session
        self.tokens = sum(length for _, length in rows)
        self._rows = list(rows)
        self._trained: Counter[int] = Counter()
        for slot, length in rows:
            self._trained[slot] += length - 1
        self.trained = self._trained.total()
        self._groups: list[Group] = []
        self._count = 0

    def fill(self, rows: Sequence[np.ndarray]) -> None:
        """The token ids of each row, for all runs that follow."""
        self._groups = [
            Group((Segment(ids, ids, slot),), slot, 1 / max(1, self._trained[slot]))
            for ids, (slot, _) in zip(rows, self._rows, strict=True)
        ]

    def check(self, rng: np.random.Generator, found: Checked) -> Checked:
        """Compares every kind of dispatch with its reference, on new rows and on values that training may have."""
        vocab = self.session.model.config.vocab_size
        self.fill([rng.integers(0, vocab, length) for _, length in self._rows])
        batch = self.session.batch_for(self._groups)
        make_up(self.session, rng)
        batch.upload(self._groups)
        check(batch.program, found)
        return check(self.session.optimizer.program, found)

    def run(self) -> float:
        """One optimizer step; the mean loss of the trained tokens."""
        session = self.session
        session.begin()
        session.accumulate(self._groups)
        self._count += 1
        update = SlotUpdate(self._count, LEARNING_RATE)
        reports = session.optimizer.apply(session.device, dict.fromkeys(self._trained, update))
        return sum(report.loss_sum for report in reports.values()) / max(1, self.trained)

    def seconds(self, runs: int, warmup: int = 0) -> list[float]:
        """The seconds of each of `runs` whole steps, the host's part included, after `warmup` that are not counted."""
        return [timed(self.run) for _ in range(warmup + runs)][warmup:]

    def close(self) -> None:
        """Frees all but the base."""
        self.session.close()


class TrainingStep(SlotStep):
    """Forward, backward and update of `rows` rows of `tokens` tokens, with one adapter.

    Declaring it allocates nothing, so its memory can be asked for first: `session.memory()`.

    Raises:
        UserError: the rows are longer than the model's positions, adapters of this rank cannot be meant, or a tensor is
            larger than the device can bind.
    """

    def __init__(
        self,
        model: LoadedModel,
        rows: int,
        tokens: int,
        rank: int = 16,
        checkpointing: bool = False,
        target_modules: str = ALL,
        compute_dtype: str = "f32",
    ):
        for name, value in ((flag("rank"), rank), ("The batch", rows)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, not {value}.")
        config, limit = model.config, model.config.max_position_embeddings
        if not 2 <= tokens <= limit:
            raise UserError(
                f"{setting('tokens', tokens)} is not possible: {model.name} is made for rows of 2 to {limit} tokens."
            )
        with own_words(ROW):
            adapted = TrainingArguments(lora_r=rank, target_modules=target_modules)
            check_adapters([adapted], config, budget_bytes(model.device.info))
        adapters = adapter_set(config, model.device, rank, 1, target_modules)
        bucket = -(-rows * tokens // TILE) * TILE
        session = Session(
            model, adapters, [bucket], positions=tokens, recompute=checkpointing, compute_dtype=compute_dtype
        )
        super().__init__(session, [(0, tokens)] * rows)

    @classmethod
    def fitting(cls, model: LoadedModel, *sizes: Any, limit: int | None = None, **options: Any) -> TrainingStep:
        """A step whose plan fits the device's memory, or `limit` bytes; UserError with the layers that would fit."""
        layers = model.config.num_hidden_layers
        step = cls(model, *sizes, **options)

        def needs(count: int) -> int:
            of = step if count == layers else cls(model.declared(count), *sizes, **options)
            return of.session.memory().peak

        whole = f"{model.name} with {counted(layers, 'layer')}"
        check_room(whole, needs, layers, budget_bytes(model.device.info, limit).bytes)
        return step

    def allocate(self, choices: Choices = NO_CHOICES) -> None:
        """Loads the base and creates every buffer. Raises UserError where the device has no room."""
        self.session.allocate(choices=choices)
        adapters, config = self.session.adapters, self.session.model.config
        for number, module in enumerate(adapters.specs[0].scaling):
            matrices = initial_matrices(0, number, config.lora_modules[module], adapters.rank)
            adapters.write(self.session.device, 0, {module: matrices})
        self.fill(list(synthetic_rows(len(self._rows), self._rows[0][1], config.vocab_size)))


def make_up(session: Session, rng: np.random.Generator) -> None:
    """Adapters, gradients and optimizer state of random values, and NaN wherever a step is to write."""
    assert session.arena is not None, "allocate() first"
    for buffer in session.arena.buffers:
        poison(session.device, buffer)
    fill_adapters(session.device, session.adapters, rng)
    fill_update(session.device, session.optimizer, rng)
    session.begin()


def fill_adapters(device: Device, adapters: AdapterSet, rng: np.random.Generator) -> None:
    """Random parameters and gradients, where these are allocated."""
    for page in (*adapters.params, *adapters.grads):
        if page.storage.buffer is not None:
            device.write(page.storage.buffer, np.float32(0.02) * rng.standard_normal(page.shape, np.float32))


def fill_update(device: Device, optimizer: Optimizer, rng: np.random.Generator) -> None:
    """What an early step of all slots may find: random state, and NaN in the report that it is to write."""
    optimizer.initialise(device)
    poison(device, optimizer.report.storage.buffer)
    for tensor, values in optimizer.settings(dict.fromkeys(range(optimizer.slots), EARLY)).items():
        device.write(tensor.storage.buffer, values)
    for state, pages in optimizer.state.items():
        draw = rng.standard_normal if state.least is None else rng.random
        for page in pages:
            values = draw(page.shape, np.float32) if state.dtype == "f32" else np.zeros(page.shape)
            values = (values + (state.least or 0)).astype(NUMPY[state.dtype])
            device.write(page.storage.buffer, values)


def synthetic_rows(rows: int, tokens: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Token ids int32 [rows, tokens], the same for the same arguments."""
    return np.random.default_rng([seed, rows, tokens]).integers(0, vocab, (rows, tokens), np.int32)


# -- models and what fits ----------------------------------------------------------------------------------------------


def chosen_model(
    model: str | None, shape: str | None, layers: int | None, device: Device, base_dtype: str = DEFAULT_FORMAT
) -> LoadedModel:
    """A real model (the demo where nothing is named) or a synthetic one of a named shape; nothing is allocated.

    Raises:
        UserError: both are named, the shape or the type of its weights is not known, or it has not so many layers.
    """
    if model and shape:
        raise UserError(f"{flag('model')} and {flag('shape')} are both given: leave one of them out.")
    TrainingArguments(base_dtype=base_dtype)  # refuses one that is not known
    if shape:
        return synthetic_model(shape_config(shape, layers), device, base_dtype, shape)
    opened = open_model(model or "demo", device, base_dtype)
    return opened if layers is None else opened.declared(layers)


def check_room(what: str, needs: Callable[[int], int], layers: int, available: int | None) -> None:
    """Raises UserError where `needs(layers)` bytes are not available; nobody may be able to tell (None)."""
    need = needs(layers)
    if available is None or need <= available:
        return
    most = largest(lambda count: needs(count) <= available, layers - 1)
    advice = (
        f"it fits with {setting('layers', most)}"
        if most
        else "not even one layer fits, so use a smaller model or fewer tokens"
    )
    raise UserError(f"{what} needs {both(need)} of device memory, but {both(available)} are available: {advice}.")


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n of 1 .. most that fits, 0 where none does; what fits, fits for all smaller n.

    A size that cannot be had at all (UserError) does not fit.
    """

    def refusal(size: int) -> bool:
        try:
            return not fits(size)
        except UserError:
            return True

    return search(refusal, most, most)[0] if most > 0 else 0


def search(refusal: Callable[[int], R], most: int | None, first: int = 1) -> tuple[int, R | None]:
    """The largest n of 1 .. most that is not refused, 0 where all are, and the refusal of the next, None of `most`.

    It doubles from `first`, then bisects, so that nothing is asked for that is more than twice what is not refused.
    """
    low, high, refused = 0, first, None
    while low != most and not (refused := refusal(high)):
        low, high = high, 2 * high if most is None else min(2 * high, most)
    while low != most and high - low > 1:
        middle = (low + high) // 2
        found = refusal(middle)
        low, high, refused = (low, middle, found) if found else (middle, high, refused)
    return low, refused or None
