"""The adapter that a run starts from: seeded, from --init-adapter, or from a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.formats.hub import base_name
from wgpu_lora.formats.peft_adapter import Matrices, read_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.adapter_modules import (
    ALL,
    read_adapter_for,
    resolve_target_modules,
    shortest,
    target_modules_text,
)
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.init_methods import DEFAULT, FROM_SHAPE, from_weight, offsets
from wgpu_lora.train.objectives.objective import Objective
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.records import RUN
from wgpu_lora.train.run.run_checkpoint import MANIFEST, damage
from wgpu_lora.weights.base_formats import GGUF, base_format


def initial_adapter(
    args: TrainingArguments, config: ModelConfig, storage: CheckpointStore = PLAIN_FILES
) -> tuple[TrainingArguments, AdapterConfig, Matrices]:
    """The adapter's configuration and initial matrices, and the options updated to match.

    They come from the checkpoint of a resumed run, else from --init-adapter; else A is random and B zero, as in PEFT.

    Raises:
        UserError: the adapter does not fit the model, or an option contradicts it.
    """
    resumed = run_checkpoint.latest_checkpoint(args.directory, storage) if args.resume else None
    if resumed:
        run_checkpoint.check(resumed, storage)
    elif args.init_adapter:
        check_manifest(Path(args.init_adapter), storage)
    source = resumed or args.init_adapter
    if source:
        adapter_config, matrices = read_adapter_for(config, source, contents=storage.file_contents(Path(source)))
        for module, parts in matrices.items():
            if max(np.abs(part).max(initial=0) for part in parts) > MAX_PARAMETER:
                raise UserError(
                    f"The adapter {source} has values larger than {MAX_PARAMETER:,.0f} in {module}: it has "
                    "diverged, so start from another."
                )
        if resumed and offsets(args.init_lora_weights):
            adapter_config = halve_rank(adapter_config, args.lora_alpha)
        args = _with_adapter_options(args, adapter_config, matrices, str(source), config)
        base = base_name(args.model or "demo")
        return args, replace(adapter_config, lora_dropout=args.lora_dropout, base_model_name_or_path=base), matrices
    adapter = AdapterConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        target_modules=target_modules_text(resolve_target_modules(args.target_modules, config), config),
        base_model_name_or_path=base_name(args.model or "demo"),
    )
    return args, adapter, SeededMatrices(args, config)


def check_manifest(directory: Path, storage: CheckpointStore = PLAIN_FILES) -> None:
    """Raise UserError if an adapter has a manifest (as in best/ and epoch-N/) that does not match its files."""
    wrong = damage(directory, (), storage) if storage.is_file(directory / MANIFEST) else None
    if wrong:
        raise UserError(
            f"The adapter {directory} is damaged: {wrong}; use another, or remove {MANIFEST} if you changed it "
            "yourself."
        )


def _with_adapter_options(
    args: TrainingArguments, adapter_config: AdapterConfig, matrices: Matrices, source: str, config: ModelConfig
) -> TrainingArguments:
    """The options with the adapter's rank, alpha and target modules in place of defaults."""
    kinds = {module.rpartition(".")[2] for module in matrices}
    paths = resolve_target_modules(args.target_modules, config)
    same_targets = {module.rpartition(".")[2] for module in paths} == kinds
    targets = ALL if set(matrices) == set(config.lora_modules) else ",".join(shortest(matrices, config))
    has: dict[str, Any] = {
        "lora_r": adapter_config.r,
        "lora_alpha": adapter_config.lora_alpha,
        "use_rslora": adapter_config.use_rslora,
        "use_dora": adapter_config.use_dora,
        "target_modules": args.target_modules if same_targets else targets,
    }
    default = TrainingArguments()
    for name, value in has.items():
        option = getattr(args, name)
        if option not in (value, getattr(default, name)):
            raise UserError(
                f"{setting(name, option)} contradicts the adapter {source}, which has {value}: leave it out."
            )
    return replace(args, **has)


class SeededMatrices(Mapping[str, tuple[np.ndarray, np.ndarray]]):
    """The initial factors of a run without --init-adapter, created on access, one module at a time, so that planning
    needs no memory for them. Those that depend on the weights need the model (`on`), whose base is loaded."""

    def __init__(self, args: TrainingArguments, config: ModelConfig, model: LoadedModel | None = None):
        self._args, self._config, self._model, self._shapes = args, config, model, config.lora_modules
        self._numbers = {
            module: number for number, module in enumerate(resolve_target_modules(args.target_modules, config))
        }

    def on(self, model: LoadedModel) -> SeededMatrices:
        return SeededMatrices(self._args, self._config, model)

    def __getitem__(self, module: str) -> tuple[np.ndarray, np.ndarray]:
        args, number, name = self._args, self._numbers[module], self._args.init_lora_weights
        if name in FROM_SHAPE:
            return initial_matrices(args.seed, number, self._shapes[module], args.lora_r, name)
        assert self._model is not None, f"{name} needs the weights"
        w = read_weight(self._model, f"{module}.weight", residual=name == "loftq")
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


def read_weight(model: LoadedModel, name: str, residual: bool = False) -> np.ndarray:
    """A matrix [out, in] as its file has it, f32, or what quantising it has taken away."""
    source = model.checkpoint
    on_device = next(weight for key, weight in model.decoder.matrices() if key == name)
    if source.packed(name):
        return on_device.values(model.device)
    return source.read_f32(name) - on_device.values(model.device) if residual else source.read_f32(name)


def check_residual(args: TrainingArguments, model: LoadedModel) -> None:
    """Raise UserError if loftq has nothing to restore."""
    text = setting("init_lora_weights", args.init_lora_weights)
    if args.init_lora_weights != "loftq" or args.resume:
        return
    if model.config.packed:
        raise UserError(
            f"{text} needs the weights before quantisation, but those of {model.name} are stored in "
            f"{model.config.packed.upper()}: use the model in full precision."
        )
    base_dtype = model.decoder.base_dtype
    if base_dtype == GGUF or base_format(base_dtype).bits >= 16:
        raise UserError(
            f"{text} needs a base that is quantised while it is loaded, not {setting('base_dtype', base_dtype)}: use "
            f"{setting('base_dtype', 'nf4')}, or {setting('init_lora_weights', 'pissa')}."
        )


def double_rank(config: AdapterConfig) -> AdapterConfig:
    """With twice the rank and the same scaling."""
    factor = math.sqrt(2) if config.use_rslora else 2
    return replace(config, r=2 * config.r, lora_alpha=factor * config.lora_alpha)


def halve_rank(config: AdapterConfig, alpha: float) -> AdapterConfig:
    """The inverse of `double_rank`. alpha: that of the options, which is kept if it is the config's up to rounding."""
    result = config.lora_alpha / (math.sqrt(2) if config.use_rslora else 2)
    return replace(config, r=config.r // 2, lora_alpha=alpha if math.isclose(alpha, result) else result)


def split_offset(matrices: Matrices) -> tuple[Matrices, Matrices]:
    """The trained factors, and the offset's: (A, B) and (A0, -B0) by module."""
    trained, offset = {}, {}
    for module, (a, b, *_) in matrices.items():
        rank = len(a) // 2
        trained[module], offset[module] = (a[:rank], b[:, :rank]), (a[rank:], b[:, rank:])
    return trained, offset


def to_peft(device: Device, adapters: AdapterSet, slot: int, config: AdapterConfig) -> tuple[Matrices, AdapterConfig]:
    """A slot's adapter as files have it."""
    matrices = adapters.read(device, slot)
    if not (adapters.offset and adapters.specs[slot].offset):
        return matrices, config
    offset = adapters.offset.read(device, slot)
    result = {
        module: (np.concatenate([a, offset[module][0]]), np.concatenate([b, offset[module][1]], axis=1))
        for module, (a, b) in matrices.items()
    }
    return result, double_rank(config)


def from_peft(matrices: Matrices, adapters: AdapterSet, slot: int) -> tuple[Matrices, Matrices | None]:
    """The trained factors of a slot's adapter as files have it, and those of its offset, if there is one."""
    return split_offset(matrices) if adapters.specs[slot].offset else (matrices, None)


@dataclass(frozen=True)
class FrozenAdapter:
    """digest: SHA-256 of its matrices and scalings."""

    spec: SlotSpec
    matrices: Matrices
    digest: str


def frozen_adapter(path: str | Path, config: ModelConfig) -> FrozenAdapter:
    """Read an adapter. Raises UserError if it cannot be read, is damaged or does not fit the model."""
    check_manifest(Path(path))
    adapter_config, matrices = read_adapter_for(config, path)
    spec, digest = SlotSpec.of(adapter_config, matrices), hashlib.sha256()
    for module in sorted(matrices):
        digest.update(f"{module} {spec.scaling[module]!r}".encode())
        for matrix in matrices[module]:
            digest.update(matrix.tobytes())
    return FrozenAdapter(spec, matrices, digest.hexdigest())


def check_reference_base(path: str | Path, model: str, digest: str) -> None:
    """Raise UserError if an adapter's record is of a run on other weights than these, of a model of another name.

    Under the same name, the weights may be in another format. Adapters of other programs have no record.
    """
    try:
        trained_on = read_json(Path(path) / RUN).get("base_digest")
    except UserError:
        return
    name = read_adapter(path)[0].base_model_name_or_path or ""
    differs = bool(name) and Path(name).name != Path(base_name(model)).name
    if differs and isinstance(trained_on, str) and trained_on != digest:
        raise UserError(
            f"The reference adapter {path} was trained on another base model, {name!s:.200}, not on {model}: use that "
            "model, or another reference."
        )


def init_from_reference(args: TrainingArguments, objective: Objective) -> tuple[TrainingArguments, str]:
    """The options with the reference adapter as the initial one, unless another is given, and a note."""
    path = objective.reference_path
    if not path or args.init_adapter or args.resume:
        return args, ""
    if args.init_lora_weights != DEFAULT:
        text = setting("init_lora_weights", args.init_lora_weights)
        raise UserError(
            f"{text} and {flag('reference_adapter')} cannot be combined: training starts from the reference, so leave "
            "one out."
        )
    return replace(args, init_adapter=path), f"starts from the reference adapter {path}"
