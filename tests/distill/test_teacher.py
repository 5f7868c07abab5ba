"""A teacher's supports against its full logits, and the draws of random tokens."""

import numpy as np
import pytest
from support.models import allocated, full_logits, golden, golden_rows, load, save_golden_adapter

from wgpu_lora.errors import UserError
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.batch_inputs import Segment, Tables
from wgpu_lora.train.distill import teacher
from wgpu_lora.train.distill.teacher import Teacher, TopK
from wgpu_lora.train.distill.teacher_cache import id_bits, pack_ids, packed_bytes, unpack_ids
from wgpu_lora.train.distill.teacher_logits import random_tokens

TOKENS = 40


def segments_of(architecture, slot=None):
    tensors = golden(architecture)
    pairs = zip(golden_rows(tensors, "input_ids"), golden_rows(tensors, "labels"), strict=True)
    return [Segment(ids, labels, slot) for ids, labels in pairs]


def supports(model, support_size, segments, rows, adapters=None, buckets=(16, TOKENS)):
    tables = Tables.declare(model.config.tables(), TOKENS)
    instance = Teacher(model, adapters, buckets, tables, support_size)
    storages = instance.storages()
    with allocated(model.device, max(instance.programs(), key=lambda p: p.plan().nbytes), storages) as arena:
        tables.upload(model.device)
        instance.use(arena)
        return instance.supports(segments, rows)


def check(support, logits, support_size, vocab_size):
    """logits: f64 [n, V]."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, : support_size.top_k]
    np.testing.assert_array_equal(support.ids[:, : support_size.top_k], order)
    assert support.ids.shape == (len(logits), support_size.top_k + support_size.random)
    assert all(len(set(ids)) == len(ids) for ids in support.ids.tolist())
    np.testing.assert_allclose(support.logits, np.take_along_axis(logits, support.ids.astype(int), 1), atol=2e-5)
    np.testing.assert_allclose(support.lse, np.logaddexp.reduce(logits, axis=1), atol=2e-5)
    factor = (vocab_size - support_size.top_k) / support_size.random if support_size.random else 1.0
    np.testing.assert_allclose(np.exp(support.correction), factor, rtol=1e-6)
    assert support.top_k == support_size.top_k


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunks"])
def test_supports_are_those_of_the_full_logits(device, tmp_path, monkeypatch, chunked):
    if chunked:
        monkeypatch.setattr(teacher, "CHUNK_BYTES", 1)  # 128 tokens of the vocabulary, the fewest
    model = load("qwen2", device)
    size = model.config.vocab_size
    assert size > 128
    adapters = load_adapters(device, model.config, [save_golden_adapter("qwen2", tmp_path / "a")])
    for slot in (None, 0):
        segments = segments_of("qwen2", slot)
        if slot is None:
            logits = full_logits(model, [Segment(item.input_ids) for item in segments])
        for support_size in (TopK(size, 0), TopK(5, 7), TopK(size - 7, 7)) if slot is None else (TopK(5, 0),):
            actual = supports(model, support_size, segments, [3, 1, 2], adapters)
            for segment, support, row in zip(segments, actual, logits, strict=True):
                positions = np.flatnonzero(segment.labels[1:] != -100)
                if slot is None:
                    check(support, row[positions].astype(np.float64), support_size, size)
                else:  # the adapter changes what the teacher says
                    assert np.abs(support.lse - np.logaddexp.reduce(row[positions], axis=1)).max() > 1e-4


def test_random_tokens_depend_on_seed_row_and_position_only(device):
    model, support_size = load("qwen2", device), TopK(4, 8, seed=5)
    segments = segments_of("qwen2")
    two = supports(model, support_size, segments, [3, 1, 2])[1]
    (alone,) = supports(model, support_size, segments[1:2], [1])
    np.testing.assert_array_equal(two.ids, alone.ids)
    (other,) = supports(model, support_size, segments[1:2], [0])
    assert (two.ids[:, 4:] != other.ids[:, 4:]).any()
    (other,) = supports(model, TopK(4, 8, seed=6), segments[1:2], [1])
    assert (two.ids[:, 4:] != other.ids[:, 4:]).any()
    np.testing.assert_array_equal(two.ids[:, :4], other.ids[:, :4])


@pytest.mark.parametrize("size", [2, 5, 64, 211])
def test_draws_are_uniform_and_without_replacement(size):
    token_ids = random_tokens(7, 3, np.arange(4000), size, size)
    np.testing.assert_array_equal(np.sort(token_ids, axis=1), np.broadcast_to(np.arange(size), token_ids.shape))
    expected = 4000 / size
    for column in token_ids.T[:3]:
        chi_square = ((np.bincount(column, minlength=size) - expected) ** 2 / expected).sum()
        assert chi_square < size - 1 + 5 * np.sqrt(2 * size)
    np.testing.assert_array_equal(random_tokens(7, 3, np.array([17]), size, size)[0], token_ids[17])


def test_the_sum_over_random_tokens_is_unbiased():
    """As the correction says: E[sum over R] (V - K) / R = the sum over all V - K, here with no top K."""
    values = np.random.default_rng(0).random(1000)
    sums = values[random_tokens(1, 2, np.arange(4000), 16, 1000)].sum(axis=1) * 1000 / 16
    assert abs(sums.mean() - values.sum()) < 5 * sums.std() / np.sqrt(len(sums))


@pytest.mark.parametrize("size", [1, 2, 211, 65536, 65537, 151936, 1 << 25])
def test_packed_ids(rng, size):
    ids = rng.integers(0, size, (5, 13)).astype(np.uint32)
    ids[0] = size - 1
    bits = id_bits(size)
    packed = pack_ids(ids, bits)
    assert packed.shape == (5, packed_bytes(13, bits))
    np.testing.assert_array_equal(unpack_ids(packed, 13, bits), ids)


def test_more_tokens_than_the_vocabulary_has_are_refused(device):
    model = load("qwen2", device)
    tables = Tables.declare(model.config.tables(), TOKENS)
    for support_size, message in [(TopK(200, 128), "more tokens than the teacher's vocabulary of")]:
        with pytest.raises(UserError, match=message):
            Teacher(model, None, [TOKENS], tables, support_size)
    with pytest.raises(UserError, match=r"more than 1,024"):
        TopK(1025, 0).check(5000)
