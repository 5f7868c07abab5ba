"""Names of the tokenizer's and chat template's files in the directory of a model or an adapter."""

from __future__ import annotations

import re

TOKENIZER = re.compile(
    r"tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|spiece\.model|sentencepiece\.bpe\.model"
)
TEMPLATE = re.compile(r"chat_template\.(jinja|json)|additional_chat_templates/[\w-]+\.jinja")
