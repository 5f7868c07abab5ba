"""The worker's side: reads a job, runs it, and writes its events as JSON lines to standard output."""

from __future__ import annotations

import _thread
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, TextIO, get_type_hints

from wgpu_lora.cluster.worker.job_file import KINDS, SCHEMA, arguments, checked, read_job
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.files.json_files import parse_object, to_json
from wgpu_lora.names.spelling import IN_JSON, naming
from wgpu_lora.names.text import join_words
from wgpu_lora.processes.signals import discard_when_closed
from wgpu_lora.train.run.stop_reasons import Requests

ORPHANED = 129  # the exit code of a job whose parent is gone, as after SIGHUP


@dataclass(frozen=True)
class JobResult:
    """The result of a job whose exit code may not be 0; `reason` is for the user."""

    result: Any
    code: int
    reason: str


class EventWriter(Events):
    """Writes the events of a job: an object per line with the schema, the event's name, the time in seconds since the
    epoch, and the event's values, named after the parameters of the methods of Events."""

    def __init__(self, out: TextIO, requests: TextIO | None = None):
        self._out, self._requests, self._lock = out, requests, threading.Lock()

    def emit(self, event: str, **facts: Any) -> None:
        line = to_json({"schema": SCHEMA, "event": event, "time": time.time(), **facts}, default=_plain) + "\n"
        with self._lock:  # `listen` answers on another thread
            self._out.write(line)
            self._out.flush()

    def answer(self, side: Any) -> None:
        """Answer requests, JSON lines on standard input, by calling functions of `side`, until the input ends.

        Raises:
            UserError: a line is not a request, or `side` has no such method, or one with other arguments.
        """
        for line in self._requests or ():
            self.emit("answer", **_answer(side, line))

    def listen(self, side: Any) -> None:
        """Answer requests while the job runs, on a thread of its own, until the input ends, which ends the process at
        once: its parent is gone. One that cannot be answered gets the reason, as `refused`.

        Raises:
            UserError: there is no input to read requests from.
        """
        if self._requests is None:
            raise UserError("Requests are read from standard input, where this job is: give it in a file.")
        threading.Thread(target=self._listen, args=(self._requests, side), daemon=True).start()

    def _listen(self, requests: TextIO, side: Any) -> None:
        with suppress(OSError, ValueError):  # ValueError: what is written there is not text, so by nobody we know
            for line in requests:
                try:
                    answer = _answer(side, line)
                except UserError as error:
                    answer = {"refused": str(error)}
                self.emit("answer", **answer)
        os._exit(ORPHANED)  # also while a kernel runs


def _answer(side: Any, line: str) -> dict[str, Any]:
    """The answer of a function of `side` to a request. Raises UserError as `EventWriter.answer` does."""
    methods = {name: run for name, run in inspect.getmembers(side, inspect.isroutine) if not name.startswith("_")}
    request = parse_object(line.encode("utf-8", "replace"), "The request on standard input", cure="correct it")
    name = request.pop("request", None)
    if not isinstance(name, str) or name not in methods:
        raise UserError(f"The request {name!r:.60} is not known: choose one of {', '.join(methods)}.")
    result: dict[str, Any] = methods[name](**_checked_values(name, methods[name], request))
    return result


def _checked_values(name: str, method: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    """The values of a request, checked against the method's annotations."""
    hints, signature = get_type_hints(method), inspect.signature(method)
    try:
        signature.bind(**request)
        return {key: checked(signature.parameters[key], hints[key], value) for key, value in request.items()}
    except (TypeError, ValueError) as error:
        raise UserError(f"The request '{name}' cannot be answered ({error}): correct it.") from None


def _telling(name: str) -> Any:
    names = list(inspect.signature(getattr(Events, name)).parameters)[1:]

    def tell(self: EventWriter, *values: Any) -> None:
        facts = dict(zip(names, values, strict=True))
        as_one = len(names) == 1 and is_dataclass(values[0]) and not isinstance(values[0], type)
        self.emit(name, **(asdict(values[0]) if as_one else facts))

    return tell


for _name in [name for name in vars(Events) if not name.startswith("_")]:
    setattr(EventWriter, _name, _telling(_name))


def _plain(value: Any) -> Any:
    """Convert values that JSON does not support: paths, and dataclasses such as an answer."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def work(source: str) -> int:
    """Run the job in a file, or on standard input if `source` is '-', and return its exit code.

    The last event is `result` or `error`. All other output goes to stderr.

    Raises:
        UserError, KeyboardInterrupt or any other exception that ended the job, after its `error` event.
    """
    with _only_events() as out:
        port = EventWriter(out, None if source == "-" else sys.stdin)
        try:
            job = read_job(source)
            run = KINDS[job.kind]
            port.emit("begin", job=job.kind, pid=os.getpid())
            with naming(IN_JSON):
                value = run(port, **arguments(run, job))
        except BaseException as error:
            port.emit("error", kind=type(error).__name__, message=_message(error))
            raise
        result = value if isinstance(value, JobResult) else JobResult(value, 0, "")
        port.emit("result", code=result.code, said=result.reason, result=result.result)
        return result.code


def _message(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@contextmanager
def _only_events() -> Iterator[TextIO]:
    """A stream to standard output that no other output gets into; errors are ignored once the reader is gone."""
    if sys.stdout is None:
        raise UserError("There is no standard output to write events to: connect it to a pipe or a file.")
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        try:
            yield discard_when_closed(output)
        finally:
            sys.stdout.flush()
            os.dup2(output.fileno(), 1)


class TrainingRequests(Requests):
    """The requests `stop` and `end`. names: of a pipeline's adapters; None for a single run, which has no name."""

    def __init__(self, names: Collection[str] | None = None):
        super().__init__()
        self._names = names

    def side(self) -> _Side:
        """The functions that answer, for `EventWriter.listen`."""
        return _Side(self, self._names)


class _Side:
    def __init__(self, requests: Requests, names: Collection[str] | None):
        self._requests, self._names = requests, names

    def stop(self) -> dict[str, Any]:
        """Interrupt the job, as SIGTERM does: it saves a checkpoint, and can be resumed."""
        if hasattr(signal, "pthread_kill"):  # also wakes a main thread that waits for memory
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        else:
            _thread.interrupt_main(signal.SIGTERM)
        return {"request": "stop"}

    def end(self, adapter: str | None = None) -> dict[str, Any]:
        """End an adapter after the current step, with its results."""
        if self._names is not None and adapter not in self._names:
            raise UserError(f"There is no adapter {adapter!r:.60} to end: choose one of {join_words([*self._names])}.")
        self._requests.end(None if self._names is None else adapter)
        return {"request": "end", "adapter": adapter}
