"""The kinds of stages, by the name that a chain gives as `kind`."""

from __future__ import annotations

from wgpu_lora.chain.stage import Stage
from wgpu_lora.registry import Registry

STAGES: Registry[type[Stage]] = Registry(
    {
        "prepare": "wgpu_lora.chain.stages.prepare:Prepare",
        "finetune": "wgpu_lora.chain.stages.finetune:Finetune",
        "merge": "wgpu_lora.chain.stages.merge:Merge",
        "gguf": "wgpu_lora.chain.stages.gguf:Gguf",
        "cards": "wgpu_lora.chain.stages.cards:Cards",
        "push": "wgpu_lora.chain.stages.push:Push",
    }
)
