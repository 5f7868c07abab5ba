"""Uploads chosen files (see upload.py) to the Hugging Face hub in one commit, and explains failures."""

from __future__ import annotations

from wgpu_lora.errors import UserError
from wgpu_lora.formats.cards import CARD
from wgpu_lora.formats.upload import Upload
from wgpu_lora.names.naming import setting


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
        made = api.create_repo(repo, private=private, exist_ok=True).repo_id
        commit = api.create_commit(made, operations, commit_message=f"Upload {upload.kind} with wgpu-lora")
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


def check_name(repo: str) -> None:
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
