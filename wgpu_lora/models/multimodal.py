"""Language models that are part of a larger one: their names, and the fields of the whole's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from wgpu_lora.errors import UserError
from wgpu_lora.formats.safetensors_checkpoint import TensorNames

# What transformers reads from the whole's config, and from the text part's if it is not there.
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "quantization_config")


# As transformers writes LLaVA's descendants, and as it names their modules. Others skip parts of their own.
_OTHERS = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
# Names of the text part alone, of which adapters may have been trained as a part of the whole.
TEXT_PART = TensorNames(
    (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    _OTHERS,
)


class TextPart:
    """A mix-in, before the text part's class. Modules are those of the class that transformers makes of config.json,
    `...ForConditionalGeneration`, which are also PEFT's; checkpoints may have other names (`STORED`)."""

    EMBEDDING: ClassVar[str] = "model.language_model.embed_tokens.weight"
    FINAL_NORM: ClassVar[str] = "model.language_model.norm.weight"
    HEAD: ClassVar[str] = "lm_head.weight"
    LAYERS: ClassVar[str] = "model.language_model.layers"
    STORED: ClassVar[TensorNames] = TensorNames(
        (
            ("language_model.model.", "model.language_model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.layers.", "model.language_model.layers."),  # of adapters that were trained on the text part alone
        ),
        _OTHERS,
    )


def text_part(d: Mapping[str, Any], types: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """The fields of a composite model's text part, with the model_type of the whole; that of the part is text_type.

    Args:
        types: the model_types that the text part may have.

    Raises:
        UserError: text_config is missing, or is of another model.
    """
    text = d.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"text_config is missing from {where}: restore the file from the model's source.")
    if (kind := text.get("model_type", types[0])) not in types:
        raise UserError(
            f"text_config in {where} has the model_type {kind!r:.100}, which is not supported in {d['model_type']}: "
            f"use a model with {' or '.join(types)}."
        )
    whole = {name: d[name] for name in _OF_THE_WHOLE if d.get(name) is not None}
    return {**text, **whole, "model_type": d["model_type"], "text_type": kind}
