"""The git state of the working folder."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

SECONDS = 5.0  # limit of each command: a folder on a network may be slow


@dataclass(frozen=True)
class Git:
    """commit: the checked-out one. dirty: whether files differ from it or are new; None if that took too long."""

    commit: str
    dirty: bool | None = None


def git_state() -> Git | None:
    """The state of the current folder; None without git, outside of a repository, and before the first commit."""
    commit = _git("rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain")
    return Git(commit, None if changes is None else bool(changes))


def _git(*arguments: str) -> str | None:
    """The output of a command that changes nothing, not even the index; None if it fails."""
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()
