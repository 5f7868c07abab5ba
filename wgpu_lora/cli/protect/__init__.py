"""wgpu-lora protect: training on data that must not be readable on the machine's disk."""

from __future__ import annotations

import typer

from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.protect.attest import attest
from wgpu_lora.cli.protect.broker import broker
from wgpu_lora.cli.protect.check import check
from wgpu_lora.cli.protect.keygen import keygen
from wgpu_lora.cli.protect.nonce import nonce
from wgpu_lora.cli.protect.open import open_sealed
from wgpu_lora.cli.protect.policy import policy
from wgpu_lora.cli.protect.seal import seal
from wgpu_lora.cli.protect.verify import verify

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
