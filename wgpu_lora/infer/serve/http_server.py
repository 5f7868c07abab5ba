"""The process of the server: its engine, its address, and its end."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from wgpu_lora.errors import UserError, reason
from wgpu_lora.events import Events
from wgpu_lora.infer.answers import tokenizer_of
from wgpu_lora.infer.engine import Engine
from wgpu_lora.infer.serve.app import Access, make_app
from wgpu_lora.infer.serve.engine_thread import EngineThread
from wgpu_lora.infer.serve.prompts import Limits
from wgpu_lora.infer.serve.service import Service
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.adapter_set import SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_files import read_model
from wgpu_lora.processes.signals import on_end_signal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEAD_SECONDS = 30.0  # until the whole head of a request has come
MAX_CONNECTIONS = 4096
OTHER_FILES = 32  # that the process may open beside connections
NOTE_SECONDS = 600.0  # between two lines about too many connections
MAX_SLOWDOWN = 3.0  # of answers, by the prompts of others, so that waits stay below 5 times as steps vary


class HttpServer(Server):
    """uvicorn's server, with fewer connections than the process may have files open, so that a new one is answered.

    Those that wait for their client make room for others, the one that has waited longest first.

    Args:
        end_seconds: that requests may take once the server ends.
    """

    def __init__(self, app: ASGIApp, end_seconds: int | None = None) -> None:
        config = Config(
            app, http=H11Protocol, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
            proxy_headers=False, server_header=False, timeout_graceful_shutdown=end_seconds,
        )  # fmt: skip
        super().__init__(config)
        self._limit = connection_limit()
        self._since: dict[Any, float] = {}  # (connection, its newest request) -> since when it waits for its client
        self._noted = -NOTE_SECONDS
        self._tasks: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `serve`: uvicorn's handlers would raise them again after the end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for sock in sockets or []:
            sock.setblocking(False)
            self._tasks.append(asyncio.create_task(self._accept(sock)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        end = time.monotonic() - HEAD_SECONDS
        for (connection, _), since in self._waiting().items():
            if since < end:
                connection.transport.abort()
        return await super().on_tick(counter)

    def _waiting(self) -> dict[Any, float]:
        """The connections that wait for a head, a body or the next request, with their newest request or None."""
        now, connections = time.monotonic(), cast(set[H11Protocol], self.server_state.connections)
        keys = [(connection, cycle) for connection in connections
                if (cycle := connection.cycle) is None or cycle.response_complete or cycle.more_body]  # fmt: skip
        self._since = {key: self._since.get(key, now) for key in keys}
        return self._since

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        make = partial(H11Protocol, self.config, self.server_state, self.lifespan.state)
        while True:
            try:
                while len(self.server_state.connections) >= self._limit:
                    await self._make_room()
                accepted, _ = await loop.sock_accept(sock)
                _, connection = await loop.connect_accepted_socket(make, accepted)
                self._since[connection, None] = time.monotonic()
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # the process has too many other files open
                    await self._make_room()

    async def _make_room(self) -> None:
        oldest = sorted(self._waiting().items(), key=lambda item: item[1])[: max(1, self._limit // 16)]
        for (connection, _), _ in oldest:
            connection.transport.abort()
        if time.monotonic() - self._noted > NOTE_SECONDS:
            self._noted = time.monotonic()
            print(
                f"wgpu-lora: there are {len(self.server_state.connections)} connections, as many as the limit of open "
                "files allows: those that send nothing are closed, the oldest first.", file=sys.stderr, flush=True
            )  # fmt: skip
        await asyncio.sleep(0 if oldest else 0.1)


def connection_limit() -> int:
    """The most connections, by the files that the process may open beside those that it has open now."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else files - psutil.Process().num_fds() - OTHER_FILES
    return max(1, min(MAX_CONNECTIONS, free))


def open_engine(
    adapters: Mapping[str, Path],
    *,
    model: str,
    device: str | None,
    base_dtype: str,
    max_loras: int | None,
    max_lora_rank: int | None,
    dora: bool,
    show: Callable[[LoadedModel], AbstractContextManager[Events]],
    **options: Any,
) -> Engine:
    """An engine with its model and adapters.

    Args:
        max_loras, max_lora_rank: on the device; by default, as the adapters need.
        dora: whether there is room for DoRA's magnitudes even if these adapters have none.
        show: reports on loading the model. options: of `Engine`.

    Raises:
        UserError: the model or an adapter cannot be opened, or does not fit.
    """
    opened = open_model(model, device, base_dtype)
    tokenizer_of(opened)
    read = {name: read_adapter_for(opened.config, directory) for name, directory in adapters.items()}
    specs = [SlotSpec.of(*files) for files in read.values()]
    with show(opened) as events:
        engine = Engine(
            opened,
            max_loras=len(read) if max_loras is None else max_loras,
            max_lora_rank=max_lora_rank or max((spec.rank for spec in specs), default=16),
            dora=dora or any(spec.dora for spec in specs),
            max_slowdown=MAX_SLOWDOWN,
            events=events,
            **options,
        )
    for name, files in read.items():
        engine.load_adapter(name, *files)
    engine.compile()  # so that no request waits for it
    return engine


def listen(host: str, port: int, unix_socket: Path | None) -> socket.socket:
    """A socket at an address. Raises UserError: it cannot be used."""
    try:
        if unix_socket is None:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        with socket.socket(socket.AF_UNIX) as probe:
            if unix_socket.is_socket() and probe.connect_ex(str(unix_socket)) == errno.ECONNREFUSED:
                unix_socket.unlink()  # of a server that was killed
        result = socket.socket(socket.AF_UNIX)
        result.bind(str(unix_socket))
        unix_socket.chmod(0o600)
        result.listen()  # now, so that another server finds it in use
        return result
    except OSError as error:
        where = f"--unix-socket {unix_socket}" if unix_socket else f"--host {host} --port {port}"
        raise UserError(f"{where} cannot be used ({reason(error)}): give another one.") from None


def serve(
    make: Callable[[Mapping[str, Path]], Engine],
    adapters: Mapping[str, Path],
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    unix_socket: Path | None = None,
    api_key: str | None = None,
    origins: tuple[str, ...] = (),
    allow_runtime_lora: bool = False,
    limits: Limits,
    end_seconds: int = 30,
    tell: Callable[[str], None] = print,
    note: Callable[[str], None] = print,
) -> None:
    """Answer requests until a signal: what runs may finish within `end_seconds`, or until a second signal.

    Args:
        make: opens the model and makes the engine with these adapters; called again if the device is lost.
        adapters: directories by name. name: of the base model.
        port: 0 takes a free one.
        tell: called with the server's address once it can be used. note: with what the user should know before.

    Raises:
        UserError: the address cannot be used, the model or an adapter cannot be opened, or the device was lost twice.
    """
    with listen(host, port, unix_socket) as sock:
        engine = make(adapters)
        model = engine.model
        decoder = read_model(model.path).tokenizer
        assert decoder
        server: list[HttpServer] = []

        def stop() -> None:
            for instance in server:
                instance.should_exit = True

        thread = EngineThread(
            engine,
            make,
            adapters,
            name,
            engine.max_num_seqs + limits.queue,
            stop,
        )
        try:
            service = Service(thread, model, decoder, engine.max_model_len, name, limits)
            for text in service.notes:
                note(text)
            hosts = LOOPBACK if unix_socket is None and host in LOOPBACK and not api_key else None
            app = make_app(service, Access(api_key, hosts, origins), allow_runtime_lora)
            server.append(HttpServer(app, end_seconds))
            url_host = f"[{host}]" if ":" in host else host
            tell(str(unix_socket) if unix_socket else f"http://{url_host}:{sock.getsockname()[1]}")

            def end(_: int) -> None:
                server[0].force_exit = server[0].should_exit
                server[0].should_exit = True

            with on_end_signal(end):
                asyncio.run(server[0].serve([sock]))
        finally:
            thread.close()
            if unix_socket:
                unix_socket.unlink(missing_ok=True)
        if thread.failure:
            raise thread.failure
