"""Sending what was chosen (upload.py) to the Hugging Face hub in one commit, and why that may not go."""

from __future__ import annotations

from wgpu_lora.errors import UserError
from wgpu_lora.formats.cards import CARD
from wgpu_lora.formats.upload import Upload


def push(upload: Upload, repo: str, private: bool = True) -> str:
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
    token = get_token()
    if not token:
        raise UserError("No Hugging Face token is here: log in with `hf auth login`, or set HF_TOKEN.")
    if not (token.isascii() and token.isprintable()):
        raise UserError("The Hugging Face token has characters that no token has: log in again with `hf auth login`.")
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
        text = f"{constants.ENDPOINT} answered something unexpected ({type(error).__name__}: {_first_line(error)})"
        raise UserError(f"{text}: look at the repository, and try again.") from error
    return str(commit.commit_url)


def check_name(repo: str) -> None:
    """UserError unless `repo` can be the name of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"{repo!r} cannot be a repository's name: give OWNER/NAME.") from None


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
