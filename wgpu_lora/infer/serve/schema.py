"""The bodies of requests. Fields are OpenAI's and vLLM's, and `lora` is llama-server's.

Unknown fields are refused, since an answer may not be what they ask for, but for those that change no answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

# Fields that change no answer: accounts, caches and schedules of other servers.
HARMLESS = {
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction", "request_id", "priority", "cache_salt", "cache_prompt", "spaces_between_special_tokens",
    "include_obfuscation",
}  # fmt: skip
# Other fields that are not supported -> values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "bad_words": ([],), "logits_processors": ([],), "mm_processor_kwargs": ({},), "documents": ([],),
    "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "typical_p": (1,), "tfs_z": (1,),
    "mirostat": (0,), "dry_multiplier": (0,), "xtc_probability": (0,), "grammar": ("",), "json_schema": ({},),
    "id_slot": (-1,), "repeat_penalty": (1,), "echo": (False,), "add_special_tokens": (False,), "n_probs": (0,),
    "guided_json_object": (False,), "continuous_usage_stats": (False,), "return_tokens": (False,),
}  # fmt: skip


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not a boolean")
    return value


NUMBER = BeforeValidator(_not_boolean)  # the last annotation, so that it comes first
Count = Annotated[int, Field(ge=0, lt=1 << 31), NUMBER]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31), NUMBER]
TopCount = Annotated[int, Field(ge=0, le=20), NUMBER]
Text = Annotated[str, Field(min_length=1)]
Json = dict[str, Any]
T = TypeVar("T")
Prompts = Annotated[list[T], Field(max_length=64)]
Message = Annotated[Json, WithJsonSchema({"type": "object", "required": ["role"]})]


class _Open(BaseModel):
    """Further fields are allowed."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class _Body(_Open):
    @model_validator(mode="after")
    def _refuse(self) -> _Body:
        for name, value in (self.model_extra or {}).items():
            if name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ()):
                raise ValueError(f"'{name}' is not supported here: leave it out")
        return self


class StreamOptions(_Body):
    include_usage: bool = False


class LoraScale(_Body):
    """An adapter by its number among those of /v1/models, from 0."""

    id: Count
    scale: Annotated[float, NUMBER] = 1.0


class JsonSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: Json | bool = Field({}, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """`schema`: of a `json_object`, as llama-server's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Json | bool | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("'response_format' of the type json_schema needs 'json_schema': add it")
        for name, kind, value in (
            ("schema", "json_object", self.schema_),
            ("json_schema", "json_schema", self.json_schema),
        ):
            if value is not None and self.type != kind:
                raise ValueError(f"A format of the type {self.type} has no '{name}': leave it out, or use {kind}")
        return self


class StructuredOutputs(_Body):
    json_: Json | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingRequest(_Body):
    """What all endpoints that answer have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0), NUMBER] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), NUMBER] | None = None
    top_k: Annotated[int, Field(ge=-1), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    repetition_penalty: Annotated[float, Field(gt=0), NUMBER] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), NUMBER] | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100), NUMBER]] | None = Field(None, max_length=1024)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64), NUMBER] | None = None
    lora: list[LoraScale] | None = None

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' needs 'stream': set it to true, or leave them out")
        return self


class GenerationRequest(SamplingRequest):
    """What chats and completions have. `grammar`s are in Lark's notation, as llguidance reads it."""

    n: Annotated[int, Field(ge=1, le=16), NUMBER] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: Annotated[int, Field(ge=1), NUMBER] | None = None
    min_tokens: Count | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31), NUMBER] | None = None
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    prompt_logprobs: TopCount | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("'prompt_logprobs' cannot be streamed: leave out one of them")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("'truncate_prompt_tokens' leaves no token of the prompt: use at least 1, or -1")
        return self


class Function(_Open):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(_Open):
    type: Literal["function"] = "function"
    function: Function


class FunctionName(_Body):
    name: str


class ToolName(_Body):
    type: Literal["function"] = "function"
    function: FunctionName


class ToolNames(_Body):
    mode: Literal["auto", "required"]
    tools: list[ToolName] = Field(min_length=1)


class AllowedTools(_Body):
    type: Literal["allowed_tools"]
    allowed_tools: ToolNames


class ChatMessages(_Body):
    """A conversation. Contents are texts, or lists of parts of text."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: Json | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatRequest(GenerationRequest, ChatMessages):
    max_completion_tokens: Annotated[int, Field(ge=1), NUMBER] | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | AllowedTools | None = None
    parallel_tool_calls: bool | None = None


class FlatTool(_Open):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class FlatToolName(_Body):
    type: Literal["function"]
    name: str


class FlatToolNames(_Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatToolName] = Field(min_length=1)


class FlatFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(_Body):
    format: FlatFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(_Body):
    """`summary`: the whole reasoning is given, whatever it says."""

    effort: str | None = None
    summary: str | None = None


ITEM_FIELDS = {
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"), "item_reference": ("id",),
}  # fmt: skip


class Item(_Open):
    """A part of a conversation: a message, or what its `type` says."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Json] | None = None
    summary: list[Json] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Json] | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Item:
        kind = self.type or "message"
        for name in ITEM_FIELDS.get(kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"An item of the type {kind} needs '{name}': add it")
        return self


class ResponsesRequest(SamplingRequest):
    """A conversation, as a text or as items."""

    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    max_output_tokens: Annotated[int, Field(ge=1), NUMBER] | None = None
    top_logprobs: TopCount | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolName | FlatToolNames | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: Json | None = None


class CompletionRequest(GenerationRequest):
    """`max_tokens` may be 0, to score the prompt alone."""

    prompt: str | list[TokenId] | Prompts[str] | Prompts[list[TokenId]]
    max_tokens: Count | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
    logprobs: TopCount | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_kinds(cls, value: Any) -> Any:
        kinds = {type(item) for item in value} if isinstance(value, list) else set()
        if len(kinds) > 1 and kinds <= {str, int, list}:
            raise ValueError("Texts, token ids and lists of token ids cannot be mixed: use one of them")
        return value


class TokenizeRequest(ChatMessages):
    """A text, or a conversation."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: str | None = None
    messages: list[Message] | None = None  # type: ignore[assignment]
    prompt: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[TokenId]


class LoadAdapter(_Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadAdapter(_Open):
    """Its other fields, such as those of loading, say nothing more."""

    lora_name: str
