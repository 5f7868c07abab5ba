"""A protected training that is killed at any time leaves no piece of the rows or of a key anywhere, and can go on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.killing import OPTIONS, Site, killed_often, make_site

from wgpu_lora.atomic import file_digest
from wgpu_lora.protect.check import check
from wgpu_lora.protect.keys import DataKey
from wgpu_lora.protect.policy import Policy
from wgpu_lora.protect.sealed_files import unseal_path

ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a broker, and a server of commands."""
    made = make_site(tmp_path_factory.mktemp("killed"))
    policy = made.write_policy()
    with made.owner.broker(policy) as broker, made.serving():
        made.broker = broker
        yield made


def uninterrupted(site: Site) -> tuple[float, str]:
    """Seconds of a run that nobody kills, and the SHA-256 of its adapter."""
    arguments = ["finetune", "--protected", str(site.write_job("whole"))]
    ended = site.start(*arguments)
    assert ended.code == 0, ended.said
    assert not site.leaks()
    return ended.seconds, adapter_of(site, site.run("whole"))


def adapter_of(site: Site, run: Path) -> str:
    """The SHA-256 of a finished run's adapter, none of whose bytes is found outside of its sealed file."""
    opened = site.place / f"opened-{run.name}"
    unseal_path(run / "adapter.tar.age", opened, DataKey.read(site.owner.key))
    weights = (opened / ADAPTER).read_bytes()
    site.pieces.data("the adapter", weights[len(weights) // 2 :][:4096])
    assert not site.leaks()
    return file_digest(opened / ADAPTER)


def killed(site: Site, name: str, count: int, seed: int) -> None:
    whole, adapter = uninterrupted(site)
    keys, rng = site.keys, random.Random(seed)
    times = [rng.uniform(0.02, 1.05 * whole) for _ in range(count)]
    job = site.write_job(name)
    ended = killed_often(site, name, times, ["finetune", "--protected", str(job)])
    assert sum(found.code < 0 for found in ended) >= count // 2  # most were killed, not late
    assert site.keys > keys  # and some had keys
    last = site.start("finetune", "--protected", str(job), *(["--resume"] if site.begun(name) else []))
    assert last.code == 0, last.said
    assert not site.leaks()
    assert adapter_of(site, site.run(name)) == adapter
    found = check(site.run(name), site.owner.broker_public, Policy.read(site.policy))
    assert found.verified, found.failures
    took = statistics.median(found.seconds for found in ended)
    print(f"{count} kills: median {took:.2f} s, a whole run {whole:.2f} s")


def test_killed_three_times(site: Site):
    killed(site, "thrice", 3, seed=1)


@pytest.mark.rare
def test_killed_a_hundred_times(site: Site):
    """In rounds, so that the early stages of a run are hit as often as the later ones."""
    for number in range(10):
        killed(site, f"round-{number}", 10, seed=100 + number)


def test_the_search_would_find_them(site: Site):
    """What is searched is where it would be: planted pieces of each kind are found among the run's files."""
    assert OPTIONS["save_steps"]
    rows, key = site.rows, site.owner.key.read_bytes()
    for planted in (rows[0].encode(), rows[-1].encode("utf-16-le"), key):
        for below in ("tmp/x", "home/.cache/y", "data/z", "whole/w"):
            path = site.watched / below
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(planted)
            assert site.leaks()
            path.unlink()
    assert not site.leaks()
