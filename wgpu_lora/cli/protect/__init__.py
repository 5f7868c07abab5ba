"""wgpu-lora protect: training on data that must not be readable on the machine's disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from wgpu_lora.cli import command
from wgpu_lora.cli.protect.attestation import attest, check, policy, verify
from wgpu_lora.cli.protect.broker import broker, nonce
from wgpu_lora.cli.protect.keys_and_sealing import keygen, open_sealed, seal
from wgpu_lora.protect import check_libraries

protect = typer.Typer(
    cls=command.Group,
    name="protect",
    help="Train on sealed data: keys, sealing, attestation, gated key release, and evidence.",
    rich_markup_mode=None,
    invoke_without_command=True,
)


class Command(command.Command):
    """A command that needs the libraries of the extra `protect`."""

    def invoke(self, ctx: Any) -> Any:
        check_libraries()
        return super().invoke(ctx)


@protect.callback()
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


# In the order in which they are used.
COMMANDS: dict[str, Callable[..., int]] = {
    "keygen": keygen, "seal": seal, "open": open_sealed, "attest": attest, "policy": policy, "verify": verify,
    "broker": broker, "nonce": nonce, "check": check,
}  # fmt: skip
for _name, _command in COMMANDS.items():
    protect.command(_name, cls=Command)(_command)
