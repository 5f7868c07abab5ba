"""Inference: generation, chat and evaluation."""

from wgpu_lora.infer.adapters import load_adapters
from wgpu_lora.infer.evaluate import Evaluation, Evaluator, evaluate
from wgpu_lora.infer.generate import Generator
from wgpu_lora.infer.prompt import chat_prompt
from wgpu_lora.infer.running import Generation
from wgpu_lora.infer.sampling import Sampler

__all__ = [
    "Evaluation",
    "Evaluator",
    "Generation",
    "Generator",
    "Sampler",
    "chat_prompt",
    "evaluate",
    "load_adapters",
]
