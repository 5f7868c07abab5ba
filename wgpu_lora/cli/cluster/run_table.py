"""The live table of a cluster's runs, the leaderboard of a sweep, and reasons."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wgpu_lora.cli.console import OFTEN, console, is_terminal, line
from wgpu_lora.cli.console import table as made_table
from wgpu_lora.cli.training_progress import Trend
from wgpu_lora.cluster.messages import EventLine, Snapshot, TaskView
from wgpu_lora.cluster.run_status import GOOD, Followed
from wgpu_lora.text import count_noun, duration, escape_unprintable, join_words

TREND = 10  # bars of a loss
ROWS = 24  # without a terminal's height
WIDE = 100  # columns of a terminal that has room for trends
MARGIN = 10  # lines of a terminal that are left to what is not a row
MOST = 4  # devices that are named below
REASONS = 3  # that are said below
LATE = 5.0  # seconds without an answer that are worth a word
COLUMNS = ("adapter", "state", "device", "step", "loss", "held-out", "tokens/s", "left", "trend")
LEFT = ("adapter", "state", "device")
# What is shown first, if there are more tasks than lines.
ORDER = ("running", "starting", "moving", "failed", "cancelled", "pending", "stopped", "finished")
STYLES = {"failed": "red", "cancelled": "yellow", "moving": "yellow", "finished": "green", "stopped": "green"}


class Table:
    """Shows snapshots of a run; `run_status.Watching`."""

    def __init__(self, run: str):
        self._run = run
        self._said: dict[str, tuple[str, str, float]] = {}  # state, what was said and when, by task
        self._steps: dict[str, int] = {}
        self._trends: dict[str, Trend] = {}
        self._event = 0.0  # time of the newest event that was shown
        self._at_that_time: set[str] = set()
        self._below = ""
        self._seen: Snapshot | None = None
        self._live: Any = None

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def shown(self, snapshot: Snapshot) -> None:
        if self._seen is None:  # what happened before this run is of no interest
            self._event = next((run.began for run in snapshot.runs if run.name == self._run), 0.0)
        self._seen, self._below = snapshot, ""
        for task in snapshot.tasks:
            step, loss = task.progress.step, task.progress.loss
            if loss is not None and step != self._steps.get(task.name):
                self._steps[task.name] = step
                self._trends.setdefault(task.name, Trend(sys.stderr)).add(loss)
        self._tell(self._new_events(snapshot.events))
        if is_terminal(sys.stderr):
            self._show()
        else:
            self._lines(snapshot)

    def kept(self, task: str, why: str) -> None:
        self._print("kept", kept(task, why))

    def away(self, seconds: float) -> None:
        if seconds > LATE:
            self._below = f"no answer from the cluster for {duration(seconds)}"
            self._show()

    def fetching(self, task: str) -> None:
        self._below = f"fetching {task}"
        self._show()

    # -- for terminals -----------------------------------------------------------------------------------------------

    def _show(self) -> None:
        if self._seen is None or not is_terminal(sys.stderr):
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        self._live.update(self.table(self._seen))

    def table(self, snapshot: Snapshot) -> Any:
        """The current table."""
        from rich.text import Text

        size = shutil.get_terminal_size((WIDE, ROWS + MARGIN))
        tasks = sorted(snapshot.tasks, key=lambda task: ORDER.index(task.state))[: max(size.lines - MARGIN, 3)]
        places = places_of(snapshot)
        columns = COLUMNS if size.columns >= WIDE else COLUMNS[:-1]
        cells = [[Text(cell) for cell in self._row(task, places)[: len(columns)]] for task in tasks]
        table = made_table(columns, cells, LEFT, [STYLES.get(task.state) for task in tasks])
        rest = len(snapshot.tasks) - len(tasks)
        used = {task.device for task in tasks if task.device}
        known = [f"{places[one.facts.id]} {one.facts.name}" for one in snapshot.devices if one.facts.id in used]
        lines = [
            "; ".join(filter(None, [f"and {rest:,} more" if rest else "", summary(snapshot.tasks)])),
            "; ".join(known[:MOST]),
            *[why for _, why in reasons(snapshot.tasks)[:REASONS]],
            self._below,
        ]
        table.caption, table.caption_justify = (
            Text("\n".join(escape_unprintable(text) for text in lines if text)),
            "left",
        )
        return table

    def _row(self, task: TaskView, places: Mapping[str, str]) -> list[str]:
        trend = self._trends.get(task.name)
        return [
            escape_unprintable(task.name),
            state_of(task),
            escape_unprintable(places.get(task.device or "", task.device or "")),
            steps_of(task),
            *numbers_of(task),
            trend.bars(TREND) if trend else "",
        ]

    # -- for pipes ---------------------------------------------------------------------------------------------------

    def _lines(self, snapshot: Snapshot) -> None:
        places, now = places_of(snapshot), time.monotonic()
        for task in snapshot.tasks:
            state, message, since = self._said.get(task.name, ("", "", now - OFTEN))
            text = sentence_of(task, places)
            if task.state == state and (message == text or now - since < OFTEN):
                continue
            self._said[task.name] = (task.state, text, now)
            line(task.state, text)

    def _new_events(self, events: Sequence[EventLine]) -> list[EventLine]:
        """Those that were not shown; several may have the same time."""
        now, known = self._event, self._at_that_time
        new = [e for e in events if e.time > now or (e.time == now and e.text not in known)]
        for event in new:
            if event.time > self._event:
                self._event, self._at_that_time = event.time, set()
            self._at_that_time.add(event.text)
        return new

    def _tell(self, events: Sequence[EventLine]) -> None:
        for event in events:
            clock = time.strftime("%H:%M:%S", time.localtime(event.time))
            self._print("event", f"{clock} {escape_unprintable(event.text)}")

    def _print(self, label: str, text: str) -> None:
        """A line that stays, above the table if there is one."""
        if self._live is None:
            line(label, text)
            return
        from rich.text import Text

        self._live.console.print(Text(text))


def places_of(snapshot: Snapshot) -> dict[str, str]:
    """Short names of devices, HOST:INDEX, by their ids."""
    hosts = {node.address: node.host for node in snapshot.nodes}
    return {d.facts.id: f"{hosts.get(d.facts.address, d.facts.address)}:{d.facts.index}" for d in snapshot.devices}


def state_of(task: TaskView) -> str:
    """A task's state; while it takes no steps, what it does."""
    doing = escape_unprintable(task.progress.doing)
    return doing if task.state in ("pending", "running", "starting", "moving") and doing else task.state


def steps_of(task: TaskView) -> str:
    done, total = task.progress.step, task.progress.total_steps
    return f"{done:,}/{total:,}" if total else f"{done:,}" if done else ""


def numbers_of(task: TaskView) -> list[str]:
    """Loss, held-out loss, tokens/s and the time that is left, as far as they are known."""
    p, runs = task.progress, task.state == "running"
    return [
        "" if p.loss is None else f"{p.loss:.4f}",
        "" if p.eval_loss is None else f"{p.eval_loss:.4f}",
        f"{p.tokens_per_second:,.0f}" if runs and p.tokens_per_second is not None else "",
        duration(p.seconds_left) if runs and p.seconds_left else "",
    ]


def sentence_of(task: TaskView, places: Mapping[str, str]) -> str:
    """A task in a line without columns."""
    loss, heldout, speed, left = numbers_of(task)
    parts = [
        steps_of(task),
        f"loss {loss}" if loss else "",
        f"held-out {heldout}" if heldout else "",
        f"{speed} tokens/s" if speed else "",
        f"on {places.get(task.device, task.device)}" if task.device else "",
        f"{left} left" if left else "",
        state_of(task) if state_of(task) != task.state else "",
        why_of(task),
    ]
    return "  ".join([task.name, *filter(None, parts)])


def summary(tasks: Sequence[TaskView]) -> str:
    """How many tasks are in which state, and what they all train together."""
    count = {state: sum(task.state == state for task in tasks) for state in ORDER}
    text = ", ".join(f"{number:,} {state}" for state, number in count.items() if number)
    speed = sum(task.progress.tokens_per_second or 0 for task in tasks if task.state == "running")
    return f"{text}, {speed:,.0f} tokens/s" if speed else text


def kept(task: str, why: str) -> str:
    """That a result could not be written here, in a line."""
    return escape_unprintable(f"{task}: its result stays on the cluster: {why}")


def report(followed: Followed) -> None:
    """Print how the tasks ended, the best first, and what went wrong."""
    from wgpu_lora.cluster.sweep import ranked, value_of, write_results

    snapshot = followed.snapshot
    run = next((one for one in snapshot.runs if any(task.run == one.name for task in followed.tasks)), None)
    metric = run.sweep.metric if run and run.sweep else "eval_loss"
    params = [*dict.fromkeys(name for task in followed.tasks for name in task.params)]
    views = ranked(followed.tasks, metric)
    if all(value_of(view, metric) is None for view in views):
        views = sorted(views, key=lambda task: task.name)
    rows = [
        [
            str(rank),
            escape_unprintable(view.name),
            *[f"{view.params.get(name, '')}" for name in params],
            view.state,
            steps_of(view),
            *numbers_of(view)[:2],
            "" if view.progress.best_eval_loss is None else f"{view.progress.best_eval_loss:.4f}",
            escape_unprintable(view.output),
        ]
        for rank, view in enumerate(views, 1)
    ]
    columns = ("", "adapter", *params, "state", "step", "loss", "held-out", "best", "output")
    from rich.text import Text

    console().print(made_table(columns, [[Text(cell) for cell in row] for row in rows], ("adapter", "state", "output")))
    for state, why in reasons(views):
        line(state, why)
    moved = [view.name for view in views if view.attempts > 1]
    if moved:
        names = join_words(moved[:5], max(0, len(moved) - 5))
        line("moved", f"{names} began again from the last copy, on this device or another")
    for name, why in followed.wrong.items():
        line("kept", kept(name, why))
    if run and run.sweep:
        line("sweep", str(write_results(snapshot, run)))


# What is shown first, if there is more than room: what a person may have to mend.
REASON_ORDER = ("finished", "stopped", "running", "failed", "moving", "starting", "pending", "cancelled")


def why_of(task: TaskView) -> str:
    """What is said of a task: why it failed or waits, why a helper of it does not help, or why its result is not yet
    where it belongs; "" if there is nothing to say, or not any more."""
    return "" if task.fetched and task.state in GOOD else escape_unprintable(task.reason)


def reasons(tasks: Iterable[TaskView]) -> list[tuple[str, str]]:
    """The states and the reasons of tasks that have one; those with the same are named together."""
    result: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        if why := why_of(task):
            result.setdefault((task.state, why), []).append(escape_unprintable(task.name))
    ordered = sorted(result.items(), key=lambda one: REASON_ORDER.index(one[0][0]))
    return [(state, f"{_named(names)}: {why}") for (state, why), names in ordered]


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {count_noun(len(names) - 1, 'other')}"
