"""Writes a teacher cache, shard by shard; after an interruption, it continues with the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.data import Row, pack
from wgpu_lora.distill.header import CACHE, LOGITS, TABLE, Header, Shard, Table, read_header
from wgpu_lora.distill.packing import pack_ids
from wgpu_lora.distill.plan import OURS, Plan
from wgpu_lora.distill.support import Support
from wgpu_lora.distill.teacher import Teacher
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.gpu.cuts import check_tilings
from wgpu_lora.gpu.program import Arena, allocate, missing_bytes, release
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.locks import locked, sweep
from wgpu_lora.models.inputs import Segment, Tables
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.models.norms import fix_gains
from wgpu_lora.names.naming import flag
from wgpu_lora.share import claim


def write_cache(
    output: Path,
    plan: Plan,
    done: Sequence[Shard],
    model: LoadedModel,
    adapters: AdapterSet | None = None,
    compute_dtype: str = "f32",
    events: Events = SILENT,
) -> Header:
    """Write the shards that are not finished; returns the finished header. If none is missing, only the teacher's
    weights are compared.

    Args:
        done: as `standing` found them. adapters: slot 0 applies.
        events: receives `loading` and `evaluating`, with rows.

    Raises:
        UserError: the teacher's weights are others than before, the device has no room, or another process is writing.
        NotFiniteError: a logit of the teacher is not finite.
        OSError: a file cannot be written.
    """
    if len(done) == len(plan.shards):
        model.load_weights(events)
        return _compared(output, model, done)
    tables = Tables.declare(model.config.tables(), plan.batch_tokens)
    teacher = Teacher(model, adapters, [plan.batch_tokens], tables, plan.kept, compute_dtype)
    (program,) = teacher.programs()
    sizes = program.plan().sizes
    mine = {s for s in teacher.storages() | tables.storages() if s not in model.decoder.storages()}
    if adapters:
        mine -= adapters.storages()
    arena, stack = Arena(model.device), ExitStack()
    try:
        stack.enter_context(locked(output / CACHE, flag("output")))
        need = model.bytes_to_load() + missing_bytes(mine) + sum(sizes)
        stack.enter_context(claim(model.device, need, "caching a teacher"))
        stack.enter_context(verdicts_of(model.device).telling(events))
        check_tilings(model.device, [program])
        model.load_weights(events)
        fix_gains(model, adapters)
        header = _begin(output, plan, model, done)
        allocate(model.device, mine)
        arena = Arena(model.device, sizes)
        tables.upload(model.device)
        teacher.use(arena)
        slot = 0 if adapters else None
        for rows in plan.shards[len(done) :]:
            before = header.finished

            def watch(count: int, before: int = before) -> None:
                events.evaluating(Evaluating(before + count, len(plan.rows)))

            shard = _write_shard(output, header, rows, _supports(teacher, rows, slot, plan.batch_tokens, watch))
            header = replace(header, shards=[*header.shards, shard])
            header.write(output)
    finally:
        arena.free()
        program.release()
        release(model.device, mine)
        stack.close()
    return header


def _begin(output: Path, plan: Plan, model: LoadedModel, done: Sequence[Shard]) -> Header:
    """The header with the teacher's weights, written with the table of rows."""
    header = replace(plan.header, teacher={**plan.header.teacher, "weights": model.weights_sha256}, shards=list(done))
    if (output / CACHE).exists():
        _compared(output, model, done)
    sweep(output, OURS)
    write_bytes_atomic(output / TABLE, save(Table.of(plan.rows).arrays()))
    header.write(output)
    return header


def _compared(output: Path, model: LoadedModel, done: Sequence[Shard]) -> Header:
    """The header on disk. Raises UserError if it is that of another teacher, or has changed since it was read."""
    found = read_header(output)
    if found.shards != list(done):
        raise UserError(f"Another process has written to {output} meanwhile: give the command again.")
    before = found.teacher.get("weights")
    if before != model.weights_sha256:
        raise UserError(
            f"{output} was begun with another teacher, whose weights have the SHA-256 {before!s:.12}, not "
            f"{model.weights_sha256!s:.12}: give the same to continue it, or another {flag('output')}."
        )
    return found


def _supports(
    teacher: Teacher, rows: Sequence[Row], slot: int | None, batch_tokens: int, watch: Callable[[int], None]
) -> list[Support]:
    """The supports of a shard's rows. Batches depend on the shard only, so it does not matter where a run began."""
    found: dict[int, Support] = {}
    watch(0)
    for together in pack([len(row.input_ids) for row in rows], range(len(rows)), batch_tokens):
        segments = [Segment(rows[i].input_ids, rows[i].labels, slot) for i in together]
        found |= zip(together, teacher.supports(segments, [rows[i].index for i in together]), strict=True)
        watch(len(found))
    return [found[i] for i in range(len(rows))]


def _write_shard(output: Path, header: Header, rows: Sequence[Row], supports: Sequence[Support]) -> Shard:
    """Logits are stored as log-probabilities, which are exact where they matter: f16 keeps 11 bits of each."""
    kind = LOGITS[header.logits]
    lse = np.concatenate([one.lse for one in supports])
    logprobs = np.concatenate([one.logits for one in supports]) - lse[:, None]
    arrays = {
        "ids": pack_ids(np.concatenate([one.ids for one in supports]), header.bits),
        "logprobs": np.maximum(logprobs, np.finfo(kind).min).astype(kind),
        "lse": lse,
    }
    data = save(arrays)
    name = f"shard-{len(header.shards):05}.safetensors"
    write_bytes_atomic(output / name, data)
    return Shard(name, hashlib.sha256(data).hexdigest(), len(data), len(rows), len(lse))
