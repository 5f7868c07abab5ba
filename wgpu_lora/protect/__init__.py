"""Training on sealed data, with attestation, gated release of the key, and evidence."""

from __future__ import annotations

from importlib.util import find_spec

from wgpu_lora.errors import UserError

LIBRARIES = (
    "cryptography",
    "pyrage",
    "securesystemslib",
    "in_toto_attestation",
    "model_signing",
    "OpenSSL",
    "jwt",
    "starlette",
    "uvicorn",
    "httpx",
)


def check_libraries() -> None:
    """Called before any other module of this room is imported, all of which import these libraries.

    Raises:
        UserError: one is not installed.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"Protected training needs {', '.join(missing)}, which {verb} not installed: run pip install "
            "'wgpu-lora[protect]'."
        )
