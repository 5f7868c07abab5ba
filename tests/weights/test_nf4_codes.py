"""The NumPy NF4 gives what bitsandbytes gives."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.dense import DenseWeight, _rows_as
from wgpu_lora.weights.nf4 import nf4_reference as nf4

GOLDEN = load_file(FIXTURES / "golden" / "nf4.safetensors")
SHAPES = ("37x91", "64x64", "5x20", "48x80", "130x257")


@pytest.mark.parametrize("name", SHAPES)
def test_golden(name):
    weight, golden = GOLDEN[f"{name}.weight"], {k: GOLDEN[f"{name}.{k}"] for k in ("codes", "absmax_codes")}
    codes, absmax = nf4.quantize_nf4(weight)
    np.testing.assert_array_equal(nf4.pack_bnb(codes), golden["codes"])
    nested_codes, nested_absmax, offset = nf4.double_quantize(absmax)
    np.testing.assert_array_equal(nested_codes, golden["absmax_codes"])
    # the mean may differ in its last bit, and everything after it with it
    np.testing.assert_allclose(offset, GOLDEN[f"{name}.offset"][0], rtol=2e-7)
    np.testing.assert_allclose(nested_absmax, GOLDEN[f"{name}.nested_absmax"], rtol=2e-6)
    np.testing.assert_allclose(nf4.round_trip(weight), GOLDEN[f"{name}.dequantised"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_golden_codes_dequantise_exactly(name):
    part = {k: GOLDEN[f"{name}.{k}"] for k in ("codes", "absmax_codes", "nested_absmax", "offset", "dequantised")}
    absmax = nf4.double_dequantize(part["absmax_codes"], part["nested_absmax"], part["offset"][0])
    values = nf4.dequantize_nf4(nf4.unpack_bnb(part["codes"], part["dequantised"].size), absmax)
    np.testing.assert_allclose(values, part["dequantised"].reshape(-1), rtol=1.5e-7, atol=0)


def test_midpoints_take_the_lower_code():
    # absmax 1, so that nothing is rounded before the comparison
    on, above = nf4.NF4_MIDPOINTS, np.nextafter(nf4.NF4_MIDPOINTS, np.float32(2))
    np.testing.assert_array_equal(nf4.quantize_nf4(np.append(on, np.float32(1)))[0][:15], np.arange(15))
    np.testing.assert_array_equal(nf4.quantize_nf4(np.append(above, np.float32(1)))[0][:15], np.arange(1, 16))


def test_zeros_short_blocks_and_nothing():
    codes, absmax = nf4.quantize_nf4(np.zeros(70, np.float32))
    assert (codes == 7).all()
    assert absmax.tolist() == [0, 0]
    assert not nf4.dequantize_nf4(codes, absmax).any()
    assert nf4.quantize_nf4(np.array([-3.0], np.float32))[0].tolist() == [0]
    assert nf4.quantize_nf4(np.zeros(0, np.float32))[0].size == 0


@pytest.mark.reference
def test_codebooks_are_bitsandbytes_own():
    import bitsandbytes.functional as bnb

    np.testing.assert_array_equal(nf4.NF4_CODE, bnb.get_4bit_type("nf4", device="cpu").numpy())
    np.testing.assert_array_equal(nf4.DYNAMIC_CODE, bnb.create_dynamic_map(signed=True).numpy())


@pytest.mark.reference
@pytest.mark.parametrize("shape", [(37, 91), (64, 64), (5, 20), (300, 128), (1, 1), (3, 65)])
def test_bitsandbytes_live(shape):
    import bitsandbytes.functional as bnb
    import torch

    weight = (np.random.default_rng(sum(shape)).standard_normal(shape) * 0.02).astype(np.float32)
    flat = torch.from_numpy(weight.reshape(-1))
    codes, absmax = nf4.quantize_nf4(weight)
    packed, state = bnb.quantize_4bit(flat, quant_type="nf4", compress_statistics=False)
    np.testing.assert_array_equal(state.absmax.numpy(), absmax)
    theirs = nf4.unpack_bnb(packed.numpy(), weight.size)
    tail = weight.size - weight.size % nf4.BLOCK
    np.testing.assert_array_equal(theirs[:tail], codes[:tail])
    # the incomplete last block is divided by absmax there, so a value on a threshold may fall on its other side
    assert (theirs[tail:] != codes[tail:]).sum() <= 1
    _, state = bnb.quantize_4bit(flat, quant_type="nf4", compress_statistics=True)
    nested_codes, nested_absmax, offset = nf4.double_quantize(absmax)
    assert offset == pytest.approx(state.offset.item(), rel=3e-7)
    if absmax.size > 1:
        np.testing.assert_allclose(nested_absmax, state.state2.absmax.numpy(), rtol=1e-5)
        # its table has 65,536 steps, so a neighbouring code is chosen now and then, and it is hardly farther
        differ = nested_codes != state.absmax.numpy()
        assert differ.mean() < 0.01
        ours, other = (nf4.DYNAMIC_CODE[c] * nested_absmax[0] for c in (nested_codes, state.absmax.numpy()))
        centred = absmax - offset
        assert (np.abs(np.abs(ours - centred) - np.abs(other - centred)) <= 4e-5 * nested_absmax[0]).all()


@pytest.mark.reference
@pytest.mark.parametrize("odd", [False, True])
def test_thresholds_live(odd):
    """Values a float32 step either side of every threshold, in complete blocks of a non-trivial absmax."""
    import bitsandbytes.functional as bnb
    import torch

    absmax = np.float32(0.37 if odd else 2.9)
    on = nf4.NF4_MIDPOINTS * absmax
    block = np.concatenate([on, np.nextafter(on, np.float32(9)), np.nextafter(on, np.float32(-9)), np.full(19, absmax)])
    packed, _ = bnb.quantize_4bit(torch.from_numpy(block.astype(np.float32)), quant_type="nf4")
    np.testing.assert_array_equal(nf4.unpack_bnb(packed.numpy(), 64), nf4.quantize_nf4(block)[0])


# -- dense weights -----------------------------------------------------------------------------------------------------


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
    for first, part in weight.row_ranges():
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
