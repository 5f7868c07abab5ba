"""The server: errors, access, limits, clients that go away, lost devices, figures, its description."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.serving.serving import FakeEngine, Serving, save_adapter, serving

from wgpu_lora.errors import NoRoomError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.gpu.device_errors import DeviceLost
from wgpu_lora.infer.serve.app import Access
from wgpu_lora.infer.serve.prompts import Limits
from wgpu_lora.models.model_files import read_model

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"Content-Type": "application/json"}


def slow() -> FakeEngine:
    """Answers that do not end by themselves for some 20 seconds."""
    return FakeEngine(script=lambda request: [300] * 1000, max_model_len=2000, seconds=0.02)


def until(condition: Callable[[], Any], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


ERRORS: list[tuple[str, Any, int, str]] = [
    ("/v1/chat/completions", b"{", 400, "Invalid JSON"),
    ("/v1/chat/completions", b"[" * 100_000, 400, "Invalid JSON"),
    ("/v1/chat/completions", b'{"messages": ["\\ud800"]}', 400, "Invalid JSON"),
    ("/v1/chat/completions", [], 400, "an object"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content part"),
    ("/v1/chat/completions", {**CHAT, "model": "none"}, 404, "no model 'none'"),
    ("/v1/chat/completions", {**CHAT, "n": 17}, 400, "n: "),
    ("/v1/chat/completions", {**CHAT, "n": 0}, 400, "n: "),
    ("/v1/chat/completions", {**CHAT, "best_of": 2}, 400, "'best_of'"),
    ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 10_000}, 400, "256 tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 300}]}, 400, "256 tokens"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, 400, "'logprobs'"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"9999": 1}}, 400, "4,099"),
    ("/v1/chat/completions", {**CHAT, "stop": [""]}, 400, "stop"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"template_date": 5}}, 400, "date"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": " "}], "continue_final_message": True},
        400,
        "no text to continue",
    ),
    ("/v1/completions", {"prompt": ""}, 400, "no tokens"),
    ("/v1/completions", {"prompt": []}, 400, "no tokens"),
    ("/v1/completions", {"prompt": [5000]}, 400, "4,099"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": ["x"] * 100}, 400, "64 items"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "'suffix'"),
    ("/tokenize", {}, 400, "'messages'"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, 404, "/openapi.json"),
    ("/v1/embeddings", {}, 404, "/openapi.json"),
]


@pytest.mark.parametrize(("path", "body", "status", "part"), ERRORS)
def test_errors_are_those_of_openai(server: Serving, path: str, body: Any, status: int, part: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(server.url + path, content=content, headers=JSON)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert part in error["message"]
    assert error["message"].endswith(".")


def test_other_methods_types_and_lengths(server: Serving) -> None:
    assert httpx.get(f"{server.url}/v1/completions").status_code == 405
    typed = httpx.post(f"{server.url}/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (typed.status_code, typed.json()["error"]["type"]) == (415, "invalid_request_error")
    with serving(limits=Limits(body=1000, seconds=0.3)) as small:
        long = httpx.post(f"{small.url}/v1/completions", json={"prompt": "x" * 1000})
        assert (long.status_code, "1,000 bytes" in long.text) == (413, True)
        with socket.create_connection(("127.0.0.1", int(small.url.rpartition(":")[2]))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                        b"Content-Length: 9\r\n\r\n{")  # fmt: skip
            connection.settimeout(10)
            assert b" 408 " in connection.recv(4096)


def test_keys_hosts_and_origins() -> None:
    access = Access("secret", ("127.0.0.1", "localhost"), ("https://page.example",))
    with serving(access=access) as server:
        get = lambda path, **headers: httpx.get(server.url + path, headers=headers)  # noqa: E731
        assert get("/v1/models").status_code == 401
        assert get("/v1/models", Authorization="Bearer wrong").json()["error"]["code"] == "invalid_api_key"
        assert get("/v1/models", Authorization="Bearer secret").status_code == 200
        assert get("/health").status_code == 200
        assert get("/health", Host="rebound.example").status_code == 403
        assert get("/health", Host="localhost:8000").status_code == 200
        origin = get("/health", Origin="https://page.example").headers
        assert origin["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-origin" not in get("/health", Origin="https://other.example").headers
    with serving() as server:
        answer = httpx.options(
            f"{server.url}/v1/models", headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
        )
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(stream: bool) -> None:
    with serving(slow) as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1000, "n": 3, "stream": stream}).encode()
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            connection.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            until(lambda: len(server.fake.running) == 3)
            if stream:
                assert b" 200 " in connection.recv(4096)
        until(lambda: server.fake.aborted == 3, 2)
        assert not server.fake.busy
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_head_must_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wgpu_lora.infer.serve.http_server.HEAD_SECONDS", 0.5)
    with serving(slow) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        answer = server.client.completions.create(model="base", prompt="x", max_tokens=60, stream=True)
        with socket.create_connection(address, timeout=10) as idle, socket.create_connection(address) as slow_head:
            slow_head.sendall(b"GET /health HTTP/1.1\r\nX: ")

            def is_closed() -> bool:
                try:
                    slow_head.sendall(b"x")
                except OSError:
                    return True
                return False

            until(is_closed)
            assert idle.recv(1) == b""
        assert len(list(answer)) == 60  # it took longer


def test_a_full_server_asks_to_wait() -> None:
    with serving(slow, limits=Limits(queue=1)) as server:
        streams = [
            server.client.completions.create(model="base", prompt="x", max_tokens=1000, stream=True) for _ in range(4)
        ]
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "n": 2})
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) > 0
        for stream in streams:
            stream.close()
        until(lambda: not server.fake.busy)


def test_a_lost_device_ends_what_runs_and_the_engine_is_made_again_once() -> None:
    with serving(slow) as server:
        results: list[Any] = []

        def ask(stream: bool) -> None:
            try:
                answer = server.client.completions.create(model="tuned", prompt="x", max_tokens=1000, stream=stream)
                results.append(list(answer) if stream else answer)
            except openai.APIError as error:
                results.append(error)

        def run_and_lose() -> None:
            threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
            for thread in threads:
                thread.start()
            until(lambda: len(server.fake.running) == 2)
            server.fake.failure = DeviceLost("GPU")
            for thread in threads:
                thread.join()

        run_and_lose()
        assert len(results) == 2
        assert all(isinstance(error, openai.APIError) and "was lost" in str(error) for error in results)
        assert {error.status_code for error in results if isinstance(error, openai.APIStatusError)} == {503}
        assert [engine.closed for engine in server.engines] == [True, False]
        assert server.client.completions.create(model="tuned", prompt="x", max_tokens=3).choices[0].text
        run_and_lose()
        until(lambda: server.engine.failure)
        assert httpx.get(f"{server.url}/health").status_code == 503
        after = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert (after.status_code, after.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert len(server.engines) == 2


def test_the_engine_is_called_from_one_thread(server: Serving) -> None:
    for _ in range(2):
        server.client.completions.create(model="base", prompt="x", max_tokens=2)
    assert len(server.fake.threads) == 1


def test_adapters_come_and_go(tmp_path: Path) -> None:
    directory = save_adapter(tmp_path / "new")
    broken = save_adapter(tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 50)

    def make() -> FakeEngine:
        result = FakeEngine()
        result.model.config = read_model(DEMO_MODEL).config
        return result

    with serving(make, allow_runtime_lora=True) as server:

        def post(path: str, **body: str) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=body)

        ask = lambda: server.client.completions.create(model="new", prompt="x", max_tokens=2)  # noqa: E731
        with pytest.raises(openai.NotFoundError):
            ask()
        assert "Success" in post("load", lora_name="new", lora_path=str(directory)).text
        ask()
        assert post("load", lora_name="new", lora_path=str(directory)).status_code == 400
        refused = post("load", lora_name="broken", lora_path=str(broken))
        assert refused.status_code == 400
        assert "broken" in refused.json()["error"]["message"]
        for missing in (str(tmp_path / "none"), "a" * 5000, "a\0"):
            assert post("load", lora_name="x", lora_path=missing).status_code == 404
        ask()
        assert post("unload", lora_name="new").status_code == 200
        assert post("unload", lora_name="new").status_code == 404
        with pytest.raises(openai.NotFoundError):
            ask()


class Small(FakeEngine):
    """Has room for one adapter in memory, and those with requests stay."""

    def load_adapter(self, name: str, adapter: Any, matrices: Any) -> None:
        if used := {request.adapter for request in (*self.running, *self.waiting)} - {None}:
            raise NoRoomError(f"{used} have requests: wait.")
        assert name not in self.adapters
        self.adapters = {name: adapter}


def small() -> FakeEngine:
    result = Small(script=lambda request: [300] * 5, seconds=0.01)
    result.model.config = read_model(DEMO_MODEL).config
    return result


def test_adapters_that_gave_way_are_read_again_whoever_asks_beside(tmp_path: Path) -> None:
    directories = {f"a{i}": save_adapter(tmp_path / f"a{i}", seed=i) for i in range(3)}

    with serving(small, adapters=(), allow_runtime_lora=True) as server:
        for name, directory in directories.items():
            body = {"lora_name": name, "lora_path": str(directory)}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code == 200

        def ask(number: int) -> int:
            body = {"model": f"a{number % 3}", "prompt": "x", "n": 2}
            return httpx.post(f"{server.url}/v1/completions", json=body).status_code

        assert [ask(number) for number in range(4)] == [200] * 4
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(48))) == {200}
        for name in directories:
            answer = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": name})
            assert answer.status_code == 200
        assert not server.fake.adapters


def test_nobody_starves_who_waits_for_an_adapter(tmp_path: Path) -> None:
    directories = {name: save_adapter(tmp_path / name) for name in ("busy", "rare")}
    with serving(small, adapters=(), allow_runtime_lora=True) as server, ThreadPoolExecutor(4) as pool:
        for name, directory in directories.items():
            body = {"lora_name": name, "lora_path": str(directory)}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code == 200

        def ask(name: str) -> int:
            return httpx.post(f"{server.url}/v1/completions", json={"model": name, "prompt": "x"}).status_code

        answered = threading.Event()

        def keep_busy() -> set[int]:
            return {ask("busy") for _ in iter(answered.is_set, True)}

        busy = [pool.submit(keep_busy) for _ in range(3)]
        until(lambda: len(server.fake.running) == 3)
        try:
            assert [ask("rare") for _ in range(3)] == [200] * 3
        finally:
            answered.set()
        assert {status for statuses in busy for status in statuses.result()} == {200}


@pytest.mark.parametrize("act", ["load", "unload"])
def test_adapters_are_loaded_and_unloaded_though_the_client_leaves(tmp_path: Path, act: str) -> None:
    def make() -> FakeEngine:
        result = slow()
        result.seconds, result.model.config = 0.5, read_model(DEMO_MODEL).config
        return result

    body = {"lora_name": "new", "lora_path": str(save_adapter(tmp_path / "new"))}
    with serving(make, adapters=(), allow_runtime_lora=True) as server:

        def post(act: str, **options: Any) -> httpx.Response:
            own = body if act == "load" else {"lora_name": "new"}
            return httpx.post(f"{server.url}/v1/{act}_lora_adapter", json=own, **options)

        if act == "unload":
            assert post("load").status_code == 200
        with server.client.completions.create(model="base", prompt="x", max_tokens=1000, stream=True):
            until(lambda: server.fake.running)
            with pytest.raises(httpx.ReadTimeout):
                post(act, timeout=0.1)  # the engine is in a step
            until(lambda: ("new" in server.fake.adapters) == (act == "load"))
        for after in ("unload", "load") if act == "load" else ("load", "unload"):
            assert post(after).status_code == 200


def test_figures_are_prometheus(server: Serving) -> None:
    server.client.completions.create(model="tuned", prompt="x", max_tokens=3, temperature=0)
    text = httpx.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens",
                 "generation_tokens", "prefix_cache_hits", "time_to_first_token_seconds"):  # fmt: skip
        assert f"wgpu_lora:{name}" in families
    samples = families["wgpu_lora:request_success"].samples
    assert any(s.labels == {"model_name": "tuned", "finished_reason": "length"} and s.value >= 1 for s in samples)


def test_the_description_has_every_reference(server: Serving) -> None:
    description = httpx.get(f"{server.url}/openapi.json").json()
    schemas = description["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "Tool", "ResponseFormat"} <= set(schemas)
    text = json.dumps(description)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(schemas)
    assert set(description["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}",
        "/v1/responses", "/health", "/metrics",
    }  # fmt: skip
