"""The process that speaks with Ray for the driver: requests on standard input, an answer to each on standard output.

Ray may print, install signal handlers, wait for minutes, or end its process when a cluster goes away: none of it is the
driver's business. A message consists of two lengths (`<IQ`), a JSON header, and bytes.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import warnings
from contextlib import suppress
from typing import Any, BinaryIO

from wgpu_lora.cluster.facts import COORDINATOR, NAMESPACE

LONGEST = 600  # characters of an error
CLIENT = "ray://"
LENGTHS = struct.Struct("<IQ")
Message = tuple[dict[str, Any], bytes]


def send(file: BinaryIO, header: dict[str, Any], payload: bytes = b"") -> None:
    stated = json.dumps(header).encode()
    file.write(LENGTHS.pack(len(stated), len(payload)) + stated)
    file.write(payload)
    file.flush()


def receive(file: BinaryIO) -> Message:
    """The next message; EOFError at the end, OverflowError if its payload has more than `most` bytes."""
    header, payload = LENGTHS.unpack(_exactly(file, LENGTHS.size))
    return json.loads(_exactly(file, header)), _exactly(file, payload)


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError
    return data


def connected(address: str) -> dict[str, Any]:
    """Join the cluster; returns Ray's id of the node that this process is on, '' if on none (`ray://`)."""
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="FATAL")
    here = "" if address.startswith(CLIENT) else str(ray.get_runtime_context().get_node_id())
    return {"node": here}


def actor(name: str) -> Any:
    """The handle of one of our actors: `coordinator`, or `host:<node>`, which are created if they do not exist.

    Raises:
        ValueError: it is neither.
    """
    if name == COORDINATOR:
        from wgpu_lora.cluster.coordinator.start import coordinator

        return coordinator(NAMESPACE)
    kind, _, node = name.partition(":")
    if kind != "host" or not node:
        raise ValueError(f"{name!r:.80} is no actor")
    from wgpu_lora.cluster.node.start import host

    return host(node)


def answered(header: dict[str, Any], payload: bytes) -> Message:
    """The answer to a request; of a value that is bytes, they are the payload."""
    import ray

    if "connect" in header:
        return {"value": connected(header["connect"])}, b""
    arguments = [*header["args"], *([payload] if header["with_bytes"] else [])]
    try:
        call = getattr(actor(header["actor"]), header["call"]).remote(*arguments)
        value = ray.get(call, timeout=header["seconds"])
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ray.exceptions.RaySystemError) as error:
        return {"gone": _said(error)}, b""  # restarted, perhaps
    except (ConnectionError, LookupError, ray.exceptions.RpcError) as error:  # LookupError: a node has left
        return {"gone": _said(error)}, b""
    if isinstance(value, bytes):
        return {"bytes": True}, value
    return {"value": value}, b""


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the driver is gone."""
    while True:
        try:
            header, payload = receive(source)
        except EOFError:
            return
        try:
            answer = answered(header, payload)
        except (Exception, SystemExit) as error:
            answer = {"error": _said(error), "kind": type(error).__name__}, b""
        send(sink, {**answer[0], "number": header["number"]}, answer[1])


def _said(error: BaseException) -> str:
    """The end of a long error, where remote tracebacks say what was wrong."""
    text = str(error) or type(error).__name__
    return text if len(text) <= LONGEST else f"... {text[-LONGEST:]}"


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what Ray prints goes to the file that standard error is
    warnings.simplefilter("ignore")
    with suppress(BrokenPipeError):
        serve(source, sink)
    sys.stderr.flush()
    os._exit(0)  # Ray's threads and its handlers at exit may wait for a cluster that is gone


if __name__ == "__main__":
    main()
