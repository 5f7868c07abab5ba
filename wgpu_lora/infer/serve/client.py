"""A client of a server with OpenAI's API, by Python's own HTTP, and the speed of a server under load."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.infer.generation_options import GenerationOptions

KEY = "WGPU_LORA_API_KEY"  # environment variable
SECONDS = 600.0  # without a byte


class ServerClient:
    """Asks a server. Each call has a connection of its own, so that threads may share a client.

    Args:
        url: such as http://127.0.0.1:8000, with or without /v1.
        model: the model to ask; by default, the server's first.

    Raises:
        UserError: the address is wrong, the server does not answer, or it refuses; of all methods.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._open, port = {"http": (HTTPConnection, 80), "https": (HTTPSConnection, 443)}[parts.scheme]
            self._address = parts.hostname or "", parts.port or port
        except (ValueError, LookupError):
            self._address = "", 0
        if not self._address[0]:
            raise UserError(f"--url {url} is not an address of a server: give one such as http://127.0.0.1:8000.")
        self._prefix, self.url = parts.path.rstrip("/").removesuffix("/v1"), url
        with self.understood():
            self.model = model or self.models()[0]

    def models(self) -> list[str]:
        """The names of the server's models, its base first."""
        with self.understood():
            return [str(entry["id"]) for entry in self._json("GET", "/v1/models")["data"]]

    def complete(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a body for the path, such as /v1/completions."""
        return self._json("POST", path, {"model": self.model, **body})

    @contextmanager
    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[Any]]:
        """The chunks of an answer as they come; the answer ends with the block."""
        with self._request("POST", path, {"model": self.model, **body, "stream": True}) as response:
            yield self._chunks(response)

    def _chunks(self, response: HTTPResponse) -> Iterator[Any]:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line[6:])
                self._check(chunk)
                yield chunk

    @contextmanager
    def understood(self) -> Iterator[None]:
        """For reading answers, which may be of another program."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._not_understood(error) from None

    def _not_understood(self, error: Exception) -> UserError:
        return UserError(f"The server {self.url} does not answer as one of OpenAI's API ({error}).")

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        with self._request(method, path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _request(self, method: str, path: str, body: Any) -> Iterator[HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        connection = self._open(*self._address, timeout=SECONDS)
        try:
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                self._check(json.loads(response.read()), response.status)
            yield response
        except (OSError, HTTPException, ValueError) as error:
            raise self._not_understood(error) from None
        finally:
            connection.close()

    def _check(self, answer: Any, status: int = 200) -> None:
        if status != 200 or "error" in answer:
            error = answer.get("error") if isinstance(answer, dict) else None
            message = error.get("message") if isinstance(error, dict) else error
            raise UserError(f"The server {self.url} refuses: {message or f'it has answered with status {status}'}")


def request_of(
    prompt: str | Sequence[Mapping[str, Any]], settings: GenerationOptions, max_tokens: int | None
) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request for a prompt's answer. max_tokens: of it; None for as many as the server allows."""
    body: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    }
    body |= {"max_tokens": max_tokens, "stop": list(settings.stop)}
    if isinstance(prompt, str) and settings.prompt_format == "text":
        return "/v1/completions", {**body, "prompt": prompt}
    if settings.prompt_format not in (None, "chat"):
        raise UserError("--prompt-format alpaca does nothing with --url: use chat or text.")
    system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    kwargs = {"chat_template_kwargs": settings.template_kwargs} if settings.template_kwargs else {}
    return "/v1/chat/completions", {**body, "messages": [*system, *messages], **kwargs}


# -- the speed of a server under load, in figures named as those of `vllm bench serve` ---------------------------------

PERCENTILES = {"median": 50, "p95": 95, "p99": 99}
# Of a request: tokens of its prompt and of its answer, and seconds from its beginning to each piece of text.
Timing = tuple[int, int, list[float]]


def measure(
    clients: Sequence[ServerClient], words: int, tokens: int, requests: int, concurrency: int, seed: int = 0
) -> dict[str, Any]:
    """Figures of `requests` requests, of which `concurrency` run at a time, by the clients in turn.

    Args:
        clients: one for each model to ask.
        words: of each prompt, which are random. tokens: of each answer, if the server knows `ignore_eos`.

    Raises:
        UserError: the server refuses a request.
    """
    rng = random.Random(seed)
    prompts = [" ".join(str(rng.randrange(1000)) for _ in range(words)) for _ in range(requests)]

    def ask(number: int) -> Timing:
        body = {"prompt": prompts[number], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        times: list[float] = []
        begin, usage = time.perf_counter(), {"prompt_tokens": 0, "completion_tokens": 0}
        with clients[number % len(clients)].events("/v1/completions", body) as chunks:
            for chunk in chunks:
                if any(choice["text"] for choice in chunk["choices"]):
                    times.append(time.perf_counter() - begin)
                usage = chunk.get("usage") or usage
            return usage["prompt_tokens"], usage["completion_tokens"] or len(times), times

    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        timings = list(pool.map(ask, range(requests)))
    return figures(timings, time.perf_counter() - begin, concurrency)


def figures(timings: Sequence[Timing], seconds: float, concurrency: int) -> dict[str, Any]:
    """Throughput per second, and milliseconds to the first token (ttft), per token after it (tpot: a request's mean),
    and between two pieces (itl)."""
    tokens = sum(answer for _, answer, _ in timings)
    result: dict[str, Any] = {
        "max_concurrency": concurrency,
        "completed": len(timings),
        "duration": seconds,
        "total_input_tokens": sum(prompt for prompt, _, _ in timings),
        "total_output_tokens": tokens,
        "request_throughput": len(timings) / seconds,
        "output_throughput": tokens / seconds,
    }
    latencies = {
        "ttft": [times[0] for _, _, times in timings if times],
        "tpot": [(times[-1] - times[0]) / (answer - 1) for _, answer, times in timings if times and answer > 1],
        "itl": [gap for _, _, times in timings for gap in np.diff(times).tolist()],
    }
    for name, values in latencies.items():
        milliseconds = 1e3 * np.array(values or [0.0])
        result[f"mean_{name}_ms"] = float(milliseconds.mean())
        for word, percentile in PERCENTILES.items():
            result[f"{word}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return result
