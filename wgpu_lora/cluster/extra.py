"""Whether the libraries of the extra `cluster` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from wgpu_lora.errors import UserError
from wgpu_lora.installation import pip_line


def check_ray() -> None:
    """Called before any module that imports Ray.

    Raises:
        UserError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise UserError(f"Training on a cluster needs Ray, which is not installed: run {pip_line('cluster')}.")
