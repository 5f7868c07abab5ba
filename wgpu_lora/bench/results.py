"""What a run of bricks leaves: a header, then a line for each brick's case, as JSON lines."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.output import environment

NAME, VERSION = "wgpu-lora-bench", "1"
SCHEMA = f"{NAME}/{VERSION}"
HOLDS, NOISY, BROKEN = "holds", "noisy", "broken"
Header = dict[str, Any]  # what `header` makes


@dataclass
class Result:
    """One case of one brick.

    seconds, p20, p80: of an iteration. floor_seconds: the larger of operations over the FMA ceiling and bytes over the
    streaming bandwidth. budget: which ceiling, the share asked for (None: nothing) and the share reached.
    reference: the worst normalised mean squared error and whose it was; None where there is no reference.
    cv_asked: what the contract asks cv to be under; None in files from before it was noted.
    broken: what of the contract does not hold.
    """

    brick: str
    case: str
    options: dict[str, Any]
    clock: str
    seconds: float
    p20: float
    p80: float
    cv: float
    iterations: int
    operations: float
    bytes: float
    gflops: float
    gbs: float
    floor_seconds: float
    share_of_floor: float
    budget: dict[str, Any]
    reference: dict[str, Any] | None
    seed: int
    extra: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    cv_asked: float | None = None

    @property
    def label(self) -> str:
        return f"{self.brick} ({self.case})" if self.case else self.brick

    @property
    def noisy(self) -> bool:
        """Whether the timings vary by more than the contract's own bound, so that nothing of time is shown by them."""
        return self.cv_asked is not None and not self.cv < self.cv_asked

    @property
    def verdict(self) -> str:
        return BROKEN if self.broken else NOISY if self.noisy else HOLDS

    def record(self) -> dict[str, Any]:
        """As a line of a result file."""
        return {"kind": "brick", **asdict(self), "verdict": self.verdict}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Result:
        """From such a line. Raises TypeError where it is none."""
        return cls(**{name: value for name, value in record.items() if name not in ("kind", "verdict")})


def header(schema: str, device: Device, **more: Any) -> Header:
    """What a file says first: its form, and what was measured on what: device, driver, versions and commit."""
    return {"schema": schema, "kind": "header", **more, "commit": commit(), **asdict(environment(device))}


def commit() -> dict[str, Any] | None:
    """The checkout's commit and whether tracked files differ from it; None outside of a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"id": found.removesuffix("-dirty"), "modified": found.endswith("-dirty")}


class Writer:
    """Writes a result file line by line, each flushed, so that a run that is interrupted leaves what it measured.

    path: None for no file.
    """

    def __init__(self, path: str | Path | None):
        self._path = path
        self._add("", "w")

    def write(self, record: Mapping[str, Any]) -> None:
        self._add(json.dumps(record) + "\n", "a")

    def _add(self, text: str, mode: str) -> None:
        try:
            if self._path is not None:
                with Path(self._path).open(mode, encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            raise UserError(f"The result file {self._path} cannot be written: {error.strerror}.") from None


def read_results(path: str | Path) -> tuple[Header, list[Result]]:
    """A result file. Raises UserError where it cannot be read, or is of another schema or version."""
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"The result file {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise UserError(f"{path} is not a file of JSON lines: give one that 'wgpu-lora bench --json' wrote.") from None
    if not lines:
        raise UserError(f"{path} is empty, as a run that was interrupted leaves it: measure it again.")
    first = lines[0] if isinstance(lines[0], dict) else {}
    schema = first.get("schema")
    name, _, version = str(schema).partition("/")
    if name != NAME:
        said = f"is of the schema {schema!r}" if schema else "names no schema in its first line"
        raise UserError(f"{path} {said}, expected {SCHEMA!r}: give a file that 'wgpu-lora bench --json' wrote.")
    if version != VERSION:
        raise UserError(
            f"{path} is of version {version} of its schema, but this wgpu-lora reads {VERSION}: measure it again."
        )
    try:
        results = [Result.of(line) for line in lines[1:]]
        whole = {"device", "options"} <= first.keys() and all(_measured(r) for r in results)
    except (TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(
            f"{path} is damaged: a line lacks a field, or has one that no measurement gives. Measure it again."
        )
    return first, results


def _measured(result: Result) -> bool:
    spread = math.isfinite(result.cv) and math.isfinite(result.cv_asked or 0)
    return spread and all(math.isfinite(s) and s > 0 for s in (result.seconds, result.p20, result.p80))
