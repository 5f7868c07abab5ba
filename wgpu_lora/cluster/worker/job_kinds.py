"""The kinds of jobs. Each is a function of a `Port` and of its options by name; it returns the job's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wgpu_lora.names.registry import Registry

Kind = Callable[..., Any]

KINDS: Registry[Kind] = Registry(
    {
        "finetune": "wgpu_lora.cluster.worker.kinds.training_jobs:run_finetune",
        "pipeline": "wgpu_lora.cluster.worker.kinds.training_jobs:run_multi_adapter",
        "plan": "wgpu_lora.cluster.worker.kinds.model_jobs:run_plan",
        "evaluate": "wgpu_lora.cluster.worker.kinds.inference_jobs:run_evaluate",
        "generate": "wgpu_lora.cluster.worker.kinds.inference_jobs:run_generate",
        "import": "wgpu_lora.cluster.worker.kinds.model_jobs:run_import",
        "bench": "wgpu_lora.cluster.worker.kinds.bench_jobs:run_bench",
        "bench-training": "wgpu_lora.cluster.worker.kinds.bench_jobs:run_bench_training",
        "speed": "wgpu_lora.cluster.worker.kinds.speed:run",
        "teacher-cache": "wgpu_lora.cluster.worker.kinds.training_jobs:run_teacher_cache",
    }
)
