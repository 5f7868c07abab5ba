"""Digests of what rows and logits depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from wgpu_lora.data import Tokenizer


def template_digest(tokenizer: Tokenizer | None, variables: Mapping[str, Any] | None = None) -> str | None:
    """SHA-256 (hex) of a tokenizer's chat templates and the variables given to them; None without a template."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return None
    text = json.dumps([tokenizer.chat_templates, dict(variables or {})], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
