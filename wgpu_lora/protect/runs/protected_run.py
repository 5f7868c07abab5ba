"""Protected fine-tuning: a run whose data, checkpoints and results are in the clear in memory only."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import Timeout

from wgpu_lora.bounded import read_bytes
from wgpu_lora.data.memory_rows import SealedRows
from wgpu_lora.data.row_counts import SKIPPED, skipped_rows
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, EventForwarder, Events
from wgpu_lora.gpu.buffer_wipe import Wiper
from wgpu_lora.locks import check_output, lock_file
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.spelling import flag
from wgpu_lora.protect.evidence import anchors
from wgpu_lora.protect.evidence.run_statement import RunFacts, write_statement
from wgpu_lora.protect.hygiene.cleanup import Cleanup, device_wipe_facts, overwrite
from wgpu_lora.protect.hygiene.memory_protection import harden, swap_risks
from wgpu_lora.protect.runs.protected_job import ProtectedJob, model_facts
from wgpu_lora.protect.runs.protected_session import Say, Session, SessionStart, opened_log
from wgpu_lora.protect.runs.sealed_storage import ADAPTER, SealedStorage
from wgpu_lora.protect.sealed import archive
from wgpu_lora.protect.sealed.age_streams import TamperedError, unseal_bytes
from wgpu_lora.protect.sealed.keys import SessionKeys
from wgpu_lora.signals import on_end_signal
from wgpu_lora.train.finetune import FinetuneJob, prepare_job
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.resume import check_output_free
from wgpu_lora.words import count_noun

LOCK = ".session.lock"
Watch = Callable[[FinetuneJob], AbstractContextManager[Events]]


@dataclass(frozen=True)
class ProtectedRecord:
    """The result of a protected run.

    Attributes:
        run: the contents of run.json. directory: of the run. adapter: the sealed adapter.
        cleanup: as `Cleanup.run` gives it. statement: the signed statement; None unless the run finished.
        spent: (begin, seconds) of each sealing, log line and report while it trained, by `time.perf_counter`.
    """

    run: RunRecord
    directory: Path
    adapter: Path
    cleanup: dict[str, Any]
    statement: Path | None
    spent: list[tuple[float, float]]


def finetune_protected(
    job: ProtectedJob,
    *,
    resume: bool = False,
    nonce: str | None = None,
    model: LoadedModel | None = None,
    watch: Watch | None = None,
    say: Say = lambda label, text: None,
    **options: Any,
) -> ProtectedRecord:
    """Train an adapter on sealed data: attest, open the data in memory, train, seal, and overwrite what was in memory.

    Args:
        job: as `job.read` reads it.
        resume: go on with the run in the job's directory.
        nonce: the data owner's, for releases by files.
        model: an opened model to train on, instead of the one in the job.
        watch: gives the listener of a job that is ready to be trained.
        say: told what happens before and after training, as a label and a text.
        options: of the training, over those of the job.

    Raises:
        UserError: the job cannot be run, the broker refuses, or a sealed file is not what it must be. Nothing of the
            data is on the disk in the clear, whatever is raised, and all that can be overwritten has been.
    """
    job = job.with_options(options)
    with ExitStack() as stack:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # it would end the process without a cleanup
            stack.enter_context(on_end_signal(_interrupt))
        host = harden()
        stack.callback(host.restore)
        for sentence in host.facts["not_protected"]:
            say("note", sentence)
        stack.enter_context(_locked(job.output))
        anchors.prepare()
        keys = SessionKeys.generate()
        stack.callback(keys.wipe)
        log = opened_log(job, keys, resume)
        if log is None:
            check_output_free(job.output)
        model = model or open_model(job.arguments.model or "demo", job.arguments.device, job.arguments.base_dtype)
        wiper = stack.enter_context(Wiper(model.device))
        beginning = SessionStart(job, keys, host, log, say)
        ending = SessionEnd(beginning, wiper, model)
        try:
            session = beginning.attest(model, nonce)
            ending.session = session
            ending.record = _train(session, model, ending, watch)
        except BaseException as error:
            ending.error = error
            raise
        finally:
            with on_end_signal(lambda number: None):  # the cleanup is not interrupted
                ending.run()
        assert ending.record is not None
        facts, spent = ending.cleanup_facts, ending.session.spent if ending.session else []
        return ProtectedRecord(ending.record, job.output, job.output / ADAPTER, facts, ending.statement, spent)


def _train(session: Session, model: LoadedModel, ending: SessionEnd, watch: Watch | None) -> RunRecord:
    job, log, release, cleanup = session.job, session.log, session.release, ending.cleanup
    session.check_expired()
    sources, initial = _opened(session, cleanup)
    storage = SealedStorage(
        job.output, job.recipients, release.key, session.keys, log, initial, session.report, session.timed
    )
    ending.storage = storage
    left = storage.recover()
    if left or log.cut or log.after_a_killed_session:
        unfinished = [*left, *(["a part of a line of the log"] if log.cut else [])]
        session.say(
            "leftovers",
            "the session before was killed and wiped nothing; all that it left is sealed"
            + (f", unfinished were {', '.join(unfinished)}" if unfinished else ""),
        )
        log.append("leftovers", {"files": left, "log_bytes": log.cut})
    storage.check_newest()
    newest = run_checkpoint.latest_checkpoint(job.output, storage)
    args = job.arguments
    if newest:
        args = replace(args, resume=True)
    prepared = prepare_job(args, model, rows=sources, storage=storage)
    run = prepared.run
    kept = [data for data in (run.stream.prepared, run.heldout) if data]
    cleanup.add(
        "rows as tokens",
        lambda: overwrite(array for data in kept for row in data.rows for array in (row.input_ids, row.labels)),
    )
    for source in sources.values():
        source.wipe()  # they are tokens now
    account = run.stream.prepared.account
    ending.rows = account.examples
    _check_limits(session, prepared)
    _check_beside(session)
    data = [(item["name"], item["sha256"]) for item in session.claims["job"]["data"]]
    log.append("opened", {"rows": account.examples, "trained_rows": _trained_rows(prepared)}, data)
    _say_start(session, storage, newest, kept)
    session.check_expired()
    with watch(prepared) if watch else nullcontext(SILENT) as events:
        return prepared.train(EventForwarder(events, _EvaluationLog(session)))


def _opened(session: Session, cleanup: Cleanup) -> tuple[dict[str, Any], dict[Path, Mapping[str, bytes]]]:
    """Open the sealed files of a job in memory: sources of rows, and adapters by path."""
    sources: dict[str, Any] = {}
    initial: dict[Path, Mapping[str, bytes]] = {}
    attested = {item["role"]: item["sha256"] for item in session.claims["job"]["data"]}
    for role, path in session.job.sealed().items():
        sealed = read_bytes(path)
        if hashlib.sha256(sealed).hexdigest() != attested[role]:
            raise UserError(f"{path} has changed since it was attested: start again when nobody writes to it.")
        try:
            content = unseal_bytes(sealed, session.release.key)
        except TamperedError as error:
            raise TamperedError(f"{path}: {error.problem}") from None
        cleanup.add(f"{role} in memory", partial(overwrite, [content]))
        if role == "init_adapter":
            initial[path] = archive.unpack(content)
        else:
            sources[role] = SealedRows(content, path.name, attested[role])
    return sources, initial


def _check_beside(session: Session) -> None:
    """Raise UserError if a model or an adapter beside the base is no longer the one that was attested."""
    attested = {item["role"]: item["sha256"] for item in session.claims["job"]["data"]}
    for name, path in session.job.beside().items():
        if model_facts(name, path)["sha256"] != attested[name]:
            raise UserError(f"{path} has changed since it was attested: start again when nobody writes to it.")


def _trained_rows(prepared: FinetuneJob) -> int:
    """Rows of the data that are trained on."""
    data = prepared.run.stream.prepared
    return min(data.account.examples, len(data.samples))


def _check_limits(session: Session, prepared: FinetuneJob) -> None:
    """Raise UserError unless a run keeps to the limits of its release."""
    release, rows = session.release, _trained_rows(prepared)
    if release.min_rows is not None and rows < release.min_rows:
        raise UserError(
            f"The data leave {count_noun(rows, 'row')} to train on, and the release asks for at least "
            f"{release.min_rows:,}"
            ": raise max_length, or ask the data owner."
        )
    most, planned = release.max_steps, prepared.run.args.max_steps
    if most is not None and not 0 < planned <= most:
        raise UserError(
            f"The release allows at most {count_noun(most, 'step')}, and the job's max_steps is {planned}: lower it."
        )
    stated = {item["role"]: item.get("rows") for item in session.claims["job"]["data"]}
    found = prepared.run.stream.prepared.account.examples
    held_out = prepared.run.heldout
    if stated["data"] is not None and stated["data"] != found and not (held_out and "eval_data" not in stated):
        raise UserError(
            f"{session.job.data} holds {count_noun(found, 'row')}, but its record says {stated['data']:,}: seal it "
            "again."
        )


def _say_start(session: Session, storage: SealedStorage, newest: Path | None, kept: list[Any]) -> None:
    """Log what the training begins with, and seal the rows that were skipped."""
    log = session.log
    if newest:
        last = next(entry for entry in reversed(log.entries) if entry.stage == "checkpoint")
        log.append("resumed", {"step": last.facts["step"]}, last.subjects)
        return
    storage.write(session.job.output / SKIPPED, skipped_rows([data.account for data in kept]))
    log.append("started", {"options": session.job.options}, storage.skipped)


class _EvaluationLog(Events):
    """Puts held-out losses into the evidence log, until it is half full; checkpoints' lines have theirs, too."""

    def __init__(self, session: Session):
        self._session, self._log = session, session.log

    def evaluating(self, evaluating: Evaluating) -> None:
        if evaluating.loss is not None and not self._log.crowded:
            with self._session.timed():
                self._log.append("evaluated", {"step": evaluating.step, "loss": evaluating.loss})


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep other sessions out of a run's directory, which is made, and removed again if it stays empty."""
    check_output(directory, flag("output"))
    made = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = lock_file(directory / LOCK).lock
    except Timeout:
        raise UserError(f"Another session is at work in {directory}: wait for it, or choose another output.") from None
    except OSError as error:
        raise UserError(
            f"The output directory {directory} cannot be used ({error.strerror}): choose another."
        ) from None
    try:
        yield
    finally:
        lock.release()
        if made and {path.name for path in directory.iterdir()} <= {LOCK}:
            with suppress(OSError):
                (directory / LOCK).unlink(missing_ok=True)
                directory.rmdir()


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


SIGNING_KEY = "the session's signing key, which signs this record; it is dropped, and overwritten by OpenSSL, after it"
DROPPED = "adapters and checkpoints that were opened or made, in immutable bytes, which are dropped"
BASE = "the base model's weights, which are not secret"


@dataclass
class SessionEnd:
    """What happens at the end of a session, however it ends."""

    beginning: SessionStart
    wiper: Wiper
    model: LoadedModel
    cleanup: Cleanup = field(default_factory=Cleanup)
    session: Session | None = None
    storage: SealedStorage | None = None
    record: RunRecord | None = None
    error: BaseException | None = None
    rows: int | None = None
    cleanup_facts: dict[str, Any] = field(default_factory=dict)
    statement: Path | None = None

    def run(self) -> None:
        """Log the end, overwrite what is in memory, log that too, and write the statement of a run that finished."""
        log = self.beginning.log
        attested = log is not None and log.entries and log.entries[-1].keyid == self.beginning.keys.signing.public.keyid
        try:
            if attested:
                self._say_end()
        finally:
            self._wipe()
            if attested and log is not None:
                log.wiped(self.cleanup_facts)
                self._state()
                if self.session:
                    self.session.report(ended=True)

    def _say_end(self) -> None:
        log, record = self.beginning.log, self.record
        assert log is not None
        if record is None:  # the message of an error may have something of the rows
            stopped = isinstance(self.error, KeyboardInterrupt)
            log.append("interrupted" if stopped else "failed", {"error": type(self.error).__name__})
            return
        subjects = self._sealed()
        if record.outcome == "interrupted":
            log.append("interrupted", {"signal": record.signal, "step": record.state.step}, subjects)
        elif record.outcome == "failed":
            log.append("failed", {"error": record.stop_reason, "step": record.state.step}, subjects)
        else:
            log.append("finished", self._facts().to_json(), subjects)
        if self.storage:
            self.storage.put_adapter()

    def _wipe(self) -> None:
        cleanup, keys = self.cleanup, self.beginning.keys
        if self.storage:
            self.storage.forget()
        keep = [storage.buffer for storage in self.model.decoder.storages() if storage.buffer is not None]
        cleanup.add("device buffers", lambda: device_wipe_facts(self.wiper.wipe(keep)))
        if self.session:
            cleanup.add("the data's key", self.session.release.key.wipe)
        cleanup.add("the session's key for the release", keys.data.wipe)
        if self.storage:
            self.storage.forget()
        for text in (SIGNING_KEY, DROPPED, BASE, *swap_risks(self.beginning.host.facts)):
            cleanup.note_unwipable(text)
        self.cleanup_facts = cleanup.run()

    def _state(self) -> None:
        log, record, storage = self.beginning.log, self.record, self.storage
        if not (log and record and storage and self.session) or record.outcome in ("interrupted", "failed"):
            return
        sealed = self._sealed()[0]
        self.statement = write_statement(log, self.session.claims, storage.adapter, sealed, self._facts())

    def _sealed(self) -> list[tuple[str, str]]:
        digest = self.storage.adapter_sha256 if self.storage else None
        return [(ADAPTER, digest)] if digest else []

    def _facts(self) -> RunFacts:
        assert self.record is not None
        state, args = self.record.state, self.record.options
        held_out = state.last_eval_loss is not None
        return RunFacts(
            steps=state.step,
            elapsed_seconds=state.elapsed_seconds,
            stop_reason=self.record.stop_reason,
            target_seconds=args.target_seconds,
            budget_steps=state.total_steps,
            initial_loss=state.first_eval_loss,
            final_loss=state.last_eval_loss if held_out else state.last_loss,
            best_loss=state.best_eval_loss,
            rows=self.rows,
            tokens=state.tokens,
            weights_sha256=self.record.base_sha256,
        )
