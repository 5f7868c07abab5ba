"""The application: routes, who may use them, their errors, and their description (OpenAPI)."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from wgpu_lora.infer.serve import schema
from wgpu_lora.infer.serve.errors import RequestError, as_request_error
from wgpu_lora.infer.serve.service import Service

HEALTH = "/health"  # which needs no key
Handler = Callable[[Any, Any], Awaitable[Response]]  # (body, its JSON) -> response


@dataclass(frozen=True)
class Access:
    """Who may use the server. hosts: names that a request may be for, so that no page of a browser reaches a server of
    this machine under a name of its own; None for any. origins: of pages that may use it (CORS)."""

    api_key: str | None = None
    hosts: Collection[str] | None = None
    origins: Collection[str] = ()


@dataclass(frozen=True)
class Endpoint:
    path: str
    summary: str
    handler: Handler
    body: type[BaseModel] | None = None


def make_app(service: Service, access: Access = Access(), allow_runtime_lora: bool = False) -> Starlette:
    """The application of a service."""
    endpoints = [
        Endpoint("/v1/chat/completions", "Answer a conversation", service.chat, schema.ChatRequest),
        Endpoint("/v1/responses", "Answer a conversation of items", service.responses, schema.ResponsesRequest),
        Endpoint("/v1/completions", "Continue a text", service.complete, schema.CompletionRequest),
        Endpoint("/v1/models", "The base and its adapters", service.models),
        Endpoint("/v1/models/{model:path}", "The base or an adapter", service.model),
        Endpoint("/tokenize", "Tokens of a text or a conversation", service.tokenize, schema.TokenizeRequest),
        Endpoint("/detokenize", "The text of tokens", service.detokenize, schema.DetokenizeRequest),
        Endpoint(HEALTH, "Whether the engine runs", service.health),
        Endpoint("/metrics", "Figures for Prometheus", service.metrics),
    ]
    if allow_runtime_lora:
        load, unload = service.load_adapter, service.unload_adapter
        endpoints.append(Endpoint("/v1/load_lora_adapter", "Load an adapter", load, schema.LoadAdapter))
        endpoints.append(Endpoint("/v1/unload_lora_adapter", "Unload an adapter", unload, schema.UnloadAdapter))
    description = openapi(endpoints)

    async def describe(_: Any, __: Any) -> Response:
        return JSONResponse(description)

    endpoints.append(Endpoint("/openapi.json", "This description", describe))
    cors = Middleware(CORSMiddleware, allow_origins=list(access.origins), allow_methods=["*"], allow_headers=["*"])
    return Starlette(
        routes=[route(endpoint, service, access) for endpoint in endpoints],
        middleware=[cors] if access.origins else [],
        exception_handlers={HTTPException: no_route},
    )


def route(endpoint: Endpoint, service: Service, access: Access) -> Route:
    async def respond(request: Request) -> Response:
        try:
            check_access(request, access)
            body, raw = None, request.path_params
            if endpoint.body:
                text = await read_body(request, service.limits.body, service.limits.seconds)
                try:
                    body, raw = endpoint.body.model_validate_json(text), json.loads(text)
                except ValidationError as error:
                    raise wrong_body(error, text) from None
            return await while_connected(request, endpoint.handler(body, raw))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except asyncio.CancelledError:  # by uvicorn, once its time to end is over
            return error_response(RequestError("The server ends: ask again once it has started anew.", 503))
        except Exception as error:
            return error_response(error)

    return Route(endpoint.path, respond, methods=["POST" if endpoint.body else "GET"])


def check_access(request: Request, access: Access) -> None:
    match = re.fullmatch(r"\[(.*)\](?::\d*)?|([^:]*?)\.?(?::\d*)?", request.headers.get("host", "").lower())
    if access.hosts is not None and (not match or (match[1] or match[2]) not in access.hosts):
        raise RequestError("This server answers requests for its own address only.", 403)
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    known = scheme.lower() == "bearer" and secrets.compare_digest(key.strip().encode(), (access.api_key or "").encode())
    if access.api_key and request.url.path != HEALTH and not known:
        raise RequestError("The API key is missing or wrong: send 'Authorization: Bearer KEY'.", 401,
                           code="invalid_api_key")  # fmt: skip


async def while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """The result of a coroutine, which ends when the client does. Raises ClientDisconnect."""
    task = asyncio.ensure_future(work)

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnection = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, disconnection}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, disconnection):
            future.cancel()


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """A request's body. Raises RequestError: it is no JSON by its headers, too long, or too slow."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise RequestError("The body must have the content type application/json: set it.", 415)
    result = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                result += part
                if len(result) > limit:
                    raise RequestError(f"The body is longer than {limit:,} bytes: shorten it.", 413)
    except TimeoutError:
        raise RequestError(f"The body took longer than {seconds:g} s: send it faster.", 408) from None
    return bytes(result)


def wrong_body(error: ValidationError, body: bytes) -> RequestError:
    """The first of a body's problems as a sentence; of a union's, one that is not about its type, or the deepest."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    value = None if problems[0]["type"] == "json_invalid" else json.loads(body)
    paths = [json_path(problem["loc"], value, problem["type"] == "missing") for problem in problems]
    path, first = min(
        zip(paths, problems, strict=True),
        key=lambda pair: (pair[1]["type"].endswith(("_type", "_parsing")), -len(pair[0])),
    )
    text = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{path:.100}: {text}." if path else f"{text}.", param=path[:100] or None)


def json_path(location: Sequence[int | str], value: Any, missing: bool) -> str:
    """The location of a problem as `messages[0].content`, without the names of types that were tried.

    Args:
        missing: whether the last part is not there.
    """
    result = ""
    for part in location:
        if isinstance(value, list) and isinstance(part, int):
            result, value = f"{result}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (missing and part == location[-1])):
            result, value = f"{result}.{part}".lstrip("."), value.get(part)
    return result


def error_response(error: Exception) -> Response:
    result = as_request_error(error)
    if result is not error and result.status == 500:
        traceback.print_exception(error)
    return JSONResponse(result.body(), result.status, result.headers)


async def no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"There is no {request.method} {request.url.path:.100}: /openapi.json lists what there is."
    response = error_response(RequestError(sentence, error.status_code, code="not_found"))
    response.headers.update(error.headers or {})  # which methods there are
    return response


def openapi(endpoints: Collection[Endpoint]) -> schema.Json:
    """The description of endpoints: their requests. Answers and errors are OpenAI's."""
    bodies, definitions = models_json_schema(
        [(endpoint.body, "validation") for endpoint in endpoints if endpoint.body],
        ref_template="#/components/schemas/{model}",
    )
    responses = {"200": {"description": "The answer"}, "default": {"description": "An object with 'error'"}}
    paths: schema.Json = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        call: schema.Json = {
            "summary": endpoint.summary,
            "operationId": re.sub(r"\W+", "_", path.strip("/{}")),
            "responses": responses,
        }
        if names := re.findall(r"{(\w+)}", path):
            call["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if endpoint.body:
            content = {"application/json": {"schema": bodies[endpoint.body, "validation"]}}
            call["requestBody"] = {"required": True, "content": content}
        paths[path] = {"post" if endpoint.body else "get": call}
    info = {"title": "wgpu-lora", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": definitions["$defs"]}}
