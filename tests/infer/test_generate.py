"""Generation with a cache says what whole forward passes say, for each sequence as if it were alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import path_of
from support.models import (
    ARCHITECTURES,
    FIXTURES,
    ROWS,
    allocated,
    full_logits,
    golden,
    golden_rows,
    load,
    relative_error,
    save_golden_adapter,
)
from support.rows.data import small_tokenizer

from wgpu_lora.data import Row, TokenizedData
from wgpu_lora.data.row_counts import RowCounts
from wgpu_lora.data.row_files import FileSource
from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.generator import Generation, Generator
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.infer.perplexity import Evaluator, evaluate
from wgpu_lora.infer.prompts import chat_prompt
from wgpu_lora.infer.request import Sampler
from wgpu_lora.models.adapter_set import fix_gains
from wgpu_lora.models.batch_inputs import Segment

# Prefill pieces are as long as a decode step has rows, so that both share their compiled kernels.
BATCH, CAPACITY = 4, 16


@pytest.fixture(scope="module")
def mistral(device, tmp_path_factory):
    """(generator, model, adapters): every layer has a window of 6; two adapters of different ranks, one a DoRA."""
    directory = tmp_path_factory.mktemp("adapters")
    model = load("mistral", device)
    saved = [
        save_golden_adapter("mistral", directory / "a"),
        save_golden_adapter("mistral", directory / "b", -2.0, rank=2, use_dora=True),
    ]
    adapters = load_adapters(device, model.config, saved)
    fix_gains(model, adapters)
    with Generator(model, adapters, CAPACITY, BATCH, (BATCH,)) as generator:
        yield generator, model, adapters


@pytest.fixture(scope="module")
def prompts():
    return [row[:n].tolist() for row, n in zip(golden_rows(golden("mistral"), "input_ids"), (5, 3, 7), strict=True)]


def next_logits(generator, prompt):
    logits = []
    generator.generate([prompt], max_new_tokens=1, on_token=lambda *_: logits.append(generator.last_logits()))
    return logits[0]


def check_every_prefix(generator, model, ids):
    (expected,) = full_logits(model, [Segment(ids)])
    for length in range(1, len(ids) + 1):
        logits = next_logits(generator, ids[:length])
        assert relative_error(logits, expected[length - 1]) < 1e-5, f"{length} tokens"


@pytest.mark.drivers
def test_prefill_in_pieces_equals_a_full_pass_with_windows_in_every_layer(mistral):
    generator, model, _ = mistral
    check_every_prefix(generator, model, max(golden_rows(golden("mistral"), "input_ids"), key=len))


def test_prefill_in_pieces_equals_a_full_pass_with_a_window_in_one_layer(device):
    model = load("qwen3", device)
    with Generator(model, None, CAPACITY, BATCH, (BATCH,)) as generator:
        check_every_prefix(generator, model, max(golden_rows(golden("qwen3"), "input_ids"), key=len))


def test_greedy_is_the_argmax_of_a_full_pass_at_every_step(mistral, prompts):
    generator, model, adapters = mistral
    slots = [1, None, 0]
    generator.generate(prompts, slots, max_new_tokens=1)  # steps that compile are not timed
    results = generator.generate(prompts, slots, max_new_tokens=8)
    for prompt, slot, result in zip(prompts, slots, results, strict=True):
        assert (result.stop_reason, len(result.token_ids), result.prompt_tokens) == ("length", 8, len(prompt))
        ids = np.array(prompt + result.token_ids)
        (logits,) = full_logits(model, [Segment(ids, slot=slot)], adapters)
        assert result.token_ids == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist()
        assert result.prefill_speed > 0
        assert result.decode_speed > 0
    assert len({tuple(result.token_ids) for result in results}) == 3


def test_decode_logits_equal_those_of_a_full_pass(mistral, prompts):
    generator, model, adapters = mistral
    logits = []
    (result,) = generator.generate(
        prompts[:1], [1], max_new_tokens=10, on_token=lambda *_: logits.append(generator.last_logits())
    )
    (expected,) = full_logits(model, [Segment(np.array(prompts[0] + result.token_ids), slot=1)], adapters)
    assert relative_error(np.array(logits), expected[len(prompts[0]) - 1 : -1]) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_batch_with_different_slots_equals_each_alone(mistral, prompts, temperature):
    generator = mistral[0]
    slots, options = [None, 0, 1], {"max_new_tokens": 8, "temperature": temperature, "top_p": 0.9, "seed": 5}
    events = []
    together = generator.generate(prompts, slots, **options, on_token=lambda *event: events.append(event))
    other_seed = [result.token_ids for result in generator.generate(prompts, slots, **{**options, "seed": 6})]
    assert ([result.token_ids for result in together] == other_seed) == (not temperature)
    for i, (prompt, slot, result) in enumerate(zip(prompts, slots, together, strict=True)):
        assert generator.generate([prompt], [slot], **options)[0].token_ids == result.token_ids
        assert [token for number, token in events if number == i] == result.token_ids


def test_more_prompts_than_the_batch_run_in_turns(mistral, prompts):
    generator = mistral[0]
    slots = [0, None, 1, 0, 1, None]
    results = generator.generate(prompts * 2, slots, max_new_tokens=3)
    for prompt, slot, result in zip(prompts * 2, slots, results, strict=True):
        assert generator.generate([prompt], [slot], max_new_tokens=3)[0].token_ids == result.token_ids


def test_a_stop_token_ends_its_own_sequence_and_is_left_out(mistral, prompts):
    generator = mistral[0]
    free = generator.generate(prompts, max_new_tokens=6)
    stop = free[0].token_ids[2]
    results = generator.generate(prompts, max_new_tokens=6, stop_ids={stop})
    for before, result in zip(free, results, strict=True):
        cut = before.token_ids.index(stop) if stop in before.token_ids else None
        assert result.token_ids == before.token_ids[:cut]
        assert result.stop_reason == ("length" if cut is None else "stop")
    assert results[0].stop_reason == "stop"


def test_stopping_is_heard_between_tokens_and_before_the_prompt(mistral, prompts):
    generator = mistral[0]
    results = [Generation(len(prompt)) for prompt in prompts[:2]]
    events = []
    for event in generator.tokens(prompts[:2], None, results, Sampler(), 9, should_stop=lambda: len(events) >= 3):
        events.append(event)
    assert [len(result.token_ids) for result in results] == [2, 2]
    assert {result.stop_reason for result in results} == {"interrupt"}
    (result,) = results = [Generation(len(prompts[0]))]
    assert not list(generator.tokens(prompts[:1], None, results, Sampler(), 9, should_stop=lambda: True))
    assert (result.token_ids, result.stop_reason) == ([], "interrupt")
    assert generator.generate(prompts[:1], max_new_tokens=3)[0].stop_reason == "length"  # and nothing is left behind


def test_a_full_cache_ends_a_sequence_and_not_its_neighbour(mistral, prompts):
    long = (prompts[0] * 4)[: CAPACITY - 2]
    results = mistral[0].generate([long, prompts[1], [*long, 3, 4]], max_new_tokens=6)
    assert [result.stop_reason for result in results] == ["capacity", "length", "capacity"]
    # the last token needs no row of its own
    assert [len(result.token_ids) for result in results] == [3, 6, 1]


@pytest.mark.parametrize(
    ("prompt", "slot", "new_tokens", "message"),
    [
        ([], None, 1, "no tokens"),
        ([1] * (CAPACITY + 1), None, 1, "17 tokens, but a sequence may have 16 here"),
        ([211], None, 1, "vocabulary of 211"),
        ([-1], None, 1, "vocabulary of 211"),
        ([1], 2, 1, "no adapter 2: 2 are loaded"),
        ([1], 0, 0, "at least one"),
    ],
)
def test_impossible_requests_are_refused(mistral, prompt, slot, new_tokens, message):
    with pytest.raises(UserError, match=message):
        mistral[0].generate([prompt], [slot], max_new_tokens=new_tokens)


def test_capacities_that_cannot_be_are_refused_and_nothing_is_kept(device):
    model = load("mistral", device)
    before = device.allocated
    with pytest.raises(UserError, match="1 to 128 tokens"):
        Generator(model, capacity=129)
    with pytest.raises(UserError, match="fewer at a time"):
        Generator(model, capacity=128, batch=10**9)
    generator = Generator(model)
    assert (generator.capacity, generator.batch) == (128, 1)
    generator.close()
    assert device.allocated == before


def test_adapters_of_another_model_are_refused(device, tmp_path):
    model = load("mistral", device)
    with pytest.raises(UserError, match=r"its model\.layers\.0\.\S+ is of shape .* but the model's of"):
        load_adapters(device, model.config, [save_golden_adapter("qwen3", tmp_path / "other")])
    matrices = {
        tensor_name(path_of(7, "q_proj"), f): np.zeros(shape, np.float32)
        for f, shape in (("A", (2, 52)), ("B", (48, 2)))
    }
    write_adapter(tmp_path / "deep", matrices, AdapterConfig(r=2))
    with pytest.raises(UserError, match=r"model\.layers\.7\.self_attn\.q_proj, but the model has only 2 layers"):
        load_adapters(device, model.config, [tmp_path / "deep"])


def test_prompts_go_through_the_template_where_there_is_one():
    tokenizer, plain = small_tokenizer("chatml"), small_tokenizer()
    text = tokenizer.decode(chat_prompt(tokenizer, "Why?", "Be brief."), skip_special_tokens=False)
    assert text.index("Be brief.") < text.index("Why?")
    assert text.endswith("<|im_start|>assistant\n")
    assert plain.decode(chat_prompt(plain, "The sky is"), skip_special_tokens=False).endswith("The sky is")
    with pytest.raises(UserError, match="no chat template"):
        chat_prompt(plain, "Why?", "Be brief.")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(device: Device, architecture: str) -> None:
    stored = load_file(FIXTURES / "golden" / "generation.safetensors")
    expected = stored[f"{architecture}.tokens"].tolist()
    prompts = [golden(architecture)["input_ids"][1, :6].tolist(), stored[f"{architecture}.prompt"].tolist()]
    with Generator(load(architecture, device), None, capacity=72, batch=2, buckets=(4,)) as generator:
        together = generator.generate(prompts, max_new_tokens=64)[1]
        (alone,) = generator.generate(prompts[1:], max_new_tokens=64)
    assert together.token_ids == alone.token_ids == expected


# -- losses ------------------------------------------------------------------------------------------------------------


def rows_of(architecture):
    tensors = golden(architecture)
    pairs = zip(golden_rows(tensors, "input_ids"), golden_rows(tensors, "labels"), strict=True)
    return [Row(ids, labels, i) for i, (ids, labels) in enumerate(pairs)]


def prepared(rows):
    trained, total = sum(row.trained_tokens for row in rows), sum(len(row.input_ids) for row in rows)
    return TokenizedData("rows.jsonl", rows, "", 64, RowCounts(FileSource(Path("rows.jsonl"))), trained, total)


def two_adapters(model, architecture, directory):
    """Slot 0 has an adapter of a smaller rank, slot 1 the golden one."""
    smaller = save_golden_adapter(architecture, directory / "smaller", 0.5, rank=3)
    return load_adapters(model.device, model.config, [smaller, save_golden_adapter(architecture, directory / "whole")])


def summed_loss(logits, row):
    """In float64, from logits."""
    logits = logits[:-1].astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    used = row.labels[1:] != -100
    return float((log_sum - logits[np.arange(len(logits)), np.where(used, row.labels[1:], 0)])[used].sum())


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        pytest.param(a, b, marks=[pytest.mark.drivers] if (a, b) == ("qwen2", "nf4") else [])
        for a in ARCHITECTURES
        for b in ("f32", "nf4")
    ],
)
def test_loss_with_the_adapter_equals_the_golden_one(device, tmp_path, architecture, base):
    model, rows = load(architecture, device, base), rows_of(architecture)
    adapters = two_adapters(model, architecture, tmp_path)
    evaluator = Evaluator(model, adapters, ROWS)
    with allocated(device, evaluator.program, evaluator.storages()) as arena:
        evaluator.build(arena)
        loss, _, tokens = evaluator.loss(rows, slot=1)
    assert tokens == sum(row.trained_tokens for row in rows)
    assert loss == pytest.approx(golden(architecture)[f"loss.{base}"].item(), rel=1e-5)


def test_slots_and_the_base_alone_are_told_apart(device, tmp_path):
    model, rows = load("qwen2", device), rows_of("qwen2")
    adapters = two_adapters(model, "qwen2", tmp_path)
    base = full_logits(model, [Segment(row.input_ids) for row in rows])
    tokens = sum(row.trained_tokens for row in rows)
    expected = sum(summed_loss(logits, row) for logits, row in zip(base, rows, strict=True)) / tokens
    evaluator = Evaluator(model, adapters, ROWS)
    with allocated(device, evaluator.program, evaluator.storages()) as arena:
        evaluator.build(arena)
        losses = [evaluator.loss(rows, slot)[0] for slot in (None, 1, 0, 1, None)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[1] == pytest.approx(golden("qwen2")["loss.f32"].item(), rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-4
    assert abs(losses[2] - losses[1]) > 1e-4
    assert losses[3:] == [losses[1], losses[0]]


def test_evaluate_packs_into_several_batches_and_frees_what_it_took(device):
    model, rows = load("qwen2", device), rows_of("qwen2")
    before = device.allocated
    base = full_logits(model, [Segment(row.input_ids) for row in rows])
    expected = sum(summed_loss(logits, row) for logits, row in zip(base, rows, strict=True))
    result = evaluate(model, prepared(rows * 3), batch_tokens=ROWS)
    assert result.tokens == 3 * sum(row.trained_tokens for row in rows)
    assert result.rows == 3 * len(rows)
    assert result.loss == pytest.approx(3 * expected / result.tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(result.loss))
    assert device.allocated == before


def test_rows_without_a_trained_token_are_refused(device):
    row = Row(np.array([3, 4, 5], np.int32), np.array([4, -100, -100], np.int32), 0)
    with pytest.raises(UserError, match="no trained tokens"):
        evaluate(load("qwen2", device), prepared([row] * 14), batch_tokens=ROWS)
