"""Chooses the files of a directory to upload to the Hugging Face hub: by known names or patterns, without run state."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.files.locks import is_directory
from wgpu_lora.files.paths import check_name, links_outside
from wgpu_lora.formats.file_digests import TEMPLATE, TOKENIZER
from wgpu_lora.formats.hub import hub_id
from wgpu_lora.formats.model_cards import CARD, card_of_files
from wgpu_lora.formats.peft_adapter import CONFIG, WEIGHTS, read_adapter
from wgpu_lora.formats.safetensors_checkpoint import INDEX, SINGLE, Checkpoint
from wgpu_lora.names.spelling import flag, setting

LICENCES = re.compile(r"(LICEN[CS]E|NOTICE|COPYING)(\.(md|txt))?")
CONFIGURATION = ("config.json", "generation_config.json")
# Files that are only needed for resuming, or that contain paths of this machine, at any depth.
PRIVATE = re.compile(
    r"(run|pipeline|state|manifest|metadata)\.json|(log|skipped_rows)\.jsonl|optimizer\.safetensors|.*\.(tmp|lock|next)"
    r"|checkpoints|best|last|epoch-[0-9]+"
)


@dataclass(frozen=True)
class Upload:
    """An upload.

    files: path in the repository -> (local path, bytes).
    reasons: path in the repository -> why the file is included.
    card: text of a model card, if the directory has none.
    notes: for the user.
    """

    directory: Path
    kind: str
    files: dict[str, tuple[Path, int]]
    reasons: dict[str, str]
    card: str | None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes of all files and the card."""
        return sum(size for _, size in self.files.values()) + len((self.card or "").encode())


def prepare(directory: Path, include: list[str] | None = None, exclude: list[str] | None = None) -> Upload:
    """Chooses the files of a directory to upload.

    Without patterns, these are the files needed to load the model: files with known names, and the shards of an index.
    Patterns match paths in the directory, with `*` for anything including slashes, as in `hf buckets sync`. With
    `include`, only matching files are uploaded; files that match `exclude` never are. Hidden files are never uploaded,
    and run state only if a pattern names it, as `run.json` and `checkpoints/*` do. A model card is created if the
    directory has none.

    Raises:
        UserError: the directory does not exist; it has no readable adapter, model or GGUF file; a link leads out of it;
            or no files are left.
    """
    check_name(directory)
    if not is_directory(directory):
        raise UserError(f"{directory} is not a directory: give the directory of an adapter or of a model.")
    result = _files(directory)
    kind, notes = _kind(directory, result)
    include, exclude = include or [], exclude or []
    roles = _model_facts(directory, kind, result)
    reasons = {name: why for name in result if (why := _reason(name, roles, include, exclude))}
    paths = {name: result[name] for name in reasons}
    for path in paths.values():
        if links_outside(path, directory):
            raise UserError(
                f"{path} is a link to a file outside of {directory}: replace it with a copy, or leave it out with "
                f"{flag('exclude')}."
            )
    if not paths:
        raise UserError(
            f"{flag('include')} and {flag('exclude')} leave no files of {directory} to upload: change the patterns."
        )
    if kind == "adapter" and not {WEIGHTS, CONFIG} <= paths.keys():
        notes.append(f"it cannot be loaded without {WEIGHTS} and {CONFIG}.")
    card = None
    if CARD not in result and _reason(CARD, {CARD: "model card"}, include, exclude):
        weights = {name: path for name, path in paths.items() if path.suffix in (".safetensors", ".gguf")}
        card = card_of_files(directory.resolve().name, kind, weights)
    files = {name: (path, path.stat().st_size) for name, path in paths.items()}
    return Upload(directory, kind, files, reasons, card, tuple(notes))


def merge_uploads(folders: Mapping[str, Upload], roots: Sequence[Upload], card: Path | None = None) -> Upload:
    """Several uploads as one.

    Args:
        folders: uploads by the folder that they become; roots: those whose files stay at the root.
        card: the card at the root.

    Raises:
        UserError: two files would have the same path.
    """
    files: dict[str, tuple[Path, int]] = {}
    reasons: dict[str, str] = {}
    for folder, upload in (*folders.items(), *(("", upload) for upload in roots)):
        for name, result in upload.files.items():
            target = f"{folder}/{name}" if folder else name
            if name == CARD and not folder:
                continue  # its place is the card's
            if target in files:
                raise UserError(f"{files[target][0]} and {result[0]} would both be {target}: rename one of them.")
            files[target], reasons[target] = result, upload.reasons[name]
    if card:
        files[CARD], reasons[CARD] = (card, card.stat().st_size), "model card"
    notes = tuple(f"{folder}: {note}" for folder, upload in folders.items() for note in upload.notes)
    return Upload(Path(), "adapters and GGUF files", files, reasons, None, notes)


def _files(directory: Path) -> dict[str, Path]:
    """Files by their path in the directory, in order, without hidden ones."""
    result = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            result[name.as_posix()] = path
    return result


def _kind(directory: Path, files: dict[str, Path]) -> tuple[str, list[str]]:
    """Returns ('adapter', 'model' or 'GGUF', notes), after checking that it can be read."""
    if WEIGHTS in files or CONFIG in files:
        base = read_adapter(directory)[0].base_model_name_or_path
        if base and hub_id(base):
            return "adapter", []
        return "adapter", [f"{CONFIG} names the base {base!r}, which others cannot resolve: replace it with a hub id."]
    if SINGLE in files or INDEX in files:
        Checkpoint(directory)
        return "model", []
    if any(name.endswith(".gguf") and "/" not in name for name in files):
        return "GGUF", []
    raise UserError(
        f"{directory} holds no adapter ({WEIGHTS}), no model ({SINGLE}) and no GGUF file: give one that does."
    )


def _model_facts(directory: Path, kind: str, files: dict[str, Path]) -> dict[str, str]:
    """Names of the files needed to load the model -> why they are included."""
    if kind == "adapter":
        roles = {WEIGHTS: "adapter's weights", CONFIG: "adapter's configuration"}
    elif kind == "model":
        roles = dict.fromkeys(CONFIGURATION, "configuration")
        shards = Checkpoint(directory).shards
        single = shards == [directory / SINGLE]
        roles |= dict.fromkeys((path.name for path in shards), "weights" if single else f"shard that {INDEX} names")
        roles |= {} if single else {INDEX: "index of the shards"}
    else:
        roles = {name: "GGUF file" for name in files if name.endswith(".gguf") and "/" not in name}
    for name in files:
        if TOKENIZER.fullmatch(name):
            roles[name] = "tokenizer"
        elif TEMPLATE.fullmatch(name):
            roles[name] = "chat template"
        elif LICENCES.fullmatch(name):
            roles[name] = "licence"
    return roles | {CARD: "model card"}


def _reason(name: str, roles: dict[str, str], include: list[str], exclude: list[str]) -> str | None:
    """Why a file is included, or None."""
    if any(fnmatch(name, pattern) for pattern in exclude):
        return None
    if not include:
        return roles.get(name)
    matching = [pattern for pattern in include if fnmatch(name, pattern)]
    private = next((part for part in name.split("/") if PRIVATE.fullmatch(part)), None)
    if private:
        matching = [pattern for pattern in matching if private in pattern.split("/")]
    return setting("include", matching[0]) if matching else None


def push(upload: Upload, repo: str, private: bool = True) -> str:
    """Uploads the files in one commit, creating the repository if necessary; returns the commit's URL.

    Args:
        repo: 'owner/name', or 'name' for the token's owner.
        private: whether a new repository is private.

    Raises:
        UserError: HF_HUB_OFFLINE is set, the hub cannot be reached, or it refuses. Nothing has been changed then,
            except that the repository may have been created.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if constants.is_offline_mode():
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing is uploaded: unset it, or only list the files with "
            f"{setting('dry_run', True)}."
        )
    token = get_token()
    if not token:
        raise UserError("No Hugging Face token was found: log in with `hf auth login`, or set HF_TOKEN.")
    if not (token.isascii() and token.isprintable()):
        raise UserError("The Hugging Face token has invalid characters: log in again with `hf auth login`.")
    api = HfApi(library_name="wgpu-lora")
    content: dict[str, str | bytes] = {name: str(path) for name, (path, _) in upload.files.items()}
    if upload.card:
        content[CARD] = upload.card.encode()
    operations = [CommitOperationAdd(name, source) for name, source in content.items()]
    try:
        result = api.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = api.create_commit(result, operations, commit_message=f"Upload {upload.kind} with wgpu-lora")
    except HfHubHTTPError as error:
        raise UserError(_refusal(repo, error)) from None
    except Exception as error:
        if isinstance(error, OSError) or _of_transport(error):
            raise UserError(
                f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}): check the network."
            ) from None
        text = f"{constants.ENDPOINT} sent an unexpected response ({type(error).__name__}: {_first_line(error)})"
        raise UserError(f"{text}: check the repository, and try again.") from error
    return str(commit.commit_url)


def check_repo_name(repo: str) -> None:
    """Raises UserError unless `repo` is a valid name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"{repo!r} is not a valid name of a repository: give OWNER/NAME.") from None


def _of_transport(error: Exception) -> bool:
    """Whether an error is from the HTTP library, which depends on the version of huggingface_hub."""
    return any(kind.__module__.partition(".")[0] in ("httpx", "httpx2", "requests") for kind in type(error).__mro__)


def _refusal(repo: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return f"Hugging Face does not accept this token for {repo}: log in again with `hf auth login`."
    if status == 403:
        return f"This token may not write to {repo}: use a token with write access, or a repository of your own."
    if status == 404:
        return f"The owner of {repo} does not exist, or is hidden from this token: check the spelling of OWNER/NAME."
    return f"Hugging Face refuses {repo} ({_first_line(error)}): try again later."


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
