"""One training step on made-up rows: what a profile, the search for a batch and the comparison with PyTorch measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from wgpu_lora.bench.words import ROW, own_words
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.inputs import Segment
from wgpu_lora.models.load import table_dtype
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.models.shapes import cut, shape_config
from wgpu_lora.models.synthetic import synthetic_model
from wgpu_lora.models.targets import ALL, targeted
from wgpu_lora.share import budget_bytes
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.initial import initial_matrices
from wgpu_lora.train.memory import both, check_adapters
from wgpu_lora.train.objectives.base import Group
from wgpu_lora.train.optimizer import SlotUpdate
from wgpu_lora.train.session import Session
from wgpu_lora.weights.registry import DEFAULT_FORMAT
from wgpu_lora.words import counted

WARMUP = 2  # steps that compile, and find where to split submits
LEARNING_RATE = 1e-4
SCALING = 2.0  # alpha / rank, the trainer's default
TILE = 16  # batches are padded to whole tiles of the matrix products, as the trainer pads them


class TrainingStep:
    """Forward, backward and update of `rows` rows of `tokens` tokens, every token trained, with adapters.

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
        for name, value in (("--rank", rank), ("The batch", rows)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, not {value}.")
        limit = model.config.max_position_embeddings
        if not 2 <= tokens <= limit:
            raise UserError(f"--tokens {tokens} is not possible: {model.name} is made for rows of 2 to {limit} tokens.")
        self.model, self.rows, self.tokens = model, rows, tokens
        config = model.config
        with own_words(ROW):
            adapted = TrainingArguments(lora_r=rank, target_modules=target_modules)
            check_adapters([adapted], config, budget_bytes(model.device.info))
        self._modules = targeted(target_modules, config)
        spec = SlotSpec(rank, dict.fromkeys(self._modules, SCALING))
        adapters = AdapterSet.declare(config, [spec], model.device.max_binding)
        bucket = -(-rows * tokens // TILE) * TILE
        self.session = Session(
            model, adapters, [bucket], positions=tokens, recompute=checkpointing, compute_dtype=compute_dtype
        )
        self.trained = rows * (tokens - 1)
        self._groups: list[Group] = []
        self._count = 0

    def allocate(self, choices: Choices = NO_CHOICES) -> None:
        """Loads the base and creates every buffer. Raises UserError where the device has no room."""
        self.session.allocate(choices=choices)
        adapters, shapes = self.session.adapters, self.model.config.lora_modules
        for number, module in enumerate(self._modules):
            matrices = initial_matrices(0, number, shapes[module], adapters.rank)
            adapters.write(self.session.device, 0, {module: matrices})
        ids = made_up_rows(self.rows, self.tokens, self.model.config.vocab_size)
        self._groups = [Group((Segment(row, row),), weight=1 / self.trained) for row in ids]

    def run(self) -> float:
        """One optimizer step as the trainer takes it; the mean loss of the trained tokens."""
        session, device = self.session, self.session.device
        session.begin()
        session.accumulate(self._groups)
        self._count += 1
        report = session.optimizer.apply(device, {0: SlotUpdate(self._count, LEARNING_RATE)})[0]
        return report.loss_sum / self.trained

    def seconds(self, runs: int, warmup: int = 0) -> list[float]:
        """The seconds of each of `runs` whole steps, the host's part included, after `warmup` that are not counted."""
        times = []
        for _ in range(warmup + runs):
            begin = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - begin)
        return times[warmup:]

    def close(self) -> None:
        """Frees all but the base."""
        self.session.close()


def made_up_rows(rows: int, tokens: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Token ids int32 [rows, tokens], the same for the same arguments."""
    return np.random.default_rng([seed, rows, tokens]).integers(0, vocab, (rows, tokens), np.int32)


def chosen_model(
    model: str | None, shape: str | None, layers: int | None, device: Device, base_dtype: str = DEFAULT_FORMAT
) -> LoadedModel:
    """A real model (the demo where nothing is named) or a synthetic one of a named shape; nothing is allocated.

    Raises:
        UserError: both are named, the shape or the type of its weights is not known, or it has not so many layers.
    """
    if model and shape:
        raise UserError("--model and --shape are both given: leave one of them out.")
    TrainingArguments(base_dtype=base_dtype)  # refuses one that is not known
    if shape:
        return synthetic_model(shape_config(shape, layers), device, base_dtype, shape)
    opened = open_model(model or "demo", device, base_dtype)
    return opened if layers is None else cut_model(opened, layers)


def cut_model(model: LoadedModel, layers: int) -> LoadedModel:
    """The same model with its first `layers` layers alone. UserError where it has not so many."""
    config = cut(model.config, layers)
    table = table_dtype(model.checkpoint, config)
    decoder = Decoder.declare(config, model.decoder.base_dtype, table, model.device.max_binding)
    return replace(model, config=config, decoder=decoder, weights_loaded=False)


def check_fits(model: LoadedModel, needs: Callable[[LoadedModel], int], limit: int | None = None) -> None:
    """Raises UserError, with the number of layers that would fit, where the work on a model does not.

    Args:
        needs: model -> the bytes at the peak of what is to be done with it; it may be asked of cut models too.
        limit: bytes that may be used, where that is less than what the device has.
    """
    available = budget_bytes(model.device.info, limit).bytes
    layers = model.config.num_hidden_layers
    need = needs(model)
    if available is None or need <= available:
        return
    most = largest(lambda count: needs(cut_model(model, count)) <= available, layers - 1)
    advice = f"--layers {most} would fit" if most else "not even one layer would fit, so use fewer tokens"
    whole = f"{model.name} with {counted(layers, 'layer')}"
    raise UserError(f"{whole} needs {both(need)}, but {both(available)} are available: {advice}.")


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n of 1 .. most that fits, 0 where none does, by binary search; what fits, fits for all smaller n.

    A size that cannot be had at all (UserError) does not fit.
    """

    def possible(size: int) -> bool:
        try:
            return fits(size)
        except UserError:
            return False

    if most < 1 or possible(most):
        return max(most, 0)
    low, high = 0, most  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low
