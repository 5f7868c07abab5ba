"""Protected fine-tuning: a run whose data, checkpoints and results are in the clear in memory only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from wgpu_lora.data.memory_rows import SealedRows
from wgpu_lora.data.row_counts import SKIPPED, skipped_rows
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Evaluating, EventForwarder, Events
from wgpu_lora.files.atomic import sha256
from wgpu_lora.files.json_files import read_bytes
from wgpu_lora.gpu.buffer_wipe import Wiper
from wgpu_lora.gpu.device_list import choose
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.text import count_noun
from wgpu_lora.processes.signals import on_end_signal
from wgpu_lora.protect.attestation.claims import base_facts, gather
from wgpu_lora.protect.evidence import anchors
from wgpu_lora.protect.evidence.run_statement import RunFacts, write_statement
from wgpu_lora.protect.memory_protection import harden, swap_risks
from wgpu_lora.protect.runs.cleanup import Cleanup, device_wipe_facts, overwrite
from wgpu_lora.protect.runs.protected_job import ProtectedJob, model_facts, read_job
from wgpu_lora.protect.runs.protected_session import Say, Session, open_log
from wgpu_lora.protect.runs.sealed_storage import ADAPTER, SealedStorage
from wgpu_lora.protect.sealed import archive
from wgpu_lora.protect.sealed.age_streams import unseal_bytes
from wgpu_lora.protect.sealed.keys import DataKey, SessionKeys
from wgpu_lora.train.job import Job, locked
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.resume import check_output_free

LOCK = ".session.lock"  # beside that of training, which begins later
SIGNING_KEY = "the session's signing key, which signs this record; it is dropped, and overwritten by OpenSSL, after it"
DROPPED = "adapters and checkpoints that were opened or made, in immutable bytes, which are dropped"
BASE = "the base model's weights, which are not secret"
Watch = Callable[[Job[Any]], AbstractContextManager[Events]]


@dataclass(frozen=True)
class ProtectedRecord:
    """The result of a protected run.

    Attributes:
        run: the contents of run.json. directory: of the run. adapter: the sealed adapter.
        cleanup: as `Cleanup.run` gives it. statement: the signed statement; None unless the run finished.
        protection_times: (begin, seconds) of each sealing, log line and report during training, by `time.perf_counter`.
    """

    run: RunRecord
    directory: Path
    adapter: Path
    cleanup: dict[str, Any]
    statement: Path | None
    protection_times: list[tuple[float, float]]


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
        job: as `read_job` reads it.
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
        stack.enter_context(locked(job.output, LOCK))
        anchors.prepare()
        keys = stack.enter_context(SessionKeys.generate())
        log = open_log(job, keys, resume)
        if not log.entries:
            check_output_free(job.output)
        model = model or open_model(job.arguments.model or "demo", job.arguments.device, job.arguments.base_dtype)
        session = Session(job, keys, host, log, say)
        end = SessionEnd(session, stack.enter_context(Wiper(model.device)), model)
        try:
            key = session.attest(model, nonce).key
            end.record = _train(session, key, model, end, watch)
        except BaseException as error:
            end.error = error
            raise
        finally:
            with on_end_signal(lambda number: None):  # the cleanup is not interrupted
                end.run()
        return ProtectedRecord(
            end.record, job.output, job.output / ADAPTER, end.cleanup_facts, end.statement, session.protection_times
        )


def machine_claims(nonce: str, keys: SessionKeys, job: Path | None = None, device: str | None = None) -> dict[str, Any]:
    """The claims of a session on this machine, without training: of a model, only its files are opened.

    They name what is loaded, so this is part of the module that trains: as much is loaded as in a training session.

    Args:
        job: JOB.toml, whose facts are stated too. device: instead of the job's, index or part of a name.

    Raises:
        UserError: the job, the model or a sealed file cannot be read, or there is no such device.
    """
    host = harden()
    try:
        if job is None:
            return gather(choose(device)[0], nonce=nonce, keys=keys, host=host.facts)
        protected_job = read_job(job)
        args = protected_job.arguments
        model = open_model(args.model or "demo", device or args.device, args.base_dtype)
        base = base_facts(model.name, model.checkpoint, model.config)
        return gather(model.device.info, nonce=nonce, keys=keys, job=protected_job, base=base, host=host.facts)
    finally:
        host.restore()


def _train(session: Session, key: DataKey, model: LoadedModel, end: SessionEnd, watch: Watch | None) -> RunRecord:
    job, log, cleanup = session.job, session.log, end.cleanup
    session.check_expired()
    sources, initial = _open_data(session, key, cleanup)
    storage = end.storage = SealedStorage(
        job.output, job.recipients, key, session.keys, log, initial, session.report, session.timed
    )
    leftovers = storage.recover()
    if leftovers or log.cut or log.after_a_killed_session:
        unfinished = ", ".join([*leftovers, *(["a part of a line of the log"] if log.cut else [])])
        text = "the session before was killed and wiped nothing; all that it left is sealed"
        session.say("leftovers", f"{text}, unfinished were {unfinished}" if unfinished else text)
        log.append("leftovers", {"files": leftovers, "log_bytes": log.cut})
    storage.check_newest()
    newest = run_checkpoint.latest_checkpoint(job.output, storage)
    args = replace(job.arguments, resume=True) if newest else job.arguments
    prepared = prepare_job(args, model, rows=sources, storage=storage)
    datasets = [data for data in (prepared.run.stream.prepared, prepared.run.heldout) if data]
    cleanup.add(
        "rows as tokens",
        lambda: overwrite(array for data in datasets for row in data.rows for array in (row.input_ids, row.labels)),
    )
    for source in sources.values():
        source.wipe()  # they are tokens now
    account = prepared.run.stream.prepared.account
    end.rows, trained = account.examples, min(account.examples, len(prepared.run.stream.prepared.samples))
    _check_limits(session, prepared, account.examples, trained)
    _check_other_models(session)
    data = [(item["name"], item["sha256"]) for item in session.data.values()]
    log.append("opened", {"rows": account.examples, "trained_rows": trained}, data)
    if newest:
        last = next(entry for entry in reversed(log.entries) if entry.stage == "checkpoint")
        log.append("resumed", {"step": last.facts["step"]}, last.subjects)
    else:
        storage.write(job.output / SKIPPED, skipped_rows([data.account for data in datasets]))
        log.append("started", {"options": job.options}, storage.skipped_rows)
    session.check_expired()
    with watch(prepared) if watch else nullcontext(SILENT) as events:
        return prepared.train(EventForwarder(events, _EvaluationLog(session)))


def _open_data(
    session: Session, key: DataKey, cleanup: Cleanup
) -> tuple[dict[str, Any], dict[Path, Mapping[str, bytes]]]:
    """Open the sealed files of a job in memory: sources of rows, and adapters by path."""
    sources: dict[str, Any] = {}
    initial: dict[Path, Mapping[str, bytes]] = {}
    for role, path in session.job.sealed.items():
        sealed, digest = read_bytes(path), session.data[role]["sha256"]
        if sha256(sealed) != digest:
            raise UserError(f"{path} has changed since it was attested: start again when nobody writes to it.")
        content = unseal_bytes(sealed, key, str(path))
        cleanup.add(f"{role} in memory", partial(overwrite, [content]))
        if role == "init_adapter":
            initial[path] = archive.unpack(content)
        else:
            sources[role] = SealedRows(content, path.name, digest)
    return sources, initial


def _check_other_models(session: Session) -> None:
    """Raise UserError if a model or an adapter beside the base is no longer the one that was attested."""
    for name, path in session.job.other_models().items():
        if model_facts(name, path)["sha256"] != session.data[name]["sha256"]:
            raise UserError(f"{path} has changed since it was attested: start again when nobody writes to it.")


def _check_limits(session: Session, prepared: Job[Any], rows: int, trained: int) -> None:
    """Raise UserError unless a run keeps to the limits of its release.

    Args:
        rows: of the data. trained: of them.
    """
    assert session.release
    min_rows, limit = (session.release.claims.get(name) for name in ("min_rows", "max_steps"))
    if min_rows is not None and trained < min_rows:
        raise UserError(
            f"The data leave {count_noun(trained, 'row')} to train on, and the release asks for at least {min_rows:,}: "
            "raise max_length, or ask the data owner."
        )
    max_steps = prepared.run.args.max_steps
    if limit is not None and not 0 < max_steps <= limit:
        raise UserError(
            f"The release allows at most {count_noun(limit, 'step')}, and the job's max_steps is {max_steps}: lower it."
        )
    recorded_rows = session.data["data"].get("rows")
    if recorded_rows not in (None, rows) and not (prepared.run.heldout and "eval_data" not in session.data):
        raise UserError(
            f"{session.job.sealed['data']} holds {count_noun(rows, 'row')}, but its record says {recorded_rows:,}: "
            "seal it again."
        )


class _EvaluationLog(Events):
    """Puts held-out losses into the evidence log, until it is half full; checkpoints' lines have theirs, too."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def evaluating(self, evaluating: Evaluating) -> None:
        if evaluating.loss is not None and not self._session.log.crowded:
            with self._session.timed():
                self._session.log.append("evaluated", {"step": evaluating.step, "loss": evaluating.loss})


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


@dataclass
class SessionEnd:
    """What happens at the end of a session, however it ends.

    Attributes:
        storage, record, rows: as far as the session came. error: that ended it.
        cleanup_facts, statement: of `run`.
    """

    session: Session
    wiper: Wiper
    model: LoadedModel
    cleanup: Cleanup = field(default_factory=Cleanup)
    storage: SealedStorage | None = None
    record: RunRecord | None = None
    error: BaseException | None = None
    rows: int | None = None
    cleanup_facts: dict[str, Any] = field(default_factory=dict)
    statement: Path | None = None

    def run(self) -> None:
        """Log the end, overwrite what is in memory, log that too, and write the statement of a run that finished."""
        session, log = self.session, self.session.log
        if not log.entries or log.entries[-1].keyid != session.keys.signing.public.keyid:
            self._wipe()  # nothing was attested
            return
        digest = self.storage.adapter_sha256 if self.storage and self.record else None
        sealed = [(ADAPTER, digest)] if digest else []
        finished = self.record is not None and self.record.outcome not in ("interrupted", "failed")
        try:
            stage, facts = self._end(finished)
            log.append(stage, facts, sealed)
            if self.storage and self.record:
                self.storage.put_adapter()
        finally:
            self._wipe()
            log.wiped(self.cleanup_facts)
            if finished and self.storage:
                facts_ = self._facts()
                self.statement = write_statement(log, session.claims, self.storage.adapter, sealed[0], facts_)
            if session.release:
                session.report(ended=True)

    def _end(self, finished: bool) -> tuple[str, dict[str, Any]]:
        record = self.record
        if record is None:  # the message of an error may have something of the rows
            stage = "interrupted" if isinstance(self.error, KeyboardInterrupt) else "failed"
            return stage, {"error": type(self.error).__name__}
        if record.outcome == "interrupted":
            return "interrupted", {"signal": record.signal, "step": record.state.step}
        if not finished:
            return "failed", {"error": record.stop_reason, "step": record.state.step}
        return "finished", asdict(self._facts())

    def _wipe(self) -> None:
        cleanup, session = self.cleanup, self.session
        if self.storage:
            self.storage.forget()
        keep = [storage.buffer for storage in self.model.decoder.storages() if storage.buffer is not None]
        cleanup.add("device buffers", lambda: device_wipe_facts(self.wiper.wipe(keep)))
        if session.release:
            cleanup.add("the data's key", session.release.key.wipe)
        cleanup.add("the session's key for the release", session.keys.data.wipe)
        self.cleanup_facts = cleanup.run([SIGNING_KEY, DROPPED, BASE, *swap_risks(session.host.facts)])

    def _facts(self) -> RunFacts:
        assert self.record is not None
        state, args = self.record.state, self.record.options
        return RunFacts(
            steps=state.step,
            elapsed_seconds=state.elapsed_seconds,
            stop_reason=self.record.stop_reason,
            target_seconds=args.target_seconds,
            budget_steps=state.total_steps,
            initial_loss=state.first_eval_loss,
            final_loss=state.last_loss if state.last_eval_loss is None else state.last_eval_loss,
            best_loss=state.best_eval_loss,
            rows=self.rows,
            tokens=state.tokens,
            weights_sha256=self.record.base_sha256,
        )
