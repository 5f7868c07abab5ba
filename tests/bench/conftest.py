"""What the room says is tested as the commands say it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from wgpu_lora.names.spelling import COMMAND_LINE, naming


@pytest.fixture(autouse=True)
def of_commands() -> Iterator[None]:
    with naming(COMMAND_LINE):
        yield
