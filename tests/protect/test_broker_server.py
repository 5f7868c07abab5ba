"""The broker as a process: TLS, clients that misbehave, signals and kill -9."""

from __future__ import annotations

import datetime
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.brokers import JOB, Owner, Trainer, serving
from support.policies import digest

from wgpu_lora.cli import main
from wgpu_lora.errors import UserError
from wgpu_lora.protect.broker import broker_app
from wgpu_lora.protect.broker.broker import release_by_files, sign_progress
from wgpu_lora.protect.broker.broker_client import BrokerClient
from wgpu_lora.protect.evidence import dsse

T = TypeVar("T")


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def stages(owner: Owner) -> list[str]:
    return [dsse.verify(line.rstrip(b"\n"), owner.signing.public)["predicate"]["stage"] for line in owner.lines()]


def test_a_process_from_its_start_over_attacks_to_sigterm(owner: Owner) -> None:
    with serving(owner) as served:
        client = BrokerClient(served.url, owner.signing.public)
        trainer = Trainer(owner)
        nonce = client.nonce()
        evidence = trainer.evidence(nonce)
        assert trainer.opened(client.release(evidence), evidence, nonce).key.text() == owner.data.text()
        client.report(sign_progress(JOB, 3, digest(3), trainer.keys.signing))
        with pytest.raises(UserError, match=r"evidence\.nonce") as caught:
            client.release(Trainer(owner, "b").evidence(nonce))
        assert any(line.startswith("evidence.nonce: expected") for line in caught.value.lines)

        shared = client.nonce()
        asked = [Trainer(owner, f"job {number}").evidence(shared) for number in range(4)]

        def ask(signed: bytes) -> str:
            try:
                return BrokerClient(served.url, owner.signing.public).release(signed)
            except UserError as error:
                return str(error)

        with ThreadPoolExecutor(4) as pool:
            assert sum("evidence.nonce" in said for said in pool.map(ask, asked)) == 3

        process = psutil.Process(served.process.pid)
        before = process.memory_info().rss
        big = 100 << 20
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
            release_by_files(owner.policy, owner.policy, owner.data, owner.signing)
        assert served.end(signal.SIGTERM) == 0
    assert "Stopped" in served.said[-1]
    text = "".join(served.said)
    assert "Traceback" not in text
    assert "AGE-SECRET" not in text
    done = stages(owner)
    assert (done[0], done[-1]) == ("started", "stopped")
    assert done.count("released") == 2


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


def test_kill_9_between_the_log_and_the_answer(owner: Owner) -> None:
    """The broker stops before it answers; what was decided stays so."""
    hook = owner.directory / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os\n"
        "def patch():\n"
        "    from wgpu_lora.protect.broker.decision_log import DecisionLog\n"
        "    append = DecisionLog.append\n"
        "    def killed(self, stage, *more):\n"
        "        entry = append(self, stage, *more)\n"
        "        if stage == 'released':\n"
        "            os.kill(os.getpid(), 9)\n"
        "        return entry\n"
        "    DecisionLog.append = killed\n"
        "import threading\n"
        "import wgpu_lora.protect.broker.broker\n"
        "patch()\n"
    )
    path = os.pathsep.join([str(hook), str(Path(broker_app.__file__).parents[3])])
    with serving(owner, PYTHONPATH=path) as served:
        client = BrokerClient(served.url, owner.signing.public)
        nonce = client.nonce()
        evidence = Trainer(owner).evidence(nonce)
        with pytest.raises(UserError, match="cannot be reached"):
            client.release(evidence)
        assert served.process.wait(20) == -signal.SIGKILL
    with owner.broker() as broker:
        with pytest.raises(UserError, match=r"evidence\.nonce"):
            broker.decide(evidence)
        trainer, nonce = Trainer(owner), broker.nonce()
        evidence = trainer.evidence(nonce)
        trainer.opened(broker.decide(evidence), evidence, nonce)  # the job may ask anew
    assert stages(owner) == ["started", "nonce", "released", "refused", "nonce", "released"]


def asked_here(owner: Owner, ask: Callable[[str], T], tls: tuple[Path, Path] | None = None) -> T:
    """Serve in this thread until `ask`, called with the URL in another one, returns."""
    results: list[T] = []

    def asking(url: str) -> None:
        try:
            results.append(ask(url))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def tell(line: str) -> None:
        if "Listening" in line:
            threading.Thread(target=asking, args=(line.split()[-1],)).start()

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
    made = (
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
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert, private


def test_tls_is_verified_by_the_client(owner: Owner) -> None:
    cert, private = certificate(owner.directory)
    public = owner.signing.public

    def ask(url: str) -> list[str]:
        said = [url, BrokerClient(url, public, cert).nonce()]
        for other in (url, url.replace("https", "http")):  # a CA that the system does not know, and no TLS
            with pytest.raises(UserError) as caught:
                BrokerClient(other, public, sleep=lambda seconds: None).nonce()
            said.append(str(caught.value))
        return said

    url, nonce, unknown, plain = asked_here(owner, ask, (cert, private))
    assert url.startswith("https://")
    assert len(nonce) == 64
    assert "self-signed certificate" in unknown
    assert "cannot be reached" in plain


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_is_not_loopback_needs_tls(owner: Owner, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protect", "broker", *owner.options(), "--host", host]) == 2
    assert "needs TLS" in capsys.readouterr().err


def test_a_name_is_loopback_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("127.0.0.1", 0)), (2, 1, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(UserError, match="needs TLS"):
        broker_app.listen("mixed.example", 0, False)


def test_bad_certificates_and_ports_are_refused(owner: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    cert, private = certificate(owner.directory)
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    secret = owner.directory / "secret.key"
    how = serialization.BestAvailableEncryption(b"password")
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    for more, message in (
        (["--tls-cert", cert], "belong together"),
        (["--tls-cert", cert, "--tls-key", owner.policy], "cannot be used"),
        (["--tls-cert", cert, "--tls-key", secret], "without a password"),
        (["--tls-cert", cert, "--tls-key", owner.directory / "none"], "cannot be used"),
        (["--port", 70_000], "--port must be"),
        (["--host", "no.such.host.invalid"], "cannot be resolved"),
    ):
        assert main(["protect", "broker", *owner.options(), *map(str, more)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_nonces_and_releases_by_files(owner: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["protect", "nonce", "--policy", str(owner.policy), "--signing-key", str(owner.signing_file)]) == 0
    nonce = capsys.readouterr().out.strip()
    trainer, file = Trainer(owner), owner.directory / "evidence.json"
    evidence = trainer.evidence(nonce)
    with pytest.raises(UserError, match="does not exist"):
        release_by_files(file, owner.policy, owner.data, owner.signing)
    file.write_bytes(evidence)
    token = release_by_files(file, owner.policy, owner.data, owner.signing)
    assert trainer.opened(token, evidence, nonce).key.text() == owner.data.text()
    with pytest.raises(UserError, match=r"evidence\.nonce"):
        release_by_files(file, owner.policy, owner.data, owner.signing)
    assert stages(owner) == ["nonce", "released", "refused"]
