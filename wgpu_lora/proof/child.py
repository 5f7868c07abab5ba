"""One job of the proof, in a process of its own."""

from __future__ import annotations

import json
import sys
from importlib import import_module

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.errors import UserError
from wgpu_lora.names.naming import COMMAND_LINE, naming


def main(result: str, job: str, arguments: str) -> int:
    """Runs wgpu_lora.proof.jobs.JOB with arguments from JSON; what it returns goes to the file `result`."""
    try:
        with naming(COMMAND_LINE):  # what it refuses is read by whoever typed `wgpu-lora prove`
            found = import_module(f"wgpu_lora.proof.jobs.{job}").run(**json.loads(arguments))
    except UserError as error:
        print(f"wgpu-lora: {error}", file=sys.stderr)
        return 2
    write_bytes_atomic(result, json.dumps(found).encode())
    return 0
