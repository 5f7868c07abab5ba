"""The job `step`: training steps on synthetic rows, at once or in turns with another worker's."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from wgpu_lora.bench.reference import ReferenceWork, forget_peak, peak_resident_bytes, resident_bytes
from wgpu_lora.bench.training_step import (
    ROW,
    WARMUP,
    TrainingStep,
    benchmark_option_names,
    chosen_model,
    synthetic_rows,
)
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.generator import Generator
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.training_log import environment
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT
from wgpu_lora.worker.job_process import EventWriter

Record = dict[str, Any]


def run(
    port: EventWriter,
    *,
    shape: str,
    layers: int | None = None,
    rows: int = 1,
    tokens: int = 128,
    rank: int = 8,
    base_dtype: str = DEFAULT_FORMAT,
    device: str | int | None = None,
    compute_dtype: str = "f32",
    steps: int = 3,
    turns: bool = False,
) -> Record:
    """steps: number of timed ones, after those that include compilation. turns: wait for requests (`prepare`, `steps`,
    `memory`, `serve`) as JSON lines on standard input, until the input ends."""
    side = OurSide(ReferenceWork(shape, layers, rows, tokens, rank, base_dtype, device, compute_dtype))
    if turns:
        port.answer(side)
        return {}
    return {**side.prepare(), **side.steps(steps), **side.memory()}


class OurSide:
    """This package's side of a reference comparison: training steps, and serving the same model."""

    def __init__(self, work: ReferenceWork):
        self._after_imports = resident_bytes()
        self._work = work
        self._model = chosen_model(None, work.shape, work.layers, Device(work.device), work.base_dtype)
        with benchmark_option_names({**ROW, "per_device_train_batch_size": "rows"}):
            args = TrainingArguments(
                per_device_train_batch_size=work.rows,
                max_length=work.tokens,
                lora_r=work.rank,
                compute_dtype=work.compute_dtype,
            )
            self._step = TrainingStep.fitting(self._model, args)

    def prepare(self) -> Record:
        """Load the model and take the steps that include compilation. first_loss is of the untrained adapter."""
        device = self._model.device
        self._model.load_weights()
        forget_peak()
        device.peak_allocated = device.allocated
        self._step.allocate()
        loss = self._step.run()
        self._step.seconds(WARMUP - 1)
        return {"first_loss": loss, "environment": asdict(environment(device))}

    def steps(self, count: int) -> Record:
        return {"seconds": self._step.seconds(count)}

    def memory(self) -> Record:
        """planned, allocated: bytes on the device. resident: growth of the process, including a software device."""
        planned = self._step.session.memory().training
        allocated = self._model.device.peak_allocated
        return {"planned": planned, "allocated": allocated, "resident": peak_resident_bytes() - self._after_imports}

    def serve(self, prompt: int, new: int, runs: int) -> Record:
        """Tokens/s of a prompt of `prompt` tokens and of `new` generated ones, medians of `runs` after two more."""
        (ids,) = synthetic_rows(1, prompt, self._model.config.vocab_size).tolist()
        prefill, decode = [], []
        with Generator(self._model, capacity=prompt + new, buckets=(prompt,)) as generator:
            for run in range(2 + runs):
                (result,) = generator.generate([ids], max_new_tokens=new)
                if run >= 2:
                    prefill.append(result.prefill_speed)
                    decode.append(result.decode_speed)
        return {"prefill": statistics.median(prefill), "decode": statistics.median(decode), "runs": runs}
