"""wgpu-lora serve: the process, with the demo model on a device."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from openai import OpenAI
from support.serving.serving import save_adapter

from wgpu_lora.cli.app import main
from wgpu_lora.events import SILENT
from wgpu_lora.infer.request import Request
from wgpu_lora.infer.serve.http_server import open_engine
from wgpu_lora.weights.base_formats import AUTO

SECONDS = float(os.environ.get("WGPU_LORA_SECONDS", "20"))
CLIENTS = 64
PROMPTS = [f"Write a function that {what}." for what in (
    "adds two numbers", "reverses a text", "counts the vowels of a text", "returns the largest of three numbers",
    "tells whether a number is even", "removes duplicates of a list",
)]  # fmt: skip


class Process(NamedTuple):
    url: str
    process: subprocess.Popen[str]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def text(self, model: str, prompt: str, **options: Any) -> str:
        messages: Any = [{"role": "user", "content": prompt}]
        options = {"max_tokens": 24, "temperature": 0, **options}
        answer = self.client.chat.completions.create(model=model, messages=messages, **options)
        return answer.choices[0].message.content or ""


@contextmanager
def process(*arguments: str, files: int | None = None) -> Iterator[Process]:
    """files: that it may open."""
    command = [sys.executable, "-m", "wgpu_lora", "serve", "--model", "demo", "--port", "0", *arguments]
    if files:
        command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout
            line = running.stdout.readline()
            assert line.startswith("Listening on ")
            yield Process(line.removeprefix("Listening on ").strip(), running)
        finally:
            running.kill()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Eight adapters of different ranks and kinds."""
    root = tmp_path_factory.mktemp("adapters")
    kinds: list[dict[str, Any]] = [{}, {"use_rslora": True}, {"use_dora": True}, {"rank": 8}]
    return {
        f"a{i}": save_adapter(root / f"a{i}", **{"rank": 2 + i, "seed": i, "scale": 0.1, **kinds[i % 4]})
        for i in range(8)
    }


def test_it_serves_adapters_and_finishes_what_runs(adapters: dict[str, Path]) -> None:
    modules = [f"{name}={directory}" for name, directory in list(adapters.items())[:3]]
    with process("--lora-modules", *modules, "--max-model-len", "512", "--max-num-seqs", "4") as server:
        assert [model.id for model in server.client.models.list()] == ["demo", "a0", "a1", "a2"]
        alone = {name: server.text(name, PROMPTS[0]) for name in ("demo", "a0", "a1", "a2")}
        assert len(set(alone.values())) > 1
        with ThreadPoolExecutor(4) as pool:
            together = dict(zip(alone, pool.map(lambda name: server.text(name, PROMPTS[0]), alone), strict=True))
        assert together == alone
        schema: Any = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                       "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert json.loads(server.text("a1", "Hi", response_format=form, temperature=1)) in ({"n": 1}, {"n": 2})
        stream = server.client.completions.create(
            model="a0", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_what_does_not_finish_in_time_is_cut_off(ends: list[signal.Signals], stream: bool) -> None:
    seconds = "1" if len(ends) == 1 else "60"
    with process("--max-model-len", "2048", "--max-num-seqs", "1", "--end-seconds", seconds) as server:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
            figure = 'num_requests_running{model_name="demo"} 1.0'
            while figure not in httpx.get(f"{server.url}/metrics").text:
                time.sleep(0.02)
            begin = time.monotonic()
            for end in ends:
                server.process.send_signal(end)
                time.sleep(0.3)
            assert server.process.wait(20) == 0
            assert time.monotonic() - begin < 15
            error = answer.exception()
            assert isinstance(error, httpx.HTTPError) if error else answer.result().status_code in (200, 503)
        assert server.process.stderr
        assert "Traceback" not in server.process.stderr.read()


def test_a_flood_of_idle_connections_stops_no_answers() -> None:
    with process("--max-model-len", "1024", "--max-num-seqs", "2", files=160) as server, ExitStack() as flood:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        stream = iter(
            server.client.completions.create(
                model="demo", prompt="x", max_tokens=600, stream=True, extra_body={"ignore_eos": True}
            )
        )
        next(stream)
        for number in range(300):
            connection = flood.enter_context(socket.create_connection(address, timeout=10))
            if number % 3:  # the others send nothing at all
                head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
                connection.sendall(head + b"\r\n" * (number % 3 == 2))
            if number % 60 == 59:
                assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
                assert server.text("demo", "Hi", max_tokens=2)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        server.process.kill()
        assert server.process.stderr
        (line,) = server.process.stderr.read().splitlines()
        assert "as many as the limit of open files allows" in line


def test_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s"
    with process("--unix-socket", str(path), "--max-model-len", "128", "--max-num-seqs", "1"):
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://server/v1/models").json()["data"][0]["id"] == "demo"
            assert main(["serve", "--model", "demo", "--unix-socket", str(path)]) == 2
            assert "already in use" in capsys.readouterr().err
            assert client.get("http://server/health").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--host", "203.0.113.1"], "--host 203.0.113.1"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--lora-modules", "a=/none"], "/none"),
        (["--lora-modules", "a="], "--lora-modules a= is not"),
        (["--lora-modules", "a=/x", "a=/y"], "--lora-modules gives two adapters the name 'a'"),
        (["--kv-cache-dtype", "bf16"], "use f32 or f16"),
        (["--model", "ADAPTER"], "give it as --lora-modules"),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], adapters: dict[str, Path], arguments: list[str], part: str
) -> None:
    options = [str(adapters["a0"]) if argument == "ADAPTER" else argument for argument in arguments]
    assert main(["serve", "--model", "demo", "--port", "0", *options]) == 2
    assert part in capsys.readouterr().err


def test_an_adapter_cannot_have_the_base_models_name(
    capsys: pytest.CaptureFixture[str], adapters: dict[str, Path]
) -> None:
    assert main(["serve", "--lora-modules", f"demo={adapters['a0']}"]) == 2
    assert "base model's name, demo" in capsys.readouterr().err


def test_no_request_waits_for_compilers() -> None:
    engine = open_engine(
        {}, model="demo", device=None, base_dtype=AUTO, max_loras=None, max_lora_rank=None, dora=False,
        show=lambda model: nullcontext(SILENT), max_model_len=64, max_num_seqs=2,
    )  # fmt: skip
    try:
        assert engine.stats().generated_tokens == 0
        engine.add(Request([300], logprobs=1, max_new_tokens=2))
        while engine.busy:
            engine.step()
            assert engine.step_seconds  # None if a program was compiled
    finally:
        engine.close()
        engine.model.unload()


@pytest.mark.slow
def test_many_clients_on_eight_adapters_get_what_they_get_alone(adapters: dict[str, Path]) -> None:
    """For WGPU_LORA_SECONDS: every fourth request is cut off by its client."""
    modules = [f"{name}={directory}" for name, directory in adapters.items()]
    names = ["demo", *adapters]
    with process(
        "--lora-modules", *modules, "--max-model-len", "128", "--max-num-seqs", "32", "--max-loras", "6"
    ) as server:
        alone = {(name, prompt): server.text(name, prompt) for name in names for prompt in PROMPTS}
        wrong: list[Any] = []
        counts = {"answers": 0, "cut": 0}
        end = time.monotonic() + SECONDS

        def work(number: int) -> None:
            client, turn = server.client, number
            while time.monotonic() < end:
                turn += 1
                name, prompt = names[(turn * 7 + number) % len(names)], PROMPTS[turn % len(PROMPTS)]
                messages: Any = [{"role": "user", "content": prompt}]
                stream = client.chat.completions.create(
                    model=name, messages=messages, max_tokens=24, temperature=0, stream=True
                )
                if turn % 4 == 0:
                    next(iter(stream))
                    stream.close()
                    counts["cut"] += 1
                    continue
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                counts["answers"] += 1
                if text != alone[name, prompt]:
                    wrong.append((name, prompt, text))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
        memory = psutil.Process(server.process.pid).memory_info
        for thread in threads:
            thread.start()
        warm = min(120.0, SECONDS / 2)
        time.sleep(warm)
        before = memory().rss
        for thread in threads:
            thread.join()
        grown = memory().rss - before
        figures = httpx.get(f"{server.url}/metrics").text
        print(json.dumps({**counts, "wrong": len(wrong), "rss_grown": grown, "seconds": SECONDS}))
        assert not wrong
        assert counts["answers"] > CLIENTS / 2
        assert counts["cut"]
        assert 'num_requests_running{model_name="demo"} 0.0' in figures
        assert 'num_requests_waiting{model_name="demo"} 0.0' in figures
        assert grown < 20 << 20
