"""Add advice to device errors, which know bytes and limits but not the options of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wgpu_lora.gpu.errors import DeviceError, OutOfDeviceMemory
from wgpu_lora.names.naming import either


@contextmanager
def advising(*options: str, otherwise: str = "choose a smaller model") -> Iterator[None]:
    """Add to device errors raised in the block which options to lower, unless an inner block has done so.

    Can be used as a decorator.

    Args:
        options: names of options; lowering any of them helps.
        otherwise: what else helps if memory is short; the only advice if there are no options.
    """
    try:
        yield
    except DeviceError as error:
        advice = [f"lower {either(*options)}"] if options else []
        if not options or isinstance(error, OutOfDeviceMemory):
            advice.append(otherwise)
        error.advise(", or ".join(advice))
        raise
