"""Masks secrets in what is written about a run: its command, options, notes and errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
SHORTEST = 8  # characters of a value in the environment that is taken for a secret
# Names of options, parameters and variables whose values are secrets. `tokens` and `max_new_tokens` are not.
_WORDS = (
    r"(?:(?:access|auth)?token|secret|[a-z0-9]{0,16}passw(?:or)?d|pwd|passphrase|api[-_]?key|access[-_]?key"
    r"|private[-_]?key|credentials?|auth)"
)
_NAME = rf"(?:[\w.-]*[-_.])?{_WORDS}(?:[-_](?:id|key|value))?"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_VARIABLE = re.compile(r"(?:^|_)(?:TOKEN|SECRET|[A-Z0-9]*PASSW(?:OR)?D|PWD|KEY|CREDENTIALS?|AUTH)(?:_|$)")
_VALUE = r"\"[^\"]*\"|'[^']*'|[^\s&;,\"']+"
_OPTION = re.compile(rf"--?{_NAME}", re.IGNORECASE)
_PATTERNS = (
    (re.compile(r"(?<=://)[^\s/?#]*@"), f"{MASK}@"),  # user and password of a URL
    (
        re.compile(rf"(?<![\w.-])({_NAME}[\"']?\s*[=:]\s*)({_VALUE})", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (re.compile(rf"(?<![\w-])(--?{_NAME}\s+)(?!-)({_VALUE})", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"([?&](?:sig|signature|x-amz-[\w-]+|key|code)=)[^\s&]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"\b((?:bearer|basic)\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"(?<=PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL), MASK),
    # Tokens of well-known services: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, PyPI, wandb, npm, Docker,
    # Groq, Replicate, NVIDIA, Stripe; and JWTs.
    (
        re.compile(
            r"(?<![A-Za-z0-9])(?:hf_\w{8,}|sk-[\w-]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
            r"|xox[abeprs]-[\w-]{8,}|A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,}|pypi-[\w-]{16,}|wandb_v\d_[\w-]{8,}"
            r"|ya29\.[\w-]{8,}|npm_\w{16,}|dckr_pat_[\w-]{8,}|gsk_\w{16,}|r8_\w{16,}|nvapi-[\w-]{8,}"
            r"|[sr]k_(?:live|test)_\w{8,}"
            r"|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
        ),
        MASK,
    ),
)


def masked(value: Any) -> Any:
    """The value with every secret in its texts replaced: lists, tuples and mappings are masked item by item.

    Secrets are values named like one (`--token X`, `password=X`, a key of a mapping), user and password of URLs, tokens
    of well-known services, and values of environment variables named like secrets.
    """
    return _masked(value, _of_environment())


def _masked(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return _text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: MASK if item and isinstance(item, str) and _SECRET_NAME.fullmatch(str(key)) else _masked(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        # In a command, the value of an option is the next item.
        after = [False, *(isinstance(item, str) and bool(_OPTION.fullmatch(item)) for item in value)]
        return [
            MASK if hidden and isinstance(item, str) and not item.startswith("--") else _masked(item, secrets)
            for item, hidden in zip(value, after, strict=False)
        ]
    return value


def _text(text: str, secrets: list[str]) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # arguments may be any bytes
    for secret in secrets:
        text = text.replace(secret, MASK)
    for pattern, by in _PATTERNS:
        text = pattern.sub(by, text)
    return text


def _of_environment() -> list[str]:
    """The longest first, since one may contain another."""
    values = {value for name, value in os.environ.items() if _VARIABLE.search(name.upper()) and len(value) >= SHORTEST}
    # A path or a number is not a secret, and would mask what everything else is about.
    return sorted((value for value in values if not (value.isdigit() or os.path.isabs(value))), key=len, reverse=True)
