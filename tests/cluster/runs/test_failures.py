"""Ray on the head's machine starts again, and its controller goes on from its state."""

from __future__ import annotations

from pathlib import Path

from support.cli import flags
from support.cluster_runs import SMALL_STEPS, cluster, rows_of, status
from support.hosts import drivers_here, hosts_here, until

from wgpu_lora.train.run.training_log import LOG, read_log

STEPS = 300
OPTIONS = {**SMALL_STEPS, "max_steps": STEPS}


def test_the_heads_ray_starts_again(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("one", "two")]
    named = [word for n, output in enumerate(outputs) for word in ("--adapters", f"{rows_of(tmp_path, n)}:{output}")]
    # Of one kind: one adapter would end before another on a driver ten times as slow has begun.
    with hosts_here(2, shared=tmp_path, drivers=drivers_here()[:1]) as hosts:
        hosts.start_nodes()
        until(lambda: len(status(hosts)["devices"]) == 2, 300)
        words = ["--name", "head", "--mirror-steps", "20", "--join", "never", "--detach"]
        cluster(hosts, "run", *words, *named, *flags(**OPTIONS))
        until(lambda: any(task["progress"]["step"] > 40 for task in status(hosts)["tasks"]), 300)
        for host in hosts:
            host.restart_node()
        cluster(hosts, "attach", "head")
        tasks = status(hosts)["tasks"]
    assert [task["state"] for task in tasks] == ["finished"] * 2
    assert max(task["attempts"] for task in tasks) == 2
    for output in outputs:
        assert [line["step"] for line in read_log(output / LOG)] == list(range(1, STEPS + 1))
