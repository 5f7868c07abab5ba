"""Result files of bricks, JSON lines with a header and then a line for each case of a brick, and their comparison."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import check_file, write_bytes_atomic
from wgpu_lora.files.json_files import parse_object, to_json
from wgpu_lora.files.locks import locked, unwritable
from wgpu_lora.files.paths import open_file
from wgpu_lora.files.typed_json import typed
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.run.training_log import environment
from wgpu_lora.train.track.run_log import git_state

NAME, VERSION = "wgpu-lora-bench", "1"
SCHEMA = f"{NAME}/{VERSION}"
HOLDS, NOISY, BROKEN = "holds", "noisy", "broken"  # verdicts of results
SAME, FASTER, SLOWER = "same", "faster", "slower"  # and of comparisons
NOISE = 2.0  # coefficients of variation by which a ratio must differ from 1
Header = dict[str, Any]  # see `header`


@dataclass
class Result:
    """A case of a brick.

    seconds, p20, p80: of an iteration. budget: the ceiling, the share of it that is required (None: none) and the share
    reached.
    reference: the largest normalised mean squared error and its kernel; None if there is no reference.
    cv_asked: the contract's bound of cv; None in older files. broken: violations of the contract.
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
    def impossible(self) -> list[str]:
        """Shares that are negative: what is added takes time, so the timings show nothing about it."""
        return [name for name, value in self.extra.items() if name.endswith("_share") and value < 0]

    @property
    def noisy(self) -> bool:
        """Whether the timings vary by more than the contract allows, or contradict each other."""
        return bool(self.impossible) or (self.cv_asked is not None and not self.cv < self.cv_asked)

    @property
    def verdict(self) -> str:
        return BROKEN if self.broken else NOISY if self.noisy else HOLDS

    def record(self) -> dict[str, Any]:
        """A line of a result file."""
        return {"kind": "brick", **asdict(self), "verdict": self.verdict}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Result:
        """The result of such a line. Raises ValueError if it is not one."""
        result = typed(cls, record)
        if min(result.seconds, result.p20, result.p80) <= 0:
            raise ValueError("a time is not positive")
        return result


def header(schema: str, device: Device, **facts: Any) -> Header:
    """The first line of a file: its schema and time, what was measured, and the device, driver, versions and commit."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": schema, "kind": "header", "time": now, **facts, "commit": commit(), **asdict(environment(device))}


def commit() -> dict[str, Any] | None:
    """The commit of the checkout; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    state = git_state(root) if (root / ".git").exists() else None
    return {"id": state.commit} if state else None


class Writer:
    """Writes a result file line by line, so that an interrupted run leaves what it has measured.

    An existing file is replaced by the first line. Inside `with`, no other process writes it. Raises UserError at once
    if the file cannot be written.

    Args:
        path: None for no file. Pipes and devices get the lines as they come.
        option: that gave the path, for messages.
    """

    def __init__(self, path: str | Path | None, option: str = "--json"):
        self._path, self._option, self._lines = Path(path) if path else None, option, ""
        self._lock = ExitStack()
        self._plain = not self._path or self._path.is_file() or not self._path.exists()

    def __enter__(self) -> Self:
        if self._path and self._plain:
            check_file(self._path, self._option)
            self._lock.enter_context(locked(self._path, self._option))
        else:
            self._write("", "a")
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def write(self, record: Mapping[str, Any]) -> None:
        line = to_json(record) + "\n"
        self._lines += line
        self._write(self._lines if self._plain else line, "a")

    def text(self, text: str) -> None:
        """Replaces the file by this text."""
        self._write(text, "w")

    def _write(self, text: str, mode: str) -> None:
        try:
            if self._path and self._plain:
                write_bytes_atomic(self._path, text.encode())
            elif self._path:
                with self._path.open(mode, encoding="utf-8") as file:
                    file.write(text)
        except OSError as error:
            raise unwritable(Path(self._path or ""), self._option, error) from None


def read_lines(path: str | Path, versions: Mapping[str, str]) -> tuple[str, Header, list[dict[str, Any]]]:
    """The name of a result file's schema, its header and its other lines.

    Args:
        versions: the version that is read, by schema.

    Raises:
        UserError: the file cannot be read, or has another schema or version.
    """
    cure = "give a file that 'wgpu-lora bench --json' wrote"
    try:
        with open_file(path) as file:
            texts = [line for line in file.read().splitlines() if line.strip()]
    except OSError as error:
        raise UserError(f"The result file {path} cannot be read: {error.strerror}.") from None
    if not texts:
        raise UserError(f"{path} is empty, as after an interrupted run: measure it again.")
    first, *lines = [parse_object(text, str(path), cure=cure) for text in texts]
    schema = first.get("schema")
    name, _, version = str(schema).partition("/")
    if name not in versions:
        expected = " or ".join(repr(f"{name}/{version}") for name, version in versions.items())
        has = "no schema" if schema is None else f"the schema {schema!r:.60}"
        raise UserError(f"{path} has {has}, expected {expected}: {cure}.")
    if version != versions[name]:
        raise UserError(
            f"{path} has version {version:.60} of its schema, but this wgpu-lora reads {versions[name]}: measure it "
            f"again."
        )
    return name, first, lines


def damaged(path: str | Path, error: ValueError) -> UserError:
    return UserError(f"{path} is damaged ({error}): measure it again.")


def read_results(path: str | Path) -> tuple[Header, list[Result]]:
    """A result file of bricks. Raises UserError if it cannot be read, or has another schema or version."""
    _, first, lines = read_lines(path, {NAME: VERSION})
    try:
        result = {name: typed(dict[str, Any], first.get(name), f"'{name}'") for name in ("device", "options")}
        return first | result, [Result.of(line) for line in lines]
    except ValueError as error:
        raise damaged(path, error) from None


# -- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A case of a brick in two files."""

    old: Result
    new: Result

    @property
    def ratio(self) -> float:
        return self.new.seconds / self.old.seconds

    @property
    def verdict(self) -> str:
        """Faster or slower only if the difference exceeds the noise."""
        old, new = self.old, self.new
        overlap = old.p20 <= new.p80 and new.p20 <= old.p80
        if overlap or abs(self.ratio - 1) < NOISE * max(old.cv, new.cv):
            return NOISY if old.noisy or new.noisy else SAME  # noise may hide a difference
        return FASTER if self.ratio < 1 else SLOWER


def compare(old: list[Result], new: list[Result]) -> list[Comparison]:
    """Compare every case that both have, in the new file's order."""
    before = {r.label: r for r in old}
    return [Comparison(before[r.label], r) for r in new if r.label in before]


def warnings(old: tuple[Header, list[Result]], new: tuple[Header, list[Result]]) -> list[str]:
    """Differences that make two files hard to compare: device, driver, options, and cases that only one of them has."""
    (before, old_results), (now, new_results) = (_facts(old[0]), old[1]), (_facts(new[0]), new[1])
    result = [
        f"{name.replace('_', ' ')}: {before.get(name)} before, {now.get(name)} now"
        for name in before | now
        if before.get(name) != now.get(name)
    ]
    labels = {"old": {r.label for r in old_results}, "new": {r.label for r in new_results}}
    for where, other in (("old", "new"), ("new", "old")):
        if extra_labels := labels[where] - labels[other]:
            result.append(f"only in the {where} file: {', '.join(sorted(extra_labels))}")
    return result


def _facts(header: Header) -> dict[str, Any]:
    device = {key: header["device"].get(key) for key in ("name", "driver", "backend", "subgroup_size")}
    return device | header["options"]
