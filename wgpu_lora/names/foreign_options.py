"""Names in other programs: aliases of options and of their values, options that are refused, and commands.

The names are those of transformers (TrainingArguments and its example scripts), TRL, PEFT (LoraConfig), Unsloth,
mlx-lm, axolotl and LLaMA-Factory. An alias has the same meaning and type as its option. An option is refused with
advice only where a user would otherwise do something wrong; all others get the nearest name.
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
    ("adam_epsilon",): "adam_eps eps",
    ("beta",): "dpo_beta pref_beta rl_beta",
    ("loss_type",): "dpo_loss_type pref_loss dpo_loss",
    ("reference_adapter",): "ref_adapter ref_model_adapters",
    ("teacher",): "teacher_model teacher_model_name_or_path",
    ("kd_weight",): "kd_alpha",
    ("max_grad_norm",): "gradient_clipping grad_clip clip_grad_norm max_norm",
    (
        "per_device_train_batch_size",
        "batch",
    ): "batch_size batch train_batch_size micro_batch_size "
    "per_device_batch_size device_batch_size per_gpu_train_batch_size mbs",
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

# Options of other programs that this one does not have: (advice, their names). In the advice, {x} is the current
# spelling of option x, and {x=1} the same with a value; it is shown by commands that have all of these options.
REFUSED: tuple[tuple[str, str], ...] = (
    (
        "does not exist here: after training, 'wgpu-lora push DIR OWNER/NAME' uploads an adapter to the hub",
        "push_to_hub hub_model_id hub_private_repo hub_strategy upload_repo",
    ),
    (
        "does not exist here: {report_to=wandb}, tensorboard or trackio reports to a tracker, whose own environment "
        "variables apply",
        "run_name wandb wandb_project wandb_run_name wandb_entity use_wandb tensorboard trackio_space_id",
    ),
    (
        "does not exist here: log.jsonl in the {output} directory has all steps, and 'wgpu-lora report DIR' plots them",
        "logging_dir use_swanlab use_mlflow plot_loss",
    ),
    (
        "does not exist here: sums and adapters are float32; {compute_dtype} rounds activations to bf16 or f16, and "
        "{base_dtype} sets the type of the frozen weights",
        "bf16 bfloat16 use_bf16 fp16 float16 half use_fp16 mixed_precision fp32 float32 tf32 fp8 "
        "bnb_4bit_compute_dtype",
    ),
    (
        "does not exist here: {base_dtype} sets the type of the frozen weights, and sums are float32",
        "torch_dtype dtype precision model_dtype bf16 bfloat16 fp16 float16 half fp32 float32 load_in_fp8",
    ),
    (
        "is not needed: the base is NF4 by default, or as its GGUF file has it ({base_dtype} selects another type)",
        "load_in_4bit use_4bit load_in_4_bit quantization_bit quantization_config bnb_4bit_quant_type bnb_config "
        "bnb_4bit_use_double_quant qlora",
    ),
    ("is {base_dtype=int8} here; the base is NF4 by default, which is smaller", "load_in_8bit use_8bit"),
    (
        "does not exist here: a run uses one device, chosen by {device}",
        "device_map num_gpus n_gpus gpus num_processes num_machines nproc_per_node nnodes local_rank deepspeed fsdp "
        "fsdp_config ddp tensor_parallel world_size num_nodes use_cpu no_cuda use_mps_device cuda cpu cpu_offload",
    ),
    (
        "is not needed: attention never stores all scores, and kernels are tuned to the device",
        "flash_attention flash_attn use_flash_attention_2 attn_implementation sdp_attention xformers_attention "
        "use_unsloth torch_compile use_liger use_liger_kernel",
    ),
    ("does not exist here: code from a model's repository is never run", "trust_remote_code remote_code"),
    (
        "does not exist here: download the revision first ('hf download MODEL --revision ...') and give its "
        "directory as {model}",
        "revision model_revision",
    ),
    (
        "is not needed: the hub login is used ('hf auth login', or HF_TOKEN)",
        "token hf_token use_auth_token hub_token auth_token",
    ),
    (
        "does not exist here: {temperature=0} is greedy, any higher value samples; {max_new_tokens} limits the answer",
        "do_sample greedy num_beams sampling",
    ),
    ("is {adam_beta1} and {adam_beta2}", "betas adam_betas"),
    (
        "does not exist here: {optim} selects the optimizer, whose own options are given as {optim_args}",
        "optim_target_modules adafactor momentum nesterov use_badam use_galore",
    ),
    (
        "does not exist here: the held-out data of {eval_data} are evaluated after every epoch, or every "
        "{eval_steps} steps",
        "eval_strategy evaluation_strategy do_eval evals_per_epoch eval_delay evaluate_during_training val eval",
    ),
    (
        "does not exist here: {save_steps} sets how often a checkpoint is kept, and the last is always kept",
        "save_strategy saves_per_epoch save_only_model save_safetensors",
    ),
    (
        "does not exist here: best/ in the {output} directory has the adapter with the best held-out loss, and a run "
        "can be stopped at any time (Ctrl-C)",
        "load_best_model_at_end metric_for_best_model greater_is_better save_best early_stopping "
        "early_stopping_patience early_stopping_threshold patience",
    ),
    (
        "does not exist here: shorten the file, for example with 'head -n 1000'",
        "max_samples max_train_samples num_samples dataset_sample",
    ),
    (
        "is not needed: the format of rows is detected from their keys (messages, prompt and completion, text, Alpaca, "
        "ShareGPT)",
        "dataset_text_field text_field text_key formatting_func dataset_format dataset_type data_format "
        "instruction_template response_template",
    ),
    (
        "is not needed: the chat template comes with the model's tokenizer",
        "chat_template chat_template_path template prompt_template default_system tokenizer tokenizer_name "
        "processing_class eos_token special_tokens add_eos_token",
    ),
    (
        "is {completion_only_loss}, the default: only the answers are trained on, in every turn of a conversation",
        "mask_prompt train_on_completions train_on_responses_only assistant_only_loss train_on_responses "
        "response_only_loss mask_inputs completion_only",
    ),
    (
        "is {completion_only_loss=False}: by default only the answers are trained on",
        "train_on_inputs train_on_prompt",
    ),
    (
        "is not needed: held-out rows are packed into batches as memory allows",
        "per_device_eval_batch_size eval_batch_size val_batch_size eval_accumulation_steps",
    ),
    (
        "is not needed: {train=lora} is the default, on an NF4 base (QLoRA) unless {base_dtype} selects another type",
        "finetuning_type fine_tune_type train_type use_peft use_lora peft lora peft_type peft_config lora_config",
    ),
    ("is not supported: full fine-tuning; adapters are LoRA on a frozen base", "full_finetuning adalora oft"),
    (
        "is not supported: every layer gets an adapter",
        "num_layers lora_layers layers_to_transform layers_pattern finetune_last_n_layers num_lora_layers layers",
    ),
    (
        "is not supported: only the linear layers of blocks can have adapters ({target_modules}), all with the same "
        "rank and alpha",
        "modules_to_save lora_modules_to_save train_embeddings target_parameters finetune_vision_layers bias lora_bias "
        "rank_pattern alpha_pattern",
    ),
    (
        "is a value of {init_lora_weights}: pissa, pissa_niter_16 or loftq",
        "use_pissa pissa_init pissa pissa_iter loftq_config loftq use_loftq loftq_bits loftq_iter",
    ),
    (
        "is {lr_scheduler_min}, a learning rate, not a share of the highest one",
        "cosine_min_lr_ratio min_lr_ratio lr_min_ratio",
    ),
    (
        "is not supported",
        "neftune_noise_alpha noisy_embedding_alpha label_smoothing_factor lr_scheduler_kwargs num_cycles rope_scaling "
        "reward_model f_divergence_type discopop_tau sync_ref_model callbacks compute_metrics",
    ),
    (
        "is {resume}: it continues from the last checkpoint in the {output} directory",
        "resume_from_checkpoint resume_from auto_resume_from_checkpoints load_checkpoint continue_training checkpoint",
    ),
    (
        "is {init_adapter}, which starts a new run from an adapter ({resume} continues a run)",
        "load_adapter lora_weights peft_path pretrained_adapter resume_adapter_file",
    ),
    (
        "is not an option here: set {per_device_train_batch_size} (rows per batch) and "
        "{gradient_accumulation_steps} (batches per step)",
        "total_batch_size global_batch_size effective_batch_size auto_find_batch_size",
    ),
    ("is a TOML file of options here: {recipe=FILE}", "config config_file yaml args training_args"),
    ("does not exist here: {seed} determines the order of rows", "data_seed full_determinism shuffle_seed"),
    (
        "does not exist here: {adapters} DATA:CHECKPOINT, given several times, trains several adapters at once",
        "datasets train_files multi_adapter",
    ),
)

# Commands of other programs -> what to type, and a remark after a comma. Those of objectives come from the registry.
COMMANDS: dict[str, str] = {
    "train sft lora qlora fit fine-tune training peft": "finetune",
    "resume continue": "finetune --resume",
    "simpo": "finetune --objective cpo --loss-type simpo",
    "ppo rlhf": "finetune --objective grpo, which trains on completions that it samples, by rewards",
    "pretrain cpt pt": "finetune --data FILE, with rows of plain text",
    "repl talk ask-me ui webui webchat interactive": "chat",
    "infer inference run predict ask complete query": "generate",
    "server api": "serve",
    "fuse merge-lora merge-and-unload safetensors": "merge",
    "quant pack nf4 bnb gptq awq": "quantize",
    "convert gguf to-gguf save ggml": "export gguf",
    "eval test perplexity ppl validate score": "evaluate",
    "stats inspect lengths": "data stats",
    "preprocess tokenize dedup deduplicate split": "data prepare",
    "upload publish push-to-hub": "push",
    "devices gpus gpu env doctor list-devices": "info",
    "memory estimate vram dry-run": "plan",
    "list ls models config init": "recipes list",
    "status ps queue jobs": "share status",
    "plot tensorboard logs dashboard wandb": "report",
}
