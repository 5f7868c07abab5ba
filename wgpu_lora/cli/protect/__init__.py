"""wgpu-lora protect: training on data that must not be readable on the machine's disk."""

from __future__ import annotations

import typer

from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.protect.attestation import attest, check, policy, verify
from wgpu_lora.cli.protect.broker import broker, nonce
from wgpu_lora.cli.protect.keys_and_sealing import keygen, open_sealed, seal

protect = typer.Typer(
    cls=Group,
    name="protect",
    help="Train on sealed data: keys, sealing, attestation, gated key release, and evidence.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


@protect.callback()
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


# In the order in which they are used.
protect.command(cls=Command)(keygen)
protect.command(cls=Command)(seal)
protect.command("open", cls=Command)(open_sealed)
protect.command(cls=Command)(attest)
protect.command(cls=Command)(policy)
protect.command(cls=Command)(verify)
protect.command(cls=Command)(broker)
protect.command(cls=Command)(nonce)
protect.command(cls=Command)(check)
