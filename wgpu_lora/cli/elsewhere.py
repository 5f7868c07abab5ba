"""Commands that other programs have, and what to use here instead."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from wgpu_lora.train.objectives import OBJECTIVES

# Group -> pairs of advice and the commands that it is for. {chat} is the command here that can chat.
INSTEAD: dict[str, tuple[tuple[str, str], ...]] = {
    "wgpu-lora": (
        (
            "there is no server: 'wgpu-lora export gguf' writes a file for llama.cpp's llama-server or for "
            "Ollama, and {chat} answers here",
            "serve server api openai deploy vllm ollama host endpoint",
        ),
        (
            "use 'wgpu-lora finetune'",
            "train sft lora qlora fit fine-tune training peft trainer start learn",
        ),
        (
            "use 'wgpu-lora finetune --resume'",
            "resume continue",
        ),
        (
            "use 'wgpu-lora finetune --objective cpo --loss-type simpo'",
            "simpo",
        ),
        (
            "it is not supported: 'wgpu-lora finetune --objective' takes dpo, kto, orpo and cpo",
            "grpo ppo rlhf reward rl",
        ),
        (
            "use 'wgpu-lora finetune', with rows of plain text",
            "pretrain cpt pt",
        ),
        (
            "use {chat}",
            "chat repl talk ask-me webui ui gradio webchat interactive console shell studio",
        ),
        (
            "use 'wgpu-lora generate'",
            "infer inference run predict ask prompt complete answer gen sample query cli",
        ),
        (
            "use 'wgpu-lora merge' (or 'wgpu-lora export gguf', which merges too)",
            "fuse merge-lora merge-adapter merge-and-unload",
        ),
        (
            "use 'wgpu-lora quantize', or 'wgpu-lora export gguf --quantize TYPE' for llama.cpp",
            "quantise quant pack nf4 bnb gptq awq requantize",
        ),
        (
            "use 'wgpu-lora export gguf', or 'wgpu-lora merge' for a model in safetensors",
            "convert gguf to-gguf save hf-to-gguf ggml convert-hf-to-gguf safetensors",
        ),
        (
            "use 'wgpu-lora evaluate'",
            "eval test perplexity ppl lm-eval validate score val",
        ),
        (
            "use 'wgpu-lora bench'",
            "benchmark perf speed time",
        ),
        (
            "use 'wgpu-lora data stats'",
            "stats statistics inspect data-stats lengths",
        ),
        (
            "use 'hf auth login'; 'wgpu-lora push' uses its login",
            "login auth logout whoami huggingface-login",
        ),
        (
            "use 'wgpu-lora push'",
            "upload publish push-to-hub hub",
        ),
        (
            "it is not needed: a model given by its hub id is downloaded (or 'hf download MODEL' does it now)",
            "download pull fetch get",
        ),
        (
            "use 'wgpu-lora info'",
            "devices gpus device gpu env doctor check system list-devices",
        ),
        (
            "use 'wgpu-lora --version'",
            "version",
        ),
        (
            "use 'wgpu-lora --help', or --help after a command",
            "help commands man",
        ),
        (
            "use 'wgpu-lora plan'",
            "memory estimate vram dry-run calc size",
        ),
        (
            "use 'wgpu-lora data prepare' for duplicates, splits and mixed formats; 'wgpu-lora finetune --data FILE' "
            "reads and tokenises rows by itself",
            "prepare preprocess tokenize tokenise dataset convert-data prepare-data dedup dedupe deduplicate clean "
            "split",
        ),
        (
            "use 'wgpu-lora recipes list', 'wgpu-lora bench --list' or 'wgpu-lora info'",
            "list ls models",
        ),
        (
            "use 'wgpu-lora recipes list', and 'wgpu-lora finetune --recipe NAME'",
            "config init recipe configs new create",
        ),
        (
            "use 'wgpu-lora share status'",
            "status ps stop kill queue jobs",
        ),
        (
            "use 'wgpu-lora report'",
            "plot tensorboard logs dashboard visualize visualise wandb board curves",
        ),
        (
            "use 'wgpu-lora --install-completion'",
            "completion completions install-completion",
        ),
    ),
    "wgpu-lora export": (
        (
            "use 'wgpu-lora merge', which writes a model in safetensors",
            "safetensors hf merged mlx transformers model merged-16bit fp16",
        ),
        (
            "use 'wgpu-lora export gguf'",
            "ollama llama.cpp llamacpp llama-cpp lmstudio",
        ),
        (
            "use 'wgpu-lora export gguf --lora'",
            "lora adapter gguf-lora",
        ),
        (
            "it is not supported: 'wgpu-lora export gguf' or 'wgpu-lora merge' writes a model for other programs",
            "onnx awq gptq exl2 openvino tensorrt coreml",
        ),
    ),
    "wgpu-lora recipes": (
        (
            "use 'wgpu-lora finetune --recipe NAME'",
            "run train use finetune",
        ),
        (
            "use 'wgpu-lora recipes list'",
            "ls all",
        ),
        (
            "use 'wgpu-lora recipes show NAME'",
            "cat get view print",
        ),
    ),
    "wgpu-lora share": (
        (
            "use 'wgpu-lora share status'",
            "list ls ps show who",
        ),
        (
            "use 'wgpu-lora share release'",
            "free kill unlock clear",
        ),
        (
            "use 'wgpu-lora share repair'",
            "fix reset clean",
        ),
    ),
}


def command_instead(typed: str, known: Sequence[str], group: str) -> str:
    """The error for a command that a group does not have."""
    name = typed.lower().replace("_", "-")
    table = {word: text for text, words in INSTEAD.get(group, ()) for word in words.split()}
    if group == "wgpu-lora":
        table |= {name: f"use 'wgpu-lora finetune --objective {name}'" for name in OBJECTIVES if name not in table}
    near = difflib.get_close_matches(name, [*known, *table], n=1, cutoff=0.75)
    meant = name if name in table else near[0] if near else ""
    if meant in known:
        return f"No such command '{typed:.40}': did you mean '{group} {meant}'?"
    if meant in table:
        chat = "'wgpu-lora chat'" if "chat" in known else "'wgpu-lora generate'"
        return f"No such command '{typed:.40}': {table[meant].format(chat=chat)}."
    return f"No such command '{typed:.40}': choose one of {', '.join(known)} ('{group} --help')."
