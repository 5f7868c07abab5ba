"""A loaded model as Python users have it: it trains and answers, and it can be merged, exported, saved and uploaded."""

from __future__ import annotations

from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import hub_id
from wgpu_lora.formats.hub_upload import check_repo_name, prepare
from wgpu_lora.formats.hub_upload import push as upload
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.gguf_export import Written, export_adapter, export_model
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import LoadedModel


class Model(LoadedModel):
    """A base model on a device, as `wgpu_lora.load` opens it.

    All methods raise UserError if an adapter does not fit, `output` exists, or a file cannot be read or written.
    """

    def merge(self, adapter: str | Path, output: str | Path, dtype: str = "bf16") -> Path:
        """Write base plus adapter as a model directory for transformers; dtype is bf16, f16 or f32."""
        merge_adapter(self.path, Path(adapter), Path(output), dtype, name=self.name)
        return Path(output)

    def export_gguf(
        self, output: str | Path, adapter: str | Path | None = None, quantize: str = "f16", lora: bool = False
    ) -> Written:
        """Write a GGUF file for llama.cpp: the model, with a merged adapter, or with `lora` the adapter alone.

        quantize: type of the matrices, as of `wgpu-lora export gguf`; with `lora`, they are f32.
        """
        if lora:
            if adapter is None:
                raise UserError("lora=True writes an adapter alone: give one with adapter=.")
            return export_adapter(self.path, Path(adapter), Path(output))
        name = self.name.rpartition("/")[2] if hub_id(self.name) else None
        return export_model(self.path, Path(output), quantize, Path(adapter) if adapter else None, name)

    def save(self, output: str | Path) -> Path:
        """Write the model as it is quantised on the device, as a directory that loads faster."""
        write_packed(self, Path(output))
        return Path(output)

    def push(self, directory: str | Path, repo: str, private: bool = True) -> str:
        """Upload an adapter, a merged model or a GGUF file; see `push`."""
        return push(directory, repo, private)


def push(directory: str | Path, repo: str, private: bool = True) -> str:
    """Upload a directory of an adapter or a model to the Hugging Face hub; returns the address of the commit.

    Args:
        repo: 'owner/name', which is created if it does not exist. private: whether others cannot see it then.

    Raises:
        UserError: the directory holds neither, or the hub refuses.
    """
    check_repo_name(repo)
    return upload(prepare(Path(directory)), repo, private)
