"""--report-to: which trackers a run is reported to."""

from __future__ import annotations

from importlib.util import find_spec

from wgpu_lora.errors import UserError
from wgpu_lora.installation import pip_line
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.track.trackers import JSONL, TRACKERS

NAMES = (*TRACKERS, JSONL)
HELP = f"Trackers to report to, separated by commas: {', '.join(NAMES)} (log.jsonl, which is always written)."
NOTHING = "none"  # as transformers has it


def trackers_of(report_to: str | None) -> list[str]:
    """The trackers of a comma-separated list, besides log.jsonl.

    Raises:
        UserError: a name is not known.
    """
    names = [name.strip() for name in (report_to or "").split(",")]
    for name in names:
        if name not in (*NAMES, NOTHING, ""):
            raise UserError(f"{flag('report_to')} must be one or more of {', '.join(NAMES)}, not {name!r:.60}.")
    return [name for name in dict.fromkeys(names) if name in TRACKERS]


def check_libraries(report_to: str | None) -> None:
    """Raise UserError if a tracker's library is not installed."""
    for name in trackers_of(report_to):
        kind = TRACKERS[name]
        if not _installed(kind.module):
            raise UserError(
                f"{setting('report_to', name)} needs {kind.module}, which is not installed: {pip_line(kind.extra)}"
            )


def _installed(module: str) -> bool:
    """Whether a module is installed; a folder of the same name, such as wandb's own, is not."""
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin is not None
