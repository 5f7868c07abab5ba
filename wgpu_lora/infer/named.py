"""Adapters as people name them: what --adapter says, which slot each has, which model they belong to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft import read_adapter
from wgpu_lora.gpu.program import release
from wgpu_lora.infer.adapters import load_adapters
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.share import claim

BASE = "base"  # what the model without an adapter is called beside adapters


def named_adapters(texts: Sequence[str]) -> dict[str, Path]:
    """The adapter directories of a command line by name, in its order: NAME=DIR, or DIR, whose last part is its name.

    A text that is a directory as a whole, or that has a separator before its '=', is a DIR.

    Raises:
        UserError: a name or a directory is empty or given twice.
    """
    found: dict[str, Path] = {}
    places: dict[str, str] = {}
    for text in texts:
        name, directory = _split(text)
        if name in found:
            raise UserError(
                f"--adapter names two adapters '{name}', {found[name]} and {directory}: give each a name of its own, "
                "NAME=DIR."
            )
        same = places.setdefault(os.path.realpath(directory), name)
        if same != name:
            raise UserError(f"--adapter names {directory} twice, as '{same}' and as '{name}': leave one out.")
        found[name] = directory
    return found


def _split(text: str) -> tuple[str, Path]:
    if not text.strip():
        raise UserError("--adapter is empty: give it a value, or leave it out.")
    name, equals, directory = text.partition("=")
    if os.path.isdir(text) or not equals or "/" in name or os.sep in name:
        last = os.path.basename(os.path.abspath(text))  # of "out/" and "." too
        return last or text, Path(text)
    if not name.strip() or not directory.strip():
        raise UserError(f"--adapter {text} is not NAME=DIR: write both, or DIR alone.")
    return name.strip(), Path(os.path.expanduser(directory))  # shells leave a ~ alone after the '='


def base_of(adapter: str | Path) -> str | None:
    """The model that an adapter's own configuration names, if it does."""
    return read_adapter(adapter)[0].base_model_name_or_path or None


def model_of(adapters: Mapping[str, Path], model: str | None = None) -> str:
    """The model to open: `model` where it is given, else the one that the adapters name, else the demo.

    Raises:
        UserError: an adapter cannot be read, or no model is given and the adapters name different ones.
    """
    bases = {name: base for name, directory in adapters.items() if (base := base_of(directory))}
    if model:
        return model
    first = next(iter(bases), None)
    if first is None:
        return "demo"
    for name, base in bases.items():
        if _place(base) != _place(bases[first]):
            raise UserError(
                f"The adapters {first} and {name} name different base models, {bases[first]} and {base}: say with "
                "--model which to use."
            )
    return bases[first]


def _place(model: str) -> str:
    """One text for however a path is spelled; names of models stay as they are."""
    return os.path.realpath(model) if os.path.exists(model) else model


def slots_of(adapters: Mapping[str, str | Path], include_base: bool) -> dict[str, int | None]:
    """Which slot answers under which name, the base (None) first.

    Raises:
        UserError: there is no adapter, or a name is no text or the base's own.
    """
    if not isinstance(adapters, Mapping):
        raise UserError(f"The adapters must be a dict of directories by name, not {adapters!r:.100}.")
    if not adapters:
        raise UserError("There is no adapter to compare: name at least one.")
    for name in adapters:
        if not isinstance(name, str) or not name.strip():
            raise UserError(f"{name!r} cannot name an adapter: give it a name of some text.")
    if include_base and BASE in adapters:
        raise UserError(
            f"An adapter is named '{BASE}', as the model without one is: give it another name, such as "
            f"tuned={adapters[BASE]}."
        )
    slots: dict[str, int | None] = {BASE: None} if include_base else {}
    return slots | {name: slot for slot, name in enumerate(adapters)}


@contextmanager
def on_device(model: LoadedModel, directories: Sequence[str | Path]) -> Iterator[AdapterSet | None]:
    """The adapters on the device, a slot each, for as long as they are used; None where there are none."""
    if not directories:
        yield None
        return
    with claim(model.device, 0, "adapters"):  # which ends when they have gone
        adapters = load_adapters(model.device, model.config, [Path(directory) for directory in directories])
        try:
            yield adapters
        finally:
            release(model.device, adapters.storages())
