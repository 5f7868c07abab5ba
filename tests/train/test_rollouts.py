"""GRPO and RLOO from prompts to adapters: sampling, phases, resuming amid a phase, logs, and wrong options."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rows.sources import write_source
from support.training.shared_runs import assert_resumes_exactly, result
from support.training.training import golden_arguments

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.cli.report.finished_runs import read_runs
from wgpu_lora.cli.report.page import render_report
from wgpu_lora.errors import UserError
from wgpu_lora.events import Events, StepResult
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.job import Job
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.run_checkpoint import PHASE, write_manifest
from wgpu_lora.train.run.stop_reasons import exit_code
from wgpu_lora.train.run.training_log import COMPLETIONS, LOG, read_log
from wgpu_lora.train.session.rollout_stream import RolloutStream
from wgpu_lora.train.session.rollouts import Rollouts
from wgpu_lora.train.session.tool_turns import Message

REWARDS = """
def small(completion_ids, **columns):
    return [sum(token < 150 for token in ids) / len(ids) for ids in completion_ids]
def none(completions, wanted, **columns):
    return [None if one is None else 0.5 for one in wanted]
def equal(completions, **columns):
    return [1.0] * len(completions)
def failing(completions, **columns):
    raise OSError("no connection")
def logging(completions, trainer_state, log_metric, log_extra, **columns):
    log_metric("steps", trainer_state.global_step)
    log_extra("epoch", [trainer_state.epoch] * len(completions))
    return [float(i % 2) for i in range(len(completions))]
def odd(completion_ids, wanted, **columns):
    return [float(wanted is None or ids[0] % 2) for ids in completion_ids]
"""


def prompts(path: Path, count: int = 6, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    rows = [{"prompt_ids": rng.integers(0, 301, 3 + i % 4).tolist(), "wanted": i % 2 or None} for i in range(count)]
    return write_source(path, rows)


def job(directory: Path, **changes: Any) -> Job[Any]:
    directory.mkdir(exist_ok=True)
    (directory / "rewards.py").write_text(REWARDS)
    options = {
        "objective": "grpo",
        "data": str(prompts(directory / "prompts.jsonl")),
        "reward_funcs": f"{directory / 'rewards.py'}:small",
        "base_dtype": "f32",
        "max_steps": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "shuffle": True,
    }
    return prepare_job(golden_arguments(directory, "qwen2", **{**options, **changes}))


def logged_completions(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "run" / COMPLETIONS).read_text().splitlines()]


def test_steps_learn_from_what_they_sampled(device: Device, tmp_path: Path) -> None:
    """Tokens are sampled with the log-probabilities that are trained; the reward rises, and the log has TRL's names."""
    training_job = job(tmp_path / "a", max_steps=12, learning_rate=3e-2, lr_scheduler_type="constant", warmup_ratio=0.0)
    stream = training_job.run.stream
    assert isinstance(stream, RolloutStream)
    assert (stream.prompts, stream.parts, stream.phase_steps) == (2, 1, 1)
    assert training_job.run.args.beta == 0  # the record has the objective's own
    training_job.train()
    lines = read_log(tmp_path / "a" / "run" / LOG)
    names = ["reward", "reward_std", "frac_reward_zero_std", "rewards/small/mean", "completions/mean_length", "entropy"]
    names += ["completions/clipped_ratio", "clip_ratio/region_mean", "sampling/sampling_logp_difference/mean"]
    assert set(names) <= set(lines[0])
    gaps = [line["sampling/sampling_logp_difference/max"] for line in lines]
    assert 0 < max(gaps) < 1e-4
    assert all(line["completions/mean_length"] == 6 and line["clip_ratio/region_mean"] == 0 for line in lines)
    first, last = (np.mean([line["reward"] for line in some]) for some in (lines[:3], lines[-3:]))
    assert last > first + 0.15
    assert stream.phase is not None
    entropies = np.concatenate([completion.entropies for completion in stream.phase.completions])
    assert entropies.mean() == pytest.approx(lines[-1]["entropy"], rel=1e-4)
    shown = logged_completions(tmp_path / "a")
    assert [sample["step"] for sample in shown] == [step for step in range(1, 13) for _ in range(8)]
    assert not any(sample["heldout"] for sample in shown)
    parts = ("sampling_seconds", "reward_seconds", "training_seconds")
    assert all(line[name] > 0 for line in lines for name in parts)
    assert sum(line[name] for line in lines for name in parts) == pytest.approx(lines[-1]["seconds"], rel=0.01)
    for group in range(0, len(shown), 4):
        some = shown[group : group + 4]
        assert sum(sample["advantage"] for sample in some) == pytest.approx(0, abs=1e-5)
        assert all(len(sample["completion"].split()) == 6 and 0 <= sample["rewards"]["small"] <= 1 for sample in some)


PHASES: list[dict[str, Any]] = [
    {},
    {"steps_per_generation": 4, "num_iterations": 2, "gradient_accumulation_steps": 1, "loss_type": "bnpo"},
    {"num_iterations": 2, "beta": 0.1, "lora_dropout": 0.1, "mask_truncated_completions": False, "temperature": 0.8},
    {"objective": "rloo", "num_iterations": 4, "top_k": 20, "top_p": 0.9, "use_dora": True, "init_adapter": None},
]


@pytest.mark.parametrize("options", PHASES, ids=["steps", "parts", "iterations", "rloo"])
def test_resuming_gives_the_same_bytes(device: Device, tmp_path: Path, options: dict[str, Any]) -> None:
    """Amid a phase, too, of which an earlier adapter sampled the completions; with held-out prompts."""
    heldout = str(prompts(tmp_path / "heldout.jsonl", 3, seed=1))
    assert_resumes_exactly(job, tmp_path, eval_data=heldout, **options)
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert {"eval_loss", "eval_reward", "eval_rewards/small/mean"} <= set(lines[0])
    assert lines[0]["eval_loss"] == -lines[0]["eval_reward"]


@pytest.mark.parametrize("at", [(2, 3), (2, 0), (0, 2)], ids=["sampling", "training", "held out"])
def test_an_interrupt_in_any_phase_loses_nothing(device: Device, tmp_path: Path, at: tuple[int, int]) -> None:
    """Amid sampling, it ends at once and before the step; the resumed run has the bytes of one that went on."""
    options = {"eval_data": str(prompts(tmp_path / "heldout.jsonl", 3, seed=1)), "num_iterations": 2, "max_steps": 6}
    job(tmp_path / "whole", **options).train()

    class Interrupt(Events):
        """Interrupts after so many steps and, within the sampling behind them, so many calls of the engine."""

        def __init__(self) -> None:
            self.steps = self.calls = 0

        def step(self, result: StepResult) -> None:
            self.steps, self.calls = result.step, 0
            if at == (self.steps, 0):
                os.kill(os.getpid(), signal.SIGINT)

        def answering(self, count: int, total: int, tokens: int) -> None:
            self.calls += 1
            if at == (self.steps, self.calls):
                os.kill(os.getpid(), signal.SIGINT)

    record = job(tmp_path / "parts", **options).train(Interrupt())
    assert (record.stop_reason, record.state.step) == ("interrupt", at[0])
    job(tmp_path / "parts", **options, resume=True).train()
    whole, parts = (tmp_path / name / "run" for name in ("whole", "parts"))
    assert result(parts)[0] == result(whole)[0]
    assert (parts / COMPLETIONS).read_bytes() == (whole / COMPLETIONS).read_bytes()


def test_completions_of_another_run_are_refused(device: Device, tmp_path: Path) -> None:
    options = {"num_iterations": 4, "max_steps": 2}
    job(tmp_path / "a", **options).train()
    [place] = (tmp_path / "a" / "run" / "checkpoints").iterdir()
    facts = json.loads((place / PHASE).read_text())
    assert len(facts["completions"]) == 8
    facts["completions"][0]["logprobs"].pop()
    (place / PHASE).write_text(json.dumps(facts))
    (place / "manifest.json").unlink()
    write_manifest(place)
    with pytest.raises(UserError, match=r"completions.json does not match this run: .* lists of other lengths"):
        job(tmp_path / "a", **options | {"max_steps": 4}, resume=True).train()


def test_several_adapters_sample_and_train_together(device: Device, tmp_path: Path) -> None:
    """One by rewards, one by answers, in shared batches; the report shows the completions."""
    training_job = job(tmp_path / "a")
    args = training_job.run.args
    rows = write_source(tmp_path / "rows.jsonl", [{"input_ids": [1, 2, 3, 4, 5 + i]} for i in range(4)])
    tasks = [
        {"data": args.data, "checkpoint": str(tmp_path / "grpo"), "objective": "grpo",
         "reward_funcs": args.reward_funcs, "num_generations": 4, "max_completion_length": 6, "learning_rate": 0.03},
        {"data": str(rows), "checkpoint": str(tmp_path / "sft"), "objective": "sft"},
    ]  # fmt: skip
    pipeline = MultiAdapterPipeline(
        tasks, args.model, output=str(tmp_path / "pipeline"), schedule="synchronized", base_dtype="f32", max_steps=3,
        max_length=16, logging_steps=1,
    )  # fmt: skip
    pipeline.train()
    assert [line["step"] for line in read_log(tmp_path / "grpo" / LOG)] == [1, 2, 3]
    assert "reward" in read_log(tmp_path / "grpo" / LOG)[0]
    assert "reward" not in read_log(tmp_path / "sft" / LOG)[0]
    page = render_report(read_runs([tmp_path / "grpo"]))
    assert "<h2>Completions</h2>" in page
    assert "Entropy" in page


class _Tokenizer:
    """Ends a turn at one token in five."""

    stop_ids = frozenset(range(60))

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


class _Turns:
    """A first turn that ended by itself has results of a tool, [7, 8, 9]."""

    def follow(self, turns: list[Message], token_ids: list[int], stopped: bool, variables: Any) -> list[int]:
        turns.append({"role": "assistant", "content": str(token_ids)})
        if not stopped or len(turns) > 1:
            return []
        turns.append({"role": "tool", "content": "a result"})
        return [7, 8, 9]

    def counts(self) -> tuple[int, int]:
        return 8, 2

    def close(self) -> None:
        pass


def with_tools(directory: Path, **changes: Any) -> Job[Any]:
    training_job = job(directory, **{"max_completion_length": 12, "num_iterations": 2, "save_steps": 1, **changes})
    training_job.run.rollouts = replace(training_job.run.rollouts, tokenizer=_Tokenizer(), tools=_Turns())
    return training_job


def test_results_of_tools_are_not_trained_on(device: Device, tmp_path: Path) -> None:
    """Their tokens are inputs only; sampling goes on behind them, with log-probabilities that training finds again."""
    training_job = with_tools(tmp_path / "a")
    training_job.train()
    stream = training_job.run.stream
    assert isinstance(stream, RolloutStream)
    assert stream.phase
    followed = [item for item in stream.phase.completions if 0 in item.tool_mask]
    assert followed
    for completion in followed:
        [begin] = [
            i
            for i in range(len(completion.token_ids))
            if completion.tool_mask[i] == 0 and completion.tool_mask[i - 1] == 1
        ]
        assert completion.token_ids[begin - 1] < 60
        assert completion.token_ids[begin : begin + 3] == [7, 8, 9]
        assert completion.tool_mask[begin : begin + 3] == [0, 0, 0]
        assert 0 < len(completion.token_ids) - begin - 3 == sum(completion.tool_mask[begin + 3 :])
        [segment] = stream.segments([completion], 0)
        assert (segment.labels == -100).sum() == len(segment.labels) - completion.size
    ended = [item for item in stream.phase.completions if item.stopped]
    assert 0 < len(ended) < len(stream.phase.completions)
    masked = replace(stream, args=replace(stream.args, mask_truncated_completions=True))
    step = next(step for step in masked.steps(stream.phase.epoch, stream.phase.start))
    groups = [group for batch in masked.groups(step) for group in batch]
    assert [group.label for group in groups] == [item.advantage for item in ended]
    assert all(group.weight == pytest.approx(1 / sum(item.size for item in ended)) for group in groups)
    line = read_log(tmp_path / "a" / "run" / LOG)[0]
    assert 0 < line["sampling/sampling_logp_difference/max"] < 1e-4
    assert (line["tools/call_frequency"], line["tools/failure_frequency"]) == (1, 0.25)
    (tmp_path / "b").mkdir()
    assert_resumes_exactly(with_tools, tmp_path / "b")


def test_results_that_do_not_fit_are_no_answers(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in TRL, they are taken back, so that reward functions see the turn that called as the last."""
    seen, texts = list[tuple[list[int], list[str]]](), Rollouts._texts

    def watched(self: Rollouts, stream: Any, completions: Any, turns: list[list[Message]]) -> Any:
        roles = [[message["role"] for message in messages] for messages in turns]
        seen.extend(zip([completion.tool_mask for completion in completions], roles, strict=True))
        return texts(self, stream, completions, turns)

    monkeypatch.setattr(Rollouts, "_texts", watched)
    with_tools(tmp_path / "a", max_completion_length=6, num_iterations=1, save_steps=0).train()
    assert {len(roles) for _, roles in seen} == {1, 3}
    for mask, roles in seen:
        assert roles == (["assistant", "tool", "assistant"] if 0 in mask else ["assistant"])


def test_the_kl_term_of_masked_completions_counts_nowhere(device: Device, tmp_path: Path) -> None:
    """As in TRL, rloo subtracts none from the reward of a completion that did not end and is masked."""
    options = {"objective": "rloo", "beta": 5.0, "mask_truncated_completions": True, "max_steps": 1}
    job(tmp_path / "a", **options, save_steps=0).train()  # without a tokenizer, no completion ends
    assert read_log(tmp_path / "a" / "run" / LOG)[0]["kl"] == 0
    shown = logged_completions(tmp_path / "a")
    rewards = np.array([sample["rewards"]["small"] for sample in shown[:4]])
    expected = rewards - (rewards.sum() - rewards) / 3
    assert [sample["advantage"] for sample in shown[:4]] == pytest.approx(expected.tolist(), abs=1e-6)


def test_batches_change_rounding_only(device: Device, tmp_path: Path) -> None:
    """The same completions in batches of two and of eight."""
    losses = []
    for number, (rows, batches) in enumerate([(2, 4), (8, 1)]):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": batches}
        job(tmp_path / str(number), max_steps=2, **sizes).train()
        losses.append([line["loss"] for line in read_log(tmp_path / str(number) / "run" / LOG)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)


def test_completions_without_a_gradient_are_skipped(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is logged is as if they had been computed, but for rounding and speed."""
    logs, tokens = [], []
    for skips in (True, False):
        if not skips:
            monkeypatch.setattr(RolloutStream, "skips_zero_advantages", False)
        directory = tmp_path / str(skips)
        functions = f"{directory / 'rewards.py'}:odd"
        training_job = job(directory, max_steps=4, reward_funcs=functions, shuffle=False, top_entropy_quantile=0.5)
        tokens.append(training_job.train().state.processed_tokens)
        logs.append(read_log(directory / "run" / LOG))
    assert tokens[0] < 0.6 * tokens[1]
    names = [name for name in logs[0][0] if "tokens" not in name and "seconds" not in name]
    assert {"loss", "grad_norm", "entropy", "clip_ratio/region_mean"} < set(names)
    for line, expected in zip(*logs, strict=True):
        for name in names:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_memory_is_that_of_the_larger_phase(tmp_path: Path) -> None:
    """Sampling adds its cache and inputs, but no activations where those of a step are larger."""
    session = job(tmp_path / "a").session
    assert session.engine is not None
    groups, plan = session.memory().groups, session.engine.all_programs()
    alone = [program.plan().sizes for program in plan]
    step = [program.plan().sizes for program in session.programs()]
    assert groups["activations"] == sum(np.max([s for s in [*alone, *step] if len(s) == 1], axis=0))
    assert groups["cache"] > 0


def test_rewards_that_teach_nothing_are_said(device: Device, tmp_path: Path) -> None:
    functions = ",".join(f"{tmp_path / 'a' / 'rewards.py'}:{name}" for name in ("equal", "none"))
    with pytest.warns(UserWarning, match=r"equal rewards for 20 steps"):
        job(tmp_path / "a", max_steps=20, reward_funcs=functions, reward_weights="1,0", save_steps=0).train()
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert all(line["frac_reward_zero_std"] == 1 and line["loss"] == 0 for line in lines)
    assert 0 < lines[0]["seconds"] < lines[-1]["seconds"]  # sampling takes time, if nothing is trained, too
    assert result(tmp_path / "a" / "run")


@pytest.mark.parametrize("most", [None, 1])
def test_all_completions_are_logged(device: Device, tmp_path: Path, most: int | None) -> None:
    """Those of held-out prompts, too, with what functions logged of them; or as many of each measurement as asked."""
    heldout, functions = str(prompts(tmp_path / "heldout.jsonl", 3, seed=1)), f"{tmp_path / 'a' / 'rewards.py'}:logging"
    job(tmp_path / "a", reward_funcs=functions, eval_data=heldout, max_steps=2, log_completions=most).train()
    shown = logged_completions(tmp_path / "a")
    of_phase, of_heldout = (8, 3) if most is None else (most, most)
    expected = [(0, True)] * of_heldout + [(1, False)] * of_phase + [(2, False)] * of_phase + [(2, True)] * of_heldout
    assert [(sample["step"], sample["heldout"]) for sample in shown] == expected
    assert all(sample["rewards"].keys() == {"logging"} for sample in shown)
    assert [sample["epoch"] for sample in shown if not sample["heldout"]] == [0] * of_phase + [1 / 3] * of_phase
    lines = read_log(tmp_path / "a" / "run" / LOG)
    assert [line.get("steps", line.get("eval_steps")) for line in lines] == [0, 0, 1]
    assert (lines[2]["eval_steps"], lines[2]["step"]) == (2, 2)


def test_a_run_without_any_reward_has_failed(device: Device, tmp_path: Path) -> None:
    """Because of failures, and not since functions judged nothing; one reward is enough."""
    directory = tmp_path / "a"
    job(directory)
    failing, small = (f"{directory / 'rewards.py'}:{name}" for name in ("failing", "small"))
    for functions, reason in [(failing, "no rewards"), (f"{failing},{small}", "max steps")]:
        with pytest.warns(UserWarning, match=r"failing failed on 8 of 8 completions.*OSError: no connection"):
            record = job(directory, reward_funcs=functions, max_steps=2, overwrite=True).train()
        assert record.stop_reason == reason
        assert (record.outcome, exit_code(reason, None)) == (("failed", 1) if "no" in reason else ("finished", 0))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    for changes, text in [
        ({"reward_funcs": None}, r"reward_funcs.* is missing"),
        ({"num_generations": 3}, r"8 completions .* must be a multiple of .*num_generations.*3"),
        ({"steps_per_generation": 3}, r"steps_per_generation.* must be a multiple of .*gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": 8}, r"8 prompts are sampled together, but the data have 6"),
        ({"max_completion_length": 4000}, r"The longest prompt has 6 tokens, which leaves no room for completions of"),
        ({"train": "quant-scales", "base_dtype": "lut2-row", "init_adapter": None}, r"samples with an adapter"),
        ({"objective": "dpo", "beta": 0}, r"beta.* must be at least 1e-09"),
    ]:
        with pytest.raises(UserError, match=text):
            job(tmp_path / "a", **changes)
    (tmp_path / "a" / "bad.jsonl").write_text('{"text": "no prompt"}\n')
    with pytest.raises(UserError, match=r"the formats need"):
        job(tmp_path / "a", data=str(tmp_path / "a" / "bad.jsonl"))
