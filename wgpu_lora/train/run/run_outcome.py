"""Whether a run can work and did: what its log says beside the loss, and warnings before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from wgpu_lora.data import TokenizedData
from wgpu_lora.data.row_counts import SKIPPED
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.lr_schedule import LR_SCHEDULES
from wgpu_lora.train.objectives.sft import ACCURACY
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.run_state import RunState
from wgpu_lora.train.session.data_stream import DataStream

FEW = 50  # total steps: with fewer, an adapter hardly changes
FEWEST = 10  # lines of a log that tell whether a loss rose or a reward fell, and not only which rows a step had
ENDS = 0.1  # of the lines of a log, whose mean is its first or last value
LogRecords = Sequence[Mapping[str, Any]]


def first_and_last(lines: LogRecords, name: str) -> tuple[float, float] | None:
    """The means of the first and of the last tenth of a metric's values; None with fewer than two."""
    values = [line[name] for line in lines if name in line]
    size = max(1, int(ENDS * len(values)))
    return (fmean(values[:size]), fmean(values[-size:])) if len(values) > 1 else None


def achievements(lines: LogRecords) -> list[str]:
    """Rewards and token accuracy as text."""
    result = []
    if reward := first_and_last(lines, "reward"):
        result.append("reward {:.4f} to {:.4f}".format(*reward))
    for name, text in (("eval_reward", "held-out reward"), (f"eval_{ACCURACY}", "held-out token accuracy")):
        if values := [line[name] for line in lines if name in line]:
            before = f" ({values[0]:.4f} before)" if "loss" not in _first(lines, name) else ""
            result.append(f"{text} {values[-1]:.4f}{before}")
    return result


def _first(lines: LogRecords, name: str) -> Mapping[str, Any]:
    return next(line for line in lines if name in line)


def start_warnings(args: TrainingArguments, stream: DataStream, heldout: TokenizedData | None) -> list[str]:
    """Sentences about rows that are not trained on as they are, and about too few steps."""
    result = []
    for data in (stream.prepared, heldout):
        if data and not data.account.source.is_sealed:
            account = data.account
            dropped = [account.too_long, account.empty, account.untrained, account.truncated_away]
            lost = account.bad_count + sum(part.count for part in dropped)
            where = f"; {SKIPPED} in {flag('output')} lists the bad ones" if account.bad_count else ""
            result += [*data.notes, *([f"Not all rows are used ({data.summary()}){where}."] if lost else [])]
    return result + ([f"{text}." for text in [few_steps(args, stream)] if text])


def few_steps(args: TrainingArguments, stream: DataStream) -> str:
    """A sentence without its stop if a run has too few steps to learn much, with options that would make more."""
    if args.target_seconds or args.resume or (total := stream.total_steps()) >= FEW:
        return ""
    return f"{count_noun(total, 'step')} may be too few to learn much: try {_levers(args, stream)}"


def _levers(args: TrainingArguments, stream: DataStream) -> str:
    """Options that would make more of a run with few steps."""
    packing, rows, accumulation = args.batching
    if args.max_steps > 0:
        return f"a larger {flag('max_steps')}"
    many_rows = len(stream.prepared.rows) > 1
    falls = LR_SCHEDULES[args.lr_scheduler_type].decay is not None
    levers = [
        *([setting("packing", False)] if packing else []),
        *([f"a smaller {flag('gradient_accumulation_steps')}"] if accumulation > 1 and many_rows else []),
        *([f"a smaller {flag('per_device_train_batch_size')}"] if rows > 1 and many_rows else []),
        f"a larger {flag('num_train_epochs')}",
        *([setting("lr_scheduler_type", "constant")] if falls else []),
    ]
    return " or ".join([part for part in (", ".join(levers[:-1]), levers[-1]) if part])


def end_warnings(
    state: RunState, lines: LogRecords, samples: bool, train: TokenizedData, heldout: TokenizedData | None
) -> list[str]:
    """Sentences about a run that may not have learned what it should.

    Args:
        lines: of its log. samples: whether it learns from rewards, so that its loss says nothing.
    """
    result, cure = [], f"lower {flag('learning_rate')}"
    first, last = state.first_eval_loss, state.trained_eval_loss
    reward, loss = (first_and_last(lines, name) if len(lines) >= FEWEST else None for name in ("reward", "loss"))
    if samples:
        if reward and reward[1] < reward[0]:
            result.append("The reward fell from {:.4f} to {:.4f}: ".format(*reward) + f"{cure}.")
    elif first is not None and last is not None:
        if last > first:
            better = state.best_eval_loss is not None and state.best_eval_loss < first
            advice = f"use best/, the adapter after step {state.best_step:,}" if better else cure
            result.append(f"The held-out loss rose from {first:.4f} to {last:.4f}: {advice}, or train for less long.")
    elif loss and loss[1] > loss[0]:
        result.append("The training loss rose from {:.4f} to {:.4f}: ".format(*loss) + f"{cure}.")
    shared = int(np.isin(heldout.keys, train.keys).sum()) if heldout else 0
    if heldout and shared:
        are = f"{shared:,} of {count_noun(len(heldout.keys), 'held-out row')} {'are' if shared > 1 else 'is'}"
        result.append(f"{are} also trained on, so that the held-out loss says less about new rows: hold out others.")
    return result
