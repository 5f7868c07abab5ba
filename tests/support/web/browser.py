"""Headless Chromium, driven by its DevTools protocol over a pipe, and a server of a folder."""

from __future__ import annotations

import base64
import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--enable-unsafe-webgpu", "--disable-dev-shm-usage", "--no-first-run")


class Browser:
    """A browser with one page. `errors`: what the page wrote to its console as an error, and its exceptions."""

    def __init__(self, profile: Path):
        ours, theirs = os.pipe(), os.pipe()  # commands, answers
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]

        def descriptors() -> None:  # the protocol's are 3 and 4
            reading, writing = os.dup(ours[0]), os.dup(theirs[1])
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=descriptors, pass_fds=(3, 4, ours[0], theirs[1]), stderr=subprocess.DEVNULL
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._out, self._in = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self._number, self._session, self.errors, self.requests = 0, None, list[str](), list[str]()
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return json.loads(data)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if values["type"] == "error":
                self.errors.append(
                    str([argument.get("value", argument.get("description")) for argument in values["args"]])
                )
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, code: str) -> Any:
        """The value of the body of an async function, as JSON."""
        expression = f"(async () => {{ {code} }})()"
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"{condition}: not within {seconds} s; {self.errors}; {self.text()}"
            time.sleep(0.1)

    def text(self) -> str:
        return self.evaluate("return document.body.innerText")

    def screenshot(
        self, path: Path, width: int = 1100, height: int = 900, dark: bool = False, whole: bool = True
    ) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._out.close()
        self._in.close()


@contextmanager
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        result = Browser(Path(profile))
        try:
            yield result
        finally:
            result.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
