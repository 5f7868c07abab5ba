from __future__ import annotations

import json

import numpy as np

from wgpu_lora.gpu.buffer_wipe import WipeReport
from wgpu_lora.protect.runs.cleanup import UNREACHABLE, Cleanup, WipeFacts, device_wipe_facts, overwrite


def test_every_part_runs_once_whatever_happens_to_the_others() -> None:
    ran: list[str] = []
    cleanup = Cleanup()

    def part(name: str, error: BaseException | None = None) -> None:
        def wipe() -> WipeFacts | None:
            ran.append(name)
            if error:
                raise error
            return WipeFacts({"bytes": 3}, ["a third of it"] if name == "partly" else []) if name != "bare" else None

        cleanup.add(name, wipe)

    part("first", KeyboardInterrupt("with the secret in its message"))
    part("bare")
    part("partly")
    part("last")
    facts = cleanup.run(["swap"])
    assert ran == ["first", "bare", "partly", "last"]
    assert facts["wiped"] == [{"what": "bare"}, {"what": "partly", "bytes": 3}, {"what": "last", "bytes": 3}]
    assert facts["not_wiped"] == ["first: KeyboardInterrupt", "partly: a third of it", "swap", *UNREACHABLE]
    assert not facts["complete"]
    assert "secret" not in json.dumps(facts)


def test_a_cleanup_in_which_all_went_well_is_complete() -> None:
    cleanup = Cleanup()
    cleanup.add("device", lambda: device_wipe_facts(WipeReport(2, 100, 1, 50, 0.12345)))
    facts = cleanup.run([])
    assert facts["complete"]
    assert facts["wiped"] == [
        {
            "what": "device", "buffers": 2, "bytes": 100, "kept_buffers": 1, "kept_bytes": 50, "seconds": 0.123,
            "verified": True,
        }
    ]  # fmt: skip
    failed = device_wipe_facts(WipeReport(not_wiped=["1 buffer, 64 bytes: the device was lost"]))
    assert failed.not_wiped == ["1 buffer, 64 bytes: the device was lost"]
    assert not failed.facts["verified"]


def test_host_buffers_are_overwritten_in_place() -> None:
    rows = [np.arange(5, dtype=np.int32), np.ones((3, 4), np.float32)[:, ::2], np.ones(2, np.uint64)]
    archive = bytearray(b"secret")
    view = memoryview(bytearray(b"more"))
    readonly = np.frombuffer(b"stays", np.uint8)
    report = overwrite([*rows, archive, view, bytearray(), readonly, memoryview(b"stays")])
    assert not any(array.any() for array in rows)
    assert not any(archive)
    assert not any(view)
    assert report.facts == {"buffers": 5, "bytes": 20 + 24 + 16 + 6 + 4}
    assert report.not_wiped == ["2 of its buffers are read-only"]
