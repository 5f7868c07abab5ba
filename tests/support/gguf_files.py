"""GGUF files of the test's own making, by the gguf package: independent of what the product reads and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import save_file

from support import ROOT
from wgpu_lora.models.architectures import parse_config

DEMO = ROOT / "wgpu_lora" / "demo" / "model"
SHAPE = {
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 300,
}  # fmt: skip
OF_YARN = {
    "factor": "factor", "original_max_position_embeddings": "original_context_length",
    "mscale_all_dim": "yarn_log_multiplier", "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
}  # fmt: skip
QWEN_KINDS = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3}


def random_model(directory: Path, architecture: str = "llama", **changes: int | bool) -> Path:
    """A model whose rows are whole blocks of every quantisation."""
    directory.mkdir(exist_ok=True)
    config = {**SHAPE, "model_type": architecture, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(1)
    shapes = parse_config(config).parameter_shapes()
    save_file(
        {n: (rng.standard_normal(s) * 0.05).astype(np.float32) for n, s in shapes.items()},
        directory / "model.safetensors",
    )
    return directory


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, as float32."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            arrays |= {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    return arrays


def neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in llama.cpp's 'llama', written out: pair i of a head becomes rows 2i and 2i + 1."""
    size = len(rows) // heads
    order = [h * size + i + half * size // 2 for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def delta_net(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor of Qwen3.5's delta nets as llama.cpp has it: value heads in turns of the key heads, written out."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = [key * heads // keys + turn for turn in range(heads // keys) for key in range(keys)]

    def ordered(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([np.split(rows, heads)[head] for head in order])

    kind = name.removeprefix("model.layers.").partition("linear_attn.")[2]
    if kind.startswith(("in_proj_qkv", "conv1d")):
        values, start = values.reshape(len(values), -1), 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([values[:start], ordered(values[start:])])
    if kind.startswith("out_proj"):
        return np.ascontiguousarray(ordered(values.T).T)
    if kind == "A_log":
        return -np.exp(ordered(values))
    return ordered(values) if kind.startswith(("in_proj_", "dt_bias")) else values


def stored(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Values as GGUF holds them; vectors stay F32, as llama.cpp's converter leaves them."""
    if values.ndim == 1 or kind == Kind.F32:
        return values.astype(np.float32)
    if kind == Kind.BF16:
        return values.astype(bfloat16).view(np.uint8)
    return gguf.quants.quantize(values, kind)


def write_gguf(
    directory: Path,
    output: Path,
    kind: Kind = Kind.F32,
    *,
    quantize: Callable[[str, np.ndarray], tuple[np.ndarray, Kind]] | None = None,
    metadata: Mapping[str, int | str | float | bool] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: str = "",
) -> Path:
    """A checkpoint of Hugging Face as a GGUF file.

    Args:
        quantize: bytes and type of a tensor, by its name in GGUF; everything is `kind` without it.
        metadata: more keys, or other values for those there are (the architecture's own without its name).
        leave_out: a tensor's name in GGUF.
    """
    config = json.loads((directory / "config.json").read_text())
    named = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_5_text": "qwen35", "ministral3": "mistral3"}
    architecture, gemma = named.get(config["model_type"], config["model_type"]), "gemma" in config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    rope = rope.get("full_attention", rope)
    writer = gguf.GGUFWriter(output, architecture)
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
    }
    if rope.get("rope_type") == "yarn":
        keys |= {f"rope.scaling.{theirs}": rope[ours] for ours, theirs in OF_YARN.items() if ours in rope}
        keys |= {"rope.scaling.type": "yarn", "attention.temperature_scale": rope["llama_4_scaling_beta"]}
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if architecture == "qwen35":
        keys["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
        of_sizes = {"conv_kernel": "conv_kernel_dim", "state_size": "key_head_dim", "group_count": "num_key_heads"}
        of_sizes["time_step_rank"] = "num_value_heads"
        keys |= {f"ssm.{key}": config[f"linear_{name}"] for key, name in of_sizes.items()}
        keys["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        keys["full_attention_interval"] = config["num_hidden_layers"]
    elif "partial_rotary_factor" in rope:
        keys["rope.dimension_count"] = int(config["hidden_size"] // heads * rope["partial_rotary_factor"])
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(
            np.sqrt(1 + np.log(scale) / np.log(config["original_max_position_embeddings"]))
        )
    if gemma:
        caps = {name: config[name] for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        keys |= {name: cap for name, cap in caps.items() if cap}
        keys["attention.sliding_window"] = config["sliding_window"]
    if config.get("head_dim"):
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    for key, value in (keys | dict(metadata or {})).items():
        full = key if key.startswith(("general.", "tokenizer.", "split.", "x.")) else f"{architecture}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](full, value)
    (tokenizer or (lambda w: None))(writer)
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"]
    )
    tensors = tensors_of(directory)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    for name, values in tensors.items():
        theirs = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias")) or name
        values = delta_net(name, values, config) if "linear_attn" in name else values
        if (gemma or architecture == "qwen35") and "linear_attn" not in name and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if theirs == leave_out:
            continue
        if architecture in ("llama", "smollm3", "mistral3") and ("q_proj" in name or "k_proj" in name):
            values = neighbours(values, heads if "q_proj" in name else kv_heads)
        data, how = quantize(theirs, values) if quantize else (stored(values, kind), kind)
        writer.add_tensor(theirs, data, raw_dtype=how if data.dtype == np.uint8 else None)
    for name in ("short", "long"):
        if f"{name}_factor" in rope:
            writer.add_tensor(f"rope_factors_{name}.weight", np.float32(rope[f"{name}_factor"]))
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))
    return finished(writer, output)


def finished(writer: gguf.GGUFWriter, output: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


def llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> np.ndarray:
    """Wave by wave: short ones stay, long ones are stretched, between them a blend."""
    factors = []
    for i in range(0, config["head_dim"], 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (i / config["head_dim"])
        turns = rope["original_max_position_embeddings"] / wave
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def demo_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The demo model's tokenizer, as llama.cpp's converter states it."""
    stated = json.loads((DEMO / "tokenizer.json").read_text())
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    ids = dict(stated["model"]["vocab"]) | {token["content"]: token["id"] for token in stated["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    byte_level(writer, tokens, [" ".join(merge) for merge in stated["model"]["merges"]], QWEN_KINDS)
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])


def byte_level(
    writer: gguf.GGUFWriter, tokens: list[str], merges: list[str], kinds: Mapping[str, int], pre: str = "qwen2"
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges(merges)


def header_only(output: Path, tokenizer: Callable[[gguf.GGUFWriter], None], **keys: Any) -> Path:
    """A file of metadata without tensors."""
    writer = gguf.GGUFWriter(output, "llama")
    tokenizer(writer)
    for key, value in keys.items():
        writer.kv_data[0].pop({"chat_template": "tokenizer.chat_template"}.get(key, ""), None)
        getattr(writer, f"add_{key}")(value)
    return finished(writer, output)
