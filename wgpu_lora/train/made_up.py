"""Runs of a named shape, to plan them without files: random weights, and rows of the full length."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from wgpu_lora.data.in_memory import MemorySource
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.shapes import shape_config
from wgpu_lora.models.synthetic import synthetic_model
from wgpu_lora.names.naming import flag
from wgpu_lora.train.finetune import FinetuneJob, prepare_job
from wgpu_lora.train.options.arguments import LENGTH, TrainingArguments

ROWS = 64
NAME = "made-up rows"


def job_of_shape(shape: str, args: TrainingArguments) -> FinetuneJob:
    """A job of a model of this shape, whose rows are as long as they may be. Allocates nothing on the device.

    Raises:
        UserError: the shape is not known, a model or data are given, or the options do not suit it.
    """
    for name in ("model", "data", "eval_data"):
        if getattr(args, name) is not None:
            raise UserError(f"{flag(name)} and {flag('shape')} exclude each other: leave one of them out.")
    config = shape_config(shape)
    model = synthetic_model(config, Device(args.device), args.base_dtype, shape)
    length = args.max_length or min(LENGTH, config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, length))
    content = "".join(json.dumps({"input_ids": row, "labels": row}) + "\n" for row in tokens.tolist())
    source = MemorySource(bytearray(content.encode()), NAME, "")
    return prepare_job(replace(args, model=shape, data=NAME), model, planning=True, rows={"data": source})
