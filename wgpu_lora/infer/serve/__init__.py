"""An HTTP server with OpenAI's API: many adapters over one base, mixed in every batch.

schema -> prompts, json_schemas, grammars -> engine_thread -> choices, responses -> service -> app -> http_server
"""

from __future__ import annotations

from importlib.util import find_spec

from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import pip_line

LIBRARIES = ("starlette", "uvicorn", "llguidance", "prometheus_client", "jsonschema")


def check_libraries() -> None:
    """Called before any other module of this room is imported. Raises UserError if a library is not installed."""
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise UserError(f"The server needs {', '.join(missing)}: run {pip_line('serve')}")
