"""The broker's HTTP interface, an ASGI application."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from wgpu_lora.errors import UserError
from wgpu_lora.protect.broker.broker import Broker, BrokerRefusal, default_state
from wgpu_lora.protect.broker.broker_client import is_loopback, resolve
from wgpu_lora.protect.hygiene import memory_protection as machine
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.keys import DataKey, SigningKey
from wgpu_lora.signals import on_end_signal

MAX_EVIDENCE, MAX_PROGRESS = 2 << 20, 16 << 10  # bytes of bodies; evidence takes 0.2 MB
REFUSED = 4  # requests that a refusal counts as, beside its own
AT_ONCE = 4  # bodies that are parsed at the same time


def make_app(broker: Broker, tell: Callable[[str], None] = lambda line: None, rate: Rate | None = None) -> Starlette:
    """POST /v1/nonce, /v1/release and /v1/progress, GET /v1/health.

    Answers are JSON. Those to refused requests have `error`, a sentence, and `failures`, the rules that failed.

    Args:
        tell: called with a line about each request that could not be decided. rate: None makes one.
    """
    rate = rate or Rate()
    turns = asyncio.Semaphore(AT_ONCE)

    async def act(request: Request, limit: int, does: Callable[[bytes], dict[str, Any]]) -> Response:
        address = request.client.host if request.client else ""
        rate.take(address)
        if "origin" in request.headers:  # a page in the owner's browser can reach a loopback address, too
            raise BrokerRefusal("The broker answers no browsers: ask with wgpu-lora.")
        body = await read_body(request, limit)
        async with turns:
            try:
                return JSONResponse(await run_in_threadpool(does, body))
            except BrokerRefusal:
                rate.charge(address, REFUSED)  # it has taken room in the log
                raise

    async def nonce(request: Request) -> Response:
        seconds = broker.policy.nonce_seconds
        return await act(request, 0, lambda _: {"nonce": broker.nonce(), "seconds": seconds})

    async def release(request: Request) -> Response:
        return await act(request, MAX_EVIDENCE, lambda body: {"release": broker.decide(body)})

    async def progress(request: Request) -> Response:
        def record(body: bytes) -> dict[str, Any]:
            broker.progress(body)
            return {"status": "recorded"}

        return await act(request, MAX_PROGRESS, record)

    async def health(request: Request) -> Response:
        await run_in_threadpool(broker.check)
        facts = {"policy": broker.policy.as_dict(), "recipient": broker.recipient, "keyid": broker.public.keyid}
        return JSONResponse({"status": "ok", **facts})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, BrokerRefusal)
        return JSONResponse({"error": error.lines[0], "failures": error.failures}, error.status)

    async def undecided(request: Request, error: Exception) -> Response:
        """Messages of other errors name files of the broker's machine, which are not the client's business."""
        tell(str(error) if isinstance(error, UserError) else f"The broker failed with {type(error).__name__}.")
        said = "The broker cannot record or date its decisions now: ask its owner to read what it prints."
        return JSONResponse({"error": said, "failures": []}, 503)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = f"The broker has no {request.method} {request.url.path:.80}: ask as the broker's client does."
        return JSONResponse({"error": said, "failures": []}, error.status_code)

    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/v1/nonce": nonce,
        "/v1/release": release,
        "/v1/progress": progress,
    }
    routes = [Route(path, does, methods=["POST"]) for path, does in posts.items()]
    handlers: dict[Any, Any] = {
        BrokerRefusal: refused,
        UserError: undecided,
        HTTPException: unknown,
        Exception: undecided,
    }
    return Starlette(routes=[*routes, Route("/v1/health", health)], exception_handlers=handlers)


MEDIA_TYPES = ("application/vnd.dsse.envelope.v1+json", "application/json")
BODY_SECONDS = 10.0
MAX_ADDRESSES = 4096
PER_MINUTE = 60  # requests from an address; from all of them ten times as many


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body, read no further than `limit` bytes and for no longer than `BODY_SECONDS`.

    Raises:
        Refused: it is too long or too slow, compressed, or of another media type.
    """
    headers = request.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise BrokerRefusal("The body is compressed: send it as it is.", status=415)
    if limit and headers.get("content-type", "").split(";")[0].strip().lower() not in MEDIA_TYPES:
        raise BrokerRefusal(f"The body must have the content type {MEDIA_TYPES[0]}: set it.", status=415)
    too_long = BrokerRefusal(f"The body is longer than {limit:,} bytes: shorten it.", status=413)
    stated = headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 15 or int(stated) > limit:
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
    """Token buckets, one for each client's address and one for all.

    Args:
        one, all_: requests per minute, which may also come at once.
    """

    def __init__(self, one: int = PER_MINUTE, all_: int = 10 * PER_MINUTE) -> None:
        self._one, self._all_ = one, all_
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was
        self._total = float(all_), time.monotonic()

    def take(self, address: str) -> None:
        """Count a request. Raises Refused if there were too many."""
        mine, total, now = self._now(address)
        if min(mine, total) < 1:
            raise BrokerRefusal("There are too many requests: wait a minute, then ask again.", status=429)
        self._set(address, mine - 1, total - 1, now)

    def charge(self, address: str, cost: float) -> None:
        """Count a request that was let through as `cost` further ones, which may leave less than none."""
        mine, total, now = self._now(address)
        self._set(address, mine - cost, total - cost, now)

    def _now(self, address: str) -> tuple[float, float, float]:
        now = time.monotonic()
        mine = self._left(self._buckets.get(address, (self._one, now)), self._one, now)
        total = self._left(self._total, self._all_, now)
        return mine, total, now

    def _set(self, address: str, mine: float, total: float, now: float) -> None:
        self._buckets[address], self._total = (mine, now), (total, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    @staticmethod
    def _left(bucket: tuple[float, float], per_minute: int, now: float) -> float:
        return min(per_minute, bucket[0] + (now - bucket[1]) * per_minute / 60)


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


def run_broker(
    policy: Path,
    key: Path,
    signing: Path,
    host: str,
    port: int,
    tls: tuple[Path, Path] | None,
    state: Path | None,
    tell: Callable[[str], None],
    per_minute: int,
) -> None:
    """Serve until a signal ends the process; then the keys are wiped.

    Args:
        policy, key, signing: files. state: None takes `default_state`.
        host, port, tls, per_minute: as `serve` takes them.
        tell: called with lines for the broker's owner.

    Raises:
        UserError: a file cannot be read, the state or the address cannot be used, or TLS is needed.
    """
    facts = machine.harden().facts
    rules, directory = Policy.read(policy), state or default_state(policy)
    data_key = DataKey.read(key)
    try:
        signing_key = SigningKey.read(signing)
        try:
            with Broker(directory, rules, signing_key, data_key, tell) as broker:
                tell(f"Policy {rules.name}, version {rules.version}, SHA-256 {rules.sha256}.")
                tell(f"Data key {data_key.recipient}, broker's key {broker.public.keyid}.")
                tell(f"Log {directory} at {broker.head}.")
                broker.note("started", {"host": facts, "recipient": data_key.recipient})
                try:
                    serve(broker, host, port, tls, tell, per_minute)
                finally:
                    broker.note("stopped", {})
                    tell(f"Stopped; the log is at {broker.head}.")
        finally:
            signing_key.wipe()
    finally:
        data_key.wipe()
