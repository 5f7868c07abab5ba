"""The run log as tables: a row per run, all facts of one, and the differences of two."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import working_folder
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import duration
from wgpu_lora.train.track.run_log import FAILED, KILLED, RunEntry

COLUMNS = (
    "id", "date", "kind", "model", "data", "output", "status", "loss", "improved", "time", "tokens", "name", "goal",
)  # fmt: skip
LEFT = ("id", "date", "kind", "model", "data", "output", "status", "name", "goal")
CARD = (("date", "kind", "status"), ("model", "data", "output"), ("loss", "improved", "time", "tokens"), ("goal",))
LABELLED = ("model", "data", "output", "loss", "tokens", "goal")  # on a card
NONE = "-"
OWN = ("output", "resume", "overwrite", "goal", "notes", "run_log")  # options that do not affect results


def cells(entry: RunEntry) -> tuple[str, ...]:
    """An entry's row, by COLUMNS."""
    losses = entry.losses
    texts = [number(loss) for loss in (losses.initial, losses.final) if loss is not None]
    return (
        entry.id.rpartition("-")[2],
        f"{date_of(entry).astimezone():%Y-%m-%d %H:%M}",
        entry.kind,
        entry.model or NONE,
        short_path(entry.data.path) if entry.data else NONE,
        short_path(entry.outputs[0]) if entry.outputs else NONE,
        entry.status,
        " -> ".join(texts) or NONE,
        NONE if losses.improvement is None else f"{losses.improvement:+.1f}%",
        NONE if entry.seconds is None else duration(entry.seconds, 1),
        NONE if entry.tokens is None else f"{entry.tokens:,}",
        entry.name + (f" ({entry.adapter})" if entry.adapter else ""),
        entry.goal or "",
    )


def short_path(path: str) -> str:
    """A path from the working folder, or the end of one outside of it."""
    result = Path(path)
    if result.is_relative_to(working_folder()):
        return str(result.relative_to(working_folder()))
    return str(Path(*result.parts[-2:])) if result.is_absolute() else path


def card(row: Sequence[str]) -> list[str]:
    """The row of `cells` as a few short lines, for narrow terminals."""
    texts = {name: text for name, text in zip(COLUMNS, row, strict=True) if text not in ("", NONE)}
    texts = {name: f"{name} {text}" if name in LABELLED else text for name, text in texts.items()}
    return [line for names in CARD if (line := ", ".join(texts[name] for name in names if name in texts))]


def style(entry: RunEntry) -> str | None:
    return "red" if entry.status in (FAILED, KILLED) else None


def number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: Sequence[str]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---" if name in text_columns else "---:" for name in columns], *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())


def facts(entry: RunEntry, defaults: Mapping[str, Any]) -> dict[str, str]:
    """All that is known of a run, by labels; options last, without those that have their default."""
    given = {name: value for name, value in entry.config.items() if name not in defaults or defaults[name] != value}
    return {**_origin(entry), **results(entry), **_options(replace(entry, config=given))}


def compared(before: RunEntry, after: RunEntry) -> list[tuple[str, str, str]]:
    """The differences of two runs: (label, of the first, of the second). Results are listed even if they are equal."""
    rows = []
    for table, always in ((_origin, False), (_options, False), (results, True)):
        first, second = table(before), table(after)
        for label in dict.fromkeys([*first, *second]):
            values = first.get(label, NONE), second.get(label, NONE)
            if always or values[0] != values[1]:
                rows.append((label, *values))
    return rows


def _origin(entry: RunEntry) -> dict[str, str]:
    git, data, heldout = entry.git, entry.data, entry.eval_data
    return _known_values(
        {
            "id": entry.id,
            "date": entry.date,
            "resumed": entry.resumed,
            "ended": entry.ended,
            "kind": entry.kind,
            "name": entry.name,
            "adapter": entry.adapter,
            "pipeline": entry.pipeline,
            "goal": entry.goal,
            "notes": entry.notes,
            "command": " ".join(entry.command),
            "folder": entry.directory,
            "git": git and git.commit + (" with changes" if git.dirty else ""),
            "device": ", ".join(entry.device.get(key, "") for key in ("name", "driver", "backend")).strip(", "),
            "data": data and data.path,
            "data, SHA-256": data and data.digest,
            "held-out data": heldout and heldout.path,
            "held-out data, SHA-256": heldout and heldout.digest,
        }
    )


def results(entry: RunEntry) -> dict[str, str]:
    losses = entry.losses
    better = losses.improvement
    return {"status": entry.status} | _known_values(
        {
            f"{losses.label}, initial": losses.initial,
            f"{losses.label}, best": losses.best,
            f"{losses.label}, final": losses.final,
            "improvement": None if better is None else f"{better:+.2f}%",
            "time": None if entry.seconds is None else duration(entry.seconds, 1),
            "steps": entry.steps,
            "tokens": entry.tokens,
            **flat(entry.results),
            "outputs": ", ".join(entry.outputs),
            "error": entry.error,
        }
    )


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested results by labels: {"a": {"b": 1}} -> {"a, b": 1}."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        label = before + str(name).replace("_", " ")
        if isinstance(value, Mapping):
            result |= flat(value, f"{label}, ")
        elif isinstance(value, list):
            result |= flat({str(number): item for number, item in enumerate(value, 1)}, f"{label} ")
        else:
            result[label] = f"{value:.4g}" if isinstance(value, float) else value
    return result


def _options(entry: RunEntry) -> dict[str, str]:
    words = {True: "yes", False: "no"}
    config = {name: words.get(value, value) if isinstance(value, bool) else value
              for name, value in entry.config.items() if name not in OWN}  # fmt: skip
    return _known_values({f"--{name.replace('_', '-')}": value for name, value in sorted(config.items())}, "{!s}")


def _known_values(values: Mapping[str, Any], form: str = "") -> dict[str, str]:
    """Without what is not known."""
    entries = {label: value for label, value in values.items() if value not in (None, "")}
    return {label: form.format(value) if form else number(value) for label, value in entries.items()}


UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
LAST = "last"


@dataclass(frozen=True)
class Filter:
    """The required values of an entry; None accepts any.

    name: a part of the name, of the adapter's name or of the goal, or a pattern with *. since: UTC.
    """

    status: str | None = None
    kind: str | None = None
    objective: str | None = None
    name: str | None = None
    since: datetime | None = None

    def holds(self, entry: RunEntry) -> bool:
        return (
            self.status in (None, entry.status)
            and (self.kind is None or self.kind in (entry.kind, entry.kind.partition(" ")[0]))
            and self.objective in (None, entry.objective)
            and (
                self.name is None or any(_matches(self.name, text) for text in (entry.name, entry.adapter, entry.goal))
            )
            and (self.since is None or date_of(entry) >= self.since)
        )


def date_of(entry: RunEntry) -> datetime:
    """When a run began; the beginning of time if its entry does not say so."""
    try:
        result = datetime.fromisoformat(entry.date)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return result if result.tzinfo else result.replace(tzinfo=UTC)


def _matches(pattern: str, text: str | None) -> bool:
    if text is None:
        return False
    pattern, text = pattern.lower(), text.lower()
    return fnmatchcase(text, pattern) if "*" in pattern else pattern in text


def since(text: str, at: datetime | None = None) -> datetime:
    """A date (2026-11-22, 2026-11-22T14:00, in the system's time zone), or a time before `at` (30m, 12h, 7d, 2w).

    at: now, if not given.

    Raises:
        UserError: it is neither.
    """
    at = at or datetime.now(UTC)
    try:
        if match := re.fullmatch(r"(\d{1,6})([mhdw])", text.strip()):
            return at - timedelta(**{UNITS[match[2]]: int(match[1])})
        return datetime.fromisoformat(text.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UserError(
            f"{flag('since')} must be a date such as 2026-11-22 or a time ago such as 12h or 7d, not {text!r:.60}."
        ) from None


def find(entries: Sequence[RunEntry], name: str) -> RunEntry:
    """The entry of an id, of the beginning or end of one, or the last one.

    Raises:
        UserError: there is none, or there are several.
    """
    if name == LAST and entries:
        return entries[-1]
    exact = [entry for entry in entries if entry.id == name]
    result = exact or [entry for entry in entries if name and (entry.id.startswith(name) or entry.id.endswith(name))]
    if len(result) > 1:
        examples = ", ".join(entry.id for entry in result[:3])
        raise UserError(f"{name!r:.60} stands for {len(result)} runs: give more of the id ({examples}).")
    if not result:
        raise UserError(f"There is no run {name!r:.60} in the run log: 'wgpu-lora runs' lists them.")
    return result[0]
