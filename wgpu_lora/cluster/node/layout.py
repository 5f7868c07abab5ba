"""Where a host keeps what belongs to a cluster: directories of units, its shelf of copies, and files sent to it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

from wgpu_lora.errors import UserError

ROOT = "WGPU_LORA_CLUSTER_DIR"
ADAPTERS, PIPELINE = "adapters", "pipeline"  # in a unit's directory
NAME = re.compile(r"(?!\.)[A-Za-z0-9._=,+-]{1,200}")
DIGEST = re.compile(r"[0-9a-f]{64}")


def cluster_root() -> Path:
    """The directory of this host: WGPU_LORA_CLUSTER_DIR, else in the user's cache."""
    return Path(os.environ.get(ROOT) or Path(user_cache_dir("wgpu-lora")) / "cluster").absolute()


def checked_part(text: object) -> str:
    """A name that becomes a directory. Raises UserError."""
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise UserError(f"{text!a:.80} cannot be the name of a run or a task: use letters, digits, '.', '_' and '-'.")
    return text


def checked_digest(text: object) -> str:
    """A SHA-256 in hexadecimal. Raises UserError."""
    if not isinstance(text, str) or not DIGEST.fullmatch(text):
        raise UserError(f"{text!a:.80} is not a SHA-256: it must have 64 hexadecimal digits.")
    return text


def unit_parts(unit: object) -> tuple[str, str]:
    """The run and the first task of a unit, `<run>/<first task>`. Raises UserError."""
    run, slash, task = str(unit).partition("/")
    if not slash:
        raise UserError(f"{unit!a:.80} cannot be the name of a unit: it must be RUN/TASK.")
    return checked_part(run), checked_part(task)


@dataclass(frozen=True)
class Layout:
    """The paths below a host's root."""

    root: Path

    def unit(self, unit: str) -> Path:
        """The directory with the epochs of a unit on this host."""
        return Path(self.root, "units", *unit_parts(unit))

    def epoch(self, unit: str, epoch: int) -> Path:
        """The directory that an epoch of a unit trains in."""
        return self.unit(unit) / f"epoch-{epoch:d}"

    def shelved(self, unit: str) -> Path:
        """The directory with a unit's copy in the shelf."""
        return Path(self.root, "shelf", *unit_parts(unit))

    def of_run(self, run: str) -> list[Path]:
        """All directories of a run."""
        return [self.root / part / checked_part(run) for part in ("units", "shelf", "caches")]

    def caches(self, run: str, name: str) -> Path:
        """The directory that teacher caches are made in."""
        return Path(self.root, "caches", checked_part(run), checked_part(name))

    @property
    def sent(self) -> Path:
        """The directory with files that drivers have sent."""
        return self.root / "sent"
