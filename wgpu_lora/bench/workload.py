"""What a brick runs on, and what every brick's work looks like to those who measure it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from wgpu_lora.bench.check import Checked
from wgpu_lora.bench.contract import numbers_of
from wgpu_lora.bench.stats import Timings
from wgpu_lora.bench.step import ROW, adapter_set, chosen_model, own_words
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program, missing_bytes
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.targets import ALL
from wgpu_lora.names.naming import flag
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.session import Session
from wgpu_lora.weights.registry import DEFAULT_FORMAT, base_format

Extra = dict[str, float]
LEAST_TOKENS = 8  # of fewer, the scores' gradients are nothing but rounding, and no error relative to them means much


@dataclass
class Context:
    """A model and the options of a run. The model is loaded at most once and shared by the bricks.

    compute_dtype: of training's products. tune: choose tilings as a training run does, before the bricks of training.
    """

    model: LoadedModel
    tokens: int = 512
    rank: int = 16
    compute_dtype: str = "f32"
    tune: bool = False

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
        with own_words(ROW):  # refuses what no run can have
            TrainingArguments(base_dtype=base_dtype, compute_dtype=compute_dtype, lora_r=rank)
        name = model or shape or default_shape(device)
        chosen = chosen_model(model, shape if model else name, layers, device, base_dtype)
        for option, value, least, most in (
            (flag("rank"), rank, 1, chosen.config.hidden_size),
            (flag("tokens"), tokens, LEAST_TOKENS, chosen.config.max_position_embeddings),
        ):
            if not least <= value <= most:
                raise UserError(f"{option} is {value}: give {least} to {most} for {name}.")
        return cls(replace(chosen, name=name), tokens, rank, compute_dtype, tune)

    @property
    def device(self) -> Device:
        return self.model.device

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def name(self) -> str:
        """A shape's, or the model directory or hub id."""
        return self.model.name

    @property
    def base_dtype(self) -> str:
        return self.model.decoder.base_dtype

    def with_layers(self, layers: int) -> Context:
        """The same of a model of fewer layers, with nothing loaded; itself where there are no more."""
        same = layers == self.config.num_hidden_layers
        return self if same else replace(self, model=self.model.declared(layers))

    def options(self) -> dict[str, str | int | bool]:
        """What a result depends on beside the device."""
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
        """What the dims of every contract may use."""
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
        """Of `slots` adapters of the run's rank on these modules; nothing is allocated."""
        adapters = adapter_set(self.config, self.device, self.rank, slots, target_modules)
        longest = positions or buckets[-1]
        return Session(self.model, adapters, list(buckets), positions=longest, compute_dtype=self.compute_dtype)

    @cached_property
    def timer(self) -> Timer:
        return Timer(self.device)

    def close(self) -> None:
        self.model.unload()
        self.timer.free()
        del self.timer


def default_shape(device: Device) -> str:
    """The smallest published shape, or on a device that runs on the CPU this project's own tiny one."""
    return "tiny-qwen3" if device.info.kind == "software" else "qwen2.5-0.5b"


class Workload(ABC):
    """One case of a brick. Made, it has recorded and declared what it needs, and allocated nothing.

    case: tells a brick's cases apart; empty where there is one.
    clock: `timestamps` of the device, or `host`.
    keys: what the contract's dims may use beside the config and the run's options.
    """

    case = ""
    clock = "host"
    keys: dict[str, float]

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory that `open` and all that follows will add."""

    def programs(self) -> list[Program]:
        """What the product would tune before it runs them."""
        return []

    @abstractmethod
    def open(self, choices: Choices = NO_CHOICES) -> None:
        """Allocates, and builds the programs in the tilings chosen for them."""

    @abstractmethod
    def check(self, rng: np.random.Generator) -> Checked | None:
        """Runs on fresh random inputs and compares with the references; None where there is nothing to compare with."""

    @abstractmethod
    def run(self) -> float:
        """One iteration; its seconds."""

    def extra(self, timings: Timings) -> Extra:
        """Further figures of the iterations so far."""
        return {}

    @abstractmethod
    def close(self) -> None: ...


class SessionWorkload(Workload):
    """Steps of sessions of one model, all held at once."""

    def __init__(self, *sessions: Session):
        self.sessions = sessions

    def nbytes(self) -> int:
        return new_bytes(*self.sessions)

    def programs(self) -> list[Program]:
        return [program for session in self.sessions for program in session.programs()]

    def open(self, choices: Choices = NO_CHOICES) -> None:
        device = self.sessions[0].device
        device.peak_allocated = device.allocated  # of this brick, not of those before
        for session in self.sessions:
            session.allocate(choices=choices)

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def new_bytes(*sessions: Session) -> int:
    """What allocating sessions of one model, all to be held at once, adds to the device at the peak."""
    held = missing_bytes(set().union(*(session.storages() for session in sessions)))
    held += sum(session.memory().groups["activations"] for session in sessions)
    return max(held, sessions[0].model.bytes_to_load())
