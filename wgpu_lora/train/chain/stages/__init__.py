"""The kinds of stages, by the name that a chain gives as `kind`."""

from __future__ import annotations

from wgpu_lora.names.registry import Registry
from wgpu_lora.train.chain.stage import Stage

STAGES: Registry[type[Stage]] = Registry(
    {
        "prepare": "wgpu_lora.train.chain.stages.prepare:Prepare",
        "finetune": "wgpu_lora.train.chain.stages.finetune:Finetune",
        "merge": "wgpu_lora.train.chain.stages.export:Merge",
        "gguf": "wgpu_lora.train.chain.stages.export:Gguf",
        "cards": "wgpu_lora.train.chain.stages.push:Cards",
        "push": "wgpu_lora.train.chain.stages.push:Push",
    }
)
