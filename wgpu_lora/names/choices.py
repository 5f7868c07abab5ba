"""Allowed values of options with a few choices. Imports nothing, since help and shell completion read it."""

from __future__ import annotations

ACTIVATION_DTYPES = ("f32", "bf16", "f16")  # that activations are stored in for the backward pass
COMPUTE_DTYPES = ("f32", "bf16", "f16")  # that the inputs of frozen matmuls are rounded to
TRAINED = ("lora", "mlp", "quant-scales")
OVERFLOW = ("truncate", "drop")  # of rows that are too long
MERGED_DTYPES = ("bf16", "f16", "f32")
GGUF_TYPES = ("f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q5_1", "q5_0", "q4_1", "q4_0")
RUN_STATUSES = ("running", "finished", "stopped", "interrupted", "failed", "killed")  # of runs in the run log
RUN_KINDS = ("finetune", "evaluate", "bench")
