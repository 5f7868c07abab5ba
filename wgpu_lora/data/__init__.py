"""Training data on the CPU: sources of rows, formats, packing.

find -> jsonl, json_array, delimited, parquet, huggingface, given      a name, or rows from Python, to a source
columns, kinds, messages -> formats, preferences                       its rows to examples
prepare                                                                examples to token ids and labels
account                                                                counts of rows by outcome
packing                                                                rows to batches
"""

from wgpu_lora.data.dataset_lookup import heldout_data, training_data
from wgpu_lora.data.example_formats import parse_example, read_examples
from wgpu_lora.data.memory_rows import python_source, split_python_rows
from wgpu_lora.data.packing import batches, epoch_order, pack
from wgpu_lora.data.row_counts import skipped_rows
from wgpu_lora.data.row_files import read_jsonl
from wgpu_lora.data.source import Source
from wgpu_lora.data.tokenized_data import Row, TokenizedData, split_validation, tokenize_source
from wgpu_lora.formats.tokenizer.conversation_rows import UNTRAINED
from wgpu_lora.formats.tokenizer.examples import Sample
from wgpu_lora.formats.tokenizer.label_mask import tokenize_example
from wgpu_lora.formats.tokenizer.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "UNTRAINED",
    "Row",
    "Sample",
    "Source",
    "StreamDecoder",
    "TokenizedData",
    "Tokenizer",
    "batches",
    "epoch_order",
    "heldout_data",
    "pack",
    "parse_example",
    "python_source",
    "read_examples",
    "read_jsonl",
    "skipped_rows",
    "split_python_rows",
    "split_validation",
    "tokenize_example",
    "tokenize_source",
    "training_data",
]
