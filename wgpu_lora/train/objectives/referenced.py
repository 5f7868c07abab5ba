"""Options of objectives that compare the policy with a frozen reference."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.train.objectives.preference import Preference


@dataclass(frozen=True)
class Referenced(Preference):
    """reference_adapter: the reference; by default the base model alone."""

    reference_adapter: str | None = None
    precompute_ref_log_probs: bool = False

    @property
    def reference_path(self) -> str | None:
        return self.reference_adapter

    @property
    def precomputes(self) -> bool:
        return self.precompute_ref_log_probs
