"""Training data on the CPU: JSONL formats, tokenizer and chat template, loss masks, packing.

jsonl -> formats -> masks -> prepare          a file becomes rows of token ids and labels
template -> tokenizer                         text to tokens and back
packing                                       which rows go together in a step
"""

from wgpu_lora.data.formats import parse_example, read_examples
from wgpu_lora.data.jsonl import read_jsonl, resolve_data
from wgpu_lora.data.masks import UNTRAINED, tokenize_example
from wgpu_lora.data.packing import batches, epoch_order, pack
from wgpu_lora.data.prepare import Prepared, Row, prepare
from wgpu_lora.data.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "UNTRAINED",
    "Prepared",
    "Row",
    "StreamDecoder",
    "Tokenizer",
    "batches",
    "epoch_order",
    "pack",
    "parse_example",
    "prepare",
    "read_examples",
    "read_jsonl",
    "resolve_data",
    "tokenize_example",
]
