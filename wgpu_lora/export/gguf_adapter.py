"""Writes an adapter as a GGUF file, which llama.cpp applies to a base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, Keys

from wgpu_lora.errors import UserError
from wgpu_lora.export.gguf_model import Written, check_expressible
from wgpu_lora.export.merge import check_finite, scaled_factors
from wgpu_lora.formats.gguf.write import Pieces, Tensors, check_new_gguf, new_gguf, write_tensors
from wgpu_lora.formats.peft import read_adapter
from wgpu_lora.models.files import config_of
from wgpu_lora.models.gguf import gguf_names


def export_adapter(model: Path, adapter: Path, output: Path) -> Written:
    """Writes an adapter's factors in float32. Only the config of `model` is read.

    Raises:
        UserError: the config or the adapter cannot be read, they do not fit, the adapter is a DoRA, or `output` exists.
    """
    check_new_gguf(output)
    config = config_of(model)
    check_expressible(config, model)
    adapter_config, _ = read_adapter(adapter)
    if adapter_config.use_dora:
        raise UserError(
            f"The adapter {adapter} is a DoRA, which llama.cpp does not apply: merge it into its model, and export "
            "that."
        )
    alpha = np.float32(adapter_config.lora_alpha)
    form, names, tensors, count = config.gguf(), gguf_names(config), Tensors(), 0
    for own, (a, b, *_) in scaled_factors(adapter, config, model).items():
        # llama.cpp multiplies B A by alpha / rank, with the same alpha for all modules. This adapter's scaling may
        # differ (rsLoRA, patterns), so B is stored scaled and divided by alpha / rank.
        factor_b = b * np.float32(len(a) / alpha)
        layout = config.parameters[own].layout
        columns = layout.column_index(a.shape[1])
        factor_a = a if columns is None else a[:, columns]
        factor_b = factor_b[layout.row_index(len(factor_b))]
        for letter, factor in (("a", factor_a), ("b", factor_b)):
            check_finite(factor, f"lora_{letter} of {own}")
            tensors[f"{names[own]}.lora_{letter}"] = (factor.shape, [GGMLQuantizationType.F32], _whole(factor))
            count += factor.size
    with new_gguf(output, form.name) as writer:
        writer.add_type("adapter")
        writer.add_name(adapter.absolute().name)
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, float(alpha))
        write_tensors([writer], tensors)
    return Written(output.stat().st_size, 4 * count, count)


def _whole(factor: np.ndarray) -> Pieces:
    def pieces() -> Iterator[list[np.ndarray]]:
        yield [np.ascontiguousarray(factor, np.float32)]

    return pieces
