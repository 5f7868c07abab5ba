"""Quantises a model once and saves it: with calibration, from another quantised model, and measured on data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.api.evaluation import evaluate, prepared_rows
from wgpu_lora.data import Row, pack
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.files.atomic import check_new
from wgpu_lora.files.json_files import read_json
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Arena, Program, allocate, missing_bytes, release
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.models.batch_inputs import Segment, StepInputs, Tables
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.export.adapter_merge import rounding_note
from wgpu_lora.models.export.model_directory import decoded
from wgpu_lora.models.export.quantized_model import QuantizationError, rounded, write_packed
from wgpu_lora.models.layer_context import LayerWeights
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_files import config_of
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.ops.linear.linear import Linear, MeasuredMatrix
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import read
from wgpu_lora.weights.base_formats import packed_form
from wgpu_lora.weights.lowbit.lowbit_layout import GROUPS, KINDS, Mix, Scheme, table_size

SAMPLES = 128  # calibration rows


@dataclass(frozen=True)
class Quantized:
    """A model that was quantised and saved.

    base_dtype: the name of its format. nbytes: of its weights' files. seconds: of quantising, without measuring.
    kinds: what is left of its matrices. before, after: perplexities, if there were data to measure them on. note: on
    weights that are rounded a second time, '' without.
    """

    base_dtype: str
    nbytes: int
    seconds: float
    kinds: list[QuantizationError]
    before: float | None = None
    after: float | None = None
    note: str = ""


def format_name(scheme: str | None, mlp: str | None, attention: str | None, group: str | None) -> str:
    """The base format of these options.

    Raises:
        UserError: they do not say one, or contradict each other.
    """
    kinds = {name: bits for bits, name in KINDS.items()}
    if mlp or attention:
        if scheme or not (mlp and attention):
            raise UserError(
                f"{flag('mlp')} and {flag('attention')} are given together, instead of {flag('scheme')}: both name a "
                f"scheme, one of {', '.join(kinds)}."
            )
        for option, value in (("mlp", mlp), ("attention", attention)):
            if value not in kinds:
                raise UserError(f"{setting(option, value)} is not known: choose one of {', '.join(kinds)}.")
        assert mlp
        assert attention
        scheme = f"q{kinds[mlp]}a{kinds[attention]}"
    if not scheme:
        raise UserError(f"No scheme is given: use {flag('scheme')}, or {flag('mlp')} and {flag('attention')}.")
    if group is None:
        form = _low_bit(scheme)
        if form is None and scheme != "nf4":
            raise UserError(f"{setting('scheme', scheme)} is not known: choose one of nf4, {', '.join(kinds)}.")
        return form.name if form else scheme
    choices = [*map(str, GROUPS), "row"]
    if group not in choices:
        raise UserError(f"{setting('group', group)} is not known: choose one of {', '.join(choices)}.")
    if scheme == "nf4":
        raise UserError(f"{flag('group')} has no effect on nf4, whose blocks have 64 values: leave it out.")
    form = _low_bit(scheme + ("-row" if group == "row" else f"-g{group}"))
    if form is None:
        raise UserError(
            f"{setting('scheme', scheme)} is not known, or names a group itself: choose one of {', '.join(kinds)}."
        )
    return form.name


def _low_bit(name: str) -> Scheme | Mix | None:
    return Scheme.of(name) or Mix.of(name)


def _has_tables(base_dtype: str) -> bool:
    form = _low_bit(base_dtype)
    schemes = (form.mlp, form.attention) if isinstance(form, Mix) else (form,) if form else ()
    return any(table_size(scheme.bits) for scheme in schemes)


def quantize(
    model: str,
    base_dtype: str,
    output: str | Path,
    *,
    device: Device | str | int | None = None,
    requantize: bool = False,
    calibration: str | Path | None = None,
    calibration_samples: int = SAMPLES,
    eval_data: str | Path | None = None,
    events: Events = SILENT,
) -> Quantized:
    """Quantise a model and write it as a directory that can be used wherever a model can.

    Args:
        model: a directory, a GGUF file, a hub id, or `demo`.
        base_dtype: a base format that files can have.
        requantize: whether `model` is quantised already; its weights are decoded first.
        calibration: data, as of `evaluate`. A weight's error counts by the mean square of its input on
            these rows.
        eval_data: data to measure the perplexity on, before and after.
        events: receives `loading`, `evaluating` and `written`.

    Raises:
        UserError: the model, the data or an option does not fit, or `output` exists. Nothing is written then.
    """
    output = Path(output)
    check_new(output, flag("output"), directory=True)  # before the model may be downloaded
    packed_form(base_dtype)
    if calibration_samples < 1:
        raise UserError(f"{setting('calibration_samples', calibration_samples)} is too small: it must be at least 1.")
    if calibration is None and calibration_samples != SAMPLES:
        raise UserError(f"{flag('calibration_samples')} has no effect without {flag('calibration')}: leave it out.")
    if calibration is not None and not _has_tables(base_dtype):
        raise UserError(
            f"{flag('calibration')} has no effect on {base_dtype}, which has no tables to fit: leave it out."
        )
    _check_model(model, base_dtype, requantize)
    opened = open_model(model, device) if requantize else open_model(model, device, base_dtype)
    target = decoded(opened, base_dtype) if requantize else opened
    before = None
    if eval_data is not None:
        before = _perplexity(opened if requantize else _unrounded(opened), eval_data, events)
    begin = time.perf_counter()
    if calibration is not None:
        target.importance = _moments(opened, requantize, calibration, calibration_samples, events)
    write_packed(target, output, events=events)
    seconds = time.perf_counter() - begin
    after = _perplexity(target, eval_data, events, unload=False) if eval_data is not None else None
    kinds = rounded(target)
    target.unload()
    nbytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    adapter_base_dtype = read_json(output / "config.json").get("adapter_base_dtype")
    note = rounding_note(escape_unprintable(f"{adapter_base_dtype:.40}")) if isinstance(adapter_base_dtype, str) else ""
    return Quantized(base_dtype, nbytes, seconds, kinds, before, after, note)


def _check_model(model: str, base_dtype: str, requantize: bool) -> None:
    config = config_of(resolve_model(model))
    if requantize and not config.packed:
        raise UserError(f"{model} is in full precision: give it as {flag('model')} instead of {flag('from_base')}.")
    if not requantize and config.packed:
        raise UserError(
            f"{model} is quantised to {config.packed} already: give it as {flag('from_base')} to quantise it again."
        )
    form = _low_bit(base_dtype)
    for name, (_, size_in) in config.matrices().items():
        group = form.scheme(name).group if isinstance(form, Mix) else form.group if form else 0
        if group and size_in % group:
            fits = ["row", *(str(size) for size in GROUPS if size_in % size == 0)]
            raise UserError(
                f"{name} has {size_in:,} inputs, which groups of {group} do not divide: use "
                f"{setting('group', fits[-1])}."
            )


def _unrounded(model: LoadedModel) -> LoadedModel:
    """The same model in the type that its weights are stored in."""
    name = next(iter(model.config.matrices()))
    dtype = {"BF16": "bf16", "F16": "f16"}.get(model.checkpoint.dtype(name), "f32")
    return open_model(model.name, model.device, dtype)


def _perplexity(model: LoadedModel, data: str | Path, events: Events, unload: bool = True) -> float | None:
    result = evaluate(model, data, run_log=False, events=events, progress_bar=False)
    if unload:
        model.unload()
    return result.perplexity


def _moments(
    model: LoadedModel, requantize: bool, data: str | Path, samples: int, events: Events
) -> Mapping[str, np.ndarray]:
    """Those of the model in its own format, or of the model in NF4, which takes little memory."""
    observed = model if requantize else open_model(model.name, model.device, "nf4")
    prepared = prepared_rows(observed, data)
    try:
        return input_moments(observed, prepared.rows[:samples], events=events)
    finally:
        observed.unload()


# -- calibration: the mean squares of the inputs of all linear layers, by which quantisation weighs errors -------------


@with_option_advice("max_length")
def input_moments(
    model: LoadedModel, rows: Sequence[Row], batch_tokens: int = 512, events: Events = SILENT
) -> dict[str, np.ndarray]:
    """The mean square of each input [in] of every linear layer, by the name of its matrix; loads the model if needed.

    Args:
        rows: prompts and answers both count, whatever their labels.
        batch_tokens: tokens computed at a time; more if a single row is longer.
        events: receives `loading` and `evaluating`.

    Raises:
        UserError: the device has no room.
    """
    lengths = [len(row.input_ids) for row in rows]
    tokens = max([*lengths, min(batch_tokens, sum(lengths))])
    count = persistent((1,), "u32", "workspace", "calibration rows")
    squares: dict[str, Tensor] = {}
    decoder = _observed(model.decoder, count, squares)
    inputs = StepInputs.declare(model.config.row_inputs(), tokens, 1, Tables.declare(model.config.tables(), tokens))
    program = Program(model.device, "calibration")
    decoder.hidden(Recorder(program), inputs, {})
    program.prune()
    plan, device = program.plan(), model.device
    storages = (program.persistent_storages() | inputs.storages()) - model.decoder.storages()
    arena, stack = Arena(device), ExitStack()
    try:
        stack.enter_context(
            claim(device, model.bytes_to_load() + missing_bytes(storages) + sum(plan.sizes), "calibrating")
        )
        stack.enter_context(verdicts_of(device).reported_to(events))
        check_tilings(device, [program])
        model.load_weights(events)
        allocate(device, storages)
        arena = Arena(device, plan.sizes)
        program.build(arena)
        inputs.tables.upload(device)
        for tensor in squares.values():
            device.write(tensor.storage.buffer, np.zeros(tensor.size, np.float32))
        completed = 0
        for together in pack(lengths, range(len(rows)), tokens):
            inputs.upload(device, [Segment(rows[i].input_ids, None, None) for i in together])
            size = sum(lengths[i] for i in together)
            device.write(count.storage.buffer, np.array([size], np.uint32))
            program.run()
            completed += len(together)
            events.evaluating(Evaluating(completed, len(rows)))
        return {name: read(device, tensor) / sum(lengths) for name, tensor in squares.items()}
    finally:
        arena.free()
        release(device, storages)
        stack.close()


def _observed(decoder: Decoder, count: Tensor, squares: dict[str, Tensor]) -> Decoder:
    """The same model, whose matrices also sum up the squares of their inputs, by name."""

    def linear(name: str, item: Linear[Any]) -> Linear[Any]:
        out, size_in = item.weight.out_features, item.weight.in_features
        squares[name] = persistent((size_in,), "f32", "workspace", f"{name} squares")
        return replace(item, weight=MeasuredMatrix(out, size_in, item.weight, count, squares[name]))

    def layer(weights: LayerWeights) -> LayerWeights:
        result = {module: linear(f"{weights.path}.{module}.weight", item) for module, item in weights.linears.items()}
        return replace(weights, linears=result)

    return replace(decoder, layers=tuple(map(layer, decoder.layers)))
