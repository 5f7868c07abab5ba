"""The engine gives each request what it would get alone, to the bit, and keeps to its plan."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import FIXTURES
from support.models import full_logits, load, relative_error, save_golden_adapter

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.engine import Engine
from wgpu_lora.infer.named_adapters import adapters_on_device, load_adapters
from wgpu_lora.infer.request import Request, Sampler
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import LoadedModel, open_model

SMALL: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "buckets": (16, 64)}


def run(engine: Engine, requests: list[Request]) -> list[list[Any]]:
    """The tokens of requests with their log-probabilities, in order."""
    outputs: dict[int, list[Any]] = {id(request): [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for output in engine.step():
            outputs[id(output.request)].append(output)
    return [[(output.token, output.logprobs) for output in outputs[id(request)]] for request in requests]


def prompts(rng: np.random.Generator, count: int, vocab: int, longest: int = 40) -> list[list[int]]:
    return [rng.integers(3, vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


def adapters_of(engine: Engine, architecture: str, directory: Path) -> list[str]:
    """Four adapters by name: of several ranks, and a DoRA."""
    options = [{"rank": 4}, {"rank": 2}, {"rank": 3, "use_dora": True}, {"rank": 1, "use_rslora": True}]
    for number, more in enumerate(options):
        saved = save_golden_adapter(architecture, directory / str(number), 1.0 - number, **more)
        engine.load_adapter(f"a{number}", *read_adapter_for(engine.model.config, saved))
    return [f"a{number}" for number in range(len(options))]


@pytest.fixture(scope="module")
def qwen2(device: Device) -> LoadedModel:
    return load("qwen2", device)


@pytest.fixture(scope="module")
def engine(qwen2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with four adapters and two slots."""
    instance = Engine(qwen2, **SMALL, max_loras=2, max_lora_rank=4, dora=True)
    adapters_of(instance, "qwen2", tmp_path_factory.mktemp("adapters"))
    yield instance
    instance.close()


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma3_text", "qwen3_5_text", "phi3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_have_the_same_bits_whoever_shares_the_batch(
    device: Device, tmp_path: Path, rng: np.random.Generator, architecture: str, temperature: float
) -> None:
    model = load(architecture, device)
    engine = Engine(model, **SMALL, max_loras=2, max_lora_rank=4, dora=True)
    names = [None, *adapters_of(engine, architecture, tmp_path)]
    many = prompts(rng, 19, model.config.vocab_size)

    def requests() -> list[Request]:
        return [
            Request(list(ids), names[i % 5], Sampler(temperature, seed=i, top_p=0.9), 1 + i % 9, logprobs=2)
            for i, ids in enumerate(many)
        ]

    try:
        together = run(engine, requests())
        alone = [run(engine, [request])[0] for request in requests()]
        again = run(engine, requests()[::-1])[::-1]  # in another order, and with what the prefix cache has
    finally:
        engine.close()
    assert together == alone == again
    assert len({tuple(token for token, _ in answer) for answer in together}) > 5


def test_adapters_change_slots_and_are_those_of_full_passes(
    engine: Engine, qwen2: LoadedModel, tmp_path: Path, rng: np.random.Generator
) -> None:
    ids = rng.integers(3, qwen2.config.vocab_size, 9).tolist()
    outputs = {
        name: run(engine, [Request(ids, name, max_new_tokens=1, logprobs=1)])[0] for name in ("a0", "a3", "a1", "a0")
    }
    with pytest.raises(UserError, match="no adapter 'b'"):
        engine.add(Request(ids, "b"))
    for name, number, rank in (("a0", 0, 4), ("a1", 1, 2)):
        saved = save_golden_adapter("qwen2", tmp_path / name, 1.0 - number, rank=rank)
        (logits,) = full_logits(
            qwen2, [Segment(np.array(ids), slot=0)], load_adapters(qwen2.device, qwen2.config, [saved])
        )
        last = logits[-1].astype(np.float64)
        ((token, logprobs),) = outputs[name]
        assert token == last.argmax()
        assert logprobs.logprob == pytest.approx(last.max() - np.log(np.exp(last).sum()), abs=1e-4)


def mixed_adapters(directory: Path, architecture: str = "qwen2") -> dict[str, Path]:
    """Adapters of each mix of plain or DoRA, two ranks, and modules, by name."""
    kinds: dict[str, tuple[str, ...]] = {
        "all": (), "attention": ("q_proj", "k_proj", "o_proj"), "mlp": ("gate_proj", "down_proj"), "v": ("v_proj",),
    }  # fmt: skip
    return {
        (name := f"{kind}-{rank}-{'dora' if dora else 'plain'}"): save_golden_adapter(
            architecture, directory / name, scale, rank, modules, use_dora=dora, target_modules=modules or "all-linear"
        )
        for scale, (kind, modules) in zip((1.0, -1.0, 2.0, -2.0), kinds.items(), strict=True)
        for rank in (4, 2)
        for dora in (False, True)
    }


def test_each_mix_of_adapters_answers_as_each_alone(
    qwen2: LoadedModel, tmp_path: Path, rng: np.random.Generator
) -> None:
    adapters = mixed_adapters(tmp_path)
    ids = rng.integers(3, 90, 2).tolist()
    engine = Engine(qwen2, **{**SMALL, "max_num_seqs": 16}, max_loras=3, max_lora_rank=4, dora=True)
    try:
        for name, saved in adapters.items():
            engine.load_adapter(name, *read_adapter_for(qwen2.config, saved))
        for names in (list(adapters), list(adapters)[::-1]):  # slots change from each kind to others
            answers = run(engine, [Request(ids, name, max_new_tokens=3, logprobs=0) for name in names])
            alone = [run(engine, [Request(ids, name, max_new_tokens=3, logprobs=0)])[0] for name in names]
            assert answers == alone
    finally:
        engine.close()
    with adapters_on_device(qwen2, [adapters[name] for name in names]) as fixed:
        passes = full_logits(qwen2, [Segment(np.array(ids), slot=slot) for slot in range(len(names))], fixed)
    for name, ((token, logprobs), *_), logits in zip(names, answers, passes, strict=True):
        last = logits[-1].astype(np.float64)
        assert logprobs.logprob == pytest.approx(last[token] - np.log(np.exp(last).sum()), abs=1e-4), name


@pytest.mark.reference
def test_each_mix_of_adapters_answers_as_peft(qwen2: LoadedModel, tmp_path: Path, rng: np.random.Generator) -> None:
    import torch
    from peft import PeftModel

    from scripts.golden.tiny_models import load as load_reference

    adapters, ids = mixed_adapters(tmp_path), rng.integers(3, 90, 9).tolist()
    engine = Engine(qwen2, **SMALL, max_loras=3, max_lora_rank=4, dora=True)
    try:
        for name, saved in adapters.items():
            engine.load_adapter(name, *read_adapter_for(qwen2.config, saved))
        answers = run(engine, [Request(ids, name, max_new_tokens=6, logprobs=0) for name in adapters])
    finally:
        engine.close()
    for (name, saved), answer in zip(adapters.items(), answers, strict=True):
        model = PeftModel.from_pretrained(load_reference(FIXTURES / "models" / "qwen2"), saved)
        tokens = [token for token, _ in answer]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1].double()
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()
        assert [logprobs.logprob for _, logprobs in answer] == pytest.approx(expected, abs=1e-4), name


def test_a_prompt_that_began_before_is_not_computed_again(engine: Engine, rng: np.random.Generator) -> None:
    ids = rng.integers(3, 90, 40).tolist()
    for name, prompt, cached in (
        (None, ids, 0),
        (None, ids, 32),
        (None, [*ids[:20], 5, 5], 16),
        (None, ids[:32], 16),  # the last token is always computed
        ("a1", ids, 0),  # another adapter has other keys
        ("a1", ids, 32),
    ):
        request = Request(prompt, name, max_new_tokens=3)
        run(engine, [request])
        assert request.cached_tokens == cached


def test_requests_with_one_prompt_compute_it_once(engine: Engine, rng: np.random.Generator) -> None:
    ids = rng.integers(3, 90, 40).tolist()
    requests = [Request([*ids], "a0", Sampler(1.0, seed=seed), 4) for seed in range(5)]
    other = Request([9, 9, 9], "a0", max_new_tokens=1)
    before = engine.stats()
    run(engine, [*requests[:3], other, *requests[3:]])
    assert [request.cached_tokens for request in (*requests, other)] == [0, 32, 32, 32, 32, 0]
    assert engine.stats().cached_tokens - before.cached_tokens == 4 * 32
    assert len({tuple(request.token_ids) for request in requests}) > 1


def test_an_adapter_gets_a_slot_though_others_are_asked_for_all_the_time(engine: Engine) -> None:
    """Two slots, whose adapters get a new request in each step."""
    rare = Request([7, 8], "a2", max_new_tokens=2)
    busy = [Request([5, 6], name, max_new_tokens=4) for name in ("a0", "a1")]
    for step in range(20):
        for request in busy[-2:]:
            engine.add(request)
        if step == 3:
            engine.add(rare)
        engine.step()
        busy += [Request([5, step], name, max_new_tokens=4) for name in ("a0", "a1")]
    assert rare.finish_reason == "length"
    for request in busy:
        engine.abort(request)


def test_an_adapter_of_the_same_name_has_no_cache_of_the_one_before(engine: Engine, tmp_path: Path) -> None:
    ids = list(range(3, 40))
    answers = []
    for factor in (2.0, -2.0):
        saved = save_golden_adapter("qwen2", tmp_path / str(factor), factor)
        engine.load_adapter("new", *read_adapter_for(engine.model.config, saved))
        request = Request(ids, "new", max_new_tokens=4, logprobs=0)
        answers.append(run(engine, [request]))
        assert request.cached_tokens == 0
        engine.unload_adapter("new")
    assert answers[0] != answers[1]


def test_an_adapter_that_is_unloaded_serves_its_requests_first(engine: Engine, tmp_path: Path) -> None:
    saved = save_golden_adapter("qwen2", tmp_path / "leaving", 0.5)
    engine.load_adapter("leaving", *read_adapter_for(engine.model.config, saved))
    first, second = Request([5, 6], "leaving", max_new_tokens=5), Request([5, 6, 7], "leaving", max_new_tokens=5)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.unload_adapter("leaving")
    with pytest.raises(UserError, match="no adapter 'leaving'"):
        engine.add(Request([5], "leaving"))
    with pytest.raises(UserError, match="'leaving' before still has requests"):
        engine.load_adapter("leaving", *read_adapter_for(engine.model.config, saved))
    while engine.busy:
        engine.step()
    assert (len(first.token_ids), len(second.token_ids)) == (5, 5)
    assert "leaving" not in engine.slots.names
    engine.load_adapter("leaving", *read_adapter_for(engine.model.config, saved))
    engine.unload_adapter("leaving")


def test_what_does_not_fit_the_slots_is_refused(engine: Engine, qwen2: LoadedModel, tmp_path: Path) -> None:
    wide = read_adapter_for(qwen2.config, save_golden_adapter("qwen2", tmp_path / "wide"))
    dora = read_adapter_for(qwen2.config, save_golden_adapter("qwen2", tmp_path / "dora", rank=2, use_dora=True))
    with pytest.raises(UserError, match="'a1' is loaded already"):
        engine.load_adapter("a1", *dora)
    narrow = Engine(qwen2, **SMALL, max_loras=1, max_lora_rank=3)
    with pytest.raises(UserError, match="rank 4, more than the 3"):
        narrow.load_adapter("wide", *wide)
    narrow.close()
    small = Engine(qwen2, **SMALL, max_loras=1, max_lora_rank=4, max_cpu_loras=2)
    try:
        with pytest.raises(UserError, match="DoRA"):
            small.load_adapter("dora", *dora)
        for name in ("x", "y"):
            small.load_adapter(name, *wide)
            small.add(Request([4], name, max_new_tokens=1))
        with pytest.raises(UserError, match="2 adapters in memory have requests"):
            small.load_adapter("z", *wide)
        while small.busy:
            small.step()
        small.load_adapter("z", *wide)
        assert small.slots.names == ["z", "y"]
    finally:
        small.close()


def test_log_probabilities_are_those_of_a_full_pass(
    qwen2: LoadedModel, engine: Engine, rng: np.random.Generator
) -> None:
    ids = rng.integers(3, qwen2.config.vocab_size, 21).tolist()
    request = Request(ids, None, Sampler(1.0, seed=3, repetition_penalty=1.2), 6, logprobs=3, prompt_logprobs=True)
    engine.add(request)
    outputs = []
    while engine.busy:
        outputs += engine.step()
    whole = np.array([*ids, *request.token_ids])
    (logits,) = full_logits(qwen2, [Segment(whole)])
    expected = logits.astype(np.float64)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    logprobs = [*(outputs[0].prompt_logprobs or []), *(output.logprobs for output in outputs)]
    assert [item.token for item in logprobs] == whole[1:].tolist()
    for entry, row in zip(logprobs, expected, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:3]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], row[best], atol=1e-4)


class Alternating:
    """Odd tokens after even ones, and even after odd ones; and never one beyond 40."""

    def __init__(self) -> None:
        self.odd = True

    def fill_mask(self, words: np.ndarray) -> None:
        allowed = np.zeros(32 * words.size, bool)
        allowed[int(self.odd) : 40 : 2] = True
        words[:] = np.packbits(allowed, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % 2 == self.odd
        self.odd = not self.odd


@pytest.mark.parametrize("temperature", [0.0, 30.0])
def test_a_grammar_allows_no_other_token(engine: Engine, temperature: float) -> None:
    bound = [
        Request([4, n], None, Sampler(temperature, seed=n, logit_bias={41: 9000.0}), 12, grammar=Alternating())
        for n in (7, 8)
    ]
    free = Request([4, 7], None, Sampler(temperature, logit_bias={41: 9000.0}), 12)
    run(engine, [bound[0], free, bound[1]])
    for request in bound:
        assert [token % 2 for token in request.token_ids] == [1, 0] * 6
        assert max(request.token_ids) < 40
    assert free.token_ids == [41] * 12


class Nothing:
    def fill_mask(self, words: np.ndarray) -> None: ...

    def accept(self, token: int) -> None: ...


def test_one_request_that_fails_leaves_the_others(engine: Engine) -> None:
    bad, good = Request([4], grammar=Nothing(), max_new_tokens=3), Request([4], max_new_tokens=3)
    run(engine, [bad, good])
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert bad.error
    assert "grammar" in bad.error


def test_an_aborted_request_gives_its_place_up_before_the_next_step(engine: Engine) -> None:
    requests = [Request([4, n], None, max_new_tokens=30) for n in range(3, 14)]
    for request in requests:
        engine.add(request)
    engine.step()
    before = engine.stats()
    assert (before.running, before.waiting) == (8, 3)
    for request in (*requests[:2], requests[9]):
        engine.abort(request)
        assert request.finish_reason == "abort"
    assert engine.stats().running == 6
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (8, 0)
    for request in requests:
        engine.abort(request)
    assert not engine.busy
    assert engine.stats().cache_usage == 0


def test_prompts_with_log_probabilities_do_not_stop_answers(engine: Engine) -> None:
    """Neither many nor a long one, which takes several steps."""
    answer = Request([5, 6], max_new_tokens=9)
    engine.add(answer)
    engine.step()
    prompts = [list(range(7, 40)), *([7 + i, 8, 9] for i in range(5))]
    scored = [Request(ids, max_new_tokens=1, logprobs=0, prompt_logprobs=True) for ids in prompts]
    for request in scored:
        engine.add(request)
    for step in range(1, 15):
        engine.step()
        assert (scored[0].finish_reason is None) == (step < 7)  # four pieces
        assert len(answer.token_ids) == 1 + step // 2
    while engine.busy:
        engine.step()
    assert {request.finish_reason for request in (answer, *scored)} == {"length"}


def test_a_step_computes_no_more_of_prompts_than_it_may(qwen2: LoadedModel, rng: np.random.Generator) -> None:
    """Of 40 tokens at most, and so of 16, in one program."""
    ids, sizes = rng.integers(3, 90, 50).tolist(), []
    engine = Engine(qwen2, **{**SMALL, "max_num_batched_tokens": 40})
    try:
        engine.add(Request(ids, max_new_tokens=2))
        engine.add(Request(ids[:3], max_new_tokens=2))
        while engine.busy:
            engine.step()
            sizes.append(engine.step_tokens)
    finally:
        engine.close()
    assert sizes == [(16, 0), (16, 0), (16, 0), (5, 0), (0, 2)]


@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "qwen3_5_text"])
def test_a_full_cache_changes_no_bits(
    device: Device, tmp_path: Path, rng: np.random.Generator, architecture: str
) -> None:
    """Answers that outgrow it make the newest begin again, with all that they had."""
    model, options = load(architecture, device), {**SMALL, "max_model_len": 48}
    many = prompts(rng, 8, model.config.vocab_size, 20)
    results, again = [], []
    for tokens in (384, 48):
        engine = Engine(model, **options, cache_tokens=tokens, max_loras=2, max_lora_rank=4, dora=True)
        names = [None, *adapters_of(engine, architecture, tmp_path / str(tokens))]
        requests = [
            Request(
                list(ids), names[i % 5], Sampler(i % 2, seed=i, top_p=0.9), 40 - len(ids), logprobs=2,
                prompt_logprobs=i % 4 == 3,
            )
            for i, ids in enumerate(many)
        ]  # fmt: skip
        begun: list[Any] = []
        stop = engine._stop
        engine._stop = lambda sequence, stop=stop, begun=begun: (begun.append(sequence), stop(sequence))
        try:
            results.append(run(engine, requests))
            assert engine.stats().cache_usage == 0
            assert engine.stats().prompt_tokens == sum(map(len, many))
        finally:
            engine.close()
        again.append(len(begun) - len(requests))
    assert results[0] == results[1]
    assert again[0] == 0 < again[1]


def test_an_answer_has_room_where_it_is_computed_anew(device: Device, tmp_path: Path) -> None:
    """Beyond the switch of LongRoPE's factors, here at the end of a block."""
    shutil.copytree(FIXTURES / "models" / "phi3", tmp_path / "phi3")
    config = (tmp_path / "phi3" / "config.json").read_text()
    (tmp_path / "phi3" / "config.json").write_text(
        config.replace('"original_max_position_embeddings": 9', '"original_max_position_embeddings": 16')
    )
    model = open_model(str(tmp_path / "phi3"), device, "f32")
    engine, request = Engine(model, **SMALL), Request(list(range(3, 13)), None, max_new_tokens=20, logprobs=0)
    try:
        answer = run(engine, [request])[0]
    finally:
        engine.close()
    whole = np.array([*request.prompt, *request.token_ids])
    (logits,) = full_logits(model, [Segment(whole)])
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for position in range(16, 29):  # the tokens before were chosen with the short factors
        token, logprobs = answer[position - 9]
        assert logprobs.logprob == pytest.approx(expected[position, token], abs=1e-4)


def test_answers_take_the_cache_as_they_grow(qwen2: LoadedModel) -> None:
    engine = Engine(qwen2, **SMALL, cache_tokens=128)
    try:
        for token in range(3, 9):
            engine.add(Request([token]))  # of up to 64 tokens, which two would fill
        engine.step()
        assert (engine.stats().running, engine.stats().waiting) == (4, 2)
        assert engine.stats().cache_usage == 4 / 8
    finally:
        engine.close()


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text", "phi3", "qwen3_5_text"])
def test_pieces_of_prompts_change_no_bits(device: Device, rng: np.random.Generator, architecture: str) -> None:
    model = load(architecture, device)
    many = [rng.integers(3, 90, size).tolist() for size in (117, 5, 33, 70, 128 - 16, 90)]
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "buckets": (16, 32, 64, 128)}
    engine, results = Engine(model, **sizes), []
    try:
        for rooms in ([128], [0, 16, 48, 24, 64, 17, 128]):
            step = itertools.count()
            engine._prompt_room = lambda decoding, step=step, rooms=rooms: rooms[next(step) % len(rooms)]
            requests = [
                Request(list(ids), None, max_new_tokens=8, logprobs=2, prompt_logprobs=i == 3)
                for i, ids in enumerate(many)
            ]
            results.append(run(engine, requests))
            engine.forget()
    finally:
        engine.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("limit", [None, 3.0])
def test_answers_wait_no_longer_for_prompts_than_they_may(
    qwen2: LoadedModel, monkeypatch: pytest.MonkeyPatch, limit: float | None, scored: bool
) -> None:
    """By a clock on which a step takes a second, and a token of a prompt in it a twentieth."""
    clock, factor = [0.0], [1.0]
    monkeypatch.setattr("wgpu_lora.infer.engine.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    engine = Engine(
        qwen2, max_model_len=128, max_num_seqs=64, buckets=(16, 32, 64, 128), max_slowdown=limit, cache_tokens=2048
    )
    whole = engine._run_step

    def run_step(step: Any, rows: Any) -> None:
        clock[0] += factor[0] * (1.0 if step.program.decoding else step.tokens / 20)
        whole(step, rows)

    monkeypatch.setattr(engine, "_run_step", run_step)
    answers = [Request([5, n], max_new_tokens=100) for n in range(2)]
    prompt = Request(list(range(3, 123)), max_new_tokens=1, logprobs=0, prompt_logprobs=scored)
    waits, steps, newest = [], 0, 0.0
    try:
        engine.compile()
        for number in range(90):
            if number == 5:
                engine.add(prompt)
            if number == 30:  # everything is faster, and there are prompts in each step
                factor[0] = 0.25
            if number in (0, 1):
                engine.add(answers[number])
            if number >= 30 and number % 4 == 0:
                engine.add(Request([number, *range(3, 123)], max_new_tokens=1, prompt_logprobs=scored))
            before = len(answers[0].token_ids)
            engine.step()
            steps += prompt.finish_reason is None
            if len(answers[0].token_ids) > before > 0:
                waits.append((number, (clock[0] - newest) / factor[0]))
            newest = clock[0] if len(answers[0].token_ids) > before else newest
    finally:
        engine.close()
    assert prompt.finish_reason == "length"
    longest = max(wait for number, wait in waits if number not in range(30, 60))
    assert (
        longest <= limit + 0.8 * scored if limit else longest > 4
    )  # the last token that is scored is one more program
    assert steps < 25


def test_the_plan_is_what_is_allocated(device: Device, qwen2: LoadedModel) -> None:
    qwen2.load_weights()
    before = device.allocated
    engine = Engine(qwen2, **SMALL, max_loras=3, max_lora_rank=2, dora=True)
    planned = sum(nbytes for group, nbytes in engine.plan.items() if group != "base")
    assert device.allocated - before == planned
    run(engine, [Request([5, 6, 7], max_new_tokens=3, logprobs=2)])
    assert device.allocated - before == planned
    engine.close()
    assert device.allocated == before


def test_keys_and_values_in_f16_cost_little_accuracy(device: Device, rng: np.random.Generator) -> None:
    model = load("qwen3", device)
    ids = rng.integers(3, model.config.vocab_size, 50).tolist()
    logits = {}
    for dtype in ("f32", "f16"):
        engine = Engine(model, **SMALL, cache_dtype=dtype)
        run(engine, [Request(list(ids), max_new_tokens=8)])
        logits[dtype], cache = engine.read_logits()[0], engine.plan["cache"]
        logits[f"{dtype} bytes"] = np.array(cache)
        engine.close()
    assert logits["f16 bytes"] * 2 == logits["f32 bytes"]
    assert 0 < relative_error(logits["f16"], logits["f32"]) < 2e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "capacity of 0 tokens"),
        ({"max_model_len": 129}, "supports 1 to 128"),
        ({"max_num_seqs": 0}, "0 sequences"),
        ({"max_model_len": 64, "cache_tokens": 63}, "cache of 63 tokens is too small"),
        ({"cache_dtype": "bf16"}, "cache of bf16 is not possible: use f32 or f16"),
    ],
)
def test_impossible_sizes_are_refused(qwen2: LoadedModel, options: dict[str, Any], message: str) -> None:
    before = qwen2.device.allocated
    with pytest.raises(UserError, match=message):
        Engine(qwen2, **options)
    assert qwen2.device.allocated == before


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "no tokens"),
        (Request([4] * 65), "65 tokens"),
        (Request([10**6]), "outside the model's vocabulary"),
        (Request([4], sampling=Sampler(logit_bias={10**6: 1.0})), "logit bias is of a token"),
        (Request([4], logprobs=21), "use 0 to 20"),
        (Request([4], max_new_tokens=0), "at least one"),
    ],
)
def test_impossible_requests_are_refused(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine.add(request_)
    assert not engine.busy


def test_a_cache_without_a_size_is_as_large_as_a_binding_allows(
    device: Device, qwen2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen2.load_weights()
    monkeypatch.setattr(device, "max_binding", 1 << 17)
    engine = Engine(qwen2, **{**SMALL, "max_num_seqs": 64})
    try:
        largest = engine.state.cache.largest()[1]
        assert 1 << 16 < largest <= 1 << 17
        assert engine.state.limits.blocks < 64 * 64 // 16
        assert run(engine, [Request([5, 6, 7], max_new_tokens=3)])
    finally:
        engine.close()
