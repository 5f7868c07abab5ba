"""Release by files, for machines that cannot reach each other: the broker's decision, rules, nonces and log."""

from __future__ import annotations

from pathlib import Path

from wgpu_lora.errors import UserError, reason
from wgpu_lora.protect.attestation.claims import MAX_BYTES
from wgpu_lora.protect.broker.decide import Broker
from wgpu_lora.protect.broker.run import default_state
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, SigningKey


def nonce_for_files(policy: Path, signing: SigningKey, state: Path | None = None) -> str:
    """A nonce for evidence that comes as a file.

    Raises:
        UserError: the policy cannot be read, or the broker's directory cannot be used.
    """
    with Broker(state or default_state(policy), Policy.read(policy), signing) as broker:
        return broker.nonce()


def release_by_files(
    evidence: Path, policy: Path, data_key: DataKey, signing: SigningKey, state: Path | None = None
) -> str:
    """The release for evidence in a file: a token, to be written to the file that the trainer waits for.

    Args:
        state: directory of the broker's log, with the nonce that the evidence must state.

    Raises:
        UserError: a file cannot be read, the broker's directory cannot be used, or a rule failed.
    """
    signed = _read(evidence)
    with Broker(state or default_state(policy), Policy.read(policy), signing, data_key) as broker:
        return broker.decide(signed)


def _read(evidence: Path) -> bytes:
    try:
        if not evidence.is_file():  # opening a pipe would block
            raise UserError(f"{evidence} is not a file: give the evidence that the trainer wrote.")
        with evidence.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UserError(f"{evidence} cannot be read ({reason(error)}): check the path.") from None
