"""The files of a run: sealed ones by the digests that the log has of them, and the cleanup record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.atomic import file_digest, sha256
from wgpu_lora.errors import UserError
from wgpu_lora.paths import is_path, links_outside
from wgpu_lora.protect.checking.session_checks import MAX_SMALL, Findings, Session
from wgpu_lora.protect.evidence import dsse, model_signature, run_statement
from wgpu_lora.protect.evidence.run_evidence import CLEANUP, CLEANUP_KIND, ENDS, NAME
from wgpu_lora.protect.evidence.signed_log import read_bytes
from wgpu_lora.text import escape_unprintable, join_words

MADE = ("started", "checkpoint", "evaluated", *ENDS)  # stages whose subjects the run itself sealed
SEALED = ".age"
JOB = "job.toml"  # a copy
_OF_SESSION = re.compile(r"evidence-\d+\.json|release-\d+\.jwt")  # compared with the log by session_checks
OWN = {NAME, CLEANUP, JOB, run_statement.NAME, model_signature.NAME}


def check_files(run: Path, sessions: Sequence[Session], found: Findings) -> None:
    """Verify all sealed files against the newest digests that the log has of them.

    Older checkpoints may have been removed, as training does; the newest one, and what the end names, must be there.
    """
    logged = {name: digest for one in sessions for line in one.named(*MADE) for name, digest in line.subjects}
    checkpoints = [line for one in sessions for line in one.steps()]
    needed = {name for line in [*checkpoints[-1:], *sessions[-1].named(*ENDS)] for name, _ in line.subjects}
    verified = 0
    for name, digest in logged.items():
        with found.part(name):
            there = _digest_in(run, name)
            if there is not None:
                verified += found.expect(f"SHA-256 of {name}", there, digest)
            elif name in needed:
                found.fail(f"{name} is missing")
    # Links and special files too: whatever lies here may be taken for a part of the run.
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_symlink() or not path.is_dir()}
    others = []
    for name in sorted(files - OWN - set(logged)):
        if name.endswith(SEALED) and sessions[-1].named("wiped"):
            found.fail(f"{name} is not in the log")
        elif name.endswith(SEALED):
            found.claimed.append(f"{name}: a killed session had not recorded it")
        elif not name.endswith(".lock") and not _OF_SESSION.fullmatch(name):
            others.append(name)
    if others:
        names = escape_unprintable(join_words(others))[:400]
        found.claimed.append(f"nothing about files that the evidence does not cover: {names}")
    with found.part(JOB):
        copy = _digest_in(run, JOB)
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
    last = sessions[-1]
    for line in last.named("wiped")[:1]:
        with found.part(CLEANUP):
            data = read_bytes(run / CLEANUP, MAX_SMALL)
            found.expect(f"SHA-256 of {CLEANUP}", sha256(data), dict(line.subjects).get(CLEANUP))
            stated = dsse.verify(data, last.key)
            found.expect(f"the predicate type of {CLEANUP}", stated["predicateType"], CLEANUP_KIND)
            found.expect(CLEANUP, stated["predicate"], {"session": last.number, **line.facts})


def _check_record(record: dict[str, object], what: str, found: Findings) -> None:
    for name in ("wiped", "not_wiped"):
        if not isinstance(record.get(name), list) or not record[name]:
            found.fail(f"the cleanup record of {what} does not say what was {name.replace('_', ' ')}")
    if record.get("complete") is not True:
        found.fail(f"the cleanup of {what} is not complete: {escape_unprintable(str(record.get('not_wiped')))[:200]}")


def _digest_in(directory: Path, name: str) -> str | None:
    """SHA-256 of a file in a run's directory, whose name is untrusted; None if it is not there.

    Raises:
        UserError: the name leads elsewhere, or the file cannot be read.
    """
    path = directory / name
    if not is_path(name) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"{name!a:.80} is not the name of a file of the run: restore the log.")
    if not path.exists():
        return None
    if not path.is_file() or links_outside(path, directory):
        raise UserError(f"{path} is not a regular file of the run: restore it.")
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore it.") from None
