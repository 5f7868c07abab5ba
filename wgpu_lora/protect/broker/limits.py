"""What keeps requests from using up the broker's memory, time and disk."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from starlette.requests import ClientDisconnect, Request

from wgpu_lora.protect.broker.refusal import Refused

MEDIA_TYPES = ("application/vnd.dsse.envelope.v1+json", "application/json")
BODY_SECONDS = 10.0
MAX_ADDRESSES = 4096
PER_MINUTE = 60  # requests from an address; from all of them ten times as many


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body, read no further than `limit` bytes and for no longer than `BODY_SECONDS`.

    Raises:
        Refused: it is too long or too slow, compressed, or of another media type.
    """
    headers = request.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refused("The body is compressed: send it as it is.", status=415)
    if limit and headers.get("content-type", "").split(";")[0].strip().lower() not in MEDIA_TYPES:
        raise Refused(f"The body must have the content type {MEDIA_TYPES[0]}: set it.", status=415)
    too_long = Refused(f"The body is longer than {limit:,} bytes: shorten it.", status=413)
    stated = headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 15 or int(stated) > limit:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if len(body) + len(part) > limit:
                    raise too_long
                body += part
    except TimeoutError:
        raise Refused(f"The body took longer than {BODY_SECONDS:g} s: send it faster.", status=408) from None
    except ClientDisconnect:
        raise Refused("The body ended early: send all of it.", status=400) from None
    return bytes(body)


class Rate:
    """Token buckets, one for each client's address and one for all.

    Args:
        one, all_: requests per minute, which may also come at once.
    """

    def __init__(self, one: int = PER_MINUTE, all_: int = 10 * PER_MINUTE) -> None:
        self._one, self._all_ = one, all_
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was
        self._total = float(all_), time.monotonic()

    def take(self, address: str) -> None:
        """Count a request. Raises Refused if there were too many."""
        mine, total, now = self._now(address)
        if min(mine, total) < 1:
            raise Refused("There are too many requests: wait a minute, then ask again.", status=429)
        self._set(address, mine - 1, total - 1, now)

    def charge(self, address: str, cost: float) -> None:
        """Count a request that was let through as `cost` further ones, which may leave less than none."""
        mine, total, now = self._now(address)
        self._set(address, mine - cost, total - cost, now)

    def _now(self, address: str) -> tuple[float, float, float]:
        now = time.monotonic()
        mine = self._left(self._buckets.get(address, (self._one, now)), self._one, now)
        total = self._left(self._total, self._all_, now)
        return mine, total, now

    def _set(self, address: str, mine: float, total: float, now: float) -> None:
        self._buckets[address], self._total = (mine, now), (total, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    @staticmethod
    def _left(bucket: tuple[float, float], per_minute: int, now: float) -> float:
        return min(per_minute, bucket[0] + (now - bucket[1]) * per_minute / 60)
