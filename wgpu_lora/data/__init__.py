"""Training data on the CPU: sources of rows, formats, tokenizer and chat template, loss masks, packing.

find -> jsonl, json_array, delimited, parquet, huggingface, given      a name, or rows from Python, to a source
columns, kinds, messages -> formats, preferences -> examples           its rows to examples
examples -> empty -> conversation_rows, masks -> prepare               examples to token ids and labels
account                                                                counts of rows by outcome
template -> tokenizer                                                  text to tokens and back
packing                                                                rows to batches
"""

from wgpu_lora.data.conversation_rows import UNTRAINED
from wgpu_lora.data.dataset_lookup import heldout_data, training_data
from wgpu_lora.data.example_formats import parse_example, read_examples
from wgpu_lora.data.examples import Sample
from wgpu_lora.data.masks import tokenize_example
from wgpu_lora.data.memory_rows import given_rows, rows_given
from wgpu_lora.data.packing import batches, epoch_order, pack
from wgpu_lora.data.row_counts import skipped_rows
from wgpu_lora.data.row_files import read_jsonl
from wgpu_lora.data.source import Source
from wgpu_lora.data.tokenized_data import Prepared, Row, hold_out, prepare
from wgpu_lora.data.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "UNTRAINED",
    "Prepared",
    "Row",
    "Sample",
    "Source",
    "StreamDecoder",
    "Tokenizer",
    "batches",
    "epoch_order",
    "given_rows",
    "heldout_data",
    "hold_out",
    "pack",
    "parse_example",
    "prepare",
    "read_examples",
    "read_jsonl",
    "rows_given",
    "skipped_rows",
    "tokenize_example",
    "training_data",
]
