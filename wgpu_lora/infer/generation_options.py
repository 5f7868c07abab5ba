"""Options of generation, shared by generate, compare and chat; the names are those of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.examples import PROMPT_FORMATS
from wgpu_lora.infer.prompts import check_text
from wgpu_lora.infer.request import Sampler
from wgpu_lora.names.aliases import real_names
from wgpu_lora.names.spelling import PYTHON, naming


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class GenerationOptions:
    """Options of an answer. Raises UserError if a value is out of range or of the wrong type."""

    system: str | None = option(None, "system message of the chat template")
    prompt_format: str | None = option(
        None, "how a text is asked: chat, alpaca or text; by default as the adapters were trained"
    )
    enable_thinking: bool | None = option(None, "whether the chat template asks for reasoning; as in training")
    max_new_tokens: int = option(256, "maximum tokens of the answer")
    temperature: float = option(0.0, "0 always takes the most likely token; higher values vary more")
    top_p: float = option(1.0, "sample from the most likely tokens up to this total probability; 1 keeps all")
    top_k: int = option(0, "sample from this many of the most likely tokens; 0 keeps all")
    min_p: float = option(0.0, "sample from tokens at least this fraction as likely as the most likely; 0 keeps all")
    repetition_penalty: float = option(1.0, "values above 1 make tokens that have occurred less likely")
    stop: str | Sequence[str] = option((), "texts that end the answer; they are not part of it")
    seed: int = option(0, "seed of sampling, if the temperature is not 0")

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"{name} must be a whole number, not {value!r:.60}.")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"{name} must be a number, not {value!r:.60}.")
        if not isinstance(self.enable_thinking, bool | None):
            raise UserError(f"enable_thinking must be true or false, not {self.enable_thinking!r:.60}.")
        if self.prompt_format not in (None, *PROMPT_FORMATS):
            raise UserError(f"prompt_format must be {', '.join(PROMPT_FORMATS)}, not {self.prompt_format!r:.60}.")
        if self.max_new_tokens < 1:
            raise UserError(f"{self.max_new_tokens} new tokens are not possible: use at least one.")
        if self.system is not None:
            check_text("system prompt", self.system)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence):
            raise UserError(f"The stop strings must be a list of texts, not {stops!r:.60}.")
        for text in stops:
            check_text("stop string", text)
            if not text:
                raise UserError("A stop string is empty: give a text, or leave it out.")
        object.__setattr__(self, "stop", tuple(stops))
        _ = self.sampler

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.temperature, self.top_k, self.top_p, self.seed, self.min_p, self.repetition_penalty)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}


def generation_options(options: Mapping[str, Any], where: str) -> GenerationOptions:
    """Settings from names and values; option names of other programs are accepted.

    Raises:
        UserError: a name is unknown (the nearest one is suggested), or a value is invalid.
    """
    names = [f.name for f in fields(GenerationOptions)]
    with naming(PYTHON):
        return GenerationOptions(**real_names(options, names, where, otherwise=f"the options are {', '.join(names)}."))


def parsed(name: str, text: str) -> Any:
    """Parse a setting's value: a number, true, false or none, a text, or JSON strings to stop at.

    Raises:
        UserError: it has the wrong type.
    """
    kinds = {f.name: str(f.type) for f in fields(GenerationOptions)}
    words = {"true": True, "on": True, "false": False, "off": False, "none": None}
    if name == "system":
        return text
    if name == "stop":
        return _stops(text)
    if "bool" in kinds[name]:
        if text.lower() not in words:
            raise UserError(f"{name} must be true, false or none, not {text!r:.60}.")
        return words[text.lower()]
    try:
        value = int(text) if kinds[name] == "int" else float(text)
    except ValueError:
        kind = "a whole number" if kinds[name] == "int" else "a number"
        raise UserError(f"{name} must be {kind}, not {text!r:.60}.") from None
    if not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, not {text!r:.60}.")
    return value


def _stops(text: str) -> Any:
    if text.lower() == "none":
        return ()
    if text[0] not in '"[':
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise UserError(f"stop must be a text, a JSON string or a JSON list of strings, not {text!r:.60}.") from None
