"""The broker as an HTTP server: an ASGI application, and what keeps requests from using up memory, time and disk."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from wgpu_lora.errors import UserError
from wgpu_lora.processes.signals import on_end_signal
from wgpu_lora.protect.broker.broker import Broker, BrokerRefusal
from wgpu_lora.protect.broker.broker_client import MEDIA_TYPE, is_loopback, resolve

MAX_EVIDENCE, MAX_PROGRESS = 2 << 20, 16 << 10  # bytes of bodies; evidence takes 0.2 MB
REFUSED = 4  # requests that a refusal counts as, beside its own
AT_ONCE = 4  # bodies that are parsed at the same time
BODY_SECONDS = 10.0
PER_MINUTE = 60  # requests from an address; from all of them ten times as many
CONNECTIONS = 64  # at the same time; further ones get the status 503
CONNECTION_SECONDS = 30.0  # that a connection may last
HEADER_BYTES = 16 << 10
END_SECONDS = 5
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2, for which uvicorn's own are older ones


def make_app(
    broker: Broker, tell: Callable[[str], None] = lambda line: None, per_minute: int = PER_MINUTE
) -> Starlette:
    """POST /v1/nonce, /v1/release and /v1/progress, GET /v1/health.

    Answers are JSON. Those to refused requests have `error`, a sentence, and `failures`, the rules that failed.

    Args:
        tell: called with a line about each request that could not be decided.
        per_minute: requests from an address, and ten times as many from all of them.
    """
    rate, turns = Rate(per_minute), asyncio.Semaphore(AT_ONCE)

    def post(path: str, limit: int, does: Callable[[bytes], dict[str, Any]]) -> Route:
        async def answer(request: Request) -> Response:
            address = request.client.host if request.client else ""
            rate.take(address)
            if "origin" in request.headers:  # a page in the owner's browser can reach a loopback address, too
                raise BrokerRefusal("The broker answers no browsers: ask with wgpu-lora.")
            body = await read_body(request, limit)
            async with turns:
                try:
                    return JSONResponse(await run_in_threadpool(does, body))
                except BrokerRefusal:
                    rate.count(address, REFUSED)  # it has taken room in the log
                    raise

        return Route(path, answer, methods=["POST"])

    def progress(body: bytes) -> dict[str, Any]:
        broker.progress(body)
        return {"status": "recorded"}

    async def health(request: Request) -> Response:
        await run_in_threadpool(broker.check)
        facts = {"policy": broker.policy.as_dict(), "recipient": broker.recipient, "keyid": broker.public.keyid}
        return JSONResponse({"status": "ok", **facts})

    async def error_response(request: Request, error: Exception) -> Response:
        """Messages of other errors name files of the broker's machine, which are not the client's business."""
        if isinstance(error, BrokerRefusal):
            return JSONResponse({"error": error.lines[0], "failures": error.failures}, error.status)
        if isinstance(error, HTTPException):
            sentence = f"The broker has no {request.method} {request.url.path:.80}: ask as the broker's client does."
            return JSONResponse({"error": sentence, "failures": []}, error.status_code)
        tell(str(error) if isinstance(error, UserError) else f"The broker failed with {type(error).__name__}.")
        sentence = "The broker cannot record or date its decisions now: ask its owner to read what it prints."
        return JSONResponse({"error": sentence, "failures": []}, 503)

    routes = [
        post("/v1/nonce", 0, lambda _: {"nonce": broker.nonce(), "seconds": broker.policy["nonce.seconds"]}),
        post("/v1/release", MAX_EVIDENCE, lambda body: {"release": broker.decide(body)}),
        post("/v1/progress", MAX_PROGRESS, progress),
        Route("/v1/health", health),
    ]
    handlers = dict.fromkeys((UserError, HTTPException, Exception), error_response)
    return Starlette(routes=routes, exception_handlers=handlers)


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body, read no further than `limit` bytes and for no longer than `BODY_SECONDS`.

    Raises:
        BrokerRefusal: it is too long or too slow, compressed, or of another media type.
    """
    headers = request.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise BrokerRefusal("The body is compressed: send it as it is.", status=415)
    if limit and headers.get("content-type", "").split(";")[0].strip().lower() not in (MEDIA_TYPE, "application/json"):
        raise BrokerRefusal(f"The body must have the content type {MEDIA_TYPE}: set it.", status=415)
    too_long = BrokerRefusal(f"The body is longer than {limit:,} bytes: shorten it.", status=413)
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 15 or int(length) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if len(body) + len(part) > limit:
                    raise too_long
                body += part
    except TimeoutError:
        raise BrokerRefusal(f"The body took longer than {BODY_SECONDS:g} s: send it faster.", status=408) from None
    except ClientDisconnect:
        raise BrokerRefusal("The body ended early: send all of it.", status=400) from None
    return bytes(body)


class Rate:
    """Requests of the current minute, by address.

    Args:
        limit: how many there may be from an address in a minute; from all of them ten times as many.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._minute, self._counts = limit, -1, Counter[str]()

    def take(self, address: str) -> None:
        """Count a request. Raises BrokerRefusal if there were too many."""
        if self._minute != (minute := int(time.monotonic() // 60)):
            self._minute, self._counts = minute, Counter()
        if self._counts[address] >= self._limit or self._counts.total() >= 10 * self._limit:
            raise BrokerRefusal("There are too many requests: wait a minute, then ask again.", status=429)
        self.count(address, 1)

    def count(self, address: str, requests: int) -> None:
        """Count more requests than were made, for one that was costly."""
        self._counts[address] += requests


# -- the server --------------------------------------------------------------------------------------------------------


class _BriefProtocol(H11Protocol):
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
        per_minute: as for `make_app`.

    Raises:
        UserError: the address cannot be used, or is not loopback and there is no certificate; or TLS cannot be set up.
    """
    certificate, key = tls or (None, None)
    config = Config(
        make_app(broker, tell, per_minute), http=_BriefProtocol, ws="none", lifespan="off", log_config=None,
        access_log=False, proxy_headers=False, server_header=False, limit_concurrency=CONNECTIONS,
        headers=[("Connection", "close"), ("Cache-Control", "no-store")], h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=END_SECONDS, ssl_ciphers=CIPHERS, ssl_certfile=certificate,
        ssl_keyfile=key and str(key),
        ssl_keyfile_password="",  # else OpenSSL would ask the terminal for the password of a protected key
    )  # fmt: skip
    try:
        config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise UserError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({error}): give a certificate and its key, "
            "in PEM, without a password."
        ) from None
    sockets = listen(host, port, tls is not None)
    try:
        server = _Server(config)
        scheme, name = "https" if tls else "http", f"[{host}]" if ":" in host else host
        tell(f"Listening on {scheme}://{name}:{sockets[0].getsockname()[1]}")
        with on_end_signal(lambda number: setattr(server, "should_exit", True)):
            asyncio.run(server.serve(sockets))
    finally:
        for listener in sockets:
            listener.close()


def listen(host: str, port: int, encrypted: bool) -> list[socket.socket]:
    """Sockets on all addresses of a host, with one port. What is checked here is what is bound, not the name. Raises
    UserError: the name cannot be resolved, an address is in use, or not loopback without encryption."""
    addresses = resolve(host, f"--host {host!a:.80}")
    if not encrypted and not all(map(is_loopback, addresses)):
        raise UserError(f"--host {host} is not loopback, which needs TLS: give --tls-cert and --tls-key.")
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for address in addresses:
        try:
            listener = socket.create_server(
                (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            )
        except OSError as error:
            failure = error  # such as ::1 on a machine without IPv6
            continue
        port = listener.getsockname()[1]
        sockets.append(listener)
    if not sockets:
        raise UserError(f"--host {host} --port {port} cannot be used ({failure}): give another one.")
    return sockets
