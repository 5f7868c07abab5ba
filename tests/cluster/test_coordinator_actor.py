"""The coordinator around its state machine, without a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, device, request, task

from wgpu_lora.cluster.coordinator.board import Board
from wgpu_lora.cluster.coordinator.journal import Journal
from wgpu_lora.cluster.devices.versions import own_versions
from wgpu_lora.cluster.facts import NodeFacts, to_plain


def test_a_coordinator_goes_on_once_it_can_have_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from wgpu_lora.cluster.coordinator import actor

    monkeypatch.setattr(actor, "LOCK_SECONDS", 0.0)
    monkeypatch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path))

    async def scenario() -> None:
        other = Journal(tmp_path / "coordinator")
        coordinator = actor.Coordinator("node")
        assert "is used by the coordinator of another cluster" in (await coordinator.cancel("r"))["refused"]
        other.close()
        assert "No run 'r' is known" in (await coordinator.cancel("r"))["refused"]

    asyncio.run(scenario())


def test_devices_of_another_version_that_join_later_are_not_used() -> None:
    pytest.importorskip("ray")
    from wgpu_lora.cluster.coordinator.chores import Chores

    other = replace(own_versions(), shaders="0" * 64)

    class Nodes:
        async def living(self) -> list[str]:
            return ["a", "b"]

        async def ask(self, node: str, method: str, *arguments: Any, seconds: float = 0) -> Any:
            assert method == "survey"
            versions = own_versions() if node == "a" else other
            return to_plain(NodeFacts(node, node, node, versions, [device(node, "x")]))

    board = Board(node="a")
    chores: Any = Chores(board, Nodes(), lambda: 1.0, lambda: None)  # type: ignore[arg-type]
    asyncio.run(chores.survey())
    asyncio.run(chores.survey())
    assert list(board.state.devices) == ["a/x"]
    assert board.state.nodes[1].versions == other  # which a driver refuses
    assert sum("No device of b is used" in line.text for line in board.state.events) == 1


def test_results_are_found_where_they_are_now() -> None:
    """The host's address has changed since it told of them."""
    pytest.importorskip("ray")
    from wgpu_lora.cluster.coordinator.chores import Chores

    cluster = Cluster({"a": [device("a", "x")]})
    cluster.submit(request("r", [task("one")]))
    ((_, given),) = cluster.decide()
    cluster.report(given, step=9, copy=9, final=True, outcomes={"one": "finished"}, ended="done")
    copy = cluster.copy(given, 9, final=True)

    class Hosts:
        async def living(self) -> list[str]:
            return ["other", "moved"]

        async def ask(self, node: str, method: str, *arguments: Any, seconds: float = 0) -> Any:
            if method == "held":
                return to_plain(copy) if node == "moved" else None
            assert (method, *arguments) == ("results", given.unit, copy.digest, "one")
            return []

    cluster.board.state.nodes = []
    chores: Any = Chores(cluster.board, Hosts(), lambda: 1.0, lambda: None)  # type: ignore[arg-type]
    (found,) = asyncio.run(chores.results("r"))
    assert (found["task"], found["host"]) == ("one", "moved")


def test_a_name_that_is_free_again_brings_nothing_of_the_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two drivers submit a run of that name at once, and hosts have copies of the earlier one."""
    pytest.importorskip("ray")
    from wgpu_lora.cluster.coordinator import actor

    monkeypatch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path))
    cleared: list[str] = []

    async def living(self: Any) -> list[str]:
        return ["a"]

    async def ask(self: Any, node: str, method: str, *arguments: Any, seconds: float = 0) -> Any:
        if method == "survey":
            return to_plain(NodeFacts("a", "a", "a", own_versions(), [device("a", "x")]))
        await asyncio.sleep(0.01)
        cleared.extend(arguments[:1])
        return None

    async def order(*anything: Any) -> None:
        pass

    for name, fake in (("living", living), ("ask", ask), ("order", order)):
        monkeypatch.setattr(actor.Nodes, name, fake)

    async def scenario() -> None:
        coordinator = actor.Coordinator("a")
        first, second = (to_plain(request("r", [task(name)])) for name in ("one", "two"))
        assert await coordinator.submit(first) == {"run": "r"}
        await coordinator.cancel("r")
        measured = tmp_path / "coordinator" / "evaluations" / "r.jsonl"
        measured.parent.mkdir()
        measured.write_text('{"task": "one", "step": 9, "eval_loss": 1.0}\n')
        cleared.clear()
        answers = await asyncio.gather(*(coordinator.submit(one) for one in (second, second, first)))
        assert answers[:2] == [{"run": "r"}] * 2
        assert "is known already" in answers[2]["refused"]
        assert [view["name"] for view in (await coordinator.snapshot("r"))["tasks"]] == ["two"]
        assert set(cleared) == {"r"}
        assert await coordinator.evaluations("r") == []

    asyncio.run(scenario())
