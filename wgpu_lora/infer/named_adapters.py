"""Named adapters: parsing of --adapter, slots by name, and the model that adapters belong to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.formats.hub import PUBLIC
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.memory_leases import claim
from wgpu_lora.gpu.program import allocate, missing_bytes, release
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec, fix_gains
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.names.spelling import flag

BASE = "base"  # name of the model without an adapter


def named_adapters(texts: Sequence[str], aliases: bool = False) -> dict[str, Path]:
    """Adapter directories by name, in the order of the command line: NAME=DIR, or DIR, named after its last part.

    A text that is an existing directory, or has a separator before its '=', is a DIR.

    Args:
        aliases: whether a directory may have several names.

    Raises:
        UserError: a name or a directory is empty or given twice.
    """
    result: dict[str, Path] = {}
    by_path: dict[str, str] = {}
    for text in texts:
        name, directory = _split(text)
        if name in result:
            raise UserError(
                f"{flag('adapter')} gives two adapters the name '{name}' ({result[name]} and {directory}): give each "
                "its own, NAME=DIR."
            )
        first_name = by_path.setdefault(os.path.realpath(directory), name)
        if first_name != name and not aliases:
            raise UserError(
                f"{flag('adapter')} lists {directory} twice, as '{first_name}' and as '{name}': leave one out."
            )
        result[name] = directory
    return result


def _split(text: str) -> tuple[str, Path]:
    check_directory(text)
    name, equals, directory = text.partition("=")
    if os.path.isdir(text) or not equals or "/" in name or os.sep in name:
        last = os.path.basename(os.path.abspath(text))  # also for "out/" and "."
        return last or text, Path(text)
    if not name.strip() or not directory.strip():
        raise UserError(f"{flag('adapter')} {text} is not NAME=DIR: write both, or DIR alone.")
    return name.strip(), Path(os.path.expanduser(directory))  # shells do not expand ~ after the '='


def base_of(adapter: str | Path) -> str | None:
    """The base model in an adapter's configuration, or a name of our own for it that it was trained by; None if it
    names none."""
    base = read_adapter(adapter)[0].base_model_name_or_path or None
    if base in PUBLIC.values():
        for record in ("run.json", "metadata.json"):
            with suppress(UserError):
                options = read_json(Path(adapter) / record).get("options")
                model = options.get("model") if isinstance(options, dict) else None
                return model if PUBLIC.get(str(model)) == base else base
    return base


def model_of(adapters: Mapping[str, Path], model: str | None = None) -> str:
    """The model to open: `model` if given, else the one that the adapters name, else the demo.

    Raises:
        UserError: an adapter cannot be read, or the adapters name different models and no model is given.
    """
    bases = {name: base for name, directory in adapters.items() if (base := base_of(directory))}
    if model:
        return model
    first = next(iter(bases), None)
    if first is None:
        return "demo"
    for name, base in bases.items():
        if _resolved(base) != _resolved(bases[first]):
            raise UserError(
                f"The adapters {first} and {name} have different base models, {bases[first]} and {base}: choose one "
                f"with {flag('model')}."
            )
    return bases[first]


def _resolved(model: str) -> str:
    """A canonical form of paths, so that spellings compare equal; model ids are unchanged."""
    return os.path.realpath(model) if os.path.exists(model) else model


def slots_of(adapters: Mapping[str, str | Path], include_base: bool) -> dict[str, int | None]:
    """Slots by name, with the base (None) first.

    Raises:
        UserError: there is no adapter, or a name is invalid or the base's.
    """
    if not isinstance(adapters, Mapping):
        raise UserError(f"The adapters must be a dict of directories by name, not {adapters!r:.100}.")
    if not adapters:
        raise UserError("There is no adapter to compare: give at least one.")
    for name, directory in adapters.items():
        if not isinstance(name, str) or not name.strip():
            raise UserError(f"{name!r} is not a name for an adapter: use text that is not empty.")
        check_directory(directory)
    if include_base and BASE in adapters:
        raise UserError(
            f"An adapter is named '{BASE}', which is the model without an adapter: give it another name, such as "
            f"tuned={adapters[BASE]}."
        )
    slots: dict[str, int | None] = {BASE: None} if include_base else {}
    return slots | {name: slot for slot, name in enumerate(adapters)}


def check_directory(adapter: Any) -> None:
    """Raise UserError if an argument is not an adapter's directory: an empty one is not the working directory."""
    if not isinstance(adapter, str | Path):
        raise UserError(f"{flag('adapter')} must be a directory, not {adapter!r:.100}.")
    if not str(adapter).strip():
        raise UserError(f"{flag('adapter')} is empty: give it a value, or leave it out.")


@contextmanager
def adapters_on_device(model: LoadedModel, directories: Sequence[str | Path]) -> Iterator[AdapterSet | None]:
    """The adapters on the device, a slot each, for the duration of the context; None if there are none."""
    if not directories:
        yield None
        return
    with claim(model.device, 0, "adapters"):  # released with them
        adapters = load_adapters(model.device, model.config, [Path(directory) for directory in directories])
        try:
            if adapters.gains:
                model.load_weights()
                fix_gains(model, adapters)
            yield adapters
        finally:
            release(model.device, adapters.storages())


def load_adapters(device: Device, config: ModelConfig, directories: Sequence[Path]) -> AdapterSet:
    """Read adapters and upload them; slot i is the adapter of directories[i].

    Args:
        directories: one or more, each with adapter_config.json and adapter_model.safetensors.

    Raises:
        UserError: an adapter cannot be read, or does not fit the model (with the module and both shapes).
    """
    assert directories, "there is no adapter to load"
    read = [read_adapter_for(config, directory) for directory in directories]
    specs = [SlotSpec.of(adapter, matrices) for adapter, matrices in read]
    adapters = AdapterSet.declare(config, specs, device.max_binding)
    with claim(device, missing_bytes(adapters.storages()), "adapters"):
        allocate(device, adapters.storages())
    adapters.upload_constants(device)
    for slot, (_, matrices) in enumerate(read):
        adapters.write(device, slot, matrices)
    return adapters
