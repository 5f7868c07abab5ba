"""wgpu-lora protect keygen, seal and open: the data owner's keys and sealed files."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import is_terminal, line, print_json
from wgpu_lora.cli.parameters import Json
from wgpu_lora.cli.protect.broker import OUTPUT, POLICY, SIGNING_KEY, STATE, file
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun

OFFLINE = {"rich_help_panel": "Release a data key by files"}
SEALED_FILE = "Sealed file; - for standard output. Default: PATH.age, or PATH.tar.age for a directory."
OPENED_FILE = "New file, or new directory for NAME.tar.age (unless named *.tar); - for standard output."
SEAL_OFFLINE = "Seal the data key in PATH to the machine that made this evidence, if that passes."


def keygen(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File for the private key; it must not exist yet.")],
    signing: Annotated[
        bool, typer.Option("--signing", help="Make a broker's P-256 key, which signs, with PATH.pub beside it.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Make a key that only you can read, and print its public half.

    A data key is an age identity, as age-keygen makes it. Make one for each data set: whoever gets it can open all that
    was ever sealed to its recipient.
    """
    from wgpu_lora.protect.memory_protection import harden
    from wgpu_lora.protect.sealed.keys import new_data_key, new_signing_key

    harden()
    if signing:
        facts = {"public": f"{path}.pub", "keyid": new_signing_key(path).keyid}
    else:
        facts = {"recipient": new_data_key(path)}
    if as_json:
        print_json({"path": str(path), **facts})
        return 0
    line("private", f"{path} (keep it secret)")
    for name, value in facts.items():
        line("key id" if name == "keyid" else name, value, whole=True)
    return 0


def seal(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="File or directory; - for standard input. With --offline, the data key."),
    ],
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="RECIPIENT", help="Who can open it: age1..., or @FILE with one on each line; repeatable."),
    ] = None,
    output: Annotated[str | None, file(SEALED_FILE, "FILE", *OUTPUT)] = None,
    offline: Annotated[Path | None, file(SEAL_OFFLINE, "EVIDENCE", **OFFLINE)] = None,
    policy: Annotated[Path | None, file(POLICY, **OFFLINE)] = None,
    signing_key: Annotated[Path | None, file(SIGNING_KEY, **OFFLINE)] = None,
    state: Annotated[Path | None, file(STATE, "DIR", **OFFLINE)] = None,
    as_json: Json = False,
) -> int:
    """Seal a file or directory, so that only the recipients' keys open it.

    The format is age's (age-encryption.org/v1), so `age -d` opens it, too. Beside FILE, FILE.json has its digest, by
    which it is believed: age says who can open a file, not who sealed it.
    """
    if offline is not None:
        if to:
            raise UserError("--to is not for --offline, which seals to the key that the evidence names: leave it out.")
        if policy is None or signing_key is None or output is None or output == "-":
            raise UserError("--offline needs --policy, --signing-key and --output, each a file: give all three.")
        return _release(path, output, offline, policy, signing_key, state)
    for name, value in (("policy", policy), ("signing-key", signing_key), ("state", state)):
        if value is not None:
            raise UserError(f"--{name} is of --offline, which is missing: give both, or neither.")
    from wgpu_lora.protect.sealed.sealed_files import default_output, recipients_of, seal_path

    if output == "-" and is_terminal(sys.stdout):
        raise UserError("Sealed data would be written to the terminal: give -o FILE, or redirect standard output.")
    sealed = output or default_output(path)
    record = seal_path(path, sealed, recipients_of(to or []), sys.stdin, sys.stdout)
    if record is None:
        return 0
    if as_json:
        print_json({"path": sealed, **asdict(record)})
        return 0
    rows = "" if record.rows is None else f", {count_noun(record.rows, 'row')}"
    line("sealed", f"{sealed}, {record.bytes:,} bytes{rows}, to {count_noun(len(record.recipients), 'recipient')}")
    line("sha256", record.sha256, whole=True)
    return 0


def _release(path: str, output: str, evidence: Path, policy: Path, signing_key: Path, state: Path | None) -> int:
    """Seals the data key to the machine that made the evidence, if that passes the policy."""
    from wgpu_lora.files.atomic import check_new, write_new_bytes
    from wgpu_lora.files.json_files import read_bytes
    from wgpu_lora.protect.attestation.claims import MAX_BYTES
    from wgpu_lora.protect.broker.broker import open_broker
    from wgpu_lora.protect.memory_protection import harden
    from wgpu_lora.protect.sealed.keys import DataKey, SigningKey

    check_new(output, "--output")  # before the nonce is used up
    harden()
    signed = read_bytes(evidence, MAX_BYTES)
    with DataKey.read(path) as key, open_broker(policy, SigningKey.read(signing_key), key, state) as broker:
        token = broker.decide(signed)
    write_new_bytes(output, token.encode(), "--output")
    line("released", f"{output}: copy it to the machine that waits for it")
    return 0


def open_sealed(
    sealed: Annotated[str, typer.Argument(metavar="SEALED", help="Sealed file; - for standard input.")],
    key: Annotated[Path, file("Data key of one of its recipients.")],
    output: Annotated[str, file(OPENED_FILE, "PATH", *OUTPUT)],
) -> int:
    """Open a sealed file or directory, and write it in the clear.

    Nothing is left if it is damaged or incomplete, or if the key does not open it. Standard output gets each chunk of
    64 KiB as soon as it has been authenticated, so use what it got only if the exit code is 0.
    """
    from wgpu_lora.protect.memory_protection import harden
    from wgpu_lora.protect.sealed.keys import DataKey
    from wgpu_lora.protect.sealed.sealed_files import unseal_path

    harden()
    with DataKey.read(key) as data_key:
        unseal_path(sealed, output, data_key, sys.stdin, sys.stdout)
    if output != "-":
        line("opened", output)
    return 0
