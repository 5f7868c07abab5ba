"""Rows of a sample that share their prompt's rows in a batch (`models.batch_inputs`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.training import golden_arguments

from wgpu_lora.data.tokenized_data import Row, common_prefix
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import ForkPlacement, Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.finetune import Job, prepare_job
from wgpu_lora.train.objectives.objective import Group


def pair(rng: np.random.Generator, common: int, *own: int) -> list[Segment]:
    prompt = rng.integers(0, 250, common)
    rows = [np.concatenate([prompt, rng.integers(0, 250, size)]) for size in own]
    labels = [np.where(np.arange(len(row)) <= common, -100, row) for row in rows]
    return [Segment(row, label) for row, label in zip(rows, labels, strict=True)]


def forked(segments: list[Segment], prefix: int) -> list[Segment]:
    return [segments[0], replace(segments[1], prefix=prefix)]


@pytest.fixture
def job(device: Device, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    args = golden_arguments(tmp_path, getattr(request, "param", "llama"), base_dtype="f32")
    return prepare_job(args, open_model(args.model, device, "f32"))


@pytest.mark.drivers
@pytest.mark.parametrize("job", ["qwen2", "llama"], indirect=True)
def test_a_fork_gives_the_gradients_of_rows_apart(job: Job, device: Device) -> None:
    rng = np.random.default_rng(0)
    first, alone, second = pair(rng, 5, 3, 2), pair(rng, 2, 3)[0], pair(rng, 1, 2, 4)
    apart = [*first, alone, *second]
    together = [*forked(first, 5), alone, *forked(second, 1)]
    assert sum(s.tokens for s in together) == sum(s.tokens for s in apart) - 6
    session = job.session
    session.allocate()
    job.run.place_initial(session)
    found = []
    for segments in (apart, together):
        session.begin()
        session.accumulate([Group(tuple(segments), weight=0.1)])
        grads = session.adapters.read(device, 0, session.adapters.grads)
        found.append((session.totals.read_loss(device, 0), {k: [m.copy() for m in pair] for k, pair in grads.items()}))
        assert session.optimizer.finite(device, 0)  # zeroes the gradients
    session.close()
    (loss, expected), (other, got) = found
    assert other == pytest.approx(loss, rel=1e-6)
    for name, matrices in expected.items():
        for a, b in zip(matrices, got[name], strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-6 * np.abs(a).max())


def test_the_common_prefix_ends_before_what_differs_or_is_trained() -> None:
    ids = np.arange(8)

    def row(changed: int, trained: int) -> Row:
        return Row(np.where(np.arange(8) < changed, ids, 99), np.where(np.arange(8) < trained, -100, ids), 0)

    assert common_prefix([row(8, 5), row(6, 6)]) == 4  # row 4 predicts the trained token 5
    assert common_prefix([row(8, 8), row(3, 8)]) == 3
    assert common_prefix([row(8, 8), row(8, 8)]) == 7  # the second row keeps one of its own
    assert common_prefix([row(0, 8), row(8, 8)]) == 0
    assert common_prefix([row(8, 5)]) == 0
    assert common_prefix([row(8, 5), row(6, 6)], longest=7) == 0


def test_models_with_windows_share_only_what_windows_hold(job: Job, device: Device, tmp_path: Path) -> None:
    assert job.session.model.config.longest_fork() is None
    windowed = open_model(golden_arguments(tmp_path, "mistral").model, device, "f32").config
    assert windowed.longest_fork() == min(w for w in windowed.sliding_windows if w)  # type: ignore[attr-defined]


def test_every_token_of_a_fork_sees_its_own_sequence_and_no_other() -> None:
    placing = ForkPlacement(20)
    segments = pair(np.random.default_rng(0), 4, 3, 5)
    rows = list(placing.add([segments[0], replace(segments[1], prefix=4), Segment(np.zeros(3, np.int64))]))
    at = placing.rows
    for mine in rows:
        for position, row in enumerate(mine):
            seen = mine[: position + 1]
            assert at.positions[row] == position
            assert sorted(seen) == list(range(at.first[row], at.stop[row]))
    sees = np.array([[at.first[q] <= k < at.stop[q] for k in range(15)] for q in range(15)])
    for key in range(15):
        query = np.arange(15)
        told = (query >= at.since[key]) & (query < at.last[key]) & ~((query >= at.first[key]) & (query < key))
        assert (told == sees[:, key]).all()
