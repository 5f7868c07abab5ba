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

    def send_head(self) -> Any:
        """Send the headers of a regular file of the site; other paths, and other hosts' names for this one, are errors.

        A page of another site, whose name leads here, could read the answers otherwise.
        """
        if self.headers.get("Host", HOST).partition(":")[0] not in (HOST, "localhost"):
            return self.send_error(403)
        root, path = Path(self.directory).resolve(), Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        hidden = any(part.startswith(".") for part in path.relative_to(self.directory).parts)
        if hidden or not path.is_file() or not path.resolve().is_relative_to(root):
            return self.send_error(404)
        return super().send_head()

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
