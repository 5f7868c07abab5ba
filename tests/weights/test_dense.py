"""A matrix too large for one binding, in parts, multiplies as a whole one does."""

from __future__ import annotations

import numpy as np
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.dense import DenseWeight, _rows_as


@pytest.mark.drivers
def test_a_dense_weight_in_parts(device: Device) -> None:
    rows, out, size_in = 5, 600, 12
    rng = np.random.default_rng(0)
    x, w, dy, bias = (
        rng.standard_normal(s).astype(np.float32) for s in ((rows, size_in), (out, size_in), (rows, out), out)
    )
    weight = DenseWeight.declare((out, size_in), "f32", "w", 300 * 4 * size_in)
    assert [part.shape[0] for part in weight.parts] == [256, 256, 88]
    tensors = {n: persistent(v.shape, "f32", "workspace", n) for n, v in (("x", x), ("dy", dy), ("bias", bias))}
    y, dx = persistent((rows, out), "f32", "workspace", "y"), persistent((rows, size_in), "f32", "workspace", "dx")
    program = Program(device)
    recorder = Recorder(program)
    weight.forward(recorder, tensors["x"], y, tensors["bias"], accumulate=False)
    weight.backward(recorder, tensors["dy"], dx, accumulate=False)
    storages = program.persistent_storages()
    allocate(device, storages)
    program.build(Arena(device))
    for first, part in weight.chunks():
        device.write(part.storage.buffer, w[first : first + part.shape[0]])
    for name, values in (("x", x), ("dy", dy), ("bias", bias)):
        device.write(tensors[name].storage.buffer, values)
    program.run()
    got = [device.read(t.storage.buffer).view(np.float32).reshape(t.shape) for t in (y, dx)]
    np.testing.assert_allclose(got[0], x.astype(np.float64) @ w.T + bias, atol=2e-5)
    np.testing.assert_allclose(got[1], dy.astype(np.float64) @ w, atol=2e-4)
    for storage in storages:
        device.free(storage.buffer)


def test_weights_beyond_f16_are_refused_by_name() -> None:
    class Loud:
        """A checkpoint of one loud matrix."""

        def dtype(self, name: str) -> str:
            return "BF16"

        def read_f32(self, name: str, start: int, stop: int) -> np.ndarray:
            return np.array([[1.0, 7e4]], np.float32)

    with pytest.raises(UserError, match=r"^up has values beyond f16's range of 65,504: use base_dtype='nf4' or f32"):
        _rows_as(Loud(), "up", "f16", 0, 1)
