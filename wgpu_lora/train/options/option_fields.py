"""Options of runs of all objectives, and their headings in the command line's help."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.names.choices import ACTIVATION_DTYPES, COMPUTE_DTYPES, OVERFLOW, TRAINED
from wgpu_lora.train.init_methods import DEFAULT, INITIALISATIONS
from wgpu_lora.train.lr_schedule import LR_SCHEDULES
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.option_types import FOREVER, NOT_NEGATIVE, POSITIVE, Range, option
from wgpu_lora.train.track.trackers import HELP
from wgpu_lora.weights.base_formats import AUTO, BASE_FORMATS, CHOICES

FILES, ADAPTER, OPTIMISATION = "Model, data and device", "Adapter", "Optimisation"
BATCHES, MEMORY, SAVING = "Length of the run and batches", "Memory", "Logging and saving"


@dataclass(frozen=True)
class GeneralOptions:
    """The options of every run."""

    data: str | None = option(
        None,
        FILES,
        "File of rows (JSONL, JSON array, CSV, Parquet), folder with train.jsonl and optionally valid.jsonl, or "
        "Hugging Face dataset.",
    )
    output: str | None = option(
        None,
        FILES,
        "Directory for the adapter, log, model card and checkpoints. Default: 'output' or, with --adapters, the "
        "adapters' own directories.",
    )
    model: str | None = option(None, FILES, "Model directory, GGUF file, hub id, 'smollm2' or 'demo'.")
    eval_data: str | None = option(
        None, FILES, "Held-out data, in any form of --data: the loss on it is logged, and best/ keeps the best adapter."
    )
    split: str | None = option(None, FILES, "Split of --data to train on, for example train or 'train[:90%]'.")
    eval_split: str | None = option(None, FILES, "Split to hold out, of --eval-data if given, else of --data.")
    validation_split: float | None = option(
        None, FILES, "Share (0.1) or number (50) of the rows of --data to hold out, instead of --eval-data; seeded."
    )
    dataset_config: str | None = option(None, FILES, "Configuration of a Hugging Face dataset that has several.")
    skip_bad_rows: bool = option(
        False, FILES, "Skip rows that cannot be read; they are listed in skipped_rows.jsonl in --output."
    )
    device: str | None = option(None, FILES, "Device index or part of its name; 'wgpu-lora info' lists the devices.")
    base_dtype: str = option(
        AUTO,
        MEMORY,
        "Storage type of the frozen base weights; auto: that of a GGUF file or a packed model, else nf4. Low-bit ones "
        "also by group and mixed, such as lut2-g16 and q2a4.",
        choices=CHOICES,
    )
    compute_dtype: str = option(
        "f32",
        MEMORY,
        "Type that the inputs of frozen matmuls are rounded to; sums stay in f32. f16 uses matrix units, where "
        "the device has them, also for attention, and bf16 means f16 on them; auto: f16 on such a device, else f32.",
        choices=(*COMPUTE_DTYPES, AUTO),
    )
    tune: bool = option(
        True, FILES, "Time kernel tilings on the device before a model's first run, and use the fastest."
    )
    retune: bool = option(False, FILES, "Time kernel tilings again that are known on this device.")
    init_adapter: str | None = option(None, FILES, "PEFT adapter directory to start from.")
    resume: bool = option(False, SAVING, "Continue the run in --output from its newest complete state.")
    overwrite: bool = option(False, SAVING, "Begin over, and remove the run that --output has.")
    train: str = option(
        "lora",
        ADAPTER,
        "What is trained: an adapter (lora), one on the layers of the MLP alone (mlp), or the tables and scales of the "
        "low-bit matrices in --target-modules (quant-scales).",
        choices=TRAINED,
    )
    snap_steps: int | None = option(
        None,
        ADAPTER,
        "With --train quant-scales, the last steps, whose passes read tables and scales rounded to f16; 0 for none. "
        "Default: a tenth of all steps, with --target-seconds of those that there is time for.",
        within=NOT_NEGATIVE,
    )
    rounded_from: str | None = option(
        None,
        FILES,
        "With --train quant-scales, the model before it was rounded to this base: its held-out loss is measured first, "
        "to compare with (in NF4 unless it is stored quantised).",
    )
    lora_r: int = option(16, ADAPTER, "Rank of the adapter.", within=POSITIVE)
    lora_alpha: float = option(32, ADAPTER, "Scale: the adapter's output is multiplied by alpha / r.", within=POSITIVE)
    lora_dropout: float = option(
        0.0, ADAPTER, "Dropout probability of the adapter's input.", within=Range(at_least=0, below=1)
    )
    use_rslora: bool = option(False, ADAPTER, "Scale by alpha / sqrt(r) instead (rsLoRA).")
    use_dora: bool = option(False, ADAPTER, "Also train a magnitude of each row of the weights (DoRA).")
    init_lora_weights: str = option(
        DEFAULT,
        ADAPTER,
        "How the adapter begins: random A and zero B ('true'), or from the weights (PiSSA, OLoRA, LoftQ).",
        choices=INITIALISATIONS,
    )
    target_modules: str = option(
        "all-linear",
        ADAPTER,
        "'all-linear', 'mlp' or 'attention' (that part's linear layers), names such as q_proj,v_proj, or a regular "
        "expression matched against module paths.",
    )
    learning_rate: float | None = option(
        None,
        OPTIMISATION,
        "Peak learning rate. Default: 1e-5 for preferences and rewards; else 2e-4 at a hidden size of 4096, more for "
        "smaller models, up to 1e-3 (docs/defaults.md).",
        within=NOT_NEGATIVE,
    )
    lr_scheduler_type: str = option("cosine", OPTIMISATION, "Learning-rate schedule.", choices=LR_SCHEDULES)
    lr_scheduler_restart: bool = option(
        False,
        OPTIMISATION,
        "When --resume extends a run, start the schedule anew with a warm-up, not amid that of the whole run.",
    )
    lr_scheduler_min: float = option(
        0.0, OPTIMISATION, "Learning rate that decaying schedules end at.", within=NOT_NEGATIVE
    )
    warmup_ratio: float = option(
        0.03,
        OPTIMISATION,
        "Fraction of the steps, or of --target-seconds, over which the learning rate warms up.",
        within=Range(at_least=0, at_most=1),
    )
    warmup_steps: int = option(
        0,
        OPTIMISATION,
        "Steps over which the learning rate warms up, instead of a fraction of them, if positive.",
        within=NOT_NEGATIVE,
    )
    objective: str = option("sft", OPTIMISATION, "Training objective.", choices=OBJECTIVES)
    objective_args: str | None = option(
        None, OPTIMISATION, "Options of the objective's own, as NAME=VALUE separated by commas."
    )
    optim: str = option("adamw", OPTIMISATION, "The optimizer.", choices=OPTIMIZERS)
    optim_args: str | None = option(
        None, OPTIMISATION, "Options of the optimizer's own, as NAME=VALUE separated by commas."
    )
    weight_decay: float = option(0.0, OPTIMISATION, "Weight decay, decoupled except with sgd.", within=NOT_NEGATIVE)
    adam_beta1: float = option(
        0.9,
        OPTIMISATION,
        "Decay of AdamW's first moment; with lion, of the momentum in a step.",
        within=Range(at_least=0, below=1),
    )
    adam_beta2: float = option(
        0.999,
        OPTIMISATION,
        "Decay of AdamW's second moment; with lion, of the momentum.",
        within=Range(at_least=0, below=1),
    )
    adam_epsilon: float = option(1e-8, OPTIMISATION, "Added to the root of AdamW's second moment.", within=POSITIVE)
    loraplus_lr_ratio: float = option(
        1.0,
        OPTIMISATION,
        "LoRA+: the learning rate of the adapter's B matrices is this many times --learning-rate.",
        within=POSITIVE,
    )
    max_grad_norm: float = option(
        1.0, OPTIMISATION, "Clip the gradient's global norm to this value; 0 turns clipping off.", within=NOT_NEGATIVE
    )
    per_device_train_batch_size: int | None = option(
        None,
        BATCHES,
        "Rows per batch; with packing, the batch holds this many times --max-length tokens. Default: 2, adapted to "
        "small data.",
        within=POSITIVE,
    )
    gradient_accumulation_steps: int | None = option(
        None, BATCHES, "Batches per optimizer step. Default: 4, adapted to small data.", within=POSITIVE
    )
    num_train_epochs: float = option(
        3.0, BATCHES, "Number of passes over the data.", within=Range(above=0, at_most=1000), hint="max_steps"
    )
    max_steps: int = option(
        -1, BATCHES, "Number of optimizer steps, instead of epochs, if positive.", within=Range(above=0, unset=-1)
    )
    target_seconds: float | None = option(
        None,
        BATCHES,
        "Train for this many seconds, instead of epochs: wall-clock time from the first step to the last, with what "
        "lies between. The learning rate follows it. The last held-out loss and the final save come after it.",
        within=POSITIVE,
    )
    max_length: int | None = option(
        None,
        BATCHES,
        "Maximum tokens per row. Default: 1024, or the model's number of positions if that is smaller.",
        within=Range(at_least=2),
    )
    on_overflow: str = option("truncate", BATCHES, "What to do with longer rows.", choices=OVERFLOW)
    packing: bool | None = option(
        None,
        BATCHES,
        "Pack several rows into one batch, without attention between them. Default: on, unless the data are small.",
    )
    completion_only_loss: bool = option(True, BATCHES, "Compute the loss on answers only.")
    enable_thinking: bool | None = option(
        None,
        BATCHES,
        "Have the chat template ask for reasoning (Qwen3) or, if off, rule it out. Default: the template's own.",
    )
    template_date: str | None = option(
        None,
        BATCHES,
        "Date and time for chat templates that print one, such as 2026-07-31. Default: when the run first starts.",
    )
    shuffle: bool = option(True, BATCHES, "Shuffle the rows every epoch.")
    gradient_checkpointing: bool = option(
        False, MEMORY, "Recompute activations in the backward pass: less memory, about a third more work."
    )
    activation_dtype: str = option(
        "f32",
        MEMORY,
        "Type that activations are stored in for the backward pass: 16 bits take about half the memory.",
        choices=ACTIVATION_DTYPES,
    )
    offload_activations: bool = option(
        False,
        MEMORY,
        "Store activations in the host's memory until the backward pass: less device memory, more time.",
    )
    memory_budget: str | None = option(
        None, MEMORY, "Refuse a run that needs more device memory than this, for example 4GiB."
    )
    wait: float | None = option(
        None,
        MEMORY,
        "Seconds to wait for device memory in use by other processes; without a number, as long as it takes.",
        within=Range(at_least=0, unset=FOREVER),
    )
    seed: int = option(
        42,
        OPTIMISATION,
        "Seed of the initial adapter, the order of rows and dropout.",
        within=Range(at_least=0, below=2**32, top="2^32"),
    )
    logging_steps: int | None = option(
        None,
        SAVING,
        "Steps between log lines. Default: 10, or 1 in runs of at most 100 steps.",
        within=POSITIVE,
    )
    save_steps: int = option(
        0, SAVING, "Steps between checkpoints; 0 saves by --save-minutes only.", within=NOT_NEGATIVE
    )
    save_minutes: float = option(
        1.0,
        SAVING,
        "Also save when the last checkpoint is so many minutes old, for at most 1% of the time; 0 does not.",
        within=NOT_NEGATIVE,
    )
    save_total_limit: int = option(3, SAVING, "Number of checkpoints to keep.", within=POSITIVE)
    eval_steps: int = option(
        0, SAVING, "Steps between measurements of the held-out loss; 0 means after every epoch.", within=NOT_NEGATIVE
    )
    eval_on_start: bool = option(True, SAVING, "Also measure the held-out loss before the first step.")
    report_to: str | None = option(None, SAVING, HELP)
    goal: str | None = option(None, SAVING, "What the run is for, in the run log ('wgpu-lora runs').")
    notes: str | None = option(None, SAVING, "Notes on the run, in the run log.")
    run_log: bool = option(True, SAVING, "Record the run in the run log.")


PREFERENCES = "Preference training (--objective dpo, kto, orpo, cpo)"  # their heading in help


@dataclass(frozen=True)
class PreferenceOptions:
    """Objectives read those that their fields are named after."""

    beta: float | None = option(
        None,
        PREFERENCES,
        "How strongly the policy is kept near the reference; the weight of ORPO's odds ratio. Default: 0.1; grpo: 0, "
        "which needs no reference; rloo: 0.05.",
        within=Range(at_least=0, at_most=1e9),
    )
    loss_type: str | None = option(
        None,
        PREFERENCES,
        "dpo: one or, separated by commas, several of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, sppo_hard, "
        "apo_zero, apo_down, sft. kto: kto, apo_zero_unpaired. cpo: sigmoid, hinge, ipo, simpo. grpo: dapo, grpo, "
        "dr_grpo, bnpo, cispo, sapo. Default: the first.",
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
        "dpo, kto, grpo and rloo: PEFT adapter directory that is the frozen reference, and where training starts "
        "unless --init-adapter is given. Default: the base model alone.",
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
        None,
        PREFERENCES,
        "Maximum tokens of an answer; a longer one loses its end. grpo and rloo: of a completion, by default 512.",
        within=POSITIVE,
    )
    truncation_mode: str = option(
        "keep_start",
        PREFERENCES,
        "What is kept of a row that is then still longer than --max-length.",
        choices=("keep_start", "keep_end"),
    )


DISTILLATION = "Distillation (--objective kd)"  # their heading in help


@dataclass(frozen=True)
class DistillationOptions:
    """The teacher, and what is learned from it."""

    teacher_cache: str | None = option(
        None, DISTILLATION, "Directory that teacher-cache has written for the rows of --data, instead of --teacher."
    )
    eval_teacher_cache: str | None = option(
        None,
        DISTILLATION,
        "The same for the rows of --eval-data; those of --validation-split are in --teacher-cache.",
    )
    teacher: str | None = option(
        None,
        DISTILLATION,
        "Model that runs beside the student on its device: a directory, GGUF file, hub id, 'smollm2' or 'demo'. If "
        "it is the student's own base, that is not loaded twice.",
    )
    teacher_adapter: str | None = option(None, DISTILLATION, "PEFT adapter directory of the teacher.")
    teacher_base_dtype: str | None = option(
        None,
        DISTILLATION,
        "Storage type of the teacher's weights. Default: that in which it is stored, else --base-dtype; nf4 if the "
        "student's base is stored quantised, or trained.",
        choices=BASE_FORMATS,
    )
    teacher_top_k: int = option(
        64,
        DISTILLATION,
        "Tokens of --teacher that are compared one by one; all others are one bucket.",
        within=Range(at_least=1),
    )
    temperature: float = option(
        1.0,
        DISTILLATION,
        "kd: what the logits of both are divided by; as in TRL, the loss is not multiplied by its square. grpo and "
        "rloo: of sampling, and of the log-probabilities that are trained.",
        within=Range(at_least=0.05, at_most=100),
    )
    kd_divergence: str = option(
        "forward_kl",
        DISTILLATION,
        "Divergence from the teacher: forward_kl and reverse_kl are TRL's GKD with beta 0 and 1, jsd is that between.",
        choices=("forward_kl", "reverse_kl", "jsd"),
    )
    kd_beta: float = option(
        0.5,
        DISTILLATION,
        "jsd: the teacher's share of the mixture, TRL's beta.",
        within=Range(above=0, below=1),
    )
    kd_weight: float = option(1.0, DISTILLATION, "Weight of the divergence.", within=NOT_NEGATIVE)
    hard_top1_weight: float = option(
        0.0, DISTILLATION, "Weight of the cross-entropy on the teacher's most likely token.", within=NOT_NEGATIVE
    )
    hard_full_weight: float = option(
        0.0, DISTILLATION, "Weight of the cross-entropy on the tokens of the data.", within=NOT_NEGATIVE
    )


REWARDS = "Reinforcement learning (--objective grpo, rloo)"  # their heading in help


@dataclass(frozen=True)
class RewardOptions:
    """Sampling, rewards, and how they are learned from."""

    reward_funcs: str | None = option(
        None,
        REWARDS,
        "Reward functions, separated by commas: FILE.py:NAME, or built in: accuracy, check, json_schema, "
        "regex:PATTERN, length:TOKENS, overlong:MAX/BUFFER, think_format, repetition (docs/grpo.md).",
    )
    reward_weights: str | None = option(None, REWARDS, "Weight of each function, separated by commas. Default: 1 each.")
    reward_timeout: float = option(
        60.0, REWARDS, "Seconds that a call of a function or a tool may take.", within=POSITIVE
    )
    log_completions: int | None = option(
        None,
        REWARDS,
        "Completions of each phase, and of each held-out measurement, that completions.jsonl has. Default: all.",
        within=Range(at_least=0),
    )
    tools: str | None = option(
        None,
        REWARDS,
        "Python functions that the model may call in its completions, separated by commas: FILE.py:NAME.",
    )
    max_tool_calling_iterations: int | None = option(
        None, REWARDS, "Turns of a completion whose calls are run. Default: any number.", within=Range(at_least=1)
    )
    num_generations: int | None = option(
        None, REWARDS, "Completions of each prompt. Default: 8; rloo: 2.", within=Range(at_least=2)
    )
    top_p: float = option(
        1.0, REWARDS, "Sample among the most likely tokens up to this probability.", within=Range(above=0, at_most=1)
    )
    top_k: int = option(0, REWARDS, "Sample among so many most likely tokens; 0: all.", within=NOT_NEGATIVE)
    min_p: float = option(
        0.0,
        REWARDS,
        "Sample among tokens of at least this share of the largest probability.",
        within=Range(at_least=0, at_most=1),
    )
    repetition_penalty: float = option(
        1.0, REWARDS, "Divides the logits of tokens that occurred before; 1 changes nothing.", within=POSITIVE
    )
    steps_per_generation: int | None = option(
        None,
        REWARDS,
        "Batches whose completions are sampled together, a multiple of --gradient-accumulation-steps. Default: those "
        "of one optimizer step.",
        within=POSITIVE,
    )
    num_iterations: int = option(1, REWARDS, "How often completions are trained on.", within=POSITIVE)
    epsilon: float = option(
        0.2, REWARDS, "How far the ratio to the sampler may fall below 1.", within=Range(at_least=0, at_most=1)
    )
    epsilon_high: float | None = option(
        None,
        REWARDS,
        "How far it may rise above 1; with cispo, its upper limit. Default: --epsilon.",
        within=NOT_NEGATIVE,
    )
    delta: float | None = option(None, REWARDS, "grpo: upper limit of the ratio on both sides.", within=Range(above=1))
    importance_sampling_level: str = option(
        "token",
        REWARDS,
        "grpo: whether each token has a ratio of its own, or all of a completion their geometric mean (GSPO).",
        choices=("token", "sequence"),
    )
    scale_rewards: str = option(
        "group",
        REWARDS,
        "grpo: divide advantages by the standard deviation of the prompt's rewards, of all, or by nothing.",
        choices=("group", "batch", "none"),
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize",
        REWARDS,
        "grpo: whether several rewards are added before they are normalised, or after (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    mask_truncated_completions: bool = option(
        False, REWARDS, "Do not train on completions that reached --max-completion-length."
    )
    top_entropy_quantile: float = option(
        1.0,
        REWARDS,
        "grpo: train only on this share of the tokens, those sampled with the largest entropy.",
        within=Range(above=0, at_most=1),
    )
