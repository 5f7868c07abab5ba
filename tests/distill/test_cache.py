"""Teacher caches: what is in them, that an interrupted one continues with the same bytes, and what is refused."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from support.cli import write_rows
from support.models import full_logits, save_golden_adapter, words_model

from wgpu_lora import evaluate, teacher_cache
from wgpu_lora.data import tokenize_source
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.files.locks import locked
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.distill import teacher_cache as cache
from wgpu_lora.train.distill import teacher_cache_writer
from wgpu_lora.train.distill.teacher_cache import CACHE, TABLE, TeacherCache

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
ROWS = [{"prompt": f"w{i} w{i + 1}", "completion": " ".join(f"w{(7 * i + j) % 200}" for j in range(5 + i % 4))}
        for i in range(8)]  # fmt: skip
SIZE = 211
OPTIONS = {"top_k": 4, "random": 3, "length": 9, "batch_tokens": 40, "progress_bar": False}


@pytest.fixture(scope="module")
def teacher(device, tmp_path_factory):
    """A model of 211 words; all tests share its weights on the device."""
    return open_model(str(words_model(tmp_path_factory.mktemp("teacher") / "model", TEMPLATE)), device, "f32")


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(teacher_cache_writer, "SHARD_POSITIONS", 16)


def prepared(teacher, data, length=9, **options):
    return tokenize_source(data, teacher.tokenizer, max_length=length, vocab_size=SIZE, **options)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def logits_of(teacher, row):
    """Of the trained positions, f64 [n, V]."""
    (logits,) = full_logits(teacher, [Segment(row.input_ids)])
    return logits[np.flatnonzero(row.labels[1:] != -100)].astype(np.float64)


def log_softmax(logits):
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def test_a_cache_has_what_the_teacher_says(teacher, data, tmp_path):
    cache = teacher_cache(teacher, data, tmp_path / "cache", **OPTIONS)
    rows = prepared(teacher, data)
    cache.check(rows, teacher.tokenizer)
    assert (cache.top_k, cache.random, cache.tokens, cache.vocab_size, cache.length) == (4, 3, 7, SIZE, 9)
    assert len(cache.header.shards) > 1
    for row in rows.rows:
        support, logits = cache.support(row.index), logits_of(teacher, row)
        np.testing.assert_array_equal(support.ids[:, :4], np.argsort(-logits, axis=1, kind="stable")[:, :4])
        assert all(len(set(ids)) == 7 for ids in support.ids.tolist())
        expected = np.take_along_axis(log_softmax(logits), support.ids.astype(int), 1)
        np.testing.assert_allclose(support.logits - support.lse[:, None], expected, rtol=2**-10)  # f16 has 11 bits
        np.testing.assert_allclose(support.lse, np.logaddexp.reduce(logits, axis=1), rtol=1e-5)
        np.testing.assert_allclose(support.correction, np.log((SIZE - 4) / 3))
    facts = json.loads((tmp_path / "cache" / CACHE).read_text())
    assert facts["teacher"]["weights"] == teacher.weights_sha256
    assert facts["data"]["sha256"] == rows.digest


def test_with_the_whole_vocabulary_the_divergence_is_exact(teacher, data, tmp_path):
    """From a cache of f32; that of f16 is as exact as its logits."""
    whole = {**OPTIONS, "top_k": SIZE, "random": 0, "samples": 3}
    row = prepared(teacher, data).rows[1]
    p = log_softmax(logits_of(teacher, row))
    q = log_softmax(np.random.default_rng(0).normal(size=p.shape))
    exact = (np.exp(p) * (p - q)).sum(axis=1)
    for dtype, tolerance in (("f32", 1e-6), ("f16", 2e-3)):
        support = teacher_cache(teacher, data, tmp_path / dtype, logits_dtype=dtype, **whole).support(row.index)
        stored = (support.logits - support.lse[:, None]).astype(np.float64)
        got = (np.exp(stored) * (stored - np.take_along_axis(q, support.ids.astype(int), 1))).sum(axis=1)
        np.testing.assert_allclose(got, exact, atol=tolerance * max(1, exact.max()), rtol=0)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_teacher_with_an_adapter_says_what_evaluate_measures(teacher, data, tmp_path, dora):
    adapter = save_golden_adapter("mistral", tmp_path / "adapter", use_dora=dora)
    whole = {**OPTIONS, "top_k": SIZE, "random": 0, "logits_dtype": "f32"}
    cache = teacher_cache(teacher, data, tmp_path / "cache", adapter=adapter, **whole)
    losses = []
    for row in prepared(teacher, data).rows:
        support, targets = cache.support(row.index), row.labels[1:][row.labels[1:] != -100]
        losses += list(support.lse - support.logits[support.ids == targets[:, None]])
    expected = evaluate(teacher, data, adapter=adapter, max_length=9, run_log=False, progress_bar=False)
    assert np.mean(losses) == pytest.approx(expected.loss, rel=1e-5)
    assert len(losses) == expected.tokens


class Stopping(Events):
    def __init__(self, at):
        self.at = at

    def evaluating(self, evaluating):
        if evaluating.rows >= self.at:
            raise KeyboardInterrupt


def test_an_interrupted_cache_continues_with_the_same_bytes(teacher, data, tmp_path):
    whole, other = tmp_path / "whole", tmp_path / "other"
    teacher_cache(teacher, data, whole, **OPTIONS)
    shards = sorted(path.name for path in whole.glob("shard-*"))
    assert len(shards) >= 3
    for at in (0, 3, 6):
        with pytest.raises(KeyboardInterrupt):
            teacher_cache(teacher, data, other, events=Stopping(at), **OPTIONS)
        with pytest.raises(UserError, match=r"is not finished, since it has \d of 8 rows: run teacher-cache again"):
            TeacherCache.open(other)
    (other / ".shard-00001.safetensors.abcdefgh.tmp").write_bytes(b"of a killed process")
    (other / shards[-1]).write_bytes(b"written, but not in cache.json yet")
    before = [(other / shards[0]).stat().st_mtime_ns]
    teacher_cache(teacher, data, other, **OPTIONS)
    assert files(other) == files(whole)
    assert before == [(other / shards[0]).stat().st_mtime_ns], "finished shards are not made again"
    teacher_cache(teacher, data, other, **OPTIONS)  # nothing is left to do
    assert files(other) == files(whole)


def header_of(cached):
    """As earlier versions wrote it, which is without a digest of its own."""
    return {name: fact for name, fact in json.loads((cached.path / CACHE).read_text()).items() if name != "sha256"}


@pytest.fixture
def cached(teacher, data, tmp_path):
    return teacher_cache(teacher, data, tmp_path / "cache", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=4, not top_k=5"),
        ({"random": 4}, "random=3, not random=4"),
        ({"seed": 1}, "seed=0, not seed=1"),
        ({"samples": 2}, "no samples, not samples=2"),
        ({"logits_dtype": "f32"}, "logits_dtype='f16', not logits_dtype='f32'"),
        ({"length": 8}, "length=9, not length=8"),
        ({"enable_thinking": True}, "no enable_thinking, not enable_thinking=True"),
        ({"completion_only_loss": False}, "completion_only_loss=True, not completion_only_loss=False"),
    ],
)
def test_options_of_another_cache_are_refused(teacher, data, cached, options, message):
    before = files(cached.path)
    with pytest.raises(UserError) as raised:
        teacher_cache(teacher, data, cached.path, **{**OPTIONS, **options})
    assert f"was begun with {message}: give the same options" in str(raised.value)
    assert files(cached.path) == before


def test_another_teacher_or_other_data_are_refused_on_continuing(teacher, data, cached, tmp_path):
    adapter = save_golden_adapter("mistral", tmp_path / "adapter")
    with pytest.raises(UserError, match="was begun with another adapter of the teacher"):
        teacher_cache(teacher, data, cached.path, adapter=adapter, **OPTIONS)
    with pytest.raises(UserError, match="was begun with other data"):
        teacher_cache(teacher, write_rows(tmp_path / "more.jsonl", ROWS[:-1]), cached.path, **OPTIONS)
    header = header_of(cached)
    (cached.path / CACHE).write_text(json.dumps(header | {"teacher": {**header["teacher"], "config": "0" * 64}}))
    with pytest.raises(UserError, match=r"was begun with another configuration of the teacher \(SHA-256 000000000000"):
        teacher_cache(teacher, data, cached.path, **OPTIONS)
    header["teacher"]["weights"] = "0" * 64
    for shards in (header["shards"], header["shards"][:1]):  # also if nothing is left to do
        (cached.path / CACHE).write_text(json.dumps(header | {"shards": shards}))
        with pytest.raises(UserError, match="was begun with another teacher, whose weights have the SHA-256 0000"):
            teacher_cache(teacher, data, cached.path, **OPTIONS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-3]), r"is truncated to [\d,]+ of [\d,]+ bytes"),
        (lambda shard: shard.unlink(), "is missing"),
    ],
)
def test_shards_that_are_not_whole_are_named(cached, damage, message):
    shard = cached.header.shards[1].file
    damage(cached.path / shard)
    with pytest.raises(UserError, match=rf"{shard} {message}"):
        TeacherCache.open(cached.path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_changed_shards_are_named(teacher, data, cached, monkeypatch):
    shard = cached.header.shards[1].file
    row = prepared(teacher, data).rows[cached.header.shards[0].rows].index
    flip(cached.path / shard)
    tampered = TeacherCache.open(cached.path)
    with pytest.raises(UserError, match=rf"{shard} is damaged"):
        tampered.check(prepared(teacher, data), teacher.tokenizer)
    monkeypatch.setattr(cache, "AT_ONCE", 0)  # as if it were large
    tampered.check(prepared(teacher, data), teacher.tokenizer)
    assert len(tampered.support(0).ids)  # of the first shard
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{shard} is damaged"):
            tampered.support(row)
    with pytest.raises(UserError, match=rf"{shard} is missing, truncated or changed"):
        teacher_cache(teacher, data, tampered.path, **OPTIONS)
    flip(tampered.path / TABLE)
    with pytest.raises(UserError, match=rf"{TABLE} is damaged"):
        TeacherCache.open(tampered.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["logprobs"].__setitem__((0, 1), np.nan),
        lambda arrays: arrays["lse"].__setitem__(0, np.inf),
        lambda arrays: arrays["logprobs"].__setitem__((0, 0), 1),
        lambda arrays: arrays.update(logprobs=arrays["logprobs"][:, ::-1].copy()),
    ],
    ids=["nan", "endless", "positive", "shuffled"],
)
def test_logits_that_no_teacher_gives_are_refused(cached, change):
    """Where cache.json was changed with the shard."""
    facts = header_of(cached)
    first = facts["shards"][0]
    path = cached.path / first["file"]
    arrays = load_file(path)
    change(arrays)
    path.write_bytes(save(arrays))
    first["sha256"] = file_digest(path)
    (cached.path / CACHE).write_text(json.dumps(facts))
    with pytest.raises(UserError, match=rf"{first['file']} is damaged"):
        TeacherCache.open(cached.path).support(0)


ELSEWHERE = {"sha256": "", "bytes": 1, "rows": 8, "positions": 1}
NOT_WRITTEN = "is damaged.*not what was written"


@pytest.mark.parametrize(
    ("changes", "old_message", "digest"),
    [
        ({"schema": 2}, "has the schema 2, but this version reads 1", None),
        ({"top_k": 0}, "is damaged", "is damaged"),
        ({"rows": "8"}, "'rows' must be a whole number", "is damaged"),
        ({"random": True}, "'random' must be a whole number, not true", "is damaged"),
        ({"options": {"logits_dtype": "f16", "seed": "1"}}, "is damaged", "is damaged"),
        ({"shards": [{"file": "shard-00000.safetensors", **ELSEWHERE}]}, f"{TABLE} is damaged", "is damaged"),
        ({"shards": [{"file": "../x", **ELSEWHERE}]}, "is damaged", "is damaged"),
        ({"top_k": 7, "random": 3}, None, "not what was written"),
        ({"tokenizer": "0" * 64}, None, "not what was written"),
        ({"template": None}, None, "not what was written"),
    ],
)
def test_damaged_headers_are_refused(cached, changes, old_message, digest):
    path = cached.path / CACHE
    old, whole = header_of(cached), json.loads(path.read_text())
    for header, message in ((old, old_message), (whole, digest)):
        path.write_text(json.dumps(header | changes))
        if message:
            with pytest.raises(UserError, match=message):
                TeacherCache.open(cached.path)


def test_other_rows_tokenizers_and_templates_are_refused(teacher, data, cached, tmp_path):
    rows, tokenizer = prepared(teacher, data), teacher.tokenizer

    def refused(message, rows=rows, tokenizer=tokenizer, kwargs=None):
        with pytest.raises(UserError, match=message):
            cached.check(rows, tokenizer, kwargs)

    other = words_model(tmp_path / "other", TEMPLATE.replace("role", "role|upper"))
    refused("another chat template", tokenizer=open_model(str(other), teacher.device).tokenizer)
    refused("another chat template", kwargs={"enable_thinking": True})
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    refused("another tokenizer", tokenizer=open_model(str(other), teacher.device).tokenizer)
    longer = write_rows(tmp_path / "longer.jsonl", [*ROWS, *ROWS[:2]])
    refused("it has 8 rows, and 2 rows of 10 are missing", prepared(teacher, longer))
    swapped = write_rows(tmp_path / "swapped.jsonl", [ROWS[1], ROWS[0], *ROWS[2:]])
    refused("made of other data, .*rows.jsonl .* 2 rows of 8 differ", prepared(teacher, swapped))
    refused("has rows cut to 9 tokens, but here they may have 7: use max_length=9", prepared(teacher, data, 7))
    refused("made of other trained tokens of", prepared(teacher, data, completion_only_loss=False))
    some = replace(rows, rows=rows.rows[2:5], digest="of the held-out rows")
    cached.check(some, tokenizer)  # as they are held out
    cached.check(prepared(teacher, write_rows(tmp_path / "fewer.jsonl", ROWS[:3])), tokenizer)


def test_two_processes_do_not_write_the_same_cache(teacher, data, tmp_path):
    with (
        locked(tmp_path / "cache" / CACHE, "--output"),
        pytest.raises(UserError, match="Another process is writing to"),
    ):
        teacher_cache(teacher, data, tmp_path / "cache", **OPTIONS)
    teacher_cache(teacher, data, tmp_path / "cache", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 200, "random": 12}, "more tokens than the teacher's vocabulary of 211"),
        ({"samples": 9}, "is more than the 8 rows of"),
        ({"length": 100_000}, "is more than this model's"),
        ({"top_k": 0}, "must be a whole number of at least 1"),
        ({"logits_dtype": "f8"}, "must be one of f16, f32"),
        ({"data": "empty.jsonl"}, "empty"),
        ({"output": "rows.jsonl/below/it"}, r"rows\.jsonl is not a directory: choose another output"),
        ({"output": "taken"}, "exists already and is not a teacher cache"),
        ({}, r"The cache takes [\d,]+ bytes, but .* has 1 free"),
    ],
)
def test_what_cannot_be_made_writes_nothing(teacher, data, tmp_path, monkeypatch, options, message):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("")
    if not options:
        usage = SimpleNamespace(total=10, used=9, free=1)
        monkeypatch.setattr(teacher_cache_writer.shutil, "disk_usage", lambda path: usage)
    before = sorted(tmp_path.rglob("*"))
    arguments = {"data": "rows.jsonl", "output": "cache", **OPTIONS, **options}
    rows, output = (tmp_path / arguments.pop(name) for name in ("data", "output"))
    with pytest.raises(UserError, match=message):
        teacher_cache(teacher, rows, output, **arguments)
    assert sorted(tmp_path.rglob("*")) == before
