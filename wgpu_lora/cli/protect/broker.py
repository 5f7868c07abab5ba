"""wgpu-lora protect broker and nonce: the release of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from wgpu_lora.errors import UserError
from wgpu_lora.names.text import escape_unprintable


def file(text: str, metavar: str = "FILE", *names: str, **options: Any) -> Any:
    """An option that names a file; by default named as its parameter."""
    return typer.Option(*names, metavar=metavar, help=text, **options)


POLICY = "policy.toml: what evidence must state."
SIGNING_KEY = "The broker's private key, which signs releases."
STATE = "Directory of the broker's signed log. [default: POLICY.broker beside the policy]"
OUTPUT = ("--output", "-o")
Policy = Annotated[Path, file(POLICY)]
SigningKeyFile = Annotated[Path, file(SIGNING_KEY)]
State = Annotated[Path | None, file(STATE, "DIR")]


def broker(
    policy: Policy,
    key: Annotated[Path, file("The data key, an age identity.")],
    signing_key: SigningKeyFile,
    host: Annotated[str, typer.Option(help="Name or address; needs TLS if not loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one. [0<=x<=65535]")] = 8713,
    tls_cert: Annotated[Path | None, file("Certificate chain in PEM.")] = None,
    tls_key: Annotated[Path | None, file("The certificate's private key in PEM.")] = None,
    state: State = None,
    requests_per_minute: Annotated[
        int, typer.Option(help="Requests from one address; a refusal counts as five. [x>=1]")
    ] = 60,
) -> int:
    """Release a data key to trainers whose evidence passes a policy, until Ctrl-C.

    Every nonce, decision and report of progress is in a signed log before it is answered. The policy is read once.
    """
    from wgpu_lora.protect.broker.broker import open_broker
    from wgpu_lora.protect.broker.broker_app import serve
    from wgpu_lora.protect.memory_protection import harden
    from wgpu_lora.protect.sealed.keys import DataKey, SigningKey

    if not 0 <= port <= 65535:
        raise UserError(f"--port must be between 0 and 65535, not {port}.")
    if requests_per_minute < 1:
        raise UserError(f"--requests-per-minute must be at least 1, not {requests_per_minute}.")
    if (tls_cert is None) != (tls_key is None):
        raise UserError("--tls-cert and --tls-key belong together: give both, or none.")
    tls = (tls_cert, tls_key) if tls_cert and tls_key else None

    def tell(text: str) -> None:
        typer.echo(escape_unprintable(text, "\n"))

    protection = harden().facts
    with (
        DataKey.read(key) as data_key,
        SigningKey.read(signing_key) as signing,
        open_broker(policy, signing, data_key, state, tell) as opened,
    ):
        rules = opened.policy
        tell(f"Policy {rules['policy.name']}, version {rules['policy.version']}, SHA-256 {rules.sha256}.")
        tell(f"Data key {data_key.recipient}, broker's key {opened.public.keyid}.")
        tell(f"Log {opened.directory} at {opened.head}.")
        opened.note("started", {"host": protection, "recipient": data_key.recipient})
        try:
            serve(opened, host, port, tls, tell, requests_per_minute)
        finally:
            opened.note("stopped", {})
            tell(f"Stopped; the log is at {opened.head}.")
    return 0


def nonce(policy: Policy, signing_key: SigningKeyFile, state: State = None) -> int:
    """Print a nonce, to be attested on a machine that cannot reach the broker.

    It is recorded in the broker's log, can be used once, and expires as the policy says.
    """
    from wgpu_lora.protect.broker.broker import open_broker
    from wgpu_lora.protect.memory_protection import harden
    from wgpu_lora.protect.sealed.keys import SigningKey

    harden()
    with open_broker(policy, SigningKey.read(signing_key), state=state) as opened:
        typer.echo(opened.nonce())
    return 0
