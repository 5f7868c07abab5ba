"""The speed of a server under load; figures are named as those of `vllm bench serve`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from wgpu_lora.infer.serve.client import ServerClient

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
