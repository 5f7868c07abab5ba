"""Fine-tune language models on any GPU: QLoRA in WGSL shaders, over Vulkan, Metal and DX12.

import wgpu_lora
model = wgpu_lora.load("demo")
wgpu_lora.finetune(model, data="train.jsonl", output="out", learning_rate=1e-3)
print(wgpu_lora.generate(model, "Write ...", adapter="out"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.api import (
        Answer,
        Events,
        Model,
        MultiAdapterPipeline,
        RunRecord,
        StepResult,
        TrainingArguments,
        answer,
        compare,
        evaluate,
        evaluate_several,
        finetune,
        generate,
        load,
        push,
        quantize,
        teacher_cache,
    )

__all__ = [
    "Answer",
    "Events",
    "Model",
    "MultiAdapterPipeline",
    "RunRecord",
    "StepResult",
    "TrainingArguments",
    "UserError",
    "__version__",
    "answer",
    "compare",
    "evaluate",
    "evaluate_several",
    "finetune",
    "generate",
    "load",
    "push",
    "quantize",
    "teacher_cache",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Lazy, so that importing the package does not load a GPU library.
    if name == "__version__":
        from importlib.metadata import version

        return version("wgpu-lora")
    if name in __all__:
        from wgpu_lora import api

        return getattr(api, name)
    raise AttributeError(f"module 'wgpu_lora' has no attribute '{name}'")
