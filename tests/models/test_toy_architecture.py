"""An architecture of the test's own: registered by a line, it is planned, trained, saved, merged and generated from.

Its layers take turns: attention alone, and a mixer that gates a token by the one before it. So modules differ by
layer and have names of their own, one matrix may carry no adapter, and what a mixer keeps between tokens is not keys
and values: the last token's state of each sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.models import full_logits, relative_error
from support.training.training import random_rows

from wgpu_lora.cli.proof.worker_jobs import step
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.infer.generator import Generator
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.architectures import ARCHITECTURES, parse_config
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.blocks.attention_block import Attention, KeyRanges
from wgpu_lora.models.config_fields import whole
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.gguf_export import export_model
from wgpu_lora.models.kv_cache import CacheTensor
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.models.model_config import MATRIX, ModelConfig, Parameter
from wgpu_lora.models.rotary_embedding import RopeTable
from wgpu_lora.models.row_inputs import NOWHERE, RowInput, Rows
from wgpu_lora.ops.elementwise import fill, residual, swiglu
from wgpu_lora.ops.embedding import gather_rows
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log

STATED = {"model_type": "toy", "vocab_size": 61, "hidden_size": 32, "inner_size": 48, "num_hidden_layers": 4}
STATED |= {"num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True}


# -- the architecture --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """Which row each row looks at: the token before it in the batch, or after it; or whose state it goes on from."""

    what: str
    width = 1

    def values(self, rows: Rows) -> np.ndarray:
        before = rows.previous
        sources = np.full(before.size, NOWHERE, np.int64)
        if self.what == "previous":
            sources[before >= 0] = before[before >= 0]
        elif self.what == "next":
            sources[before[before >= 0]] = np.flatnonzero(before >= 0)
        else:
            goes_on = (before < 0) & (rows.positions > 0)
            sources[goes_on] = rows.sequences[goes_on]
        return sources

    def padding(self, values: np.ndarray) -> int:
        return NOWHERE


PREVIOUS, NEXT, CARRIED = map(Index, ("previous", "next", "carried"))


@dataclass(frozen=True, kw_only=True)
class Toy(ModelConfig):
    inner_size: int
    num_attention_heads: int

    EMBEDDING, FINAL_NORM, LAYERS = "backbone.embed.weight", "backbone.norm.weight", "backbone.blocks"

    @classmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        own = {name: whole(d, name, where) for name in ("inner_size", "num_attention_heads")}
        return cls(**cls.common(d, where), **own)

    def layer(self, index: int) -> dict[str, Parameter]:
        hidden, inner = self.hidden_size, self.inner_size
        if index % 2 == 0:
            names, norm = [f"attn.{kind}_proj" for kind in "qkvo"], "attn.norm.weight"
            return {f"{n}.weight": Parameter((hidden, hidden), MATRIX, True) for n in names} | {
                norm: Parameter((hidden,))
            }
        return {
            "mixer.norm.weight": Parameter((hidden,)),
            "mixer.in_proj.weight": Parameter((inner, hidden), MATRIX, True),
            "mixer.gate.weight": Parameter((inner, hidden), MATRIX),
            "mixer.out_proj.weight": Parameter((hidden, inner), MATRIX, True),
        }

    def block(self, block: LayerContext, index: int, x: Tensor) -> Tensor:
        if index % 2 == 0:
            return residual(block.rec, x, self._attention.record(block, block.norm(x, "attn.norm", self.rms_norm_eps)))
        h = block.norm(x, "mixer.norm", self.rms_norm_eps)
        inner = block.linear(h, "mixer.in_proj")
        gate = block.linear(token_before(block, h), "mixer.gate")
        return residual(block.rec, x, block.linear(swiglu(block.rec, gate, inner), "mixer.out_proj"))

    def cache(self, index: int) -> Mapping[str, CacheTensor]:
        return self._attention.cache() if index % 2 == 0 else {"newest": CacheTensor((self.hidden_size,), True)}

    def row_inputs(self) -> Sequence[RowInput]:
        return [KeyRanges(), PREVIOUS, NEXT, CARRIED]

    def tables(self) -> Sequence[RopeTable]:
        return [self._attention.rope]

    @property
    def _attention(self) -> Attention:
        dim = self.hidden_size // self.num_attention_heads
        return Attention(self.num_attention_heads, dim, None, RopeTable(dim, 10000.0, None), name="attn")


def token_before(block: LayerContext, x: Tensor) -> Tensor:
    """y[t] = x[t - 1] within a sequence, 0 at its first token; recorded after whatever else reads x."""
    rec, rows = block.rec, block.inputs.rows
    shape = {"rows": x.shape[0], "cols": x.shape[1]}
    y = rec.temp(x.shape, name="token before")
    rec.dispatch(fill, y, size=y.size)
    rec.dispatch(gather_rows, x, rows[PREVIOUS], y, **shape)
    if block.cache:
        rec.dispatch(gather_rows, block.cache.tensors["newest"], rows[CARRIED], y, **shape)
        block.cache.replace(rec, "newest", x)

    def backward() -> None:
        dx, accumulate = rec.gradient_target(x)
        assert not accumulate
        rec.dispatch(fill, dx, size=dx.size)
        rec.dispatch(gather_rows, rec.gradient(y), rows[NEXT], dx, **shape)

    rec.node(backward, inputs=[x], outputs=[y])
    return y


# -- what becomes of it ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    ARCHITECTURES["toy"] = Toy  # the line
    yield
    del ARCHITECTURES["toy"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, lively enough for attention and gates to matter."""
    directory, rng = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    (directory / "config.json").write_text(json.dumps(STATED))
    tensors = {
        name: np.ones(shape) if len(shape) == 1 else rng.normal(0, 1.5 / shape[1] ** 0.5, shape)
        for name, shape in parse_config(STATED).parameter_shapes().items()
    }
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def trained(toy: Path, device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of twelve steps on NF4 weights, the blocks recomputed in the backward pass."""
    directory = tmp_path_factory.mktemp("run")
    args = TrainingArguments(
        model=str(toy),
        data=str(random_rows(directory / "rows.jsonl", 6, 61)),
        output=str(directory / "out"),
        lora_r=4,
        learning_rate=2e-2,
        gradient_checkpointing=True,
        max_steps=12,
        max_length=16,
        warmup_ratio=0.0,
        per_device_train_batch_size=2,
        logging_steps=1,
    )
    job = prepare_job(args, open_model(str(toy), device))
    plan = job.session.memory()
    job.train()
    assert plan.peak > plan.groups["base"] > 0
    return directory / "out"


def loaded(toy: Path, device: Device, base_dtype: str = "f32") -> LoadedModel:
    model = open_model(str(toy), device, base_dtype)
    model.load_weights()
    return model


def test_it_learns_with_the_gradients_of_its_loss(trained: Path, device: Device) -> None:
    losses = [line["loss"] for line in read_log(trained / LOG)]
    assert losses[-1] < 0.8 * losses[0]
    port: Any = None  # it says nothing on its way
    measured = step(port, directory=str(trained), device=device.info.index, differences=True)
    directions = measured["gradients"]["directions"]
    assert {d["matrix"].rpartition(".")[0].rpartition(".")[2] for d in directions} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj",
    }  # fmt: skip
    for direction in directions:
        assert direction["measured"] == pytest.approx(direction["gradient"], rel=2e-2, abs=1e-5), direction["matrix"]


def test_its_adapter_is_pefts_and_merges(toy: Path, trained: Path, device: Device, tmp_path: Path) -> None:
    config, matrices = read_adapter(trained)
    assert config.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj")
    assert matrices.keys() == parse_config(STATED).lora_modules.keys()
    assert "backbone.blocks.3.mixer.in_proj" in matrices
    assert "backbone.blocks.3.mixer.gate" not in matrices
    merge_adapter(toy, trained, tmp_path / "merged", "f32")
    model, row = loaded(toy, device), np.random.default_rng(1).integers(0, 61, 30)
    beside = full_logits(model, [Segment(row)], load_adapters(device, model.config, [trained]))
    (merged,), (base,) = (
        full_logits(m, [Segment(row, slot=None)]) for m in (loaded(tmp_path / "merged", device), model)
    )
    assert relative_error(beside[0], merged) < 1e-5 < relative_error(base, merged)


def test_decoding_gives_what_a_full_pass_gives(toy: Path, trained: Path, device: Device) -> None:
    """Prompts in pieces of four rows, several sequences together."""
    model, rng = loaded(toy, device), np.random.default_rng(2)
    adapters = load_adapters(device, model.config, [trained])
    prompts = [rng.integers(0, 61, size).tolist() for size in (11, 1, 6)]
    slots: list[int | None] = [0, 0, None]
    with Generator(model, adapters, capacity=32, batch=3, buckets=(4,)) as generator:
        logits: dict[int, list[np.ndarray]] = {0: [], 1: [], 2: []}

        def keep(number: int, token: int) -> None:
            logits[number].append(generator.last_logits())

        results = generator.generate(prompts, slots, max_new_tokens=7, on_token=keep)
    for i, (prompt, slot, result) in enumerate(zip(prompts, slots, results, strict=True)):
        (expected,) = full_logits(model, [Segment(np.array(prompt + result.token_ids), slot=slot)], adapters)
        assert relative_error(np.array(logits[i]), expected[len(prompt) - 1 : -1]) < 1e-5


def test_what_it_does_not_have_is_said(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="GGUF files of the architecture toy are not supported"):
        export_model(toy, tmp_path / "toy.gguf")
    with pytest.raises(UserError, match=r"model_type 'tow' .* use one of qwen2, .*, toy\."):
        parse_config({**STATED, "model_type": "tow"})
