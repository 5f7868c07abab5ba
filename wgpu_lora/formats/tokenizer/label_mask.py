"""Tokenise examples and mask their labels.

Labels are unshifted, as in Hugging Face: the label of a position is its own token, or -100 if it is not trained on. A
trained turn starts after its header and includes its end token, but not the newline after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import DATE, UnusableError, check_variables, now
from wgpu_lora.formats.tokenizer.conversation_rows import ConversationRows, Pair, TokenizedExample, behind, split_prompt
from wgpu_lora.formats.tokenizer.examples import (
    TOO_DEEP,
    Alpaca,
    Completion,
    Conversation,
    Example,
    Prompt,
    Text,
    Tokens,
    texts_of,
)
from wgpu_lora.formats.tokenizer.reasoning import MARKER, mark_of
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.formats.tokenizer.tokenizer_process import unpack, value_of

ALPACA_START = "Below is an instruction that describes a task"  # of both of Alpaca's prompts
_ALPACA = (
    f"{ALPACA_START}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    f"{ALPACA_START}, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


def tokenize_example(
    example: Example,
    tokenizer: Tokenizer | None,
    *,
    completion_only_loss: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Pair]:
    """Tokenise an example to rows of (input_ids, labels), two lists of equal length.

    Most examples give one row. If the template renders a turn differently once others follow it (Qwen3 drops the
    thinking of earlier turns), a conversation gives one row for each trained turn, truncated after that turn, so that
    each turn is trained on with the context that the model sees at inference.

    Args:
        completion_only_loss: train on answers only, else on everything. Has no effect on `Text` and `Tokens`.
        chat_template_kwargs: additional variables for the chat template; those of the row take precedence.

    Raises:
        UserError: the row needs a tokenizer and there is none, or the chat template fails on it.
        UnusableError: the tokenizer or the chat template is unusable for other rows, too.
    """
    [result] = tokenize_examples([example], tokenizer, completion_only_loss, chat_template_kwargs)
    if isinstance(result, UserError):
        raise result
    return result.pairs


def tokenize_examples(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    completion_only_loss: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Iterator[TokenizedExample | UserError]:
    """Like `tokenize_example`, for several examples: the rows or the error of each.

    Raises:
        UnusableError: the tokenizer or the chat template is unusable for other examples, too.
    """
    options = completion_only_loss, {DATE: now(), **(chat_template_kwargs or {})}
    remote = [] if tokenizer is None or tokenizer.is_local else [e for e in examples if not isinstance(e, Tokens)]
    answers = tokenizer.tokenize(remote, *options) if tokenizer and remote else iter(())
    for example in examples:
        try:
            if remote and not isinstance(example, Tokens):
                pairs, unrendered, untrained_turns, remarks = value_of(next(answers))
                rows = [(unpack(ids), unpack(labels)) for ids, labels in pairs]
                yield TokenizedExample(rows, set(unrendered), untrained_turns, set(remarks))
            else:
                yield tokenize(example, tokenizer, *options)
        except UnusableError:
            raise
        except UserError as error:
            yield error


def tokenize(
    example: Example, tokenizer: Tokenizer | None, completion_only_loss: bool, template_kwargs: dict[str, Any]
) -> TokenizedExample:
    """The rows of an example, in this process. Raises UserError."""
    try:
        return _rows(example, tokenizer, completion_only_loss, template_kwargs)
    except RecursionError:
        raise UserError(TOO_DEEP) from None


def _rows(
    example: Example, tokenizer: Tokenizer | None, completion_only_loss: bool, template_kwargs: dict[str, Any]
) -> TokenizedExample:
    if isinstance(example, Tokens):
        return TokenizedExample([(list(example.input_ids), list(example.labels))])
    if tokenizer is None:
        raise UserError(
            "the row is text, but the model has no tokenizer.json; add one, or tokenise the data to 'input_ids'."
        )
    result = _of_text(example, tokenizer, completion_only_loss, template_kwargs)
    if token := _control_token(example, tokenizer):
        result.remarks.add(f"the text has the control token {token!r}, which the model reads as such")
    return result


def _control_token(example: Example, tokenizer: Tokenizer) -> str | None:
    """A special token that is spelled out in what somebody wrote, if it is not one of reasoning.

    Texts may begin and end with one, as those do that were rendered with a chat template.
    """
    texts = texts_of(example)
    whole = "\0".join(texts)
    begins = {token[0] for token in tokenizer.special_texts}
    if not any(character in whole for character in begins):  # a model may have thousands of them
        return None
    tokens = [token for token in tokenizer.special_texts if token in whole]
    if isinstance(example, Completion | Text):
        texts = ["".join(texts).strip()]
        for token in tokens:
            texts = [texts[0].removeprefix(token).removesuffix(token)]
    return next((token for token in tokens for text in texts if token in text and not MARKER.fullmatch(token)), None)


def _of_text(
    example: Conversation | Completion | Alpaca | Text | Prompt,
    tokenizer: Tokenizer,
    completion_only_loss: bool,
    template_kwargs: dict[str, Any],
) -> TokenizedExample:
    own = example.template_kwargs if isinstance(example, Conversation | Prompt) else {}
    kwargs = {**template_kwargs, **own}
    if isinstance(example, Prompt):
        ids = prompt_ids(example, tokenizer, kwargs)
        return TokenizedExample([(ids, list(ids))])
    if kwargs.get("enable_thinking") is False and (mark := mark_of(example)):
        raise UserError(
            f"{mark} is left in trained text, but 'enable_thinking' is off; leave it on, or drop reasoning with "
            "'wgpu-lora data prepare --drop-thinking'."
        )
    if isinstance(example, Alpaca):
        example = alpaca_example(example, tokenizer)
    if isinstance(example, Text):
        whole, remarks = _opened(tokenizer.encode(example.text), tokenizer)
        ids = _ended(whole, example.text, tokenizer)
        return TokenizedExample([(ids, list(ids))], remarks=remarks)
    if isinstance(example, Completion):
        prompt, answer = split_prompt(example.prompt, example.completion, tokenizer)
        count = len(prompt)
        whole, remarks = _opened(prompt + answer, tokenizer)
        count += len(whole) - len(prompt + answer)
        ids = _ended(whole, example.completion, tokenizer)
        return TokenizedExample([(ids, behind(ids, count if completion_only_loss else 0))], remarks=remarks)
    check_variables(template_kwargs)
    return ConversationRows(example, tokenizer, kwargs).rows(completion_only_loss)


def prompt_ids(example: Prompt, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> list[int]:
    """Token ids of a prompt, with the header of the answer behind messages. Raises UserError.

    Args:
        kwargs: of the template; its `tools` are those of rows that have none.
    """
    tools = kwargs.get("tools")
    if isinstance(example.prompt, str):
        if tools:
            raise UserError("the prompt is text, but tools are called in conversations; give a list of messages.")
        return tokenizer.opened(tokenizer.encode(example.prompt))
    variables = {name: value for name, value in kwargs.items() if name != "tools"}
    check_variables(variables)
    return tokenizer.encode(tokenizer.render(example.prompt, example.tools or tools, True, variables=variables))


def alpaca_prompt(example: Alpaca) -> str:
    """Alpaca's wording of an instruction, for models without a chat template."""
    prompt = _ALPACA_WITH_INPUT if example.input else _ALPACA
    prompt = prompt.format(instruction=example.instruction, input=example.input)
    return f"{example.system}\n\n{prompt}" if example.system else prompt


def alpaca_example(example: Alpaca, tokenizer: Tokenizer) -> Conversation | Completion:
    """An Alpaca row as the model is trained on it: a conversation or, without a chat template, Alpaca's own wording."""
    if not tokenizer.has_chat_template:
        return Completion(alpaca_prompt(example), example.output)
    messages = [*example.prompt_messages, {"role": "assistant", "content": example.output}]
    return Conversation(messages, frozenset({len(messages) - 1}))


def _opened(ids: list[int], tokenizer: Tokenizer) -> tuple[list[int], set[str]]:
    """Ids of a text behind the tokens that the tokenizer begins with, and a remark if the text brings these itself."""
    opened = tokenizer.opened(ids)
    if tokenizer.prefix_ids and opened == ids:
        return ids, {"texts that begin with a beginning-of-text token get no second one"}
    return opened, set()


def _ended(ids: list[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Ids of a text with eos at the end, unless the text brings it, also before white space."""
    eos = tokenizer.eos_id
    if eos is None or ids[-1:] == [eos]:
        return ids
    return ids if text.rstrip().endswith(tokenizer.eos_text or "\0") else [*ids, eos]
