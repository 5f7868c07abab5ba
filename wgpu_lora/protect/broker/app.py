"""The broker's HTTP interface, an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from wgpu_lora.errors import UserError
from wgpu_lora.protect.broker.decide import Broker
from wgpu_lora.protect.broker.limits import Rate, read_body
from wgpu_lora.protect.broker.refusal import Refused

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
            raise Refused("The broker answers no browsers: ask with wgpu-lora.")
        body = await read_body(request, limit)
        async with turns:
            try:
                return JSONResponse(await run_in_threadpool(does, body))
            except Refused:
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
        assert isinstance(error, Refused)
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
    handlers: dict[Any, Any] = {Refused: refused, UserError: undecided, HTTPException: unknown, Exception: undecided}
    return Starlette(routes=[*routes, Route("/v1/health", health)], exception_handlers=handlers)
