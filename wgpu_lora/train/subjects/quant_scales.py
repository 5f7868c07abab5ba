"""--train quant-scales: the tables and scales of a quantised base, which become a base of their own."""

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
from wgpu_lora.export.packed import write_packed
from wgpu_lora.models.constants import ConstantSet, ConstantWeight, constants_of
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.targets import targeted
from wgpu_lora.names.naming import setting
from wgpu_lora.ops.optimizer import MAX_PARAMETER
from wgpu_lora.train import checkpoint
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.session import Session
from wgpu_lora.train.storage import PLAIN, Storage
from wgpu_lora.train.subject import CONSTANT_FILES, Damaged
from wgpu_lora.weights.packed import Packed
from wgpu_lora.words import counted

SNAPPED_SHARE = 10  # a tenth of the steps


@dataclass(frozen=True)
class QuantScales:
    """The constants of the targeted matrices, which begin as the base has them."""

    args: TrainingArguments
    weights: dict[str, ConstantWeight]
    files: ClassVar[tuple[str, ...]] = CONSTANT_FILES

    @classmethod
    def of(cls, args: TrainingArguments, model: LoadedModel) -> QuantScales:
        """Raises UserError if none of the targeted matrices has tables or scales to train."""
        matrices = dict(model.decoder.matrices())
        chosen = {module: matrices[f"{module}.weight"] for module in targeted(args.target_modules, model.config)}
        found = {module: own for module, weight in chosen.items() if (own := constants_of(weight))}
        if not found:
            formats = " and ".join(dict.fromkeys(weight.format.upper() for weight in chosen.values()))
            advice = setting("base_dtype", "lut2")
            raise UserError(
                f"{setting('train', args.train)} needs a base with lookup tables or group scales, but the linear "
                f"layers of {model.name} are in {formats}: quantise it first, for example with {advice}."
            )
        return cls(args, found)

    def described(self) -> tuple[str, str]:
        return "trains", f"tables and scales of {counted(len(self.weights), 'matrix', 'matrices')}"

    def place_initial(self, session: Session, slot: int) -> None:
        constants = self._set(session)
        constants.write(session.device, constants.initial(session.device))

    def place_first(self, session: Session, slot: int, resumed_from: Path | None, storage: Storage = PLAIN) -> None:
        self.place_initial(session, slot)

    def place(self, directory: Path, session: Session, slot: int, contents: Mapping[str, bytes] | None = None) -> None:
        constants, file = self._set(session), self.files[0]
        try:
            stored = load_file(directory / file) if contents is None else load(contents[file])
        except (OSError, SafetensorError) as error:
            raise Damaged(str(error)) from error
        places = constants.places(slot)
        if set(stored) != set(places):
            raise Damaged(f"{file} does not have the matrices of this run")
        for name, values in stored.items():
            if values.dtype != np.float32 or values.shape != places[name].own:
                raise Damaged(f"{name} in {file} is {values.dtype} {list(values.shape)}")
            if not (np.abs(values) <= MAX_PARAMETER).all():
                raise Damaged(f"{name} in {file} has values that are not finite or too large")
        constants.write(session.device, stored)

    def saved(self, session: Session, slot: int) -> dict[str, bytes]:
        return {self.files[0]: save(self._set(session).read(session.device))}

    def last_steps(self, total: int) -> int:
        """Those that read constants rounded to f16."""
        given = self.args.snap_steps
        return min(total, given) if given is not None else -(-total // SNAPPED_SHARE)

    def before_step(self, session: Session, ending: bool) -> None:
        self._set(session).snap(session.device, ending)

    def write(self, session: Session, slot: int, directory: Path) -> None:
        """The models with the constants: those of the last step and of best/, in f32 and rounded to f16."""
        found = {"last": self._set(session).read(session.device)}
        best = directory / checkpoint.BEST / self.files[0]
        if best.exists():
            found["best"] = load_file(best)
        for which, constants in found.items():
            for dtype in ("f32", "f16"):
                self._write_model(session.model, constants, dtype, directory / f"{which}-{dtype}")

    def _write_model(
        self, model: LoadedModel, constants: Mapping[str, np.ndarray], dtype: str, directory: Path
    ) -> None:
        """Replaces a directory by the model with these constants."""

        def stored(module: str, weight: ConstantWeight) -> Packed:
            own = {name: constants[f"{module}.{name}"] for name in weight.constant_shapes()}
            return weight.packed_with(model.device, own, dtype)

        instead = {f"{module}.weight": partial(stored, module, weight) for module, weight in self.weights.items()}
        write_packed(model, directory, instead=instead, replace=True)

    @staticmethod
    def _set(session: Session) -> ConstantSet:
        assert isinstance(session.trained, ConstantSet)
        return session.trained
