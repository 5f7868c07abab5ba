"""The live table of a cluster's runs, the tables of `cluster status`, the leaderboard of a sweep, and reasons."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from rich.live import Live
from rich.text import Text

from wgpu_lora.cli.console import OFTEN, console, is_terminal, line, table
from wgpu_lora.cli.training_progress import Trend
from wgpu_lora.cluster.messages import EventLine, Snapshot, TaskView
from wgpu_lora.cluster.run_status import GOOD, Followed, device_labels
from wgpu_lora.cluster.sweep import ranked, value_of, write_results
from wgpu_lora.files.installation import program
from wgpu_lora.names.text import count_noun, duration, escape_unprintable, join_words
from wgpu_lora.train.memory import format_bytes

TREND = 10  # bars of a loss
ROWS = 24  # without a terminal's height
WIDE = 100  # columns of a terminal that has room for trends
MARGIN = 10  # lines of a terminal that are left to what is not a row
LATE = 5.0  # seconds without an answer after which the table says so
COLUMNS = ("adapter", "state", "device", "step", "loss", "held-out", "tokens/s", "left", "trend")
LEFT = ("adapter", "state", "device")
FORMS = ("{}", "{}", "loss {}", "held-out {}", "{} tokens/s", "on {}", "{} left", "{}", "{}")  # of the parts of a line
# The states of tasks, first those that are shown if there are more tasks than lines.
ORDER = ("running", "starting", "moving", "failed", "cancelled", "pending", "stopped", "finished")
STYLES = {"failed": "red", "cancelled": "yellow", "moving": "yellow", "finished": "green", "stopped": "green"}
# First what a person may have to mend: results that are not in place, then failures.
REASON_ORDER = ("finished", "stopped", "running", "failed", "moving", "starting", "pending", "cancelled")
STATUS_EVENTS, STATUS_REASONS, STATUS_RUNS = 5, 10, 20  # of `cluster status`


class Table:
    """Shows snapshots of a run; `run_status.Watcher`."""

    def __init__(self, run: str):
        self._run = run
        self._printed: dict[str, tuple[str, str, float]] = {}  # state, line and its time, by task
        self._steps: dict[str, int] = {}
        self._trends: dict[str, Trend] = {}
        self._events: set[EventLine] = set()  # of the last snapshot
        self._note = ""
        self._snapshot: Snapshot | None = None
        self._live: Live | None = None

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot, self._note = snapshot, ""
        for task in snapshot.tasks:
            step, loss = task.progress.step, task.progress.loss
            if loss is not None and step != self._steps.get(task.name):
                self._steps[task.name] = step
                self._trends.setdefault(task.name, Trend(sys.stderr)).add(loss)
        # What happened before this run is of no interest.
        start = next((run.began for run in snapshot.runs if run.name == self._run), 0.0)
        for event in snapshot.events:
            if event.time >= start and event not in self._events:
                self._print("event", _event(event))
        self._events = set(snapshot.events)
        if is_terminal(sys.stderr):
            self._show()
        else:
            self._print_lines(snapshot)

    def not_fetched(self, task: str, why: str) -> None:
        self._print("kept", f"{task}: its result stays on the cluster: {why}")

    def away(self, seconds: float) -> None:
        if seconds > LATE:
            self._note = f"no answer from the cluster for {duration(seconds)}"
            self._show()

    def fetching(self, task: str) -> None:
        self._note = f"fetching {task}"
        self._show()

    # -- for terminals -----------------------------------------------------------------------------------------------

    def _show(self) -> None:
        if self._snapshot is None or not is_terminal(sys.stderr):
            return
        if self._live is None:
            self._live = Live(console=console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(self.table(self._snapshot))

    def table(self, snapshot: Snapshot) -> Any:
        """The current table."""
        size = shutil.get_terminal_size((WIDE, ROWS + MARGIN))
        tasks = sorted(snapshot.tasks, key=lambda task: ORDER.index(task.state))[: max(size.lines - MARGIN, 3)]
        labels = device_labels(snapshot)
        columns = COLUMNS if size.columns >= WIDE else COLUMNS[:-1]
        rows = [self._row(task, labels)[: len(columns)] for task in tasks]
        result = _table(columns, rows, LEFT, [STYLES.get(task.state) for task in tasks])
        remaining = len(snapshot.tasks) - len(tasks)
        device_ids = {task.device for task in tasks}
        names = [
            f"{labels[device.facts.id]} {device.facts.name}"
            for device in snapshot.devices
            if device.facts.id in device_ids
        ]
        lines = [
            "; ".join(filter(None, [f"and {remaining:,} more" if remaining else "", summary(snapshot.tasks)])),
            "; ".join(names[:4]),
            *[why for _, why in reasons(snapshot.tasks)[:3]],
            self._note,
        ]
        result.caption = Text("\n".join(escape_unprintable(text) for text in lines if text))
        result.caption_justify = "left"
        return result

    def _row(self, task: TaskView, labels: Mapping[str, str]) -> list[str]:
        trend = self._trends.get(task.name)
        device = labels.get(task.device or "", task.device or "")
        return [
            task.name,
            state_of(task),
            device,
            steps_of(task),
            *numbers_of(task),
            trend.bars(TREND) if trend else "",
        ]

    # -- for pipes ---------------------------------------------------------------------------------------------------

    def _print_lines(self, snapshot: Snapshot) -> None:
        labels, now = device_labels(snapshot), time.monotonic()
        for task in snapshot.tasks:
            state, last, since = self._printed.get(task.name, ("", "", now - OFTEN))
            text = sentence_of(task, labels)
            if task.state == state and (last == text or now - since < OFTEN):
                continue
            self._printed[task.name] = (task.state, text, now)
            line(task.state, text)

    def _print(self, label: str, text: str) -> None:
        """A line that stays, above the table if there is one."""
        if self._live is None:
            line(label, text)
        else:
            self._live.console.print(Text(escape_unprintable(text)))


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: Collection[str],
    styles: Iterable[str | None] = repeat(None),
) -> Any:
    return table(columns, [[Text(escape_unprintable(cell)) for cell in row] for row in rows], text_columns, styles)


def _event(event: EventLine) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.time))} {event.text}"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# -- tasks -------------------------------------------------------------------------------------------------------------


def state_of(task: TaskView) -> str:
    """A task's state; while it takes no steps, what it does."""
    doing = task.progress.doing
    return doing if task.state in ("pending", "running", "starting", "moving") and doing else task.state


def steps_of(task: TaskView) -> str:
    step, total = task.progress.step, task.progress.total_steps
    return f"{step:,}/{total:,}" if total else f"{step:,}" if step else ""


def numbers_of(task: TaskView) -> list[str]:
    """Loss, held-out loss, tokens/s and the time that is left, as far as they are known."""
    p, runs = task.progress, task.state == "running"
    return [
        _optional(p.loss, ".4f"),
        _optional(p.eval_loss, ".4f"),
        _optional(p.tokens_per_second if runs else None, ",.0f"),
        duration(p.seconds_left) if runs and p.seconds_left else "",
    ]


def sentence_of(task: TaskView, labels: Mapping[str, str]) -> str:
    """A task in a line without columns."""
    device = labels.get(task.device or "", task.device or "")
    doing = state_of(task) if state_of(task) != task.state else ""
    loss, heldout, speed, remaining = numbers_of(task)
    parts = zip(
        FORMS, (task.name, steps_of(task), loss, heldout, speed, device, remaining, doing, why_of(task)), strict=True
    )
    return "  ".join(form.format(part) for form, part in parts if part)


def summary(tasks: Sequence[TaskView]) -> str:
    """How many tasks are in which state, and what they all train together."""
    speed = speed_of(tasks)
    return f"{states_of(tasks)}, {speed} tokens/s" if speed else states_of(tasks)


def states_of(tasks: Sequence[TaskView]) -> str:
    count = {state: sum(task.state == state for task in tasks) for state in ORDER}
    return ", ".join(f"{number:,} {state}" for state, number in count.items() if number)


def speed_of(tasks: Sequence[TaskView]) -> str:
    speed = sum(task.progress.tokens_per_second or 0 for task in tasks if task.state == "running")
    return f"{speed:,.0f}" if speed else ""


def why_of(task: TaskView) -> str:
    """What is said of a task: why it failed or waits, why a helper of it does not help, or why its result is not yet
    where it belongs; "" if there is nothing to say, or not any more."""
    return "" if task.fetched and task.state in GOOD else task.reason


def reasons(tasks: Iterable[TaskView]) -> list[tuple[str, str]]:
    """The states and the reasons of tasks that have one; those with the same are named together."""
    names: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        if why := why_of(task):
            names.setdefault((task.state, why), []).append(task.name)
    result = []
    for (state, why), (first, *other_names) in sorted(names.items(), key=lambda item: REASON_ORDER.index(item[0][0])):
        also = f" and {count_noun(len(other_names), 'other')}" if other_names else ""
        result.append((state, f"{first}{also}: {why}"))
    return result


def report(followed: Followed) -> None:
    """Print how the tasks ended, the best first, and what went wrong."""
    snapshot = followed.snapshot
    run = next((run for run in snapshot.runs if any(task.run == run.name for task in followed.tasks)), None)
    metric = run.sweep.metric if run and run.sweep else "eval_loss"
    params = [*dict.fromkeys(name for task in followed.tasks for name in task.params)]
    views = ranked(followed.tasks, metric)
    if all(value_of(view, metric) is None for view in views):
        views = sorted(views, key=lambda task: task.name)
    rows = [
        [
            str(rank),
            view.name,
            *[f"{view.params.get(name, '')}" for name in params],
            view.state,
            steps_of(view),
            *numbers_of(view)[:2],
            _optional(view.progress.best_eval_loss, ".4f"),
            view.output,
        ]
        for rank, view in enumerate(views, 1)
    ]
    columns = ("", "adapter", *params, "state", "step", "loss", "held-out", "best", "output")
    console().print(_table(columns, rows, ("adapter", "state", "output")))
    for state, why in reasons(views):
        line(state, why)
    if moved := [view.name for view in views if view.attempts > 1]:
        line("moved", f"{join_words(moved, limit=5)} began again from the last copy, on this device or another")
    for name, why in followed.wrong.items():
        line("kept", f"{name}: its result stays on the cluster: {why}")
    if run and run.sweep:
        line("sweep", str(write_results(snapshot, run)))


# -- the state of a cluster --------------------------------------------------------------------------------------------


def show_status(snapshot: Snapshot) -> None:
    """Print a table of devices, one of runs, and the newest events."""
    labels = device_labels(snapshot)
    for node in snapshot.nodes:
        if not node.devices:
            line("host", f"{node.host} ({node.address}): no WebGPU device")
    if snapshot.devices:
        columns = ("device", "name", "backend", "state", "jobs", "tokens/s", "free", "of", "speed", "leases")
        rows = [
            [
                labels[view.facts.id],
                view.facts.name,
                view.facts.backend,
                view.state,
                ", ".join(view.units),
                _optional(view.tokens_per_second, ",.0f"),
                "" if view.facts.free is None else format_bytes(view.facts.free),
                "" if view.facts.budget is None else format_bytes(view.facts.budget),
                _optional(view.facts.speed, ",.0f"),
                "; ".join(lease.partition(" (")[0] for lease in view.facts.leases),  # without what for, which is long
            ]
            for view in snapshot.devices
        ]
        console().print(_table(columns, rows, (*columns[:5], "leases")))
    else:
        line("devices", "none")
    for view in snapshot.devices:
        if view.state == "quarantined":
            label = labels[view.facts.id]
            advice = f"'{program()} cluster release {label}' uses it again"
            line("aside", f"jobs failed on {label} {view.failures} times in a row: {advice}")
    if snapshot.runs:
        print()
        of_runs = ("run", "by", "began", "adapters", "tokens/s", "results")
        rows = []
        for run in snapshot.runs[-STATUS_RUNS:]:
            tasks = [task for task in snapshot.tasks if task.run == run.name]
            start = time.strftime("%m-%d %H:%M", time.localtime(run.began))
            status = "fetched" if all(task.fetched for task in tasks) else "to be fetched by 'attach'"
            results = run.shared or (status if run.over else "")
            rows.append([run.name, run.by, start, states_of(tasks), speed_of(tasks), results])
        console().print(_table(of_runs, rows, (*of_runs[:4], "results")))
    over = {run.name for run in snapshot.runs if run.over}
    # Of adapters whose run goes on, or whose result has not been fetched.
    tasks = [task for task in snapshot.tasks if task.run not in over or not task.fetched]
    why = reasons(replace(task, name=f"{task.run}/{task.name}") for task in tasks)
    for state, text in why[:STATUS_REASONS]:
        line(state, text)
    if len(why) > STATUS_REASONS:
        line("and", f"{len(why) - STATUS_REASONS:,} more reasons: see '{program()} cluster status --json'")
    if snapshot.events:
        print()
    for event in snapshot.events[-STATUS_EVENTS:]:
        line("event", _event(event))
