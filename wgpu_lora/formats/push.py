"""Sending an adapter, a model or a GGUF file to the Hugging Face hub: which files go, and one commit of them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import leads_out
from wgpu_lora.formats.cards import CARD, card_of_files
from wgpu_lora.formats.checkpoint import INDEX, SINGLE, Checkpoint
from wgpu_lora.formats.hub import hub_id
from wgpu_lora.formats.peft import CONFIG, WEIGHTS, read_adapter

# Left out unless asked for: what only resuming needs, and what names paths of this machine.
PRIVATE = ("run.json", "pipeline.json", "state.json", "log.jsonl", "checkpoints/*", "best/*", "last/*", "epoch-*/*",
           "*.tmp", "*.lock", "*.next/*")  # fmt: skip


@dataclass(frozen=True)
class Upload:
    """What is to be sent. files: path in the repository -> (path here, bytes). card: text where none lies there.

    note: what whoever sends it should know, empty where there is nothing.
    """

    directory: Path
    kind: str
    files: dict[str, tuple[Path, int]]
    card: str | None
    note: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all files, and of the card."""
        return sum(size for _, size in self.files.values()) + len((self.card or "").encode())


def prepare(directory: Path, include: list[str] | None = None, exclude: list[str] | None = None) -> Upload:
    """Reads a directory that is to be sent, and chooses its files.

    The patterns are those of `hf buckets sync`: of a path in the directory, `*` for anything (slashes too). What
    `exclude` matches stays; where there are `include` patterns, only what they match goes. Hidden files stay always,
    a run's own state unless it is included by name. A model card is made where there is none.

    Raises:
        UserError: there is no such directory; it holds neither an adapter, nor a model, nor a GGUF file that can be
            read; a link leads out of it; or nothing is left to send.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the directory of an adapter or of a model.")
    found = _files(directory)
    kind, note = _kind(directory, found)
    chosen = {name: path for name, path in found.items() if _goes(name, include or [], exclude or [])}
    if not chosen:
        raise UserError(f"--include and --exclude leave nothing of {directory} to send: change the patterns.")
    wanted = CARD not in found and _goes(CARD, include or [], exclude or [])
    weights = {name: path for name, path in chosen.items() if path.suffix in (".safetensors", ".gguf")}
    card = card_of_files(directory.resolve().name, kind, weights)
    files = {name: (path, path.stat().st_size) for name, path in chosen.items()}
    return Upload(directory, kind, files, card if wanted else None, note)


def push(upload: Upload, repo: str, private: bool = False) -> str:
    """Sends the files in one commit, making the repository where there is none; returns the commit's address.

    Args:
        repo: 'owner/name', or 'name' for one's own. private: of a repository that is made.

    Raises:
        UserError: the hub is switched off, cannot be reached, or refuses; nothing is then changed but that the
            repository may have been made.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if constants.is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so nothing is sent: unset it, or see with --dry-run what would go.")
    if not get_token():
        raise UserError("No Hugging Face token is here: log in with `hf auth login`, or set HF_TOKEN.")
    api = HfApi(library_name="wgpu-lora")
    content: dict[str, str | bytes] = {name: str(path) for name, (path, _) in upload.files.items()}
    if upload.card:
        content[CARD] = upload.card.encode()
    operations = [CommitOperationAdd(name, source) for name, source in content.items()]
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        commit = api.create_commit(made, operations, commit_message=f"Upload {upload.kind} with wgpu-lora")
    except HfHubHTTPError as error:
        raise UserError(_refusal(repo, error)) from None
    except Exception as error:
        if not isinstance(error, OSError) and not _of_transport(error):
            raise
        raise UserError(f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}): check the network.") from None
    return str(commit.commit_url)


def check_name(repo: str) -> None:
    """UserError unless `repo` can be the name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"{repo!r} cannot be a repository's name: give OWNER/NAME.") from None


def _files(directory: Path) -> dict[str, Path]:
    """Regular files by their path in the directory, in order; hidden ones are left out."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if leads_out(path, directory):
            raise UserError(
                f"{path} is a link to a file outside of {directory}: put a copy in its place, or remove it."
            )
        found[name.as_posix()] = path
    return found


def _kind(directory: Path, found: dict[str, Path]) -> tuple[str, str]:
    """('adapter', 'model' or 'GGUF', a note), once it is certain that it can be read."""
    if WEIGHTS in found or CONFIG in found:
        base = read_adapter(directory)[0].base_model_name_or_path
        if base and hub_id(base):
            return "adapter", ""
        return "adapter", f"{CONFIG} names the base {base!r}, which others do not find: put its hub id there."
    if SINGLE in found or INDEX in found:
        Checkpoint(directory)
        return "model", ""
    if any(name.endswith(".gguf") for name in found):
        return "GGUF", ""
    raise UserError(
        f"{directory} holds no adapter ({WEIGHTS}), no model ({SINGLE}) and no GGUF file: give one that does."
    )


def _goes(name: str, include: list[str], exclude: list[str]) -> bool:
    if any(fnmatch(name, pattern) for pattern in exclude):
        return False
    if include:
        return any(fnmatch(name, pattern) for pattern in include)
    return not any(fnmatch(name, pattern) for pattern in PRIVATE)


def _of_transport(error: Exception) -> bool:
    """Whether it is the HTTP library's: which one speaks to the hub differs by huggingface_hub's version."""
    return any(kind.__module__.partition(".")[0] in ("httpx", "httpx2", "requests") for kind in type(error).__mro__)


def _refusal(repo: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"Hugging Face does not take this token for {repo}: log in again with `hf auth login`."
    if status == 403:
        return f"This token may not write to {repo}: use a token with write access, or a repository of your own."
    if status == 404:
        return f"There is no owner for {repo}, or this token does not see it: check the spelling of OWNER/NAME."
    return f"Hugging Face refuses {repo} ({_first_line(error)}): try again later."


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
