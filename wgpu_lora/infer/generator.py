"""Generation for prompts that are known beforehand, each with an adapter of its own or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.gpu.kernel import cdiv
from wgpu_lora.infer.engine import Engine
from wgpu_lora.infer.engine_programs import BUCKETS
from wgpu_lora.infer.request import Request, Sampler
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.ops.attention.attention import BLOCK

CAPACITY = 2048  # tokens of a sequence by default

OnToken = Callable[[int, int], object]
StopReason = Literal["stop", "length", "capacity", "interrupt"]


@dataclass
class Generation:
    """The result for one prompt.

    token_ids: without the prompt and without the stop token.
    stop_reason: "stop" (a stop token, or a stop string), "length" (max_new_tokens), "capacity" (the cache is full) or
        "interrupt" (the caller stopped); None while running.
    prefill_speed, decode_speed: tokens per second of all sequences that ran together; 0 if nothing was timed. Steps in
        which a program is compiled are left out.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    prefill_speed: float = 0.0
    decode_speed: float = 0.0


class Generator:
    """An engine that runs prompts to their end. The constructor only plans memory; shaders compile on first use.

    Args:
        model: its weights are loaded if needed.
        adapters: a slot for each adapter that prompts may use.
        capacity: tokens of a sequence including the prompt; by default 2048, or the model's limit if that is smaller.
        batch: sequences that run together.
        buckets: rows of the prefill programs, ascending.

    Raises:
        UserError: the capacity exceeds the model's limit, or the device has no room for the keys and values.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapters: AdapterSet | None = None,
        capacity: int | None = None,
        batch: int = 1,
        buckets: Sequence[int] = BUCKETS,
        events: Events = SILENT,
    ):
        self.model, self.device, self.batch = model, model.device, batch
        self.capacity = min(CAPACITY, model.config.max_position_embeddings) if capacity is None else capacity
        cache = max(1, batch * BLOCK * cdiv(self.capacity, BLOCK))
        self.engine = Engine(
            model, max_model_len=self.capacity, max_num_seqs=batch, max_num_batched_tokens=buckets[-1],
            cache_tokens=cache, adapters=adapters, buckets=buckets, events=events,
        )  # fmt: skip

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int | None] | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 50,
        seed: int = 0,
        stop_ids: Collection[int] = (),
        on_token: OnToken = lambda sequence, token: None,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
    ) -> list[Generation]:
        """Continue every prompt; of more than `batch`, one begins when another ends.

        Args:
            prompts: token ids, at least one each.
            slots: the adapter of each prompt, None for the base model alone; by default, no prompt uses an adapter.
            temperature, top_p, top_k, seed, min_p, repetition_penalty: see Sampler. Draws depend on seed and position
                only, so equal prompts give equal answers.
            stop_ids: tokens that end a sequence; they are not part of it.
            on_token: called with (prompt's number, token id) as soon as a token is sampled.

        Raises:
            UserError: a prompt is empty, too long, or outside the model's vocabulary; a slot does not exist; a sampling
                parameter is out of range.
        """
        sampler = Sampler(temperature, top_k, top_p, seed, min_p, repetition_penalty)
        results = [Generation(len(prompt)) for prompt in prompts]
        stops = [frozenset(stop_ids)] * len(prompts)
        for number, token in self.tokens(prompts, slots, results, sampler, max_new_tokens, stops):
            on_token(number, token)
        return results

    def tokens(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int | None] | None,
        results: Sequence[Generation],
        sampler: Sampler | Sequence[Sampler],
        max_new_tokens: int,
        stop_ids: Sequence[Collection[int]] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, int]]:
        """Like `generate`, but yields (prompt's number, token id) as soon as a token is sampled.

        Args:
            sampler: of all prompts, or one for each. stop_ids: of each prompt, by default none.
            results: one per prompt, filled in here. The caller can end a sequence by setting its stop reason.
            should_stop: called between steps; if true, all sequences end.
        """
        engine = self.engine
        samplers = [sampler] * len(prompts) if isinstance(sampler, Sampler) else sampler
        requests = self._requests(prompts, slots, samplers, max_new_tokens, stop_ids or [()] * len(prompts))
        numbers = {id(request): number for number, request in enumerate(requests)}
        timed = np.zeros((2, 2))  # tokens and seconds of prefill and decoding
        try:
            while engine.busy and not should_stop():
                for self._row, output in enumerate(engine.step()):
                    number = numbers[id(output.request)]
                    result, reason = results[number], output.request.finish_reason
                    if reason == "error":
                        raise UserError(output.request.error or "")
                    if output.token is not None:
                        result.token_ids.append(output.token)
                    if reason is not None and reason != "abort":
                        result.stop_reason = reason
                    if output.token is not None:
                        yield number, output.token
                    if result.stop_reason is not None:
                        engine.abort(output.request)
                if engine.step_seconds and 0 in engine.step_tokens:
                    kind = int(engine.step_tokens[0] == 0)
                    timed[kind] += engine.step_tokens[kind], engine.step_seconds
        finally:
            for request, result in zip(requests, results, strict=True):
                engine.abort(request)
                result.stop_reason = result.stop_reason or "interrupt"
                result.prefill_speed, result.decode_speed = (float(n / max(s, 1e-9)) for n, s in timed)

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int | None] | None,
        samplers: Sequence[Sampler],
        max_new_tokens: int,
        stop_ids: Sequence[Collection[int]],
    ) -> list[Request]:
        """Queued requests. Raises UserError, which names the prompt, before any runs."""
        prompt_slots = [None] * len(prompts) if slots is None else slots
        assert len(prompts) == len(prompt_slots), f"{len(prompts)} prompts, but {len(prompt_slots)} slots"
        requests: list[Request] = []
        for prompt, slot, sampler in zip(prompts, prompt_slots, samplers, strict=True):
            name = None if slot is None else str(slot)
            request = Request(list(prompt), name, sampler, max_new_tokens, stop_ids[len(requests)])
            try:
                self.engine.add(request, f"Prompt {len(requests) + 1}")
            except UserError:
                for previous in requests:
                    self.engine.abort(previous)
                raise
            requests.append(request)
        return requests

    def last_logits(self) -> np.ndarray:
        """Logits f32 [vocab] of the token that was yielded last, until the next one."""
        logits: np.ndarray = self.engine.read_logits()[self._row]
        return logits

    def close(self) -> None:
        """Free the caches and everything else allocated here; the model and the adapters stay."""
        self.engine.close()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
