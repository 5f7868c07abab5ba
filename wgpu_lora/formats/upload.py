"""What of a directory goes to the Hugging Face hub: by its kind, by patterns, and never what is this machine's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from wgpu_lora.bounded import leads_out
from wgpu_lora.errors import UserError
from wgpu_lora.formats.cards import CARD, card_of_files
from wgpu_lora.formats.checkpoint import INDEX, SINGLE, Checkpoint
from wgpu_lora.formats.hub import hub_id
from wgpu_lora.formats.peft import CONFIG, WEIGHTS, read_adapter

TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "additional_chat_templates/*",
)
ALWAYS = (CARD, "LICENSE*", "NOTICE*")
# What goes where no pattern is given; names without a slash are those of the directory itself.
USUAL = {
    "adapter": (*ALWAYS, WEIGHTS, CONFIG, *TOKENIZER),
    "model": (*ALWAYS, "*.safetensors", "*.json", *TOKENIZER),
    "GGUF": (*ALWAYS, "*.gguf"),
}
# What only resuming needs, and what names paths of this machine: at any depth, and only for a pattern that names it.
PRIVATE = re.compile(
    r"(.*/)?(run|pipeline|state)\.json|(.*/)?log\.jsonl|.*\.(tmp|lock)"
    r"|(.*/)?(checkpoints|best|last|epoch-\d+|[^/]*\.next)/.*|(.*/)?optimizer\.safetensors"
)


@dataclass(frozen=True)
class Upload:
    """What is to be sent. files: path in the repository -> (path here, bytes). card: text where none lies there.

    notes: what whoever sends it should know.
    """

    directory: Path
    kind: str
    files: dict[str, tuple[Path, int]]
    card: str | None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files, and of the card."""
        return sum(size for _, size in self.files.values()) + len((self.card or "").encode())


def prepare(directory: Path, include: list[str] | None = None, exclude: list[str] | None = None) -> Upload:
    """Reads a directory that is to be sent, and chooses its files.

    Without patterns, what is usual for its kind. The patterns are those of `hf buckets sync`: of a path in the
    directory, `*` for anything (slashes too). What `exclude` matches stays; where there are `include` patterns, only
    what they match goes. Hidden files stay always, a run's own state unless a pattern that does not begin with `*`
    names it. A model card is made where there is none.

    Raises:
        UserError: there is no such directory; it holds neither an adapter, nor a model, nor a GGUF file that can be
            read; a link leads out of it; or nothing is left to send.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the directory of an adapter or of a model.")
    found = _files(directory)
    kind, notes = _kind(directory, found)
    chosen = {name: path for name, path in found.items() if _goes(name, kind, include or [], exclude or [])}
    for path in chosen.values():
        if leads_out(path, directory):
            raise UserError(
                f"{path} is a link to a file outside of {directory}: put a copy in its place, or --exclude it."
            )
    if not chosen:
        raise UserError(f"--include and --exclude leave nothing of {directory} to send: change the patterns.")
    if kind == "adapter" and not {WEIGHTS, CONFIG} <= chosen.keys():
        notes.append(f"nobody can load it without {WEIGHTS} and {CONFIG}.")
    card = None
    if CARD not in found and _goes(CARD, kind, include or [], exclude or []):
        weights = {name: path for name, path in chosen.items() if path.suffix in (".safetensors", ".gguf")}
        card = card_of_files(directory.resolve().name, kind, weights)
    files = {name: (path, path.stat().st_size) for name, path in chosen.items()}
    return Upload(directory, kind, files, card, tuple(notes))


def _files(directory: Path) -> dict[str, Path]:
    """Files by their path in the directory, in order; hidden ones are left out."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = path
    return found


def _kind(directory: Path, found: dict[str, Path]) -> tuple[str, list[str]]:
    """('adapter', 'model' or 'GGUF', notes), once it is certain that it can be read."""
    if WEIGHTS in found or CONFIG in found:
        base = read_adapter(directory)[0].base_model_name_or_path
        if base and hub_id(base):
            return "adapter", []
        return "adapter", [f"{CONFIG} names the base {base!r}, which others do not find: put its hub id there."]
    if SINGLE in found or INDEX in found:
        Checkpoint(directory)
        return "model", []
    if any(name.endswith(".gguf") and "/" not in name for name in found):
        return "GGUF", []
    raise UserError(
        f"{directory} holds no adapter ({WEIGHTS}), no model ({SINGLE}) and no GGUF file: give one that does."
    )


def _goes(name: str, kind: str, include: list[str], exclude: list[str]) -> bool:
    if any(fnmatch(name, pattern) for pattern in exclude):
        return False
    if include:
        matching = [pattern for pattern in include if fnmatch(name, pattern)]
        return bool([p for p in matching if not p.startswith("*")] if PRIVATE.fullmatch(name) else matching)
    usual = any(fnmatch(name, pattern) and ("/" in pattern or "/" not in name) for pattern in USUAL[kind])
    return usual and not PRIVATE.fullmatch(name)
