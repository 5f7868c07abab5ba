"""The broker's HTTP interface, without a server."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.brokers import JOB, Owner, Trainer
from support.policies import digest

from wgpu_lora.protect.broker import broker as decide
from wgpu_lora.protect.broker import broker_app
from wgpu_lora.protect.broker.broker import BrokerRefusal, sign_progress
from wgpu_lora.protect.broker.broker_app import MAX_EVIDENCE, MEDIA_TYPE, Rate, make_app

DSSE = {"Content-Type": MEDIA_TYPE}


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def client(owner: Owner, said: list[str]) -> Iterator[TestClient]:
    with owner.broker() as broker:
        yield TestClient(make_app(broker, said.append), raise_server_exceptions=False)


def test_a_session_from_nonce_to_progress(owner: Owner, client: TestClient) -> None:
    trainer = Trainer(owner)
    nonce = client.post("/v1/nonce").json()["nonce"]
    evidence = trainer.evidence(nonce)
    token = client.post("/v1/release", content=evidence, headers=DSSE).json()["release"]
    assert trainer.opened(token, evidence, nonce).key.text() == owner.data.text()
    report = sign_progress(JOB, 3, digest(3), trainer.keys.signing)
    assert client.post("/v1/progress", content=report, headers=DSSE).status_code == 200
    assert client.get("/v1/health").json()["recipient"] == owner.data.recipient


def test_browsers_are_refused(client: TestClient) -> None:
    for origin in ("null", "http://127.0.0.1:8713", "https://example.org"):
        answer = client.post("/v1/nonce", headers={"Origin": origin})
        assert (answer.status_code, list(answer.json())) == (403, ["error", "failures"])


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


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
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
    ],
)
def test_malformed_requests_are_refused(
    client: TestClient, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()) == {"error", "failures"}
    assert client.post("/v1/nonce").status_code == 200


def test_a_chunked_body_of_100_mb_is_refused_before_it_is_read(client: TestClient) -> None:
    sent = 0

    def parts() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(1600):
            sent += 1 << 16
            yield bytes(1 << 16)

    async def receive() -> Any:
        return {"type": "http.request", "body": next(body), "more_body": True}

    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    import asyncio

    body = parts()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/release",
        "headers": [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    tracemalloc.start()
    asyncio.run(client.app(scope, receive, send))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answers[0]["status"] == 413
    assert sent <= MAX_EVIDENCE + (1 << 17)
    assert peak < 4 * MAX_EVIDENCE


def test_a_body_that_comes_slowly_is_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(broker_app, "BODY_SECONDS", 0.05)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/release",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    answers: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"0", "more_body": True}

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(client.app(scope, receive, send))
    assert answers[0]["status"] == 408


def test_errors_of_the_brokers_machine_are_told_to_its_owner_alone(
    owner: Owner, client: TestClient, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wgpu_lora.protect.evidence.signed_log.os.fsync", full)
    answer = client.post("/v1/nonce")
    assert answer.status_code == 503
    assert client.get("/v1/health").status_code == 200  # the next one may be recorded
    assert str(owner.directory) not in answer.text
    assert "No space left on device" in said[-1]


def test_a_fault_of_the_broker_releases_nothing_and_shows_nothing(
    owner: Owner, client: TestClient, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("AGE-SECRET-KEY-1")

    nonce = client.post("/v1/nonce").json()["nonce"]
    monkeypatch.setattr(decide, "make_release", broken)
    answer = client.post("/v1/release", content=Trainer(owner).evidence(nonce), headers=DSSE)
    assert answer.status_code == 500
    assert "AGE-SECRET" not in answer.text + str(owner.lines())
    monkeypatch.undo()
    answer = client.post("/v1/release", content=Trainer(owner).evidence(nonce), headers=DSSE)
    assert answer.json()["failures"][0]["rule"] == "evidence.nonce"
    monkeypatch.setattr(decide.secrets, "token_hex", broken)
    answer = client.post("/v1/nonce")
    assert answer.status_code == 503
    assert said[-1] == "The broker failed with RuntimeError."


def test_a_client_cannot_ask_more_often_than_allowed_nor_take_all_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(broker_app.time, "monotonic", lambda: now[0])
    rate = Rate(one=6, all_=20)
    for _ in range(6):
        rate.take("a")
    with pytest.raises(BrokerRefusal):
        rate.take("a")
    rate.take("b")
    now[0] = 10
    rate.take("a")
    for number in range(15):
        rate.take(f"c{number}")
    with pytest.raises(BrokerRefusal):
        rate.take("d")


def test_addresses_are_remembered_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_app, "MAX_ADDRESSES", 10)
    rate = Rate(1000, 1000)
    for number in range(100):
        rate.take(str(number))
    assert len(rate._buckets) == 10
