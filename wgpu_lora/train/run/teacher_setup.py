"""A run's teacher: a model that is opened and fits the student, or caches that fit the data."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

from wgpu_lora.data import TokenizedData
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, EventForwarder, Events
from wgpu_lora.files.json_files import to_json
from wgpu_lora.formats.tokenizer.chat_template import now
from wgpu_lora.gpu.device_errors import with_option_advice
from wgpu_lora.infer.named_adapters import adapters_on_device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_files import ModelFiles
from wgpu_lora.names.spelling import flag, naming, setting, with_renamed_options
from wgpu_lora.train.distill.teacher import MOST, TopK
from wgpu_lora.train.distill.teacher_cache import TeacherCache, read_header, template_digest
from wgpu_lora.train.distill.teacher_cache_writer import CachePlan, finished_shards, plan_cache, write_cache
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.adapter_init import frozen_adapter
from wgpu_lora.train.run.adapter_run import AdapterRun
from wgpu_lora.train.session.data_stream import heldout_options
from wgpu_lora.train.session.live_teachers import LiveTeacher
from wgpu_lora.weights.base_formats import AUTO, DEFAULT_FORMAT, GGUF

RANDOM = 128  # tokens that a live teacher's rest is estimated from, at other temperatures than 1


def live_teacher(args: TrainingArguments, student: LoadedModel) -> LiveTeacher | None:
    """The model of --teacher; None without it. Raises UserError if it cannot be read or does not fit the student."""
    if args.objective != "kd" or args.teacher is None:
        return None
    model = _opened(args, student)
    student_size, teacher_size = student.config.vocab_size, model.config.vocab_size
    if student_size != teacher_size:
        raise UserError(
            f"The teacher {args.teacher} has a vocabulary of {teacher_size:,} tokens, but {student.name} one of "
            f"{student_size:,}: use a teacher with the student's tokenizer."
        )
    positions = model.config.max_position_embeddings
    if args.length > positions:
        raise UserError(
            f"{setting('max_length', args.length)} is more than the {positions} positions of the teacher "
            f"{args.teacher}: lower it to {positions}."
        )
    digests = [item.tokenizer.digest for item in (student, model) if item.tokenizer]
    if len(set(digests)) > 1:
        raise UserError(
            f"The teacher {args.teacher} has another tokenizer than {student.name}: use a teacher with the same."
        )
    top_k = args.teacher_top_k
    if top_k > teacher_size:
        raise UserError(
            f"{setting('teacher_top_k', top_k)} is more than the teacher's vocabulary of {teacher_size:,}: lower it."
        )
    if MOST < top_k < teacher_size:
        raise UserError(f"{setting('teacher_top_k', top_k)} is more than {MOST:,}: lower it.")
    random = 0 if args.temperature == 1 else min(RANDOM, teacher_size - top_k)
    adapter = None
    if args.teacher_adapter:
        result = frozen_adapter(args.teacher_adapter, model.config)
        adapter = result.spec, result.matrices, result.digest
    return LiveTeacher(model, TopK(top_k, random, args.seed), args.temperature, adapter)


def _opened(args: TrainingArguments, student: LoadedModel) -> LoadedModel:
    """The teacher, which keeps the base format that it is stored in. If the student is stored in one, or its
    constants are trained, it has the default format: in the student's, it would be as rounded as the student is."""
    rounded = student.config.packed or args.train == "quant-scales"
    base_dtype = DEFAULT_FORMAT if rounded or student.decoder.base_dtype == GGUF else student.decoder.base_dtype
    with naming(with_renamed_options({"base_dtype": "teacher_base_dtype"})):
        model = open_model(args.teacher or "", student.device, args.teacher_base_dtype or AUTO)
        if args.teacher_base_dtype or model.decoder.base_dtype in (model.config.packed, GGUF, base_dtype):
            return model
        return open_model(args.teacher or "", student.device, base_dtype)


def with_cached_length(args: TrainingArguments) -> TrainingArguments:
    """The options with the length of the rows in --teacher-cache, unless another is given."""
    if args.objective != "kd" or args.teacher_cache is None or args.max_length is not None:
        return args
    return replace(args, max_length=TeacherCache.open(args.teacher_cache).length)


def with_template_date(
    args: TrainingArguments, model: LoadedModel | ModelFiles, date: str | None = None
) -> TrainingArguments:
    """The options with the date that the chat template prints: that of the teacher cache, else `date`, else now.

    A resumed run has one already, so that its rows stay the same.
    """
    if args.template_date is not None or model.tokenizer is None or not model.tokenizer.prints_date:
        return args
    cached = args.objective == "kd" and args.teacher_cache is not None
    cache_date = read_header(Path(args.teacher_cache or "")).template_date if cached else None
    return replace(args, template_date=cache_date or date or now())


def check_caches(
    args: TrainingArguments, student: LoadedModel, prepared: TokenizedData, heldout: TokenizedData | None
) -> str | None:
    """Raise UserError unless the caches have these rows, for this student; returns their digest, None without one."""
    if args.objective != "kd" or args.teacher_cache is None:
        return None
    caches = [(args, prepared)]
    eval_cache, split = args.eval_teacher_cache, args.validation_split is not None
    if heldout and not (eval_cache or split):
        raise UserError(
            f"The held-out rows {heldout.path} need a teacher cache of their own: give {flag('eval_teacher_cache')}, "
            f"or hold out rows of {flag('data')} with {flag('validation_split')}."
        )
    if eval_cache and (split or not heldout):
        text = setting("validation_split", args.validation_split)
        why = f"with {text} they are in {flag('teacher_cache')}" if split else "there are none"
        raise UserError(f"{flag('eval_teacher_cache')} is for held-out rows of their own, but {why}: leave it out.")
    if heldout:
        caches.append((heldout_options(args), heldout))
    opened = [(checked_cache(options, student, rows), options) for options, rows in caches]
    counts = {cache.top_k for cache, _ in opened}
    if len(counts) > 1:
        raise UserError(
            f"{flag('teacher_cache')} and {flag('eval_teacher_cache')} keep {opened[0][0].top_k:,} and "
            f"{opened[1][0].top_k:,} tokens per position: make them with the same."
        )
    return opened[0][0].digest()


def checked_cache(args: TrainingArguments, student: LoadedModel, rows: TokenizedData) -> TeacherCache:
    """A cache of the rows' teacher. Raises UserError if it does not fit the rows, the student or the temperature."""
    cache = TeacherCache.open(args.teacher_cache or "")
    vocabulary = student.config.vocab_size
    if cache.vocab_size != vocabulary:
        raise UserError(
            f"The teacher of {cache.path} has a vocabulary of {cache.vocab_size:,} tokens, but {student.name} one of "
            f"{vocabulary:,}: use a teacher with the student's tokenizer."
        )
    cache.check(rows, student.tokenizer, args.template_kwargs())
    if args.temperature != 1 and not cache.random and cache.top_k < vocabulary:
        raise UserError(
            f"The teacher cache {cache.path} has no random tokens, which {setting('temperature', args.temperature)} "
            f"needs: make it with {flag('random')}, or use {setting('temperature', 1)}."
        )
    return cache


BATCH_TOKENS = 1024  # computed at a time
LOGITS = "f32"  # a live teacher's, so that training gets the same numbers


def cache_plans(run: AdapterRun, student: LoadedModel) -> dict[str, CachePlan]:
    """The caches that replace a run's live teacher, by the options that name them: `teacher_cache` and, if the held-out
    rows are data of their own, `eval_teacher_cache`.

    Raises:
        UserError: the run has no live teacher.
    """
    live, args = _teacher(run), run.args
    rows = {"teacher_cache": run.stream.prepared}
    if run.heldout and args.validation_split is not None:
        rows["teacher_cache"] = _all_rows(run.stream.prepared, run.heldout)
    elif run.heldout:
        rows["eval_teacher_cache"] = run.heldout
    names = (
        "compute_dtype",
        "on_overflow",
        "completion_only_loss",
        "enable_thinking",
        "template_date",
        "skip_bad_rows",
    )
    tokenizer = student.tokenizer.digest if student.tokenizer else None
    template = template_digest(student.tokenizer, args.template_kwargs())  # the student's tokenizer encodes the rows
    # Without random tokens, the seed is unused.
    selection = live.selection if live.selection.random else replace(live.selection, seed=0)
    plans = {}
    for name, prepared in rows.items():
        plan = plan_cache(
            live.model,
            prepared,
            selection,
            logits=LOGITS,
            samples=None,
            batch_tokens=BATCH_TOKENS,
            template_kwargs=args.template_kwargs(),
            teacher={"adapter": live.adapter[2] if live.adapter else None, "config": live.model.config.digest()},
            options={option: getattr(args, option) for option in names},
        )
        plans[name] = replace(plan, header=replace(plan.header, tokenizer=tokenizer, template=template))
    return plans


def caches_digest(run: AdapterRun, plans: dict[str, CachePlan]) -> str:
    """Equal for runs that the same caches serve, wherever their files are; 32 hexadecimal digits."""
    live = _teacher(run)
    headers = {name: {**asdict(plan.header), "data": plan.header.data["sha256"]} for name, plan in plans.items()}
    for header in headers.values():
        header["teacher"] = [live.digest(), header["teacher"]["config"]]  # without its name
    return hashlib.sha256(to_json(headers, sort_keys=True).encode()).hexdigest()[:32]


def write_caches(run: AdapterRun, student: LoadedModel, output: Path, events: Events) -> dict[str, str]:
    """Write the caches of `cache_plans` into directories below `output` that are named as the options; finished shards
    are kept. Returns the directories, by option.

    Raises:
        UserError: as `write_cache` and `finished_shards`.
    """
    live, plans = _teacher(run), cache_plans(run, student)
    directories = {name: output / name for name in plans}
    shards = {name: finished_shards(directories[name], plan) for name, plan in plans.items()}
    adapter = run.args.teacher_adapter
    with (
        adapters_on_device(live.model, [adapter] if live.adapter and adapter else []) as adapters,
        with_option_advice("teacher", "teacher_top_k"),
    ):
        before, total = 0, sum(len(plan.rows) for plan in plans.values())
        for name, plan in plans.items():
            receivers = _SummedRows(before, total, events)
            write_cache(directories[name], plan, shards[name], live.model, adapters, run.args.compute_dtype, receivers)
            before += len(plan.rows)
    return {name: str(directory) for name, directory in directories.items()}


class _SummedRows(EventForwarder):
    """Counts the rows of all caches together."""

    def __init__(self, before: int, total: int, events: Events):
        super().__init__(events)
        self._before, self._total = before, total

    def evaluating(self, evaluating: Evaluating) -> None:
        super().evaluating(replace(evaluating, rows=self._before + evaluating.rows, total=self._total))


def _teacher(run: AdapterRun) -> LiveTeacher:
    if run.teacher is None:
        raise UserError(f"The run has no {flag('teacher')} that could be cached: give it one.")
    return run.teacher


def _all_rows(rows: TokenizedData, heldout: TokenizedData) -> TokenizedData:
    """All rows of data that some were held out of."""
    all_rows = sorted([*rows.rows, *heldout.rows], key=lambda row: row.index)
    return replace(rows, rows=all_rows, values=(), keys=rows.keys[:0])
