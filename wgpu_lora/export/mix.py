"""The GGML type of each tensor of a GGUF file, as chosen by llama.cpp's quantiser."""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from wgpu_lora.models.config import ModelConfig

Q = GGMLQuantizationType


@dataclass(frozen=True)
class FileType:
    """A quantisation of GGUF files: its number in the metadata, and the type of most matrices."""

    number: LlamaFileType
    most: GGMLQuantizationType


FILE_TYPES = {
    "f16": FileType(LlamaFileType.MOSTLY_F16, Q.F16),
    "q8_0": FileType(LlamaFileType.MOSTLY_Q8_0, Q.Q8_0),
    "q4_0": FileType(LlamaFileType.MOSTLY_Q4_0, Q.Q4_0),
    "q4_1": FileType(LlamaFileType.MOSTLY_Q4_1, Q.Q4_1),
    "q5_0": FileType(LlamaFileType.MOSTLY_Q5_0, Q.Q5_0),
    "q5_1": FileType(LlamaFileType.MOSTLY_Q5_1, Q.Q5_1),
    "q4_k_m": FileType(LlamaFileType.MOSTLY_Q4_K_M, Q.Q4_K),
    "q5_k_m": FileType(LlamaFileType.MOSTLY_Q5_K_M, Q.Q5_K),
    "q6_k": FileType(LlamaFileType.MOSTLY_Q6_K, Q.Q6_K),
}
# Types for rows that are not whole super-blocks of 256 values.
SHORT_ROWS = {Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0}


def tensor_type(config: ModelConfig, kind: str, name: str, shape: tuple[int, ...]) -> GGMLQuantizationType:
    """The type of the tensor with this GGUF name. kind: one of FILE_TYPES. Vectors are always F32."""
    if len(shape) == 1:
        return Q.F32
    most = FILE_TYPES[kind].most
    return most if most == Q.F16 else _for_rows(_wanted(config, kind, most, name), shape[1])


def _wanted(config: ModelConfig, kind: str, most: GGMLQuantizationType, name: str) -> GGMLQuantizationType:
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        return Q.Q8_0 if most == Q.Q8_0 else Q.Q6_K
    if kind not in ("q4_k_m", "q5_k_m") or not name.startswith("blk."):
        return most
    _, layer, module, _ = name.split(".")
    if module in ("attn_v", "attn_qkv", "ffn_down") and _deserves_more(int(layer), config.num_hidden_layers):
        return Q.Q6_K
    return Q.Q5_K if module == "attn_v" and most == Q.Q4_K and config.gguf().widens_values(config) else most


def _deserves_more(layer: int, layers: int) -> bool:
    """Whether a layer gets a finer type: the first and last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _for_rows(wanted: GGMLQuantizationType, columns: int) -> GGMLQuantizationType:
    if columns % GGML_QUANT_SIZES[wanted][0]:
        wanted = SHORT_ROWS.get(wanted, wanted)
    return Q.F16 if columns % GGML_QUANT_SIZES[wanted][0] else wanted
