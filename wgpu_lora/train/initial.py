"""The adapter that a run starts from: seeded, from --init-adapter, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.adapter_config import AdapterConfig
from wgpu_lora.formats.hub import stated_name
from wgpu_lora.formats.peft import Matrices, read_adapter
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.fitting import check_fits
from wgpu_lora.models.targets import ALL, shortest, target_names, targeted
from wgpu_lora.names.naming import setting
from wgpu_lora.ops.optimizer import MAX_PARAMETER
from wgpu_lora.train import checkpoint
from wgpu_lora.train.arguments import TrainingArguments
from wgpu_lora.train.manifest import MANIFEST, damage


def adapter_of(args: TrainingArguments, config: ModelConfig) -> tuple[TrainingArguments, AdapterConfig, Matrices]:
    """The adapter's configuration and initial matrices, and the options updated to match.

    They come from the checkpoint of a resumed run, else from --init-adapter; else A is random and B zero, as in PEFT.

    Raises:
        UserError: the adapter does not fit the model, or an option contradicts it.
    """
    resumed = checkpoint.newest(args.directory) if args.resume else None
    if resumed:
        checkpoint.check(resumed)
    elif args.init_adapter:
        check_whole(Path(args.init_adapter))
    source = resumed or args.init_adapter
    if source:
        loaded, matrices = read_adapter(source)
        check_fits(config, matrices, str(source))
        for module, parts in matrices.items():
            if max(np.abs(part).max(initial=0) for part in parts) > MAX_PARAMETER:
                raise UserError(
                    f"The adapter {source} has values larger than {MAX_PARAMETER:,.0f} in {module}: it has "
                    "diverged, so start from another."
                )
        args = _as_loaded(args, loaded, matrices, str(source), config)
        base = stated_name(args.model or "demo")
        return args, replace(loaded, lora_dropout=args.lora_dropout, base_model_name_or_path=base), matrices
    adapter = AdapterConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        target_modules=_stated_targets(args.target_modules, config),
        base_model_name_or_path=stated_name(args.model or "demo"),
    )
    return args, adapter, SeededMatrices(args, config)


def check_whole(directory: Path) -> None:
    """Raise UserError if an adapter has a manifest (as in best/ and epoch-N/) that does not match its files."""
    wrong = damage(directory, ()) if (directory / MANIFEST).exists() else None
    if wrong:
        raise UserError(
            f"The adapter {directory} is damaged: {wrong}; use another, or remove {MANIFEST} if you changed it "
            "yourself."
        )


def _stated_targets(target_modules: str, config: ModelConfig) -> tuple[str, ...] | str:
    """target_modules for adapter_config.json: names, or the regular expression that was given."""
    chosen = targeted(target_modules, config)
    return target_modules if target_names(target_modules) is None else shortest(chosen, config)


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
    needs no memory for them."""

    def __init__(self, args: TrainingArguments, config: ModelConfig):
        self._args, self._shapes = args, config.lora_modules
        self._numbers = {module: number for number, module in enumerate(targeted(args.target_modules, config))}

    def __getitem__(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        return initial_matrices(self._args.seed, self._numbers[module], self._shapes[module], self._args.lora_r)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def initial_matrices(seed: int, number: int, shape: tuple[int, int], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] uniform within 1 / sqrt(in), as PEFT's Kaiming, B [out, rank] zero; keyed by seed and module."""
    out, size_in = shape
    rng = np.random.Generator(np.random.Philox(key=[seed, number]))
    a = rng.uniform(-1, 1, (rank, size_in)) / np.sqrt(size_in)
    return a.astype(np.float32), np.zeros((out, rank), np.float32)
