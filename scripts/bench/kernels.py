"""Kernels beside others that do the same, by turns in one process: `python -m scripts.bench.kernels codes --help`.

codes: products with low-bit codes, or in types of GGUF files, beside those with NF4.
delta: the gated delta rule beside full attention, forward and backward; with --sequences, a token of each of so many
    sequences by the kernels of prompts and by those of tokens, with norms and convolutions.
kmeans: lookup tables fitted on the device beside scikit-learn's k-means, which is not among the dependencies.
parts: the parts of a model in the time of a training step, every dispatch in a compute pass of its own.

What is printed are medians of the rounds. Processor time is that of the whole process, and means something on CPU
drivers alone.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np

from wgpu_lora.bench.training_step import TrainingStep, chosen_model, training_options
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.single_kernel import SingleKernel
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.timer import Timer
from wgpu_lora.models.architectures.qwen3_5 import Qwen35Text
from wgpu_lora.models.batch_inputs import ForkPlacement, Segment, write
from wgpu_lora.models.blocks.attention_block import Attention, GatedAttention, KeyRanges
from wgpu_lora.models.blocks.delta_net import L2_EPS, DeltaNet, Runs
from wgpu_lora.models.blocks.transformer_block import GatedMLP
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.ops.attention.attention import attention
from wgpu_lora.ops.attention.delta_net.causal_conv import causal_conv
from wgpu_lora.ops.attention.delta_net.delta_rule import gated_delta_rule
from wgpu_lora.ops.attention.delta_net.delta_step import gated_delta_step
from wgpu_lora.ops.elementwise import copy
from wgpu_lora.ops.norm import gated_norm, l2norm
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.session import batch
from wgpu_lora.weights.base import Loading, Shared
from wgpu_lora.weights.base_formats import base_format
from wgpu_lora.weights.gguf.gguf_formats import FORMATS
from wgpu_lora.weights.gguf.gguf_products import gguf_matmul, gguf_matmul_backward
from wgpu_lora.weights.lowbit.lowbit_layout import Scheme, scheme_of
from wgpu_lora.weights.lowbit.lowbit_products import codes_matmul, codes_matmul_backward
from wgpu_lora.weights.nf4.nf4_products import nf4_matmul, nf4_matmul_backward

Op = Callable[[Recorder, dict[str, Tensor]], Tensor]
TOKENS = 60  # a round
OPTIONAL = ("bias", "row_scale", "count", "a_scale", "h", "factor", "ranges")  # bindings of a product


def by_turns(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds by the wall clock and of the processors, [rounds, 2], after a run that compiles."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for run in work.values():
        run()
    for number in range(rounds):
        for name in work if number % 2 else reversed(work):
            wall, processor = perf_counter(), process_time()
            work[name]()
            times[name].append((perf_counter() - wall, process_time() - processor))
    return {name: np.array(values) for name, values in times.items()}


def codes(args: argparse.Namespace) -> None:
    device, names = Device(), ["nf4", *args.schemes.split(",")]
    products = {
        "forward": (nf4_matmul, codes_matmul, gguf_matmul),
        "input gradient": (nf4_matmul_backward, codes_matmul_backward, gguf_matmul_backward),
    }

    def run(single: SingleKernel) -> None:
        single.run()
        device.wait()

    for form, (nf4_kernel, codes_kernel, gguf_kernel) in products.items():
        kernels: dict[str, SingleKernel] = {}
        for name in names:
            kernel, constants = nf4_kernel, {}
            if name in FORMATS:
                kernel, constants = gguf_kernel, {"b_type": name}
            elif name != "nf4":
                scheme = scheme_of(name, "")
                kernel, constants = codes_kernel, {"bits": scheme.bits, "group": scheme.group}
            kernels[name] = product(device, kernel, args.rows, args.size, constants, args.compute_dtype)
        times = by_turns({name: partial(run, single) for name, single in kernels.items()}, args.rounds)
        for name in names:
            wall, processor = np.median(times["nf4"] / times[name], axis=0)
            speeds = f"{wall:.2f} of NF4's speed, {processor:.2f} by processor time"
            print(f"{form}, {args.rows} rows, {name}: {speeds}", flush=True)
            kernels[name].free()


def product(device: Device, kernel: Kernel, rows: int, size: int, format: dict[str, Any], a_type: str) -> SingleKernel:
    """The product of `rows` rows with a square matrix, in the default tiling."""
    shape = {"m": rows, "n": size, "k": size, "a_type": a_type, **format}
    assert kernel.tuning
    constants = {**kernel.defaults, **shape}
    present = tuple(name for name in kernel.bindings if name not in OPTIONAL)
    arrays = kernel.tuning.inputs(constants, present, np.random.default_rng(0))
    tiling = kernel.tilings(device.capabilities, constants)[0]
    return SingleKernel(device, kernel, arrays, shape, tiling, repeat=8 if rows < 16 else 2)


class Pass:
    """A recorded forward pass of an op on random inputs, and its backward pass if it has trained ones."""

    def __init__(self, device: Device, shapes: dict[str, Any], trained: list[str], op: Op, rows: np.ndarray):
        self.device, self.program, rng = device, Program(device), np.random.default_rng(0)
        rec = Recorder(self.program, training=bool(trained))
        tensors = {name: persistent(shape, "f32", "workspace", name) for name, shape in shapes.items()}
        tensors["rows"] = persistent(rows.shape, "u32", "workspace", "rows")
        for name in trained:
            rec.node(lambda: None, inputs=[], outputs=[tensors[name]], trains=True)
        y = op(rec, tensors)
        dy = persistent(y.shape, "f32", "workspace", "dy")
        if trained:
            rec.give_gradient(y, dy)
            rec.backward()
        else:
            rec.dispatch(copy, y, dy, size=y.size)
        self.storages = {t.storage for t in (*tensors.values(), dy)} | self.program.persistent_storages()
        allocate(device, self.storages)
        self.arena = Arena(device, self.program.plan().sizes)
        self.program.build(self.arena)
        for tensor in (*tensors.values(), dy):
            values = rows if tensor.dtype == "u32" else rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1])
            write(device, tensor, values)

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.program.run()
            self.device.wait()

    def close(self) -> None:
        self.program.release()
        self.arena.free()
        release(self.device, self.storages)


def delta_pass(device: Device, config: Qwen35Text, tokens: int) -> Pass:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    shapes = {"v": (tokens, values, config.linear_value_head_dim), "a": (tokens, values), "b": (tokens, values)}
    shapes |= {"a_log": (values,), "dt_bias": (values,), "qk": (2, tokens, keys, config.linear_key_head_dim)}

    def op(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        qk = t["qk"]
        q, k = (Tensor(qk.shape[1:], "f32", qk.storage, i * qk.nbytes // 2, "qk") for i in range(2))
        return gated_delta_rule(rec, q, k, t["v"], t["a"], t["b"], t["a_log"], t["dt_bias"], t["rows"])

    return Pass(device, shapes, ["qk", "v", "a", "b"], op, one_sequence(tokens, Runs()))


def attention_pass(device: Device, config: Qwen35Text, tokens: int) -> Pass:
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = {"q": (tokens, heads, dim), "k": (tokens, kv_heads, dim), "v": (tokens, kv_heads, dim)}

    def op(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        return attention(rec, t["q"], t["k"], t["v"], t["rows"], kv_heads, dim**-0.5)

    return Pass(device, shapes, ["q", "k", "v"], op, one_sequence(tokens, KeyRanges()))


def one_sequence(tokens: int, inputs: Runs | KeyRanges) -> np.ndarray:
    """What a batch of one sequence has for the rows."""
    placing = ForkPlacement(tokens)
    list(placing.add([Segment(np.zeros(tokens, np.int64))]))
    return inputs.values(placing.rows)


def token_passes(device: Device, config: Qwen35Text, sequences: int) -> dict[str, Pass]:
    """A token of each sequence, each of which has a state."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, value, taps = config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim
    cols, eps = 2 * keys * key + heads * value, config.rms_norm_eps
    shapes = {"x": (sequences, cols), "z": (sequences, heads * value), "a": (sequences, heads), "b": (sequences, heads)}
    shapes |= {"conv": (cols, 1, taps), "a_log": (heads,), "dt_bias": (heads,), "norm": (value,)}
    shapes |= {"inputs": (sequences, taps - 1, cols), "state": (sequences, heads, key, value)}

    def step(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        frozen = t["conv"], t["a_log"], t["dt_bias"], t["norm"]
        moving = t["x"], t["z"], t["a"], t["b"]
        return gated_delta_step(rec, *moving, frozen, t["rows"], t["inputs"], t["state"], keys, L2_EPS, eps)

    def chunks(rec: Recorder, t: dict[str, Tensor]) -> Tensor:
        parts = [(sequences, keys, key)] * 2 + [(sequences, heads, value)]
        q, k, v = causal_conv(rec, t["x"], t["conv"], t["rows"], parts, t["inputs"])
        q, k = l2norm(rec, q, k, key**-0.5, L2_EPS)
        y = gated_delta_rule(rec, q, k, v, t["a"], t["b"], t["a_log"], t["dt_bias"], t["rows"], t["state"])
        return gated_norm(rec, y, t["z"], t["norm"], eps)

    rows = np.array([(0, 1, number, 1) for number in range(sequences)])
    return {name: Pass(device, shapes, [], op, rows) for name, op in (("prompt", chunks), ("token", step))}


def delta(args: argparse.Namespace) -> None:
    device, config = Device(), shape_config(args.shape)
    assert isinstance(config, Qwen35Text), "the shape has no delta nets"
    for count in map(int, (args.sequences or args.tokens).split(",")):
        if args.sequences:
            title, repeats, passes = f"{count} sequences", TOKENS, token_passes(device, config, count)
        else:
            title, repeats = f"{count:,} tokens", 1
            passes = {
                "delta rule": delta_pass(device, config, count),
                "attention": attention_pass(device, config, count),
            }
        times = by_turns({name: partial(timed_pass.run, repeats) for name, timed_pass in passes.items()}, args.rounds)
        for name, timed_pass in passes.items():
            wall, processor = 1e6 * np.median(times[name], axis=0) / (TOKENS if args.sequences else count)
            dispatches = len(timed_pass.program.dispatches)
            print(f"{title}, {name}: {wall:,.0f} us, {processor:,.0f} us of processors, {dispatches} dispatches")
            timed_pass.close()


@dataclass(frozen=True)
class Source:
    """A matrix as the part of a checkpoint that is loaded."""

    w: np.ndarray

    def dtype(self, name: str) -> str:
        return "F32"

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self.w[row_start:row_stop]

    read_f32 = read_raw

    def packed(self, name: str) -> None:
        return None


def kmeans(args: argparse.Namespace) -> None:
    """Normally distributed weights over the largest of their group, weighted by its square, with a table per row.

    The device fits whole matrices, with refitted scales, rounding and packing; scikit-learn fits only the tables, of
    the first rows of each matrix, and its times are multiplied up.
    """
    device, rng = Device(), np.random.default_rng(0)
    shapes = Counter(shape_config(args.shape).matrices().values())
    seconds = {"device": np.zeros(2), "scikit-learn": np.zeros(2)}
    errors, squares = dict.fromkeys(seconds, 0.0), 0.0
    for (out, size_in), count in sorted(shapes.items()):
        w = (0.02 * rng.standard_normal((out, size_in))).astype(np.float32)
        sample = w[: args.rows]
        weight = base_format(Scheme(args.bits, args.group).name).declare(w.shape, "w", Shared(device.max_binding))
        allocate(device, set(weight.storages()))

        def load(weight: Any = weight, w: np.ndarray = w) -> None:
            with Loading(device, [weight]) as loading:
                weight.load(loading, Source(w), "w")

        fitted = np.empty_like(sample)

        def fit(sample: np.ndarray = sample, fitted: np.ndarray = fitted) -> None:
            fitted[:] = with_sklearn(sample, args.bits, args.group)

        times = by_turns({"device": load, "scikit-learn": fit}, args.rounds)
        squares += count * float((sample.astype(np.float64) ** 2).sum())
        results = {"device": (1.0, weight.values(device)[: len(sample)]), "scikit-learn": (out / len(sample), fitted)}
        for name, (rows, values) in results.items():
            seconds[name] += count * rows * np.median(times[name], axis=0)
            errors[name] += count * float(((sample - values) ** 2).sum())
        release(device, set(weight.storages()))
    weights = sum(count * prod(shape) for shape, count in shapes.items())
    print(f"{device.info.name}: {args.shape}, {weights:,} weights, {args.bits} bits, group {args.group}")
    for name, (wall, processor) in seconds.items():
        ratio, of_processors = seconds[name] / seconds["device"]
        print(
            f"{name:13} {wall:9.1f} s  {processor:9.1f} s of processors  relative error {errors[name] / squares:.6f}  "
            f"{ratio:.1f} times the device's time, {of_processors:6.1f} times its processor time"
        )


def with_sklearn(w: np.ndarray, bits: int, group: int) -> np.ndarray:
    from sklearn.cluster import KMeans  # type: ignore[import-not-found]
    from threadpoolctl import threadpool_limits  # type: ignore[import-not-found]

    scales = np.ones_like(w)
    if group:
        scales = np.repeat(np.abs(w.reshape(len(w), -1, group)).max(axis=2), group, axis=1)
    result = np.empty_like(w)
    with threadpool_limits(1):  # faster for the few values of a row
        for row, (values, scale) in enumerate(zip(w / scales, scales, strict=True)):
            fitted = KMeans(2**bits, random_state=row).fit(values[:, None], sample_weight=scale**2)
            result[row] = scale * fitted.cluster_centers_[fitted.labels_, 0]
    return result


OWNERS: tuple[tuple[Any, str, str], ...] = (
    (DeltaNet, "record", "delta nets"),
    (GatedAttention, "record", "attention"),
    (Attention, "record", "attention"),
    (GatedMLP, "record", "MLPs"),
    (batch, "vocabulary_logprobs", "vocabulary"),
)
OF_NETS = {"delta": "the rule", "causal": "convolution, norms", "l2norm": "convolution, norms"}
OF_NETS["gated"] = OF_NETS["l2norm"]


class Parts:
    """Notes which part records a dispatch, while it is entered. labels: by the dispatch's id."""

    def __init__(self) -> None:
        self.labels: dict[int, str] = {}
        self._part, self._dispatches, self._patches = "the rest", [], ExitStack()

    def __enter__(self) -> Parts:
        dispatch, node = Program.dispatch, Recorder.node

        def labelled_dispatch(program: Program, *args: Any, **constants: Any) -> None:
            dispatch(program, *args, **constants)
            self._dispatches.append(program.dispatches[-1])  # so that its id is not another's
            self.labels[id(program.dispatches[-1])] = self._part

        def labelled_node(rec: Recorder, backward: Callable[[], None], *args: Any, **kwargs: Any) -> None:
            node(rec, self._within(self._part, backward), *args, **kwargs)

        self._patches.enter_context(patch.object(Program, "dispatch", labelled_dispatch))
        self._patches.enter_context(patch.object(Recorder, "node", labelled_node))
        for owner, name, part in OWNERS:
            self._patches.enter_context(patch.object(owner, name, self._within(part, getattr(owner, name))))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    def _within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            before, self._part = self._part, part
            try:
                return function(*args, **kwargs)
            finally:
                self._part = before

        return within


def parts(args: argparse.Namespace) -> None:
    sizes = {"base_dtype": "nf4", "batch": 1, "tokens": args.tokens, "rank": args.rank}
    options = TrainingArguments(**training_options(sizes))
    device = Device()
    model = chosen_model(None, args.shape, args.layers, device, options.base_dtype)
    with Parts() as noted:
        step = TrainingStep.fitting(model, options)
    programs, labels = step.session.programs(), []
    for dispatch in (item for program in programs for item in program.dispatches):
        part, kernel = noted.labels[id(dispatch)], dispatch.kernel.name.partition("_")[0]
        labels.append(f"{part}: {OF_NETS.get(kernel, 'products')}" if part == "delta nets" else part)
    step.allocate()
    print(f"{device.info.name}, {device.info.driver}; {args.shape}, {args.tokens} tokens")
    step.seconds(2)  # the first compile
    timer, steps, dispatch_seconds = Timer(device), [], []
    for _ in range(args.rounds):
        steps += step.seconds(1)
        dispatch_seconds.append([seconds for program in programs for seconds in timer.dispatch_seconds(program)])
    timer.free()
    step.close()
    print(f"step {np.median(steps):.1f} s, {min(steps):.1f} to {max(steps):.1f}")
    shares = np.array(dispatch_seconds) / np.sum(dispatch_seconds, axis=1, keepdims=True)
    for name in sorted({*labels, *(label.partition(":")[0] for label in labels)}):
        share = shares[:, [label == name or label.startswith(f"{name}:") for label in labels]].sum(axis=1)
        print(f"{name:32} {np.median(share):6.1%} ({share.min():.1%} to {share.max():.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], None], rounds: int, **options: Any) -> None:
        command_parser = commands.add_parser(run.__name__)
        command_parser.set_defaults(run=run)
        for name, default in {**options, "rounds": rounds}.items():
            kind = type(default) if default is not None else int
            command_parser.add_argument(
                f"--{name.replace('_', '-')}", default=default, type=kind, help="default: %(default)s"
            )

    schemes = "lut4,lut3,lut2,int8,lut4-row,lut2-row,lut2-g16"
    command(codes, 15, schemes=schemes, rows=128, size=1024, compute_dtype="f32")
    command(delta, 3, shape="qwen3.5-0.8b", tokens="512,2048,8192", sequences="")
    command(kmeans, 3, shape="qwen3-0.6b", bits=2, group=32, rows=64)
    command(parts, 5, shape="qwen3.5-0.8b", layers=None, tokens=256, rank=16)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
