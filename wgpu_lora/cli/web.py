"""wgpu-lora export web, and wgpu-lora web: a page that trains in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.command import Command
from wgpu_lora.cli.console import Bar, TensorBar, line
from wgpu_lora.cli.convert import export
from wgpu_lora.cli.parameters import BaseDtype, Device, Model
from wgpu_lora.errors import UserError
from wgpu_lora.names.spelling import flag
from wgpu_lora.weights.base_formats import AUTO

SUBGROUP_SIZES = (4, 8, 16, 32)


@export.command("web", cls=Command)
def export_web(
    output: Annotated[Path, typer.Option(help="Directory for the site; it must not exist yet.")],
    model: Model = None,
    rows: Annotated[int, typer.Option(help="Rows of a batch. [x>=1]")] = 2,
    tokens: Annotated[int, typer.Option(help="Maximum tokens of a row. [x>=16]")] = 256,
    context: Annotated[int, typer.Option(help="Maximum tokens of a question with its answer.")] = 512,
    lora_r: Annotated[int, typer.Option(help="Rank of the adapter. [x>=1]")] = 16,
    subgroup_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Also export kernels for GPUs whose subgroups have this size; may be given several times.",
            metavar="|".join(map(str, SUBGROUP_SIZES)),
        ),
    ] = None,
    base_dtype: BaseDtype = AUTO,
    device: Device = None,
) -> int:
    """Write a page that trains an adapter of a model in a browser tab.

    The directory is for any static host, or for 'wgpu-lora web'. Rows and adapters never leave the page.
    """
    from wgpu_lora.files.atomic import check_new
    from wgpu_lora.models.loaded_model import open_model
    from wgpu_lora.train.web.recording import web_device
    from wgpu_lora.train.web.site import WebOptions, write_site

    check_new(output, "--output", directory=True)  # before the model may be downloaded
    sizes = tuple(subgroup_size or ())
    if wrong := [size for size in sizes if size not in SUBGROUP_SIZES]:
        raise UserError(f"{flag('subgroup_size')} {wrong[0]} is not one of {', '.join(map(str, SUBGROUP_SIZES))}.")
    opened = open_model(model or "demo", web_device(device), base_dtype)
    with Bar("exporting", opened.tensors_to_load()) as bar:
        nbytes = write_site(opened, WebOptions(rows, tokens, context, sizes), output, lora_r, TensorBar(bar))
    line("exported", f"{opened.name} into {output}, {nbytes:,} bytes of weights")
    line("see it", f"wgpu-lora web {output}")
    return 0


def web(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Site that 'export web' has written.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080,
) -> int:
    """Serve a page that trains in the browser, on 127.0.0.1 until Ctrl-C."""
    from wgpu_lora.train.web.server import HOST, site_server

    with site_server(directory, port) as server:
        line("site", f"http://{HOST}:{server.server_address[1]}/")
        server.serve_forever()
    return 0
