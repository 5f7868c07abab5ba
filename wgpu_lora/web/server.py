"""A server of an exported site on this machine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError, reason
from wgpu_lora.names.spelling import flag

HOST = "127.0.0.1"  # browsers allow WebGPU and workers there without a certificate
MODEL = "model.json"


class _Handler(SimpleHTTPRequestHandler):
    # Browsers refuse modules of another type, and systems may say something else.
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {".js": "text/javascript", ".mjs": "text/javascript"}

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def site_server(directory: Path, port: int = 0) -> Iterator[ThreadingHTTPServer]:
    """A server of a site on HOST that is bound, and answers once it runs. port: 0 takes a free one.

    Raises:
        UserError: there is no site, or the port is in use.
    """
    if not (directory / MODEL).is_file():
        raise UserError(f"{directory} has no {MODEL}: give a directory that 'wgpu-lora export web' has written.")
    try:
        server = ThreadingHTTPServer((HOST, port), functools.partial(_Handler, directory=str(directory)))
    except OSError as error:
        raise UserError(f"Port {port} cannot be used ({reason(error)}): choose another with {flag('port')}.") from error
    try:
        yield server
    finally:
        server.server_close()
