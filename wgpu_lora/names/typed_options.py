"""Types of keyword arguments, for type checkers and editors. Written by scripts/typed_options.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class TrainingOptions(TypedDict, total=False):
    """Of `finetune()`: the command line's options, and paths, lists and rows."""

    data: str | Path | Iterable[Mapping[str, Any]] | None
    output: str | Path | None
    model: str | Path | None
    eval_data: str | Path | Iterable[Mapping[str, Any]] | None
    split: str | None
    eval_split: str | None
    validation_split: float | None
    dataset_config: str | None
    skip_bad_rows: bool
    device: str | int | None
    base_dtype: str
    compute_dtype: str
    tune: bool
    retune: bool
    init_adapter: str | Path | None
    resume: bool
    overwrite: bool
    train: str
    snap_steps: int | None
    rounded_from: str | Path | None
    lora_r: int
    lora_alpha: float
    lora_dropout: float
    use_rslora: bool
    use_dora: bool
    init_lora_weights: str
    target_modules: str | list[str]
    learning_rate: float | None
    lr_scheduler_type: str
    lr_scheduler_restart: bool
    lr_scheduler_min: float
    warmup_ratio: float
    warmup_steps: int
    objective: str
    objective_args: str | Mapping[str, Any] | None
    optim: str
    optim_args: str | Mapping[str, Any] | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    loraplus_lr_ratio: float
    max_grad_norm: float
    per_device_train_batch_size: int | None
    gradient_accumulation_steps: int | None
    num_train_epochs: float
    max_steps: int
    target_seconds: float | None
    max_length: int | None
    on_overflow: str
    packing: bool | None
    completion_only_loss: bool
    enable_thinking: bool | None
    template_date: str | None
    shuffle: bool
    gradient_checkpointing: bool
    activation_dtype: str
    offload_activations: bool
    memory_budget: str | None
    wait: float | None
    seed: int
    logging_steps: int | None
    save_steps: int
    save_minutes: float
    save_total_limit: int
    eval_steps: int
    eval_on_start: bool
    report_to: str | list[str] | None
    goal: str | None
    notes: str | None
    run_log: bool
    beta: float | None
    loss_type: str | list[str] | None
    loss_weights: str | list[float] | None
    label_smoothing: float
    ld_alpha: float | None
    reference_adapter: str | Path | None
    precompute_ref_log_probs: bool
    cpo_alpha: float
    simpo_gamma: float
    desirable_weight: float
    undesirable_weight: float
    max_prompt_length: int | None
    max_completion_length: int | None
    truncation_mode: str
    teacher_cache: str | Path | None
    eval_teacher_cache: str | Path | None
    teacher: str | Path | None
    teacher_adapter: str | Path | None
    teacher_base_dtype: str | None
    teacher_top_k: int
    temperature: float
    kd_divergence: str
    kd_beta: float
    kd_weight: float
    hard_top1_weight: float
    hard_full_weight: float
    reward_funcs: str | list[str] | None
    reward_weights: str | list[float] | None
    reward_timeout: float
    log_completions: int | None
    tools: str | list[str] | None
    max_tool_calling_iterations: int | None
    num_generations: int | None
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    steps_per_generation: int | None
    num_iterations: int
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    importance_sampling_level: str
    scale_rewards: str
    multi_objective_aggregation: str
    mask_truncated_completions: bool
    top_entropy_quantile: float


class AnswerOptions(TypedDict, total=False):
    """Of `generate()`, `answer()` and `compare()`."""

    system: str | None
    prompt_format: str | None
    enable_thinking: bool | None
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    stop: str | Sequence[str]
    seed: int
