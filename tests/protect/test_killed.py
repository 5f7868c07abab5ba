"""A protected training that is killed at any time leaves no piece of the rows or of a key anywhere, and can go on."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections.abc import Iterator, Sequence

import pytest
from support.processes.killing import OPTIONS, Site, make_site
from support.protect.brokers import serving
from support.sampling import FULL, seeds

from wgpu_lora.files.atomic import file_digest
from wgpu_lora.protect.check import check
from wgpu_lora.protect.policies.policy import Policy
from wgpu_lora.protect.sealed.sealed_files import unseal_path

ADAPTER = "adapter_model.safetensors"
pytestmark = [pytest.mark.rare, pytest.mark.skipif(not hasattr(os, "fork"), reason="the server of commands forks")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a broker, and a server of commands."""
    trainer_site = make_site(tmp_path_factory.mktemp("killed"))
    trainer_site.write_policy()
    with serving(trainer_site.owner, "--requests-per-minute", "100000") as broker, trainer_site.serving():
        trainer_site.broker = broker.url
        yield trainer_site


def uninterrupted(site: Site) -> tuple[float, str]:
    """Seconds of a run that nobody kills, and the SHA-256 of its adapter."""
    ended = site.start(*command(site, "whole"))
    assert ended.code == 0, ended.stderr
    assert not site.leaks()
    return ended.seconds, adapter_of(site, "whole")


def command(site: Site, name: str) -> list[str]:
    """A start of a job, new or to be resumed."""
    return ["finetune", "--protected", str(site.write_job(name)), *(["--resume"] if site.has_begun(name) else [])]


def adapter_of(site: Site, name: str) -> str:
    """The SHA-256 of a finished run's adapter, no piece of which is found outside of its sealed file."""
    opened = site.place / f"opened-{name}"
    unseal_path(site.run(name) / "adapter.tar.age", opened, site.owner.data)
    weights = (opened / ADAPTER).read_bytes()
    site.pieces.data("the adapter", weights[len(weights) // 2 :][:4096])
    assert not site.leaks()
    return file_digest(opened / ADAPTER)


def killed(site: Site, name: str, times: Sequence[float]) -> tuple[int, str]:
    """Start a job again and again, and kill it after these seconds; then let it finish.

    Returns the number of starts that had not finished when they were killed, and the adapter's SHA-256.

    Nothing may be found after any of the kills, and nothing but a kill may end a start.
    """
    keys, ended = site.keys, []
    for number, after in enumerate(times):
        command_result = site.start(*command(site, name), kill_after=after)
        assert not (leaks := site.leaks()), (number, after, leaks)
        assert command_result.code in (-signal.SIGKILL, 0), (number, after, command_result)
        ended.append(command_result)
    assert site.keys > keys  # some of them had keys
    last = site.start(*command(site, name))
    assert last.code == 0, last.stderr
    assert not site.leaks()
    verification = check(site.run(name), site.owner.signing.public, Policy.read(site.owner.policy))
    assert verification.verified, verification.failures
    late = sum(command_run.code == 0 for command_run in ended)
    took, spent = (
        statistics.median(getattr(command_run, what) for command_run in ended) for what in ("seconds", "processor")
    )
    print(f"{len(times)} starts, {late} of them finished: median {took:.2f} s, {spent:.2f} s of the processor")
    return len(times) - late, adapter_of(site, name)


def test_killed_at_random_times(site: Site):
    """In rounds, so that early stages of a run are hit as often as late ones. Each has the result of a whole run."""
    whole, adapter = uninterrupted(site)
    kills = number = 0
    while kills < (100 if FULL else 10):
        rng = random.Random(seeds(30, "kills")[number])
        times = [rng.uniform(0.02, 0.9 * whole) for _ in range(5)]
        count, result = killed(site, f"round-{number}", times)
        assert result == adapter
        assert count  # else nothing is killed any more
        kills, number = kills + count, number + 1


def test_the_search_would_find_them(site: Site):
    """What is searched is where it would be: planted pieces of each kind are found among the run's files."""
    assert OPTIONS["save_steps"]
    rows, key = site.rows, site.owner.data_file.read_bytes()
    for planted in (rows[0].encode(), rows[-1].encode("utf-16-le"), key):
        for below in ("tmp/x", "home/.cache/y", "data/z", "whole/w"):
            path = site.watched / below
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(planted)
            assert site.leaks()
            path.unlink()
    assert not site.leaks()
