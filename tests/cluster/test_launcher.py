"""What `cluster up`, `down` and the tunnel do on this machine: `ssh` is a script."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.cluster.fake_ssh import FakeSsh, cluster_file, good
from support.cluster.hosts import until

from wgpu_lora.cluster.cluster_file import HostSpec
from wgpu_lora.cluster.launch.launcher import down, last_object, start_options, up
from wgpu_lora.cluster.launch.ssh import refusal, ssh, tunnel
from wgpu_lora.errors import UserError

ONE, TWO = 'host = "one"\naddress = "10.9.0.1"', 'host = "two"\naddress = "10.9.0.2"'
TOKEN = "f" * 64


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path, monkeypatch)


# -- checks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "meaning"),
    [
        ("Host key verification failed.", "run 'ssh -i '/a key' me@one' once"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R me@one"),
        ("me@one: Permission denied (publickey).", "does not let this user in"),
        ("Permissions 0644 for 'k' are too open.\n@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\nx", "chmod 600"),
        ("ssh: connect to host one port 22: Connection timed out", "(ssh: connect to host one port 22: Connection"),
        ("", "(without a word)"),
    ],
)
def test_what_ssh_says_becomes_a_sentence(message: str, meaning: str) -> None:
    sentence = refusal(HostSpec("one", user="me", ssh_key="/a key"), message)
    assert sentence.startswith("one ")
    assert meaning in sentence
    assert "\n" not in sentence


def test_ssh_checks_host_keys_and_asks_nothing() -> None:
    argv = ssh(HostSpec("one", user="me", ssh_key="/100% a key"))
    assert {"-oStrictHostKeyChecking=yes", "-oBatchMode=yes"} <= set(argv)
    assert not any("UserKnownHostsFile" in word for word in argv)
    assert argv[argv.index("-i") + 1] == "/100%% a key"
    assert argv[-4:] == ["-l", "me", "--", "one"]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ([], "no [[host]]"),
        ([ONE, 'host = "ONE"\naddress = "10.9.0.2"'], "are the same host, one"),
        ([ONE, 'host = "two"\naddress = "10.9.0.1"'], "are the same host, 10.9.0.1"),
        ([ONE, 'host = "localhost"'], "by which no other host reaches it"),
        ([ONE, 'host = "no-such-host.invalid"'], "give its 'address'"),
    ],
)
def test_a_file_that_cannot_work_is_refused_before_any_host_is_asked(
    fake: FakeSsh, tmp_path: Path, hosts: list[str], says: str
) -> None:
    for command in (up, down):
        if command is up or not hosts:
            with pytest.raises(UserError) as refused:
                command(cluster_file(tmp_path, *hosts), Lines())
            assert says in str(refused.value)
    assert not fake.arguments


def test_without_ssh(fake: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in (up, down):
        with pytest.raises(UserError, match=r"ssh cannot be run .*install OpenSSH"):
            command(cluster_file(tmp_path, ONE), Lines())
    with pytest.raises(UserError, match="ssh cannot be run"), tunnel(cluster_file(tmp_path, ONE)):
        pass


def test_each_host_that_cannot_be_used_has_a_line(fake: FakeSsh, tmp_path: Path) -> None:
    wrong = {
        "a": ({'err': "ssh: connect to host a port 22: Connection refused\n", 'code': 255}, "Connection refused"),
        "b": ({'err': "sh: 1: python9: not found\n", 'code': 127}, "cannot be run there"),
        "c": ({'err': "python3: Error while finding module specification for 'wgpu_lora.cluster.launch.node_commands' "
                       "(ModuleNotFoundError: No module named 'wgpu_lora')", 'code': 1}, "has no wgpu-lora"),
        "d": ({'err': "Unknown option: -P\nusage: python", 'code': 2}, "older than Python 3.11"),
        "e": ({'out': good("10.9.0.5", python="3.99.1")}, "Python is 3.99.1"),
        "f": ({'out': good("10.1.1.1")}, "no interface with the address 10.9.0.6 (it has 10.1.1.1)"),
        "g": ({'err': "No module named wgpu_lora.cluster.launch.node_commands", 'code': 1}, "another version"),
        "h": ({'out': {"versions": 3}}, "another version"),
        "i": ({'out': {"refused": "i: no."}}, "i: no."),
        "j": ({'err': "Traceback:\nOSError: disk full\n", 'code': 1}, "fails there (OSError: disk full)"),
        "k": ({'out': "hello\n" + json.dumps(good("10.9.0.11")) + "\nbye"}, None),
    }  # fmt: skip
    for name, (replies, _) in wrong.items():
        fake.answers(name, **replies)  # type: ignore[arg-type]
    hosts = [f'host = "{name}"\naddress = "10.9.0.{number}"' for number, name in enumerate(wrong, 1)]
    with pytest.raises(UserError) as refused:
        up(cluster_file(tmp_path, *hosts), Lines())
    lines = refused.value.lines
    assert lines[0] == "10 hosts cannot be used:"
    messages = [(name, text) for name, (_, text) in wrong.items() if text]
    for line, (name, text) in zip(lines[1:], messages, strict=True):
        assert line.startswith(name)
        assert text in line
    assert not fake.commands


def test_the_answer_is_found_among_other_lines() -> None:
    assert last_object('Welcome\n{"a": 1}\n{not json\n[1]\n') == {"a": 1}
    assert last_object("Welcome") is None


# -- up and down -------------------------------------------------------------------------------------------------------


class Lines(list[str]):
    def __call__(self, label: str, text: str, whole: bool = False) -> None:
        self.append(f"{label} {text}")


def all_good(fake: FakeSsh, **running: str | None) -> None:
    for number, name in ((1, "one"), (2, "two")):
        listening = [{"process": "gcs_server", "address": "*", "port": 6379}]
        fake.answers(f"{name}.check", good(f"10.9.0.{number}", running.get(name)))
        fake.answers(f"{name}.ports", {"listening": listening, "public": ["203.0.113.9"][: number - 1]})
        fake.answers(name, "{}")


def test_up_starts_the_head_first_and_says_what_the_internet_may_reach(fake: FakeSsh, tmp_path: Path) -> None:
    all_good(fake)
    lines = Lines()
    key = tmp_path / "it's 100% a key; $(x)"
    key.write_text("secret")
    data = '[data]\nroot = "/mnt/lab"\n'
    tables = f'{ONE}\nlabels = {{ rack = "a.b" }}', f'{TWO}\npython = "~/v/bin/python"\ndata = "/d"'
    up(cluster_file(tmp_path, *tables, top=f'ssh_key = "{key}"\nport = 7000\n{data}'), lines)
    assert fake.commands == ["start one", "start two"]
    assert "~/v/bin/python -P -m wgpu_lora.cluster.launch.node_commands start" in fake.arguments
    first, two = fake.sent("one", "start"), fake.sent("two", "start")
    assert first["token"] == two["token"]
    assert len(first["token"]) == 64
    assert first["id"] == two["id"]
    assert (first["head"], two["head"]) == (None, ["10.9.0.1", 7000])
    assert (first["paths"], two["paths"]) == ({}, {"/mnt/lab": "/d"})
    assert {"--head", "--port=7000", "--node-ip-address=10.9.0.1", "--labels=rack=a.b"} <= set(first["options"])
    assert "--address=10.9.0.1:7000" in two["options"]
    assert not any("secret" in path.read_text() for path in fake.folder.iterdir())  # the key stays here
    assert not any(first["token"] in line for line in [*fake.arguments, *lines])
    assert lines[0].startswith("one $ ray start --head --port=7000")  # the command is said
    warnings = [line for line in lines if line.startswith("Warning")]
    assert len(warnings) == 1
    assert "two has the public address 203.0.113.9" in warnings[0]
    assert "ports 6379" in warnings[0]


def test_the_highest_port_leaves_room_for_those_that_follow(tmp_path: Path) -> None:
    spec = cluster_file(tmp_path, ONE, top="port = 65527")
    assert "--dashboard-port=65535" in start_options(spec, spec.head)
    with pytest.raises(UserError, match="65527"):
        cluster_file(tmp_path, ONE, top="port = 65528")


def test_a_head_that_does_not_start_is_said_in_its_own_words(fake: FakeSsh, tmp_path: Path) -> None:
    all_good(fake)
    fake.answers("one.start", '2026 INFO\n{"refused": "one: Ray does not start: no memory."}\nError', code=1)
    with pytest.raises(UserError, match=r"^one: Ray does not start: no memory\.$"):
        up(cluster_file(tmp_path, ONE, TWO), Lines())
    assert fake.commands == ["start one"]


def test_up_adds_what_is_missing_with_the_token_of_the_head(fake: FakeSsh, tmp_path: Path) -> None:
    all_good(fake, one="abcd")
    lines = Lines()
    up(cluster_file(tmp_path, ONE, TWO), lines)
    assert lines[0] == "one runs already"
    assert fake.commands == ["start two"]
    sent = fake.sent("two", "start")
    assert (sent["token"], sent["id"]) == (TOKEN, "abcd")


def test_up_is_refused_where_the_head_has_gone(fake: FakeSsh, tmp_path: Path) -> None:
    all_good(fake, two="abcd")
    with pytest.raises(UserError, match=r"two still runs .* cluster down -f"):
        up(cluster_file(tmp_path, ONE, TWO), Lines())
    assert not fake.commands


def test_down_goes_on_where_a_host_fails(fake: FakeSsh, tmp_path: Path) -> None:
    all_good(fake)
    fake.answers("one", err="ssh: connect to host one port 22: No route to host", code=255)
    lines = Lines()
    with pytest.raises(UserError, match="one cannot be reached"):
        down(cluster_file(tmp_path, ONE, TWO), lines)
    assert sorted(fake.commands) == ["stop one", "stop two"]
    assert lines == ["two down"]


# -- the tunnel --------------------------------------------------------------------------------------------------------

FORWARDS = f"""#!{sys.executable}
import os, socket, sys
from pathlib import Path
port = int(sys.argv[sys.argv.index("-L") + 1].split(":")[1])
Path(os.environ["FAKE_SSH"], "pid").write_text(str(os.getpid()))
server = socket.create_server(("127.0.0.1", port))
print("Welcome")
print("{TOKEN}", flush=True)
sys.stdin.read()
"""


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_the_tunnel_lasts_as_long_as_its_context(fake: FakeSsh, tmp_path: Path) -> None:
    fake.program(FORWARDS)
    with tunnel(cluster_file(tmp_path, ONE)) as (address, token):
        assert token == TOKEN
        host, port = address.removeprefix("ray://").split(":")
        socket.create_connection((host, int(port)), 5).close()
        ssh = psutil.Process(int((fake.folder / "pid").read_text()))
    assert not ssh.is_running()


def test_the_tunnel_ends_with_a_process_that_is_killed(fake: FakeSsh, tmp_path: Path) -> None:
    fake.program(FORWARDS)
    code = (
        "import sys, time; from pathlib import Path; from wgpu_lora.cluster.launch.ssh import tunnel\n"
        "from wgpu_lora.cluster.cluster_file import read_cluster_file\n"
        "with tunnel(read_cluster_file(Path(sys.argv[1]))) as (address, _): print(address, flush=True); time.sleep(600)"
    )
    spec = cluster_file(tmp_path, ONE)
    process = subprocess.Popen([sys.executable, "-c", code, spec.path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ray://127.0.0.1:")
    ssh = psutil.Process(int((fake.folder / "pid").read_text()))
    process.kill()
    process.wait()
    until(lambda: not alive(ssh), 10)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ({"err": "ssh: connect to host one port 22: No route to host", "code": 255}, "one cannot be reached"),
        ({"err": "cat: no such file", "code": 1}, "is not up on one: start it with"),
        ({"out": "something else"}, "is not up on one"),
    ],
)
def test_a_cluster_that_is_not_there(fake: FakeSsh, tmp_path: Path, reply: dict[str, object], says: str) -> None:
    fake.answers("one", **reply)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=says), tunnel(cluster_file(tmp_path, ONE, TWO)):
        pass
    assert "two" not in fake.arguments
