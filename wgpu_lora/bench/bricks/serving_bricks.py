"""Bricks of serving: first token, decoding, several sequences and adapters together, and loading."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from wgpu_lora.bench.brick import Context, Extra, Workload
from wgpu_lora.bench.reference_check import ReferenceErrors, check, fill_with_nan
from wgpu_lora.bench.timing import Timings, run_seconds
from wgpu_lora.bench.training_step import adapter_set, fill_adapters
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.gpu.program import Arena, allocate, missing_bytes, release
from wgpu_lora.gpu.reference_values import nmse
from wgpu_lora.gpu.tensor import ITEM_BYTES, Tensor
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices
from wgpu_lora.infer.engine_programs import EngineLimits, Programs, StepRows
from wgpu_lora.infer.generator import Generator
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.ops.attention.attention import BLOCK
from wgpu_lora.weights.base_formats import base_format
from wgpu_lora.weights.gguf.gguf_formats import FORMATS
from wgpu_lora.weights.lowbit.lowbit import LowBitWeight

PROMPTS = (7, 512)
NEW_TOKENS = 32  # decoded after each prompt
SEQUENCES = 4


def ttft(context: Context) -> Iterator[Workload]:
    for prompt in PROMPTS:
        yield Serving(context, f"{prompt} tokens", prompt, new_tokens=1)


def throughput(context: Context) -> Iterator[Workload]:
    yield Serving(context, "", PROMPTS[0], NEW_TOKENS)


def batch(context: Context) -> Iterator[Workload]:
    yield Serving(context, f"{SEQUENCES} sequences", PROMPTS[0], NEW_TOKENS, sequences=SEQUENCES)
    yield Serving(context, f"{SEQUENCES} adapters", PROMPTS[0], NEW_TOKENS, sequences=SEQUENCES, adapters=SEQUENCES)


class Serving(Workload):
    """Generation from prompts of random ids, timed by the host's clock, including uploads and readback of the tokens.

    With one new token, an iteration is a prompt (time to first token); with more, it is a decoding step, which gives
    each sequence a token. Tilings are the default ones, as always in generation.
    """

    def __init__(
        self, context: Context, case: str, prompt: int, new_tokens: int, sequences: int = 1, adapters: int = 0
    ):
        self.case = case
        self._context, self._sequences, self._new_tokens = context, sequences, new_tokens
        config, limit = context.config, context.config.max_position_embeddings
        if prompt + new_tokens > limit:
            raise UserError(
                f"A prompt of {prompt} tokens and {new_tokens} more do not fit {limit} positions of {context.name}: "
                "choose another shape."
            )
        self._prompt, self._capacity = prompt, prompt + new_tokens
        self._adapters = adapter_set(config, context.device, context.rank, adapters) if adapters else None
        self._slots = [i if adapters else None for i in range(sequences)]
        self.keys = {
            "prompt": float(prompt),
            "prompt_pairs": prompt * (prompt + 1) / 2,
            "context": prompt + new_tokens / 2,
            "sequences": float(sequences),
            "adapters": float(adapters),
        }
        self._rng = np.random.default_rng(0)
        self._generator: Generator | None = None
        self._pending: list[float] = []

    def nbytes(self) -> int:
        model = self._context.model
        limits = EngineLimits(self._sequences, self._capacity, self._sequences * cdiv(self._capacity, BLOCK))
        programs = Programs(model.device, model.decoder, self._adapters, limits)
        storages = programs.storages() | model.decoder.storages()
        storages |= self._adapters.storages() if self._adapters else set()
        run_bytes = missing_bytes(storages) + sum(Arena.sizes_for([p.plan() for p in programs.all()]))
        return max(run_bytes, model.bytes_to_load())

    def open(self, choices: Choices = NO_CHOICES) -> None:
        context, adapters = self._context, self._adapters
        context.model.load_weights()
        if adapters:
            allocate(context.device, adapters.storages())
            adapters.upload_constants(context.device)
            fill_adapters(context.device, adapters, self._rng)
        self._generator = Generator(context.model, adapters, self._capacity, self._sequences)

    def check(self, rng: np.random.Generator) -> ReferenceErrors:
        """Check a prefill step of the prompts and a decoding step after it, as the Generator recorded them."""
        assert self._generator is not None, "open() first"
        self._rng, device, engine = rng, self._context.device, self._generator.engine
        recorded, arena, batch, result = engine.programs, engine.arena, self._sequences, ReferenceErrors()
        state, head = recorded.state, recorded.heads[batch]
        size = next((size for size in recorded.prefill if size >= batch * self._prompt), max(recorded.prefill))
        length, everyone = min(self._prompt, size // batch), np.arange(batch)
        # Positions, sequences and picked rows of each step.
        steps = {
            recorded.prefill[size]: (
                np.tile(np.arange(length), batch),
                np.repeat(everyone, length),
                (everyone + 1) * length - 1,
            ),
            recorded.decode[batch]: (np.full(batch, length), everyone, everyone),
        }
        for program in (recorded.shared, head.logits, *(step.program for step in steps)):
            program.build(arena)
        for storage in {state.hidden.storage, *(t.storage for t in state.logits), *state.cache.storages()}:
            fill_with_nan(device, storage.buffer)
        check(recorded.shared, result)
        count, slots = cdiv(self._capacity, BLOCK), np.array([-1 if slot is None else slot for slot in self._slots])
        for step, (positions, sequences, selection) in steps.items():
            for buffer in arena.buffers:
                fill_with_nan(device, buffer)
            ids = rng.integers(0, self._context.config.vocab_size, positions.size)
            blocks = [list(range(i * count, (i + 1) * count)) for i in range(batch)]
            step.upload(StepRows(ids, positions, sequences, slots[sequences], blocks, positions + 1, selection))
            check(step.program, result)
        check(head.logits, result)
        return result

    def run(self) -> float:
        if self._new_tokens == 1:
            return run_seconds(self._generate)
        if not self._pending:
            times = self._generate()
            self._pending = np.diff(times).tolist()  # without the first token, which is the prompt's
        return self._pending.pop()

    def _generate(self) -> list[float]:
        """The times at which the tokens of the first sequence were known."""
        assert self._generator is not None, "open() first"
        times: list[float] = []

        def note(sequence: int, token: int) -> None:
            if sequence == 0:
                times.append(time.perf_counter())

        prompts = self._rng.integers(0, self._context.config.vocab_size, (self._sequences, self._prompt))
        self._generator.generate(prompts.tolist(), self._slots, max_new_tokens=self._new_tokens, on_token=note)
        return times

    def extra(self, timings: Timings) -> Extra:
        if self._new_tokens == 1:
            return {"first_token_ms": 1e3 * timings.seconds, "prompt_tokens_per_second": self._prompt / timings.seconds}
        return {"tokens_per_second": self._sequences / timings.seconds, **self._traffic()}

    def _traffic(self) -> Extra:
        """The dispatches of a decoding step, its estimated bytes, and these relative to the weights that it reads."""
        assert self._generator is not None, "open() first"
        recorded, decoder = self._generator.engine.programs, self._context.model.decoder
        programs = recorded.decode[self._sequences].program, recorded.heads[self._sequences].logits
        steps = [dispatch for program in programs for dispatch in program.dispatches]
        nbytes = program_bytes(steps, round(self.keys["context"]) * self._sequences)
        read = decoder.storages() - (set(decoder.embedding.storages()) - set(decoder.head.storages()))
        weights = sum(storage.nbytes for storage in read)
        return {
            "dispatches": float(len(steps)),
            "estimated_bytes": float(nbytes),
            "estimated_bytes_per_weight_byte": nbytes / weights,
        }

    def close(self) -> None:
        if self._generator:
            self._generator.close()
        if self._adapters:
            release(self._context.device, self._adapters.storages())


class Load(Workload):
    """Loading a model from a checkpoint's files, or from the arrays of a synthetic one."""

    def __init__(self, context: Context):
        self._context = context
        self.keys = {}
        self._model: LoadedModel | None = None

    def nbytes(self) -> int:
        return self._context.model.declared().bytes_to_load()

    def open(self, choices: Choices = NO_CHOICES) -> None:
        pass

    def check(self, rng: np.random.Generator) -> ReferenceErrors | None:
        """Compare the smallest matrix with the base format's NumPy reference of the checkpoint's values.

        Of low-bit formats, whose tables can be fitted in several ways, the error must not be larger than its.
        """
        model = self._load()
        layer = model.decoder.layers[0]
        linears = {f"{layer.path}.{module}.weight": item.weight for module, item in layer.linears.items()}
        name, weight = min(linears.items(), key=lambda item: item[1].out_features * item[1].in_features)
        if model.checkpoint.packed(name) or model.decoder.base_dtype in FORMATS:  # the latter has random blocks
            return None
        source, values = model.checkpoint.read_f32(name), weight.values(self._context.device)
        want = base_format(weight.format).round_trip(source)
        error = nmse(values, want)
        if isinstance(weight, LowBitWeight):
            error = max(0.0, nmse(values, source) - 1.01 * nmse(want, source))
        result = ReferenceErrors()
        result.add(error, name.removesuffix(".weight"), part=True)
        return result

    def _load(self) -> LoadedModel:
        self._model = self._context.model.declared()
        self._model.load_weights()
        self._context.device.wait()
        return self._model

    def run(self) -> float:
        self.close()
        return run_seconds(self._load)

    def extra(self, timings: Timings) -> Extra:
        return {"parameters_per_second": self._context.keys()["parameters"] / timings.seconds}

    def close(self) -> None:
        if self._model:
            self._model.unload()
            self._model = None


# Values that a kernel uses of a tensor, where that is not all of it: (constants, rows that attention sees) -> values.
PARTS: dict[tuple[str, str], Callable[[dict[str, Any], int], int]] = {
    ("embedding_rows", "table"): lambda c, context: c["rows"] * c["cols"],
    ("gather_rows", "x"): lambda c, context: c["rows"] * c["cols"],
    ("rope_forward", "table"): lambda c, context: c["rows"] * c["rotated"],
    ("rope_forward", "cache_k"): lambda c, context: c["rows"] * c["kv_heads"] * c["dim"],
    ("rope_forward", "cache_v"): lambda c, context: c["rows"] * c["kv_heads"] * c["dim"],
    ("attention_forward", "k"): lambda c, context: context * c["kv_heads"] * c["dim"],
    ("attention_forward", "v"): lambda c, context: context * c["kv_heads"] * c["dim"],
}
WRITTEN_ONLY = frozenset({"cache_k", "cache_v"})


def dispatch_bytes(step: Dispatch, context: int) -> int:
    """Bytes that a dispatch reads and writes.

    Args:
        context: rows of all sequences' caches that attention sees.
    """
    return sum(_bytes(step, name, tensor, context) for name, tensor in zip(step.present, step.tensors, strict=True))


def program_bytes(steps: Iterable[Dispatch], context: int) -> int:
    return sum(dispatch_bytes(step, context) for step in steps)


def _bytes(step: Dispatch, name: str, tensor: Tensor, context: int) -> int:
    part = PARTS.get((step.kernel.name, name))
    nbytes = min(tensor.nbytes, part(step.constants, context) * ITEM_BYTES[tensor.dtype]) if part else tensor.nbytes
    updated = step.kernel.bindings[name] == "inout" and name not in WRITTEN_ONLY
    return 2 * nbytes if updated and step.constants.get("accumulate", True) else nbytes
