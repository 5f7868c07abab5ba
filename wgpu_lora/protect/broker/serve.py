"""The broker's server: addresses, TLS, slow clients, and its end."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from wgpu_lora.errors import UserError
from wgpu_lora.protect.broker.app import make_app
from wgpu_lora.protect.broker.decide import Broker
from wgpu_lora.protect.broker.limits import PER_MINUTE, Rate
from wgpu_lora.protect.broker.loopback import is_loopback, resolve
from wgpu_lora.signals import on_end_signal

CONNECTIONS = 64  # at the same time; further ones get the status 503
CONNECTION_SECONDS = 30.0  # that a connection may last
HEADER_BYTES = 16 << 10
END_SECONDS = 5


class _Brief(H11Protocol):
    """A connection that ends in time, whatever its client does: uvicorn's own limits do not count slow headers."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end = self.loop.call_later(CONNECTION_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


class _Server(Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `serve`: uvicorn's handlers would raise them again after the end."""
        yield


def serve(
    broker: Broker,
    host: str,
    port: int,
    tls: tuple[Path, Path] | None = None,
    tell: Callable[[str], None] = print,
    per_minute: int = PER_MINUTE,
) -> None:
    """Answer requests until a signal ends the process.

    Args:
        port: 0 takes a free one. tls: certificate chain and private key, in PEM.
        tell: called with lines about the server and its requests; the first one has its URL.
        per_minute: requests from an address, and ten times as many from all of them.

    Raises:
        UserError: the address cannot be used, or is not loopback and there is no certificate; or TLS cannot be set up.
    """
    context = _context(*tls) if tls else None
    sockets = listen(host, port, context is not None)
    try:
        config = Config(
            make_app(broker, tell, Rate(per_minute, 10 * per_minute)),
            http=_Brief,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=[("Connection", "close"), ("Cache-Control", "no-store")],
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEADER_BYTES,
            timeout_graceful_shutdown=END_SECONDS,
        )
        config.load()
        config.ssl = context
        server = _Server(config)
        scheme, name = "https" if tls else "http", f"[{host}]" if ":" in host else host
        tell(f"Listening on {scheme}://{name}:{sockets[0].getsockname()[1]}")
        with on_end_signal(lambda number: setattr(server, "should_exit", True)):
            asyncio.run(server.serve(sockets))
    finally:
        for one in sockets:
            one.close()


def listen(host: str, port: int, encrypted: bool) -> list[socket.socket]:
    """Sockets on all addresses of a host, with one port. What is checked here is what is bound, not the name.

    Raises:
        UserError: the name cannot be resolved, an address is in use, or not loopback without encryption.
    """
    addresses = resolve(host, f"--host {host!a:.80}")
    if not encrypted and not all(map(is_loopback, addresses)):
        raise UserError(f"--host {host} is not loopback, which needs TLS: give --tls-cert and --tls-key.")
    sockets: list[socket.socket] = []
    wrong: OSError | None = None
    for address in addresses:
        try:
            one = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            wrong = error  # such as ::1 on a machine without IPv6
            continue
        port = one.getsockname()[1]
        sockets.append(one)
    if not sockets:
        raise UserError(f"--host {host} --port {port} cannot be used ({wrong}): give another one.")
    return sockets


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    def ask() -> NoReturn:
        raise ValueError("it is protected by a password")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=ask)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UserError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({error}): give a certificate and its key, "
            "in PEM, without a password."
        ) from None
    return context
