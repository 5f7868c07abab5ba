"""The parts of a model in the time of a training step: which share its vocabulary, MLPs, attention and delta nets take.

    python -m scripts.bench_parts [--shape qwen3.5-0.8b] [--layers N] [--tokens 256] [--rounds 5]

Every dispatch is timed in a compute pass of its own, as by `wgpu-lora profile`, and belongs to the part that recorded
it, forward or backward. Medians over the rounds, with the least and the largest share.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from wgpu_lora.bench.training_step import TrainingStep, chosen_model, training_options
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.models.blocks.attention_block import Attention, GatedAttention
from wgpu_lora.models.blocks.delta_net import DeltaNet
from wgpu_lora.models.blocks.transformer_block import GatedMLP
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session import batch

OWNERS: tuple[tuple[Any, str, str], ...] = (
    (DeltaNet, "record", "delta nets"),
    (GatedAttention, "record", "attention"),
    (Attention, "record", "attention"),
    (GatedMLP, "record", "MLPs"),
    (batch, "sweep", "vocabulary"),
)
OF_NETS = {
    "delta": "the rule",
    "causal": "convolution, norms",
    "l2norm": "convolution, norms",
    "gated": "convolution, norms",
}
REST = "the rest"


class Parts:
    """Notes which part records a dispatch, while it is entered. of: by the dispatch's id."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self._now, self._kept, self._patches = REST, [], ExitStack()

    def __enter__(self) -> Parts:
        dispatch, node = Program.dispatch, Recorder.node

        def noted(program: Program, *args: Any, **constants: Any) -> None:
            dispatch(program, *args, **constants)
            self._kept.append(program.dispatches[-1])  # so that its id is not another's
            self.of[id(program.dispatches[-1])] = self._now

        def noded(rec: Recorder, backward: Callable[[], None], *args: Any, **more: Any) -> None:
            node(rec, self._within(self._now, backward), *args, **more)

        changes: list[AbstractContextManager[Any]] = [patch.object(Program, "dispatch", noted)]
        changes.append(patch.object(Recorder, "node", noded))
        changes += [patch.object(owner, name, self._within(part, getattr(owner, name))) for owner, name, part in OWNERS]
        for change in changes:
            self._patches.enter_context(change)
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def _within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **more: Any) -> Any:
            before, self._now = self._now, part
            try:
                return function(*args, **more)
            finally:
                self._now = before

        return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    sizes = {"base_dtype": "nf4", "batch": 1, "tokens": given.tokens, "rank": given.rank}
    args = TrainingArguments(**training_options(sizes))
    device = Device()
    model = chosen_model(None, given.shape, given.layers, device, args.base_dtype)
    with Parts() as parts:
        step = TrainingStep.fitting(model, args)
    programs, labels = step.session.programs(), []
    for dispatch in (one for program in programs for one in program.dispatches):
        part, kernel = parts.of[id(dispatch)], dispatch.kernel.name.partition("_")[0]
        labels.append(f"{part}: {OF_NETS.get(kernel, 'products')}" if part == "delta nets" else part)
    step.allocate()
    print(f"{device.info.name}, {device.info.driver}; {given.shape}, {given.tokens} tokens")
    step.seconds(2)  # the first compile
    timer, whole, each = Timer(device), [], []
    for _ in range(given.rounds):
        whole += step.seconds(1)
        each.append([seconds for program in programs for seconds in timer.each(program)])
    timer.free()
    step.close()
    print(f"step {statistics.median(whole):.1f} s, {min(whole):.1f} to {max(whole):.1f}")
    shares = np.array(each) / np.sum(each, axis=1, keepdims=True)
    names = {label.partition(":")[0] for label in labels} | {label for label in labels if ":" in label}
    for name in sorted(names):
        mine = shares[:, [label == name or label.startswith(f"{name}:") for label in labels]].sum(axis=1)
        print(f"{name:32} {np.median(mine):6.1%} ({mine.min():.1%} to {mine.max():.1%})")


if __name__ == "__main__":
    main()
