"""Properties of every placement."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from wgpu_lora.cluster.cluster_file import JOIN
from wgpu_lora.cluster.placement.placement import place
from wgpu_lora.cluster.placement.placement_field import MOST_JOINED, CandidateDevice, PendingTask, Placement

CLASSES = ("x", "y")
ids = st.integers(0, 7).map("d{}".format)
numbers = st.floats(0.01, 1e6)


@st.composite
def pending_tasks(draw: st.DrawFn) -> list[PendingTask]:
    count = draw(st.integers(0, 12))
    return [
        PendingTask(
            f"t{number}",
            draw(st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 30), max_size=2)),
            base=draw(st.sampled_from(("a", "b"))),
            base_bytes=draw(st.integers(0, 20)),
            work=draw(numbers),
            data=draw(st.frozensets(st.sampled_from("pq"))),
            avoid=draw(st.frozensets(ids, max_size=2)),
            devices=draw(st.sampled_from((1, 1, 1, 2, 3))),
            tasks=draw(st.sampled_from(((), (), (f"t{number}", f"other{number}")))),
            run=draw(st.sampled_from(("r", "s"))),
            join=draw(st.sampled_from(JOIN)),
            seconds=draw(st.none() | numbers),
            since=draw(st.floats(-1e5, 0)),
        )
        for number in range(count)
    ]


@st.composite
def some_devices(draw: st.DrawFn) -> list[CandidateDevice]:
    devices = []
    for name in draw(st.lists(ids, unique=True)):
        slots = draw(st.integers(1, 3))
        active = draw(st.integers(0, slots))
        devices.append(
            CandidateDevice(
                name,
                draw(st.sampled_from(CLASSES)),
                draw(st.sampled_from("uv")),
                free=draw(st.none() | st.integers(0, 80)),
                speed=draw(st.none() | numbers),
                active=active,
                busy_seconds=draw(numbers | st.just(math.inf)) if active else 0.0,
                bases=draw(st.frozensets(st.sampled_from("ab"))),
                data=draw(st.frozensets(st.sampled_from("pq"))),
                joined_speedup=draw(st.none() | st.floats(0.5, 3.0)),
                jobs_per_device=slots,
                active_bytes=draw(st.integers(0, 80)) if active else 0,
                out=draw(st.sampled_from(("", "", "", "gone"))),
            )
        )
    return devices


@settings(max_examples=30, deadline=None)
@given(pending_tasks(), some_devices(), st.randoms(use_true_random=False))
def test_every_placement_is_possible(waiting, devices, random):
    placements = place(waiting, devices)
    by_id, by_task = {spot.id: spot for spot in devices}, {task.task: task for task in waiting}
    free = {spot.id: math.inf if spot.free is None else spot.free for spot in devices}
    jobs = {spot.id: spot.active for spot in devices}
    assert max(Counter(name for item in placements for name in item.tasks).values(), default=1) == 1
    for placement in placements:
        members = [by_task[name] for name in placement.tasks if name in by_task]
        assert members
        assert set(placement.tasks) == {name for member in members for name in member.members}
        assert len(set(placement.devices)) == len(placement.devices) == members[0].devices
        assert len(members) <= MOST_JOINED
        assert placement.score > 0
        if len(members) > 1:
            assert len({(member.run, member.base) for member in members}) == 1
            assert all(member.joinable for member in members)
        for name in placement.devices:
            device = by_id[name]
            assert not device.out
            assert all(name not in member.avoid and device.plan_class in member.peak_bytes for member in members)
            assert (
                placement.peak_bytes >= max(member.peak_bytes[device.plan_class] for member in members)
                or len(placement.devices) > 1
            )
            free[name] -= (
                placement.peak_bytes if len(placement.devices) == 1 else members[0].peak_bytes[device.plan_class]
            )
            jobs[name] += 1
    assert all(bytes_left >= 0 for name, bytes_left in free.items() if jobs[name] > by_id[name].active)
    assert all(jobs[name] <= by_id[name].jobs_per_device for name in jobs)
    random.shuffle(waiting)
    random.shuffle(devices)
    assert place(waiting, devices) == placements


@settings(max_examples=30, deadline=None)
@given(pending_tasks(), some_devices())
def test_idle_clusters_start_something(waiting, devices):
    """Where nothing runs that anything could wait for, a task that fits is started."""
    idle = [replace(spot, active=0, busy_seconds=0.0, active_bytes=0) for spot in devices]
    single = [replace(task, devices=1) for task in waiting]
    fits = any(
        not device.out
        and device.id not in task.avoid
        and task.peak_bytes.get(device.plan_class, math.inf) <= (1e20 if device.free is None else device.free)
        for task in single
        for device in idle
    )
    assert bool(place(single, idle)) == fits


def test_a_placement_is_equal_by_what_it_says():
    assert Placement(("a",), ("d",), 1.0) == Placement(("a",), ("d",), 1.0)
