"""A broker's process from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wgpu_lora.protect.broker.decide import Broker
from wgpu_lora.protect.broker.serve import serve
from wgpu_lora.protect.hygiene import host as machine
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, SigningKey


def default_state(policy: Path) -> Path:
    """Where a broker of this policy has its log, if --state is not given."""
    return policy.with_name(f"{policy.name.removesuffix('.toml')}.broker")


def run(
    policy: Path,
    key: Path,
    signing: Path,
    host: str,
    port: int,
    tls: tuple[Path, Path] | None,
    state: Path | None,
    tell: Callable[[str], None],
    per_minute: int,
) -> None:
    """Serve until a signal ends the process; then the keys are wiped.

    Args:
        policy, key, signing: files. state: None takes `default_state`.
        host, port, tls, per_minute: as `serve` takes them.
        tell: called with lines for the broker's owner.

    Raises:
        UserError: a file cannot be read, the state or the address cannot be used, or TLS is needed.
    """
    facts = machine.harden().facts
    rules, directory = Policy.read(policy), state or default_state(policy)
    data_key = DataKey.read(key)
    try:
        signing_key = SigningKey.read(signing)
        try:
            with Broker(directory, rules, signing_key, data_key, tell) as broker:
                tell(f"Policy {rules.name}, version {rules.version}, SHA-256 {rules.sha256}.")
                tell(f"Data key {data_key.recipient}, broker's key {broker.public.keyid}.")
                tell(f"Log {directory} at {broker.head}.")
                broker.note("started", {"host": facts, "recipient": data_key.recipient})
                try:
                    serve(broker, host, port, tls, tell, per_minute)
                finally:
                    broker.note("stopped", {})
                    tell(f"Stopped; the log is at {broker.head}.")
        finally:
            signing_key.wipe()
    finally:
        data_key.wipe()
