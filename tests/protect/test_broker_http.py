"""The broker over HTTP: its application, its process, and its client."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import json
import os
import select
import signal
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import jwt
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.testclient import TestClient
from support.protect.brokers import JOB, Owner, Trainer, serving
from support.protect.policies import digest

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.protect.broker import broker as decisions
from wgpu_lora.protect.broker import broker_app, broker_client
from wgpu_lora.protect.broker.broker import BrokerRefusal, open_broker, sign_progress
from wgpu_lora.protect.broker.broker_app import MAX_EVIDENCE, MEDIA_TYPE, Rate, make_app
from wgpu_lora.protect.broker.broker_client import MAX_ANSWER, TRIES, BrokerClient
from wgpu_lora.protect.sealed.keys import SigningKey

T = TypeVar("T")
DSSE = {"Content-Type": MEDIA_TYPE}


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def client(owner: Owner, messages: list[str]) -> Iterator[TestClient]:
    with owner.broker() as broker:
        yield TestClient(make_app(broker, messages.append), raise_server_exceptions=False)


# -- the application, without a server ---------------------------------------------------------------------------------

REQUESTS: list[tuple[str, dict[str, str], bytes, int]] = [
    ("/v1/nonce", {"Origin": "null"}, b"", 403),  # of a browser
    ("/v1/nonce", {"Origin": "http://127.0.0.1:8713"}, b"", 403),
    ("/v1/release", {}, b"{}", 415),
    ("/v1/release", {"Content-Type": "text/plain"}, b"{}", 415),
    ("/v1/release", {**DSSE, "Content-Encoding": "gzip"}, gzip.compress(b"0" * 10_000, mtime=0), 415),
    ("/v1/release", DSSE, b"", 400),
    ("/v1/release", DSSE, b"\0" * 1000, 400),
    ("/v1/release", DSSE, b"[" * 100_000, 400),
    ("/v1/release", DSSE, b"0" * (MAX_EVIDENCE + 1), 413),
    ("/v1/release", {**DSSE, "Content-Length": "104857600"}, b"0", 413),
    ("/v1/release", {**DSSE, "Content-Length": "9" * 5000}, b"0", 413),
    ("/v1/release", {**DSSE, "Content-Length": "-1"}, b"0", 413),
    ("/v1/progress", DSSE, b"0" * 17_000, 413),
    ("/v1/progress", DSSE, b"{}", 400),
    ("/v1/nonce", {}, b"0", 413),
    ("/v2/nonce", {}, b"", 404),
    ("/v1/health", {}, b"", 405),
]


def test_malformed_requests_are_refused(client: TestClient) -> None:
    for path, headers, body, status in REQUESTS:
        answer = client.post(path, content=body, headers=headers)
        assert answer.status_code == status, (path, headers)
        assert set(answer.json()) == {"error", "failures"}
        assert client.get("/v1/health").status_code == 200


def test_refusals_name_the_rules_and_no_secret(owner: Owner, client: TestClient) -> None:
    nonce = client.post("/v1/nonce").json()["nonce"]
    trainer = Trainer(owner)
    job = {**trainer.claims(nonce)["job"], "data": [{"role": "data", "sha256": "guess" * 1000}]}
    answer = client.post("/v1/release", content=trainer.evidence(nonce, job=job), headers=DSSE)
    assert answer.status_code == 403
    (failure,) = answer.json()["failures"]
    assert failure["rule"] == "data.sha256"
    assert len(failure["found"]) <= 200
    assert "data.sha256" in answer.json()["error"]
    assert "AGE-SECRET" not in answer.text


def answered(client: TestClient, receive: Callable[[], Any]) -> int:
    """The status that an application answers a release with, whose body `receive` gives."""
    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    async def receive_() -> Any:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": receive(), "more_body": True}

    headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/release", "headers": headers, "query_string": b"",
        "client": ("127.0.0.1", 1),
    }  # fmt: skip
    asyncio.run(client.app(scope, receive_, send))
    return int(answers[0]["status"])


def test_long_and_slow_bodies_are_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    tracemalloc.start()
    assert answered(client, lambda: sent.append(b"") or bytes(1 << 16)) == 413  # type: ignore[func-returns-value]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sent) << 16 <= MAX_EVIDENCE + (1 << 17)
    assert peak < 4 * MAX_EVIDENCE
    monkeypatch.setattr(broker_app, "BODY_SECONDS", 0.05)
    assert answered(client, lambda: b"0") == 408


def test_errors_of_the_brokers_machine_are_told_to_its_owner_alone(
    owner: Owner, client: TestClient, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def broken(*_: Any) -> None:
        raise RuntimeError("AGE-SECRET-KEY-1")

    with monkeypatch.context() as patch:
        patch.setattr("wgpu_lora.protect.evidence.signed_log.os.fsync", full)
        answer = client.post("/v1/nonce")
    assert answer.status_code == 503
    assert str(owner.directory) not in answer.text
    assert "No space left on device" in messages[-1]
    nonce = client.post("/v1/nonce").json()["nonce"]  # the next one may be recorded
    with monkeypatch.context() as patch:
        patch.setattr(decisions, "make_release", broken)
        answer = client.post("/v1/release", content=Trainer(owner).evidence(nonce), headers=DSSE)
    assert answer.status_code == 500
    assert "AGE-SECRET" not in answer.text + str(owner.lines())
    answer = client.post("/v1/release", content=Trainer(owner).evidence(nonce), headers=DSSE)
    assert answer.json()["failures"][0]["rule"] == "evidence.nonce"
    monkeypatch.setattr(decisions.secrets, "token_hex", broken)
    assert client.post("/v1/nonce").status_code == 503
    assert messages[-1] == "The broker failed with RuntimeError."


def test_a_client_cannot_ask_more_often_than_allowed_nor_take_all_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(broker_app.time, "monotonic", lambda: now[0])
    rate = Rate(3)

    def refused(address: str) -> None:
        with pytest.raises(BrokerRefusal, match="too many"):
            rate.take(address)

    for _ in range(3):
        rate.take("a")
    refused("a")
    rate.take("b")
    rate.count("b", 4)  # a refusal
    refused("b")
    for number in range(22):
        rate.take(f"c{number}")
    refused("d")
    now[0] = 60.0
    for address in "abd":
        rate.take(address)


# -- the process -------------------------------------------------------------------------------------------------------


def test_a_process_from_its_start_over_attacks_to_sigterm(owner: Owner) -> None:
    with serving(owner) as served:
        client, trainer = BrokerClient(served.url, owner.signing.public), Trainer(owner)
        nonce = client.nonce()
        evidence = trainer.evidence(nonce)
        assert trainer.opened(client.release(evidence), evidence, nonce).key.text() == owner.data.text()
        client.report(sign_progress(JOB, 3, digest(3), trainer.keys.signing))
        with pytest.raises(UserError, match=r"evidence\.nonce") as caught:
            client.release(Trainer(owner, "b").evidence(nonce))
        assert any(line.startswith("evidence.nonce: expected") for line in caught.value.lines)
        process = psutil.Process(served.process.pid)
        before, big = process.memory_info().rss, 100 << 20
        for headers in ({"Content-Length": str(big)}, {"Transfer-Encoding": "chunked"}):
            status, sent = send_much(served.url, headers, big)
            assert status in (413, 0)
            assert sent < 32 << 20
        assert process.memory_info().rss - before < 48 << 20
        with socket.create_connection(address(served.url)) as slow:  # headers without end
            slow.sendall(b"POST /v1/nonce HTTP/1.1\r\n" + b"X: " + b"y" * 70_000)
            assert b" 400 " in slow.recv(4096)
        client.nonce()
        with pytest.raises(UserError, match="Another broker uses"):
            open_broker(owner.policy, owner.signing, owner.data)
        assert served.end(signal.SIGTERM) == 0
    text = "".join(served.output)
    assert "Stopped" in served.output[-1]
    assert "Traceback" not in text
    assert "AGE-SECRET" not in text
    assert (owner.stages()[0], owner.stages()[-1], owner.stages().count("released")) == ("started", "stopped", 1)


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def send_much(url: str, headers: dict[str, str], size: int) -> tuple[int, int]:
    """Send zeros until the server answers or closes: the status (0 if there was none), and the bytes that were sent."""
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    part = bytes(1 << 16)
    chunk = b"%x\r\n%b\r\n" % (len(part), part) if "Transfer-Encoding" in headers else part
    sent, answer = 0, b""
    with socket.create_connection(address(url), timeout=20) as line:
        line.sendall(f"POST /v1/release HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{head}\r\n".encode())
        with suppress(ConnectionError):  # it answered, and closed with bytes unread
            while sent < size and not select.select([line], [], [], 0)[0]:
                line.sendall(chunk)
                sent += len(part)
            answer = line.recv(1 << 16)
    return int(answer.split()[1]) if answer else 0, sent


HOOK = """
import os
import wgpu_lora.protect.broker.broker
from wgpu_lora.protect.broker.decision_log import DecisionLog
append = DecisionLog.append
def killed(self, stage, *more):
    append(self, stage, *more)
    if stage == 'released':
        os.kill(os.getpid(), 9)
DecisionLog.append = killed
"""


def test_kill_9_between_the_log_and_the_answer(owner: Owner) -> None:
    """The broker stops before it answers; what was decided stays so."""
    hook = owner.directory / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(hook), str(Path(broker_app.__file__).parents[3])])
    with serving(owner, PYTHONPATH=path) as served:
        client = BrokerClient(served.url, owner.signing.public)
        evidence = Trainer(owner).evidence(client.nonce())
        with pytest.raises(UserError, match="cannot be reached"):
            client.release(evidence)
        assert served.process.wait(20) == -signal.SIGKILL
    with owner.broker() as broker:
        with pytest.raises(UserError, match=r"evidence\.nonce"):
            broker.decide(evidence)
        broker.decide(Trainer(owner).evidence(broker.nonce()))  # the job may ask anew
    assert owner.stages() == ["started", "nonce", "released", "refused", "nonce", "released"]


def asked_here(owner: Owner, ask: Callable[[str], T], tls: tuple[Path, Path] | None = None) -> T:
    """Serve in this thread until `ask`, called with the URL in another one, returns."""
    results: list[T] = []

    def run_client(url: str) -> None:
        try:
            results.append(ask(url))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def tell(line: str) -> None:
        if "Listening" in line:
            threading.Thread(target=run_client, args=(line.split()[-1],)).start()

    with owner.broker() as broker:
        broker_app.serve(broker, "127.0.0.1", 0, tls, tell)
    return results[0]


def test_a_connection_lasts_no_longer_than_allowed(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers that come a byte at a time keep a connection busy, which uvicorn's own limits do not end."""
    monkeypatch.setattr(broker_app, "CONNECTION_SECONDS", 0.3)

    def patient(url: str) -> float:
        start = time.monotonic()
        with socket.create_connection(address(url), timeout=10) as line:
            line.sendall(b"POST /v1/nonce HTTP/1.1\r\nX-")
            with suppress(ConnectionError):
                assert line.recv(1) == b""
        return time.monotonic() - start

    assert 0.2 < asked_here(owner, patient) < 5


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    now = datetime.datetime.now(datetime.UTC)
    x509_certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert, private = directory / "cert.pem", directory / "cert.key"
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    cert.write_bytes(x509_certificate.public_bytes(pem))
    private.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    locked = key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"password"))
    (directory / "secret.key").write_bytes(locked)
    return cert, private


def test_tls_is_verified_by_the_client(owner: Owner) -> None:
    cert, private = certificate(owner.directory)
    public = owner.signing.public

    def ask(url: str) -> list[str]:
        answers = [url, BrokerClient(url, public, cert).nonce()]
        older = ssl.create_default_context(cafile=str(cert))
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(address(url)) as line,
            older.wrap_socket(line, server_hostname="127.0.0.1") as tls,
        ):
            assert "GCM" in str(tls.cipher()) or "POLY1305" in str(tls.cipher())
        for other in (url, url.replace("https", "http")):  # a CA that the system does not know, and no TLS
            with pytest.raises(UserError) as caught:
                BrokerClient(other, public, sleep=lambda seconds: None).nonce()
            answers.append(str(caught.value))
        return answers

    url, nonce, unknown, plain = asked_here(owner, ask, (cert, private))
    assert url.startswith("https://")
    assert len(nonce) == 64
    assert "self-signed certificate" in unknown
    assert "cannot be reached" in plain


def test_what_a_broker_cannot_listen_with(
    owner: Owner, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, _ = certificate(owner.directory)
    for more, message in (
        *((["--host", host], "needs TLS") for host in ("0.0.0.0", "::", "192.0.2.1")),
        (["--tls-cert", cert], "belong together"),
        (["--tls-cert", cert, "--tls-key", owner.policy], "cannot be used"),
        (["--tls-cert", cert, "--tls-key", owner.directory / "secret.key"], "without a password"),
        (["--tls-cert", cert, "--tls-key", owner.directory / "none"], "cannot be used"),
        (["--port", 70_000], "--port must be"),
        (["--host", "no.such.host.invalid"], "cannot be resolved"),
    ):
        assert main(["protect", "broker", *owner.options(), *map(str, more)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    addresses = [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
    with pytest.raises(UserError, match="needs TLS"):  # a name is loopback only if all its addresses are
        broker_app.listen("mixed.example", 0, False)


# -- the client, against servers that are no brokers -------------------------------------------------------------------

KEY = SigningKey.generate().public


def mock_client(
    handle: Callable[[httpx.Request], httpx.Response],
) -> tuple[BrokerClient, list[httpx.Request], list[float]]:
    """A client whose requests `handle` answers, the requests, and the pauses between them."""
    requests: list[httpx.Request] = []
    pauses: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        response = handle(request)
        if response.is_stream_consumed:  # as a connection gives it
            return httpx.Response(
                response.status_code, headers=response.headers, stream=httpx.ByteStream(response.content)
            )
        return response

    target = BrokerClient("http://127.0.0.1:1", KEY, sleep=pauses.append)
    target._client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1", verify=False)
    return target, requests, pauses


def test_http_is_for_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "", "broker", "ftp://127.0.0.1", "http://", "https://", "http://user:pw@127.0.0.1", "https://a?b", "https://a#b",
        "http://[::", "http://127.0.0.1:99999", "https://\0",
    ):  # fmt: skip
        with pytest.raises(UserError, match="not the URL of a broker"):
            BrokerClient(url, KEY)
    with pytest.raises(UserError, match="needs https"):
        BrokerClient("http://192.0.2.1:8713", KEY)
    monkeypatch.setattr(broker_client, "resolve", lambda *_: ["127.0.0.1", "192.0.2.1"])
    with pytest.raises(UserError, match="needs https"):
        BrokerClient("http://mixed.example", KEY)
    monkeypatch.setattr(broker_client, "resolve", lambda *_: ["127.0.0.9"])
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    local_client = BrokerClient("http://local.example:8713", KEY)
    assert local_client._client.base_url.host == "127.0.0.9"  # the name is not resolved again
    assert local_client._client.headers["Host"] == "local.example:8713"
    assert not local_client._client._mounts  # proxies are not asked
    (tmp_path / "empty.pem").write_text("none")
    for name in ("empty.pem", "missing.pem"):
        with pytest.raises(UserError, match="no certificates"):
            BrokerClient("https://127.0.0.1:1", KEY, tmp_path / name)


ANSWERS = [
    httpx.Response(200, content=b""),
    httpx.Response(200, content=b"<html>"),
    httpx.Response(200, json={}),
    httpx.Response(200, json=[1]),
    httpx.Response(200, json={"nonce": 7, "release": 7}),
    httpx.Response(200, json={"nonce": "a b" * 20, "release": "a b"}),
    httpx.Response(200, json={"nonce": "\n" * 43, "release": "e30.e30.e30"}),
    httpx.Response(200, json={"release": jwt.encode({}, SigningKey.generate().key, "ES256")}),  # of another broker
    httpx.Response(200, content=b"[" * 100_000),
    httpx.Response(302, headers={"Location": "http://192.0.2.1/"}),
    httpx.Response(404, content=b"\xff\0"),
    httpx.Response(403, json={"error": 7, "failures": 7}),
    httpx.Response(403, json={"error": "No\x1b[2J.", "failures": [7, {"rule": {}}, None]}),
    httpx.Response(200, content=b"0" * (MAX_ANSWER + 1)),
]


def test_any_other_answer_is_an_error_of_one_sentence() -> None:
    for answer in ANSWERS:
        for ask in (lambda client: client.nonce(), lambda client: client.release(b"evidence")):
            client, requests, _ = mock_client(lambda _, answer=answer: answer)
            with pytest.raises(UserError) as caught:
                ask(client)
            assert len(requests) == 1
            assert "\x1b" not in str(caught.value)
            assert len(str(caught.value)) < 1000
    read: list[int] = []

    def parts() -> Any:
        for _ in range(1000):
            read.append(1 << 16)
            yield bytes(1 << 16)

    client, _, _ = mock_client(lambda _: httpx.Response(200, content=parts()))
    with pytest.raises(UserError, match="over 262,144 bytes"):
        client.nonce()
    assert sum(read) <= MAX_ANSWER + (1 << 17)


def test_a_busy_broker_is_asked_again_but_evidence_is_sent_once() -> None:
    answers = [httpx.Response(503), httpx.Response(429), httpx.Response(200, json={"nonce": "n" * 43})]
    client, requests, pauses = mock_client(lambda _: answers[len(requests) - 1])
    assert client.nonce() == "n" * 43
    assert pauses == [0.5, 1.0]

    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("lost")

    for ask, arguments, tries in (("release", [b"evidence"], 1), ("report", [b"progress"], 2), ("nonce", [], TRIES)):
        client, requests, _ = mock_client(lose)
        with pytest.raises(UserError, match=r"cannot be reached \(lost\)"):
            getattr(client, ask)(*arguments)
        assert len(requests) == tries
    failures = [{"rule": "nonce", "expected": "one", "found": "another"}]
    for status in (503, 403):
        body = json.dumps({"error": "Refused: ask again.", "failures": failures})
        client, requests, _ = mock_client(lambda _, status=status, body=body: httpx.Response(status, content=body))
        with pytest.raises(UserError) as caught:
            client.release(b"evidence")
        assert caught.value.lines == ["Refused: ask again.", "nonce: expected one, found another"]
        assert len(requests) == 1
