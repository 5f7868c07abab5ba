"""cluster.toml is read strictly: every wrong value is refused in one sentence that says where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows.hostile import refused

from wgpu_lora.cluster.cluster_file import (
    ClusterFile,
    check_address,
    distinct_names,
    is_safe,
    read_cluster_file,
    safe_name,
)
from wgpu_lora.errors import UserError

WHOLE = """
name = "lab"
user = "ann"
python = "~/venv/bin/python"
port = 7000

[[host]]
host = "gpu1.lab"
address = "10.0.0.2"
ssh_key = "~/.ssh/lab"
labels = { room = "a", "lab/rack" = "7" }

[[host]]
host = "10.0.0.3"
user = "bob"
python = "/opt/wgpu/bin/python"
data = "/data"

[data]
root = "/mnt/lab/"

[run]
shared = "/mnt/lab/results"
mirror_steps = 20
join = "never"

[options]
model = "demo"
learning_rate = 1e-3

[[adapter]]
data = "a.jsonl"
checkpoint = "a"

[[recipe]]
recipe = "persona"
output = "p"
"""


def read(folder: Path, text: str) -> ClusterFile:
    path = folder / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(path)


def test_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cluster = read(tmp_path, WHOLE)
    first, second = cluster.host
    assert cluster.head is first
    assert (first.user, first.python, first.address) == ("ann", "~/venv/bin/python", "10.0.0.2")
    assert first.ssh_key == "~/.ssh/lab"
    assert first.labels == {"room": "a", "lab/rack": "7"}
    assert (second.user, second.python, second.ssh_key) == ("bob", "/opt/wgpu/bin/python", None)
    assert (cluster.name, cluster.port, cluster.data_root) == ("lab", 7000, "/mnt/lab")
    assert cluster.node_paths(first) == {}
    assert cluster.node_paths(second) == {"/mnt/lab": "/data"}
    assert (cluster.run.mirror_steps, cluster.run.join, cluster.run.shared) == (20, "never", "/mnt/lab/results")
    assert len(cluster.adapter) == len(cluster.recipe) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'name' is missing: add it"),
        ("name = 3", "'name' must be text, not 3"),
        ('name = "../lab"', "must be up to 64 letters"),
        ('name = "a"\nadress = "auto"', "'adress' is not known: did you mean 'address'"),
        ('name = "a"\nfoo = 1', "'foo' is not known: use name, address"),
        ('name = "a"\naddress = "ray://x"', "'address' must be auto, HOST:PORT or ray://HOST:PORT"),
        ('name = "a"\naddress = "-x:1"', "'address' must be auto"),
        ('name = "a"\nport = 80', "'port' must be at least 1024, not 80"),
        ('name = "a"\nport = true', "'port' must be a whole number"),
        ('name = "a"\nuser = 1', "'user' must be text"),
        ('name = "a"\npython = "python;reboot"', "'python' must be the path of an interpreter"),
        ('name = "a"\nhost = "gpu1"', "'host' must be a list"),
        ('name = "a"\n[[host]]\nuser = "ann"', "'host[0].host' is missing: add it"),
        ('name = "a"\n[[host]]\nhost = "-oProxyCommand=reboot"', "'host[0].host' must be the name or address"),
        ('name = "a"\n[[host]]\nhost = "a b"', "'host[0].host' must be the name"),
        ('name = "a"\n[[host]]\nhost = "gpu1\\n"', "'host[0].host' must be the name"),
        ('name = "a"\n[[host]]\nhost = "x"\nusr = "y"', "'host[0].usr' is not known"),
        ('name = "a"\n[[host]]\nhost = "x"\nuser = "$(id)"', "'host[0].user' must be the name of a user"),
        ('name = "a"\n[[host]]\nhost = "x"\nssh_key = " "', "'host[0].ssh_key' must be the path"),
        ('name = "a"\n[[host]]\nhost = "x"\nssh_key = "k\\nProxyCommand x"', "'host[0].ssh_key' must be the path"),
        ('name = "a"\n[[host]]\nhost = "x"\naddress = "0.0.0.0"', "'host[0].address' must be the IPv4 address"),
        ('name = "a"\n[[host]]\nhost = "x"\naddress = "gpu1"', "'host[0].address' must be the IPv4 address"),
        ('name = "a"\n[[host]]\nhost = "x"\nlabels = { a = 1 }', "'host[0].labels.a' must be text, not 1"),
        ('name = "a"\n[[host]]\nhost = "x"\nlabels = { a = "`id`" }', "letters, digits"),
        ('name = "a"\n[[host]]\nhost = "x"\nlabels = { "ray.io/x" = "y" }', "ray.io/ begins Ray's own"),
        ('name = "a"\n[[host]]\nhost = "x"\ndata = "/d"', "'data' of x needs the folder of the others"),
        ('name = "a"\naddress = "auto"\n[[host]]\nhost = "x"', "has an 'address' and"),
        ('name = "a"\n[data]\nroot = "mnt"', "'data.root' must be the absolute path"),
        ('name = "a"\n[data]\nroot = "/a/../b"', "'data.root' must be the absolute path"),
        ('name = "a"\n[data]\nfolder = "/a"', "'data.folder' is not known"),
        ('name = "a"\ndata = "/a"', "'data' must be an object"),
        ('name = "a"\n[run]\nmirror_steps = -1', "'mirror_steps' must be 0 or more"),
        ('name = "a"\n[run]\nmirror_steps = 1.5', "'run.mirror_steps' must be a whole number"),
        ('name = "a"\n[run]\njoin = "maybe"', "'join' must be one of auto, always, never"),
        ('name = "a"\n[run]\nshared = "results"', "'shared' must be the absolute path"),
        ('name = "a"\n[run]\nmirrorsteps = 1', "did you mean 'mirror_steps'"),
        ('name = "a"\n[run]\ndata_parallel = 0', "'data_parallel' must be"),
        ('name = "a"\n[run]\ndata_parallel = 2\njoin = "always"', "cannot be combined"),
        ('name = "a"\nadapter = 3', "'adapter' must be a list"),
        ('name = "a"\nadapter = [3]', "'adapter[0]' must be an object"),
        ('name = "a"\noptions = 3', "'options' must be an object"),
        ("name = ", "is not valid TOML"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_very_large_files_are_refused(tmp_path: Path) -> None:
    refused(lambda: read(tmp_path, 'name = "a"\n' + "#" * (1 << 19)), "longer than")
    with pytest.raises(UserError, match="cannot be read"):
        read_cluster_file(tmp_path / "other.toml")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    text = WHOLE
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        to = min(len(text), at + data.draw(st.integers(0, 12)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(["", '"', "=", "[", "]", "\n", "-", "1", "é", "\0", "''"]))
            + text[to:]
        )
    path = tmp_path_factory.mktemp("file") / "cluster.toml"
    path.write_text(text)
    try:
        cluster = read_cluster_file(path)
    except UserError:
        return  # any other error fails the test
    assert is_safe(cluster.name)


def test_addresses() -> None:
    for good in ("auto", "10.0.0.2:6379", "ray://gpu1.lab:10001", "[fd00::2]:6379"):
        assert check_address(good, "--address") == good
    for bad in ("", "gpu1", "http://x:1", "x:99999", "x:0", "a b:1", "x:1\n", "ray://u@x:1"):
        with pytest.raises(UserError, match="--address must be auto"):
            check_address(bad, "--address")


@given(st.text(max_size=90))
def test_safe_names_are_safe(text: str) -> None:
    assert is_safe(safe_name(text))
    if is_safe(text) and text[-1] not in "._-":
        assert safe_name(text) == text


@given(st.lists(st.sampled_from(["a", "A", "a-2", "b", "a-3"]), max_size=8))
def test_names_are_told_apart(names: list[str]) -> None:
    distinct = distinct_names(names, ["a-4"])
    assert len({name.casefold() for name in [*distinct, "a-4"]}) == len(names) + 1
    if names:
        assert distinct[0] == names[0]
