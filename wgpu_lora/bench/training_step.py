"""Training steps on synthetic rows: measured by bricks, profiles, the search for a batch and comparisons."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from wgpu_lora.bench.reference_check import ReferenceErrors, check, fill_with_nan
from wgpu_lora.bench.timing import run_seconds
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import budget_bytes
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.models.adapter_modules import ALL, resolve_target_modules
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.synthetic_models import synthetic_model
from wgpu_lora.names.spelling import flag, naming, setting, with_renamed_options
from wgpu_lora.names.text import count_noun
from wgpu_lora.ops.activation_storage import Saving
from wgpu_lora.train.init_methods import offsets
from wgpu_lora.train.memory import check_adapters, format_bytes_exact
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.adapter_init import SeededMatrices
from wgpu_lora.train.session.optimizer_update import Optimizer, SlotUpdate
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT

WARMUP = 2  # steps that compile, and measure where to split submits
LEARNING_RATE = 1e-4
SCALING = 2.0  # alpha / rank, the trainer's default
TILE = 16  # batches are padded to whole tiles of the matrix products, as in training
EARLY = SlotUpdate(3, LEARNING_RATE, TrainingArguments(weight_decay=0.01))  # the step that kernels are checked in
# Options of a training run, as the commands for steps and those for whole runs call them.
ROW = {"per_device_train_batch_size": "tokens", "max_length": "tokens", "lora_r": "rank"}
TRAINING = {
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "tokens",
    "lora_r": "rank",
    "num_train_epochs": "epochs",
}


def benchmark_option_names(names: Mapping[str, str]) -> AbstractContextManager[None]:
    """In the block, messages spell the options of a training run by these names."""
    return naming(with_renamed_options(names))


def training_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a training run from those of a command, without those that are None."""
    names = {option: name for name, option in TRAINING.items()}
    return {names.get(option, option): value for option, value in options.items() if value is not None}


def adapter_set(
    config: ModelConfig,
    device: Device,
    rank: int,
    slots: int = 1,
    target_modules: str = ALL,
    dora: bool = False,
    offset: bool = False,
) -> AdapterSet:
    """Adapters of one rank on these modules. offset: beside a frozen one, as PiSSA's."""
    scaling = dict.fromkeys(resolve_target_modules(target_modules, config), SCALING)
    spec = SlotSpec(rank, scaling, dora, SlotSpec(rank, scaling) if offset else None)
    return AdapterSet.declare(config, [spec] * slots, device.max_binding)


class SlotStep:
    """An optimizer step of all slots of a session, as in training, with a loss on every token.

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
        """Set the token ids of each row, for all following runs."""
        self._groups = [
            Group((Segment(ids, ids, slot),), slot, 1 / max(1, self._trained[slot]))
            for ids, (slot, _) in zip(rows, self._rows, strict=True)
        ]

    def fill_random(self, rng: np.random.Generator) -> None:
        vocab = self.session.model.config.vocab_size
        self.fill([rng.integers(0, vocab, length) for _, length in self._rows])

    def check(self, rng: np.random.Generator, checked: ReferenceErrors) -> ReferenceErrors:
        """Compare every kind of dispatch with its reference, on new rows and a plausible state of training."""
        self.fill_random(rng)
        batch = self.session.batch_for(self._groups)
        fill_with_random_state(self.session, rng)
        batch.upload(self._groups)
        check(batch.program, checked)
        return check(self.session.optimizer.program, checked)

    def run(self) -> float:
        """Take one optimizer step; returns the mean loss of the trained tokens."""
        session = self.session
        session.begin()
        session.accumulate(self._groups)
        self._count += 1
        update = SlotUpdate(self._count, LEARNING_RATE)
        reports = session.optimizer.apply(session.device, dict.fromkeys(self._trained, update))
        return sum(report.loss_sum for report in reports.values()) / max(1, self.trained)

    def seconds(self, runs: int) -> list[float]:
        """Take `runs` steps; returns the time of each in seconds, by the host's clock."""
        return [run_seconds(self.run) for _ in range(runs)]

    def close(self) -> None:
        """Free everything except the base."""
        self.session.close()


class TrainingStep(SlotStep):
    """A step of a run with these options and one adapter: a batch whose rows all have the maximum length.

    Creating it allocates nothing, so its memory can be asked for first: `session.memory()`.

    Raises:
        UserError: the rows are longer than the model's positions, the rank is far too large, or a tensor is larger than
            a binding of the device.
    """

    def __init__(self, model: LoadedModel, args: TrainingArguments):
        rows, tokens, config = args.batching[1], args.length, model.config
        if tokens > config.max_position_embeddings:
            raise UserError(
                f"{setting('max_length', tokens)} is not possible: {model.name} supports rows of up to "
                f"{config.max_position_embeddings:,} tokens."
            )
        check_adapters([args], config, budget_bytes(model.device.info))
        kind = args.use_dora, offsets(args.init_lora_weights)
        session = Session(
            model,
            adapter_set(config, model.device, args.lora_r, 1, args.target_modules, *kind),
            [-(-rows * tokens // TILE) * TILE],
            positions=tokens,
            dropout=args.lora_dropout > 0,
            recompute=args.gradient_checkpointing,
            compute_dtype=args.compute_dtype,
            saving=Saving(args.activation_dtype, args.offload_activations),
            optim=optimizer_of(args),
        )
        super().__init__(session, [(0, tokens)] * rows)
        self._initial = SeededMatrices(args, config)

    @classmethod
    def fitting(cls, model: LoadedModel, args: TrainingArguments, limit: int | None = None) -> TrainingStep:
        """A step that fits into the device's memory, or `limit` bytes. The UserError names how many layers would."""
        layers, step = model.config.num_hidden_layers, cls(model, args)

        def needs(count: int) -> int:
            of = step if count == layers else cls(model.declared(count), args)
            return of.session.memory().peak_device_bytes

        room = budget_bytes(model.device.info, limit).bytes
        check_room(f"{model.name} with {count_noun(layers, 'layer')}", needs, layers, room)
        return step

    def allocate(self, choices: Choices = NO_CHOICES) -> None:
        """Load the base and create all buffers. Raises UserError if the device has too little memory."""
        session = self.session
        session.allocate(choices=choices)
        session.place_initial(0, self._initial.on(session.model))
        vocab = session.model.config.vocab_size
        self.fill(list(synthetic_rows(len(self._rows), self._rows[0][1], vocab)))


def fill_with_random_state(session: Session, rng: np.random.Generator) -> None:
    """Fill adapters, gradients and optimizer state with random values, and temporaries with NaN."""
    assert session.arena is not None, "allocate() first"
    for buffer in session.arena.buffers:
        fill_with_nan(session.device, buffer)
    fill_adapters(session.device, session.adapters, rng)
    fill_update(session.device, session.optimizer, rng)
    session.begin()


def fill_adapters(device: Device, adapters: AdapterSet, rng: np.random.Generator) -> None:
    """Fill parameters, and gradients if they are allocated, with random values."""
    for page in (*adapters.params, *adapters.grads):
        if page.storage.buffer is not None:
            device.write(page.storage.buffer, np.float32(0.02) * rng.standard_normal(page.shape, np.float32))


def fill_update(device: Device, optimizer: Optimizer, rng: np.random.Generator) -> None:
    """Fill the inputs of an early update of all slots: random state, and NaN in the report, which it writes."""
    optimizer.initialise(device)
    fill_with_nan(device, optimizer.report.storage.buffer)
    for tensor, values in optimizer.settings(dict.fromkeys(range(optimizer.slots), EARLY)).items():
        device.write(tensor.storage.buffer, values)
    optimizer.state.fill(device, rng)


def synthetic_rows(rows: int, tokens: int, vocab: int) -> np.ndarray:
    """Token ids int32 [rows, tokens], the same for the same arguments."""
    return np.random.default_rng([0, rows, tokens]).integers(0, vocab, (rows, tokens), np.int32)


# -- models and what fits ----------------------------------------------------------------------------------------------


def chosen_model(
    model: str | None, shape: str | None, layers: int | None, device: Device, base_dtype: str = DEFAULT_FORMAT
) -> LoadedModel:
    """A model (the demo by default), or a synthetic one of a named shape; nothing is allocated.

    Raises:
        UserError: both are given, one is unknown, or the model has fewer layers.
    """
    if model and shape:
        raise UserError(f"{flag('model')} and {flag('shape')} are both given: leave one of them out.")
    TrainingArguments(base_dtype=base_dtype)  # refuses unknown types
    if shape:
        return synthetic_model(shape_config(shape, layers), device, base_dtype, shape)
    opened = open_model(model or "demo", device, base_dtype)
    return opened if layers is None else opened.declared(layers)


def check_room(label: str, needs: Callable[[int], int], layers: int, available: int | None) -> None:
    """Raise UserError, with the layers that fit, if `needs(layers)` exceeds the available bytes (None: not known)."""
    need = needs(layers)
    if available is None or need <= available:
        return
    max_layers = largest(lambda count: needs(count) <= available, layers - 1)
    advice = (
        f"it fits with {setting('layers', max_layers)}"
        if max_layers
        else "not even one layer fits, so use a smaller model or fewer tokens"
    )
    raise UserError(
        f"{label} needs {format_bytes_exact(need)} of device memory, but {format_bytes_exact(available)} are "
        f"available: {advice}."
    )


def largest(fits: Callable[[int], bool], maximum: int) -> int:
    """The largest n of 1 .. maximum that fits, 0 if none does; if n fits, so do all smaller ones.

    A size for which `fits` raises UserError does not fit.
    """

    def exceeds(size: int) -> bool:
        try:
            return not fits(size)
        except UserError:
            return True

    return bisect_left(range(1, maximum + 1), True, key=exceeds)
