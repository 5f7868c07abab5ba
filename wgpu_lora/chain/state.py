"""What a chain has done: `chain.json` in its directory, replaced after each stage."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.bounded import read_json
from wgpu_lora.chain.digests import code_digest, digest_of
from wgpu_lora.chain.file import Link
from wgpu_lora.errors import UserError
from wgpu_lora.typed_json import typed
from wgpu_lora.words import listed

STATE, SCHEMA = "chain.json", 1


@dataclass
class Done:
    """A stage that was begun.

    options, code: digests. files: digests of what it read, by path. outputs: digests by path in its directory, None
    until it has finished. seconds: of all its runs.
    """

    options: str
    code: str
    files: dict[str, str]
    outputs: dict[str, str] | None = None
    seconds: float = 0.0

    def difference(self, now: Done) -> str | None:
        """Why it has to run again with other inputs, as text; None if they are the same."""
        if self.options != now.options:
            return "its options have changed"
        if self.files != now.files:
            both = {**self.files, **now.files}
            changed = [Path(path).name for path in both if self.files.get(path) != now.files.get(path)]
            return f"{listed(changed[:2], len(changed[2:]))} changed"
        return "wgpu-lora has changed" if self.code != now.code else None


@dataclass
class State:
    path: Path
    stages: dict[str, Done] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> State:
        """The state of a chain; empty before its first run. Raises UserError if it is damaged."""
        path = directory / STATE
        if not path.exists():
            return cls(path)
        held = read_json(path)
        try:
            if held.get("schema") != SCHEMA:
                raise ValueError(f"schema {held.get('schema')!r:.20}")
            return cls(path, typed(dict[str, Done], held.get("stages"), "stages"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): remove it, and choose another output directory.") from None

    def write(self) -> None:
        held = {"schema": SCHEMA, "stages": {name: asdict(done) for name, done in self.stages.items()}}
        write_bytes_atomic(self.path, (json.dumps(held, indent=1) + "\n").encode())


def inputs_of(link: Link, files: dict[str, str]) -> Done:
    return Done(digest_of([link.kind, link.stage.facts()]), code_digest(), files)
