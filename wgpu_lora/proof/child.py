"""One job of the proof, in a process of its own: python -m wgpu_lora.proof.child WITNESS RESULT JOB ARGUMENTS."""

from __future__ import annotations

import json
import sys
from importlib import import_module

from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import write_bytes_atomic
from wgpu_lora.proof.witness import Witness


def main(witness: str, result: str, job: str, arguments: str) -> int:
    """Runs wgpu_lora.proof.jobs.JOB with arguments from JSON; what it returns goes to the file `result`."""
    with Witness(witness):
        try:
            found = import_module(f"wgpu_lora.proof.jobs.{job}").run(**json.loads(arguments))
        except UserError as error:
            print(f"wgpu-lora: {error}", file=sys.stderr)
            return 2
        write_bytes_atomic(result, json.dumps(found).encode())
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
