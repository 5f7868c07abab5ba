"""A frozen model that says, for each trained token, which tokens it finds likely: programs that only pass forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wgpu_lora.data import UNTRAINED
from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.adapter_set import AdapterSet
from wgpu_lora.models.batch_inputs import Segment, StepInputs, Tables, write
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.scoring import ForwardPasses
from wgpu_lora.names.spelling import any_option, setting
from wgpu_lora.ops.embedding import gather_rows, head_logits
from wgpu_lora.ops.half_precision import head_operand
from wgpu_lora.ops.loss.loss import CHUNK_BYTES, softmax_chunk
from wgpu_lora.ops.loss.sparse_logits import pick_logits, top_k
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.train.distill.teacher_logits import TopKLogits, random_tokens, tail_correction

MOST = 1024  # tokens with the largest logits that a position may keep, unless the vocabulary is kept whole


@dataclass(frozen=True)
class TopK:
    """The logits kept at each position: of the `top_k` tokens with the largest logits, and `random` others, drawn
    with `seed`."""

    top_k: int = 64
    random: int = 128
    seed: int = 0

    def check(self, vocab_size: int) -> None:
        """Raise UserError if a vocabulary does not have so many tokens, or they are too many."""
        if self.top_k + self.random > vocab_size:
            raise UserError(
                f"{setting('top_k', self.top_k)} and {setting('random', self.random)} are more tokens than the "
                f"teacher's vocabulary of {vocab_size:,} has: lower {any_option('top_k', 'random')}."
            )
        if self.top_k > MOST and self.top_k < vocab_size:
            raise UserError(f"{setting('top_k', self.top_k)} is more than {MOST:,}: lower it.")

    @property
    def candidates(self) -> int:
        """Tokens that are drawn per position, of which at most K are among the top K; 0 if none are needed."""
        return self.top_k + self.random if self.random else 0


class Forward:
    """A forward pass of up to `tokens` tokens, recorded on construction. With n chunks of the vocabulary, the K largest
    logits alternate between two pairs of tensors, so that the last chunk writes those that are read back."""

    def __init__(
        self,
        model: LoadedModel,
        adapters: AdapterSet | None,
        tokens: int,
        tables: Tables,
        compute_dtype: str,
        selection: TopK,
        name: str,
    ):
        def make(label: str, *shape: int, dtype: str = "f32") -> Tensor:
            return persistent(shape, dtype, "workspace", f"{name}'s {label} [{tokens}]")

        slots = len(adapters.specs) if adapters else 1
        k, candidates = selection.top_k, selection.candidates
        self.inputs = StepInputs.declare(model.config.row_inputs(), tokens, slots, tables)
        self.values, self.ids = make("largest logits", tokens, k), make("tokens", tokens, k, dtype="u32")
        self.state = make("softmax state", tokens, 4)
        self.candidates = make("drawn tokens", tokens, candidates, dtype="u32") if candidates else None
        self.candidate_logits = make("logits of drawn tokens", tokens, candidates) if candidates else None
        self.program = Program(model.device, f"{name} {tokens}")
        rec = Recorder(self.program, compute_dtype=compute_dtype)
        hidden = model.decoder.hidden(rec, self.inputs, adapters.bind(self.inputs) if adapters else {})
        self._record_top_k(rec, hidden, model, k)

    def _record_top_k(self, rec: Recorder, hidden: Tensor, model: LoadedModel, k: int) -> None:
        head, targets, rows = model.decoder.head, self.inputs.targets, self.inputs.tokens
        cols, count = head.in_features, targets.count
        rescale, rows_of = rec.temp((rows,), name="rescale"), rec.temp((rows, cols), name="picked")
        rec.dispatch(gather_rows, hidden, targets.rows, rows_of, rows=rows, cols=cols)
        scratch = rec.temp((rows, k), name="largest logits"), rec.temp((rows, k), "u32", name="tokens")
        rounded, scale, kind = head_operand(rec, rows_of, cols, keep=True)
        chunks = list(head.chunks(max(128, CHUNK_BYTES // (4 * rows) // 128 * 128)))
        for chunk_index, (first, part) in zip(reversed(range(len(chunks))), chunks, strict=True):
            width = part.rows
            logits = rec.temp((rows, width), name="logits")
            head_logits(rec.dispatch, rounded, head, part, logits, count, scale, kind)
            result = self.values, self.ids
            before, after = (scratch, result) if chunk_index % 2 == 0 else (result, scratch)
            shape = {"rows": rows, "cols": width, "first": first}
            rec.dispatch(top_k, logits, count, *before, *after, k=k, **shape)
            if self.candidates and self.candidate_logits:
                rec.dispatch(
                    pick_logits,
                    logits,
                    self.candidates,
                    count,
                    self.candidate_logits,
                    kept=self.candidates.shape[1],
                    **shape,
                )
            rec.dispatch(softmax_chunk, logits, targets.ids, count, self.state, rescale, **shape)

    def storages(self) -> set[Storage]:
        return self.inputs.storages() | self.program.persistent_storages()


class Teacher(ForwardPasses[Forward]):
    """Says what a model finds likely at the labelled tokens of segments.

    Args:
        adapters: those of the segments' slots; None if no segment has one.
        buckets: batch sizes in tokens, ascending. The longest segment must fit the last.
        tables: of another program of this model, already uploaded.
        selection: checked against the model's vocabulary.
    """

    def __init__(
        self,
        model: LoadedModel,
        adapters: AdapterSet | None,
        buckets: Sequence[int],
        tables: Tables,
        selection: TopK,
        compute_dtype: str = "f32",
        name: str = "teacher",
    ):
        selection.check(model.config.vocab_size)
        self.device, self.selection, self.vocab_size = model.device, selection, model.config.vocab_size
        self.name = model.name
        sizes = sorted({*buckets})
        super().__init__({n: Forward(model, adapters, n, tables, compute_dtype, selection, name) for n in sizes})

    def supports(self, segments: Sequence[Segment], rows: Sequence[int]) -> list[TopKLogits]:
        """The support of each segment's labelled tokens.

        Args:
            rows: the index of each segment's row (`Row.index`), which random tokens depend on.

        Raises:
            NotFiniteError: a logit of the teacher is not finite.
        """
        result: dict[int, TopKLogits] = {}
        for together, forward in self.batches([segment.tokens for segment in segments]):
            batch = [segments[i] for i in together]
            support, spans = self._run(forward, batch, [rows[i] for i in together])
            for i, (start, stop) in zip(together, spans, strict=True):
                result[i] = support.part(int(start), int(stop))
        return [result[i] for i in range(len(segments))]

    def _run(self, forward: Forward, segments: list[Segment], rows: list[int]) -> tuple[TopKLogits, np.ndarray]:
        """The supports of a batch, concatenated, and [start, stop) of each segment."""
        spans = forward.inputs.upload(self.device, [replace(segment, draws=None) for segment in segments])
        n = int(spans.max(initial=0))
        candidates = np.zeros((forward.inputs.tokens, self.selection.candidates), np.uint32)
        if forward.candidates:
            for segment, row, (start, stop) in zip(segments, rows, spans, strict=True):
                candidates[start:stop] = self._random_candidates(segment, row)
            write(self.device, forward.candidates, candidates)
        forward.program.run()
        state, values, ids = (self._read(tensor, n) for tensor in (forward.state, forward.values, forward.ids))
        top, total = state[:, 0].astype(np.float64), state[:, 1].astype(np.float64)
        with np.errstate(all="ignore"):
            lse = (top + np.log(total)).astype(np.float32)
        if not np.isfinite(lse).all():
            raise NotFiniteError(f"A logit of the teacher {self.name} is not finite: its weights are damaged.")
        order = np.argsort(-values, axis=1, kind="stable")  # they are sorted by id, so ties stay in that order
        best = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
        if forward.candidate_logits:
            random_support = self._random_support(ids, candidates[:n], self._read(forward.candidate_logits, n))
            best = np.hstack([best[0], random_support[0]]), np.hstack([best[1], random_support[1]])
        correction = tail_correction(self.vocab_size, self.selection.top_k, self.selection.random)
        support = TopKLogits(best[0], best[1], lse, self.selection.top_k, np.full(n, correction, np.float32))
        return support, spans

    def _random_candidates(self, segment: Segment, row: int) -> np.ndarray:
        assert segment.labels is not None
        positions = np.flatnonzero(segment.labels[1:] != UNTRAINED) + 1
        return random_tokens(self.selection.seed, row, positions, self.selection.candidates, self.vocab_size)

    def _random_support(
        self, top: np.ndarray, candidates: np.ndarray, logits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The first R drawn tokens that are not among the top K, whose ids ascend in each row, and their logits."""
        offsets = np.arange(len(top), dtype=np.int64)[:, None] * self.vocab_size
        top_keys, candidate_keys = (top + offsets).reshape(-1), (candidates + offsets).reshape(-1)
        nearest = np.minimum(np.searchsorted(top_keys, candidate_keys), top_keys.size - 1)
        among = (top_keys[nearest] == candidate_keys).reshape(candidates.shape)
        order = np.argsort(among, axis=1, kind="stable")[:, : self.selection.random]
        return np.take_along_axis(candidates, order, 1), np.take_along_axis(logits, order, 1)

    def _read(self, tensor: Tensor, n: int) -> np.ndarray:
        width = tensor.shape[1]
        dtype = np.uint32 if tensor.dtype == "u32" else np.float32
        if not n:
            return np.zeros((0, width), dtype)
        return self.device.read(tensor.storage.buffer, 4 * n * width).view(dtype).reshape(n, width).copy()
