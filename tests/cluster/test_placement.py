"""Which adapter goes where: good sense, for people's clusters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from wgpu_lora.cluster.placement.placement import place, refusal
from wgpu_lora.cluster.placement.placement_field import MOST_JOINED, CandidateDevice, PendingTask, Placement

GIB = 2**30


def task(name: str = "a", work: float = 1000.0, memory: int = 4 * GIB, **options) -> PendingTask:
    return PendingTask(name, {"x": memory, "y": memory}, work=work, base="base", base_bytes=2 * GIB, **options)


def device(device_id: str, speed: float | None = 10.0, free: int | None = 16 * GIB, **options) -> CandidateDevice:
    return CandidateDevice(device_id, options.pop("plan_class", "x"), free=free, speed=speed, budget=free, **options)


def busy(name: str, speed: float, seconds: float, memory: int = 16 * GIB, **options) -> CandidateDevice:
    return device(name, speed, 0, active=1, active_bytes=memory, busy_seconds=seconds, **options)


def where(placements: list[Placement]) -> dict[str, str]:
    return {name: placement.devices[0] for placement in placements for name in placement.tasks}


def test_the_score_chooses_among_devices_of_the_same_speed():
    large, local = device("large", free=32 * GIB), device("local", bases=frozenset({"base"}))
    assert where(place([task()], [device("small"), large])) == {"a": "large"}
    assert where(place([task()], [device("other"), local])) == {"a": "local"}
    assert place([task()], [large])[0].score == 32 / 4 * 10.0  # free / needed x tokens/s
    unknown = device("unknown", free=None)  # fits, and has no more room than that
    assert place([task()], [unknown])[0].score == 10.0
    shared = replace(large, active=1, jobs_per_device=2)
    assert place([task()], [shared])[0].score == 32 / 4 * 10.0 / 2


NEAR = task(data=frozenset({"rows", "more"}))
HAS = device("z", data=frozenset({"rows"}))
SLOW, FAST = device("slow", 1.0), device("fast", 10.0)
HELD = device("held", 100.0, GIB)  # idle, but people at the machine hold its memory
SMALL, LARGE = device("small", free=8 * GIB), device("large", free=32 * GIB)
UNMEASURED, UNPLANNED = device("c", None, free=32 * GIB), PendingTask("a", {"z": 1})


@pytest.mark.parametrize(
    ("tasks", "devices", "expected"),
    [
        pytest.param([NEAR], [device("b"), HAS], {"a": "z"}, id="data of the host"),
        pytest.param([NEAR], [device("b", 20.0), HAS], {"a": "b"}, id="data of a host that is slower"),
        pytest.param([task()], [device("slow", 1.0, 80 * GIB), device("fast", 8.0, 8 * GIB)], {"a": "fast"},
                     id="a large slow card"),
        pytest.param([task("short", 5.0), task("long", 100.0)], [FAST, SLOW], {"long": "fast", "short": "slow"},
                     id="the longest to the fastest"),
        pytest.param([task("a", 50.0), task("long", 100.0)], [FAST, SLOW], {"long": "fast"}, id="15 s, not 50"),
        pytest.param([task()], [SLOW, busy("fast", 10.0, 100.0)], {}, id="waits 200 s, not 1,000"),
        pytest.param([task()], [SLOW, busy("fast", 10.0, 5000.0)], {"a": "slow"}, id="waits no longer than it takes"),
        pytest.param([task()], [SLOW, busy("fast", 10.0, math.inf)], {"a": "slow"}, id="waits for nothing endless"),
        pytest.param([task()], [SLOW, HELD], {"a": "slow"}, id="memory that others hold"),
        pytest.param([task()], [HELD], {}, id="only memory that others hold"),
        pytest.param([task("anywhere", 1100.0), task("needy", 1000.0, memory=20 * GIB)], [SMALL, LARGE],
                     {"needy": "large", "anywhere": "small"}, id="scarce memory"),
        pytest.param([task(avoid=frozenset({"d"}))], [device("d")], {}, id="avoided"),
        pytest.param([task()], [device("d", out="quarantined")], {}, id="out"),
        pytest.param([UNPLANNED], [device("d")], {}, id="no plan for its class"),
        pytest.param([UNPLANNED], [device("d", free=None)], {}, id="no plan, unknown memory"),
        pytest.param([task()], [device("a", 10.0), device("b", 10.0), UNMEASURED], {"a": "c"},
                     id="unmeasured counts as usual"),
        pytest.param([task()], [device("only", None)], {"a": "only"}, id="unmeasured alone"),
    ],
)  # fmt: skip
def test_where_tasks_are_placed(tasks, devices, expected):
    assert where(place(tasks, devices)) == expected


def test_no_device_is_idle_for_nothing():
    tasks = [task(f"t{number}") for number in range(9)]
    placements = place(tasks, [SLOW, busy("fast", 10.0, 50.0)])
    assert len(placements) == 1  # the first would end earlier on the fast one, but not all of them


def test_who_has_waited_long_goes_before_more_work():
    tasks = [task("new", 5000.0, since=1000.0), task("old", 10.0, since=0.0)]
    assert where(place(tasks, [device("d", 10.0)], 1000.0)) == {"old": "d"}


def test_several_jobs_per_device():
    tasks = [task(name) for name in "abc"]
    placements = place(tasks, [device("d", jobs_per_device=2)])
    assert [placement.tasks for placement in placements] == [("a",), ("b",)]
    assert len(place(tasks, [device("d", free=7 * GIB, jobs_per_device=2)])) == 1


# -- pipelines ---------------------------------------------------------------------------------------------------------


def joining(name: str, speedup: float = 1.3, **options) -> CandidateDevice:
    return device(name, joined_speedup=speedup, **options)


@pytest.mark.parametrize(
    ("count", "devices", "sizes"), [(8, 8, [1] * 8), (8, 1, [4]), (12, 3, [4] * 3), (9, 8, [2] + [1] * 7)]
)
def test_tasks_are_joined_as_far_as_all_devices_are_busy(count, devices, sizes):
    placements = place(
        [task(f"t{number}") for number in range(count)], [joining(f"d{number}") for number in range(devices)]
    )
    assert sorted((len(placement.tasks) for placement in placements), reverse=True) == sizes
    assert max(sizes) <= MOST_JOINED


@pytest.mark.parametrize(
    "change",
    [
        {"join": "never"},
        {"tasks": ("a", "b")},
        {"seconds": 100.0},
    ],
)
def test_tasks_that_are_not_joined(change):
    tasks = [replace(task(f"t{number}"), **change) for number in range(4)]
    placements = place(tasks, [joining("d")])
    assert [len(placement.tasks) for placement in placements] == [len(tasks[0].members)]


def test_only_what_is_measured_to_be_faster_is_joined():
    tasks = [task(f"t{number}") for number in range(4)]
    for speedup in (None, 0.9, 1.0):
        assert len(place(tasks, [device("d", joined_speedup=speedup)])[0].tasks) == 1
    always = [replace(waiting, join="always") for waiting in tasks]
    assert len(place(always, [device("d", joined_speedup=0.9)])[0].tasks) == 4


def test_only_tasks_of_one_run_and_base_are_joined():
    tasks = [task("a"), replace(task("b"), run="other"), replace(task("c"), base="other"), task("d")]
    assert [placement.tasks for placement in place(tasks, [joining("x")])] == [("a", "d")]


def test_a_pipeline_has_its_base_once():
    tasks = [task(f"t{number}") for number in range(4)]  # 2 GiB of base, and 2 GiB each
    placements = place(tasks, [joining("d", free=8 * GIB)])
    assert [(len(placement.tasks), placement.peak_bytes) for placement in placements] == [(3, 8 * GIB)]


def test_the_bytes_of_a_pipeline_count_its_largest_task_for_each():
    tasks = [task("a", memory=6 * GIB), task("b", memory=3 * GIB)]  # slots are as large as the largest
    assert len(place(tasks, [joining("d", free=9 * GIB)])[0].tasks) == 1
    assert place(tasks, [joining("d", free=10 * GIB)])[0].peak_bytes == 10 * GIB


# -- several devices per task ------------------------------------------------------------------------------------------


def test_a_task_of_several_devices_takes_them_at_once_the_fastest_leading():
    devices = [device("a", 5.0), device("b", 10.0), device("c", 1.0)]
    assert [placement.devices for placement in place([task(devices=2)], devices)] == [("b", "a")]
    assert place([task(devices=4)], devices) == []


def test_devices_are_kept_for_a_task_of_several_but_not_for_nothing():
    devices = [device("a"), busy("b", 10.0, 60.0)]
    wide = task("wide", 20_000.0, devices=2)  # begins in 60 s, when b is free
    assert place([wide, task("long", 1000.0)], devices) == []  # it would end in 100 s
    assert where(place([wide, task("short", 500.0)], devices)) == {"short": "a"}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_fits_nowhere_is_refused_with_the_bytes_and_the_nearest_device():
    devices = [device("small"), device("large", free=24 * GIB, name="host2:0")]
    sentence = refusal("big", {"x": 32 * GIB}, devices)
    assert sentence is not None
    assert "34,359,738,368 bytes" in sentence
    assert "host2:0, has 24.0 GiB" in sentence


def test_what_fits_somewhere_waits():
    assert refusal("a", {"x": GIB}, [replace(busy("d", 1.0, 60.0), budget=16 * GIB)]) is None
    assert refusal("a", {"x": GIB}, [device("d", free=None)]) is None


def test_refusals_say_what_is_missing():
    out = device("d", name="host1:0", out="quarantined")
    assert "host1:0, which is quarantined" in str(refusal("a", {"x": GIB}, [out]))
    assert "no device" in str(refusal("a", {"x": GIB}, []))
    assert "any of the cluster's devices" in str(refusal("a", {"z": GIB}, [device("d")]))
    assert "2 devices" in str(refusal("a", {"x": GIB}, [device("d"), out], devices=2))
