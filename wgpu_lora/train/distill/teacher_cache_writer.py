"""Writes a teacher cache, shard by shard; after an interruption, it continues with the same bytes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from wgpu_lora.data import Row, TokenizedData, pack
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, Events
from wgpu_lora.files.atomic import file_digest, write_bytes_atomic
from wgpu_lora.files.locks import locked, remove_leftovers
from wgpu_lora.files.paths import check_name
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import Arena, allocate, missing_bytes, release
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.models.adapter_set import AdapterSet, fix_gains
from wgpu_lora.models.batch_inputs import Segment, Tables
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.distill.teacher import Teacher, TopK
from wgpu_lora.train.distill.teacher_cache import (
    CACHE,
    LOGITS,
    SCHEMA,
    TABLE,
    Header,
    RowTable,
    Shard,
    pack_ids,
    position_bytes,
    read_header,
    template_digest,
)
from wgpu_lora.train.distill.teacher_logits import TopKLogits


def write_cache(
    output: Path,
    plan: CachePlan,
    shards: Sequence[Shard],
    model: LoadedModel,
    adapters: AdapterSet | None = None,
    compute_dtype: str = "f32",
    events: Events = SILENT,
) -> Header:
    """Write the shards that are not finished; returns the finished header. If none is missing, only the teacher's
    weights are compared.

    Args:
        shards: as `finished_shards` returned them. adapters: slot 0 applies.
        events: receives `loading` and `evaluating`, with rows.

    Raises:
        UserError: the teacher's weights have changed, the device has no room, or another process is writing.
        NotFiniteError: a logit of the teacher is not finite.
        OSError: a file cannot be written.
    """
    if len(shards) == len(plan.shards):
        model.load_weights(events)
        return _check_teacher(output, model, shards)
    tables = Tables.declare(model.config.tables(), plan.batch_tokens)
    teacher = Teacher(model, adapters, [plan.batch_tokens], tables, plan.selection, compute_dtype)
    (program,) = teacher.programs()
    sizes = program.plan().sizes
    storages = {s for s in teacher.storages() | tables.storages() if s not in model.decoder.storages()}
    if adapters:
        storages -= adapters.storages()
    arena = Arena(model.device)
    with ExitStack() as stack:  # which sees an error, and removes the directory that it made
        try:
            stack.enter_context(locked(output / CACHE, flag("output")))
            need = model.bytes_to_load() + missing_bytes(storages) + sum(sizes)
            stack.enter_context(claim(model.device, need, "caching a teacher"))
            stack.enter_context(verdicts_of(model.device).reported_to(events))
            check_tilings(model.device, [program])
            model.load_weights(events)
            fix_gains(model, adapters)
            header = _begin(output, plan, model, shards)
            allocate(model.device, storages)
            arena = Arena(model.device, sizes)
            tables.upload(model.device)
            teacher.use(arena)
            slot = 0 if adapters else None
            for rows in plan.shards[len(shards) :]:
                before = header.finished_rows

                def watch(count: int, before: int = before) -> None:
                    events.evaluating(Evaluating(before + count, len(plan.rows)))

                shard = _write_shard(output, header, rows, _supports(teacher, rows, slot, plan.batch_tokens, watch))
                header = replace(header, shards=[*header.shards, shard])
                header.write(output)
        finally:
            arena.free()
            program.release()
            release(model.device, storages)
    return header


def _begin(output: Path, plan: CachePlan, model: LoadedModel, shards: Sequence[Shard]) -> Header:
    """The header with the teacher's weights, written with the table of rows."""
    header = replace(plan.header, teacher={**plan.header.teacher, "weights": model.weights_sha256}, shards=list(shards))
    if (output / CACHE).exists():
        _check_teacher(output, model, shards)
    remove_leftovers(output, CACHE_FILES)
    write_bytes_atomic(output / TABLE, save(RowTable.of(plan.rows).arrays()))
    header.write(output)
    return header


def _check_teacher(output: Path, model: LoadedModel, shards: Sequence[Shard]) -> Header:
    """The header on disk. Raises UserError if it is that of another teacher, or has changed since it was read."""
    result = read_header(output)
    if result.shards != list(shards):
        raise UserError(f"Another process has written to {output} meanwhile: give the command again.")
    before = result.teacher.get("weights")
    if before != model.weights_sha256:
        raise UserError(
            f"{output} was begun with another teacher, whose weights have the SHA-256 {before!s:.12}, not "
            f"{model.weights_sha256!s:.12}: give the same to continue it, or another {flag('output')}."
        )
    return result


def _supports(
    teacher: Teacher, rows: Sequence[Row], slot: int | None, batch_tokens: int, watch: Callable[[int], None]
) -> list[TopKLogits]:
    """The supports of a shard's rows. Batches depend on the shard only, so it does not matter where a run began."""
    result: dict[int, TopKLogits] = {}
    watch(0)
    for together in pack([len(row.input_ids) for row in rows], range(len(rows)), batch_tokens):
        segments = [Segment(rows[i].input_ids, rows[i].labels, slot) for i in together]
        result |= zip(together, teacher.supports(segments, [rows[i].index for i in together]), strict=True)
        watch(len(result))
    return [result[i] for i in range(len(rows))]


def _write_shard(output: Path, header: Header, rows: Sequence[Row], supports: Sequence[TopKLogits]) -> Shard:
    """Logits are stored as log-probabilities, which are exact where they matter: f16 keeps 11 bits of each."""
    kind = LOGITS[header.logits]
    lse = np.concatenate([support.lse for support in supports])
    logprobs = np.concatenate([support.logits for support in supports]) - lse[:, None]
    arrays = {
        "ids": pack_ids(np.concatenate([support.ids for support in supports]), header.bits),
        "logprobs": np.maximum(logprobs, np.finfo(kind).min).astype(kind),
        "lse": lse,
    }
    data = save(arrays)
    name = f"shard-{len(header.shards):05}.safetensors"
    write_bytes_atomic(output / name, data)
    return Shard(name, hashlib.sha256(data).hexdigest(), len(data), len(rows), len(lse))


SHARD_POSITIONS = 8192  # at least, but in the last shard: 7 MB of 192 tokens each
MOST_SHARDS = 8192  # about, so that cache.json stays small
CACHE_FILES = re.compile(rf"{re.escape(CACHE)}|{re.escape(TABLE)}|shard-\d{{5,}}\.safetensors")
_FILE_BYTES = 400  # of a safetensors file's header, about


@dataclass(frozen=True)
class CachePlan:
    """A cache to be made. header: without shards and the digest of the teacher's weights. shards: rows of each."""

    header: Header
    rows: list[Row]
    shards: list[list[Row]]
    batch_tokens: int

    @property
    def selection(self) -> TopK:
        return TopK(self.header.top_k, self.header.random, int(self.header.options["seed"]))

    @property
    def position_bytes(self) -> int:
        return position_bytes(self.header.tokens, self.header.vocab_size, self.header.logits)

    @property
    def bytes(self) -> int:
        """On disk, but for a few hundred bytes per file."""
        return self.header.positions * self.position_bytes + 24 * len(self.rows) + _FILE_BYTES * (len(self.shards) + 4)


def plan_cache(
    model: LoadedModel,
    prepared: TokenizedData,
    selection: TopK,
    *,
    logits: str,
    samples: int | None,
    batch_tokens: int,
    template_kwargs: dict[str, Any],
    teacher: dict[str, Any],
    options: dict[str, Any],
) -> CachePlan:
    """The plan of a cache of some rows.

    Args:
        samples: only the first ones.
        teacher: facts about the teacher, such as its adapter's digest; options: further ones that the logits depend on.

    Raises:
        UserError: there are fewer rows than `samples`, or fewer tokens in the vocabulary than the selection has.
    """
    selection.check(model.config.vocab_size)
    if samples is not None and samples > len(prepared.rows):
        raise UserError(
            f"{setting('samples', samples)} is more than the {count_noun(len(prepared.rows), 'row')} of "
            f"{prepared.path}: "
            f"lower it, or leave {flag('samples')} out."
        )
    rows = prepared.rows[:samples]
    tokens = max([*(len(row.input_ids) for row in rows), min(batch_tokens, sum(len(row.input_ids) for row in rows))])
    header = Header(
        schema=SCHEMA,
        options={
            **options,
            "base_dtype": model.decoder.base_dtype,
            "logits_dtype": logits,
            "seed": selection.seed,
            "samples": samples,
            "batch_tokens": batch_tokens,
        },
        vocab_size=model.config.vocab_size,
        length=prepared.max_length,
        top_k=selection.top_k,
        random=selection.random,
        rows=len(rows),
        positions=sum(row.trained_tokens for row in rows),
        table=hashlib.sha256(save(RowTable.of(rows).arrays())).hexdigest(),
        teacher={"model": model.name, **teacher},
        tokenizer=model.tokenizer.digest if model.tokenizer else None,
        template=template_digest(model.tokenizer, template_kwargs),
        data={"path": prepared.path, "sha256": prepared.digest},
    )
    return CachePlan(header, rows, _shards(rows), tokens)


def _shards(rows: Sequence[Row]) -> list[list[Row]]:
    shards: list[list[Row]] = [[]]
    positions = 0
    minimum = max(SHARD_POSITIONS, sum(row.trained_tokens for row in rows) // MOST_SHARDS)
    for row in rows:
        if positions >= minimum:
            shards.append([])
            positions = 0
        shards[-1].append(row)
        positions += row.trained_tokens
    return shards


def finished_shards(output: Path, plan: CachePlan) -> list[Shard]:
    """The shards of an interrupted run that are finished, in order; changes nothing.

    Raises:
        UserError: the directory has other files, a cache with other options or of another teacher or data, or a
            shard that was changed, or the disk has no room for the rest.
    """
    check_name(output)
    shards: list[Shard] = []
    if output.exists():
        if not output.is_dir() or (not (output / CACHE).exists() and _foreign_files(output)):
            raise UserError(f"{output} exists already and is not a teacher cache: give {flag('output')} another name.")
        if (output / CACHE).exists():
            result = read_header(output)
            _compare(output, result, plan.header)
            shards = result.shards
    for shard in shards:
        path = output / shard.file
        if not path.is_file() or path.stat().st_size != shard.bytes or file_digest(path) != shard.sha256:
            raise UserError(
                f"{path} is missing, truncated or changed: restore it, or remove {output} and make the cache anew."
            )
    _check_room(output, plan, sum(shard.bytes for shard in shards))
    return shards


def _foreign_files(output: Path) -> list[str]:
    """Files that do not come from an interrupted start of this program."""
    pattern = re.compile(rf"\.lock|\.?({CACHE_FILES.pattern}).*")  # .lock: of earlier versions
    return [path.name for path in output.iterdir() if not pattern.fullmatch(path.name)]


def _compare(output: Path, header: Header, expected: Header) -> None:
    """Raise UserError unless a cache has the expected header; the teacher's weights are compared once loaded."""
    options = [name for name in expected.options if header.options.get(name) != expected.options[name]]
    current = {**expected.options, "length": expected.length, "top_k": expected.top_k, "random": expected.random}
    before = {**header.options, "length": header.length, "top_k": header.top_k, "random": header.random}
    for name in ["top_k", "random", "length", *options]:
        if before.get(name) != current[name]:
            previous, now = (_option_text(name, values.get(name)) for values in (before, current))
            raise UserError(
                f"{output} was begun with {previous}, not {now}: give the same options to continue it, or another "
                f"{flag('output')}."
            )
    facts = {
        "another configuration of the teacher": (header.teacher.get("config"), expected.teacher["config"]),
        "another adapter of the teacher": (header.teacher.get("adapter"), expected.teacher["adapter"]),
        "another tokenizer": (header.tokenizer, expected.tokenizer),
        "another chat template": (header.template, expected.template),
        "other data": (header.data.get("sha256"), expected.data["sha256"]),
        "another size of the vocabulary": (header.vocab_size, expected.vocab_size),
        "other trained tokens": (header.table, expected.table),
    }
    for label, (old, new) in facts.items():
        if old != new:
            difference = f"SHA-256 {old!s:.12}, not {new!s:.12}" if isinstance(new, str) else f"{old!s:.12}, not {new}"
            raise UserError(
                f"{output} was begun with {label} ({difference}): give the same to continue it, or another "
                f"{flag('output')}."
            )


def _option_text(name: str, value: Any) -> str:
    return f"no {flag(name)}" if value is None else setting(name, value)


def _check_room(output: Path, plan: CachePlan, finished_bytes: int) -> None:
    parent = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        problem = "not writable" if parent.is_dir() else "not a directory"
        raise UserError(f"{parent} is {problem}: choose another {flag('output')}.")
    free, need = shutil.disk_usage(parent).free, plan.bytes - finished_bytes
    if need > free:
        raise UserError(
            f"The cache takes {need:,} bytes, but {parent} has {free:,} free: make room, choose another "
            f"{flag('output')}, or lower {flag('samples')}, {flag('length')}, {flag('top_k')} or {flag('random')}."
        )
