"""The end of a session, however it ends: its last lines in the log, the cleanup, and a finished run's statement."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.gpu.buffer_wipe import Wiper
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.protect.evidence.statement import RunFacts, write_statement
from wgpu_lora.protect.hygiene.cleanup import Cleanup, of_device
from wgpu_lora.protect.hygiene.host import swapped
from wgpu_lora.protect.runs.session import Beginning, Session
from wgpu_lora.protect.runs.storage import ADAPTER, SealedStorage
from wgpu_lora.train.run.records import RunRecord

SIGNING_KEY = "the session's signing key, which signs this record; it is dropped, and overwritten by OpenSSL, after it"
DROPPED = "adapters and checkpoints that were opened or made, in immutable bytes, which are dropped"
BASE = "the base model's weights, which are not secret"


@dataclass
class Ending:
    """What happens at the end of a session, however it ends."""

    beginning: Beginning
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
        cleanup.add("device buffers", lambda: of_device(self.wiper.wipe(keep)))
        if self.session:
            cleanup.add("the data's key", self.session.release.key.wipe)
        cleanup.add("the session's key for the release", keys.data.wipe)
        if self.storage:
            self.storage.forget()
        for text in (SIGNING_KEY, DROPPED, BASE, *swapped(self.beginning.host.facts)):
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
