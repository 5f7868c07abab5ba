"""--train lora: an adapter beside the frozen base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors import SafetensorError

from wgpu_lora.formats.adapter_config import AdapterConfig
from wgpu_lora.formats.peft import WEIGHTS, Matrices, adapter_files, read_adapter, tensor_name
from wgpu_lora.formats.safetensors_file import read_header
from wgpu_lora.models.fitting import read_fitting
from wgpu_lora.models.lora import SlotSpec
from wgpu_lora.train import checkpoint
from wgpu_lora.train.initial import SeededMatrices
from wgpu_lora.train.initialisation import DEFAULT
from wgpu_lora.train.offset import stored, trained
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.resume import found_from
from wgpu_lora.train.session import Session
from wgpu_lora.train.storage import PLAIN, Storage
from wgpu_lora.train.subject import ADAPTER_FILES, Damaged


@dataclass(frozen=True)
class Adapter:
    """An adapter: its configuration, its place in the adapter set, and its initial matrices."""

    args: TrainingArguments
    config: AdapterConfig
    spec: SlotSpec
    initial: Matrices
    files: ClassVar[tuple[str, ...]] = ADAPTER_FILES

    def described(self) -> tuple[str, str]:
        kind = ["DoRA"] if self.spec.dora else []
        if self.args.init_lora_weights != DEFAULT:
            kind.append(f"from {self.args.init_lora_weights}")
        return "adapter", ", ".join([f"rank {self.spec.rank} on {self.args.target_modules}", *kind])

    def place_initial(self, session: Session, slot: int) -> None:
        initial = self.initial
        session.place_initial(slot, initial.on(session.model) if isinstance(initial, SeededMatrices) else initial)

    def place_first(self, session: Session, slot: int, resumed_from: Path | None, storage: Storage = PLAIN) -> None:
        if not resumed_from:
            self.place_initial(session, slot)
            return
        facts = checkpoint.read_metadata(resumed_from, storage)
        options = facts.get("options")
        began = found_from(facts.get("directory"), options.get("init_adapter") if isinstance(options, dict) else None)
        config = session.model.config
        seeded = SeededMatrices(self.args, config)
        if began:
            path = Path(str(began))
            session.place_initial(slot, read_fitting(config, path, contents=storage.contents(path))[1])
        else:
            session.place_initial(slot, seeded.on(session.model))

    def place(self, directory: Path, session: Session, slot: int, contents: Mapping[str, bytes] | None = None) -> None:
        adapters = session.adapters
        try:
            _, matrices = read_adapter(directory, contents)
        except (OSError, SafetensorError) as error:
            raise Damaged(str(error)) from error
        header = read_header(directory / WEIGHTS, contents[WEIGHTS] if contents is not None else None)
        plain = all(entry.dtype == "F32" for entry in header.values())
        if set(matrices) != set(adapters.modules(slot)) or not plain:
            raise Damaged(f"{WEIGHTS} does not have the modules or the dtype of this run")
        own, offset = trained(matrices, adapters, slot)
        adapters.write(session.device, slot, own)
        if offset and adapters.offset:
            adapters.offset.write(session.device, slot, offset)

    def saved(self, session: Session, slot: int) -> dict[str, bytes]:
        return adapter_files(*self._stored(session, slot))

    def last_steps(self, total: int) -> int:
        return 0

    def before_step(self, session: Session, ending: bool) -> None:
        """Nothing."""

    def write(self, session: Session, slot: int, directory: Path) -> None:
        """Nothing."""

    def _stored(self, session: Session, slot: int) -> tuple[dict[str, np.ndarray], AdapterConfig]:
        """The tensors by PEFT's names, and the config."""
        matrices, config = stored(session.device, session.adapters, slot, self.config)
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
