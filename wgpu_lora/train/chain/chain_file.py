"""A chain's TOML file: options of all stages, and a [[stage]] table for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_toml
from wgpu_lora.files.typed_json import Text, read_as
from wgpu_lora.names.spelling import IN_FILE, naming
from wgpu_lora.names.text import join_words
from wgpu_lora.train.chain.stage import Stage
from wgpu_lora.train.chain.stages import STAGES
from wgpu_lora.train.resolve_options import find_recipe

_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,40}")
_REFERENCE = re.compile(r"\{([^{}]*)\}")
MOST = 100  # stages


@dataclass(frozen=True)
class ChainFile:
    """The keys of a chain's file. output: its directory, by default the file's name. model: of all stages."""

    stage: list[dict[str, Any]]
    output: Text | None = None
    model: Text | None = None


@dataclass(frozen=True)
class ChainStage:
    """A stage in its chain. output: its directory; needs: earlier stages that its options name."""

    name: str
    kind: str
    stage: Stage
    output: Path
    needs: frozenset[str]


@dataclass(frozen=True)
class Chain:
    """output: the directory with those of all stages, and the chain's state."""

    path: Path
    output: Path
    links: tuple[ChainStage, ...]


def read_chain(name: str, output: str | None = None, device: str | None = None, model: str | None = None) -> Chain:
    """Read and check a chain: a file, or the name of a bundled one.

    Args:
        output, model: instead of the file's. device: of the stages that use one.

    Raises:
        UserError: the file cannot be read, or a stage or an option is not known or invalid.
    """
    path = find_recipe(name)
    if not path.exists():
        raise UserError(f"The chain {name} does not exist: give a TOML file, or the name of a bundled one (persona).")
    values = read_toml(path, "The chain")
    where = f"The chain {path}"
    if not values.get("stage"):
        raise UserError(f"{where} has no [[stage]] table: add one for each stage, or train with finetune --recipe.")
    file = read_as(ChainFile, values, where)
    if len(file.stage) > MOST:
        raise UserError(f"{where} has {len(file.stage):,} stages: use at most {MOST}.")
    directory, shared = Path(output or file.output or path.stem), {"model": model or file.model, "device": device}
    result: dict[str, ChainStage] = {}
    with naming(IN_FILE):
        for number, table in enumerate(file.stage, 1):
            link = _link(f"{where}, stage {number}", table, directory, result, shared)
            result[link.name] = link
    return Chain(path, directory, tuple(result.values()))


def _link(
    where: str,
    table: Mapping[str, Any],
    output: Path,
    before: Mapping[str, ChainStage],
    shared: Mapping[str, str | None],
) -> ChainStage:
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in STAGES:
        raise UserError(f"{where}: 'kind' is {kind!r:.60}, but must be one of {join_words([*STAGES])}.")
    name = table.get("name", kind)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{where}: 'name' is {name!r:.60}, but must be letters, digits, '-' and '_'.")
    if name.casefold() in map(str.casefold, before):  # some file systems do not tell them apart
        raise UserError(f"{where} has the name '{name}', like an earlier one: give each stage its own 'name'.")
    needs: set[str] = set()

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in before:
            earlier = f"choose of {join_words([*before])}" if before else "it is the first"
            raise UserError(f"{where} ('{name}') names {{{match[1]:.40}}}, which is no earlier stage: {earlier}.")
        needs.add(match[1])
        return str(before[match[1]].output)

    values = {key: _filled(value, replaced) for key, value in table.items() if key not in ("kind", "name")}
    kind_of = STAGES[kind]
    usable = set(kind_of.option_names())
    values = {key: value for key, value in shared.items() if value is not None and key in usable} | values
    stage = kind_of.of(values, f"{where} ('{name}')")
    return ChainStage(name, kind, stage, output / name, frozenset(needs))


def _filled(value: Any, replaced: Any) -> Any:
    """A value with the names of stages in braces replaced by their directories."""
    if isinstance(value, str):
        return _REFERENCE.sub(replaced, value)
    if isinstance(value, list):
        return [_filled(item, replaced) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, replaced) for key, item in value.items()}
    return value


def stages_from(links: tuple[ChainStage, ...], name: str) -> Iterator[str]:
    """The names from a stage on. Raises UserError if there is no such stage."""
    names = [link.name for link in links]
    if name not in names:
        raise UserError(f"The chain has no stage '{name:.60}': choose of {join_words(names)}.")
    yield from names[names.index(name) :]
