"""The adapter that a run starts from: seeded, from --init-adapter, or from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.adapter_config import AdapterConfig
from wgpu_lora.formats.hub import stated_name
from wgpu_lora.formats.peft import Matrices
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.fitting import read_fitting
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.targets import ALL, shortest, stated, targeted
from wgpu_lora.names.naming import setting
from wgpu_lora.ops.optimizer import MAX_PARAMETER
from wgpu_lora.train import checkpoint
from wgpu_lora.train.initialisation import DEFAULT, FROM_SHAPE, from_weight, offsets
from wgpu_lora.train.manifest import MANIFEST, damage
from wgpu_lora.train.offset import halved
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.storage import PLAIN, Storage
from wgpu_lora.weights.registry import base_format


def adapter_of(
    args: TrainingArguments, config: ModelConfig, storage: Storage = PLAIN
) -> tuple[TrainingArguments, AdapterConfig, Matrices]:
    """The adapter's configuration and initial matrices, and the options updated to match.

    They come from the checkpoint of a resumed run, else from --init-adapter; else A is random and B zero, as in PEFT.

    Raises:
        UserError: the adapter does not fit the model, or an option contradicts it.
    """
    resumed = checkpoint.newest(args.directory, storage) if args.resume else None
    if resumed:
        checkpoint.check(resumed, storage)
    elif args.init_adapter:
        check_whole(Path(args.init_adapter), storage)
    source = resumed or args.init_adapter
    if source:
        loaded, matrices = read_fitting(config, source, contents=storage.contents(Path(source)))
        for module, parts in matrices.items():
            if max(np.abs(part).max(initial=0) for part in parts) > MAX_PARAMETER:
                raise UserError(
                    f"The adapter {source} has values larger than {MAX_PARAMETER:,.0f} in {module}: it has "
                    "diverged, so start from another."
                )
        if resumed and offsets(args.init_lora_weights):
            loaded = halved(loaded, args.lora_alpha)
        args = _as_loaded(args, loaded, matrices, str(source), config)
        base = stated_name(args.model or "demo")
        return args, replace(loaded, lora_dropout=args.lora_dropout, base_model_name_or_path=base), matrices
    adapter = AdapterConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        target_modules=stated(targeted(args.target_modules, config), config),
        base_model_name_or_path=stated_name(args.model or "demo"),
    )
    return args, adapter, SeededMatrices(args, config)


def check_whole(directory: Path, storage: Storage = PLAIN) -> None:
    """Raise UserError if an adapter has a manifest (as in best/ and epoch-N/) that does not match its files."""
    wrong = damage(directory, (), storage) if storage.is_file(directory / MANIFEST) else None
    if wrong:
        raise UserError(
            f"The adapter {directory} is damaged: {wrong}; use another, or remove {MANIFEST} if you changed it "
            "yourself."
        )


def _as_loaded(
    args: TrainingArguments, loaded: AdapterConfig, matrices: Matrices, source: str, config: ModelConfig
) -> TrainingArguments:
    """The options with the adapter's rank, alpha and target modules in place of defaults."""
    kinds = {module.rpartition(".")[2] for module in matrices}
    given_targets = targeted(args.target_modules, config)
    same_targets = {module.rpartition(".")[2] for module in given_targets} == kinds
    targets = ALL if set(matrices) == set(config.lora_modules) else ",".join(shortest(matrices, config))
    has: dict[str, Any] = {
        "lora_r": loaded.r,
        "lora_alpha": loaded.lora_alpha,
        "use_rslora": loaded.use_rslora,
        "use_dora": loaded.use_dora,
        "target_modules": args.target_modules if same_targets else targets,
    }
    default = TrainingArguments()
    for name, value in has.items():
        given = getattr(args, name)
        if given not in (value, getattr(default, name)):
            raise UserError(
                f"{setting(name, given)} contradicts the adapter {source}, which has {value}: leave it out."
            )
    return replace(args, **has)


class SeededMatrices(Mapping[str, tuple[np.ndarray, np.ndarray]]):
    """The initial factors of a run without --init-adapter, created on access, one module at a time, so that planning
    needs no memory for them. Those that depend on the weights need the model (`on`), whose base is loaded."""

    def __init__(self, args: TrainingArguments, config: ModelConfig, model: LoadedModel | None = None):
        self._args, self._config, self._model, self._shapes = args, config, model, config.lora_modules
        self._numbers = {module: number for number, module in enumerate(targeted(args.target_modules, config))}

    def on(self, model: LoadedModel) -> SeededMatrices:
        return SeededMatrices(self._args, self._config, model)

    def __getitem__(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        args, number, name = self._args, self._numbers[module], self._args.init_lora_weights
        if name in FROM_SHAPE:
            return initial_matrices(args.seed, number, self._shapes[module], args.lora_r, name)
        assert self._model is not None, f"{name} needs the weights"
        w = weight_of(self._model, f"{module}.weight", residual=name == "loftq")
        scaling = args.lora_alpha / (math.sqrt(args.lora_r) if args.use_rslora else args.lora_r)
        return from_weight(name, w, args.lora_r, scaling, generator(args.seed, number))

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def generator(seed: int, number: int) -> np.random.Generator:
    """That of a module."""
    return np.random.Generator(np.random.Philox(key=[seed, number]))


def initial_matrices(
    seed: int, number: int, shape: tuple[int, int], rank: int, name: str = DEFAULT
) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank] of an initialisation that needs no weights, keyed by seed and module."""
    a, b = FROM_SHAPE[name](shape, rank, generator(seed, number))
    return a.astype(np.float32), b.astype(np.float32)


def weight_of(model: LoadedModel, name: str, residual: bool = False) -> np.ndarray:
    """A matrix [out, in] as its file has it, f32, or what quantising it has taken away."""
    source = model.checkpoint
    on_device = next(weight for other, weight in model.decoder.matrices() if other == name)
    if source.packed(name):
        return on_device.values(model.device)
    return source.read_f32(name) - on_device.values(model.device) if residual else source.read_f32(name)


def check_residual(args: TrainingArguments, model: LoadedModel) -> None:
    """Raise UserError if loftq has nothing to restore."""
    said = setting("init_lora_weights", args.init_lora_weights)
    if args.init_lora_weights != "loftq" or args.resume:
        return
    if model.config.packed:
        raise UserError(
            f"{said} needs the weights before quantisation, but those of {model.name} are stored in "
            f"{model.config.packed.upper()}: use the model in full precision."
        )
    if base_format(model.decoder.base_dtype).bits >= 16:
        raise UserError(
            f"{said} needs a quantised base, not {setting('base_dtype', model.decoder.base_dtype)}: use "
            f"{setting('base_dtype', 'nf4')}, or {setting('init_lora_weights', 'pissa')}."
        )
