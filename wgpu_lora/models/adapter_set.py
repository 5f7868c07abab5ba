"""LoRA and DoRA adapters on the device: flat pages of parameters and gradients, viewed as stacked factors by module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wgpu_lora.formats.peft_adapter import PARTS, Matrices
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import Storage, Tensor, align, persistent
from wgpu_lora.models.batch_inputs import StepInputs
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.parameters import PAGE_BLOCKS, PageRegion, blocks_of, padded_table, read_arrays, write_array
from wgpu_lora.ops.gradient_norm import BLOCK
from wgpu_lora.ops.linear.dora import adapted_norm, gram
from wgpu_lora.ops.linear.lora import Factors, LoraSlots, LoraStack, Magnitudes
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import Weight


@dataclass(frozen=True)
class SlotSpec:
    """An adapter: its largest rank, and the scaling of each module that it targets (alpha / r or alpha / sqrt(r)).

    dora: whether its modules have magnitudes. offset: a frozen adapter in the weight (`ops.linear.adapted_linear`).
    """

    rank: int
    scaling: Mapping[str, float]
    dora: bool = False
    offset: SlotSpec | None = None

    @classmethod
    def of(cls, config: AdapterConfig, modules: Iterable[str]) -> SlotSpec:
        paths = list(modules)
        scaling = {module: config.scaling(module) for module in paths}
        return cls(max(map(config.rank, paths)), scaling, config.use_dora)

    def has_magnitudes(self, module: str) -> bool:
        return self.dora and module in self.scaling


@dataclass(frozen=True)
class Factor:
    """Where a module's A, B or M, its magnitudes, is: page, offset and stride between slots in values; padded shape.

    M is a matrix of one row."""

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
    so that a table block -> owner tells the optimizer which slot a value belongs to, and whether to an A. Modules that
    read the same x form a stack: their A, and their B, follow each other in each slot.
    """

    specs: Sequence[SlotSpec]
    rank: int
    params: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]
    block_owners: tuple[np.ndarray, ...]  # per page, of each block: 2 * slot, + 1 unless of an A; NO_OWNER for padding
    factors: Mapping[tuple[str, str], Factor]  # (module, one of PARTS)
    scales: Mapping[tuple[str, ...], Tensor]  # by the modules of a stack: f32 [slots, modules * rank]
    numbers: Mapping[str, int]  # of modules, as dropout keys; they do not depend on other slots
    gains: Mapping[str, tuple[Tensor, Tensor]]  # DoRA's gain and norm by module (see ops.linear.lora.Magnitudes)
    offset: AdapterSet | None = None  # of all slots

    @classmethod
    def declare(
        cls, config: ModelConfig, specs: Sequence[SlotSpec], max_binding: int, group: str = "adapters"
    ) -> AdapterSet:
        """group: that their bytes are counted under.

        Raises BindingTooLarge if a factor of one module, of all slots, does not fit a binding.
        """
        slots, rank = len(specs), max(spec.rank for spec in specs)
        shapes = config.lora_modules
        module_numbers = {module: number for number, module in enumerate(shapes)}
        order = [module for module in module_numbers if any(module in spec.scaling for spec in specs)]
        scaled = {module for module in order if any(spec.has_magnitudes(module) for spec in specs)}
        limit = max(1, max_binding // (4 * BLOCK * PAGE_BLOCKS)) * PAGE_BLOCKS
        factors: dict[tuple[str, str], Factor] = {}
        owners: list[list[int]] = [[]]

        def blocks_of(modules: Sequence[str], part: str) -> dict[str, int]:
            """Of a slot's matrix."""
            if part == "M":
                return {module: -(-shapes[module][0] // BLOCK) for module in modules if module in scaled}
            return {module: -(-rank * shapes[module][part == "A"] // BLOCK) for module in modules}

        def fits(modules: Sequence[str]) -> bool:
            return all(slots * sum(blocks_of(modules, part).values()) <= limit for part in "AB")

        stacks = list(_stacks(config, order, rank, fits))
        for modules in stacks:
            for part in PARTS:
                blocks = blocks_of(modules, part)
                of = {m: _shape(part, rank, shapes[m]) for m in blocks}
                slot_blocks, first = sum(blocks.values()), 0
                if slot_blocks * slots > limit:
                    error = BindingTooLarge(f"{modules[0]}.lora_{part}", 4 * BLOCK * slot_blocks * slots, max_binding)
                    error.advise("use fewer adapters at a time, or a lower rank")
                    raise error
                if owners[-1] and len(owners[-1]) + slot_blocks * slots > limit:
                    owners.append([])
                for module, shape in of.items():
                    offset = (len(owners[-1]) + first) * BLOCK
                    factors[module, part] = Factor(len(owners) - 1, offset, slot_blocks * BLOCK, shape)
                    first += blocks[module]
                owners[-1] += [2 * slot + (part != "A") for slot in range(slots) for _ in range(slot_blocks)]
        tables = tuple(padded_table(blocks) for blocks in owners)

        def pages(kind: str, group: str) -> tuple[Tensor, ...]:
            return tuple(persistent((t.size * BLOCK,), "f32", group, f"{kind} {i}") for i, t in enumerate(tables))

        numbers = {module: module_numbers[module] for module in order}
        scales = {
            modules: persistent((slots, len(modules) * rank), "f32", group, f"scale of {modules[0]}")
            for modules in stacks
        }
        gains = {module: _gains(slots, shapes[module][0], group, module) for module in order if module in scaled}
        params, grads = pages("params", group), pages("grads", "optimizer")
        offsets = [spec.offset or SlotSpec(1, {}) for spec in specs] if any(spec.offset for spec in specs) else []
        frozen = cls.declare(config, offsets, max_binding, group) if offsets else None
        return cls(specs, rank, params, grads, tables, factors, scales, numbers, gains, frozen)

    @property
    def slots(self) -> int:
        return len(self.specs)

    def storages(self) -> set[Storage]:
        """The storages of parameters and scales. Gradients are allocated with the program that writes them."""
        gains = (tensor for pair in self.gains.values() for tensor in pair)
        offset = self.offset.storages() if self.offset else set()
        return {t.storage for t in (*self.params, *self.scales.values(), *gains)} | offset

    def record_use(self, rec: Recorder) -> None:
        """Nothing: they are read as they are."""

    def bind(self, inputs: StepInputs) -> Mapping[str, LoraSlots]:
        """The adapters of each module for a batch, for the decoder's forward pass."""
        result = {}
        offsets: Mapping[str, LoraSlots] = self.offset.bind(inputs) if self.offset else {}
        for modules, scale in self.scales.items():
            stack = LoraStack(self.factors_of(modules, "A"), self.factors_of(modules, "B"), scale, len(modules))
            for index, module in enumerate(modules):
                result[module] = LoraSlots(
                    a=self.factors_of((module,), "A"),
                    b=self.factors_of((module,), "B"),
                    stack=stack,
                    index=index,
                    ranges=inputs.slot_ranges,
                    dropout_keys=inputs.draws,
                    module=self.numbers[module],
                    rank=self.rank,
                    slots=len(self.specs),
                    magnitudes=self._magnitudes(module),
                    offset=offsets[module].without_dropout() if module in offsets else None,
                )
        return result

    def _magnitudes(self, module: str) -> Magnitudes | None:
        return Magnitudes(self.factors_of((module,), "M"), *self.gains[module]) if module in self.gains else None

    def factors_of(self, modules: Sequence[str], part: str) -> Factors:
        """Views of one of the PARTS of successive modules of a stack."""
        factor = self.factors[modules[0], part]
        stack_size = BLOCK * sum(self.factors[module, part].blocks for module in modules)
        size, name = (len(self.specs) - 1) * factor.stride + stack_size, f"{modules[0]}.{part}"
        params, grads = (
            Tensor((size,), "f32", pages[factor.page].storage, 4 * factor.offset, name)
            for pages in (self.params, self.grads)
        )
        return Factors(params, grads, factor.stride)

    def of_slot(self, module: str, part: str, slot: int) -> Tensor:
        """The parameters of one of a module's PARTS in a slot, in their padded shape."""
        factor = self.factors[module, part]
        offset = 4 * (factor.offset + slot * factor.stride)
        return Tensor(factor.shape, "f32", self.params[factor.page].storage, offset, f"{module}.{part}")

    # -- host side -------------------------------------------------------------------------------------------------

    def upload_constants(self, device: Device) -> None:
        """The scales, and the gains of slots without DoRA."""
        self.upload_scales(device)
        for gain, norm in self.gains.values():
            device.write(gain.storage.buffer, np.ones(gain.shape, np.float32))
            device.write(norm.storage.buffer, np.zeros(norm.shape, np.float32))
        if self.offset:
            self.offset.upload_constants(device)

    def upload_scales(self, device: Device) -> None:
        for modules, tensor in self.scales.items():
            values = [[spec.scaling.get(module, 0.0) for module in modules] for spec in self.specs]
            device.write(tensor.storage.buffer, np.repeat(np.array(values, np.float32), self.rank, axis=1))

    def modules(self, slot: int) -> Iterator[str]:
        return (module for module in self.numbers if module in self.specs[slot].scaling)

    def write(self, device: Device, slot: int, matrices: Matrices, pages: Sequence[Tensor] | None = None) -> None:
        """Writes a slot's matrices to `pages` (by default, the parameters), padding their rank with zeros."""
        for module, pair in matrices.items():
            for part, matrix in zip(PARTS, pair, strict=False):
                write_array(device, pages or self.params, self._region(module, part, slot), matrix)

    def read(
        self, device: Device, slot: int, pages: Sequence[Tensor] | None = None
    ) -> dict[str, tuple[np.ndarray, ...]]:
        """Reads a slot's (A [rank, in], B [out, rank]) by module from `pages`, with the slot's own rank; with DoRA, the
        magnitudes [out] follow."""
        result, parts = read_arrays(device, pages or self.params, self.regions(slot)), self.parts(slot)
        return {module: tuple(result[f"{module}.{part}"] for part in parts) for module in self.modules(slot)}

    def regions(self, slot: int) -> dict[str, PageRegion]:
        parts = self.parts(slot)
        return {f"{module}.{part}": self._region(module, part, slot) for module in self.modules(slot) for part in parts}

    def _region(self, module: str, part: str, slot: int) -> PageRegion:
        factor, rank = self.factors[module, part], self.specs[slot].rank
        rows, cols = factor.shape
        stored_shape = {"A": (rank, cols), "B": (rows, rank), "M": (cols,)}[part]
        return PageRegion(factor.page, factor.offset + slot * factor.stride, factor.shape, stored_shape)

    def parts(self, slot: int) -> str:
        """Those of the PARTS that a slot's modules have."""
        return PARTS if self.specs[slot].dora else PARTS[:2]

    def trainable(self, slot: int, config: ModelConfig) -> int:
        """The number of trainable parameters of a slot."""
        spec = self.specs[slot]
        shapes = [config.lora_modules[module] for module in self.modules(slot)]
        return sum(spec.rank * sum(shape) + (shape[0] if spec.dora else 0) for shape in shapes)


def _shape(part: str, rank: int, module: tuple[int, int]) -> tuple[int, int]:
    out, size_in = module
    return {"A": (rank, size_in), "B": (out, rank), "M": (1, out)}[part]


def _gains(slots: int, out: int, group: str, module: str) -> tuple[Tensor, Tensor]:
    shape = slots, align(4 * out) // 4
    gain, norm = (persistent(shape, "f32", group, f"{name} of {module}") for name in ("gain", "norm"))
    return gain, norm


def _stacks(
    config: ModelConfig, modules: Sequence[str], rank: int, fits: Callable[[Sequence[str]], bool]
) -> Iterator[tuple[str, ...]]:
    """The modules in order, those of a stack grouped if their A are whole blocks, so that they are one matrix, and fit
    a binding."""
    stacks = {
        f"{config.path(i)}.{first}": [f"{config.path(i)}.{module}" for module in (first, *rest)]
        for i in range(config.num_hidden_layers)
        for first, *rest in config.stacks(i)
    }
    of = {module: stack for stack in stacks.values() for module in stack}
    visited: set[str] = set()
    for module in modules:
        whole = rank * config.lora_modules[module][1] % BLOCK == 0
        stack = tuple(name for name in of.get(module, [module]) if name in modules) if whole else (module,)
        if len(stack) > 1 and not fits(stack):
            stack = (module,)
        if module not in visited:
            yield stack
            visited.update(stack)


class Norms:
    """The program of an adapter set with DoRA.

    `measure` once the base is loaded; then run `program` whenever parameters have changed, or `update` if the adapters
    of the slots have."""

    def __init__(self, model: LoadedModel, adapters: AdapterSet, group: str = "adapters"):
        self.device, self.adapters = model.device, adapters
        self.program = Program(model.device, "norms")
        self._weights = dict(_weights(model.decoder, adapters))
        self._squares = {
            module: persistent((weight.out_features,), "f32", group, f"squares of {module}")
            for module, weight in self._weights.items()
        }
        rec = Recorder(self.program)
        for module, weight in self._weights.items():
            for slot, spec in enumerate(adapters.specs):
                if spec.has_magnitudes(module):
                    self._record(rec, module, weight, slot)

    def _record(self, rec: Recorder, module: str, weight: Weight, slot: int) -> None:
        adapters, rank, out = self.adapters, self.adapters.rank, weight.out_features
        a, b, m = (adapters.of_slot(module, part, slot) for part in "ABM")
        p, products = rec.temp((rank, out), name="p"), rec.temp((rank, rank), name="gram")
        weight.forward(rec, a, p, None, False)
        rec.dispatch(gram, a, products, rows=rank, cols=weight.in_features)
        stack, scale = next((modules, scale) for modules, scale in adapters.scales.items() if module in modules)
        gain, norm = (tensor.rows(slot, slot + 1) for tensor in adapters.gains[module])
        at = slot * scale.shape[1] + stack.index(module) * rank
        squares = self._squares[module]
        rec.dispatch(adapted_norm, p, products, b, m, squares, scale, norm, gain, rows=out, rank=rank, scale_at=at)

    def measure(self) -> None:
        """Uploads the squared norms of the base's rows, as it is on the device."""
        for module, weight in self._weights.items():
            values = weight.values(self.device)
            squares = np.einsum("oi,oi->o", values, values, dtype=np.float64)
            self.device.write(self._squares[module].storage.buffer, squares.astype(np.float32))

    def update(self) -> None:
        """Computes the gains of all slots. Where a slot's adapter has no magnitudes any more, they change nothing."""
        self.program.run()
        for module, (gain, norm) in self.adapters.gains.items():
            for slot, spec in enumerate(self.adapters.specs):
                if not spec.has_magnitudes(module):
                    for tensor, value in ((gain, 1.0), (norm, 0.0)):
                        width = tensor.shape[1]
                        self.device.write(tensor.storage.buffer, np.full(width, value, np.float32), 4 * width * slot)

    def place_initial(self, slot: int) -> None:
        """Makes a slot's magnitudes those of its weights, so that they change nothing."""
        self.program.run()
        for module in self._weights:
            if module in self.adapters.specs[slot].scaling:
                region, (_, norm) = self.adapters.regions(slot)[f"{module}.M"], self.adapters.gains[module]
                result = self.device.read(norm.storage.buffer).view(np.float32).reshape(norm.shape)
                write_array(self.device, self.adapters.params, region, result[slot, : region.shape[1]])


def _weights(decoder: Decoder, adapters: AdapterSet) -> Iterator[tuple[str, Weight]]:
    for layer in decoder.layers:
        for name, linear in layer.linears.items():
            module = f"{layer.path}.{name}"
            if module in adapters.gains:
                yield module, linear.weight


def fix_gains(model: LoadedModel, adapters: AdapterSet | None) -> None:
    """Computes the gains of adapters that will not change, if they have DoRA; the base must be loaded."""
    if adapters is None or not adapters.gains:
        return
    norms, device = Norms(model, adapters, "workspace"), model.device
    storages = {storage for storage in norms.program.persistent_storages() if storage.buffer is None}
    sizes = norms.program.plan().sizes
    with claim(device, sum(storage.nbytes for storage in storages) + sum(sizes), "DoRA's norms"):
        allocate(device, storages)
        arena = Arena(device, sizes)
        try:
            norms.measure()
            norms.program.build(arena)
            norms.program.run()
        finally:
            norms.program.release()
            arena.free()
            release(device, storages)
