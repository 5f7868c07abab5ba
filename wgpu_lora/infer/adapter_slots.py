"""Adapters by name, of which some are in the slots on the device."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.formats.peft_adapter import Matrices
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.program import Program
from wgpu_lora.models.adapter_set import AdapterSet, Norms, SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.text import count_noun, join_words


@dataclass
class _Adapter:
    spec: SlotSpec
    matrices: Matrices
    number: int
    requests: int = 0  # unfinished
    running_requests: int = 0
    slot: int | None = None
    leaving: bool = False


class AdapterSlots:
    """Adapters in host memory, and slots on the device for those of running requests.

    A request acquires its adapter's slot when it begins to run. An adapter of which none runs gives up its slot to
    another, the one that was used least recently first.

    Args:
        slots: adapters on the device.
        rank: the largest of an adapter.
        dora: whether adapters may have magnitudes, which cost a pass over the outputs of all modules.
        in_memory: the most adapters that are known; None for any number.
    """

    def __init__(self, model: LoadedModel, slots: int, rank: int, dora: bool, in_memory: int | None = None):
        self.model, self.rank, self.dora, self.in_memory = model, rank, dora, in_memory
        modules = dict.fromkeys(model.config.lora_modules, 1.0)
        self._specs = [SlotSpec(rank, modules, dora) for _ in range(slots)]
        self.adapters = AdapterSet.declare(model.config, self._specs, model.device.max_binding)
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()  # the one that was used last at the end
        self._free = list(range(slots - 1, -1, -1))
        self._norms = Norms(model, self.adapters) if dora else None
        self._loads = count(1)

    @property
    def names(self) -> list[str]:
        return [name for name, adapter in self._adapters.items() if not adapter.leaving]

    @property
    def programs(self) -> list[Program]:
        """What an engine plans and builds for them."""
        return [self._norms.program] if self._norms else []

    def open(self) -> None:
        """Upload constants. The storages are allocated, and the base is loaded."""
        self.adapters.upload_constants(self.model.device)
        if self._norms:
            self._norms.measure()

    def key(self, name: str) -> int:
        """What the weights of an adapter are known by, which another adapter of its name has not."""
        return self._adapters[name].number

    def load(self, name: str, config: AdapterConfig, matrices: Matrices) -> None:
        """Make an adapter known; it gets a slot when a request needs it.

        Raises:
            UserError: the name is taken, or it does not fit the slots.
            NoRoomError: all adapters in memory are in use.
        """
        spec = SlotSpec.of(config, matrices)
        if name in self._adapters and self._adapters[name].leaving:
            raise UserError(f"The adapter '{name}' before still has requests: wait until they end, or choose another.")
        if name in self._adapters:
            raise UserError(f"An adapter '{name}' is loaded already: unload it first, or choose another name.")
        if not self._specs:
            raise UserError(f"The adapter '{name}' has no slot on the device: start with room for adapters.")
        if spec.rank > self.rank:
            raise UserError(
                f"The adapter '{name}' has rank {spec.rank}, more than the {self.rank} that slots have room for: start "
                f"with a maximum rank of {spec.rank}."
            )
        if spec.dora and not self.dora:
            raise UserError(
                f"The adapter '{name}' has DoRA's magnitudes, for which slots have no room: start with DoRA."
            )
        if self.in_memory is not None and len(self._adapters) >= self.in_memory:
            idle = [key for key, adapter in self._adapters.items() if not adapter.requests]
            if not idle:
                raise NoRoomError(
                    f"The adapter '{name}' has no place: all of {count_noun(self.in_memory, 'adapter')} in memory "
                    "have requests: wait until one has none, or start with more."
                )
            self._drop(idle[0])
        self._adapters[name] = _Adapter(spec, matrices, next(self._loads))
        self._adapters.move_to_end(name, last=False)  # it has not been used yet

    def unload(self, name: str) -> None:
        """Forget an adapter once its requests have ended. Raises UserError if it is unknown."""
        self.check(name)
        adapter = self._adapters[name]
        adapter.leaving = True
        if not adapter.requests:
            self._drop(name)

    def check(self, name: str) -> None:
        """Raise UserError unless the adapter is known."""
        if name not in self._adapters or self._adapters[name].leaving:
            names = f"it has {join_words(sorted(self.names))}" if self.names else "none is loaded"
            raise UserError(f"There is no adapter '{name}': {names}.")

    def add(self, name: str) -> None:
        """Count a request. Raises UserError unless the adapter is known."""
        self.check(name)
        self._adapters[name].requests += 1

    def acquire(self, name: str) -> int | None:
        """The slot of an adapter for a request that begins to run; None if all slots are of adapters that do."""
        adapter = self._adapters[name]
        if adapter.slot is None:
            if not self._free:
                idle = [
                    candidate
                    for candidate in self._adapters.values()
                    if candidate.slot is not None and not candidate.running_requests
                ]
                if not idle:
                    return None
                slot, idle[0].slot = idle[0].slot, None
                assert slot is not None
                self._free.append(slot)
            adapter.slot = self._free.pop()
            self._write(adapter.slot, adapter)
        adapter.running_requests += 1
        self._adapters.move_to_end(name)
        return adapter.slot

    def release(self, name: str) -> None:
        """One request less that runs."""
        self._adapters[name].running_requests -= 1

    def remove(self, name: str) -> None:
        """One request less, which does not run any more."""
        adapter = self._adapters[name]
        adapter.requests -= 1
        if adapter.leaving and not adapter.requests:
            self._drop(name)

    def _drop(self, name: str) -> None:
        adapter = self._adapters.pop(name)
        if adapter.slot is not None:
            self._free.append(adapter.slot)

    def _write(self, slot: int, adapter: _Adapter) -> None:
        device, adapters = self.model.device, self.adapters
        self._specs[slot] = adapter.spec
        adapters.write(device, slot, adapter.matrices)
        adapters.upload_scales(device)
        if self._norms:
            self._norms.update()


class FixedSlots:
    """Adapters of a set that the caller has put on the device; their names are their slots' numbers."""

    def __init__(self, adapters: AdapterSet | None):
        self.adapters = adapters
        self.names = [str(slot) for slot in range(len(adapters.specs) if adapters else 0)]
        self.programs: list[Program] = []

    def open(self) -> None: ...

    def key(self, name: str) -> int:
        return int(name)

    def check(self, name: str) -> None:
        if name not in self.names:
            raise UserError(
                f"There is no adapter {name}: {len(self.names)} are loaded, counted from 0: choose one of them, or "
                "None for the base alone."
            )

    def add(self, name: str) -> None:
        self.check(name)

    def acquire(self, name: str) -> int | None:
        return int(name)

    def release(self, name: str) -> None: ...

    def remove(self, name: str) -> None: ...
