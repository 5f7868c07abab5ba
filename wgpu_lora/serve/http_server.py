"""The process of the server: its engine, its address, and its end."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from uvicorn import Config, Server

from wgpu_lora.errors import UserError, reason
from wgpu_lora.events import Events
from wgpu_lora.infer.answers import tokenizer_of
from wgpu_lora.infer.engine import Engine
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.adapter_set import SlotSpec
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_files import read_model
from wgpu_lora.serve.app import Access, make_app
from wgpu_lora.serve.engine_thread import EngineThread
from wgpu_lora.serve.prompts import Limits
from wgpu_lora.serve.service import Service
from wgpu_lora.signals import on_end_signal

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_SLOWDOWN = 4.0  # of answers, by the prompts of others; waits of up to 5 times are possible, as steps vary


class _Server(Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `serve`: uvicorn's handlers would raise them again after the end."""
        yield


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
        server: list[_Server] = []

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
            server.append(
                _Server(
                    Config(
                        app, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
                        server_header=False, timeout_graceful_shutdown=end_seconds,
                    )
                )
            )  # fmt: skip
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
