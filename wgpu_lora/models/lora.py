"""LoRA adapters on the device: flat pages of parameters and gradients, viewed as stacked factors by module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft import AdapterConfig, Matrices
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.errors import BindingTooLarge
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.inputs import StepInputs
from wgpu_lora.models.parameters import PAGE_BLOCKS, Place, blocks_of, padded_table, read_arrays, write_array
from wgpu_lora.ops.lora import Factors, LoraSlots, LoraStack
from wgpu_lora.ops.optimizer import BLOCK
from wgpu_lora.ops.recorder import Recorder


def check_fits(config: ModelConfig, matrices: Matrices, adapter: Path | str, model: str = "the model") -> None:
    """Raises UserError unless every module of an adapter is one that the model allows, with the right shape."""
    for module, (a, b) in matrices.items():
        have, need = (b.shape[0], a.shape[1]), config.lora_modules.get(module)
        if need is None:
            raise UserError(
                f"The adapter {adapter} does not fit {model}: it has {module}, but {_what_there_is(config, module)}: "
                "use the model that it was trained on."
            )
        if have != need:
            raise UserError(
                f"The adapter {adapter} does not fit {model}: its {module} is of shape {list(have)}, but the model's "
                f"of {list(need)}: use the model that it was trained on."
            )


def _what_there_is(config: ModelConfig, module: str) -> str:
    inside = module.startswith(tuple(f"{config.path(i)}." for i in range(config.num_hidden_layers)))
    if module.startswith(f"{config.LAYERS}.") and not inside:
        return f"the model has only {config.num_hidden_layers} layers"
    return "the model has no such linear layer that adapters may target"


@dataclass(frozen=True)
class SlotSpec:
    """An adapter: its largest rank, and the scaling of each module that it targets (alpha / r or alpha / sqrt(r))."""

    rank: int
    scaling: Mapping[str, float]

    @classmethod
    def of(cls, config: AdapterConfig, modules: Iterable[str]) -> SlotSpec:
        named = list(modules)
        return cls(max(map(config.rank, named)), {module: config.scaling(module) for module in named})


@dataclass(frozen=True)
class Factor:
    """The place of a module's A or B: page, offset and stride between slots in values; shape: padded, of a matrix."""

    page: int
    offset: int
    stride: int
    shape: tuple[int, int]

    @property
    def blocks(self) -> int:
        """Blocks of a slot's matrix."""
        return blocks_of(self.shape)


@dataclass(frozen=True)
class AdapterSet:
    """The adapters of all slots. `declare` allocates nothing; gradients are allocated by the programs that use them.

    A page is a flat f32 tensor no larger than a binding. Each slot's matrix is padded to whole blocks of 1024 values,
    so that a table block -> slot tells the optimizer which slot a value belongs to. Modules that read the same x form a
    stack: their A, and their B, follow each other in each slot.
    """

    specs: Sequence[SlotSpec]
    rank: int
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    block_slots: tuple[np.ndarray, ...]  # per page, the slot of each block; NO_SLOT for padding
    factors: Mapping[tuple[str, str], Factor]  # (module, "A" or "B")
    scales: Mapping[tuple[str, ...], Tensor]  # by the modules of a stack: f32 [slots, modules * rank]
    numbers: Mapping[str, int]  # of modules, as dropout keys; they do not depend on other slots

    @classmethod
    def declare(
        cls, config: ModelConfig, specs: Sequence[SlotSpec], max_binding: int, group: str = "adapters"
    ) -> AdapterSet:
        """group: that their bytes are counted under.

        Raises BindingTooLarge if a factor of one module, of all slots, does not fit a binding.
        """
        slots, rank = len(specs), max(spec.rank for spec in specs)
        shapes = config.lora_modules
        everything = {module: number for number, module in enumerate(shapes)}
        order = [module for module in everything if any(module in spec.scaling for spec in specs)]
        limit = max(1, max_binding // (4 * BLOCK * PAGE_BLOCKS)) * PAGE_BLOCKS
        factors: dict[tuple[str, str], Factor] = {}
        used: list[list[int]] = [[]]

        def blocks_of(modules: Sequence[str], which: str) -> dict[str, int]:
            """Of a slot's matrix."""
            return {module: -(-rank * shapes[module][which == "A"] // BLOCK) for module in modules}

        def fits(modules: Sequence[str]) -> bool:
            return all(slots * sum(blocks_of(modules, which).values()) <= limit for which in "AB")

        stacks = list(_stacks(config, order, rank, fits))
        for modules in stacks:
            for which in "AB":
                of = {m: (rank, shapes[m][1]) if which == "A" else (shapes[m][0], rank) for m in modules}
                blocks = blocks_of(modules, which)
                each, first = sum(blocks.values()), 0
                if each * slots > limit:
                    error = BindingTooLarge(f"{modules[0]}.lora_{which}", 4 * BLOCK * each * slots, max_binding)
                    error.advise("use fewer adapters at a time, or a lower rank")
                    raise error
                if used[-1] and len(used[-1]) + each * slots > limit:
                    used.append([])
                for module, shape in of.items():
                    offset = (len(used[-1]) + first) * BLOCK
                    factors[module, which] = Factor(len(used) - 1, offset, each * BLOCK, shape)
                    first += blocks[module]
                used[-1] += [slot for slot in range(slots) for _ in range(each)]
        tables = tuple(padded_table(blocks) for blocks in used)

        def pages(kind: str, group: str) -> tuple[Tensor, ...]:
            return tuple(persistent((t.size * BLOCK,), "f32", group, f"{kind} {i}") for i, t in enumerate(tables))

        numbers = {module: everything[module] for module in order}
        scales = {
            modules: persistent((slots, len(modules) * rank), "f32", group, f"scale of {modules[0]}")
            for modules in stacks
        }
        params, grads = pages("params", group), pages("grads", "optimizer")
        return cls(specs, rank, params, grads, tables, factors, scales, numbers)

    @property
    def slots(self) -> int:
        return len(self.specs)

    def storages(self) -> set[Storage]:
        """The storages of parameters and scales. Gradients are allocated with the program that writes them."""
        return {t.storage for t in (*self.params, *self.scales.values())}

    def record_use(self, rec: Recorder) -> None:
        """Nothing: they are read as they are."""

    def bind(self, inputs: StepInputs) -> dict[str, LoraSlots]:
        """The adapters of each module for a batch, for the decoder's forward pass."""
        found = {}
        for modules, scale in self.scales.items():
            stack = LoraStack(self._factors(modules, "A"), self._factors(modules, "B"), scale, len(modules))
            for index, module in enumerate(modules):
                found[module] = LoraSlots(
                    a=self._factors((module,), "A"),
                    b=self._factors((module,), "B"),
                    stack=stack,
                    index=index,
                    ranges=inputs.slot_ranges,
                    draws=inputs.draws,
                    module=self.numbers[module],
                    rank=self.rank,
                    slots=len(self.specs),
                )
        return found

    def _factors(self, modules: Sequence[str], which: str) -> Factors:
        """Views of successive modules of a stack."""
        factor = self.factors[modules[0], which]
        own = BLOCK * sum(self.factors[module, which].blocks for module in modules)
        size, name = (len(self.specs) - 1) * factor.stride + own, f"{modules[0]}.{which}"
        params, grads = (
            Tensor((size,), "f32", pages[factor.page].storage, 4 * factor.offset, name)
            for pages in (self.params, self.grads)
        )
        return Factors(params, grads, factor.stride)

    # -- host side -------------------------------------------------------------------------------------------------

    def upload_constants(self, device: Device) -> None:
        """The scales."""
        for modules, tensor in self.scales.items():
            values = [[spec.scaling.get(module, 0.0) for module in modules] for spec in self.specs]
            device.write(tensor.storage.buffer, np.repeat(np.array(values, np.float32), self.rank, axis=1))

    def modules(self, slot: int) -> Iterator[str]:
        return (module for module in self.numbers if module in self.specs[slot].scaling)

    def write(self, device: Device, slot: int, matrices: Matrices, pages: Sequence[Tensor] | None = None) -> None:
        """Writes a slot's matrices to `pages` (by default, the parameters), padding their rank with zeros."""
        for module, pair in matrices.items():
            for which, matrix in zip("AB", pair, strict=True):
                write_array(device, pages or self.params, self._place(module, which, slot), matrix)

    def read(
        self, device: Device, slot: int, pages: Sequence[Tensor] | None = None
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Reads a slot's (A [rank, in], B [out, rank]) by module from `pages`, with the slot's own rank."""
        found = read_arrays(device, pages or self.params, self.places(slot))
        return {module: (found[f"{module}.A"], found[f"{module}.B"]) for module in self.modules(slot)}

    def places(self, slot: int) -> dict[str, Place]:
        return {
            f"{module}.{which}": self._place(module, which, slot) for module in self.modules(slot) for which in "AB"
        }

    def _place(self, module: str, which: str, slot: int) -> Place:
        factor, rank = self.factors[module, which], self.specs[slot].rank
        rows, cols = factor.shape
        own = (rank, cols) if which == "A" else (rows, rank)
        return Place(factor.page, factor.offset + slot * factor.stride, factor.shape, own)

    def trainable(self, slot: int, config: ModelConfig) -> int:
        """The number of trainable parameters of a slot."""
        return sum(self.specs[slot].rank * sum(config.lora_modules[module]) for module in self.modules(slot))


def _stacks(
    config: ModelConfig, modules: Sequence[str], rank: int, fits: Callable[[Sequence[str]], bool]
) -> Iterator[tuple[str, ...]]:
    """The modules in order, those of a stack together if their A are whole blocks, so that they are one matrix, and a
    binding holds them."""
    stacks = {
        f"{config.path(i)}.{first}": [f"{config.path(i)}.{module}" for module in (first, *others)]
        for i in range(config.num_hidden_layers)
        for first, *others in config.stacks(i)
    }
    of = {module: stack for stack in stacks.values() for module in stack}
    done: set[str] = set()
    for module in modules:
        whole = rank * config.lora_modules[module][1] % BLOCK == 0
        stack = tuple(one for one in of.get(module, [module]) if one in modules) if whole else (module,)
        if len(stack) > 1 and not fits(stack):
            stack = (module,)
        if module not in done:
            yield stack
            done.update(stack)
