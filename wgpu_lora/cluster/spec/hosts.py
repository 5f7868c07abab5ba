"""The hosts of a cluster, as cluster.toml names them. Their values go into files of Ray's launcher and of SSH."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from wgpu_lora.errors import UserError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
_PROGRAM = re.compile(r"~?[A-Za-z0-9_./+-]{1,255}")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
MOST_LABELS = 32


@dataclass(frozen=True)
class HostSpec:
    """A host that Ray's launcher reaches by SSH. The first of a cluster is its head.

    Attributes:
        host: its name or address for SSH.
        address: of its private interface, by which the others reach it; by default what `host` resolves to.
        user, ssh_key: for SSH; by default what ~/.ssh/config says.
        python: the interpreter in whose environment wgpu-lora is installed there.
        labels: of its node in Ray.
        data: where it has what the others have at `[data] root`.
    """

    host: str
    address: str | None = None
    user: str | None = None
    ssh_key: str | None = None
    python: str = "python3"
    labels: dict[str, str] = field(default_factory=dict)
    data: str | None = None

    def __post_init__(self) -> None:
        if not (_HOST.fullmatch(self.host) or _is_address(self.host)):
            raise UserError(f"'host' must be the name or address of a host, not {self.host!a:.80}.")
        if self.address is not None and not _is_address(self.address):
            raise UserError(
                f"'address' must be the IP address of an interface of {self.host}, such as 10.0.0.2, not "
                f"{self.address!a:.80}."
            )
        check_user(self.user)
        check_key(self.ssh_key)
        check_python(self.python)
        if len(self.labels) > MOST_LABELS:
            raise UserError(f"'labels' has {len(self.labels):,} entries: use at most {MOST_LABELS}.")
        for key, value in self.labels.items():
            if not (_LABEL.fullmatch(key) and _LABEL.fullmatch(value)) or key.startswith("ray.io/"):
                raise UserError(
                    f"'labels' has {key!a:.70} = {value!a:.70}, but both must be up to 63 letters, digits, '.', '_', "
                    "'/' and '-', and names that begin with ray.io/ are Ray's."
                )
        if self.data is not None:
            check_folder("data", self.data)

    @property
    def key(self) -> Path | None:
        """The file of the SSH key."""
        return Path(self.ssh_key).expanduser().absolute() if self.ssh_key else None


def check_user(user: str | None) -> None:
    """Raise UserError unless a text is the name of a user."""
    if user is not None and not _USER.fullmatch(user):
        raise UserError(f"'user' must be the name of a user on the host, not {user!a:.80}.")


def check_key(path: str | None) -> None:
    """Raise UserError unless a text can be the path of a key; whether it exists is for who uses it."""
    if path is not None and (not path.strip() or not path.isprintable() or path.startswith("-") or len(path) > 1024):
        raise UserError(f"'ssh_key' must be the path of a private key on this machine, not {path!a:.80}.")


def check_python(path: str) -> None:
    """Raise UserError unless a text is a program's name or path without anything that a shell would read."""
    if not _PROGRAM.fullmatch(path) or path.startswith("-"):
        raise UserError(
            f"'python' must be the path of an interpreter on the host, without spaces, such as "
            f"~/venv/bin/python, not {path!a:.80}."
        )


def check_folder(name: str, path: str) -> None:
    """Raise UserError unless an option is the absolute path of a folder on the machines of a cluster."""
    plain = path.isprintable() and len(path.encode()) <= 1024
    if not plain or not path.startswith("/") or ".." in path.split("/"):
        raise UserError(f"'{name}' must be the absolute path of a folder, such as /mnt/lab, not {path!a:.80}.")


def _is_address(text: str) -> bool:
    """Whether a text is an IP address that a machine can have."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text and not (found.is_unspecified or found.is_multicast)


def check_apart(hosts: tuple[HostSpec, ...]) -> None:
    """Raise UserError if two entries are the same host."""
    seen: dict[str, int] = {}
    for number, one in enumerate(hosts, 1):
        for name in {one.host.casefold(), *([one.address] if one.address else [])}:
            if name in seen:
                raise UserError(f"hosts {seen[name]} and {number} are both {name}: leave one of them out.")
            seen[name] = number
