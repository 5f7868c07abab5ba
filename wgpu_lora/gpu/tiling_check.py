"""Checks tilings of heavy kernels on a small call that compiles to the same shader (see gpu.tiling.Tunable)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.reference_values import as_float64, nmse
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tiling import MATRIX, Constants, Tiling, Tunable
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices, Verdict
from wgpu_lora.gpu.verdicts import verdicts_of

NMSE = 1e-10  # limit of a tiling's error against the float64 reference
MATRIX_NMSE = 1e-6  # of weights that are rounded to f16: 1e-3 relative


def limit_of(tiling: Tiling) -> float:
    """The limit of a tiling's error against the float64 reference."""
    return MATRIX_NMSE if tiling.family == MATRIX else NMSE


def check_tilings(device: Device, programs: Iterable[Program], choices: Choices = NO_CHOICES) -> None:
    """Checks each heavy kernel of the programs in the tiling that `build` would use, and in another if that is wrong,
    unless the verdict is known.

    Raises:
        WrongResults: the device gets a kernel wrong in all tilings.
    """
    verdicts = verdicts_of(device)
    if not verdicts.enabled:
        return
    try:
        for call in (step for program in programs for step in program.dispatches):
            if call.kernel.tuning and not call.fixed:
                while not cut_verdict(device, call, verdicts.choose(call, choices)).right:
                    pass  # it is not chosen again
    finally:
        verdicts.save()


def cut_verdict(device: Device, call: Dispatch, tiling: Tiling) -> Verdict:
    """Whether a tiling compiles and agrees with the float64 reference on a cut of the call."""
    verdicts = verdicts_of(device)
    verdict = verdicts.of(call, tiling)
    if verdict:
        return verdict
    small = tuning_of(call).cut(call.constants, tiling)
    try:
        single = single_call(device, call, small, tiling)
    except ShaderError as error:
        return verdicts.settle(call, tiling, None, limit_of(tiling), error.reason)
    try:
        single.run()
        arrays = {name: as_float64(array) for name, array in single.arrays.items()}
        result = call.kernel(**{name: arrays.get(name) for name in call.kernel.bindings}, **small)
        expected = result if isinstance(result, tuple) else (result,)
        names = [name for name in call.kernel.outputs if name in single.arrays]
        errors = [
            nmse(as_float64(single.read(name)).reshape(-1), np.asarray(want).reshape(-1))
            for name, want in zip(names, expected, strict=True)
        ]
    finally:
        single.free()
    return verdicts.settle(call, tiling, float(np.max(errors)), limit_of(tiling))


def single_call(device: Device, call: Dispatch, constants: Constants, tiling: Tiling) -> SingleKernel:
    """The call's kernel on synthetic arrays for these constants."""
    arrays = tuning_of(call).inputs(constants, call.present, np.random.default_rng(0))
    return SingleKernel(device, call.kernel, arrays, constants, tiling)


def tuning_of(call: Dispatch) -> Tunable:
    assert call.kernel.tuning is not None, f"{call.kernel.name} is not tuned"
    return call.kernel.tuning
