"""The files of a run: sealed ones by the digests that the log has of them, and the cleanup record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.bounded import escape_unprintable
from wgpu_lora.protect.checking.session_checks import ENDS, Findings, Session, digest_in, digest_of, small_file
from wgpu_lora.protect.evidence import dsse, model_signature, run_statement
from wgpu_lora.protect.evidence.run_evidence import CLEANUP, CLEANUP_KIND, NAME
from wgpu_lora.words import join_words

# Stages whose subjects the run itself sealed.
MADE = ("started", "checkpoint", "evaluated", "finished", "failed", "interrupted")
SEALED = ".age"
JOB = "job.toml"  # a copy
_OF_SESSION = re.compile(r"evidence-\d+\.json|release-\d+\.jwt")  # compared with the log by sessions.py
OWN = {NAME, CLEANUP, JOB, run_statement.NAME, model_signature.NAME}


def check_files(run: Path, sessions: Sequence[Session], found: Findings) -> None:
    """Verify all sealed files against the newest digests that the log has of them.

    Older checkpoints may have been removed, as training does; the newest one, and what the end names, must be there.
    """
    logged = {name: digest for one in sessions for line in one.named(*MADE) for name, digest in line.subjects}
    checkpoints = [line for one in sessions for line in one.steps()]
    ends = sessions[-1].named(*ENDS)
    needed = {name for line in [*checkpoints[-1:], *ends] for name, _ in line.subjects}
    verified = 0
    for name, digest in logged.items():
        with found.part(name):
            there = digest_in(run, name)
            if there is not None:
                verified += found.expect(f"SHA-256 of {name}", there, digest)
            elif name in needed:
                found.fail(f"{name} is missing")
    for name in sorted({path.relative_to(run).as_posix() for path in run.rglob(f"*{SEALED}")} - set(logged)):
        if sessions[-1].named("wiped"):
            found.fail(f"{name} is not in the log")
        else:
            found.claimed.append(f"{name}: a killed session had not recorded it")
    # Links and special files too: whatever lies here may be taken for a part of the run.
    others = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_symlink() or not path.is_dir()}
    others = {
        name
        for name in others - OWN - set(logged)
        if not name.endswith((SEALED, ".lock")) and not _OF_SESSION.fullmatch(name)
    }
    if others:
        found.claimed.append(
            "nothing about files that the evidence does not cover: "
            f"{escape_unprintable(join_words(sorted(others)))[:400]}"
        )
    with found.part(JOB):
        copy = digest_in(run, JOB)
        if copy is None:
            found.claimed.append(f"{JOB} is missing: the evidence states its options")
        else:
            found.expect(f"SHA-256 of {JOB}", copy, sessions[-1].claims.get("job", {}).get("sha256"))
    if verified:
        found.proven.append(f"{verified} sealed {'file is' if verified == 1 else 'files are'} those of the log")


def check_cleanup(run: Path, sessions: Sequence[Session], found: Findings) -> None:
    """Verify that sessions which were not killed have a complete cleanup record; the file is the last one's."""
    for session in sessions:
        what = f"session {session.number}"
        with found.part(f"the cleanup of {what}"):
            lines = session.named("wiped")
            if lines:
                _check_record(lines[0].facts, what, found)
            elif session is not sessions[-1]:
                found.claimed.append(f"{what} was killed: it has no cleanup record")
            elif session.named(*ENDS):
                found.fail(f"{what} ended without a cleanup record")
    lines = sessions[-1].named("wiped")
    if not lines:
        return
    with found.part(CLEANUP):
        data = small_file(run, CLEANUP)
        found.expect(f"SHA-256 of {CLEANUP}", digest_of(data), dict(lines[0].subjects).get(CLEANUP))
        stated = dsse.verify(data, sessions[-1].key)
        found.expect(f"the predicate type of {CLEANUP}", stated["predicateType"], CLEANUP_KIND)
        found.expect(CLEANUP, stated["predicate"], {"session": sessions[-1].number, **lines[0].facts})


def _check_record(record: dict[str, object], what: str, found: Findings) -> None:
    for name in ("wiped", "not_wiped"):
        if not isinstance(record.get(name), list) or not record[name]:
            found.fail(f"the cleanup record of {what} does not say what was {name.replace('_', ' ')}")
    if record.get("complete") is not True:
        found.fail(f"the cleanup of {what} is not complete: {escape_unprintable(str(record.get('not_wiped')))[:200]}")
