"""Which tensors of a checkpoint are a language model's, and under what names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from wgpu_lora.names.text import join_words


@dataclass(frozen=True)
class TensorNames:
    """The names of a model that may be part of a larger one, such as one that also sees images.

    renamed: (beginning in files, beginning in the model), where these differ. Files may have either.
    skipped_prefixes: beginnings of the names of the other parts' tensors.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    skipped_prefixes: tuple[str, ...] = ()

    def is_skipped(self, name: str) -> bool:
        """Whether a tensor, by its name in a file, is of another part."""
        return name.startswith(self.skipped_prefixes)

    def model_name(self, name: str) -> str:
        """The model's name of a tensor in a file."""
        for stored_prefix, prefix in self.renamed:
            if name.startswith(stored_prefix):
                return prefix + name[len(stored_prefix) :]
        return name


def parts_of(names: Iterable[str]) -> tuple[str, ...]:
    """The modules that tensors belong to: 'model.visual.patch_embed.weight' -> 'visual'."""
    return tuple(dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in sorted(names)))


def note_of_skipped(names: Iterable[str]) -> str:
    """A sentence for the user about the tensors of other parts."""
    tensors = tuple(names)
    parts = join_words(parts_of(tensors))
    return f"only the text part of this model is used: {len(tensors):,} tensors of {parts} are skipped"


TOKENIZER = re.compile(
    r"tokenizer(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|spiece\.model|sentencepiece\.bpe\.model"
)
TEMPLATE = re.compile(r"chat_template\.(jinja|json)|additional_chat_templates/[\w-]+\.jinja")
