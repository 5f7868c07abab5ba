"""`generate --url`, `chat --url` and `bench serve`: what asks a server, and what it measures."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.serving.serving import FakeEngine, Serving, demo_tokenizer, serving

from wgpu_lora.cli.app import main
from wgpu_lora.infer.request import Request
from wgpu_lora.infer.serve.app import Access
from wgpu_lora.infer.serve.client import figures

TOKENIZER = demo_tokenizer()


def reply(request: object) -> list[int]:
    """The prompt's last message, which the demo's template puts in its second to last line, and the adapter."""
    prompt, adapter = TOKENIZER.decode(request.prompt, False), request.adapter  # type: ignore[attr-defined]
    last = prompt.split("<|im_start|>")[-2].removeprefix("user\n").removesuffix("<|im_end|>\n")
    return TOKENIZER.encode(f"{prompt.count('<|im_start|>')} {adapter}: {last}")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(lambda: FakeEngine(script=reply, max_model_len=2000)) as running:
        yield running


def test_generate_asks_a_server(server: Serving, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ask = ["generate", "--url", server.url, "--model", "tuned"]
    assert main([*ask, "--prompt", "one", "--prompt", "two"]) == 0
    assert capsys.readouterr().out == "2 tuned: one\n\n2 tuned: two\n"
    assert main([*ask, "--prompt", "one", "--system", "Be kind", "--json"]) == 0
    (answer,) = [json.loads(capsys.readouterr().out)[0]]
    assert (answer["text"], answer["stop_reason"]) == ("3 tuned: one", "stop")
    assert answer["token_ids"] == [*TOKENIZER.encode("3 tuned: one"), max(TOKENIZER.stop_ids)]
    rows = [{"prompt": "one", "id": 1}, {"messages": [{"role": "user", "content": "two"}], "id": 2}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*ask, "--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]) == 0
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["response"]) for row in answers] == [(1, "2 tuned: one"), (2, "2 tuned: two")]
    assert answers[0]["tokens"] == len(TOKENIZER.encode("2 tuned: one")) + 1


def test_chat_keeps_the_conversation(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/reset\nthree\n/exit\nfour\n"))
    assert main(["chat", "--url", f"{server.url}/v1"]) == 0
    assert capsys.readouterr().out == "2 None: one\n4 None: two\n2 None: three\n"


def test_chat_has_all_commands(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = tmp_path / "chat.jsonl"
    lines = ["one", "/undo", "two", f"/save {saved}", "/system Be kind", "/set temperature 0.5", "/adapter tuned",
             "three", "/retry", f"/load {saved}", "/adapters"]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "2 None: one\n2 None: two\n5 tuned: three\n5 tuned: three\n"
    assert json.loads(saved.read_text())["messages"][0] == {"role": "user", "content": "two"}
    assert "removed: one" in err
    assert "temperature = 0.5" in err
    assert f"* tuned  {server.url}" in err


@pytest.mark.parametrize(
    ("line", "part"),
    [("/nothing", "no command /nothing"), ("/adapter nobody", "no adapter 'nobody'"), ("/set seeed 3", "seeed")],
)
def test_wrong_commands_of_a_chat_with_a_server(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, part: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
    assert main(["chat", "--url", server.url]) == 2
    assert part in capsys.readouterr().err


def test_the_base_of_a_chat_is_the_servers_first_model(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/adapter all\none\n/adapter none\ntwo\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert "tuned: one" in (out := capsys.readouterr().out)
    assert "None: two" in out


def test_half_an_answer_is_no_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Ending(BaseHTTPRequestHandler):
        def answer(self, kind: str, content: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            self.answer("application/json", '{"data": [{"id": "x"}]}')

        def do_POST(self) -> None:
            choice = {"index": 0, "delta": {"content": "Half"}, "finish_reason": None}
            self.answer("text/event-stream", f"data: {json.dumps({'choices': [choice]})}\n\n")

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Ending) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        try:
            monkeypatch.setattr(sys, "stdin", io.StringIO(f"one\n/save {tmp_path / 'chat.jsonl'}\n"))
            assert main(["chat", "--url", f"http://127.0.0.1:{other.server_port}"]) == 2
        finally:
            other.shutdown()
    assert "ended before its answer did" in capsys.readouterr().err
    assert not (tmp_path / "chat.jsonl").exists()


@pytest.mark.parametrize(("options", "expected"), [([], 100), (["--max-new-tokens", "3"], 3)])
def test_chat_asks_for_what_a_small_server_allows(
    monkeypatch: pytest.MonkeyPatch, options: list[str], expected: int
) -> None:
    requests: list[tuple[int, int | None]] = []

    def script(request: Request) -> list[int]:
        requests.append((len(request.prompt), request.max_new_tokens))
        return [300]

    with serving(lambda: FakeEngine(script=script, max_model_len=100)) as small:
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
        assert main(["chat", "--url", small.url, *options]) == 0
    prompt, new = requests[0]
    assert new == min(expected, 100 - prompt)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--url", "http://127.0.0.1:1"], "does not answer"),
        (["--url", "nowhere"], "is not an address"),
        (["--url", "http://[::1"], "is not an address"),
        (["--url", "http://127.0.0.1:port"], "is not an address"),
        (["--url", "http://"], "is not an address"),
        (["--url", "URL", "--model", "none"], "There is no model 'none'"),
        (["--url", "URL", "--device", "0"], "--device does nothing with --url"),
        (["--url", "URL", "--prompt-format", "alpaca"], "--prompt-format alpaca"),
    ],
)
def test_what_a_server_cannot_do_is_one_sentence(
    server: Serving, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    options = [server.url if argument == "URL" else argument for argument in arguments]
    assert main(["generate", "--prompt", "x", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert part in line


@pytest.mark.parametrize("answer", ["{}", "[]", "5", '{"data": []}', '{"data": [{"id": "x"}]}', "<html>", "\xff"])
def test_other_servers_are_refused(capsys: pytest.CaptureFixture[str], answer: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode("latin-1"))

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        try:
            assert main(["generate", "--prompt", "x", "--url", f"http://127.0.0.1:{other.server_port}"]) == 2
        finally:
            other.shutdown()
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not answer as one of OpenAI's API" in line


def test_a_person_goes_on_after_a_refusal(
    server: Serving, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", "x " * 3000, "two"])
    monkeypatch.setattr("wgpu_lora.cli.inference.line_reader.is_terminal", lambda stream: stream is sys.stdin)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/exit"))
    assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "2 None: one\n4 None: two\n"
    assert "2,000 tokens" in err


def test_the_key_is_sent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda: FakeEngine(script=reply, max_model_len=2000), access=Access("secret")) as server:
        assert main(["generate", "--url", server.url, "--prompt", "x"]) == 2
        monkeypatch.setenv("WGPU_LORA_API_KEY", "secret")
        assert main(["generate", "--url", server.url, "--prompt", "x"]) == 0
    assert "API key" in capsys.readouterr().err


def test_a_server_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with serving(lambda: FakeEngine(max_model_len=1000, seconds=0.005)) as server:
        assert main([
            "bench", "serve", "--url", server.url, "--model", "tuned", "--model", "base", "--num-prompts", "8",
            "--max-concurrency", "1,4", "--input-len", "5", "--output-len", "12", "--json", str(path),
        ]) == 0  # fmt: skip
    single, four = map(json.loads, path.read_text().splitlines())
    assert (single["max_concurrency"], four["max_concurrency"]) == (1, 4)
    assert single["completed"] == 8
    assert single["total_output_tokens"] == 8 * 12
    assert single["median_tpot_ms"] > 4
    assert four["output_throughput"] > single["output_throughput"]
    assert "TTFT p50" in capsys.readouterr().out


def test_figures_are_what_their_names_say() -> None:
    values = figures([(3, 3, [0.1, 0.2, 0.4]), (5, 2, [0.3, 0.4])], 2.0, 2)
    assert values["request_throughput"] == 1
    assert values["output_throughput"] == 2.5
    assert values["total_input_tokens"] == 8
    assert values["mean_ttft_ms"] == pytest.approx(200)
    assert values["mean_tpot_ms"] == pytest.approx(125)
    assert values["median_itl_ms"] == pytest.approx(100)
