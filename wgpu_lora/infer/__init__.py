"""Inference: generation, chat and evaluation."""

from wgpu_lora.infer.generator import Generation, Generator
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.infer.perplexity import Evaluation, Evaluator, evaluate
from wgpu_lora.infer.prompts import chat_prompt
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
