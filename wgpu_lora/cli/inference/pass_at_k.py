"""wgpu-lora evaluate --pass-at-k: answers to rows with unit checks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import Bar, TensorBar, console, line, print_json, table
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, escape_unprintable, join_words

if TYPE_CHECKING:
    from wgpu_lora.data import Source
    from wgpu_lora.models.loaded_model import LoadedModel
    from wgpu_lora.train.checks.pass_at_k import PassRates, Sample

WARM = 0.8  # temperature of several samples (Chen et al. 2021 use it for pass@100)
LONGEST = 3600.0  # seconds of a check


def evaluate_checks(
    data: str,
    split: str | None,
    dataset_config: str | None,
    pass_at_k: str,
    samples: int,
    settings: dict[str, Any],
    adapter_options: Sequence[str],
    compare: bool,
    model: str | None,
    output: Path | None,
    options: Mapping[str, Any],
    opening: tuple[str | None, str],
    as_json: bool,
    log_facts: Mapping[str, Any],
) -> int:
    """Run the command; options: of `measure`; opening: device and type of the base; log_facts: for the run log."""
    from wgpu_lora.data import heldout_data
    from wgpu_lora.files.atomic import check_new, write_new_bytes
    from wgpu_lora.infer.answers import notes_for
    from wgpu_lora.infer.generation_options import generation_options
    from wgpu_lora.infer.named_adapters import BASE, model_of, named_adapters, slots_of
    from wgpu_lora.infer.prompt_file import kept_on_failure, to_jsonl
    from wgpu_lora.models.loaded_model import open_model
    from wgpu_lora.train.checks.coding_problems import read_problems
    from wgpu_lora.train.checks.pass_at_k import check_settings, measure, parse_ks
    from wgpu_lora.train.run.trained_options import evaluation_rows
    from wgpu_lora.train.track.run_recorder import remarks

    # Check everything before a model is opened.
    ks = parse_ks(pass_at_k, samples)
    if settings["temperature"] is None:
        settings["temperature"] = 0.0 if samples == 1 else WARM
    check_settings(generation_options(settings, "The command line"), samples)
    if not 0 < options["timeout"] <= LONGEST:
        raise UserError(f"--timeout must be above 0 and at most {LONGEST:,.0f} seconds, not {options['timeout']:g}.")
    if options["batch"] is not None and options["batch"] < 1:
        raise UserError(f"--batch-size must be at least 1, not {options['batch']}.")
    if output:
        check_new(output, "--output")
    adapters = named_adapters(adapter_options)
    comparison = compare or len(adapters) > 1
    slots = slots_of(adapters, compare) if comparison else {next(iter(adapters), BASE): 0 if adapters else None}
    source = heldout_data(data, split, dataset_config)
    problems = read_problems(source)
    opened = open_model(model_of(adapters, model), *opening)
    for note in notes_for(opened, adapters.values()):
        _note(note)
    if settings["enable_thinking"] is None:  # as in training
        limit = opened.config.max_position_embeddings
        settings["enable_thinking"] = evaluation_rows({}, list(adapters.values()), limit).enable_thinking
    result: list[Sample] = []
    config = {**settings, "pass_at_k": pass_at_k, "samples": samples, "timeout": options["timeout"]}
    with (
        remarks(**log_facts),
        _recorded(opened, source, slots, adapters, config) as entries,
        Bar("loading", opened.tensors_to_load()) as bar,
        kept_on_failure(output, lambda: [sample.as_dict() for sample in result], _note),
    ):
        rates = measure(
            opened,
            problems,
            ks,
            samples,
            generation_options(settings, "The command line"),
            adapters,
            slots,
            received=result,
            events=_AnswerProgress(bar),
            **options,
        )
        for name, entry in entries.items():
            rate = rates.rates[name]
            entry["tokens"] = sum(len(sample.answer.token_ids) for sample in rates.samples if sample.adapter == name)
            entry["seconds"] = round(rates.seconds, 3)
            scores = {f"pass@{k}": value for k, value in rate.pass_at_k.items()}
            entry["results"] = {**scores, "rows": rate.rows, **rate.outcomes}
            entry["outputs"] = [str(output.resolve())] if output else []
        if output:
            write_new_bytes(output, to_jsonl([sample.as_dict() for sample in rates.samples]), "--output")
    if as_json:
        info = opened.device.info
        device = {"name": info.name, "driver": info.driver, "backend": info.backend}
        print_json({**rates.as_dict(), "settings": {**settings, "timeout": options["timeout"]}, "device": device})
    else:
        _show(rates, ks)
        if output:
            line("written", f"{count_noun(len(rates.samples), 'answer')} to {output}")
    return 0


@contextmanager
def _recorded(
    model: LoadedModel,
    source: Source,
    slots: Mapping[str, int | None],
    adapters: Mapping[str, Path],
    config: Mapping[str, Any],
) -> Iterator[dict[str, dict[str, Any]]]:
    """Entries of the run log by name, for the results."""
    from wgpu_lora.train.track.run_log import DataFile, run_name
    from wgpu_lora.train.track.run_recorder import device_facts, given_options, recorded

    quant = model.decoder.base_dtype
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                recorded(
                    "evaluate",
                    run_name(model.name, quant, slot is not None, False, "pass-at-k", "f32"),
                    objective="pass-at-k",
                    adapter=name if name in adapters else None,
                    device=device_facts(model.device.info),
                    config=given_options(
                        {**config, "model": model.name, "adapter": str(adapters.get(name, "")) or None}
                    ),
                    data=DataFile(source.path, source.digest()),
                )
            )
            for name, slot in slots.items()
        }


class _AnswerProgress(TensorBar):
    """A bar of loaded tensors, then of checked answers."""

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._bar.advance(f"checking answers, {count_noun(tokens, 'token')} so far", to=done, total=total)


def _show(rates: PassRates, ks: Sequence[int]) -> None:
    outcomes = list(next(iter(rates.rates.values())).outcomes)
    rows = [
        [
            escape_unprintable(name),
            *(f"{rate.pass_at_k[k]:.1%}" for k in ks),
            *(f"{n:,}" for n in rate.outcomes.values()),
        ]
        for name, rate in rates.rates.items()
    ]
    console().print(table(["name", *(f"pass@{k}" for k in ks), *outcomes], rows, text_columns=["name"]))
    first = next(iter(rates.rates.values()))
    samples = count_noun(first.samples, "sample")
    form = "continued as text" if rates.completion else "asked in a chat"
    line("over", f"{count_noun(first.rows, 'row')}, {samples} each, {form}, in {rates.seconds:.1f} s")
    line("answers", f"ran under {rates.confinement}")
    if rates.confinement.unenforced:
        line("note", f"this system did not enforce limits of {join_words(rates.confinement.unenforced)}")


def _note(text: str) -> None:
    print(f"wgpu-lora: {escape_unprintable(text)}", file=sys.stderr, flush=True)
