"""The gated delta rule beside full attention on the same tokens: processor time of a layer's forward and backward pass.

    python -m scripts.bench_delta [--shape qwen3.5-0.8b] [--tokens 512,2048,8192] [--rounds 3]
    python -m scripts.bench_delta --sequences 1,4 --rounds 9

By turns, and medians of the rounds. Projections, norms and convolutions are not counted. With --sequences: wall-clock
time of a token of each of so many sequences, with norms and convolutions, by the kernels of prompts and by those of
tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.architectures.qwen3_5 import Qwen35Text
from wgpu_lora.models.batch_inputs import ForkPlacement, Segment, write
from wgpu_lora.models.blocks.attention_block import KeyRanges
from wgpu_lora.models.blocks.delta_net import L2_EPS, Runs
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.ops.attention import attention
from wgpu_lora.ops.delta_net.causal_conv import causal_conv
from wgpu_lora.ops.delta_net.delta_rule import gated_delta_rule
from wgpu_lora.ops.delta_net.delta_step import gated_delta_step
from wgpu_lora.ops.elementwise import copy
from wgpu_lora.ops.norm import gated_norm, l2norm
from wgpu_lora.ops.recorder import Recorder

Op = Callable[[Recorder, dict[str, Tensor]], Tensor]
REPEATS = 60  # of a token per round


class Pass:
    """A recorded forward pass of an op on random inputs, and its backward pass if it has trained ones."""

    def __init__(self, device: Device, tensors: dict[str, Tensor], trained: list[str], op: Op, runs: np.ndarray):
        self.device, self.program, rng = device, Program(device), np.random.default_rng(0)
        rec = Recorder(self.program, training=bool(trained))
        for name in trained:
            rec.node(lambda: None, inputs=[], outputs=[tensors[name]], trains=True)
        y = op(rec, tensors)
        dy = persistent(y.shape, "f32", "workspace", "dy")
        if trained:
            rec.give_gradient(y, dy)
            rec.backward()
        else:
            rec.dispatch(copy, y, dy, size=y.size)
        self.owned = {t.storage for t in (*tensors.values(), dy)} | self.program.persistent_storages()
        allocate(device, self.owned)
        self.arena = Arena(device, self.program.plan().sizes)
        self.program.build(self.arena)
        for tensor in (*tensors.values(), dy):
            values = runs if tensor.dtype == "u32" else rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1])
            write(device, tensor, values)
        self.marker = dy

    def seconds(self) -> float:
        before = os.times()
        self.program.run()
        self.device.read(self.marker.storage.buffer)
        after = os.times()
        return after.user + after.system - before.user - before.system

    def token_seconds(self) -> float:
        begin = time.perf_counter()
        for _ in range(REPEATS):
            self.program.run()
            self.device.wait()
        return (time.perf_counter() - begin) / REPEATS

    def close(self) -> None:
        self.program.release()
        self.arena.free()
        release(self.device, self.owned)


def delta(device: Device, config: Qwen35Text, tokens: int) -> Pass:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    both = persistent((2, tokens, keys, config.linear_key_head_dim), "f32", "workspace", "q and k")
    shapes = {"v": (tokens, values, config.linear_value_head_dim), "a": (tokens, values), "b": (tokens, values)}
    shapes |= {"a_log": (values,), "dt_bias": (values,)}
    tensors = {name: persistent(shape, "f32", "workspace", name) for name, shape in shapes.items()}
    tensors |= {"qk": both, "runs": persistent((tokens, 4), "u32", "workspace", "runs")}

    def op(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        shape = t["qk"].shape[1:]
        q, k = (Tensor(shape, "f32", both.storage, i * both.nbytes // 2, "qk") for i in range(2))
        return gated_delta_rule(rec, q, k, t["v"], t["a"], t["b"], t["a_log"], t["dt_bias"], t["runs"])

    return Pass(device, tensors, ["qk", "v", "a", "b"], op, inputs(tokens, Runs()))


def full(device: Device, config: Qwen35Text, tokens: int) -> Pass:
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = {"q": (tokens, heads, dim), "k": (tokens, kv_heads, dim), "v": (tokens, kv_heads, dim)}
    tensors = {name: persistent(shape, "f32", "workspace", name) for name, shape in shapes.items()}
    tensors["ranges"] = persistent((tokens, 4), "u32", "workspace", "ranges")

    def op(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        return attention(rec, t["q"], t["k"], t["v"], t["ranges"], kv_heads, dim**-0.5)

    return Pass(device, tensors, ["q", "k", "v"], op, inputs(tokens, KeyRanges()))


def token(device: Device, config: Qwen35Text, sequences: int, stepping: bool) -> Pass:
    """A token of each sequence, each of which has a state."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, value, taps = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    cols = 2 * keys * key + heads * value
    shapes = {"x": (sequences, cols), "z": (sequences, heads * value), "a": (sequences, heads), "b": (sequences, heads)}
    shapes |= {"conv": (cols, 1, taps), "a_log": (heads,), "dt_bias": (heads,), "norm": (value,)}
    shapes |= {"inputs": (sequences, taps - 1, cols), "state": (sequences, heads, key, value)}
    tensors = {name: persistent(shape, "f32", "workspace", name) for name, shape in shapes.items()}
    tensors["runs"] = persistent((sequences, 4), "u32", "workspace", "runs")
    eps = config.rms_norm_eps

    def step(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        frozen = t["conv"], t["a_log"], t["dt_bias"], t["norm"]
        moving = t["x"], t["z"], t["a"], t["b"]
        return gated_delta_step(rec, *moving, frozen, t["runs"], t["inputs"], t["state"], keys, L2_EPS, eps)

    def chunks(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        parts = [(sequences, keys, key)] * 2 + [(sequences, heads, value)]
        q, k, v = causal_conv(rec, t["x"], t["conv"], t["runs"], parts, t["inputs"])
        q, k = l2norm(rec, q, k, key**-0.5, L2_EPS)
        y = gated_delta_rule(rec, q, k, v, t["a"], t["b"], t["a_log"], t["dt_bias"], t["runs"], t["state"])
        return gated_norm(rec, y, t["z"], t["norm"], eps)

    runs = np.array([(0, 1, number, 1) for number in range(sequences)])
    return Pass(device, tensors, [], step if stepping else chunks, runs)


def inputs(tokens: int, asked: Runs | KeyRanges) -> np.ndarray:
    """What a batch of one sequence has for the rows."""
    placing = ForkPlacement(tokens)
    list(placing.add([Segment(np.zeros(tokens, np.int64))]))
    return asked.values(placing.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.5-0.8b")
    parser.add_argument("--tokens", default="512,2048,8192")
    parser.add_argument("--sequences", default="")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device, config = Device(), shape_config(args.shape)
    assert isinstance(config, Qwen35Text), "the shape has no delta nets"
    if args.sequences:
        for count in map(int, args.sequences.split(",")):
            both = {
                "as a prompt": token(device, config, count, False),
                "as a token": token(device, config, count, True),
            }
            medians = by_turns(both, Pass.token_seconds, args.rounds)
            each = ", ".join(
                f"{name} {1e6 * seconds:,.0f} us in {len(both[name].program.dispatches) - 1} dispatches"
                for name, seconds in medians.items()
            )
            print(f"{count} sequences: {each}", flush=True)
        return
    for tokens in map(int, args.tokens.split(",")):
        passes = {"delta rule": delta(device, config, tokens), "attention": full(device, config, tokens)}
        medians = by_turns(passes, Pass.seconds, args.rounds)
        each = ", ".join(f"{name} {1e6 * seconds / tokens:,.0f} us" for name, seconds in medians.items())
        print(f"{tokens:,} tokens: {each} of processor time per token", flush=True)


def by_turns(passes: dict[str, Pass], seconds: Callable[[Pass], float], rounds: int) -> dict[str, float]:
    """Medians, after a round that compiles; closes the passes."""
    for one in passes.values():
        seconds(one)
    found: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, one in passes.items():
            found[name].append(seconds(one))
    for one in passes.values():
        one.close()
    return {name: statistics.median(times) for name, times in found.items()}


if __name__ == "__main__":
    main()
