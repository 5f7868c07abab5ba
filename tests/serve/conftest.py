"""A server over an engine that only pretends, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from support.serving.serving import Serving, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Serving) -> OpenAI:
    return server.client
