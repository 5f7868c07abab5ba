"""wgpu-lora protect keygen: a new key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.console import line, print_json
from wgpu_lora.cli.parameters import Json


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
    from wgpu_lora.protect.extra import check_libraries

    check_libraries()
    from wgpu_lora.protect.hygiene.host import harden
    from wgpu_lora.protect.sealed.new_keys import new_data_key, new_signing_key

    harden()
    if signing:
        public = new_signing_key(path)
        beside = f"{path}.pub"
        if as_json:
            print_json({"path": str(path), "public": beside, "keyid": public.keyid})
        else:
            line("private", f"{path} (keep it secret)")
            line("public", beside, whole=True)
            line("key id", public.keyid, whole=True)
        return 0
    recipient = new_data_key(path)
    if as_json:
        print_json({"path": str(path), "recipient": recipient})
    else:
        line("private", f"{path} (keep it secret)")
        line("recipient", recipient, whole=True)
    return 0
