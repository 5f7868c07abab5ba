"""What would help where a device refuses: its own errors know bytes and limits, callers know their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wgpu_lora.gpu.errors import DeviceError, OutOfDeviceMemory
from wgpu_lora.names.naming import either


@contextmanager
def advising(*options: str, otherwise: str = "choose a smaller model") -> Iterator[None]:
    """Device errors raised meanwhile also say which options to lower, unless something within has said so already.

    Also a decorator.

    Args:
        options: of which one would do.
        otherwise: what else helps against too little memory, and all that does where there are no options.
    """
    try:
        yield
    except DeviceError as error:
        advice = [f"lower {either(*options)}"] if options else []
        if not options or isinstance(error, OutOfDeviceMemory):
            advice.append(otherwise)
        error.advise(", or ".join(advice))
        raise
