"""wgpu-lora teacher-cache: what a teacher says about training rows, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wgpu_lora.cli.console import Bar, TensorBar, line, print_json
from wgpu_lora.cli.parameters import MODEL, THINKING, BaseDtype, Device, Json, choice
from wgpu_lora.events import Evaluating
from wgpu_lora.names.choices import COMPUTE_DTYPES, OVERFLOW
from wgpu_lora.names.text import count_noun
from wgpu_lora.weights.base_formats import AUTO

if TYPE_CHECKING:
    from wgpu_lora.train.distill.teacher_cache_writer import CachePlan


class _CacheProgress(TensorBar):
    """A bar of loaded tensors, then one of rows."""

    def __init__(self, loading_bar: Bar, row_bar: Bar):
        super().__init__(loading_bar)
        self._row_bar = row_bar

    def evaluating(self, evaluating: Evaluating) -> None:
        self._bar.close()
        self._row_bar.advance(to=evaluating.rows, total=evaluating.total)


def teacher_cache(
    data: Annotated[str, typer.Option(help="Training rows, as for 'finetune': a file, a folder or a hub id.")],
    output: Annotated[Path, typer.Option(help="Directory of the cache; an interrupted one is continued.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="The teacher: model directory, GGUF file, hub id, 'smollm2' or 'demo'; by default the adapter's base.",
            autocompletion=MODEL,
        ),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter directory of the teacher.", metavar="DIR")] = None,
    top_k: Annotated[int, typer.Option(help="Tokens with the largest logits to keep. [1<=x<=1024]")] = 64,
    random: Annotated[int, typer.Option(help="Other tokens to keep, drawn at random. [x>=0]")] = 128,
    length: Annotated[int, typer.Option(help="Tokens that rows are cut to. [x>=2]")] = 128,
    samples: Annotated[int | None, typer.Option(help="Only the first rows; by default all. [x>=1]")] = None,
    seed: Annotated[int, typer.Option(help="Of the random tokens. [x>=0]")] = 0,
    logits_dtype: Annotated[str, choice("Storage type of the logits.", ("f16", "f32"))] = "f16",
    split: Annotated[str | None, typer.Option(help="Split of --data, for example train or 'train[:90%]'.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a dataset that has several.")] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Skip rows that cannot be read.")] = False,
    on_overflow: Annotated[str, choice("What to do with longer rows.", OVERFLOW)] = "truncate",
    completion_only_loss: Annotated[bool, typer.Option(help="Keep positions of answers only.")] = True,
    enable_thinking: Annotated[bool | None, typer.Option(help=THINKING)] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens computed at a time. [x>=2]")] = 1024,
    base_dtype: BaseDtype = AUTO,
    compute_dtype: Annotated[
        str, choice("Type that the inputs of frozen matmuls are rounded to.", COMPUTE_DTYPES)
    ] = "f32",
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Store what a teacher says about training rows, for distillation.

    For each trained position, the cache has the largest logits, the log-sum-exp of all, and those of some other tokens.
    'finetune --objective kd --teacher-cache DIR' trains on it. An interrupted run is continued by the same command.
    """
    from wgpu_lora.api import load
    from wgpu_lora.api import teacher_cache as make
    from wgpu_lora.api.teacher_caches import check_values
    from wgpu_lora.infer.named_adapters import model_of

    check_values(top_k, random, length, samples, seed, logits_dtype, on_overflow, batch_tokens, compute_dtype)
    opened = load(model_of({"teacher": Path(adapter)} if adapter else {}, model), device=device, base_dtype=base_dtype)
    total = 0

    def show_plan(plan: CachePlan, finished_rows: int) -> None:
        nonlocal total
        total = plan.bytes
        if as_json:
            return
        rows, positions = count_noun(len(plan.rows), "row"), count_noun(plan.header.positions, "position")
        for note in opened.rounding:
            line("note", note)
        line("cache", f"{rows}, {positions} of {plan.position_bytes:,} bytes: {plan.bytes:,} bytes in {output}")
        if finished_rows:
            line("resumed", f"{finished_rows:,} of {rows} are finished")

    with Bar("loading", opened.tensors_to_load()) as loading, Bar("caching", None, " rows") as rows:
        cache = make(
            opened,
            data,
            output,
            adapter=adapter,
            top_k=top_k,
            random=random,
            length=length,
            samples=samples,
            seed=seed,
            logits_dtype=logits_dtype,
            split=split,
            dataset_config=dataset_config,
            skip_bad_rows=skip_bad_rows,
            on_overflow=on_overflow,
            completion_only_loss=completion_only_loss,
            enable_thinking=enable_thinking,
            batch_tokens=batch_tokens,
            compute_dtype=compute_dtype,
            planned=show_plan,
            events=_CacheProgress(loading, rows),
            progress_bar=False,
        )
    nbytes = sum(shard.bytes for shard in cache.header.shards)
    if as_json:
        shards = len(cache.header.shards)
        print_json(
            {
                "directory": str(output),
                "rows": cache.rows,
                "positions": cache.header.positions,
                "bytes": nbytes,
                "planned_bytes": total,
                "shards": shards,
                "digest": cache.digest(),
            }
        )
        return 0
    line("written", f"{count_noun(len(cache.header.shards), 'shard')}, {nbytes:,} bytes")
    return 0
