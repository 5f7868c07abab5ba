"""wgpu-lora protect nonce: a nonce for evidence that comes as a file."""

from __future__ import annotations

import typer

from wgpu_lora.cli.protect.broker import PolicyOption, SigningOption, StateOption


def nonce(policy: PolicyOption, signing_key: SigningOption, state: StateOption = None) -> int:
    """Print a nonce, to be attested on a machine that cannot reach the broker.

    It is recorded in the broker's log, can be used once, and expires as the policy says.
    """
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.protect.broker.offline import nonce_for_files
    from wgpu_lora.protect.hygiene.host import harden
    from wgpu_lora.protect.sealed.keys import SigningKey

    harden()
    typer.echo(nonce_for_files(policy, SigningKey.read(signing_key), state))
    return 0
