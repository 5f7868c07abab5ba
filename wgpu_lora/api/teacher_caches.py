"""Teacher caches from Python: what a teacher says about the trained tokens of data, on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from wgpu_lora.api.notebook_progress import Bars
from wgpu_lora.data import python_source, tokenize_source, training_data
from wgpu_lora.errors import UserError
from wgpu_lora.events import EventForwarder, Events
from wgpu_lora.formats.tokenizer.chat_template import now, template_kwargs
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.infer.named_adapters import adapters_on_device, check_directory
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.choices import COMPUTE_DTYPES, OVERFLOW
from wgpu_lora.names.spelling import flag, naming, setting, with_renamed_options
from wgpu_lora.train.distill.teacher import TopK
from wgpu_lora.train.distill.teacher_cache import CACHE, LOGITS, TeacherCache, read_header
from wgpu_lora.train.distill.teacher_cache_writer import CachePlan, finished_shards, plan_cache, write_cache
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.adapter_init import frozen_adapter

PlanCallback = Callable[[CachePlan, int], None]


def teacher_cache(
    model: LoadedModel | str | Path,
    data: str | Path | Iterable[Mapping[str, Any]],
    output: str | Path,
    *,
    adapter: str | Path | None = None,
    top_k: int = 64,
    random: int = 128,
    length: int = 128,
    samples: int | None = None,
    seed: int = 0,
    logits_dtype: str = "f16",
    split: str | None = None,
    dataset_config: str | None = None,
    skip_bad_rows: bool = False,
    on_overflow: str = "truncate",
    completion_only_loss: bool = True,
    enable_thinking: bool | None = None,
    batch_tokens: int = 1024,
    compute_dtype: str = "f32",
    planned: PlanCallback | None = None,
    events: Events | None = None,
    progress_bar: bool | None = None,
) -> TeacherCache:
    """Store a teacher's logits for a few tokens at each trained position, for `finetune(objective="kd")`.

    An interrupted run continues where it was, and gives the same bytes as one that was not interrupted.

    Args:
        model, adapter: the teacher.
        data: training rows, as in `finetune`.
        output: directory of the cache; that of an interrupted run with the same options is continued.
        top_k, random: tokens with the largest logits, and others drawn at random with `seed`, per position.
        length: tokens that rows are cut to. samples: only the first rows.
        logits_dtype: f16, or f32 for exact comparisons.
        split, dataset_config, skip_bad_rows, on_overflow, completion_only_loss, enable_thinking: as in `finetune`.
        batch_tokens: tokens computed at a time; more if a single row is longer.
        planned: called with the plan and the number of rows that are finished already, before anything is loaded.
        events: receives `loading` and `evaluating`.

    Raises:
        UserError: a value is out of range, the data cannot be read, the cache is that of another teacher, data or
            options, one of its files was changed, or the disk or the device has no room.
    """
    check_values(top_k, random, length, samples, seed, logits_dtype, on_overflow, batch_tokens, compute_dtype)
    path = str(data) if isinstance(data, str | Path) else None
    if path is None and (split or dataset_config):
        raise UserError(f"{flag('split')} and {flag('dataset_config')} apply to a dataset or a folder, not to rows.")
    if adapter is not None:
        check_directory(adapter)
    opened = model if isinstance(model, LoadedModel) else open_model(str(model))
    config = opened.config
    if length > config.max_position_embeddings:
        raise UserError(
            f"{setting('length', length)} is more than this model's {config.max_position_embeddings:,} positions: "
            "lower it."
        )
    TopK(top_k, random, seed).check(config.vocab_size)
    digest = frozen_adapter(adapter, config).digest if adapter is not None else None
    output = Path(output)
    date = None
    if opened.tokenizer and opened.tokenizer.prints_date:
        # A cache that is continued keeps its date, so that its rows stay the same.
        date = (read_header(output).template_date if (output / CACHE).is_file() else None) or now()
    template = template_kwargs(enable_thinking, date)
    source = (
        training_data(path, None, split=split, eval_split=None, dataset_config=dataset_config)[0]
        if path is not None
        else python_source(list(data))  # type: ignore[arg-type]
    )
    with naming(with_renamed_options({"max_length": "length"})):
        prepared = tokenize_source(
            source,
            opened.tokenizer,
            max_length=length,
            completion_only_loss=completion_only_loss,
            on_overflow="drop" if on_overflow == "drop" else "truncate",
            chat_template_kwargs=template,
            vocab_size=config.vocab_size,
            skip_bad_rows=skip_bad_rows,
            formats=formats_of(objective_of(TrainingArguments())),
        )
    plan = plan_cache(
        opened,
        prepared,
        TopK(top_k, random, seed),
        logits=logits_dtype,
        samples=samples,
        batch_tokens=batch_tokens,
        template_kwargs=template,
        teacher={"adapter": digest, "config": config.digest()},
        options={
            "compute_dtype": compute_dtype,
            "on_overflow": on_overflow,
            "completion_only_loss": completion_only_loss,
            "enable_thinking": enable_thinking,
            "template_date": date,
            "skip_bad_rows": skip_bad_rows,
        },
    )
    shards = finished_shards(output, plan)
    if planned:
        planned(plan, sum(shard.rows for shard in shards))
    with (
        Bars(progress_bar) as bars,
        adapters_on_device(opened, [] if adapter is None else [adapter]) as adapters,
        with_option_advice("batch_tokens", "top_k", "random"),
    ):
        forwarder = EventForwarder(bars, *([events] if events else []))
        write_cache(output, plan, shards, opened, adapters, compute_dtype, forwarder)
    return TeacherCache.open(output)


def check_values(
    top_k: int,
    random: int,
    length: int,
    samples: int | None,
    seed: int,
    logits_dtype: str,
    on_overflow: str,
    batch_tokens: int,
    compute_dtype: str,
) -> None:
    """Raise UserError if a value is out of range, whatever the model and the data are."""
    numbers = {"top_k": (top_k, 1), "random": (random, 0), "length": (length, 2), "seed": (seed, 0)}
    numbers |= {"batch_tokens": (batch_tokens, 2), "samples": (1 if samples is None else samples, 1)}
    for name, (value, minimum) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise UserError(f"{flag(name)} must be a whole number of at least {minimum}, not {value!r:.100}.")
    names = {
        "logits_dtype": (logits_dtype, tuple(LOGITS)),
        "on_overflow": (on_overflow, OVERFLOW),
        "compute_dtype": (compute_dtype, COMPUTE_DTYPES),
    }
    for name, (choice, choices) in names.items():
        if choice not in choices:
            raise UserError(f"{flag(name)} must be one of {', '.join(choices)}, not {choice!r:.100}.")
