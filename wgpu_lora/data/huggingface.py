"""Datasets of the Hugging Face hub, and folders in its formats, through the `datasets` library."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.data.row_files import BATCH, SUFFIXES, check_columns, rows_of
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import NoRowsError, RowPosition, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import pip_line
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import join_words

_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")  # written by save_to_disk
_PLAIN_SUFFIXES = (*SUFFIXES, ".gz", ".txt", ".zst", ".xz", ".bz2", ".zip", ".arrow", ".xlsx", ".toml", ".yaml", ".yml")


@dataclass(frozen=True)
class HubSource:
    """A split of a dataset. table: a `datasets.Dataset`."""

    path: str
    table: Any
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path

    @property
    def is_sealed(self) -> bool:
        return False

    @property
    def display_name(self) -> str:
        return self.path

    def rows(self, formats: RowFormats[Any]) -> Rows:
        check_columns(self.table.column_names, self.path, formats)
        if not self.table.num_rows:
            raise NoRowsError(f"{self.path} is empty; at least one row is needed.")
        table = self.table.with_format("arrow")  # so that images and audio are not decoded
        with _as_user_error(self.path):
            yield from rows_of(table.iter(BATCH))

    def locate(self, position: RowPosition) -> str:
        return f"{self.path}, {position}"

    def digest(self) -> None:
        return None


def is_hub_id(data: str) -> bool:
    """Whether a name that is not a path may be a dataset of the hub: `owner/name`, without a file suffix."""
    suffix = Path(data).suffix.lower()
    return (
        bool(_ID.fullmatch(data))
        and suffix not in _PLAIN_SUFFIXES
        and data[0] != "."
        and not Path(data).parent.exists()
    )


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`, or has splits in several files like datasets of the hub."""
    return any((folder / name).is_file() for name in _SAVED) or any(
        next(parent.glob("train-*-of-*.*"), None) for parent in (folder, folder / "data")
    )


def load_splits(data: str, split: str | None, config: str | None) -> dict[str, HubSource]:
    """The splits of a dataset of the hub, or of a folder that `is_saved`, by name; only `split`, if given.

    Raises:
        UserError: `datasets` is not installed, the dataset, configuration or split does not exist, or it cannot be
            downloaded or read.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{data} is not a local path, and datasets of the hub need the datasets library: check the path, or "
            f"install it with {pip_line('data')}."
        ) from None
    if sys.stderr is None or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    with _as_user_error(data):
        if any((Path(data) / name).is_file() for name in _SAVED):
            result = datasets.load_from_disk(data)
            if isinstance(result, Mapping) and split is not None:
                result = {split: result[split]} if split in result else _no_split(data, split, result)
        else:
            source = str(Path(data).absolute()) if Path(data).is_dir() else data
            result = datasets.load_dataset(source, config, split=split)
    if isinstance(result, Mapping):
        return {str(name): HubSource(f"{data} ({name})", table) for name, table in result.items()}
    return {split or "train": HubSource(f"{data} ({split})" if split else data, result)}


def _no_split(data: str, split: str, splits: Mapping[str, Any]) -> Any:
    raise UserError(f"{data} has no split {split!r:.80}: choose one of {join_words([*splits])} with {flag('split')}.")


@contextmanager
def _as_user_error(data: str) -> Iterator[None]:
    """Convert errors of the library, of formats and of the network to one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind, text = type(error).__name__, " ".join(str(error).split("Example of usage")[0].split())[:300].rstrip(". ")
        absent = "is not a local file or folder, and not a Hugging Face dataset in the local cache"
        if "OfflineMode" in text or (isinstance(error, ConnectionError) and os.environ.get("HF_HUB_OFFLINE")):
            wrong = f"{absent}, and HF_HUB_OFFLINE is set: check the path, or unset it"
        elif isinstance(error, ConnectionError):
            wrong = f"{absent}, and Hugging Face cannot be reached: check the path, or the network"
        elif "gated" in text.lower():
            wrong = (
                f"is gated: accept its terms at https://huggingface.co/datasets/{data} and log in with `hf auth login`"
            )
        elif kind == "DatasetNotFoundError":
            wrong = (
                "is neither a local file or folder nor a dataset on Hugging Face: check its spelling (a private one "
                "needs `hf auth login`)"
            )
        elif "config" in text.lower():
            wrong = f"cannot be opened ({text}): choose a configuration with {flag('dataset_config')}"
        elif text.startswith("Unknown split"):
            wrong = f"cannot be opened ({text}): choose one of these with {flag('split')}"
        else:
            wrong = f"cannot be read ({text or kind}): check it, or save it as a file of rows"
        raise UserError(f"{data} {wrong}.") from error
