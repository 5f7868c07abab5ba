"""Cases of the optimizers' kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from support.kernels import NONE, Arrays, add, normal, poison, u32
from wgpu_lora.gpu.struct import struct_array, struct_words
from wgpu_lora.ops import gradient_norm
from wgpu_lora.train.optimizers import adamw, adamw_8bit, adamw_bf16, lion, lion_8bit, muon, sgd
from wgpu_lora.train.optimizers.eight_bit import code_words, record_values

HYPER_SLOTS = 5  # usual, of no block, unlimited norm, inactive, of a loss that is not finite


def hypers(rng: np.random.Generator, kind: Any = adamw.Hyper) -> np.ndarray:
    random = (rng.random((2 * HYPER_SLOTS, struct_words(kind))) * 0.5 + 0.25).tolist()
    small = {"eps": 1e-8} if kind is adamw.Hyper else {}
    return struct_array(kind, [replace(kind(*values), **small) for values in random])


def clips() -> np.ndarray:
    records = [gradient_norm.Clip(1.0), gradient_norm.Clip(1.0), gradient_norm.Clip(0.0), None, gradient_norm.Clip(1.0)]
    return struct_array(gradient_norm.Clip, records)


def norms(rng: np.random.Generator) -> Arrays:
    block_owners = u32(*rng.choice([0, 1, 4, 7, 8, NONE], 37))
    slot_loss = normal(rng, HYPER_SLOTS)
    slot_loss[4] = np.nan
    report = poison(HYPER_SLOTS, 4, value=7e29)  # a NaN is expected in places
    return {
        "sums": rng.random(37, np.float32),
        "block_owners": block_owners,
        "clips": clips(),
        "loss": slot_loss,
        "report": report,
    }


def updates(rng: np.random.Generator, kind: Any, states: str, dtype: str, blocks: np.ndarray, size: int) -> Arrays:
    report = normal(rng, HYPER_SLOTS, 4)
    report[:, 2] = 1, 1, 1, 0, 0
    values = {name: normal(rng, size) for name in ("params", "grads", *states.split())}
    if "second_moment" in values:
        values["second_moment"] **= 2
    for name in states.split() if dtype == "bf16" else ():
        values[name] = as_bf16(values[name])
    return {**values, "block_owners": blocks, "hyper": hypers(rng, kind), "report": report}


def as_bf16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def updating(kernel: Any, kind: Any, states: str, dtype: str = "f32", note: str = "") -> None:
    """Blocks of owners that are updated, of none, and of slots that are not."""
    blocks, size = u32(0, NONE, 7, 4, 1, 8), 6 * gradient_norm.BLOCK

    def make(rng: np.random.Generator) -> Arrays:
        arrays = updates(rng, kind, states, dtype, blocks, size)
        arrays["grads"][2 * gradient_norm.BLOCK : 3 * gradient_norm.BLOCK] = np.nan
        return arrays

    add(kernel, make, size=size, note=note, coarse=tuple(states.split()) if dtype == "bf16" else (), moving="report")


def checking(kernel: Any, kind: Any, states: str, dtype: str = "f32", note: str = "") -> None:
    """Blocks of slot 0: one that is left in order, and one for each way to leave it; then what is not looked at."""
    blocks = u32(0, 1, 0, 1, 0, 0, NONE, 7, 4)

    def make(rng: np.random.Generator) -> Arrays:
        arrays = updates(rng, kind, states, "f32", blocks, blocks.size * gradient_norm.BLOCK)
        values = {n: arrays[n].reshape(blocks.size, gradient_norm.BLOCK) for n in ("params", *states.split())}
        values["params"][1, 1023] = np.nan
        values["params"][2, 77] = -np.inf
        values["params"][3, 500] = -2.0 * gradient_norm.MAX_PARAMETER
        values["params"][[6, 7, 8], 0] = np.nan
        for at, name in enumerate(states.split()):
            values[name][4 + at, 3] = np.inf
            arrays[name] = as_bf16(values[name]).reshape(-1) if dtype == "bf16" else values[name].reshape(-1)
        return {**arrays, "diverged": poison(blocks.size)}

    add(kernel, make, blocks=blocks.size, note=note)


def records(rng: np.random.Generator, kind: Any, states: int, owners: np.ndarray, kinds: str) -> Arrays:
    """Pages with records: of each block, narrow, wide, or none. Gradients differ by orders of magnitude."""
    places = np.full((owners.size, 4), NONE, np.uint32)
    word, value = 4, 3
    for block, owner in enumerate(owners):
        if owner != NONE:
            places[block] = owner, word, value, "nwx".index(kinds[block])
            word += code_words(states) if kinds[block] == "n" else 0
            value += record_values(states, kinds[block] == "w") if kinds[block] != "x" else 0
    report = normal(rng, HYPER_SLOTS, 4)
    report[:, 2] = 1, 1, 1, 0, 0
    scales = np.exp(normal(rng, value)).astype(np.float32)
    values = {name: normal(rng, owners.size * gradient_norm.BLOCK) for name in ("params", "grads")}
    values["grads"] *= np.exp(3 * normal(rng, values["grads"].size))
    codes = rng.integers(0, 256, 4 * word, np.uint8)
    return {**values, "codes": codes, "values": scales, "places": places, "hyper": hypers(rng, kind), "report": report}


def updating_8bit(kernel: Any, kind: Any, states: int) -> None:
    owners = u32(0, NONE, 7, 4, 1, 0, 8, 0)

    def make(rng: np.random.Generator) -> Arrays:
        arrays = records(rng, kind, states, owners, "nnnwnwnx")
        arrays["grads"][5 * gradient_norm.BLOCK + 256 : 5 * gradient_norm.BLOCK + 512] = 0
        arrays["grads"][2 * gradient_norm.BLOCK : 3 * gradient_norm.BLOCK] = np.nan
        arrays["values"][arrays["places"][4, 2] + 1] = 0  # a scale of a quarter that has no state yet, nor a gradient
        arrays["grads"][4 * gradient_norm.BLOCK + 256 : 4 * gradient_norm.BLOCK + 512] = 0
        return arrays

    add(kernel, make, blocks=owners.size, coarse=("codes",), moving="report")


def checking_8bit(kernel: Any, kind: Any, states: int) -> None:
    owners = u32(0, 1, 0, 1, 0, 0, NONE, 7, 4, 0)

    def make(rng: np.random.Generator) -> Arrays:
        arrays = records(rng, kind, states, owners, "nwnwnwnnnx")
        params = arrays["params"].reshape(owners.size, gradient_norm.BLOCK)
        params[1, 1023] = np.nan
        params[2, 77] = -2.0 * gradient_norm.MAX_PARAMETER
        params[[6, 7, 8, 9], 0] = np.nan
        arrays["values"][arrays["places"][4, 2] + 2] = np.inf
        arrays["values"][arrays["places"][5, 2] + 1024 * states - 1] = np.inf
        return {**arrays, "diverged": poison(owners.size)}

    add(kernel, make, blocks=owners.size)


def gates(rng: np.random.Generator) -> Arrays:
    block_owners = u32(*rng.choice([0, 1, 4, 7, 8, NONE], 37))
    diverged = ((block_owners == NONE) | (block_owners == 7)).astype(np.float32)
    diverged[np.flatnonzero(block_owners == 7)[1:]] = 0
    return {"diverged": diverged, "block_owners": block_owners, "report": normal(rng, HYPER_SLOTS, 4)}


add(gradient_norm.gradient_norm, norms, slots=HYPER_SLOTS, blocks=37)
add(gradient_norm.update_gate, gates, slots=HYPER_SLOTS, blocks=37)
updating(adamw.adamw, adamw.Hyper, adamw.MOMENTS)
checking(adamw.adamw_check, adamw.Hyper, adamw.MOMENTS)
updating(adamw_bf16.adamw_bf16, adamw.Hyper, adamw.MOMENTS, "bf16")
checking(adamw_bf16.adamw_bf16_check, adamw.Hyper, adamw.MOMENTS, "bf16")
updating(lion.lion, lion.Hyper, "momentum")
checking(lion.lion_check, lion.Hyper, "momentum")
updating(sgd.sgd, sgd.Hyper, "momentum")
checking(sgd.sgd_check, sgd.Hyper, "momentum")
updating(sgd.sgd, sgd.Hyper, "", note="plain")
checking(sgd.sgd_check, sgd.Hyper, "", note="plain")
updating_8bit(adamw_8bit.adamw_8bit, adamw.Hyper, 2)
checking_8bit(adamw_8bit.adamw_8bit_check, adamw.Hyper, 2)
updating_8bit(lion_8bit.lion_8bit, lion.Hyper, 1)
checking_8bit(lion_8bit.lion_8bit_check, lion.Hyper, 1)


def of_matrices(rng: np.random.Generator) -> Arrays:
    """A of 3 x 500 and of a gated slot, B of 400 x 3 and, in no block, nothing."""
    homes = np.full((7, muon.HOME_WORDS), NONE, np.uint32)
    homes[0:2] = 0, 0, 0, 500, 1, 500, 3, 0
    homes[2:4] = 5, 1, 2048, 1, 3, 400, 2, 0
    homes[5] = 8, 2, 5120, 200, 1, 200, 3, 0
    homes[6] = 1, 3, 6144, 1, 3, 70, 3, 0
    report = normal(rng, HYPER_SLOTS, 4)
    report[:, 2] = 1, 1, 1, 0, 0
    hyper = hypers(rng, muon.Hyper)
    hyper[5, 5] = 0
    return {
        "params": normal(rng, 7168),
        "direction": normal(rng, 7168),
        "q": normal(rng, 4, 3, 3),
        "norms": rng.random(4, np.float32) + 0.5,
        "homes": homes,
        "hyper": hyper,
        "report": report,
    }


def diverging_matrices(rng: np.random.Generator) -> Arrays:
    arrays = of_matrices(rng)
    arrays["params"][1500 - 1] = 2.0 * gradient_norm.MAX_PARAMETER
    arrays["params"][[1500, 2048 + 1200, 5120]] = np.nan  # beyond its matrices, and of a gated slot
    arrays["direction"][2048 + 7] = np.inf
    return {**arrays, "diverged": poison(7)}


def grams(rng: np.random.Generator) -> Arrays:
    arrays = of_matrices(rng)
    return {**{n: arrays[n] for n in ("direction", "homes")}, "firsts": u32(0, 2, 5, 6), "gram": poison(4, 3, 3)}


def squares(*outputs: str) -> Any:
    def make(rng: np.random.Generator) -> Arrays:
        x = normal(rng, 5, 7, 9)
        gram = (x @ x.transpose(0, 2, 1)).astype(np.float32)
        gram[3] = 0
        names = {"y": poison(5, 7, 7), "norms": poison(5), "gram": gram, "x": gram, "z": normal(rng, 5, 7, 7)}
        return {name: names[name] for name in outputs}

    return make


def momenta(output: str) -> Any:
    def make(rng: np.random.Generator) -> Arrays:
        arrays = updates(rng, muon.Hyper, "momentum", "f32", u32(0, NONE, 7, 4, 1), 5 * gradient_norm.BLOCK)
        del arrays["params"]
        return arrays | ({"direction": poison(5 * gradient_norm.BLOCK)} if output else {})

    return make


add(muon.muon_direction, momenta("direction"), size=5 * gradient_norm.BLOCK)
add(muon.muon_momentum, momenta(""), size=5 * gradient_norm.BLOCK)
add(muon.muon_gram, grams, matrices=4, rank=3)
add(muon.muon_normalise, squares("gram", "y", "norms"), matrices=5, rank=7)
add(muon.muon_product, squares("x", "z", "y"), matrices=5, rank=7, a=2.0, b=-0.5, c=0.25)
add(muon.muon, of_matrices, blocks=7, rank=3)
add(muon.muon_check, diverging_matrices, blocks=7, rank=3)
