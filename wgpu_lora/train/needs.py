"""What the runs of a job need."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.job import Job
from wgpu_lora.train.needed import Needs
from wgpu_lora.train.options.arguments import TrainingArguments
from wgpu_lora.train.run import Run
from wgpu_lora.train.stream import DataStream
from wgpu_lora.train.tasks import split_options

# Where a run is, and what digests cover.
PLACES = {"output", "resume", "overwrite", "device", "model", "base_dtype", "save_steps"}


def needs_of(job: Job[Any], base: str) -> Needs:
    """What the runs of a job need together. Raises UserError if a tensor is larger than the limits of the device."""
    plan, runs = job.session.memory(), job.runs
    timed = any(run.args.target_seconds for run in runs)
    rows = [stream.rows_digest() for run in runs for stream in _streams(run)]
    return Needs(
        needed=plan.guarded,
        base_bytes=plan.groups["base"],
        base=base,
        data=list(dict.fromkeys(rows)),
        work=0 if timed else sum(processed_tokens(run.stream) for run in runs),
        steps=0 if timed else max(run.stream.total_steps() for run in runs),
        heldout=any(run.heldout for run in runs),
    )


def _streams(run: Run) -> list[DataStream]:
    return [run.stream, *([DataStream(run.heldout, run.args)] if run.heldout else [])]


def processed_tokens(stream: DataStream) -> int:
    """Tokens of all steps of a run, prompts included; of --max-steps, by the mean step of the first epoch."""
    tokens = sum(stream.lengths)
    if stream.args.max_steps > 0:
        return round(stream.args.max_steps / len(stream.epoch(0)) * tokens)
    return round(stream.args.num_train_epochs * tokens)


def base_key(model: LoadedModel, args: TrainingArguments, name: str) -> str:
    """Two digests: of the base model, and of the options that adapters of one pipeline share. The second is unique for
    a run of this name that cannot be in a pipeline."""
    tokenizer = model.tokenizer.digest if model.tokenizer else None
    base = [model.checkpoint.digest(), model.config.digest(), model.decoder.base_dtype, tokenizer]
    _, shared = split_options(args.as_dict())
    shared = {option: value for option, value in shared.items() if option not in PLACES}
    alone = {"name": name} if args.target_seconds or args.train == "quant-scales" else {}
    return f"{_digest(base)}-{_digest({**shared, **alone})}"


def _digest(value: Mapping[str, Any] | list[Any]) -> str:
    return hashlib.sha256(to_json(value, sort_keys=True).encode()).hexdigest()[:16]
