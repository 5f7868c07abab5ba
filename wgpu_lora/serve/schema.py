"""The bodies of requests. Fields are OpenAI's and vLLM's, and `lora` is llama-server's.

Unknown fields are ignored, as clients send many, but for those in `REFUSED`: an answer would not be what they ask for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Field -> values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "min_tokens": (0,), "bad_words": ([],), "allowed_token_ids": (), "truncate_prompt_tokens": (),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "prompt_logprobs": (),
    "logits_processors": ([],), "prompt_embeds": (), "mm_processor_kwargs": ({},), "chat_template": (),
    "documents": ([],), "functions": ([],), "function_call": ("none",), "audio": (), "modalities": (["text"],),
    "web_search_options": (), "reasoning_effort": (), "verbosity": (), "structural_tag": (), "guided_json_object": (),
    "guided_whitespace_pattern": (), "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "grammar": ("",), "json_schema": ({},), "id_slot": (-1,),
}  # fmt: skip
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Text = Annotated[str, Field(min_length=1)]
Json = dict[str, Any]
T = TypeVar("T")
Prompts = Annotated[list[T], Field(max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _refuse(self) -> _Body:
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value is not None and value not in REFUSED[name]:
                raise ValueError(f"'{name}' is not supported here: leave it out")
        return self


class StreamOptions(_Body):
    include_usage: bool = False


class LoraScale(_Body):
    """An adapter by its number among those of /v1/models, from 0."""

    id: Count
    scale: float = 1.0


class JsonSchema(_Body):
    name: str | None = None
    schema_: Json | bool = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    json_: Json | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationRequest(_Body):
    """What both endpoints have. `grammar`s are in Lark's notation, as llguidance reads it."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: int | None = None
    lora: list[LoraScale] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class Function(_Body):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"] = "function"
    function: Function


class FunctionName(_Body):
    name: str


class ToolName(_Body):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatMessages(_Body):
    """A conversation. Contents are texts, or lists of parts of text."""

    messages: list[Json] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatRequest(GenerationRequest, ChatMessages):
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | list[TokenId] | Prompts[str] | Prompts[list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(ChatMessages):
    """A text, or a conversation."""

    model: str | None = None
    messages: list[Json] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[TokenId]


class LoadAdapter(_Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapter(_Body):
    lora_name: str
