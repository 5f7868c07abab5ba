"""Advice for options that other programs have and this one does not: (sentence, names of the options).

In a sentence, {x} is replaced by the current spelling of option x, and {x=1} by the same with a value.
"""

from __future__ import annotations

# For training commands.
SENTENCES: tuple[tuple[str, str], ...] = (
    (
        "does not exist here: after training, 'wgpu-lora push DIR OWNER/NAME' uploads an adapter to the hub",
        "push_to_hub hub_model_id hub_private_repo hub_strategy hub_always_push hub_revision upload_repo "
        "push_to_hub_model_id",
    ),
    (
        "does not exist here: {report_to=wandb}, tensorboard or trackio reports to a tracker, whose own environment "
        "variables apply",
        "run_name wandb wandb_project wandb_run_name wandb_entity use_wandb tensorboard trackio_space_id project",
    ),
    (
        "does not exist here: log.jsonl in the {output} directory has all steps, and 'wgpu-lora report DIR' plots them",
        "logging_dir use_swanlab swanlab_project use_mlflow plot_loss",
    ),
    (
        "does not exist here: sums and adapters are float32; {compute_dtype=bf16} rounds activations, and "
        "{base_dtype=bf16} stores the base in bf16",
        "bf16 bfloat16 use_bf16 bf16_full_eval pure_bf16",
    ),
    (
        "does not exist here: sums and adapters are float32; {compute_dtype=f16} rounds activations, and "
        "{base_dtype=f16} stores the base in f16",
        "fp16 float16 half use_fp16 fp16_full_eval fp16_opt_level fp16_backend half_precision_backend "
        "mixed_precision amp",
    ),
    (
        "is not needed: sums and adapters are float32, and so are activations unless {compute_dtype} rounds them",
        "fp32 float32 use_fp32 full_precision",
    ),
    (
        "does not exist here: {base_dtype} sets the type of the frozen weights, {compute_dtype} the type that "
        "activations are rounded to",
        "torch_dtype dtype precision model_dtype tf32 fp8 bnb_4bit_compute_dtype",
    ),
    (
        "is {adam_beta1} and {adam_beta2}",
        "betas adam_betas",
    ),
    (
        "does not exist here: {optim} selects the optimizer, whose own options are given as {optim_args}",
        "optim_target_modules adafactor momentum nesterov",
    ),
    (
        "does not exist here: the held-out data of {eval_data} are evaluated after every epoch, or every "
        "{eval_steps} steps",
        "eval_strategy evaluation_strategy do_eval evals_per_epoch eval_delay evaluate_during_training val eval "
        "logging_eval test_eval",
    ),
    (
        "does not exist here: {save_steps} sets how often a checkpoint is kept, and the last is always kept",
        "save_strategy saves_per_epoch save_only_model save_safetensors",
    ),
    (
        "does not exist here: {logging_steps} sets how often a line is logged",
        "logging_strategy logging_first_step log_level verbose",
    ),
    (
        "does not exist here: best/ in the {output} directory has the adapter with the best held-out loss",
        "load_best_model_at_end metric_for_best_model greater_is_better save_best",
    ),
    (
        "does not exist here: best/ in the {output} directory has the adapter with the best held-out loss, and a run "
        "can be stopped at any time (Ctrl-C)",
        "early_stopping early_stopping_patience early_stopping_threshold patience",
    ),
    (
        "is not needed: held-out rows are packed into batches as memory allows",
        "per_device_eval_batch_size eval_batch_size val_batch_size eval_accumulation_steps "
        "per_gpu_eval_batch_size prediction_loss_only include_inputs_for_metrics eval_sample_packing eval_packing",
    ),
    (
        "is not needed: all held-out rows are evaluated",
        "val_batches test_batches max_eval_samples eval_max_samples",
    ),
    (
        "does not exist here: {eval_data} names a file of held-out rows, {eval_split=SPLIT} a split of a dataset, "
        "such as 'train[90%:]', and {validation_split} a share of the rows",
        "validation_split_percentage eval_set_size",
    ),
    (
        "does not exist here: shorten the file, for example with 'head -n 1000'",
        "max_samples max_train_samples num_samples dataset_sample",
    ),
    (
        "does not exist here: packing fills batches first-fit, and rows do not attend to each other",
        "packing_strategy padding_free pad_to_multiple_of pad_to_max_length padding neat_packing "
        "pad_to_sequence_len padding_side group_by_length length_column_name pad_token",
    ),
    (
        "is not needed: rows are read and tokenised once, before training",
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last dataloader_prefetch_factor "
        "dataloader_persistent_workers dataset_num_proc preprocessing_num_workers num_workers num_proc "
        "overwrite_cache streaming remove_unused_columns dataset_batch_size dataset_prepared_path dataset_kwargs "
        "skip_prepare_dataset workers data_collator collator dataset_processes skip_memory_metrics",
    ),
    (
        "is not needed: the format of rows is detected from their keys (messages, prompt and completion, text, Alpaca, "
        "ShareGPT)",
        "dataset_text_field text_field text_key prompt_field completion_field formatting_func dataset_format "
        "prompt_feature completion_feature text_feature chat_feature messages_key dataset_type data_format "
        "field_messages instruction_template response_template instruction_part response_part",
    ),
    (
        "is not needed: the chat template comes with the model's tokenizer",
        "chat_template chat_template_path template prompt_template default_system tokenizer tokenizer_name "
        "tokenizer_path processing_class eos_token eos_token_id special_tokens add_eos_token tokenizer_type "
        "use_fast_tokenizer use_slow_tokenizer resize_token_embeddings model_type",
    ),
    (
        "is {completion_only_loss}: by default only the answers are trained on, in every turn of a conversation",
        "mask_prompt train_on_inputs train_on_prompt train_on_completions train_on_responses_only "
        "assistant_only_loss train_on_responses response_only_loss mask_inputs completion_only mask_history",
    ),
    (
        "is not needed: {train=lora} is the default, on an NF4 base (QLoRA) unless {base_dtype} selects another type",
        "finetuning_type fine_tune_type train_type use_peft use_lora peft lora peft_type task_type "
        "trainer_type do_train peft_config lora_config model_init_kwargs full_finetuning sft_type training_type",
    ),
    (
        "is not supported: every layer gets an adapter",
        "num_layers lora_layers layers_to_transform lora_layers_to_transform layers_pattern "
        "finetune_last_n_layers num_lora_layers layers",
    ),
    (
        "is not supported: only the linear layers of blocks can have adapters ({target_modules})",
        "modules_to_save lora_modules_to_save finetune_language_layers finetune_attention_modules "
        "finetune_mlp_modules finetune_vision_layers train_embeddings additional_target lora_target_parameters "
        "target_parameters",
    ),
    (
        "is {target_modules=all-linear}, which is the default",
        "lora_target_linear target_all_linear",
    ),
    (
        "is not supported: no biases are trained",
        "bias lora_bias train_bias",
    ),
    (
        "is not supported: all modules have the same rank and alpha",
        "rank_pattern alpha_pattern loraplus_lr_embedding",
    ),
    (
        "is not supported: adapters are LoRA, with {use_rslora} rank-stabilised LoRA, or with {use_dora} DoRA",
        "use_badam use_galore adalora eva_config lora_fa corda_config layer_replication use_loreft relora_steps oft",
    ),
    (
        "is a value of {init_lora_weights}: pissa, pissa_niter_16 or loftq",
        "use_pissa pissa_init pissa pissa_iter loftq_config loftq use_loftq loftq_bits loftq_iter",
    ),
    (
        "is not needed: all linear layers are stored as [out, in]",
        "fan_in_fan_out",
    ),
    (
        "is {objective}: sft, dpo, kto, orpo, cpo or kd",
        "rl stage method train_mode",
    ),
    (
        "is not needed: the reference is the base model alone or {reference_adapter}",
        "ref_model reference_model ref_model_name_or_path reference_model_path ref_model_init_kwargs",
    ),
    (
        "is {lr_scheduler_min}, a learning rate, not a share of the highest one",
        "cosine_min_lr_ratio min_lr_ratio lr_min_ratio",
    ),
    (
        "is not supported",
        "neftune_noise_alpha noisy_embedding_alpha label_smoothing_factor lr_scheduler_kwargs num_cycles "
        "lr_end rope_scaling rope_theta ema reward_model num_generations "
        "f_divergence_type use_weighting discopop_tau sync_ref_model use_liger liger use_liger_kernel "
        "enable_liger_kernel compute_metrics callbacks preprocess_logits_for_metrics model_parallel curriculum",
    ),
    (
        "is {resume}: it continues from the last checkpoint in the {output} directory",
        "resume_from_checkpoint resume_from auto_resume_from_checkpoints load_checkpoint continue_training "
        "ckpt_path checkpoint",
    ),
    (
        "is {resume} or {init_adapter}: the former continues the run in the {output} directory, the latter starts a "
        "new run from an adapter",
        "load_adapter lora_weights peft_path pretrained_adapter resume_adapter_file",
    ),
    (
        "is not an option here: set {per_device_train_batch_size} (rows per batch) and "
        "{gradient_accumulation_steps} (batches per step)",
        "total_batch_size global_batch_size effective_batch_size",
    ),
    (
        "is not needed: 'wgpu-lora plan' shows what fits, to the byte, and a run that does not fit suggests smaller "
        "settings",
        "auto_find_batch_size auto_batch_size",
    ),
    (
        "is a TOML file of options here: {recipe=FILE}",
        "config config_file yaml args training_args",
    ),
    (
        "is a separate command: 'wgpu-lora evaluate'",
        "test do_test do_predict predict_with_generate eval_only test_file test_data test_dataset",
    ),
    (
        "does not exist here: {seed} determines the order of rows",
        "data_seed full_determinism shuffle_dataset shuffle_seed dataset_shuffle_seed",
    ),
    (
        "does not exist here: progress is a bar on terminals, and lines elsewhere",
        "disable_tqdm progress_bar quiet silent",
    ),
    (
        "is {enable_thinking}",
        "thinking reasoning",
    ),
    (
        "does not exist here: 'wgpu-lora export gguf' writes a GGUF file",
        "export_gguf gguf save_gguf de_quantize",
    ),
    (
        "does not exist here: {adapters} DATA:CHECKPOINT, given several times, trains several adapters at once",
        "datasets train_files multi_adapter",
    ),
)

# For all commands that have the options in the sentence; training's advice for the same name comes first.
ANYWHERE: tuple[tuple[str, str], ...] = (
    (
        "is not needed: the base is NF4 by default, with double quantisation ({base_dtype} selects another type)",
        "load_in_4bit use_4bit load_in_4_bit quantization_bit quantization_config bnb_4bit_quant_type bnb_config "
        "bnb_4bit_use_double_quant use_bnb_nested_quant double_quantization use_nested_quant quantize_base qlora "
        "use_qlora",
    ),
    (
        "is {base_dtype=int8} here; the base is NF4 by default, which is smaller",
        "load_in_8bit use_8bit",
    ),
    (
        "is not supported: the base is NF4 by default, which is smaller ({base_dtype} selects another type)",
        "load_in_fp8 load_in_16bit",
    ),
    (
        "is not needed: attention never stores all scores, and kernels are tuned to the device",
        "flash_attention flash_attn use_flash_attention_2 flash_attention_2 attn_implementation sdp_attention "
        "xformers_attention use_unsloth unsloth torch_compile torch_compile_mode torch_compile_backend compile "
        "use_cache low_cpu_mem_usage fast_inference unsloth_tiled_mlp torch_empty_cache_steps lora_mlp_kernel "
        "lora_qkv_kernel lora_o_kernel optimize_memory",
    ),
    (
        "does not exist here: a run uses one device, chosen by {device}",
        "device_map num_gpus n_gpus gpus ngpu num_processes num_machines nproc_per_node nnodes local_rank "
        "local_process_index deepspeed fsdp fsdp_config ddp_timeout ddp_find_unused_parameters ddp ddp_backend "
        "tensor_parallel accelerator use_cpu no_cuda use_mps_device cuda cpu cpu_offload world_size num_nodes",
    ),
    (
        "does not exist here: code from a model's repository is never run",
        "trust_remote_code remote_code",
    ),
    (
        "does not exist here: download the revision first ('hf download MODEL --revision ...') and give its "
        "directory as {model}",
        "revision model_revision",
    ),
    (
        "is not needed: the hub's cache is used (set HF_HOME to move it)",
        "cache_dir hf_home download_dir",
    ),
    (
        "does not exist here: {temperature=0} is greedy, any higher value samples",
        "do_sample greedy num_beams sampling",
    ),
    (
        "is not needed: the hub login is used ('hf auth login', or HF_TOKEN)",
        "token hf_token use_auth_token hub_token auth_token",
    ),
    (
        "does not exist here: {base_dtype} sets the type of the weights, and sums are float32",
        "bf16 bfloat16 fp16 float16 half torch_dtype dtype precision model_dtype",
    ),
)
