"""What a run leaves in a device's memory when its buffers are wiped: nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.training import golden_job, random_rows

from wgpu_lora.gpu.buffer_wipe import Wiper
from wgpu_lora.gpu.device import Device


def test_all_that_a_run_kept_on_the_device_is_overwritten(device: Device, tmp_path: Path) -> None:
    others = list(device.live)  # of other tests
    held_out = random_rows(tmp_path / "heldout.jsonl", 4, 40)
    job = golden_job(device, tmp_path, "qwen2", "nf4", max_steps=2, eval_data=str(held_out), eval_steps=1, save_steps=1)
    dirty: set[str] = set()
    with Wiper(device) as wiper:
        overwrite = device.before_free
        assert overwrite is not None

        def watched(buffer: Any) -> None:
            if device.read(buffer).any():
                dirty.add(buffer.label)
            overwrite(buffer)
            assert not device.read(buffer).any()

        device.before_free = watched
        job.train()
        weights = [s.buffer for s in job.session.model.decoder.storages() if s.buffer is not None]
        report = wiper.wipe(keep=[*others, *weights])
    assert report.verified, report
    assert {"activations", "params 0", "second_moment 0"} <= dirty
    assert any(label.startswith("targets") for label in dirty)
    assert device.live <= {*others, *weights}
