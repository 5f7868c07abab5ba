"""--train lora: an adapter beside the frozen base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import WEIGHTS, Matrices, adapter_files, read_adapter, tensor_name
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.formats.safetensors_header import read_header
from wgpu_lora.models.adapter_modules import read_adapter_for, resolve_target_modules
from wgpu_lora.models.adapter_set import SlotSpec
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.quant_constants import QuantConstants
from wgpu_lora.names.spelling import setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.init_methods import DEFAULT
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.adapter_init import SeededMatrices, from_peft, to_peft
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.resume import resolve_recorded_path
from wgpu_lora.train.run.run_checkpoint import ADAPTER_FILES, CONSTANT_FILES, CheckpointError
from wgpu_lora.train.session.session import Session
from wgpu_lora.weights.base import ConstantWeight, Packed


@dataclass(frozen=True)
class TrainableAdapter:
    """An adapter: its configuration, its slot of the adapter set, and its initial matrices."""

    args: TrainingArguments
    config: AdapterConfig
    spec: SlotSpec
    initial: Matrices
    files: ClassVar[tuple[str, ...]] = ADAPTER_FILES

    def summary(self) -> tuple[str, str]:
        kind = ["DoRA"] if self.spec.dora else []
        if self.args.init_lora_weights != DEFAULT:
            kind.append(f"from {self.args.init_lora_weights}")
        return "adapter", ", ".join([f"rank {self.spec.rank} on {self.args.target_modules}", *kind])

    def place_initial(self, session: Session, slot: int) -> None:
        initial = self.initial
        session.place_initial(slot, initial.on(session.model) if isinstance(initial, SeededMatrices) else initial)

    def load_initial(
        self, session: Session, slot: int, resumed_from: Path | None, storage: CheckpointStore = PLAIN_FILES
    ) -> None:
        if not resumed_from:
            self.place_initial(session, slot)
            return
        facts = run_checkpoint.read_metadata(resumed_from, storage)
        options = facts.get("options")
        init_adapter = resolve_recorded_path(
            facts.get("directory"), options.get("init_adapter") if isinstance(options, dict) else None
        )
        config = session.model.config
        seeded = SeededMatrices(self.args, config)
        if init_adapter:
            path = Path(str(init_adapter))
            session.place_initial(slot, read_adapter_for(config, path, contents=storage.file_contents(path))[1])
        else:
            session.place_initial(slot, seeded.on(session.model))

    def load_checkpoint(
        self, directory: Path, session: Session, slot: int, contents: Mapping[str, bytes] | None = None
    ) -> None:
        adapters = session.adapters
        try:
            _, matrices = read_adapter(directory, contents)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(error)) from error
        header = read_header(directory / WEIGHTS, contents[WEIGHTS] if contents is not None else None)
        plain = all(entry.dtype == "F32" for entry in header.values())
        if set(matrices) != set(adapters.modules(slot)) or not plain:
            raise CheckpointError(f"{WEIGHTS} does not have the modules or the dtype of this run")
        factors, offset = from_peft(matrices, adapters, slot)
        adapters.write(session.device, slot, factors)
        if offset and adapters.offset:
            adapters.offset.write(session.device, slot, offset)

    def checkpoint_files(self, session: Session, slot: int, companions: Mapping[str, bytes]) -> dict[str, bytes]:
        return adapter_files(*self._tensors(session, slot), companions)

    def last_steps(self, total: int) -> int:
        return 0

    def before_step(self, session: Session, ending: bool) -> None:
        """Nothing."""

    def write(self, session: Session, slot: int, directory: Path) -> None:
        """Nothing."""

    def _tensors(self, session: Session, slot: int) -> tuple[dict[str, np.ndarray], AdapterConfig]:
        """The tensors by PEFT's names, and the config."""
        matrices, config = to_peft(session.device, session.adapters, slot, self.config)
        return adapter_tensors(matrices, config), config


def adapter_tensors(matrices: Matrices, config: AdapterConfig) -> dict[str, np.ndarray]:
    """Tensors with PEFT's names and shapes, each module at its own rank."""
    tensors = {}
    for module, (a, b, *magnitude) in matrices.items():
        rank = config.rank(module)
        tensors[tensor_name(module, "A")] = np.ascontiguousarray(a[:rank])
        tensors[tensor_name(module, "B")] = np.ascontiguousarray(b[:, :rank])
        if magnitude:
            tensors[tensor_name(module, "M")] = magnitude[0]
    return tensors


SNAPPED_SHARE = 10  # a tenth of the steps


@dataclass(frozen=True)
class TrainableQuantScales:
    """The constants of the targeted matrices, which begin as the base has them."""

    args: TrainingArguments
    weights: dict[str, ConstantWeight]
    files: ClassVar[tuple[str, ...]] = CONSTANT_FILES

    @classmethod
    def of(cls, args: TrainingArguments, model: LoadedModel) -> TrainableQuantScales:
        """Raises UserError if none of the targeted matrices has tables or scales to train."""
        matrices = dict(model.decoder.matrices())
        matrices_by_module = {
            module: matrices[f"{module}.weight"] for module in resolve_target_modules(args.target_modules, model.config)
        }
        result = {module: constants for module, weight in matrices_by_module.items() if (constants := weight.trainable)}
        if not result:
            formats = " and ".join(dict.fromkeys(weight.format.upper() for weight in matrices_by_module.values()))
            advice = setting("base_dtype", "lut2")
            raise UserError(
                f"{setting('train', args.train)} needs a base with lookup tables or group scales, but the linear "
                f"layers of {model.name} are in {formats}: quantise it first, for example with {advice}."
            )
        return cls(args, result)

    def summary(self) -> tuple[str, str]:
        return "trains", f"tables and scales of {count_noun(len(self.weights), 'matrix', 'matrices')}"

    def place_initial(self, session: Session, slot: int) -> None:
        constants = self._set(session)
        constants.write(session.device, constants.initial(session.device))

    def load_initial(
        self, session: Session, slot: int, resumed_from: Path | None, storage: CheckpointStore = PLAIN_FILES
    ) -> None:
        self.place_initial(session, slot)

    def load_checkpoint(
        self, directory: Path, session: Session, slot: int, contents: Mapping[str, bytes] | None = None
    ) -> None:
        constants, file = self._set(session), self.files[0]
        try:
            tensors = load_file(directory / file) if contents is None else load(contents[file])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(str(error)) from error
        regions = constants.regions(slot)
        if set(tensors) != set(regions):
            raise CheckpointError(f"{file} does not have the matrices of this run")
        for name, values in tensors.items():
            if values.dtype != np.float32 or values.shape != regions[name].stored_shape:
                raise CheckpointError(f"{name} in {file} is {values.dtype} {list(values.shape)}")
            if not (np.abs(values) <= MAX_PARAMETER).all():
                raise CheckpointError(f"{name} in {file} has values that are not finite or too large")
        constants.write(session.device, tensors)

    def checkpoint_files(self, session: Session, slot: int, companions: Mapping[str, bytes]) -> dict[str, bytes]:
        return {self.files[0]: save(self._set(session).read(session.device))}

    def last_steps(self, total: int) -> int:
        """Those that read constants rounded to f16."""
        snap_steps = self.args.snap_steps
        return min(total, snap_steps) if snap_steps is not None else -(-total // SNAPPED_SHARE)

    def before_step(self, session: Session, ending: bool) -> None:
        self._set(session).snap(session.device, ending)

    def write(self, session: Session, slot: int, directory: Path) -> None:
        """The models with the constants: those of the last step and of best/, in f32 and rounded to f16."""
        result = {"last": self._set(session).read(session.device)}
        best = directory / run_checkpoint.BEST / self.files[0]
        if best.exists():
            result["best"] = load_file(best)
        for label, constants in result.items():
            for dtype in ("f32", "f16"):
                self._write_model(session.model, constants, dtype, directory / f"{label}-{dtype}")

    def _write_model(
        self, model: LoadedModel, constants: Mapping[str, np.ndarray], dtype: str, directory: Path
    ) -> None:
        """Replaces a directory by the model with these constants."""

        def packed(module: str, weight: ConstantWeight) -> Packed:
            tensors = {name: constants[f"{module}.{name}"] for name in weight.constant_shapes()}
            return weight.packed_with(model.device, tensors, dtype)

        instead = {f"{module}.weight": partial(packed, module, weight) for module, weight in self.weights.items()}
        write_packed(model, directory, instead=instead, replace=True)

    @staticmethod
    def _set(session: Session) -> QuantConstants:
        assert isinstance(session.trained, QuantConstants)
        return session.trained
