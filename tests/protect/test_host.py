from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from support.rows.tokenizers import document

from wgpu_lora.formats.tokenizer.tokenizer_process import TokenizerProcess
from wgpu_lora.protect import memory_protection
from wgpu_lora.protect.memory_protection import HostProtection, harden
from wgpu_lora.protect.sealed import keys

BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def hardened() -> Iterator[HostProtection]:
    protection = harden()
    yield protection
    protection.restore()


def limits(pid: int | str = "self") -> str:
    return Path(f"/proc/{pid}/limits").read_text().split("Max core file size")[1].split()[0]


def locked_kilobytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmLck:")[1].split()[0])


def state() -> tuple[Any, ...]:
    """What `harden` changes."""
    limits = (resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK))
    return (
        *limits,
        locked_kilobytes() > 1000,
        memory_protection.system_library().prctl(memory_protection.PR_GET_DUMPABLE, 0, 0, 0, 0),
    )


def test_core_dumps_are_off_and_can_be_turned_on_again() -> None:
    memory_protection.system_library().munlockall()  # commands that other tests ran here protect their process
    before = state()
    protection = harden()
    try:
        facts = protection.facts["core_dumps"]
        assert facts["off"]
        assert not facts["dumpable"]
        assert facts["limit_bytes"] == resource.getrlimit(resource.RLIMIT_CORE)[0] <= 1
        assert resource.getrlimit(resource.RLIMIT_CORE)[1] == before[0][1]
    finally:
        protection.restore()
        protection.restore()
    assert state() == before


CRASH = "import os; os.abort()"
HARDENED = f"""
import subprocess, sys
from wgpu_lora.protect.memory_protection import harden
harden()
subprocess.run([sys.executable, "-c", {CRASH!r}])
{CRASH}
"""


def test_a_crash_leaves_no_core_dump_of_the_process_or_its_children(tmp_path: Path) -> None:
    def run(code: str) -> list[str]:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        allowed = lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))  # noqa: E731
        ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, preexec_fn=allowed, capture_output=True)
        assert ended.returncode == -6, ended.stderr
        return [path.name for path in tmp_path.iterdir()]

    assert run(HARDENED) == []
    if not run(CRASH):
        pytest.skip("this system leaves no core dumps in the working directory")


def test_the_tokenizers_process_leaves_no_core_dump(hardened: HostProtection) -> None:
    process = TokenizerProcess(json.dumps(document("gpt2")))._child
    assert process is not None
    try:
        assert limits(process.popen.pid) == ("1" if hardened.facts["core_dumps"]["limit_bytes"] else "0")
    finally:
        process.end()


def test_what_is_locked_is_said(hardened: HostProtection) -> None:
    facts = hardened.facts["memory"]
    if facts["locked"] == "all":
        assert locked_kilobytes() > 0
    else:
        assert "RLIMIT_MEMLOCK" in facts["why"] or "mlockall" in facts["why"]
    assert any("kernel" in text for text in hardened.facts["not_protected"])
    unlocked = any("swapped out" in text and "rows" in text for text in hardened.facts["not_protected"])
    assert unlocked == (facts["locked"] != "all" and hardened.facts["swap"] != [])


@pytest.mark.parametrize("capable", [True, False])
@pytest.mark.parametrize("unlimited", [True, False])
@pytest.mark.parametrize("refused", [True, False])
def test_all_memory_is_locked_only_where_later_allocations_cannot_fail(
    monkeypatch: pytest.MonkeyPatch, capable: bool, unlimited: bool, refused: bool
) -> None:
    calls = []

    class System:
        def mlockall(self, flags: int) -> int:
            calls.append(flags)
            return -1 if refused else 0

        def munlockall(self) -> None:
            calls.append("undone")

    limit = resource.RLIM_INFINITY if unlimited else 8 << 20
    monkeypatch.setattr(memory_protection, "system_library", System)
    monkeypatch.setattr(memory_protection, "_may_lock", lambda: capable)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    protection = HostProtection({})
    facts = memory_protection._lock_memory(protection)
    tried = capable or unlimited
    assert calls == ([7] if tried else [])
    assert facts["locked"] == ("all" if tried and not refused else "data keys")
    assert ("why" in facts) == (facts["locked"] == "data keys")
    protection.restore()
    assert ("undone" in calls) == (facts["locked"] == "all")


def test_swap_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Filename\t\tType\t\tSize\tUsed\tPriority\n/dev/sda2  partition\t1\t0\t-2\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert memory_protection.swap_devices() == ["/dev/sda2"]
    windows = {"core_dumps": {"off": False}, "memory": {"locked": "data keys", "why": "no way"}, "swap": None}
    assert any("whether there is swap is not known" in text for text in memory_protection._not_protected(windows))


CHILD = """
from wgpu_lora.protect.sealed.keys import SessionKeys
keys = SessionKeys.generate()
number = keys.signing.key.private_numbers().private_value
masked = bytes(byte ^ 0x55 for byte in number.to_bytes(32, "big"))
print(id(keys.data.identity()), keys.data.recipient, masked.hex(), flush=True)
input()
keys.wipe()
print("wiped", flush=True)
input()
"""


@pytest.mark.skipif(sys.byteorder != "little", reason="looks for words with the lowest byte first")
def test_wiped_keys_are_nowhere_in_the_memory_of_the_process() -> None:
    """Read from outside, because whoever looks for a key has it."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        address, recipient, masked = child.stdout.readline().split()
        with Path(f"/proc/{child.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(int(address) + 16)  # after the object's reference count and type
            secret = memory.read(32)
        public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
        digits = "".join(f"{BECH32.index(letter):05b}" for letter in recipient.removeprefix("age1"))
        assert int(digits[:256], 2).to_bytes(32, "big") == public  # so these bytes are the key
        # OpenSSL has numbers in words with the lowest first; what the child did to print its key has the highest first.
        signing = bytes(byte ^ 0x55 for byte in bytes.fromhex(masked))[::-1]
        assert (count_in_memory(child.pid, secret), count_in_memory(child.pid, signing)) == (1, 1)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "wiped\n"
        assert (count_in_memory(child.pid, secret), count_in_memory(child.pid, signing)) == (0, 0)
    finally:
        child.kill()
        child.communicate()


def count_in_memory(pid: int, secret: bytes) -> int:
    """How many times bytes are in the memory of a process."""
    count = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            if not rights.startswith("r") or "[v" in line:
                continue
            start, stop = (int(part, 16) for part in span.split("-"))
            memory.seek(start)
            with suppress(OSError):  # of a device
                count += memory.read(stop - start).count(secret)
    return count


def test_where_nothing_can_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys.DataKey.generate().locked
    monkeypatch.setattr(keys, "lock_pages", lambda address, size: False)
    assert not keys.DataKey.generate().locked
