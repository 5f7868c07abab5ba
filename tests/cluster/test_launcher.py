"""What `cluster up` checks and writes, without hosts: `ssh` is a script."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support.fake_ssh import FakeSsh, cluster_file, good

from wgpu_lora.cluster.cluster_file import HostSpec
from wgpu_lora.cluster.launcher import commands
from wgpu_lora.cluster.launcher.checks import answered, check_here, check_hosts
from wgpu_lora.cluster.launcher.config import ports_of, write_host
from wgpu_lora.cluster.launcher.files import folder_of
from wgpu_lora.cluster.launcher.ssh import quoted, refusal
from wgpu_lora.cluster.launcher.token import authentication, new_token
from wgpu_lora.errors import UserError

ONE, TWO = 'host = "one"\naddress = "10.9.0.1"', 'host = "two"\naddress = "10.9.0.2"'


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path, monkeypatch)


# -- checks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("Host key verification failed.", "run 'ssh -i '/a key' me@one' once"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R me@one"),
        ("me@one: Permission denied (publickey).", "does not let this user in"),
        ("ssh: connect to host one port 22: Connection timed out", "does not answer within 10 s"),
        ("ssh: Could not resolve hostname one: Name or service not known", "is not a name"),
        (
            "kex_exchange_identification: read: Connection reset",
            "(kex_exchange_identification: read: Connection reset)",
        ),
        ("", "(without a word)"),
    ],
)
def test_what_ssh_says_becomes_a_sentence(said: str, meaning: str) -> None:
    sentence = refusal(HostSpec("one", user="me", ssh_key="/a key"), said)
    assert sentence.startswith("one ")
    assert meaning in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("hosts", "top", "says"),
    [
        ([], "", "no [[host]]"),
        ([ONE, 'host = "two"\naddress = "10.9.0.1"'], "", "10.9.0.1"),
        ([ONE, 'host = "localhost"'], "", "which no other host reaches"),
        ([ONE, 'host = "no-such-host.invalid"'], "", "give its 'address'"),
        ([ONE, 'host = "fe80::1"\naddress = "10.9.0.2"'], "", "IPv6"),
        ([ONE, 'host = "two"\naddress = "fe80::1"'], "", "IPv4"),
        ([ONE], 'ssh_key = "/no/such/key"', "does not exist"),
    ],
)
def test_a_file_that_cannot_work_is_refused_before_any_host_is_asked(
    fake: FakeSsh, tmp_path: Path, hosts: list[str], top: str, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_here(cluster_file(tmp_path, *hosts, top=top))
    assert says in str(refused.value)
    assert not fake.arguments


def test_a_key_that_others_may_read_is_refused(fake: FakeSsh, tmp_path: Path) -> None:
    key = tmp_path / "a key"
    key.touch(0o644)
    spec = cluster_file(tmp_path, ONE, top=f'ssh_key = "{key}"')
    with pytest.raises(UserError, match="chmod 600"):
        check_here(spec)
    key.chmod(0o600)
    check_here(spec)


@pytest.mark.parametrize("program", ["ssh", "rsync"])
def test_missing_programs(fake: FakeSsh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setenv("PATH", str(fake.bin))
    (fake.bin / program).unlink()
    with pytest.raises(UserError, match=f"{program} is not installed here"):
        check_here(cluster_file(tmp_path, ONE))


def test_each_host_that_cannot_be_used_has_a_line(fake: FakeSsh, tmp_path: Path) -> None:
    wrong = {
        "a": ({'err': "ssh: connect to host a port 22: Connection refused\n", 'code': 255}, "refuses SSH"),
        "b": ({'err': "sh: 1: python9: not found\n", 'code': 127}, "cannot be run there"),
        "c": ({'err': "python3: Error while finding module specification for 'wgpu_lora.cluster.launcher.node' "
                       "(ModuleNotFoundError: No module named 'wgpu_lora')", 'code': 1}, "has no wgpu-lora"),
        "d": ({'err': "Unknown option: -P\nusage: python", 'code': 2}, "older than Python 3.11"),
        "e": ({'out': good("10.9.0.5", python="3.99.1")}, "Python is 3.99.1"),
        "f": ({'out': good("10.1.1.1")}, "no interface with the address 10.9.0.6 (it has 10.1.1.1)"),
        "g": ({'out': {**good("10.9.0.7"), "rsync": False}}, "has no rsync"),
        "h": ({'out': {"versions": 3}}, "another version"),
        "i": ({'out': {"refused": "i: no."}}, "i: no."),
        "j": ({'out': "hello\n" + json.dumps(good("10.9.0.10")) + "\nbye"}, None),
    }  # fmt: skip
    for name, (given, _) in wrong.items():
        fake.answers(name, **given)  # type: ignore[arg-type]
    hosts = [f'host = "{name}"\naddress = "10.9.0.{number}"' for number, name in enumerate(wrong, 1)]
    with pytest.raises(UserError) as refused:
        check_hosts(cluster_file(tmp_path, *hosts))
    lines = refused.value.lines
    assert lines[0] == "9 hosts cannot be used:"
    said = [(name, text) for name, (_, text) in wrong.items() if text]
    for line, (name, text) in zip(lines[1:], said, strict=True):
        assert line.startswith(name)
        assert text in line


def test_the_answer_is_found_among_other_lines() -> None:
    assert answered('Welcome\n{"a": 1}\n{not json\n[1]\n') == {"a": 1}
    assert answered("Welcome") is None


# -- values are data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/a b/c", "~/x;y", "~", "/$(touch x)`y`'z'", '/"q"', "~/a'b c", "-x"])
def test_paths_are_one_word_of_a_shell(path: str, tmp_path: Path) -> None:
    argv = ["sh", "-c", f"printf '%s\\n' {quoted(path)}"]
    found = subprocess.run(argv, env={**os.environ, "HOME": "/home/me"}, capture_output=True, text=True, check=True)
    assert found.stdout == (f"/home/me/{path[2:]}" if path.startswith("~/") else path) + "\n"


def test_what_rays_launcher_is_given(fake: FakeSsh, tmp_path: Path) -> None:
    key = tmp_path / "it's 100% a key; $(x)"
    key.touch(0o600)
    tables = f'{ONE}\nlabels = {{ rack = "a.b" }}', f'{TWO}\nuser = "me"\npython = "~/v/bin/python"'
    spec = cluster_file(tmp_path, *tables, top=f'ssh_key = "{key}"\nport = 7000')
    check_here(spec)
    fake.answers("one", "host one\nuser root\nport 22")
    folder = folder_of(spec.name)
    token = new_token()
    configs = [write_host(spec, host, folder, "0123", token) for host in spec.hosts]
    read = [yaml.safe_load(path.read_text()) for path in configs]
    assert [one["auth"] for one in read] == [{"ssh_user": "root"}, {"ssh_user": "me"}]  # no key: Ray would copy it
    assert read[0]["provider"]["host"]["ssh_key"] == str(key)
    there = "~/.local/state/wgpu-lora/nodes/lab"
    assert [[*one["file_mounts"]] for one in read] == [[f"{there}/one"], [f"{there}/two"]]
    assert read[1]["head_start_ray_commands"] == [
        f"~/v/bin/python -P -m wgpu_lora.cluster.launcher.node start {there}/two"
    ]
    assert read[0]["provider"]["folder"] == f"{there}/one"
    nodes = [json.loads(Path(one["file_mounts"][f"{there}/{name}"], "node.json").read_text())
             for one, name in zip(read, ("one", "two"), strict=True)]  # fmt: skip
    assert [node["head"] for node in nodes] == [True, False]
    assert nodes[0]["labels"] == {"rack": "a.b"}
    assert nodes[1]["head_address"] == "10.9.0.1"
    assert nodes[1]["ports"] == ports_of(spec)
    assert ports_of(spec)["gcs"] == 7000
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.name == "token" or path.is_dir() or token not in path.read_text()


def test_the_highest_port_leaves_room_for_those_that_follow(tmp_path: Path) -> None:
    assert max(ports_of(cluster_file(tmp_path, ONE, top="port = 65527")).values()) == 65535
    with pytest.raises(UserError, match="65527"):
        cluster_file(tmp_path, ONE, top="port = 65528")


def test_the_token_is_read_from_the_head(fake: FakeSsh, tmp_path: Path) -> None:
    spec, token = cluster_file(tmp_path, ONE, TWO), new_token()
    fake.answers("one", token)
    assert authentication(spec) == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    assert "two" not in fake.arguments
    for wrong in ({"err": "cat: no such file", "code": 1}, {"out": "something else"}):
        fake.answers("one", **wrong)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="is not up on one: start it"):
            authentication(spec)


# -- up and down -------------------------------------------------------------------------------------------------------


class Said(list[str]):
    def __call__(self, label: str, text: str, whole: bool = False) -> None:
        self.append(f"{label} {text}")


@pytest.fixture
def ray(fake: FakeSsh, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `ray` that notes what it was asked for, and fails for a host whose file RAY.<host> says so."""
    script = fake.program("ray", '#!/bin/sh\nfor last; do :; done\necho "$1 $last" >> "$FAKE_SSH/ray"\n'
                          'name=$(basename "$last" .yaml)\n[ "$1" = down ] && rm -f "${last%.yaml}.state"\n'
                          '[ ! -e "$FAKE_SSH/RAY.$name" ] || { cat "$FAKE_SSH/RAY.$name"; exit 1; }\n')  # fmt: skip
    monkeypatch.setattr(commands, "RAY", [str(script)])
    return fake.folder / "ray"


def calls(ray: Path) -> list[str]:
    lines = ray.read_text().splitlines() if ray.exists() else []
    return [f"{line.split()[0]} {Path(line.split()[1]).stem}" for line in lines]


def all_good(fake: FakeSsh, **running: str | None) -> None:
    for number, name in ((1, "one"), (2, "two")):
        listens = [{"process": "gcs_server", "address": "*", "port": 6379}]
        answer = {
            **good(f"10.9.0.{number}", running.get(name)),
            "listening": listens,
            "public": ["203.0.113.9"][: number - 1],
        }
        fake.answers(name, "user me\n" + json.dumps(answer))


def test_up_starts_the_head_first_and_says_what_the_internet_may_reach(
    fake: FakeSsh, ray: Path, tmp_path: Path
) -> None:
    all_good(fake)
    said = Said()
    commands.up(cluster_file(tmp_path, ONE, TWO), said)
    assert calls(ray) == ["up one", "up two"]
    warnings = [line for line in said if line.startswith("Warning")]
    assert len(warnings) == 1
    assert "two has the public address 203.0.113.9" in warnings[0]
    assert "ports 6379" in warnings[0]
    assert said[0].startswith("one $ ray ")  # the command is said


def test_a_head_that_does_not_start_is_said_in_its_own_words(fake: FakeSsh, ray: Path, tmp_path: Path) -> None:
    all_good(fake)
    (fake.folder / "RAY.one").write_text('2026 INFO\n{"refused": "one: Ray does not start: no memory."}\nError\n')
    with pytest.raises(UserError, match=r"^one: Ray does not start: no memory\.$"):
        commands.up(cluster_file(tmp_path, ONE, TWO), Said())
    assert calls(ray) == ["up one"]


def test_up_adds_what_is_missing_with_the_token_of_the_head(
    fake: FakeSsh, ray: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_good(fake, one="abcd")
    monkeypatch.setattr(commands, "token_of", lambda spec: "f" * 64)
    commands.up(cluster_file(tmp_path, ONE, TWO), Said())
    assert calls(ray) == ["up two"]
    mounted = folder_of("lab") / "hosts" / "two"
    assert (mounted / "token").read_text() == "f" * 64
    assert json.loads((mounted / "node.json").read_text())["id"] == "abcd"


def test_up_is_refused_where_the_head_has_gone(fake: FakeSsh, ray: Path, tmp_path: Path) -> None:
    all_good(fake, two="abcd")
    with pytest.raises(UserError, match=r"two still runs .* cluster down -f"):
        commands.up(cluster_file(tmp_path, ONE, TWO), Said())
    assert not calls(ray)


def test_down_goes_on_where_a_host_fails_and_keeps_what_is_needed_to_try_again(
    fake: FakeSsh, ray: Path, tmp_path: Path
) -> None:
    all_good(fake)
    spec = cluster_file(tmp_path, ONE, TWO)
    (fake.folder / "RAY.one").write_text("one does not answer.\n")
    with pytest.raises(UserError, match=r"one: Ray's launcher failed \(one does not answer"):
        commands.down(spec, Said())
    assert sorted(calls(ray)) == ["down one", "down two"]
    assert (folder_of("lab") / "one.yaml").exists()
    (fake.folder / "RAY.one").unlink()
    commands.down(spec, Said())
    assert not list(folder_of("lab").iterdir())
