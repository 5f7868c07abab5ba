"""DoRA's norms: a program that computes ||W + s B A|| by row of every adapted weight, and m / norm, once a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.models.parameters import write_array
from wgpu_lora.ops.dora import adapted_norm, gram
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.share import claim
from wgpu_lora.weights.base import Weight


class Norms:
    """The program of an adapter set with DoRA.

    `measure` once the base is loaded; then run `program` whenever parameters have changed."""

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
                if spec.dora and module in spec.scaling:
                    self._record(rec, module, weight, slot)

    def _record(self, rec: Recorder, module: str, weight: Weight, slot: int) -> None:
        adapters, rank, out = self.adapters, self.adapters.rank, weight.out_features
        a, b, m = (adapters.of_slot(module, which, slot) for which in "ABM")
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

    def place_initial(self, slot: int) -> None:
        """Makes a slot's magnitudes those of its weights, so that they change nothing."""
        self.program.run()
        for module in self._weights:
            if module in self.adapters.specs[slot].scaling:
                place, (_, norm) = self.adapters.places(slot)[f"{module}.M"], self.adapters.gains[module]
                found = self.device.read(norm.storage.buffer).view(np.float32).reshape(norm.shape)
                write_array(self.device, self.adapters.params, place, found[slot, : place.shape[1]])


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
    own = {storage for storage in norms.program.persistent_storages() if storage.buffer is None}
    sizes = norms.program.plan().sizes
    with claim(device, sum(storage.nbytes for storage in own) + sum(sizes), "DoRA's norms"):
        allocate(device, own)
        arena = Arena(device, sizes)
        try:
            norms.measure()
            norms.program.build(arena)
            norms.program.run()
        finally:
            norms.program.release()
            arena.free()
            release(device, own)
