"""`protect check`: verify a protected run from its directory alone, and say what that proves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.protect.checking.ending import check_end
from wgpu_lora.protect.checking.files import check_cleanup, check_files
from wgpu_lora.protect.checking.findings import Findings
from wgpu_lora.protect.checking.sessions import Session, check_sessions, sessions_of
from wgpu_lora.protect.evidence import anchors
from wgpu_lora.protect.evidence.chain import DamagedError, Entry
from wgpu_lora.protect.evidence.log import NAME, read_log
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import PublicKey
from wgpu_lora.text import join_words

SIGNED = "its last session signed that the run"
ENDED = {
    "finished": f"{SIGNED} finished", "failed": f"{SIGNED} failed", "interrupted": f"{SIGNED} was interrupted",
}  # fmt: skip
UNPROVABLE = (
    "that this software ran unchanged and nothing else did, so that what was signed is what happened, the machine's "
    "clock, and the run's figures"
)


@dataclass(frozen=True)
class Checked:
    """What a check found.

    Attributes:
        run: the run's id, "" if the log cannot be read. end: finished, failed, interrupted, or None.
        broker: the keyid that endorses the sessions; None if no broker's key was given.
        proven, claimed, failures: sentences.
        session_key: of the last session, in PEM; it signed the adapter.
    """

    run: str
    end: str | None
    broker: str | None
    proven: list[str]
    claimed: list[str]
    failures: list[str]
    session_key: str | None = None

    @property
    def verified(self) -> bool:
        return not self.failures

    def line(self) -> str:
        """What is proven, and what is only claimed, in one line."""
        if self.failures:
            count = len(self.failures)
            return f"not verified: {count} {'part' if count == 1 else 'parts'} of the evidence failed"
        if self.broker is None:
            return (
                "proven: nothing but that the files fit each other, since no broker's key was given; only claimed: "
                f"{'; '.join(self.claimed)}"
            )
        return (
            f"proven, by the broker's key {self.broker[:12]}: {'; '.join(self.proven)}; only claimed: "
            f"{'; '.join(self.claimed)}"
        )

    def to_json(self) -> dict[str, Any]:
        return {"verified": self.verified, **asdict(self), "line": self.line()}


def check(
    run: Path, broker: PublicKey | None = None, policy: Policy | None = None, adapter: Path | None = None
) -> Checked:
    """Verify all of a run's evidence, offline.

    Args:
        run: its directory. broker: the key that must have signed its releases; without it nobody endorses the keys.
        policy: that the releases must have been made under, and that the evidence is appraised by again.
        adapter: the directory of the opened adapter.

    Raises:
        UserError: `run` is not a protected run's directory, or `adapter` is not a directory of files.
    """
    if not (run / NAME).exists():
        raise UserError(f"{run} has no {NAME}: give the output directory of a protected run.")
    if adapter is not None and not adapter.is_dir():
        raise UserError(
            f"{adapter} is not a directory: give the one into which wgpu-lora protect open put the adapter."
        )
    for path in adapter.rglob("*") if adapter else ():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # which could be read without an end
            raise UserError(f"{path} is a link or a special file: open the sealed adapter anew.")
    found, keyid = Findings(), broker.keyid if broker else None
    try:
        entries = read_log(run / NAME)
    except DamagedError as error:
        return Checked("", None, keyid, [], [], [error.problem])
    if not entries:
        return Checked("", None, keyid, [], [], [f"{NAME} has no complete line"])
    sessions = sessions_of(entries)
    found.proven.append(f"the log's {len(entries)} lines are complete up to its end and in order")
    check_sessions(run, sessions, broker, policy, found)
    if not sessions[-1].named("released"):  # an earlier session's lines are endorsed by the next one's release
        found.fail(f"session {len(sessions)} has no release: nobody endorses its lines")
    check_files(run, sessions, found)
    check_cleanup(run, sessions, found)
    end = check_end(run, sessions, policy, adapter, found)
    if end is not None:
        found.proven.insert(0, ENDED[end])
    with found.part("the claims"):
        _say_sessions(sessions, broker, policy, found)
    if adapter is None and end == "finished":
        found.claimed.append("the digests of the adapter's files: no opened adapter was given")
    if broker is None:  # whoever made all of it could have made it fit
        found.claimed, found.proven = [*found.proven, *found.claimed], []
    _check_anchor(entries, found)
    if found.failures:
        found.proven.clear()
    key = sessions[-1].key.pem
    return Checked(entries[0].chain, end, keyid, found.proven, found.claimed, found.failures, key)


def _check_anchor(entries: Sequence[Entry], found: Findings) -> None:
    with found.part("the anchor"):
        if anchors.check(entries[0].chain, [entry.digest for entry in entries]):
            found.proven.append("this is the newest state that this machine wrote")
        else:
            found.claimed.append("that this is the run's newest state: no anchor on this machine")


def _say_sessions(
    sessions: Sequence[Session], broker: PublicKey | None, policy: Policy | None, found: Findings
) -> None:
    count = sum(bool(session.release) for session in sessions)
    what = "1 session's key was" if count == 1 else f"{count} sessions' keys were"
    if broker is not None:
        found.proven.append(f"{what} attested to the broker, which released the data's key to them")
    else:
        found.claimed.append(f"that {what} attested to a broker: no broker's key was given")
    if policy is not None:
        found.proven.append(f"the evidence passes the policy {policy.name}, version {policy.version}")
    levels = Counter(str(session.claims.get("level")) for session in sessions)
    for level, number in levels.items():
        which = "every session" if number == len(sessions) else f"{number} of {len(sessions)} sessions"
        if level == "quoted" and policy is not None and ("attestation", "tpm_keys") in policy.values:
            found.proven.append(f"the claims of {which} were quoted by a TPM of the policy")
        elif level == "quoted":  # anybody can run a TPM in software
            found.claimed.append(f"that the TPM which quoted the claims of {which} is real: no policy names its key")
        else:
            found.claimed.append(f"the claims of {which} about its software and device ({level})")
    versions = [session.claims.get("package", {}).get("version") for session in sessions]
    if any(versions):
        found.claimed.append(f"its version, wgpu-lora {join_words(sorted(set(map(str, versions))))}")
    found.claimed.append(UNPROVABLE)
