"""What a brick runs on, and what every brick's work looks like to those who measure it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from wgpu_lora.bench.check import Checked, check, poison
from wgpu_lora.bench.contract import numbers_of
from wgpu_lora.bench.recording import Recording
from wgpu_lora.bench.stats import Timings
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.errors import BindingTooLarge
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Storage
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.load import table_dtype
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.models.shapes import cut, shape_config
from wgpu_lora.models.synthetic import synthetic_model
from wgpu_lora.names.allowed import COMPUTE_DTYPES
from wgpu_lora.weights.registry import BASE_FORMATS, DEFAULT_FORMAT, base_format

Extra = dict[str, float]


class Workload(Protocol):
    """One case of a brick. Made, it has recorded and declared what it needs, and allocated nothing.

    case: tells a brick's cases apart; empty where there is one.
    keys: what the contract's dims may use beside the config and the run's options.
    """

    case: str
    keys: dict[str, float]

    @property
    def clock(self) -> str:
        """`timestamps` of the device, or `host`."""

    def nbytes(self) -> int:
        """Bytes of device memory that `open` and all that follows will add."""

    def programs(self) -> list[Program]:
        """What the product would tune before it runs them."""

    def open(self, choices: Choices = NO_CHOICES) -> None:
        """Allocates, and builds the programs in the tilings chosen for them."""

    def check(self, rng: np.random.Generator) -> Checked | None:
        """Runs on fresh random inputs and compares with the references; None where there is nothing to compare with."""

    def run(self) -> float:
        """One iteration; its seconds."""

    def extra(self, timings: Timings) -> Extra:
        """Further figures of the iterations so far."""

    def close(self) -> None: ...


LEAST_TOKENS = 8  # of fewer, the scores' gradients are nothing but rounding, and no error relative to them means much


@dataclass
class Context:
    """The model's shape and the options of a run; `model` is loaded at most once and shared by the bricks.

    name: a shape's, or the model directory or hub id that `real` says this is. compute_dtype: of training's products.
    tune: choose tilings as a training run does, before the bricks of training.
    """

    device: Device
    name: str
    config: ModelConfig
    tokens: int = 512
    rank: int = 16
    base_dtype: str = DEFAULT_FORMAT
    compute_dtype: str = "f32"
    tune: bool = False
    real: bool = False
    _model: LoadedModel | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        device: Device,
        shape: str | None = None,
        model: str | None = None,
        layers: int | None = None,
        tokens: int = 512,
        rank: int = 16,
        base_dtype: str = DEFAULT_FORMAT,
        compute_dtype: str = "f32",
        tune: bool = False,
    ) -> Context:
        """Of a named shape or a model. Raises UserError for what is not known or cannot be."""
        for option, value, least in (("--tokens", tokens, LEAST_TOKENS), ("--rank", rank, 1)):
            if value < least:
                raise UserError(f"{option} is {value}: give at least {least}.")
        for option, kind, known in (
            ("--base-dtype", base_dtype, BASE_FORMATS),
            ("--compute-dtype", compute_dtype, COMPUTE_DTYPES),
        ):
            if kind not in known:
                raise UserError(f"{option} {kind} is not known: choose one of {', '.join(known)}.")
        if model:
            config, name = open_model(model, device, base_dtype).config, model
        else:
            name = shape or default_shape(device)
            config = shape_config(name)
        if rank > config.hidden_size:
            raise UserError(f"--rank {rank} is more than the hidden size {config.hidden_size} of {name}: lower it.")
        if tokens > config.max_position_embeddings:
            raise UserError(
                f"--tokens {tokens} is more than the {config.max_position_embeddings} positions of {name}: lower it."
            )
        return cls(device, name, cut(config, layers), tokens, rank, base_dtype, compute_dtype, tune, model is not None)

    def with_layers(self, layers: int) -> Context:
        """The same of a model of fewer layers, with nothing loaded."""
        return replace(self, config=cut(self.config, layers), _model=None)

    def keys(self) -> dict[str, float]:
        """What the dims of every contract may use."""
        config = self.config
        return {
            **numbers_of(config),
            "tokens": self.tokens,
            "rank": self.rank,
            "weight_bits": base_format(self.base_dtype).bits,
            "parameters": float(sum(np.prod(shape) for shape in config.parameter_shapes().values())),
        }

    def declare(self) -> LoadedModel:
        """A model of this shape with nothing on the device."""
        if not self.real:
            return synthetic_model(self.config, self.device, self.base_dtype, self.name)
        model = open_model(self.name, self.device, self.base_dtype)
        if model.config.num_hidden_layers == self.config.num_hidden_layers:
            return model
        dtype = table_dtype(model.checkpoint, self.config)
        decoder = Decoder.declare(self.config, self.base_dtype, dtype, self.device.max_binding)
        return replace(model, config=self.config, decoder=decoder)

    @property
    def model(self) -> LoadedModel:
        """The shared one."""
        if self._model is None:
            self._model = self.declare()
        return self._model

    def close(self) -> None:
        if self._model is not None:
            unload(self._model)
            self._model = None


def default_shape(device: Device) -> str:
    """The smallest published shape, or on a device that runs on the CPU this project's own tiny one."""
    return "tiny-qwen3" if device.info.kind == "software" else "qwen2.5-0.5b"


def unload(model: LoadedModel) -> None:
    """Frees a model's weights."""
    release(model.device, model.decoder.storages())
    model.weights_loaded = False


class ProgramWorkload:
    """Recorded programs timed by the device's own clock.

    Args:
        timed: the program that is measured; `recording.forward` and `.backward` run before, where they are others.
        beside: a program whose time `added_share` sets it against.
    """

    def __init__(
        self,
        recording: Recording,
        timed: Program,
        keys: dict[str, float] | None = None,
        beside: Program | None = None,
    ):
        self.case = ""
        self.keys = keys or {}
        self.device = recording.device
        self._recording, self._timed, self._beside = recording, timed, beside
        self._beside_seconds: list[float] = []
        self._timer: Timer | None = None
        self._arena = Arena(self.device)
        limit = self.device.max_binding
        for storage in recording.storages():
            if storage.nbytes > limit:
                raise BindingTooLarge(storage.name, storage.nbytes, limit)

    @property
    def clock(self) -> str:
        return self._timer.clock if self._timer else "host"

    def programs(self) -> list[Program]:
        recording = self._recording
        programs = (recording.forward, recording.backward, self._timed, self._beside)
        return list(dict.fromkeys(p for p in programs if p and p.dispatches))

    def _storages(self) -> set[Storage]:
        return self._recording.storages().union(*(p.persistent_storages() for p in self.programs()))

    def _arena_sizes(self) -> list[int]:
        return Arena.sizes_for([program.plan() for program in self.programs()])

    def nbytes(self) -> int:
        return missing_bytes(self._storages()) + sum(self._arena_sizes())

    def open(self, choices: Choices = NO_CHOICES) -> None:
        self._timer = Timer(self.device)
        allocate(self.device, self._storages())
        self._arena = Arena(self.device, self._arena_sizes())
        for program in self.programs():
            program.build(self._arena, choices)

    def check(self, rng: np.random.Generator) -> Checked:
        self._recording.fresh(rng)
        for buffer in self._arena.buffers:
            poison(self.device, buffer)
        found = Checked()
        for program in dict.fromkeys((self._recording.forward, self._recording.backward)):
            check(program, found)
        return found

    def run(self) -> float:
        assert self._timer is not None, "open() first"
        if self._beside:
            self._beside_seconds.append(self._timer.run(self._beside))
        return self._timer.run(self._timed)

    def extra(self, timings: Timings) -> Extra:
        if not self._beside:
            return {}
        beside = Timings.of(self._beside_seconds[-timings.iterations :]).median
        return {"frozen_seconds": beside, "added_share": timings.median / beside}

    def close(self) -> None:
        if self._timer:
            self._timer.free()
        self._arena.free()
        release(self.device, self._storages())


def timed_by_host(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
