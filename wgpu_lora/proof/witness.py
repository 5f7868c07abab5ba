"""What a child process says of itself when it ends: modules imported, libraries mapped, commands run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from wgpu_lora.proof.maps import libraries, unreadable

LAUNCHES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
SHOWN = 100  # characters of a word of a command


class Witness:
    """Around the whole of a child's work. Commands are heard from Python's audit hook, so that none is too short."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.commands: list[list[str]] = []

    def __enter__(self) -> Witness:
        sys.addaudithook(self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        said = {
            "pid": os.getpid(),
            "modules": sorted(sys.modules),
            "libraries": [] if unreadable() else sorted(libraries(os.getpid())),
            "commands": self.commands,
        }
        self.path.write_text(json.dumps(said))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in LAUNCHES:
            words = arguments[1] if event == "subprocess.Popen" else arguments[:2]
            words = [words] if isinstance(words, str | bytes) else list(words)
            self.commands.append([_text(word) for word in words])


def _text(word: Any) -> str:
    return " ".join((os.fsdecode(word) if isinstance(word, str | bytes | os.PathLike) else str(word)).split())[:SHOWN]
