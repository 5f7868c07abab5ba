"""A checkpoint directory: what is trained (an adapter in PEFT's format), the optimizer's state, and the run's state."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from safetensors import SafetensorError
from safetensors.numpy import load, save

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.files.json_files import parse_object, read_json, to_json
from wgpu_lora.files.locks import remove_leftovers
from wgpu_lora.formats.file_digests import TEMPLATE, TOKENIZER
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.optimizers import name_of
from wgpu_lora.train.run.checkpoint_store import PLAIN_FILES, CheckpointStore
from wgpu_lora.train.run.run_state import SCHEMA, STATE, NewerSchemaError, RunState, read_state, schema_of
from wgpu_lora.train.session.session import Session

OPTIMIZER, METADATA = "optimizer.safetensors", "metadata.json"
FILES = (OPTIMIZER, METADATA, STATE)  # besides those of what is trained
PHASE = "completions.json"  # of the phase that a step is amid, if the objective samples them
RESERVE = ".reserve.tmp"  # train/run/disk_space.py
STEPS, LAST, NEXT = "checkpoints", "last", ".next"  # checkpoints of a single run, and of a pipeline's slot
ORIGIN = ".run.json"  # the id of a run, and the digest of its options
BEST, EPOCH = "best", "epoch-{}"
NAME = re.compile(r"step-([0-9]{1,15})")
EPOCH_NAME = re.compile(r"epoch-([0-9]{1,15})")
# Names that a run or a pipeline writes by renaming a hidden temporary file.
_RUN = (
    rf"{re.escape(WEIGHTS)}|{re.escape(CONFIG)}|constants\.safetensors|(log|completions)\.jsonl|(run|state|pipeline|member|tracking)\.json"
    rf"|{re.escape(ORIGIN)}|{LAST}|(last|best)-f(16|32)|\{NEXT}|{BEST}|epoch-[0-9]+"
)
WRITTEN = re.compile(rf"{_RUN}|README\.md|{TOKENIZER.pattern}|{TEMPLATE.pattern}")


def checkpoint_files(
    session: Session,
    slot: int,
    trainable: Trainable,
    state: RunState,
    facts: dict[str, Any],
    extra_files: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """The files of a checkpoint: what a slot trains, optimizer and run state, metadata and manifest.

    facts: `identity` (see AdapterRun) and `metadata`. extra_files: further files by name.
    """
    files = trainable.checkpoint_files(session, slot, session.model.tokenizer_files) | dict(extra_files or {})
    metadata = {"optim": name_of(session.optimizer.rule)}
    files[OPTIMIZER] = save(session.optimizer.state.read(session.device, slot), metadata)
    files[METADATA] = (to_json(facts["metadata"], indent=1) + "\n").encode()
    files[STATE] = to_json({"schema": SCHEMA, "state": asdict(state), "identity": facts["identity"]}, indent=1).encode()
    files[MANIFEST] = manifest_of(files)
    return files


def remove_old(root: Path, keep: int, storage: CheckpointStore = PLAIN_FILES) -> None:
    """Remove all checkpoints in `list_checkpoints` but the newest `keep`."""
    for _, old in list_checkpoints(root, storage=storage)[:-keep]:
        storage.remove(old)


def remove_old_epochs(run: Path, keep: int, storage: CheckpointStore = PLAIN_FILES) -> None:
    """Remove all of a run's epoch-N but the newest `keep`."""
    for _, old in list_checkpoints(run, EPOCH_NAME, storage)[:-keep]:
        storage.remove(old)


def list_checkpoints(
    root: Path, name: re.Pattern[str] = NAME, storage: CheckpointStore = PLAIN_FILES
) -> list[tuple[int, Path]]:
    """Checkpoints by the number in their names, ascending; incomplete ones have other names."""
    return sorted((int(m[1]), p) for p in storage.directories(root) if (m := name.fullmatch(p.name)))


def latest_checkpoint(run: Path, storage: CheckpointStore = PLAIN_FILES) -> Path | None:
    """The newest complete state of a run, which it would be resumed from: a pipeline's `last`, or the one of the most
    steps among the numbered ones and best/. A protected run has numbered ones only, which its evidence names."""
    if storage.has(run / LAST):
        return run / LAST
    steps, best = list_checkpoints(run / STEPS, storage=storage), run / BEST
    step, newest = steps[-1] if steps else (-1, None)
    if storage is not PLAIN_FILES or not storage.has(best):
        return newest
    try:
        return best if read_state(best)[0].step > step else newest
    except (UserError, ValueError):
        return newest or best  # whose fault `check` names


def remove_run_leftovers(run: Path) -> None:
    """Remove incomplete files of a killed process from a run's directory, which must be locked."""
    remove_leftovers(run, WRITTEN)
    remove_leftovers(run / STEPS, NAME)
    (run / RESERVE).unlink(missing_ok=True)


def remove_run(run: Path) -> None:
    """Remove the states and the results of a run or a pipeline from its directory, which must be locked.

    Its card and tokenizer too, unless they belong to a model in that directory.
    """
    pattern = _RUN if (run / "config.json").exists() else WRITTEN
    for root, names in ((run / STEPS, NAME), (run, pattern)):
        for path in list(root.iterdir()) if root.is_dir() else ():
            if re.fullmatch(names, path.name):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def trained_files(directory: Path, storage: CheckpointStore = PLAIN_FILES) -> tuple[str, ...]:
    """The files of trained parameters that a directory should have, judged by those that it has."""
    return CONSTANT_FILES if storage.is_file(directory / CONSTANT_FILES[0]) else ADAPTER_FILES


def checkpoint_damage(directory: Path, storage: CheckpointStore = PLAIN_FILES) -> str | None:
    """The damage of a checkpoint, as text; None if it is intact.

    Raises:
        NewerSchemaError: it is from a newer version.
    """
    wrong = damage(directory, (*trained_files(directory, storage), *FILES), storage)
    if wrong:
        return wrong
    try:
        step = read_state(directory, storage)[0].step
    except NewerSchemaError:
        raise
    except (UserError, ValueError) as error:
        return error.problem if isinstance(error, UserError) else str(error)
    match = NAME.fullmatch(directory.name)
    return f"{STATE} says step {step}" if match and int(match[1]) != step else None


def damaged_checkpoint_error(directory: Path, wrong: str, storage: CheckpointStore = PLAIN_FILES) -> UserError:
    """The error for a damaged checkpoint, which names the newest intact one of the run."""
    run = run_of(directory)
    text = f"The checkpoint {directory} is damaged: {wrong}"
    paths = [path for _, path in list_checkpoints(run / STEPS, storage=storage)] + results_of(run, storage)
    intact = {
        path: read_state(path, storage)[0].step
        for path in paths
        if path != directory and not checkpoint_damage(path, storage)
    }
    single = storage is PLAIN_FILES and directory.name != LAST
    states = [path for path in intact if path.parent.name == STEPS or (single and path.name == BEST)]
    if intact:
        latest = max(states or intact, key=lambda path: intact[path])
        if states:
            return UserError(f"{text}; remove that directory to resume from {latest.name}, which is intact.")
        return UserError(
            f"{text}; start a new run from the adapter in {latest}, which is intact, with {flag('init_adapter')}."
        )
    return UserError(f"{text}; no other is intact, so start again in another directory.")


def results_of(run: Path, storage: CheckpointStore = PLAIN_FILES) -> list[Path]:
    """The adapters that a run keeps beside its checkpoints: epoch-N and best."""
    return [path for path in storage.directories(run) if EPOCH_NAME.fullmatch(path.name) or path.name == BEST]


def check(directory: Path, storage: CheckpointStore = PLAIN_FILES) -> tuple[RunState, dict[str, Any]]:
    """The state and the identity of a checkpoint. Raises UserError if it is damaged."""
    wrong = checkpoint_damage(directory, storage)
    if wrong:
        raise damaged_checkpoint_error(directory, wrong, storage)
    run = run_of(directory)
    origin = origin_of(run)
    if origin and storage is PLAIN_FILES and read_metadata(directory).get("run") != origin:
        raise UserError(
            f"The checkpoint {directory} is of another run than {run}: remove it to continue this run from its own, or "
            f"resume the other one in its directory."
        )
    return read_state(directory, storage)


def run_of(directory: Path) -> Path:
    """The directory of the run that has a checkpoint in `directory`."""
    return directory.parent.parent if directory.parent.name == STEPS else directory.parent


def origin_of(run: Path) -> dict[str, Any] | None:
    """The identity with which a run began, which its checkpoints contain too; None for runs of earlier versions."""
    return read_json(run / ORIGIN) if (run / ORIGIN).is_file() else None


def read_metadata(directory: Path, storage: CheckpointStore = PLAIN_FILES) -> dict[str, Any]:
    """The contents of an intact checkpoint's metadata.json, such as the run's options."""
    facts = parse_object(storage.read(directory / METADATA), str(directory / METADATA))
    try:
        schema_of(facts, directory / METADATA)
    except ValueError as error:
        raise damaged_checkpoint_error(directory, str(error), storage) from None
    return facts


def metadata_of(data: bytes) -> dict[str, str]:
    """The metadata in the header of a safetensors file, which has been read."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__") or {}


def current_state_name(name: str, modules: Collection[str]) -> str:
    """Convert a state's name of version 0.1.0, such as '0.q_proj.A.first_moment', to the module's path."""
    layer, _, remainder = name.partition(".")
    module, _, state = remainder.partition(".")
    result = [m for m in modules if f".{layer}." in m and m.endswith(f".{module}")] if layer.isdecimal() else []
    return f"{result[0]}.{state}" if len(result) == 1 else name


def restore(
    directory: Path, session: Session, slot: int, trainable: Trainable, storage: CheckpointStore = PLAIN_FILES
) -> None:
    """Load what a checkpoint has trained and its optimizer's state onto the device.

    Raises:
        UserError: it is damaged, or from another run.
    """
    check(directory, storage)
    try:
        data = storage.read(directory / OPTIMIZER, None)
        state, optim = load(data), metadata_of(data).get("optim")  # None in older checkpoints
    except (OSError, SafetensorError) as error:
        raise damaged_checkpoint_error(directory, str(error), storage) from error
    except KeyError as error:  # a type that NumPy does not have
        raise damaged_checkpoint_error(
            directory, f"{OPTIMIZER} does not match this run: it has values of type {error}", storage
        ) from None
    state = {current_state_name(name, session.model.config.lora_modules): values for name, values in state.items()}
    wrong, optimizer = session.optimizer.state.fault(slot, state), name_of(session.optimizer.rule)
    if optim not in (None, optimizer):  # though it may be in the same form, as those of lion and muon
        wrong = f"it holds the state of {optim!r:.40}, not of {optimizer!r}"
    if wrong:
        raise damaged_checkpoint_error(directory, f"{OPTIMIZER} does not match this run: {wrong}", storage)
    try:
        trainable.load_checkpoint(directory, session, slot, storage.file_contents(directory))
    except CheckpointError as error:
        raise damaged_checkpoint_error(directory, str(error), storage) from error
    session.optimizer.state.write(session.device, slot, state)


MANIFEST = "manifest.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def manifest_of(files: Mapping[str, bytes]) -> bytes:
    """The manifest of files by name."""
    return _text({name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)}).encode()


def write_manifest(directory: Path) -> None:
    """Write the manifest of all files in a directory."""
    files = {path.name: file_digest(path) for path in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(_text(files))


def change_options(directory: Path, options: Mapping[str, Any]) -> None:
    """Record other values of options in a checkpoint, for a run that goes on from it with them."""
    metadata, state = read_json(directory / METADATA), read_json(directory / STATE)
    for recorded in (metadata["options"], state["identity"]["options"]):
        recorded.update(options)
    (directory / METADATA).write_text(to_json(metadata, indent=1) + "\n")
    (directory / STATE).write_text(to_json(state, indent=1))
    (directory / MANIFEST).unlink()
    write_manifest(directory)


def _text(files: dict[str, str]) -> str:
    return to_json({"sha256": files}, indent=1) + "\n"


def damage(directory: Path, required_files: tuple[str, ...], storage: CheckpointStore = PLAIN_FILES) -> str | None:
    """The damage of a directory that has a manifest, as text; None if it is intact.

    Files that the manifest does not name are ignored, since operating systems add some.

    Args:
        required_files: those that the manifest must name.
    """
    manifest = directory / MANIFEST
    if not storage.is_file(manifest):
        return f"{MANIFEST} is missing"
    try:
        data = storage.read(manifest)
        files = parse_object(data, str(manifest)).get("sha256")
        as_written = isinstance(files, dict) and data == _text(files).encode()
    except UserError as error:
        return f"{MANIFEST} cannot be read ({error.problem})"
    if not isinstance(files, dict) or not as_written or not set(required_files) <= set(files):
        return f"{MANIFEST} is not valid"
    for name, digest in files.items():
        if Path(name).name != name or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return f"{MANIFEST} is not valid"
        try:
            if not storage.is_file(directory / name):
                return f"{name} is missing"
            if storage.digest(directory / name) != digest:
                return f"{name} has changed (its SHA-256 differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


# The files that a checkpoint has of what is trained, by the first of them.
ADAPTER_FILES = (WEIGHTS, CONFIG)
CONSTANT_FILES = ("constants.safetensors",)


class CheckpointError(ValueError):
    """The damage of a checkpoint's files, as part of a sentence."""


class Trainable(Protocol):
    """The trained parameters of a slot: their initial values, and the files that they are saved in."""

    files: ClassVar[tuple[str, ...]]  # of a checkpoint and of the finished run; the first has the parameters

    def summary(self) -> tuple[str, str]:
        """A label and a text, for the summary before a run: ('adapter', 'rank 16 on all-linear')."""

    def place_initial(self, session: Session, slot: int) -> None:
        """Uploads the parameters that the run starts from. The base's weights are loaded."""

    def load_initial(
        self, session: Session, slot: int, resumed_from: Path | None, storage: CheckpointStore = PLAIN_FILES
    ) -> None:
        """`place_initial` of a run that may have been resumed."""

    def load_checkpoint(
        self, directory: Path, session: Session, slot: int, contents: Mapping[str, bytes] | None = None
    ) -> None:
        """Uploads those of an intact checkpoint. Raises CheckpointError if they are not those of this run.

        contents: of its files by name, if they are not plain ones.
        """

    def checkpoint_files(self, session: Session, slot: int, companions: Mapping[str, bytes]) -> dict[str, bytes]:
        """The contents of `files`. companions: of the files that may be beside them."""

    def last_steps(self, total: int) -> int:
        """The steps at the end of a run of `total` that differ from those before them; 0 if none do."""

    def before_step(self, session: Session, ending: bool) -> None:
        """Called before passes. ending: whether they belong to the last steps."""

    def write(self, session: Session, slot: int, directory: Path) -> None:
        """Writes to a run's directory what its result has besides `files`, which are there already."""
