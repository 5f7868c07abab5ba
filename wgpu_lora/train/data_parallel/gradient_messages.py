"""Messages between the devices of a data-parallel run, and the pages of a session as arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.train.session.session import Session

Arrays = Mapping[str, np.ndarray]
HEADER = "said"  # the entry of the metadata that has a message's JSON values


def message(header: Mapping[str, Any], arrays: Arrays | None = None) -> bytes:
    """JSON values and arrays as bytes, in the safetensors format."""
    result: bytes = save(dict(arrays or {}), {HEADER: json.dumps(header)})
    return result


def read_message(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The values and the arrays of a message.

    Raises:
        ValueError: it is not one.
    """
    try:
        arrays = load(data)
        length = int.from_bytes(data[:8], "little")  # `load` has checked it
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][HEADER])
    except Exception as error:  # safetensors has its own exception
        raise ValueError(f"a message cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise ValueError("a message has no values")
    return header, arrays


def parameters(session: Session) -> dict[str, np.ndarray]:
    """The trained parameters of all slots."""
    return _read(session.device, "parameters", session.trained.params)


def place_parameters(session: Session, arrays: Arrays) -> None:
    """Upload what `parameters` returned. Raises ValueError if it is of another session."""
    _write(session.device, "parameters", session.trained.params, arrays)


def read_offsets(session: Session) -> dict[str, np.ndarray]:
    """What is computed from the base when a run begins and then stays: the offsets of adapters that have one."""
    return _read(session.device, "offset", _offsets(session))


def write_offsets(session: Session, arrays: Arrays) -> None:
    """Upload what `read_offsets` returned. Raises ValueError if it is of another session."""
    _write(session.device, "offset", _offsets(session), arrays)


def read_gradients(session: Session) -> dict[str, np.ndarray]:
    """Gradients and totals since `Session.begin`."""
    return _read(session.device, "sums", _summed(session))


def write_gradients(session: Session, arrays: Arrays) -> None:
    """Replace gradients and totals. Raises ValueError if they are of another session."""
    _write(session.device, "sums", _summed(session), arrays)


def clear_gradients(session: Session) -> None:
    """Zero the gradients, as an update does."""
    for page in session.trained.grads:
        session.device.write(page.storage.buffer, np.zeros(page.storage.nbytes // 4, np.float32))


def sum_gradients(first: Arrays, rest: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """The sums over all members, in f32 and in this order, so that the same members give the same bits."""
    result = {name: values.copy() for name, values in first.items()}
    for gradients in rest:
        for name, values in result.items():
            values += gradients[name]
    return result


def is_valid_gradient(session: Session, arrays: Arrays) -> bool:
    """Whether arrays have the form of this session's `read_gradients`, and finite values."""
    return _sizes_of(arrays) == _sizes("sums", _summed(session)) and finite(arrays)


def finite(arrays: Arrays) -> bool:
    return all(bool(np.isfinite(values).all()) for values in arrays.values())


def _summed(session: Session) -> list[Tensor]:
    return [*session.trained.grads, session.totals.loss]  # whose storage has the metrics, too


def _offsets(session: Session) -> list[Tensor]:
    trained = session.trained
    return list(trained.offset.params) if isinstance(trained, AdapterSet) and trained.offset else []


def _read(device: Device, kind: str, pages: Sequence[Tensor]) -> dict[str, np.ndarray]:
    sizes = zip(_sizes(kind, pages).items(), pages, strict=True)
    return {name: device.read(page.storage.buffer, 4 * size).view(np.float32) for (name, size), page in sizes}


def _write(device: Device, kind: str, pages: Sequence[Tensor], arrays: Arrays) -> None:
    sizes = _sizes(kind, pages)
    if _sizes_of(arrays) != sizes:
        raise ValueError(f"the {kind} are not those of this run")
    for name, page in zip(sizes, pages, strict=True):
        device.write(page.storage.buffer, arrays[name])


def _sizes(kind: str, pages: Sequence[Tensor]) -> dict[str, int]:
    return {f"{kind} {number}": page.storage.nbytes // 4 for number, page in enumerate(pages)}


def _sizes_of(arrays: Arrays) -> dict[str, int]:
    """The sizes of arrays of one dimension in f32, without others."""
    return {name: values.size for name, values in arrays.items() if values.dtype == np.float32 and values.ndim == 1}
