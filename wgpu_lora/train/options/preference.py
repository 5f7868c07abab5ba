"""Options of preference training, whose names, defaults and meanings are TRL's."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.train.declared import NOT_NEGATIVE, POSITIVE, Range, option

PREFERENCES = "Preference training (--objective dpo, kto, orpo, cpo)"  # their heading in help


@dataclass(frozen=True)
class PreferenceOptions:
    """Objectives read those that their fields are named after."""

    beta: float = option(
        0.1,
        PREFERENCES,
        "How strongly the policy is kept near the reference; the weight of ORPO's odds ratio.",
        within=Range(at_least=1e-9, at_most=1e9),  # squares of 1 / beta are float32 numbers
    )
    loss_type: str | None = option(
        None,
        PREFERENCES,
        "dpo: one or, separated by commas, several of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, sppo_hard, "
        "apo_zero, apo_down, sft. kto: kto, apo_zero_unpaired. cpo: sigmoid, hinge, ipo, simpo. Default: the first.",
    )
    loss_weights: str | None = option(
        None, PREFERENCES, "dpo: weights of the losses in --loss-type, separated by commas. Default: 1 each."
    )
    label_smoothing: float = option(
        0.0,
        PREFERENCES,
        "dpo (robust, exo_pair) and cpo (sigmoid, simpo): probability that a preference is the wrong way round.",
        within=Range(at_least=0, below=1),
    )
    ld_alpha: float | None = option(
        None,
        PREFERENCES,
        "dpo: weight of the tokens that one answer has more than the other. Default: 1.",
        within=Range(at_least=0, at_most=1),
    )
    reference_adapter: str | None = option(
        None,
        PREFERENCES,
        "dpo and kto: PEFT adapter directory that is the frozen reference, and where training starts unless "
        "--init-adapter is given. Default: the base model alone.",
    )
    precompute_ref_log_probs: bool = option(
        False, PREFERENCES, "dpo and kto: compute the reference once before training instead of in every step."
    )
    cpo_alpha: float = option(
        1.0, PREFERENCES, "cpo: weight of the chosen answers' negative log-likelihood.", within=NOT_NEGATIVE
    )
    simpo_gamma: float = option(0.5, PREFERENCES, "cpo (simpo): target reward margin.", within=NOT_NEGATIVE)
    desirable_weight: float = option(1.0, PREFERENCES, "kto: weight of desirable answers.", within=NOT_NEGATIVE)
    undesirable_weight: float = option(1.0, PREFERENCES, "kto: weight of undesirable answers.", within=NOT_NEGATIVE)
    max_prompt_length: int | None = option(
        None, PREFERENCES, "Maximum tokens of a prompt; a longer one loses its beginning.", within=POSITIVE
    )
    max_completion_length: int | None = option(
        None, PREFERENCES, "Maximum tokens of an answer; a longer one loses its end.", within=POSITIVE
    )
    truncation_mode: str = option(
        "keep_start",
        PREFERENCES,
        "What is kept of a row that is then still longer than --max-length.",
        choices=("keep_start", "keep_end"),
    )
