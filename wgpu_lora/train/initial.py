"""The adapter that a run begins with: of a seed, of --init-adapter, or of the checkpoint that is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import stated_name
from wgpu_lora.formats.peft import AdapterConfig, read_adapter
from wgpu_lora.models.config import LINEAR_PATHS, ModelConfig
from wgpu_lora.models.lora import Matrices, Module, SlotSpec
from wgpu_lora.names.naming import setting
from wgpu_lora.ops.optimizer import MAX_PARAMETER
from wgpu_lora.train import checkpoint
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.manifest import MANIFEST, damage


def adapter_of(args: TrainingArguments, config: ModelConfig) -> tuple[TrainingArguments, AdapterConfig, Matrices]:
    """The adapter's configuration and initial matrices, and the options as they then are.

    They are those of the checkpoint that is resumed, else of --init-adapter; else A is random and B zero, as in PEFT.

    Raises:
        UserError: the adapter does not fit the model, or an option contradicts it.
    """
    shapes = config.linear_shapes()
    resumed = checkpoint.newest(args.directory) if args.resume else None
    if resumed:
        checkpoint.check(resumed)
    elif args.init_adapter:
        _check_whole(Path(args.init_adapter))
    source = resumed or args.init_adapter
    if source:
        loaded, matrices = read_adapter(source)
        for (layer, module), (a, b) in matrices.items():
            fits = layer < config.num_hidden_layers and (b.shape[0], a.shape[1]) == shapes[module]
            if not fits:
                raise UserError(
                    f"The adapter {source} does not fit this model: layer {layer} {module} differs in shape."
                )
            if max(np.abs(a).max(initial=0), np.abs(b).max(initial=0)) > MAX_PARAMETER:
                raise UserError(
                    f"The adapter {source} has values beyond {MAX_PARAMETER:,.0f} in layer {layer} {module}: it has "
                    "diverged, so begin with another."
                )
        args = _as_loaded(args, loaded, matrices, str(source))
        base = stated_name(args.model or "demo")
        return args, replace(loaded, lora_dropout=args.lora_dropout, base_model_name_or_path=base), matrices
    adapter = AdapterConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        target_modules=args.modules(),
        base_model_name_or_path=stated_name(args.model or "demo"),
    )
    return args, adapter, SeededMatrices(args, config)


def _check_whole(directory: Path) -> None:
    """UserError where an adapter has a manifest, as ours in best/ and epoch-N/ do, that its files do not agree with."""
    wrong = damage(directory, ()) if (directory / MANIFEST).exists() else None
    if wrong:
        raise UserError(
            f"The adapter {directory} is damaged: {wrong}; use another, or remove {MANIFEST} if you have changed it "
            "yourself."
        )


def _as_loaded(args: TrainingArguments, loaded: AdapterConfig, matrices: Matrices, source: str) -> TrainingArguments:
    """The options with the adapter's own rank, alpha and targets, where they were left at their defaults."""
    present = {module for _, module in matrices}
    names = tuple(name for name in LINEAR_PATHS if name in present)
    targets = "all-linear" if len(names) == len(LINEAR_PATHS) else ",".join(names)
    has: dict[str, Any] = {
        "lora_r": loaded.r,
        "lora_alpha": loaded.lora_alpha,
        "use_rslora": loaded.use_rslora,
        "target_modules": targets,
    }
    default = TrainingArguments()
    for name, value in has.items():
        given = getattr(args, name)
        same = set(args.modules()) == present if name == "target_modules" else given == value
        if not same and given != getattr(default, name):
            raise UserError(
                f"{setting(name, given)} contradicts the adapter {source}, which has {value}: leave it out."
            )
    return replace(args, **has)


class SeededMatrices(Mapping[Module, tuple[np.ndarray, np.ndarray]]):
    """The factors that a run without --init-adapter begins with. They are made when they are asked for, one module at a
    time, so that planning takes no memory for them."""

    def __init__(self, args: TrainingArguments, config: ModelConfig):
        self._args, self._shapes = args, config.linear_shapes()
        modules = ((layer, module) for layer in range(config.num_hidden_layers) for module in args.modules())
        self._numbers = {key: number for number, key in enumerate(modules)}

    def __getitem__(self, key: Module) -> tuple[np.ndarray, np.ndarray]:
        return initial_matrices(self._args.seed, self._numbers[key], self._shapes[key[1]], self._args.lora_r)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def initial_matrices(seed: int, number: int, shape: tuple[int, int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] uniform within 1 / sqrt(in), PEFT's Kaiming choice; B [out, rank] zero. Keyed by seed and module."""
    out, size_in = shape
    rng = np.random.Generator(np.random.Philox(key=[seed, number]))
    a = rng.uniform(-1, 1, (rank, size_in)) / np.sqrt(size_in)
    return a.astype(np.float32), np.zeros((out, rank), np.float32)


def spec_of(adapter: AdapterConfig, matrices: Matrices) -> SlotSpec:
    modules: list[Module] = list(matrices)
    return SlotSpec.of(adapter, modules)
