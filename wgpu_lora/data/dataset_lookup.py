"""Resolve a name to sources: a file, a folder with train.* and valid.*, or a dataset of the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from wgpu_lora.data.compressed_files import bare_name
from wgpu_lora.data.huggingface import HubSource, is_hub_id, is_saved, load_splits
from wgpu_lora.data.memory_rows import ROWS
from wgpu_lora.data.row_files import FORMATS, SUFFIXES, FileSource, file_source
from wgpu_lora.data.source import Source
from wgpu_lora.errors import UserError
from wgpu_lora.files.locks import is_directory
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import join_words

# Names of files and splits, the most common first.
TRAIN, TEST = ("train", "training"), ("test",)
VALID = ("valid", "validation", "val", "eval", "dev", "heldout")
_SHOWN = 10  # names in a message


@dataclass
class DatasetSplits:
    """A resolved name. splits: by name; also: unused files, for example with the same name in another format."""

    data: str
    splits: dict[str, Path | HubSource]
    folder: bool = False
    also: list[str] = field(default_factory=list)

    def first(self, names: Sequence[str]) -> str | None:
        """The first of these names that exists."""
        return next((name for name in names if name in self.splits), None)

    def single_split(self) -> str | None:
        """The name of a dataset's only split, if there is just one."""
        return next(iter(self.splits)) if len(self.splits) == 1 and not self.folder else None

    def take(self, name: str) -> FileSource | HubSource:
        result = self.splits.pop(name)
        return file_source(result) if isinstance(result, Path) else result

    def take_split(self, split: str) -> FileSource | HubSource:
        alike = next((names for names in (TRAIN, VALID, TEST) if split in names), (split,))
        name = self.first((split, *alike))
        if name is None:
            choices = (
                f"choose one of {join_words([*self.splits])}" if self.splits else "it has no file named like a split"
            )
            raise UserError(f"{self.data} has no split {split!r:.80}: {choices}.")
        return self.take(name)

    def unused_names(self) -> list[str]:
        """The remaining files and splits, for messages."""
        usual = [name for name in (*TRAIN, *VALID, *TEST) if name in self.splits]
        sources = [self.splits[name] for name in usual]
        return [*self.also, *(p.name if isinstance(p, Path) else p.path for p in sources)]


def training_data(
    data: str | Path,
    eval_data: str | Path | None = None,
    *,
    split: str | None = None,
    eval_split: str | None = None,
    dataset_config: str | None = None,
    sources: Mapping[str, Source] | None = None,
) -> tuple[Source, Source | None]:
    """The sources of training and held-out data; the latter by `eval_data` or `eval_split`, else beside the former.

    A test split is only used on request, since held-out data select the best adapter.

    Args:
        split: of a dataset or a folder; if given, held-out data must be given too.
        dataset_config: configuration of a dataset of the hub.
        sources: rows from Python, by 'data' and 'eval_data'; they replace the lookup.

    Raises:
        UserError: the data do not exist.
    """
    sources = sources or {}
    heldout = sources.get("eval_data")
    if heldout is None and (eval_data or eval_split):
        if not eval_data and "data" in sources:
            raise UserError(f"{flag('eval_split')} needs a dataset or a folder: give it as {flag('eval_data')}.")
        heldout = heldout_data(eval_data or data, eval_split, dataset_config, "eval_split", "eval_data")
    if "data" in sources:
        if split:
            raise UserError(f"{flag('split')} needs a dataset or a folder, not rows from Python: leave it out.")
        return sources["data"], heldout
    splits = _lookup(str(data), split, dataset_config)
    if split:
        return splits.take_split(split), heldout
    source = splits.take(splits.first(TRAIN) or splits.single_split() or _missing_split_error(splits, "train", "split"))
    valid = splits.first(VALID)
    if heldout is None and valid is not None:
        heldout = splits.take(valid)
    names = splits.unused_names()
    if names and not (eval_data or eval_split or "eval_data" in sources):
        verb = "is" if len(names) == 1 else "are"
        option = "eval_data" if isinstance(source, FileSource) else "eval_split"
        note = f"{join_words(names)} beside {source.name} {verb} not used; use {flag(option)} for held-out rows"
        source = replace(source, notes=(*source.notes, note))
    return source, heldout


def heldout_data(
    data: str | Path,
    split: str | None = None,
    dataset_config: str | None = None,
    option: str = "split",
    argument: str = "data",
) -> Source:
    """The source of held-out data: a file, or the validation (else test, else train) split of a folder or dataset.

    Args:
        option, argument: names of the options for the split and the data, for messages.

    Raises:
        UserError: the data do not exist.
    """
    splits = _lookup(str(data), split, dataset_config, option, argument)
    if split:
        return splits.take_split(split)
    return splits.take(
        splits.first((*VALID, *TEST, *TRAIN)) or splits.single_split() or _missing_split_error(splits, "valid", option)
    )


def _lookup(
    data: str, split: str | None, config: str | None, option: str = "split", argument: str = "data"
) -> DatasetSplits:
    try:
        return _find_splits(data, split, config, option, argument)
    except OSError as error:
        raise UserError(f"{data} cannot be read ({error.strerror or error}).") from error


def _find_splits(data: str, split: str | None, config: str | None, option: str, argument: str) -> DatasetSplits:
    if not data.strip():
        raise UserError(f"{flag(argument)} is empty: give a file, a folder or a dataset.")
    path = Path(data)
    if path.is_file() or (path.exists() and not path.is_dir()):
        if split:
            raise UserError(f"{flag(option)} needs a dataset or a folder, but {data} is a file: leave it out.")
        single = DatasetSplits(data, {"train": path})
        if _stem(path) in TRAIN:
            single.also = [
                sibling.name for sibling in _files(path.parent) if sibling != path and _stem(sibling) not in TRAIN
            ]
        return single
    if is_directory(path):
        if is_saved(path):
            return DatasetSplits(data, {**load_splits(data, split, config)})
        result = DatasetSplits(data, {}, folder=True)
        for file in _files(path):
            if _stem(file) in result.splits:
                result.also.append(file.name)
            else:
                result.splits[_stem(file)] = file
        return result
    if data == ROWS:
        raise UserError(f"{flag(argument)} was given as {ROWS}: give them again, as {argument}=[...] in Python.")
    if not is_hub_id(data):
        near = "" if "/" in data or path.suffix else " (a Hugging Face dataset is OWNER/NAME)"
        raise UserError(f"There is no data at {data}{near}; give a file ({FORMATS}) or a folder with a train.jsonl.")
    return DatasetSplits(data, {**load_splits(data, split, config)})


def _files(folder: Path) -> list[Path]:
    """The files of a folder that are named like splits, ordered by format."""
    result = [path for path in sorted(folder.iterdir()) if path.is_file() and _stem(path) in (*TRAIN, *VALID, *TEST)]
    return sorted(result, key=lambda path: (SUFFIXES.index(bare_name(path).suffix.lower()), path.name))


def _stem(path: Path) -> str:
    """`train` for train.jsonl.gz; "" without a known suffix."""
    bare = bare_name(path)
    return bare.stem.lower() if bare.suffix.lower() in SUFFIXES else ""


def _missing_split_error(splits: DatasetSplits, split: str, option: str) -> NoReturn:
    if not splits.folder:
        choices = join_words([*splits.splits], limit=_SHOWN)
        raise UserError(f"{splits.data} has no split {split!r}, only {choices}: choose one with {flag(option)}.")
    names = [path.name for path in sorted(Path(splits.data).iterdir()) if bare_name(path).suffix.lower() in SUFFIXES]
    content = f"it holds {join_words(names, limit=_SHOWN)}" if names else "it holds no data"
    raise UserError(
        f"The folder {splits.data} has no {split}.jsonl (or {', '.join(SUFFIXES[2:])}), and {content}: name the file "
        "itself, or rename it."
    )
