"""Running a chain: each stage that has not run, or whose inputs or outputs are not those of its last run."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import ROOT, asset_dir
from wgpu_lora.files.atomic import file_digest, new_directory, write_bytes_atomic
from wgpu_lora.files.json_files import read_json
from wgpu_lora.files.locks import is_directory, remove_leftovers
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.text import join_words
from wgpu_lora.train.chain.chain_file import Chain, ChainStage, stages_from
from wgpu_lora.train.chain.stage import ChainWatch, Watch
from wgpu_lora.train.job import locked

DIGESTS = "digests.json"


@dataclass(frozen=True)
class StageStatus:
    """Whether a stage has to run: `why`, None if it is up to date."""

    link: ChainStage
    why: str | None
    seconds: float | None


def stage_statuses(chain: Chain, start: str | None = None) -> list[StageStatus]:
    """The state of every stage. Nothing is written, and no model is downloaded."""
    state, digests = State.read(chain.output), Digests(chain.output / DIGESTS)
    forced = _forced(chain, start)
    result: list[StageStatus] = []
    for link in chain.links:
        stage_names = [status.link.name for status in result if status.why and status.link.name in link.needs]
        stage_result = state.stages.get(link.name)
        if link.name in forced:
            why: str | None = "asked for"
        elif stage_names:
            why = f"'{stage_names[0]}' runs before it"
        elif start is not None:
            why = _not_whole(link, stage_result, digests)
        elif stage_result is None:
            why = "it has not run yet"
        else:
            why = _why(link, stage_result, digests, download=False)
        result.append(StageStatus(link, why, stage_result.seconds if stage_result else None))
    return result


def run(chain: Chain, watch: ChainWatch, start: str | None = None) -> None:
    """Run what has to run.

    Args:
        start: run this stage and all after it whatever their inputs, and none before it, whose outputs must be whole.

    Raises:
        UserError: a stage cannot run, or another process is running the chain.
        EndedEarlyError: a stage was interrupted, or failed.
    """
    forced = _forced(chain, start)
    with locked(chain.output):
        state, digests = State.read(chain.output), Digests(chain.output / DIGESTS)
        names = (STATE, DIGESTS, *(link.name for link in chain.links))
        remove_leftovers(chain.output, re.compile("|".join(map(re.escape, names))))
        for number, link in enumerate(chain.links, 1):
            stage_result = state.stages.get(link.name)
            if start is not None and link.name not in forced:
                wrong = _not_whole(link, stage_result, digests)
                if wrong:
                    raise UserError(f"The stage '{link.name}' comes before '{start}', but {wrong}: run it first.")
                why = None
            else:
                why = "asked for" if link.name in forced else _why(link, stage_result, digests)
            if why is None:
                watch.skipped(number, link.name, link.kind)
                continue
            durations = [
                state.stages[remaining_link.name].seconds
                for remaining_link in chain.links[number - 1 :]
                if remaining_link.name in state.stages
            ]
            remaining = sum(durations) if len(durations) == len(chain.links) - number + 1 else None
            watch.stage(number, link.name, link.kind, why, remaining)
            begin = time.monotonic()
            _run(link, state, digests, watch)
            watch.finished(link.name, link.output, time.monotonic() - begin)


def _forced(chain: Chain, start: str | None) -> set[str]:
    return set() if start is None else set(stages_from(chain.links, start))


def _why(link: ChainStage, stage_result: StageResult | None, digests: Digests, download: bool = True) -> str | None:
    """Why a stage has to run; None if it is up to date."""
    if stage_result is None:
        return "it has not run yet"
    if stage_result.outputs is None:
        return "it was interrupted"
    return stage_result.difference(inputs_of(link, digests.of_all(link.stage.files(download)))) or _not_whole(
        link, stage_result, digests
    )


def _not_whole(link: ChainStage, stage_result: StageResult | None, digests: Digests) -> str | None:
    """The damage of the outputs, as text; None if they are complete."""
    if stage_result is None or stage_result.outputs is None:
        return "it has not finished"
    for name, digest in stage_result.outputs.items():
        result = digests.of(link.output / name)
        if result != digest:
            return f"{name} {'is missing' if result == MISSING else 'has changed'}"
    return None


def _run(link: ChainStage, state: State, digests: Digests, watch: Watch) -> None:
    stage, stage_result = link.stage, state.stages.get(link.name)
    now = inputs_of(link, digests.of_all(stage.files(True)))
    if link.output.exists() and stage_result is None:
        raise UserError(f"{link.output} exists, but not from this chain: choose another output, or remove it.")
    unfinished = stage_result if stage_result and stage_result.outputs is None else None
    continues = stage.resumes and unfinished is not None and not unfinished.difference(now)
    if not continues and stage.resumes:
        _keep_old_output(link.output)
    now.seconds = stage_result.seconds if continues and stage_result else 0.0
    state.stages[link.name] = now
    state.write()
    begin = time.monotonic()
    try:
        if stage.resumes:
            stage.run(link.output, watch, continues)
        else:
            with new_directory(link.output) as directory:
                stage.run(directory, watch, False)
    finally:
        now.seconds += time.monotonic() - begin
        state.write()
    now.outputs = {path.relative_to(link.output).as_posix(): digests.of(path) for path in stage.outputs(link.output)}
    absent = [name for name, digest in now.outputs.items() if digest == MISSING]
    if absent:
        raise UserError(f"The stage '{link.name}' has not written {absent[0]}: run the chain again.")
    digests.save()
    state.write()


def _keep_old_output(output: Path) -> None:
    """Rename what an earlier run has left: it took long, and may be wanted."""
    number, renamed = 1, output.with_name(f"{output.name}-1")
    while renamed.exists():
        number += 1
        renamed = output.with_name(f"{output.name}-{number}")
    if output.exists():
        output.rename(renamed)


STATE, SCHEMA = "chain.json", 1


@dataclass
class StageResult:
    """A stage that was begun.

    options, code: digests. files: digests of what it read, by path. outputs: digests by path in its directory, None
    until it has finished. seconds: of all its runs.
    """

    options: str
    code: str
    files: dict[str, str]
    outputs: dict[str, str] | None = None
    seconds: float = 0.0

    def difference(self, now: StageResult) -> str | None:
        """Why it has to run again with other inputs, as text; None if they are the same."""
        if self.options != now.options:
            return "its options have changed"
        if self.files != now.files:
            files = {**self.files, **now.files}
            changed_files = [Path(path).name for path in files if self.files.get(path) != now.files.get(path)]
            return f"{join_words(changed_files[:2], len(changed_files[2:]))} changed"
        return "wgpu-lora has changed" if self.code != now.code else None


@dataclass
class State:
    path: Path
    stages: dict[str, StageResult] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> State:
        """The state of a chain; empty before its first run. Raises UserError if it is damaged."""
        path = directory / STATE
        if not path.exists():
            return cls(path)
        record = read_json(path)
        try:
            if record.get("schema") != SCHEMA:
                raise ValueError(f"schema {record.get('schema')!r:.20}")
            return cls(path, typed(dict[str, StageResult], record.get("stages"), "stages"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): remove it, and choose another output directory.") from None

    def write(self) -> None:
        record = {"schema": SCHEMA, "stages": {name: asdict(result) for name, result in self.stages.items()}}
        write_bytes_atomic(self.path, (json.dumps(record, indent=1) + "\n").encode())


def inputs_of(link: ChainStage, files: dict[str, str]) -> StageResult:
    return StageResult(digest_of([link.kind, link.stage.fingerprint()]), code_digest(), files)


CODE = (".py", ".wgsl", ".j2")
MISSING = "missing"


@cache
def code_digest() -> str:
    """SHA-256 of the package's code and kernels."""
    digest = hashlib.sha256()
    for folder in (ROOT / "wgpu_lora", Path(str(asset_dir("shaders")))):
        for path in sorted(folder.rglob("*")):
            if path.suffix in CODE:
                digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


class Digests:
    """SHA-256 of files, kept in a file, so that a large one is read again only if its size, times or number changed."""

    def __init__(self, path: Path):
        self._path = path
        self._entries: dict[str, list[Any]] = {}
        with suppress(OSError, ValueError):
            entries = json.loads(path.read_bytes())
            self._entries = entries if isinstance(entries, dict) else {}

    def of(self, path: Path) -> str:
        """The digest of a file; "missing" if there is none."""
        try:
            state = path.stat()
            mark = [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]  # a time may be set back
            key = str(path.absolute())
            entry = self._entries.get(key)
            if not isinstance(entry, list) or entry[:-1] != mark:
                entry = self._entries[key] = [*mark, file_digest(path)]
            return str(entry[-1])
        except OSError:
            return MISSING

    def of_all(self, paths: Iterable[Path]) -> dict[str, str]:
        """Digests of files, and of the files in directories, by path."""
        return {str(file): self.of(file) for path in paths for file in _within(path)}

    def save(self) -> None:
        write_bytes_atomic(self._path, (json.dumps(self._entries) + "\n").encode())


def _within(path: Path) -> Iterator[Path]:
    if is_directory(path):
        yield from (file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith("."))
    else:
        yield path
