"""The registered base formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from wgpu_lora.errors import UserError
from wgpu_lora.names.registry import Registry
from wgpu_lora.names.spelling import setting
from wgpu_lora.weights.lowbit.lowbit_layout import KINDS, PATTERN

if TYPE_CHECKING:
    from wgpu_lora.weights.base import BaseFormat, PackedForm, Shared, StoredFormats, Weight

GGUF = "gguf"  # each matrix of a GGUF file in its own type
GGUF_PATTERN = "q[45]_[01]|q8_0|q[456]_k|iq4_(nl|xs)"  # those types

BASE_FORMATS: Registry[BaseFormat] = Registry(
    {
        "nf4": "wgpu_lora.weights.nf4.nf4:NF4",
        "bf16": "wgpu_lora.weights.dense:BF16",
        "f16": "wgpu_lora.weights.dense:F16",
        "f32": "wgpu_lora.weights.dense:F32",
        **{name: f"wgpu_lora.weights.lowbit.lowbit:{name.upper()}" for name in KINDS.values()},
        GGUF: "wgpu_lora.weights.gguf.gguf_weight:GGUF_FILE",
    },
    patterns={
        PATTERN: "wgpu_lora.weights.lowbit.lowbit:lowbit_format",
        GGUF_PATTERN: "wgpu_lora.weights.gguf.gguf_weight:gguf_type",
    },
)
DEFAULT_FORMAT = next(iter(BASE_FORMATS))
AUTO = "auto"  # as the model is stored, if it is in a base format, or DEFAULT_FORMAT


class _Choices(Collection[str]):
    """The values of --base-dtype."""

    def __contains__(self, name: object) -> bool:
        return name == AUTO or name in BASE_FORMATS

    def __iter__(self) -> Iterator[str]:
        return iter((AUTO, *BASE_FORMATS))

    def __len__(self) -> int:
        return 1 + len(BASE_FORMATS)


CHOICES = _Choices()


def base_format(name: str) -> BaseFormat:
    """The format with this name.

    Raises:
        UserError: it is not registered.
    """
    if name not in BASE_FORMATS:
        raise UserError(f"{setting('base_dtype', name)} is not known: choose one of {', '.join(BASE_FORMATS)}.")
    return BASE_FORMATS[name]


def packed_forms() -> dict[str, PackedForm]:
    """The packed forms by the names of their formats, of those that have one."""
    return {name: form for name, item in BASE_FORMATS.items() if (form := item.packed_form)}


def packed_form(name: str) -> PackedForm:
    """How checkpoints store this format.

    Raises:
        UserError: they cannot, or it is not registered.
    """
    form = base_format(name).packed_form
    if form is None:
        raise UserError(
            f"{setting('base_dtype', name)} cannot be stored packed: choose one of {', '.join(packed_forms())}."
        )
    return form


def declare(
    base_dtype: str, shape: tuple[int, int], tensor: str, shared: Shared, formats: StoredFormats | None
) -> Weight:
    """Declares a frozen matrix [out, in] of a model; it is allocated and filled later.

    Args:
        base_dtype: its format if `formats` is None.
        tensor: its name in the checkpoint.
        formats: a checkpoint whose matrices keep the base formats that they are stored in. Others get DEFAULT_FORMAT.
    """
    if formats is None:
        return base_format(base_dtype).declare(shape, tensor, shared)
    kind = base_format(formats.base_format(tensor) or DEFAULT_FORMAT)
    return kind.declare(shape, tensor, shared, formats.packed(tensor))
