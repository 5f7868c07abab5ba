"""Training of an adapter: a recipe, with any option of `finetune`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from wgpu_lora.data import training_data
from wgpu_lora.data.row_files import FileSource
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS
from wgpu_lora.train.chain.stage import EndedEarlyError, Stage, Watch, model_files
from wgpu_lora.train.distill.teacher_cache import CACHE
from wgpu_lora.train.options.training_arguments import CHANGEABLE_ON_RESUME, TrainingArguments
from wgpu_lora.train.resolve_options import resolve_options
from wgpu_lora.train.run.run_checkpoint import BEST

# Options that do not change the result; of those that are free on resuming, the others name what does.
WITHOUT_EFFECT = CHANGEABLE_ON_RESUME - {
    "data",
    "split",
    "dataset_config",
    "skip_bad_rows",
    "model",
    "eval_data",
    "eval_split",
    "eval_steps",  # which adapters may be the best
}


@dataclass(frozen=True)
class Finetune(Stage):
    """recipe: a recipe's name or file; options: over those of the recipe; where: for messages."""

    resumes: ClassVar[bool] = True

    recipe: str | None
    options: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Self:
        options = {name: value for name, value in values.items() if name != "recipe"}
        for name in ("output", "resume", "overwrite"):
            if name in options:
                raise UserError(f"{where} has the option '{name}', which the chain chooses: leave it out.")
        stage = cls(values.get("recipe"), options, where)
        if not stage.arguments().data:
            raise UserError(f"{where} has no 'data': name a file, a folder or an earlier stage in braces.")
        return stage

    @classmethod
    def option_names(cls) -> list[str]:
        return ["recipe", *(field.name for field in fields(TrainingArguments))]

    def arguments(self, **overrides: Any) -> TrainingArguments:
        return resolve_options({**self.options, **overrides}, self.recipe, self.where, demo=False)[0]

    def fingerprint(self) -> dict[str, Any]:
        args = self.arguments()
        options = replace(args, learning_rate=args.rate).as_dict()
        return {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}

    def files(self, download: bool) -> Iterator[Path]:
        args = self.arguments()
        yield from model_files(args.model or "demo", download)
        paths = [Path(path) for path in (args.data, args.eval_data) if path]
        if all(path.exists() for path in paths):
            for source in training_data(args.data or "", args.eval_data, split=args.split, eval_split=args.eval_split):
                if source:
                    yield source.file if isinstance(source, FileSource) else Path(source.path)
        else:  # not there yet, or of the hub
            yield from paths
        for path in (args.init_adapter, args.reference_adapter, args.teacher_adapter):
            if path:
                yield from (Path(path, file) for file in (WEIGHTS, CONFIG))
        yield from (Path(cache, CACHE) for cache in (args.teacher_cache, args.eval_teacher_cache) if cache)
        if args.teacher:
            yield from model_files(args.teacher, download)

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        from wgpu_lora.train.prepare_job import prepare_job
        from wgpu_lora.train.run import run_checkpoint
        from wgpu_lora.train.run.stop_reasons import exit_code

        resume = {"resume": True} if resuming and run_checkpoint.latest_checkpoint(output) else {}
        job = prepare_job(self.arguments(output=str(output), **resume))
        with watch.training(job) as events:
            record = job.train(events)
        watch.trained(record)
        if code := exit_code(record.stop_reason, record.signal):
            raise EndedEarlyError(code)

    def outputs(self, output: Path) -> Iterator[Path]:
        from wgpu_lora.train.run.run_checkpoint import trained_files

        # Not all files: cards may be edited, and runs extended.
        paths = [output, *(path for path in (output / BEST,) if path.exists())]
        yield from (path / file for path in paths for file in trained_files(path))
