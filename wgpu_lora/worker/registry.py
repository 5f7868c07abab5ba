"""The kinds of jobs. Each is a function of a `Port` and of its options by name; it returns the job's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wgpu_lora.registry import Registry

Kind = Callable[..., Any]

KINDS: Registry[Kind] = Registry(
    {
        "finetune": "wgpu_lora.worker.kinds.finetune:run",
        "pipeline": "wgpu_lora.worker.kinds.pipeline:run",
        "plan": "wgpu_lora.worker.kinds.plan:run",
        "evaluate": "wgpu_lora.worker.kinds.evaluate:run",
        "generate": "wgpu_lora.worker.kinds.generate:run",
        "import": "wgpu_lora.worker.kinds.import_:run",
        "bench": "wgpu_lora.worker.kinds.bench:run",
        "bench-training": "wgpu_lora.worker.kinds.bench_training:run",
        "gradients": "wgpu_lora.worker.kinds.gradients:run",
        "heldout": "wgpu_lora.worker.kinds.heldout:run",
        "step": "wgpu_lora.worker.kinds.step:run",
        "speed": "wgpu_lora.worker.kinds.speed:run",
        "teacher-cache": "wgpu_lora.worker.kinds.teacher_cache:run",
    }
)
