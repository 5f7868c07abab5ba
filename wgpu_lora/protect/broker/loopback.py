"""Which addresses stay on this machine."""

from __future__ import annotations

import socket
from ipaddress import ip_address

from wgpu_lora.errors import UserError


def is_loopback(address: str) -> bool:
    """Whether an IP address stays on this machine."""
    return ip_address(address.partition("%")[0]).is_loopback


def resolve(host: str, where: str) -> list[str]:
    """All IP addresses of a host name. Raises UserError, which starts with `where`, if there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{where} cannot be resolved ({error}): check the name.") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
