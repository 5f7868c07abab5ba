"""Sampling of completions for a run's prompts, with the adapter as it is, and their rewards and advantages."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wgpu_lora.data import Tokenizer
from wgpu_lora.data.example_formats import before_answer
from wgpu_lora.errors import RolloutWarning, UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.infer.request import Request, Sampler
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.objectives.grpo import nan_mean, nan_std
from wgpu_lora.train.rewards.reward_functions import RewardFunctions, Rewards
from wgpu_lora.train.session.data_stream import Step
from wgpu_lora.train.session.rollout_stream import Completion, Phase, RolloutStream
from wgpu_lora.train.session.session import Session
from wgpu_lora.train.session.tool_turns import Message, ToolTurns

STEPS = 20  # after which rewards that never differed, or completions that never ended, are said


Texts = tuple[list[Any], list[Any]]  # prompts and completions, as reward functions get them


@dataclass
class Rollouts:
    """Samples the completions of one slot's stream.

    on_sample: called with what is logged of each completion, with `heldout` of those of held-out prompts.
    trainer_state: what reward functions get of the run's progress. seconds: of the last call of `prepare`, by what they
    were for. all_failed: whether no completion was rewarded so far, since functions failed; None before any was.
    """

    stream: RolloutStream
    rewards: RewardFunctions
    tokenizer: Tokenizer | None
    tools: ToolTurns | None = None
    on_sample: Callable[[dict[str, Any]], None] = lambda sample: None
    trainer_state: Callable[[], dict[str, Any]] = dict
    seconds: dict[str, float] = field(default_factory=dict)
    all_failed: bool | None = None
    _useless: dict[str, int] = field(default_factory=dict)  # steps so far of which all were so, by what they were
    _warned: set[str] = field(default_factory=set)

    def prepare(self, session: Session, step: Step, slot: int, events: Events = SILENT) -> None:
        """Sample the completions of the step's phase, unless they have been.

        Raises:
            UserError: the adapter's weights are damaged.
        """
        stream = self.stream
        self.seconds = {"sampling_seconds": 0.0, "reward_seconds": 0.0}
        if stream.has_phase(step):
            return
        begin = time.perf_counter()
        policy, prompts = stream.policy, step.micro_batches[0]
        samples = [sample for sample in prompts for _ in range(policy.num_generations)]
        numbers = [number for _ in prompts for number in range(policy.num_generations)]
        seeds = [self._seed(step.epoch, *pair) for pair in zip(samples, numbers, strict=True)]
        completions, turns = self._sample(session, slot, stream, samples, seeds, events)
        texts = self._texts(stream, completions, turns)
        sampled = time.perf_counter()
        rewards = self._score(stream, completions, texts)
        self.seconds = {"sampling_seconds": sampled - begin, "reward_seconds": time.perf_counter() - sampled}
        self.all_failed = self.all_failed is not False and bool(rewards.failed) and bool(np.isnan(rewards.values).all())
        penalties, of_reference = self._penalties(session, slot, completions)
        shape = len(prompts), policy.num_generations
        values = rewards.values.reshape(*shape, -1)
        group_penalties = penalties.reshape(shape) if penalties is not None else None
        advantages, metrics = policy.advantages(values, self.rewards.weights, group_penalties)
        metrics = (
            rewards.metrics
            | metrics
            | of_reference
            | self._metrics(completions, rewards)
            | self._tool_metrics(len(completions))
        )
        metrics = {name: value for name, value in metrics.items() if np.isfinite(value)}
        result = [
            replace(completion, advantage=float(a))
            for completion, a in zip(completions, advantages.reshape(-1).tolist(), strict=True)
        ]
        stream.phase = Phase(step.epoch, stream.start_of(step), result, metrics)
        self._log(result, texts, rewards)
        self._warn(metrics, rewards)

    def close(self) -> None:
        """End the processes of functions."""
        self.rewards.close()
        if self.tools:
            self.tools.close()

    def heldout(
        self, session: Session, stream: RolloutStream, slot: int, watch: Callable[[int], None]
    ) -> dict[str, float]:
        """The rewards of one completion of each held-out prompt; the loss is the negative of the mean reward.

        watch: called with the number of finished prompts.
        """
        samples = list(range(len(stream.prepared.samples)))
        watch(0)
        seeds = [self._seed(-1, sample, 0) for sample in samples]
        completions, turns = self._sample(session, slot, stream, samples, seeds)
        texts = self._texts(stream, completions, turns)
        rewards = self._score(stream, completions, texts)
        self._log(completions, texts, rewards, heldout=True)
        watch(len(samples))
        scored = ~np.isnan(rewards.values).all(1)
        total = np.where(scored, np.nansum(rewards.values * self.rewards.weights, 1), np.nan)
        if not scored.any():
            return {"loss": float("nan")}
        metrics = {**rewards.metrics, "reward": float(nan_mean(total).item()), **self._metrics(completions, rewards)}
        metrics |= self._tool_metrics(len(completions))
        return {"loss": 0.0 - metrics["reward"], **{n: v for n, v in metrics.items() if np.isfinite(v)}}

    def _seed(self, *numbers: int) -> int:
        """The seed of a completion's draws: of nothing but the run's seed and, for instance, the epoch, the prompt and
        the number."""
        text = "/".join(map(str, (self.stream.args.seed, *numbers)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def _sample(
        self,
        session: Session,
        slot: int,
        stream: RolloutStream,
        samples: Sequence[int],
        seeds: Sequence[int],
        events: Events = SILENT,
    ) -> tuple[list[Completion], list[list[Message]]]:
        """Completions, and the messages of each, if its prompt is a list of messages."""
        engine = session.engine
        assert engine is not None, "the session has no engine"
        session.begin()
        engine.forget()
        result = [Completion(sample, [], [], [], False) for sample in samples]
        turns: list[list[Message]] = [[] for _ in samples]
        requests: dict[Request, int] = {}

        def add(number: int, seed: int) -> None:
            request = self._request(stream, slot, result[number], seed)
            requests[request] = number
            engine.add(request)

        for number, seed in enumerate(seeds):
            add(number, seed)
        count = tokens = 0
        try:
            while engine.busy:
                for output in engine.step():
                    request, of_token = output.request, output.logprobs
                    if request.error:
                        raise UserError(request.error)
                    assert of_token is not None
                    number = requests[request]
                    completion = result[number]
                    completion.token_ids.append(of_token.token)
                    completion.tool_mask.extend([1] * bool(self.tools))
                    completion.logprobs.append(float(np.float32(of_token.logprob)))
                    completion.entropies.append(float(np.float32(of_token.entropy)))
                    tokens += 1
                    if request.finish_reason is None:
                        continue
                    count += 1
                    result[number] = replace(completion, stopped=request.finish_reason == "stop")
                    if self.tools and self._follow(stream, result[number], turns[number], len(request.token_ids)):
                        add(number, self._seed(seeds[number], len(completion.token_ids)))
                events.answering(count, len(requests), tokens)
        finally:
            for request in requests:
                engine.abort(request)
        return result, turns

    def _request(self, stream: RolloutStream, slot: int, completion: Completion, seed: int) -> Request:
        """Continues a completion."""
        policy = stream.policy
        sampler = Sampler(policy.temperature, policy.top_k, policy.top_p, seed, policy.min_p, policy.repetition_penalty)
        prompt = stream.prepared.samples[completion.sample][0].input_ids.tolist() + completion.token_ids
        max_tokens = policy.max_completion_length - len(completion.token_ids)
        stop_ids = self.tokenizer.stop_ids if self.tokenizer else set()
        return Request(prompt, str(slot), sampler, max_tokens, stop_ids, logprobs=0)

    def _follow(self, stream: RolloutStream, completion: Completion, turns: list[Message], size: int) -> bool:
        """Put the results of tools behind a completion, and say whether it goes on. size: of its last turn, in tokens
        before the stop token."""
        assert self.tools is not None
        begin = len(completion.token_ids) - size - completion.stopped
        variables = stream.prepared.columns[completion.sample].get("chat_template_kwargs")
        result_ids = self.tools.follow(turns, completion.token_ids[begin:], completion.stopped, variables)
        if len(completion.token_ids) + len(result_ids) >= self.stream.policy.max_completion_length:
            while turns[-1]["role"] == "tool":  # as in TRL; they are no answer
                turns.pop()
            return False
        completion.token_ids.extend(result_ids)
        completion.tool_mask.extend([0] * len(result_ids))
        return bool(result_ids)

    # -- rewards ---------------------------------------------------------------------------------------------------

    def _texts(self, stream: RolloutStream, completions: Sequence[Completion], turns: Sequence[list[Message]]) -> Texts:
        """Prompts and completions as reward functions get them: both texts, or both lists of messages."""
        prompts, texts = list[Any](), list[Any]()
        for completion, messages in zip(completions, turns, strict=True):
            row = stream.prepared.columns[completion.sample]
            prompt = row.get("prompt", row.get("messages"))
            ids = completion.token_ids[:-1] if completion.stopped else completion.token_ids
            text = self.tokenizer.decode(ids) if self.tokenizer else " ".join(map(str, ids))
            if isinstance(prompt, list):
                prompts.append(before_answer(prompt))
                texts.append(messages or [{"role": "assistant", "content": text}])
            else:
                prompts.append(row["prompt_ids"] if prompt is None else prompt)
                texts.append(text)
        return prompts, texts

    def _score(self, stream: RolloutStream, completions: Sequence[Completion], texts: Texts) -> Rewards:
        columns = [stream.prepared.columns[completion.sample] for completion in completions]
        ids = [completion.token_ids for completion in completions]
        return self.rewards.score(*texts, ids, columns, self.trainer_state())

    def _penalties(
        self, session: Session, slot: int, completions: Sequence[Completion]
    ) -> tuple[np.ndarray | None, dict[str, float]]:
        """What an objective that has the KL term in its rewards subtracts from them, and its metrics."""
        policy = self.stream.policy
        if not (policy.summed and policy.reference):
            return None, {}
        references = session.reference_logprobs(self.stream.segments(completions, slot))
        trained = [completion.stopped or not policy.mask_truncated_completions for completion in completions]
        gaps = [
            is_trained * float((np.array(completion.logprobs) - logprobs).sum())
            for is_trained, completion, logprobs in zip(trained, completions, references, strict=True)
        ]
        tokens = sum(completion.size for completion, counts in zip(completions, trained, strict=True) if counts)
        return policy.beta * np.array(gaps), {"kl": sum(gaps) / max(1, tokens)}

    def _metrics(self, completions: Sequence[Completion], rewards: Rewards) -> dict[str, float]:
        lengths = np.array([completion.size for completion in completions])
        ended = np.array([completion.size for completion in completions if completion.stopped])
        result = {"completions/clipped_ratio": 1 - len(ended) / len(lengths)}
        for name, sizes in (("length", lengths), ("terminated_length", ended)):
            if len(sizes):
                values = {"mean": sizes.mean(), "min": sizes.min(), "max": sizes.max()}
                result |= {f"completions/{kind}_{name}": float(value) for kind, value in values.items()}
        for name, values_of in zip(self.rewards.names, rewards.values.T, strict=True):
            result[f"rewards/{name}/mean"] = float(nan_mean(values_of).item())
            result[f"rewards/{name}/std"] = float(nan_std(values_of).item())
            if name in rewards.failed:
                result[f"rewards/{name}/failed"] = float(rewards.failed[name])
        return result

    def _tool_metrics(self, completions: int) -> dict[str, float]:
        if not self.tools:
            return {}
        calls, failures = self.tools.counts()
        frequency = {"tools/call_frequency": calls / completions}
        return frequency | ({"tools/failure_frequency": failures / calls} if calls else {})

    def _log(self, completions: Sequence[Completion], texts: Texts, rewards: Rewards, heldout: bool = False) -> None:
        for number, completion in enumerate(completions[: self.stream.policy.log_completions]):
            scores = {
                name: None if np.isnan(value) else float(value)
                for name, value in zip(self.rewards.names, rewards.values[number], strict=True)
            }
            prompt, text = texts[0][number], texts[1][number]
            if not isinstance(text, str) and len(text) == 1:
                text = text[0]["content"]
            of_split = {} if heldout else {"advantage": completion.advantage}
            extra = {column: values[number] for column, values in rewards.extra.items()}
            self.on_sample(
                {**extra, "prompt": prompt, "completion": text, "rewards": scores, **of_split, "heldout": heldout}
            )

    def _warn(self, metrics: dict[str, float], rewards: Rewards) -> None:
        """Say what a run cannot learn from, once: functions that fail, rewards that never differ, answers that never
        end."""
        for name, reason in rewards.reasons.items():
            count = f"{rewards.failed[name]:,} of {len(rewards.values):,} completions"
            self._warn_once(
                f"function {name}",
                f"The reward function {name} failed on {count}, which get no reward from it: {reason}.",
            )
        facts = {
            "equal": metrics.get("frac_reward_zero_std") == 1 or "reward" not in metrics,
            "truncated": metrics["completions/clipped_ratio"] == 1,
        }
        for name, holds in facts.items():
            self._useless[name] = self._useless.get(name, 0) + self.stream.phase_steps if holds else 0
        if self._useless["equal"] >= STEPS:
            self._warn_once(
                "equal",
                f"The completions of each prompt have had equal rewards for {STEPS} steps, so that there is nothing to "
                f"learn: check {flag('reward_funcs')}, or start from an adapter that sometimes succeeds.",
            )
        if self._useless["truncated"] >= STEPS:
            self._warn_once(
                "truncated",
                f"No completion has ended by itself for {STEPS} steps: raise {flag('max_completion_length')}, or "
                "reward short ones.",
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, RolloutWarning, stacklevel=2)
