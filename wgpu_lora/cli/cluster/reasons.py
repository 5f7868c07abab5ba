"""Why adapters are where they are: what is shown of what a coordinator says of them."""

from __future__ import annotations

from collections.abc import Iterable

from wgpu_lora.bounded import escape_unprintable
from wgpu_lora.cluster.client.follow import GOOD
from wgpu_lora.cluster.facts import TaskView
from wgpu_lora.words import count_noun

# What is shown first, if there is more than room: what a person may have to mend.
ORDER = ("finished", "stopped", "running", "failed", "moving", "starting", "pending", "cancelled")


def why_of(task: TaskView) -> str:
    """What is said of a task: why it failed or waits, why a helper of it does not help, or why its result is not yet
    where it belongs; "" if there is nothing to say, or not any more."""
    return "" if task.fetched and task.state in GOOD else escape_unprintable(task.said)


def reasons(tasks: Iterable[TaskView]) -> list[tuple[str, str]]:
    """The states and the reasons of tasks that have one; those with the same are named together."""
    found: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        if why := why_of(task):
            found.setdefault((task.state, why), []).append(escape_unprintable(task.name))
    ordered = sorted(found.items(), key=lambda one: ORDER.index(one[0][0]))
    return [(state, f"{_named(names)}: {why}") for (state, why), names in ordered]


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {count_noun(len(names) - 1, 'other')}"
