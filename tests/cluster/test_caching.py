"""Teacher caches on a host: what is kept after a kill, what is given to another host, and how failures are told."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.cluster.facts import CacheStanding, from_plain, to_plain
from wgpu_lora.cluster.node import caching, parcels
from wgpu_lora.cluster.node.caching import Caching
from wgpu_lora.cluster.node.layout import Layout
from wgpu_lora.cluster.node.sent import Sent
from wgpu_lora.cluster.node.transfer import Unreachable
from wgpu_lora.cluster.spec.paths import on_node
from wgpu_lora.cluster.spec.sending import Parcel, parcel
from wgpu_lora.errors import UserError

# Writes a file for each of two caches; what it does before the second one is the value of the option `how`.
FAKE = """
import json, os, pathlib, signal, sys, threading
def say(event, **facts): print(json.dumps({"schema": 1, "event": event, "time": 0.0, **facts}), flush=True)
job = json.loads(pathlib.Path(sys.argv[-1]).read_text())["options"]
how, place = job["training"]["how"], pathlib.Path(job["output"])
say("begin", job="teacher-cache", pid=os.getpid())
made = {}
for rows, name in enumerate(("teacher_cache", "eval_teacher_cache"), 1):
    if rows == 2 and how == "crash once" and not (place / "crashed").exists():
        (place / "crashed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rows == 2 and how == "wait":
        sys.stdin.read()
        os._exit(129)
    if rows == 2 and how in ("UserError", "NoRoomError"):
        say("error", kind=how, message="It is wrong.")
        sys.exit(2)
    (place / name).mkdir(exist_ok=True)
    if not (place / name / "cache.json").exists():
        (place / name / "cache.json").write_text(name)
        with (place / "written").open("a") as written: written.write(name + " ")
    say("evaluating", rows=rows, total=2, step=None)
    made[name] = str(place / name)
say("result", code=0, said="", result=made)
"""


class HostHere:
    """A host that makes caches, and the parcels that it gave away."""

    def __init__(self, root: Path):
        self.layout = Layout(root)
        self.given: list[tuple[str, str]] = []
        self.away = False
        self.caching = self.started()

    def started(self, index: int | None = 0) -> Caching:
        program = (sys.executable, "-c", FAKE)
        return Caching(self.layout, "here", lambda: index, dict, self.push, program)

    def push(self, one: Parcel, node: str) -> None:
        if self.away:
            raise Unreachable(f"{node} does not answer.")
        self.given.append((one.name, node))

    def made(self, how: str, attempt: int = 1, true: Callable[[CacheStanding], Any] | None = None) -> CacheStanding:
        """What is said of a cache once that is true, by default once it has ended."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = self.caching.make("run", "one", {"how": how}, attempt, "other")
            if true(found) if true else found.parcels or found.ended:
                return found
            time.sleep(0.02)
        raise AssertionError(found)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostHere]:
    made = HostHere(tmp_path / "root")
    yield made
    made.caching.close()


def written(host: HostHere) -> str:
    return (host.layout.caches("run", "one") / "written").read_text()


def test_caches_become_parcels_that_another_host_gets(host: HostHere) -> None:
    found = host.made("well")
    assert (found.rows, found.total, found.ended, found.hosts) == (2, 2, None, ["here", "other"])
    assert host.given == [("teacher_cache", "other"), ("eval_teacher_cache", "other")]
    there = on_node(found.parcels, {}, host.layout.sent)
    for name, path in there.items():
        assert (Path(path) / "cache.json").read_text() == name
    host.caching = host.started()  # its process was killed
    assert host.made("well").parcels == found.parcels
    assert written(host) == "teacher_cache eval_teacher_cache "  # not again


def test_a_killed_process_is_begun_again_where_it_was(host: HostHere) -> None:
    found = host.made("crash once")
    assert (found.ended, found.rows) == ("killed", 1)
    assert "SIGKILL" in found.said
    assert host.made("crash once") == found  # the same attempt
    assert host.made("crash once", attempt=2).parcels
    assert written(host) == "teacher_cache eval_teacher_cache "


def test_one_that_was_killed_while_its_caches_became_parcels(host: HostHere, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Sent.adopt

    def killed(self: Sent, one: Parcel, path: Path) -> Path:
        if one.name == "eval_teacher_cache":
            raise OSError("killed")
        return adopt(self, one, path)

    monkeypatch.setattr(Sent, "adopt", killed)
    assert host.made("well").ended == "failed"
    monkeypatch.undo()
    assert set(host.made("well", attempt=2).parcels) == {"teacher_cache", "eval_teacher_cache"}
    assert written(host) == "teacher_cache eval_teacher_cache "


@pytest.mark.parametrize(("how", "ended"), [("UserError", "refused"), ("NoRoomError", "no room")])
def test_why_there_is_no_cache(host: HostHere, how: str, ended: str) -> None:
    found = host.made(how)
    assert (found.ended, found.said) == (ended, "It is wrong.")


def test_a_device_that_has_vanished(host: HostHere) -> None:
    host.caching = host.started(index=None)
    assert "has vanished" in host.made("well").said


def test_a_cache_that_no_other_host_can_get_now(host: HostHere) -> None:
    host.away = True
    found = host.made("well")
    assert found.parcels
    assert found.hosts == ["here"]
    assert "on its own host alone" in found.said


def test_a_process_is_ended_with_what_wanted_it(host: HostHere, monkeypatch: pytest.MonkeyPatch) -> None:
    host.made("wait", true=lambda found: found.rows == 1)
    monkeypatch.setattr(caching, "UNASKED_SECONDS", 0.0)
    (job,) = host.caching._jobs.values()
    job.thread.join(30)
    assert job.standing.ended == "killed"
    monkeypatch.undo()
    host.made("wait", attempt=2, true=lambda found: found.rows == 1 and not found.ended)
    (job,) = host.caching._jobs.values()
    assert job.standing.ended is None
    host.caching.stop("run", "one")
    assert not job.thread.is_alive()


def test_parcels_are_taken_and_removed(tmp_path: Path) -> None:
    sent, folder = Sent(tmp_path / "sent"), tmp_path / "cache"
    folder.mkdir()
    (folder / "file").write_text("text")
    one = parcel(str(folder))
    place = sent.adopt(one, folder)
    assert sent.adopt(one, folder) == place
    assert (place / "file").read_text() == "text"
    assert not folder.exists()
    assert sent.read(one.digest, "cache/file", 0) == b"text"
    assert sent.parcel(one.digest) == one
    sent.remove(one.digest)
    sent.remove(one.digest)
    assert not sent.has(one.digest)
    assert not [path for path in sent.folder.iterdir() if path.suffix != ".lock"]
    with pytest.raises(UserError, match="too much to send"):
        parcel(str(_large(tmp_path / "tiny")), most_bytes=3)


def _large(path: Path) -> Path:
    path.write_text(json.dumps("long"))
    return path


def test_a_host_gets_a_parcel_from_the_first_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, folder = Sent(tmp_path / "there"), tmp_path / "cache"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/file").write_text("text")
    (folder / "empty").touch()
    one = parcel(str(folder))
    there.adopt(one, folder)

    def call(name: str, method: str, *arguments: Any, seconds: float = 0) -> Any:
        if name == "host:away":
            raise Unreachable("It does not answer.")
        sent = there if name == "host:there" else Sent(tmp_path / name.replace(":", "-"))
        answers = {
            "parcel": lambda digest: to_plain(sent.parcel(digest)),
            "read_sent": sent.read,
            "sent": sent.has,
            "begin_sent": lambda plain: sent.begin(from_plain(Parcel, plain)),
            "put_sent": sent.put,
            "commit_sent": lambda plain: str(sent.commit(from_plain(Parcel, plain))),
        }
        return answers[method](*arguments)

    monkeypatch.setattr(parcels, "call", call)
    here = Sent(tmp_path / "here")
    with pytest.raises(Unreachable):
        parcels.obtain(here, one.digest, ["away", "empty"])
    with pytest.raises(UserError, match="have not been sent"):
        parcels.obtain(here, one.digest, [])
    parcels.obtain(here, one.digest, ["away", "empty", "there"])
    for _ in range(2):
        parcels.push(there, one, "other")
    for got in (here, Sent(tmp_path / "host-other")):
        assert (got.folder / one.digest / "cache/deep/file").read_text() == "text"
        assert got.parcel(one.digest) == one
