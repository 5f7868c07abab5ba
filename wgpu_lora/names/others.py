"""Names of options in other programs, and the options that words in unknown names refer to.

The names are those of transformers (TrainingArguments and its example scripts), TRL, PEFT (LoraConfig), Unsloth,
mlx-lm, axolotl and LLaMA-Factory. An alias has the same meaning and type as its option; options that differ have
advice in `instead.py`.
"""

from __future__ import annotations

# Option (of several, the first that the command has) -> aliases.
ALIASES: dict[tuple[str, ...], str] = {
    ("learning_rate",): "lr peak_lr learning_rate_max",
    ("lr_scheduler_type",): "lr_scheduler lr_schedule scheduler_type learning_rate_scheduler",
    ("lr_scheduler_min",): "min_lr lr_min min_learning_rate learning_rate_min cosine_min_lr",
    ("warmup_ratio",): "lr_warmup_ratio",
    ("warmup_steps",): "num_warmup_steps lr_warmup_steps",
    ("optim",): "optimizer optimizer_name",
    ("loraplus_lr_ratio",): "lora_plus loraplus loraplus_ratio",
    ("weight_decay",): "wd",
    ("adam_beta1",): "beta1 adam_beta_1",
    ("adam_beta2",): "beta2 adam_beta_2",
    ("adam_epsilon",): "adam_eps eps epsilon",
    ("beta",): "dpo_beta pref_beta rl_beta",
    ("loss_type",): "dpo_loss_type pref_loss dpo_loss",
    ("reference_adapter",): "ref_adapter ref_model_adapters",
    ("teacher",): "teacher_model teacher_model_name_or_path",
    ("kd_weight",): "kd_alpha",
    ("max_grad_norm",): "gradient_clipping grad_clip clip_grad_norm max_norm",
    ("per_device_train_batch_size", "batch"): "batch_size train_batch_size micro_batch_size per_device_batch_size "
    "device_batch_size per_gpu_train_batch_size mbs",
    ("gradient_accumulation_steps", "accumulation"): "gradient_accumulation grad_accumulation_steps grad_accum "
    "accumulation_steps grad_accum_steps gas accumulate_grad_batches",
    ("num_train_epochs",): "epochs num_epochs n_epochs train_epochs max_epochs epoch",
    ("max_steps",): "iters max_iters num_iters iterations num_train_steps max_train_steps train_steps num_steps steps",
    ("target_seconds",): "max_seconds train_seconds",
    ("max_length", "tokens"): "max_seq_length max_seq_len seq_len seq_length sequence_len sequence_length cutoff_len "
    "context_length ctx_len model_max_length max_sequence_length",
    ("packing",): "sample_packing pack",
    ("gradient_checkpointing",): "grad_checkpoint grad_checkpointing use_gradient_checkpointing "
    "activation_checkpointing",
    ("offload_activations",): "activation_offloading offload_checkpoints",
    ("lora_r", "rank"): "rank r lora_rank",
    ("lora_alpha",): "alpha",
    ("lora_dropout",): "dropout",
    ("use_rslora",): "rslora",
    ("use_dora",): "dora",
    ("init_lora_weights",): "lora_init init_weights",
    ("target_modules",): "lora_target lora_target_modules",
    ("model",): "model_name_or_path model_name model_id model_path base_model base_model_name_or_path "
    "pretrained_model_name_or_path hf_path",
    ("data",): "dataset dataset_name dataset_path dataset_name_or_path train_file train_data train_dataset data_path "
    "data_dir data_files train_path",
    ("split",): "dataset_split dataset_train_split train_split",
    ("eval_split",): "dataset_test_split dataset_eval_split test_split",
    ("validation_split",): "val_set_size val_size test_size val_split eval_ratio",
    ("dataset_config",): "dataset_config_name dataset_subset",
    ("eval_data",): "eval_dataset validation_file valid_file eval_file val_file val_data valid_data eval_path "
    "validation_data val_dataset",
    ("adapter", "output"): "adapter_path",
    ("adapter", "init_adapter"): "adapter_name_or_path adapter_dir lora_path lora_model_dir peft_model lora_adapter",
    ("output", "checkpoint"): "output output_dir out_dir save_path save_dir out output_path export_dir outfile",
    ("report_to",): "trackers tracker log_with",
    ("logging_steps",): "steps_per_report log_steps log_every log_interval logging_interval",
    ("save_steps",): "save_every save_interval checkpoint_steps checkpoint_every",
    ("save_minutes",): "checkpoint_minutes save_every_minutes",
    ("overwrite",): "overwrite_output_dir force",
    ("save_total_limit",): "max_checkpoints keep_checkpoints",
    ("eval_steps",): "steps_per_eval eval_every eval_interval val_steps val_interval",
    ("seed",): "random_seed random_state",
    ("quantize",): "outtype quantization quantization_method quant_type",
    ("dtype",): "save_dtype merge_dtype",
    ("max_new_tokens",): "max_tokens n_predict num_predict max_gen_tokens",
    ("temperature",): "temp",
    ("top_p",): "nucleus",
    ("stop",): "stop_strings stop_sequences stop_words",
    ("repetition_penalty",): "repeat_penalty",
    ("prompts",): "prompt_file prompts_file input_file",
    ("system",): "system_prompt system_message",
    ("prompt",): "question message",
}

# Option -> its values -> their names in other programs.
VALUES: dict[str, dict[str, str]] = {
    "optim": {
        "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla adamw_torch_npu_fused "
        "paged_adamw paged_adamw_32bit",
        "adamw_8bit": "adamw_bnb_8bit paged_adamw_8bit adamw8bit",
        "lion": "lion_32bit paged_lion paged_lion_32bit",
        "lion_8bit": "paged_lion_8bit lion8bit",
    },
}

# Words of an unknown name -> the options that it may refer to.
WORDS: dict[str, str] = {
    "batch": "per_device_train_batch_size gradient_accumulation_steps batch",
    "accum accumulation": "gradient_accumulation_steps accumulation",
    "epoch epochs": "num_train_epochs",
    "step steps iter iters iterations": "max_steps",
    "length len seq sequence context ctx cutoff truncate tokens": "max_length max_new_tokens tokens",
    "rank": "lora_r rank",
    "alpha scale scaling": "lora_alpha",
    "dropout": "lora_dropout",
    "lr rate": "learning_rate",
    "scheduler decay": "lr_scheduler_type weight_decay",
    "warmup warm": "warmup_ratio warmup_steps",
    "optim optimizer adam adamw": "optim",
    "beta betas": "adam_beta1 adam_beta2",
    "eps epsilon": "adam_epsilon",
    "clip norm": "max_grad_norm",
    "eval evaluation valid validation val heldout test": "eval_data eval_steps",
    "save saving checkpoint checkpoints": "save_steps save_minutes save_total_limit",
    "log logging report": "logging_steps report_to",
    "memory vram ram": "memory_budget gradient_checkpointing",
    "dtype bits bit quant quantization precision 4bit 8bit": "base_dtype compute_dtype quantize dtype",
    "module modules layers target": "target_modules layers",
    "output out dir directory folder path": "output",
    "model base": "model",
    "data dataset file train training rows": "data",
    "gpu device cuda": "device",
    "adapter lora": "adapter init_adapter adapters",
    "time seconds minutes hours": "target_seconds",
    "prompt": "prompt",
    "temperature": "temperature",
}
