"""Description of a training run before it starts: device, model, data, options, steps and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import Bar, TensorBar, line
from wgpu_lora.cli.training_progress import describe_tuning
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import naming, with_renamed_options
from wgpu_lora.names.text import count_noun, join_words
from wgpu_lora.train.lr_schedule import LR_SCHEDULES
from wgpu_lora.train.run.run_outcome import few_steps
from wgpu_lora.weights.base_formats import GGUF

if TYPE_CHECKING:
    from wgpu_lora.infer.exact_match import Comparison
    from wgpu_lora.models.loaded_model import LoadedModel
    from wgpu_lora.train.job import Job
    from wgpu_lora.train.memory import MemoryPlan
    from wgpu_lora.train.options.training_arguments import TrainingArguments
    from wgpu_lora.train.run.adapter_run import AdapterRun
    from wgpu_lora.train.run.records import RunRecord


def describe(job: Job[Any]) -> None:
    """Describe the job, one line per fact."""
    describe_model(job)
    describe_runs(job)
    describe_memory(job)


def describe_runs(job: Job[Any]) -> None:
    """Describe each run's data, chosen options and length."""
    from wgpu_lora.data.row_counts import SKIPPED

    model = job.session.model
    with naming(with_renamed_options({"base_dtype": "teacher_base_dtype"})):
        of_teachers = [
            f"of the teacher, {note}" for teacher in job.session.teachers.models for note in teacher.rounding
        ]
    for note in (*model.notes, *(model.tokenizer.notes if model.tokenizer else ()), *of_teachers):
        line("note", note)
    for run in job.runs:
        mark = f"{run.name}: " if run.name else ""
        for label, data in (("data", run.stream.prepared), ("held out", run.heldout)):
            if data:
                line(label, mark + data.summary())
                for note in data.notes:
                    line("note", mark + note)
                if data.account.bad:
                    line(
                        "skipped", f"{mark}bad rows will be listed in {run.storage.disk_path(run.directory / SKIPPED)}"
                    )
        trained = job.session.trained.trainable(run.slot, job.session.model.config)
        label, text = run.trainable.summary()
        line(label, f"{mark}{text}: {trained:,} trained parameters")
        for note in run.notes:
            label, _, message = note.partition(": ")
            line(label, mark + message)
        describe_steps(run, mark)


def describe_steps(run: AdapterRun, mark: str) -> None:
    """Describe the number of steps, with a warning if it is too small to learn much."""
    args, stream = run.args, run.stream
    an_epoch = stream.epoch(0)
    a_step = [stream.processed_tokens([sample for batch in step for sample in batch]) for step in an_epoch]
    length = f"{len(an_epoch):,} per epoch, {sum(a_step) / len(a_step):,.0f} tokens each"
    if args.target_seconds:
        line("steps", f"{mark}as many as {args.target_seconds:g} s allow; {length}; {_timed_rate(args)}")
        return
    total = stream.total_steps()
    warmup = run.warmup(total)
    rate = _decay(args) + (f" after {count_noun(warmup, 'step')} of warm-up" if warmup else "")
    line("steps", f"{mark}{total:,}; {length}; {rate}")
    if text := few_steps(args, stream):
        line("warning", mark + text)


def _decay(args: TrainingArguments) -> str:
    falls = LR_SCHEDULES[args.lr_scheduler_type].decay is not None
    minimum = f" to {args.lr_scheduler_min:.2e}" if falls and args.lr_scheduler_min else ""
    return f"{args.lr_scheduler_type} from {args.rate:.2e}{minimum}"


def _timed_rate(args: TrainingArguments) -> str:
    """The schedule of a run with --target-seconds, which follows its time."""
    assert args.target_seconds
    rate = f"{_decay(args)}, by time"
    if not LR_SCHEDULES[args.lr_scheduler_type].warms_up or not (args.warmup_steps or args.warmup_ratio):
        return rate
    seconds = f"{args.warmup_ratio * args.target_seconds:g} s"
    return f"{rate}, after {count_noun(args.warmup_steps, 'step') if args.warmup_steps else seconds} of warm-up"


def describe_model(job: Job[Any]) -> None:
    session = job.session
    model, device = session.model, session.device
    config = model.config
    line("device", f"{device.info.name}, {device.info.driver}, {device.info.backend}, {device.capabilities.units}")
    line(
        "model",
        f"{model.name}: {config.architecture}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,}, weights in {model.decoder.base_dtype}{_unquantized(model)}",
    )


def _unquantized(model: LoadedModel) -> str:
    """The matrices that are not in the base format, since they are small. In a file's own types, all have theirs."""
    dtype, names, base_dtype = model.decoder.embedding.dtype, model.config.kept_modules(), model.decoder.base_dtype
    return (
        f", {join_words(names)} in {dtype}"
        if names and dtype != base_dtype and base_dtype != GGUF and not model.config.packed
        else ""
    )


def describe_modules(job: Job[Any]) -> None:
    """Describe how many modules of each name have an adapter."""
    for run in job.runs:
        if counts := modules_of(run):
            mark = f"{run.name}: " if run.name else ""
            line("modules", mark + ", ".join(f"{count:,} {name}" for name, count in counts.items()))


def modules_of(run: AdapterRun) -> dict[str, int]:
    """How many modules of each name have an adapter; empty if something else is trained."""
    from wgpu_lora.train.run.trained_weights import TrainableAdapter

    spec = run.trainable.spec if isinstance(run.trainable, TrainableAdapter) else None
    return dict(Counter(path.rpartition(".")[2] for path in spec.scaling)) if spec else {}


def note_unified(plan: MemoryPlan) -> None:
    """Say so if offloading saves nothing."""
    if plan.host and plan.unified:
        line("note", "--offload-activations saves nothing here, since the device's memory is the host's")


def describe_optimizer(job: Job[Any]) -> None:
    """Describe the optimizer and its state."""
    from wgpu_lora.train.memory import format_bytes_exact

    session = job.session
    trained = sum(session.trained.trainable(run.slot, session.model.config) for run in job.runs)
    state_bytes = session.optimizer.state_bytes
    state = "no state"
    if state_bytes:
        ratio = f"{state_bytes / trained:.2f} bytes per trained parameter"
        state = f"{format_bytes_exact(state_bytes)} of state, {ratio}"
    line("optimizer", f"{job.runs[0].args.optim}: {state}")


def describe_memory(job: Job[Any]) -> None:
    """Describe the optimizer, the planned memory, and what remains to be tuned."""
    from wgpu_lora.train.memory import format_bytes_exact

    plan = job.session.memory()
    describe_optimizer(job)
    host = f", and {format_bytes_exact(plan.host)} in the host's memory" if plan.host else ""
    line("memory", f"{format_bytes_exact(plan.peak)} of the device at peak{host}")
    note_unified(plan)
    describe_tuning(job)


CURES = {
    "no rewards": "correct --reward-funcs",
    **dict.fromkeys(("non-finite", "diverged"), "lower --learning-rate, or check the data for unusual rows"),
}  # by why a run failed


def losses(directory: Path, trained: float | None, before: float | None, heldout: float | None) -> list[str]:
    """The training loss and the held-out loss (before and after) if known, and what the log in a run's directory says,
    as text; empty before the first step. Of a run that learns from rewards, these instead of losses."""
    from wgpu_lora.train.run.run_outcome import achievements, first_and_last
    from wgpu_lora.train.run.training_log import LOG, read_log

    if trained is None:
        return []
    lines = read_log(directory / LOG) if (directory / LOG).is_file() else []
    first = "" if before is None else f" ({before:.4f} before)"
    texts = [f"loss {trained:.4f}", *([] if heldout is None else [f"held-out loss {heldout:.4f}{first}"])]
    return [*([] if first_and_last(lines, "reward") else texts), *achievements(lines)]


def describe_end(record: RunRecord, adapter: str | None) -> str:
    """How a run ended, with its losses, and where its adapter is: in its directory, or at `adapter`."""
    from wgpu_lora.train.run.stop_reasons import STOP_TEXT

    state, reason, output = record.state, record.stop_reason, record.directory
    timed = reason == "target seconds"  # its number of steps is only known at the end
    count = count_noun(state.step, "step") if timed else f"{state.step:,} of {count_noun(state.total_steps, 'step')}"
    seconds = state.elapsed_seconds if record.options.target_seconds else state.seconds
    why = f"{count} in {seconds:,.1f} s ({STOP_TEXT[reason]})"
    summary = losses(output, state.last_loss, state.first_eval_loss, state.trained_eval_loss)
    scales = record.options.train == "quant-scales"
    where = f"the models are in {output}/last-f16 and others" if scales else f"the adapter is in {adapter or output}"
    return "; ".join([why, *summary, where])


def describe_best(record: RunRecord, adapter: str | None) -> str:
    """Where the best adapter is, if it is not the last; else ''. adapter: as for `describe_end`."""
    state, output = record.state, record.directory
    if not state.best_step or state.best_step >= state.step:
        return ""
    name, noun = ("best-f16", "model") if record.options.train == "quant-scales" else ("best", "adapter")
    where = f"{output / name}.tar.age" if adapter else output / name
    return f"{where} has the best {noun}: held-out loss {state.best_eval_loss:.4f} after step {state.best_step:,}"


SHOWN = 3  # answers beside the rows' own


def describe_answers(job: Job[Any], record: RunRecord, count: int) -> None:
    """Show greedy answers to held-out rows beside the rows' own, if these are examples, and how many are equal.

    count: rows that are answered; 0 for none.
    """
    from wgpu_lora.infer.exact_match import compared, split_row

    heldout, model, objective = job.run.heldout, job.session.model, job.run.stream.objective
    examples = objective.unit == "token" and objective.rows_per_sample == 1 and model.tokenizer
    if not (count and heldout and examples and record.options.train != "quant-scales"):
        return
    rows = [row for row in heldout.rows[:count] if split_row(row)]
    if not rows:
        line("answers", "none: the held-out rows have no prompts")
        return
    try:
        with Bar("answering held-out rows", None) as bar:
            result = compared(model, rows, record.directory, events=AnswerBar(bar))
    except UserError as error:
        line("answers", f"none: {error}")
        return
    except KeyboardInterrupt:
        line("answers", "none: interrupted; the adapter is complete")
        return
    equal = sum(comparison.matches for comparison in result)
    line(
        "answers",
        f"to {equal:,} of {count_noun(len(result), 'held-out row')}, the greedy answer equals the row's own; "
        "'evaluate --exact-match' compares all rows, or a part of each answer",
    )
    show_comparisons(result[:SHOWN])


def show_comparisons(comparisons: Sequence[Comparison]) -> None:
    """Answers beside the rows' own, on a line each."""
    for comparison in comparisons:
        texts = {"prompt": comparison.prompt, "expected": comparison.reference, "answer": comparison.answer}
        for label, text in texts.items():
            line(label, shortened(" ".join(text.split()), from_end=label == "prompt"))


def shortened(text: str, width: int = 200, from_end: bool = False) -> str:
    """The beginning or the end of a text."""
    if len(text) <= width:
        return text
    return f"...{text[3 - width :]}" if from_end else f"{text[: width - 3]}..."


class AnswerBar(TensorBar):
    """A bar of answered rows."""

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._bar.advance(to=done, total=total, detail=f"{tokens:,} tokens of answers")
