"""The trainer's side of the broker, and which addresses stay on this machine."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import httpx

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_object
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.protect.broker.release_token import read_release
from wgpu_lora.protect.sealed.keys import PublicKey

MEDIA_TYPE = "application/vnd.dsse.envelope.v1+json"
MAX_ANSWER = 256 << 10  # bytes
TIMEOUT = httpx.Timeout(30, connect=10)  # seconds
ANSWER_SECONDS = 60.0  # for a whole answer; httpx counts from one part to the next
TRIES, PAUSE = 4, 0.5  # of requests that may be repeated; seconds before the second one, doubled each time
BUSY = (429, 503)
DECIDED = (400, 403, 409)  # the broker has looked at what it was sent
_NONCE = re.compile(r"[\w-]{22,88}", re.ASCII)  # RFC 9711 has 8 to 88 characters


class RefusalError(UserError):
    """The broker answers, and refuses; asking again does not help."""


def is_loopback(address: str) -> bool:
    """Whether an IP address stays on this machine."""
    return ip_address(address.partition("%")[0]).is_loopback


def resolve(host: str, where: str) -> list[str]:
    """All IP addresses of a host name. Raises UserError, which starts with `where`, if there is none."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{where} cannot be resolved ({error}): check the name.") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in entries))


class BrokerClient:
    """Asks a broker, over HTTPS, or over HTTP on the same machine.

    Args:
        url: such as https://broker.example:8443. broker_key: what must have signed its releases.
        ca: certificates in PEM of those who may have signed the broker's; None takes the system's.
        sleep: called between two tries.

    Raises:
        UserError: the URL is no such URL, or `ca` cannot be read.
    """

    def __init__(
        self, url: str, broker_key: PublicKey, ca: Path | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._key, self._sleep = broker_key, sleep
        self._name = f"The broker at {escape_unprintable(url)[:200]}"
        base = _checked_url(url, self._name)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": MEDIA_TYPE}
        if base.scheme == "http":  # the address that was found to be loopback is asked, whatever the name means later
            headers["Host"] = httpx.URL(url).netloc.decode()
        self._client = httpx.Client(
            base_url=base,
            headers=headers,
            timeout=TIMEOUT,
            trust_env=base.scheme == "https",  # proxies are not asked for this machine
            verify=_context(ca),
        )

    def nonce(self) -> str:
        """A nonce for new evidence. Raises UserError."""
        nonce = self._ask("/v1/nonce", b"", repeated=True).get("nonce")
        if not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
            raise UserError(f"{self._name} answers without a nonce: check --broker and its version.")
        return nonce

    def release(self, evidence: bytes) -> str:
        """The release for evidence, a token signed by the broker, to be opened with `open_release`.

        The request is never repeated, since its nonce is used up by the first one.

        Raises:
            UserError: the broker cannot be reached, or refuses; the message names the rules that failed.
        """
        token = self._ask("/v1/release", evidence, repeated=False).get("release")
        if not isinstance(token, str):
            raise UserError(f"{self._name} answers without a release: check its version.")
        read_release(token, self._key)
        return token

    def report(self, progress: bytes) -> None:
        """Tell the broker how far the job has come, with what `sign_progress` makes.

        The training waits meanwhile, so a broker that cannot be reached is tried only twice.

        Raises:
            RefusalError: for example, another session goes on with the job. UserError: it cannot be reached.
        """
        self._ask("/v1/progress", progress, repeated=True, attempts=2)

    def _ask(self, path: str, body: bytes, repeated: bool, attempts: int = TRIES) -> dict[str, Any]:
        for number in range(attempts):
            last = number == attempts - 1
            try:
                status, data = self._answer(path, body)
                if status not in BUSY or last or not repeated:
                    break
            except (httpx.TransportError, httpx.InvalidURL, OSError) as error:
                if last or not (repeated or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)):
                    cause = escape_unprintable(str(error))[:200] or type(error).__name__
                    raise UserError(f"{self._name} cannot be reached ({cause}): check that it runs.") from None
            self._sleep(PAUSE * 2**number)
        if status != 200:
            self._raise_refusal(status, data)
        return parse_object(data, f"The answer of the{self._name[3:]}", MAX_ANSWER, cure="check the URL")

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        until, data = time.monotonic() + ANSWER_SECONDS, bytearray()
        with self._client.stream("POST", path, content=body) as response:
            for part in response.iter_raw(16 << 10):
                data += part
                if time.monotonic() > until:
                    raise httpx.ReadTimeout(f"no whole answer within {ANSWER_SECONDS:g} s")
                if len(data) > MAX_ANSWER:
                    raise UserError(f"{self._name} answers with over {MAX_ANSWER:,} bytes: check the URL.")
            return response.status_code, bytes(data)

    def _raise_refusal(self, status: int, data: bytes) -> NoReturn:
        """Raise what the broker says, which may be anything if it is not a broker."""
        try:
            answer = parse_object(data, "the answer", MAX_ANSWER)
        except UserError:
            answer = {}
        error, failures = answer.get("error"), answer.get("failures")
        if not isinstance(error, str):
            raise UserError(f"{self._name} answers with the status {status}: check the URL.")
        lines = []
        for failure in failures[:100] if isinstance(failures, list) else []:
            parts = failure if isinstance(failure, dict) else {}
            rule, expected, actual = (
                escape_unprintable(str(parts.get(name)))[:200] for name in ("rule", "expected", "found")
            )
            lines.append(f"{rule}: expected {expected}, found {actual}")
        raise (RefusalError if status in DECIDED else UserError)(escape_unprintable(error)[:500], lines)


def _checked_url(url: str, name: str) -> httpx.URL:
    """A broker's URL; one of http with an address of this machine."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, ValueError):
        parts = httpx.URL("")
    extras = parts.userinfo or parts.query or parts.fragment
    if parts.scheme not in ("http", "https") or not parts.host or extras or not 0 < (parts.port or 1) < 1 << 16:
        raise UserError(f"{url!a:.200} is not the URL of a broker: give one such as https://broker.example:8443.")
    if parts.scheme == "https":
        return parts
    addresses = resolve(parts.host, name)
    if not all(map(is_loopback, addresses)):
        raise UserError(f"{name} is not on this machine, which needs https: start the broker with TLS.")
    return parts.copy_with(host=addresses[0])


def _context(ca: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:  # ssl.SSLError is one
        raise UserError(f"{ca} holds no certificates in PEM ({error}): give the broker's, or its CA's.") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
