"""wgpu-lora import: quantise a model once, and save the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer

from wgpu_lora.cli.command import Command, Group
from wgpu_lora.cli.console import OF_MODELS, Bar, TensorBar, console, line, next_commands, print_json, table
from wgpu_lora.cli.parameters import MODEL, Device, Json, Model, choice
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.names.choices import GGUF_TYPES, MERGED_DTYPES
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.weights.lowbit.lowbit_layout import GROUPS, KINDS


def import_model(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model directory, GGUF file, hub id, 'smollm2' or 'demo'.", autocompletion=MODEL
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory for the packed model; it must not exist yet.")],
    device: Device = None,
) -> int:
    """Quantise a model to NF4 and save it.

    The linear layers are quantised on the GPU and saved in bitsandbytes' format, which transformers loads too.
    For other formats, see quantize.
    """
    from wgpu_lora.files.atomic import check_new
    from wgpu_lora.models.export.quantized_model import write_packed
    from wgpu_lora.models.loaded_model import open_model

    check_new(output, "--output", directory=True)  # before the model may be downloaded
    opened = open_model(model, device, "nf4")
    with Bar("packing", opened.tensors_to_load() + len(opened.config.parameter_shapes())) as bar:
        write_packed(opened, output, events=TensorBar(bar))
    nbytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    line("packed", f"{opened.name} into {output}, {nbytes:,} bytes of weights")
    next_commands(output, OF_MODELS)
    return 0


def merge(
    adapter: Annotated[Path, typer.Option(help="PEFT adapter directory.")],
    output: Annotated[Path, typer.Option(help="Directory for the merged model; it must not exist yet.")],
    model: Model = None,
    dtype: Annotated[str, choice("Type of the written weights.", MERGED_DTYPES)] = "bf16",
    eval_data: Annotated[
        Path | None, typer.Option(help="Held-out rows: report the loss before merging, after it, and rounded to NF4.")
    ] = None,
) -> int:
    """Merge an adapter into its base, as a standalone model.

    It works tensor by tensor on the CPU: neither a GPU nor memory for the whole model is needed, but for --eval-data.
    """
    from wgpu_lora.files.atomic import check_new
    from wgpu_lora.formats.hub import is_gguf, resolve_model
    from wgpu_lora.infer.named_adapters import base_of
    from wgpu_lora.models.export.adapter_merge import merge_adapter, rounding_note, trained_base_dtype
    from wgpu_lora.models.model_files import config_of

    check_new(output, "--output", directory=True)  # before the model may be downloaded
    model_name = model or base_of(adapter) or "demo"
    directory = resolve_model(model_name)
    losses: Iterator[tuple[str, float]] = iter(())
    if eval_data:
        from wgpu_lora.api.evaluation import merged_losses

        losses = merged_losses(model_name, adapter, output, dtype, eval_data)
    before = list(islice(losses, 1))  # reads the data before anything is written
    with Bar("merging", len(config_of(directory).parameter_shapes())) as bar:
        notes = merge_adapter(directory, adapter, output, dtype, name=model_name, events=TensorBar(bar))
    line("merged", f"{directory} and {adapter} into {output}, {dtype}")
    for note in notes:
        line("note", note)
    if is_gguf(directory):
        line(
            "note",
            "the weights of the GGUF file are decoded; quantising the merged model rounds them a second time: "
            "'wgpu-lora export gguf --lora' writes the adapter for the file as it is",
        )
    elif base_dtype := trained_base_dtype(adapter):
        line("note", rounding_note(base_dtype))
    for text, loss in chain(before, losses):
        line("loss", f"{loss:.4f} {text}")
    next_commands(output, OF_MODELS)
    return 0


SCHEMES = ("nf4", *reversed(KINDS.values()))
LOW_BIT = tuple(KINDS.values())


class _ConversionProgress(Events):
    """A bar for each part of the work, one after the other."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._text = ""

    def _show(self, text: str, count: float, total: float, unit: str = "") -> None:
        if self._bar is None or text != self._text or count <= 1:
            self.close()
            self._bar, self._text = Bar(text, total, unit), text
        self._bar.advance(to=count, total=total)

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        self._show("loading", done, total)

    def evaluating(self, evaluating: Evaluating) -> None:
        self._show("passing rows", evaluating.rows, evaluating.total, " rows")

    def written(self, tensor: str, done: int, total: int) -> None:
        self._show("writing", done, total)

    def close(self) -> None:
        if self._bar:
            self._bar.close()
            self._bar = None


def quantize(
    output: Annotated[Path, typer.Option(help="Directory for the quantised model; it must not exist yet.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model in full precision: directory, GGUF file, hub id, 'smollm2' or 'demo', the default.",
            autocompletion=MODEL,
        ),
    ] = None,
    from_base: Annotated[
        str | None,
        typer.Option(help="Model that is quantised already, to be quantised in another scheme.", autocompletion=MODEL),
    ] = None,
    scheme: Annotated[str | None, choice("Format of all linear layers.", SCHEMES)] = None,
    mlp: Annotated[str | None, choice("Format of the MLP, with --attention.", LOW_BIT)] = None,
    attention: Annotated[str | None, choice("Format of attention, with --mlp.", LOW_BIT)] = None,
    group: Annotated[
        str | None,
        choice("Inputs that share a scale, or 'row': a table alone. Default: 32.", (*map(str, GROUPS), "row")),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="Rows whose activations say how much each input counts: file, folder or hub id."),
    ] = None,
    calibration_samples: Annotated[int, typer.Option(help="Rows of --calibration to use. [x>=1]")] = 128,
    eval_data: Annotated[
        str | None, typer.Option(help="Rows to measure the perplexity on, before and after: file, folder or hub id.")
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Quantise a model and save it, for every command's --model.

    lut4, lut3 and lut2 have a table of values per row, fitted on the GPU by k-means, and a scale per group. Other
    commands quantise a model in the same way while they load it, with --base-dtype.
    """
    from wgpu_lora.api.quantization import format_name
    from wgpu_lora.api.quantization import quantize as quantized

    if model is not None and from_base is not None:
        raise UserError(f"Give the model either as {flag('model')} or, if it is quantised, as {flag('from_base')}.")
    source = from_base or model or "demo"
    name = format_name(scheme, mlp, attention, group)
    progress = _ConversionProgress()
    try:
        result = quantized(
            source,
            name,
            output,
            device=device,
            requantize=from_base is not None,
            calibration=calibration,
            calibration_samples=calibration_samples,
            eval_data=eval_data,
            events=progress,
        )
    finally:
        progress.close()
    if as_json:
        kinds = [asdict(entry) | {"bits": entry.bits, "error": entry.error} for entry in result.kinds]
        print_json({**asdict(result), "output": str(output), "kinds": kinds})
        return 0
    columns = ("layers", "scheme", "matrices", "bits per weight", "relative error")
    rows = [
        (entry.kind, ", ".join(entry.schemes), f"{entry.matrices:,}", f"{entry.bits:.2f}", f"{entry.error:.6f}")
        for entry in result.kinds
    ]
    console().print(table(columns, rows, text_columns=("layers", "scheme")))
    if result.before is not None and result.after is not None:
        line("perplexity", f"{result.before:.4f} before, {result.after:.4f} after")
    if result.note:
        line("note", result.note)
    line("quantised", f"{source} to {name} in {result.seconds:.1f} s")
    line("written", f"{output}, {result.nbytes:,} bytes of weights")
    next_commands(output, OF_MODELS)
    return 0


export = typer.Typer(
    cls=Group, name="export", help="Write models and adapters for other programs.", rich_markup_mode=None
)


@export.command("gguf", cls=Command)
def gguf(
    output: Annotated[Path, typer.Option(help="GGUF file to write; it must not exist yet.")],
    model: Model = None,
    adapter: Annotated[Path | None, typer.Option(help="PEFT adapter directory to merge into the model.")] = None,
    quantize: Annotated[
        str | None,
        choice("Type of the matrices; f16 by default.", GGUF_TYPES),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Write the adapter alone in f32, for llama.cpp's --lora.")
    ] = False,
) -> int:
    """Write a model or an adapter for llama.cpp.

    Weights, tokenizer, chat template and stop tokens go into one file, written tensor by tensor on the CPU: neither a
    GPU nor memory for the whole model is needed.
    """
    from wgpu_lora.formats.gguf.gguf_writer import check_new_gguf
    from wgpu_lora.formats.hub import resolve_model
    from wgpu_lora.infer.named_adapters import base_of
    from wgpu_lora.models.export.gguf_export import export_adapter, export_model
    from wgpu_lora.models.model_files import config_of

    if lora and adapter is None:
        raise UserError("--lora writes an adapter alone: give it with --adapter DIR.")
    if lora and quantize:
        raise UserError("--quantize cannot be combined with --lora, which writes f32: leave one of them out.")
    check_new_gguf(output)  # before the model may be downloaded
    model_name = model or (base_of(adapter) if adapter else None) or "demo"
    path = resolve_model(model_name)
    if lora and adapter is not None:
        kind, source = "adapter, f32", f"{adapter}"
        result = export_adapter(path, adapter, output)
    else:
        kind = (quantize or "f16").lower()  # llama.cpp spells it Q4_K_M
        source = f"{path} and {adapter}" if adapter else f"{path}"
        with Bar("exporting", len(config_of(path).parameter_shapes())) as bar:
            # A hub id is a better name than the cache's directory.
            name = None if Path(model_name).exists() else model_name.rpartition("/")[2]
            result = export_model(path, output, kind, adapter, name, TensorBar(bar))
    line("exported", f"{source} into {output}")
    line("size", f"{result.nbytes:,} bytes, {kind}, {result.bits_per_weight:.2f} bits per weight")
    for note in result.notes:
        line("note", note)
    next_commands(output, ["llama-cli -m BASE.gguf --lora {place}" if lora else "llama-cli -m {place}"])
    return 0


def push(
    directory: Annotated[Path, typer.Argument(help="Directory of an adapter, a model or a GGUF file.", metavar="DIR")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository; created if it does not exist.")],
    public: Annotated[
        bool, typer.Option("--public/--private", help="Visibility of a repository that is created.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(help="Upload only files whose path matches this pattern; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out matching files; may be repeated, and overrides --include.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded.")] = False,
) -> int:
    """Upload an adapter or a model to the Hugging Face hub.

    By default, the files needed to load it are uploaded, by exact names: weights, configuration, tokenizer, model card
    and licence; --dry-run states the reason for each file. --include uploads matching files instead, with the patterns
    of `hf buckets sync` ('*' matches anything, including slashes); a run's own state (checkpoints, run.json, log.jsonl)
    is only included if the pattern names it, as run.json does.
    """
    from rich.table import Table
    from rich.text import Text

    from wgpu_lora.formats.hub_upload import check_repo_name, prepare
    from wgpu_lora.formats.hub_upload import push as send
    from wgpu_lora.formats.model_cards import CARD

    check_repo_name(repo)
    upload = prepare(directory, include, exclude)
    for note in upload.notes:
        line("note", note)
    if not dry_run:
        address = send(upload, repo, private=not public)
        line("uploaded", f"{upload.kind}, {upload.nbytes:,} bytes: {address}")
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("file")
    table.add_column("bytes", justify="right")
    table.add_column("why")
    for name, (_, size) in upload.files.items():
        table.add_row(Text(escape_unprintable(name)), f"{size:,}", Text(escape_unprintable(upload.reasons[name])))
    if upload.card:
        table.add_row(CARD, f"{len(upload.card.encode()):,}", "model card, generated since there is none")
    console().print(table)
    result = "public" if public else "private"
    line(
        "dry run",
        f"{upload.kind} in {directory} to {repo} ({result} if created), {upload.nbytes:,} bytes; nothing was uploaded",
    )
    return 0
