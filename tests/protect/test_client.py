"""The broker's client, against servers that are no brokers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.protect.broker import broker_client as module
from wgpu_lora.protect.broker.broker_client import MAX_ANSWER, TRIES, BrokerClient
from wgpu_lora.protect.sealed.keys import SigningKey

KEY = SigningKey.generate().public
NONCE = "n" * 43


def asking(handle: Callable[[httpx.Request], httpx.Response]) -> tuple[BrokerClient, list[httpx.Request], list[float]]:
    """A client whose requests `handle` answers, the requests, and the pauses between them."""
    seen: list[httpx.Request] = []
    pauses: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        made = handle(request)
        if made.is_stream_consumed:  # as a connection gives it
            return httpx.Response(made.status_code, headers=made.headers, stream=httpx.ByteStream(made.content))
        return made

    made = BrokerClient("http://127.0.0.1:1", KEY, sleep=pauses.append)
    made._client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1", verify=False)
    return made, seen, pauses


@pytest.mark.parametrize(
    "url",
    ["", "broker", "ftp://127.0.0.1", "http://", "https://", "http://user:pw@127.0.0.1", "https://a?b", "https://a#b", "http://[::",
     "http://127.0.0.1:99999", "https://\0"],
)  # fmt: skip
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="not the URL of a broker"):
        BrokerClient(url, KEY)


def test_http_is_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs https"):
        BrokerClient("http://192.0.2.1:8713", KEY)
    monkeypatch.setattr(module, "resolve", lambda *_: ["127.0.0.1", "192.0.2.1"])
    with pytest.raises(UserError, match="needs https"):
        BrokerClient("http://mixed.example", KEY)
    monkeypatch.setattr(module, "resolve", lambda *_: ["127.0.0.9"])
    made = BrokerClient("http://local.example:8713", KEY)
    assert made._client.base_url.host == "127.0.0.9"  # the name is not resolved again
    assert made._client.headers["Host"] == "local.example:8713"


def test_proxies_are_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert not BrokerClient("http://127.0.0.1:1", KEY)._client._mounts


def test_certificates_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("none")
    for name in ("empty.pem", "missing.pem"):
        with pytest.raises(UserError, match="no certificates"):
            BrokerClient("https://127.0.0.1:1", KEY, tmp_path / name)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, content=b""),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, json={}),
        httpx.Response(200, json=[1]),
        httpx.Response(200, json={"nonce": 7, "release": 7}),
        httpx.Response(200, json={"nonce": "a b" * 20, "release": "a b"}),
        httpx.Response(200, json={"nonce": "\n" * 43, "release": "e30.e30.e30"}),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(302, headers={"Location": "http://192.0.2.1/"}),
        httpx.Response(404, content=b"\xff\0"),
        httpx.Response(403, json={"error": 7, "failures": 7}),
        httpx.Response(403, json={"error": "No\x1b[2J.", "failures": [7, {"rule": {}}, None]}),
        httpx.Response(200, content=b"0" * (MAX_ANSWER + 1)),
    ],
)
def test_any_other_answer_is_an_error_of_one_sentence(answer: httpx.Response) -> None:
    for ask in (lambda client: client.nonce(), lambda client: client.release(b"evidence")):
        client, seen, _ = asking(lambda _: answer)
        with pytest.raises(UserError) as caught:
            ask(client)
        assert len(seen) == 1
        assert "\x1b" not in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_a_long_answer_is_not_read_to_its_end() -> None:
    read = 0

    def parts() -> Any:
        nonlocal read
        for _ in range(1000):
            read += 1 << 16
            yield bytes(1 << 16)

    client, _, _ = asking(lambda _: httpx.Response(200, content=parts()))
    with pytest.raises(UserError, match="over 262,144 bytes"):
        client.nonce()
    assert read <= MAX_ANSWER + (1 << 17)


def test_refusals_name_the_rules() -> None:
    failures = [{"rule": "nonce", "expected": "one", "found": "another"}]
    client, _, _ = asking(lambda _: httpx.Response(403, json={"error": "Refused: ask again.", "failures": failures}))
    with pytest.raises(UserError) as caught:
        client.release(b"evidence")
    assert caught.value.lines == ["Refused: ask again.", "nonce: expected one, found another"]


def test_a_busy_broker_is_asked_again_but_evidence_is_sent_once() -> None:
    answers = [httpx.Response(503), httpx.Response(429), httpx.Response(200, json={"nonce": NONCE})]
    client, seen, pauses = asking(lambda _: answers[len(seen) - 1])
    assert client.nonce() == NONCE
    assert pauses == [0.5, 1.0]

    def lost(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("lost")

    client, seen, _ = asking(lost)
    with pytest.raises(UserError, match=r"cannot be reached \(lost\)"):
        client.release(b"evidence")
    assert len(seen) == 1
    with pytest.raises(UserError, match="cannot be reached"):
        client.report(b"progress")
    assert len(seen) == 3
    with pytest.raises(UserError, match="cannot be reached"):
        client.nonce()
    assert len(seen) == 3 + TRIES
    client, seen, _ = asking(lambda _: httpx.Response(503, json={"error": "Busy.", "failures": []}))
    with pytest.raises(UserError, match=r"Busy\."):
        client.release(b"evidence")
    assert len(seen) == 1


def test_a_release_by_another_broker_is_refused() -> None:
    import jwt

    token = jwt.encode({}, SigningKey.generate().key, "ES256")
    client, _, _ = asking(lambda _: httpx.Response(200, content=json.dumps({"release": token})))
    with pytest.raises(UserError, match="not signed by this broker"):
        client.release(b"evidence")
