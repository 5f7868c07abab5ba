"""A protected run's files: checkpoints and results as sealed archives, believed by the digests in the evidence log.

A checkpoint is written beside its place, then named by the log, then moved to its place. So what is in place is always
named by the log, and what a killed process has left is either completed or removed when the run is resumed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from wgpu_lora.data.row_counts import SKIPPED
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import sha256, sync_directory, write_bytes_atomic
from wgpu_lora.files.json_files import MAX_JSON_BYTES, read_bytes
from wgpu_lora.files.locks import remove_leftovers
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.evidence.model_signature import NAME as SIGNATURE
from wgpu_lora.protect.evidence.model_signature import sign_model
from wgpu_lora.protect.evidence.run_evidence import EvidenceLog
from wgpu_lora.protect.sealed import archive
from wgpu_lora.protect.sealed.age_streams import seal_bytes, unseal_bytes
from wgpu_lora.protect.sealed.keys import DataKey, SessionKeys
from wgpu_lora.protect.sealed.sealed_files import ARCHIVE
from wgpu_lora.train.run.checkpoint_store import CheckpointStore
from wgpu_lora.train.run.run_checkpoint import METADATA, NAME, STEPS

ADAPTER = f"adapter{ARCHIVE}"
SKIPPED_ROWS = f"{SKIPPED}.age"
MADE = ("checkpoint", "evaluated", "finished", "interrupted", "failed")  # stages whose lines name sealed files
_STEP = re.compile(f"{re.escape(STEPS)}/{NAME.pattern}{re.escape(ARCHIVE)}")
# Names of files that are not sealed, and are written by renaming a temporary file.
_WRITTEN = re.compile(r"job\.toml|evidence-[0-9]+\.json|release-[0-9]+\.jwt|(cleanup|statement)\.json|.+\.jsonl\.age")
UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp")


class SealedStorage(CheckpointStore):
    """The sealed files of one session.

    Args:
        recipients: to whom files are sealed. key: opens what earlier sessions have sealed. keys: of the session.
        initial: sealed adapters that the run may start from, already opened, by path.
        saved: called when a checkpoint is in place. timed: around all that sealing one takes.

    Attributes:
        adapter: after `finish`, SHA-256 of the files in the sealed adapter, by name; adapter_sha256: of itself.
        skipped: name and SHA-256 of the sealed rows that were skipped, if there are any.
    """

    def __init__(
        self,
        directory: Path,
        recipients: Sequence[str],
        key: DataKey,
        keys: SessionKeys,
        log: EvidenceLog,
        initial: Mapping[Path, Mapping[str, bytes]] | None = None,
        on_save: Callable[[], None] = lambda: None,
        timer: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._timer = timer
        self._run, self._recipients, self._key, self._keys, self._log = directory, recipients, key, keys, log
        self._on_save, self._opened = on_save, dict[Path, Mapping[str, bytes]]()
        self._initial = {path.resolve(): files for path, files in (initial or {}).items()}
        self._results: dict[str, bytes] = {}
        self._sealed_adapter: Path | None = None
        self.adapter: dict[str, str] = {}
        self.adapter_sha256: str | None = None
        self.skipped_rows = [
            subject for entry in log.entries for subject in entry.subjects if subject[0] == SKIPPED_ROWS
        ]
        # The newest digest of each sealed file, in the order of the log, but of checkpoints that were left behind.
        self._newest_digests: dict[str, str] = {}
        self._left_behind: set[str] = set()
        for entry in log.entries:
            if entry.stage in MADE:
                for name, digest in entry.subjects:
                    self._name_newest(name, digest)
            if entry.stage == "checkpoint" and type(step := entry.facts.get("step")) is int:
                for name in self._steps():
                    if _step(name) > step:  # the run has gone back
                        self._left_behind.add(name)
                        del self._newest_digests[name]

    # -- what a killed session has left --------------------------------------------------------------------------------

    def recover(self) -> list[str]:
        """Complete or remove what a killed session left unfinished; returns the names of these files."""
        names = []
        remove_leftovers(self._run, _WRITTEN)
        for directory in (self._run, self._run / STEPS):
            for path in sorted(directory.iterdir()) if directory.is_dir() else []:
                if not (match := UNFINISHED.fullmatch(path.name)) or not path.is_file():
                    continue
                names.append(path.relative_to(self._run).as_posix())
                final = path.with_name(match[1])
                if self._newest_digests.get(self._name(final)) == sha256(read_bytes(path)):
                    path.replace(final)
                else:
                    path.unlink()
        for name in sorted(self._left_behind):
            if (self._run / name).is_file():
                names.append(name)
                (self._run / name).unlink()
        return names

    def check_newest(self) -> None:
        """Raise UserError unless the newest checkpoint that the log names is there as it was sealed."""
        if not (steps := self._steps()):
            return
        path = self._run / steps[-1]
        if not path.is_file():
            raise UserError(
                f"{path} is missing, which the evidence log names as the newest checkpoint: restore it, or start a new "
                f"run with another {flag('output')}."
            )
        self._read_sealed(path)

    # -- directories ---------------------------------------------------------------------------------------------------

    def has(self, directory: Path) -> bool:
        return self._name(self.disk_path(directory)) in self._newest_digests and self.disk_path(directory).is_file()

    def directories(self, root: Path) -> list[Path]:
        paths = [path.with_name(path.name.removesuffix(ARCHIVE)) for path in root.glob(f"*{ARCHIVE}")]
        return [path for path in paths if self.has(path)]

    def file_contents(self, directory: Path) -> Mapping[str, bytes] | None:
        if contents := self._opened.get(directory) or self._initial.get(directory.resolve()):
            return contents
        return self._open(directory) if self.has(directory) else None

    def write_directory(self, final: Path, files: Mapping[str, bytes]) -> None:
        with self._timer():
            path = self.disk_path(final)
            path.parent.mkdir(parents=True, exist_ok=True)
            digest, temporary = self._seal(path, archive.pack(files))
            name, stage = self._name(path), "checkpoint" if final.parent.name == STEPS else "evaluated"
            self._log.append(stage, _facts(files), [(name, digest)])
            self._name_newest(name, digest)
            temporary.replace(path)
            sync_directory(path.parent)
            self._opened.clear()
            self._on_save()

    def remove(self, directory: Path) -> None:
        path = self.disk_path(directory)
        name, steps = self._name(path), self._steps()
        if steps and steps[-1] == name:  # the run has gone back to the one before it, or to its start
            newest = steps[-2:-1]
            facts = {"step": _step(newest[0]) if newest else 0, "removed": name}
            self._log.append(
                "checkpoint", facts, [(checkpoint, self._newest_digests[checkpoint]) for checkpoint in newest]
            )
        path.unlink()
        self._newest_digests.pop(name)

    # -- files ---------------------------------------------------------------------------------------------------------

    def is_file(self, path: Path) -> bool:
        contents = self.file_contents(path.parent)
        return path.is_file() if contents is None else path.name in contents

    def read(self, path: Path, max_bytes: int | None = MAX_JSON_BYTES) -> bytes:
        contents = self.file_contents(path.parent)
        if contents is None:
            return read_bytes(path, max_bytes)
        if path.name not in contents:
            raise UserError(f"{self.disk_path(path.parent)} holds no {path.name}: restore the file that was sealed.")
        return contents[path.name][: None if max_bytes is None else max_bytes + 1]

    def digest(self, path: Path) -> str:
        result = self._results.get(path.name) if path.parent == self._run else None
        return sha256(self.read(path, None) if result is None else result)

    def write(self, path: Path, data: bytes | None) -> None:
        if path.name == SKIPPED:
            if data is not None and not self.skipped_rows:  # else it is there, and named by the log
                sealed = seal_bytes(data, self._recipients)
                write_bytes_atomic(self._run / SKIPPED_ROWS, sealed)
                self.skipped_rows = [(SKIPPED_ROWS, sha256(sealed))]
        elif data is None:
            self._results.pop(path.name, None)
        else:
            self._results[path.name] = data

    def write_tokenizer(self, directory: Path, files: Mapping[str, bytes]) -> bool:
        if directory == self._run:
            self._results.update(files)
        return directory == self._run

    def finish(self, directory: Path) -> None:
        """Sign and seal the adapter, beside its place."""
        files = {**self._results, SIGNATURE: sign_model(self._results, self._keys.signing)}
        self.adapter_sha256, self._sealed_adapter = self._seal(self._run / ADAPTER, archive.pack(files))
        self.adapter = {name: sha256(data) for name, data in files.items()}

    def put_adapter(self) -> None:
        """Move the sealed adapter, which the log names by now, to its place."""
        if self._sealed_adapter is not None:
            self._sealed_adapter.replace(self._run / ADAPTER)
            sync_directory(self._run)
            self._sealed_adapter = None

    def disk_path(self, path: Path) -> Path:
        if path.name == SKIPPED:
            return self._run / SKIPPED_ROWS
        return path.with_name(path.name + ARCHIVE)

    def forget(self) -> None:
        """Drop what is open. Python's bytes cannot be overwritten."""
        for contents in (self._opened, self._initial, self._results):
            contents.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _seal(self, path: Path, data: bytes) -> tuple[str, Path]:
        """Seal data to a file beside its place; returns the digest and the file."""
        sealed = seal_bytes(data, self._recipients)
        digest = sha256(sealed)
        temporary = path.with_name(f".{path.name}.{digest[:16]}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(sealed)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)  # a full disk must have room for the record of the end
            raise
        return digest, temporary

    def _read_sealed(self, path: Path) -> bytes:
        """A sealed file as the log names it. Raises UserError if it is another."""
        data = read_bytes(path)
        if sha256(data) != self._newest_digests.get(self._name(path)):
            raise UserError(
                f"{path} is not the file that the evidence log names: an older or another one was put in its place, so "
                f"restore the newest, or start a new run with another {flag('output')}."
            )
        return data

    def _open(self, directory: Path) -> Mapping[str, bytes]:
        """The files of a checkpoint. Only the last one stays open, until another is written."""
        path = self.disk_path(directory)
        content = unseal_bytes(self._read_sealed(path), self._key, str(path))
        try:
            files = archive.unpack(content)
        finally:
            content[:] = bytes(len(content))
        self._opened = {directory: files}
        return files

    def _steps(self) -> list[str]:
        """The names of checkpoints, the newest last."""
        return [name for name in self._newest_digests if _STEP.fullmatch(name)]

    def _name_newest(self, name: str, digest: str) -> None:
        self._newest_digests.pop(name, None)
        self._left_behind.discard(name)
        self._newest_digests[name] = digest

    def _name(self, path: Path) -> str:
        return path.relative_to(self._run).as_posix() if path.is_relative_to(self._run) else str(path)


def _facts(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Step and losses of a checkpoint."""
    metadata = json.loads(files[METADATA])
    return {"step": metadata["step"], "loss": metadata["losses"]["train"], "eval_loss": metadata["losses"]["held_out"]}


def _step(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match
    return int(match[1])
