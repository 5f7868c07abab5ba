"""The job `import`: a model quantised to NF4 and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wgpu_lora.atomic import check_new
from wgpu_lora.export.packed import write_packed
from wgpu_lora.models.loaded import open_model
from wgpu_lora.names.naming import flag
from wgpu_lora.worker.child import Port


def run(port: Port, *, model: str, output: str, device: str | int | None = None) -> dict[str, Any]:
    """output: a directory that does not exist yet."""
    check_new(output, flag("output"), directory=True)  # before the model may be downloaded
    write_packed(open_model(model, device), Path(output), events=port)
    nbytes = sum(path.stat().st_size for path in Path(output).glob("*.safetensors"))
    return {"output": output, "bytes": nbytes}
