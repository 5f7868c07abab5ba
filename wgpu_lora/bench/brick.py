"""The model and options that bricks run with, and the interface of a brick's work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from wgpu_lora.bench.contract import numbers_of
from wgpu_lora.bench.reference_check import ReferenceErrors
from wgpu_lora.bench.timing import Timings
from wgpu_lora.bench.training_step import ROW, adapter_set, benchmark_option_names, chosen_model
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program, missing_bytes
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.models.adapter_modules import ALL
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT, base_format

Extra = dict[str, float]
LEAST_TOKENS = 8  # with fewer, the gradients of the scores are mostly rounding errors


@dataclass
class Context:
    """A model and the options of a run. The model is loaded at most once and shared by the bricks.

    compute_dtype, tune: of the bricks of training. tune: choose tilings as a training run does.
    retune: time again what is known.
    """

    model: LoadedModel
    tokens: int = 512
    rank: int = 16
    compute_dtype: str = "f32"
    tune: bool = False
    retune: bool = False

    @classmethod
    def of(
        cls,
        device: Device,
        shape: str | None = None,
        model: str | None = None,
        layers: int | None = None,
        base_dtype: str = DEFAULT_FORMAT,
        **options: Any,
    ) -> Context:
        """The context of a named shape or a model. Raises UserError if an option is unknown or not possible."""
        if not (model or shape):
            shape = default_shape(device)
        with benchmark_option_names(ROW):
            context = cls(chosen_model(model, shape, layers, device, base_dtype), **options)
            TrainingArguments(compute_dtype=context.compute_dtype, lora_r=context.rank)  # checks them
        for option, value, minimum, maximum in (
            (flag("rank"), context.rank, 1, context.config.hidden_size),
            (flag("tokens"), context.tokens, LEAST_TOKENS, context.config.max_position_embeddings),
        ):
            if not minimum <= value <= maximum:
                raise UserError(f"{option} is {value}: give {minimum} to {maximum} for {context.name}.")
        return context

    @property
    def device(self) -> Device:
        return self.model.device

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def name(self) -> str:
        """A shape, a model directory or a hub id."""
        return self.model.name

    @property
    def base_dtype(self) -> str:
        return self.model.decoder.base_dtype

    def with_layers(self, layers: int) -> Context:
        """The same with the model's first layers, and nothing loaded; itself if these are all."""
        has_all_layers = layers == self.config.num_hidden_layers
        return self if has_all_layers else replace(self, model=self.model.declared(layers))

    def options(self) -> dict[str, str | int | bool]:
        """Everything that a result depends on, except the device."""
        return {
            "shape": self.name,
            "layers": self.config.num_hidden_layers,
            "tokens": self.tokens,
            "rank": self.rank,
            "base_dtype": self.base_dtype,
            "compute_dtype": self.compute_dtype,
            "tuned": self.tune,
        }

    def keys(self) -> dict[str, float]:
        """Names that the dims of all contracts may use."""
        return {
            **numbers_of(self.config),
            "tokens": self.tokens,
            "rank": self.rank,
            "weight_bits": base_format(self.base_dtype).bits,
            "parameters": float(sum(np.prod(shape) for shape in self.config.parameter_shapes().values())),
        }

    def session(
        self, buckets: Sequence[int], slots: int = 1, target_modules: str = ALL, positions: int | None = None
    ) -> Session:
        """A session of `slots` adapters of the run's rank on these modules; nothing is allocated."""
        adapters = adapter_set(self.config, self.device, self.rank, slots, target_modules)
        longest = positions or buckets[-1]
        return Session(self.model, adapters, list(buckets), positions=longest, compute_dtype=self.compute_dtype)

    @cached_property
    def timer(self) -> Timer:
        return Timer(self.device)

    def close(self) -> None:
        self.model.unload()
        if timer := self.__dict__.pop("timer", None):
            timer.free()


def default_shape(device: Device) -> str:
    """The smallest published shape, or tiny-qwen3 on a device that runs on the CPU."""
    return "tiny-qwen3" if device.info.kind == "software" else "qwen2.5-0.5b"


class Workload(ABC):
    """A case of a brick. Creating it records its programs and allocates nothing.

    case: name of the case; empty if there is only one.
    clock: `timestamps` of the device, or `host`.
    keys: names that the contract's dims may use, in addition to `Context.keys`.
    compares: whether it compares times of several programs, whose tilings then are all measured or all defaults.
    """

    case = ""
    compares = False
    clock = "host"
    keys: dict[str, float]

    @abstractmethod
    def nbytes(self) -> int:
        """Maximum bytes that `open` and all following calls add on the device."""

    def programs(self) -> list[Program]:
        """The programs whose tilings are chosen if tuning is on."""
        return []

    @abstractmethod
    def open(self, choices: Choices = NO_CHOICES) -> None:
        """Allocate, and build the programs with these tilings."""

    @abstractmethod
    def check(self, rng: np.random.Generator) -> ReferenceErrors | None:
        """Run on new random inputs and compare with the references; None if there are none."""

    @abstractmethod
    def run(self) -> float:
        """Run an iteration; returns its time in seconds."""

    def extra(self, timings: Timings) -> Extra:
        """Further figures of the timed iterations."""
        return {}

    @abstractmethod
    def close(self) -> None: ...


class SessionWorkload(Workload):
    """Steps of several sessions of one model, all allocated together."""

    def __init__(self, *sessions: Session):
        self.sessions = sessions

    def nbytes(self) -> int:
        return new_bytes(*self.sessions)

    def programs(self) -> list[Program]:
        return [program for session in self.sessions for program in session.programs()]

    def open(self, choices: Choices = NO_CHOICES) -> None:
        device = self.sessions[0].device
        device.peak_allocated = device.allocated  # of this brick only
        for session in self.sessions:
            session.allocate(choices=choices)

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def new_bytes(*sessions: Session) -> int:
    """Maximum bytes that allocating several sessions of one model together adds on the device."""
    missing = missing_bytes(set().union(*(session.storages() for session in sessions)))
    missing += sum(session.memory().groups["activations"] for session in sessions)
    return max(missing, sessions[0].model.bytes_to_load())
