"""The firewall of docs/cluster-hosts.md, on hosts that are namespaces."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.cluster.hosts import ROOT, Host, Hosts, namespaces_allowed, until

NFT = shutil.which("nft") or "/usr/sbin/nft"
LISTEN = "import signal, socket; s = socket.create_server(('', 6379)), socket.create_server(('', 7000)); signal.pause()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


@pytest.mark.skipif(not namespaces_allowed() or not Path(NFT).exists(), reason="namespaces and nft are needed")
def test_only_hosts_of_the_cluster_reach_ray(tmp_path: Path) -> None:
    text = (ROOT / "docs/cluster-hosts.md").read_text()
    match = re.search(r"^ *table inet .*?\n  }$", text, re.MULTILINE | re.DOTALL)
    assert match
    rules = tmp_path / "rules.nft"
    with Hosts(3, shared=tmp_path) as hosts:
        head, member, stranger = hosts

        def reaches(host: Host, port: int) -> bool:
            return host.run([sys.executable, "-c", CONNECT, head.address, str(port)], check=False).returncode == 0

        rules.write_text(match[0].replace("10.0.0.1, 10.0.0.2, 10.0.0.3", f"{head.address}, {member.address}"))
        head.start([sys.executable, "-c", LISTEN])
        until(lambda: reaches(stranger, 6379) and reaches(stranger, 7000), 20)
        head.run([NFT, "-f", str(rules)])
        assert reaches(member, 6379)
        assert reaches(head, 6379)
        assert reaches(stranger, 7000)
        assert not reaches(stranger, 6379)
