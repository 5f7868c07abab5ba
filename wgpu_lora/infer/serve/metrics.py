"""Figures of the server for Prometheus, named as vLLM's with `wgpu_lora` for `vllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wgpu_lora.infer.request import EngineStats

PREFIX, LABEL = "wgpu_lora:", ["model_name"]
SHORT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)  # seconds
LONG = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """stats: what the engine said last. name: the base model's."""

    def __init__(self, name: str, stats: Callable[[], EngineStats]) -> None:
        self._name, self._stats = name, stats
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.success = Counter(
            PREFIX + "request_success", "Answers by how they ended.", [*LABEL, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.first_token, self.between_tokens, self.latency = (
            Histogram(PREFIX + name, text, LABEL, registry=self.registry, buckets=buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From an answer's request to its first token.", LONG),
                ("inter_token_latency_seconds", "Between two tokens of an answer.", SHORT),
                ("e2e_request_latency_seconds", "From an answer's request to its end.", LONG),
            )
        )

    def collect(self) -> Iterator[Metric]:
        """The engine's figures; called by the registry."""
        stats = self._stats()
        gauges = {
            "num_requests_running": (stats.running, "Requests that are computed now."),
            "num_requests_waiting": (stats.waiting, "Requests that wait for a place."),
            "kv_cache_usage_perc": (stats.cache_usage, "Share of the cache's blocks in use, 1 for all."),
        }
        counters = {
            "prompt_tokens": (stats.prompt_tokens, "Tokens of prompts."),
            "generation_tokens": (stats.generated_tokens, "Tokens of answers."),
            "prefix_cache_queries": (stats.prompt_tokens, "Tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.cached_tokens, "Tokens found there."),
        }
        for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, text) in figures.items():
                metric = family(PREFIX + name, text, labels=LABEL)
                metric.add_metric([self._name], value)
                yield metric
