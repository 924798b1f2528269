"""The two older kinds of requests of OpenAI's protocol, whose answers have a choice per text."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from toolformer_dag.decoding.generation import TokenLikelihood
from toolformer_dag.serving.api_answer import NewText, PlacedToken, call_object, usage, whole_text
from toolformer_dag.serving.api_request import ApiRequest, Refused, Texts
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import Writing
from toolformer_dag.traces.template_trial import template_fault

ROLES = ("system", "developer", "user", "assistant")
"""Of the messages of a chat."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that hold text."""
Part = Literal["message", "delta"]
"""The field of a chat's choice that holds its text: whole, or what a chunk adds."""


class ChoiceRequest(ApiRequest):
    """A request whose answer has a choice per text, each with its calls. `id_prefix`: how the ids of answers begin."""

    id_prefix: ClassVar[str]

    def answer(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the choices and the usage."""
        choices = []
        for index, writing in enumerate(writings):
            text = whole_text(index, writing, calls_in_text=self.has_calls_in_text)
            choices.append(self._choice(text, "message"))
        return self._around(choices) | {"usage": usage(writings)}

    def stream_chunk(self, new: NewText) -> dict[str, Any]:
        """Return a choice with what is new in it."""
        return self._around([self._choice(new, "delta")], is_chunk=True)

    def stream_end(self, writings: Sequence[Writing]) -> bytes:
        """Return the usage, where it is asked for, and the mark of the end."""
        end = b"data: [DONE]\n\n"
        wants_usage = (self.stream_options or {}).get("include_usage")
        if not wants_usage:
            return end
        return self.stream_event(self._around([], is_chunk=True) | {"usage": usage(writings)}) + end

    def _around(self, choices: Sequence[Mapping[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        """Return an answer, or a chunk, with these choices."""
        return {
            "id": f"{self.id_prefix}-{self._id}",
            "object": self.object_name(is_chunk=is_chunk),
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, new: NewText, part: Part) -> dict[str, Any]:
        return {
            "index": new.index,
            "finish_reason": new.finish_reason,
            "logprobs": None if self.likeliest is None else self.logprobs_object(new.tokens),
            "calls": [call_object(call, calls_in_text=self.has_calls_in_text) for call in new.calls],
            **self.text_object(new.text, part),
        }

    @abstractmethod
    def object_name(self, *, is_chunk: bool) -> str:
        """Return the name of what is answered: the whole, or a chunk."""

    @abstractmethod
    def text_object(self, text: str, part: Part) -> dict[str, Any]:
        """Return the field of a choice that holds its text."""

    @abstractmethod
    def logprobs_object(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return the log p of tokens, and of the likeliest at their places."""


class CompletionRequest(ChoiceRequest):
    """A request to /v1/completions: prompts that are continued."""

    path: ClassVar[str] = "/v1/completions"
    id_prefix: ClassVar[str] = "cmpl"

    prompt: Annotated[Texts, Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are asked for."""
        return self.logprobs

    @property
    def one_sentence(self) -> bool:
        """Whether a text ends as that of the command `generate` does: without `max_tokens`."""
        return self.max_tokens is None

    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the texts as they came."""
        return self.prompt

    def object_name(self, *, is_chunk: bool) -> str:
        """Return the same name for the whole and for chunks."""
        return "text_completion"

    def text_object(self, text: str, part: Part) -> dict[str, Any]:
        """Return the text as it is."""
        return {"text": text}

    def logprobs_object(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return lists with an item per token."""
        return {
            "tokens": [placed.token.text for placed in tokens],
            "token_logprobs": [placed.token.log_probability for placed in tokens],
            "top_logprobs": [dict(placed.token.likeliest) for placed in tokens],
            "text_offset": [placed.offset for placed in tokens],
        }


def _joined(content: Any) -> str:
    """Return the text of a message: of a text, or of parts, which are joined. Raises for other content."""
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    return "".join(_part_text(part) for part in parts)


def _part_text(part: Any) -> str:
    """Return the text of a part: a text, or an object of one of TEXT_PARTS. Raises for others, such as images."""
    if isinstance(part, str):
        return part
    kind = type(part).__name__
    if isinstance(part, dict):
        kind = str(part.get("type"))
        text = part.get("text") or ""
        if kind in TEXT_PARTS and isinstance(text, str):
            return text
    message = "a part of type {kind} is not supported; send text alone"
    raise PydanticCustomError("not_supported", message, {"kind": kind[:40]})


def _auto_or_none(tool_choice: Any) -> Any:
    """Return `tool_choice`. Raises for values that force a call."""
    if tool_choice not in ("auto", "none"):
        message = "the model decides where it calls; give 'auto' or 'none', and name in `tools` those that it may call"
        raise PydanticCustomError("not_supported", message)
    return tool_choice


class ChatMessage(BaseModel):
    """A message of a chat, as templates take it; clients add a name, and what an answer holds besides."""

    role: str
    content: Annotated[str, BeforeValidator(_joined)] = ""

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        if role not in ROLES:
            message = "{role} is not supported; tools run inside the answer, and roles are {roles}"
            raise PydanticCustomError("not_supported", message, {"role": repr(role[:40]), "roles": ", ".join(ROLES)})
        return role


class ChatRequest(ChoiceRequest):
    """A request to /v1/chat/completions: messages, to which the next one is written."""

    path: ClassVar[str] = "/v1/chat/completions"
    id_prefix: ClassVar[str] = "chatcmpl"

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Annotated[str, BeforeValidator(_auto_or_none)] | None = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the tokens of the chat, in which the template's special tokens are such."""
        return [chat_tokens(decoder, self.messages, "messages")]

    def withheld(self, decoder: SharedDecoder) -> frozenset[str]:
        """Return the tools that may not be called: with `tool_choice` none, all."""
        if self.tool_choice == "none":
            return frozenset(decoder.tools)
        return super().withheld(decoder)

    def object_name(self, *, is_chunk: bool) -> str:
        """Return the name of what is answered."""
        return "chat.completion.chunk" if is_chunk else "chat.completion"

    def text_object(self, text: str, part: Part) -> dict[str, Any]:
        """Return the text as the content of a message."""
        return {part: {"role": "assistant", "content": text}}

    def logprobs_object(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return an object per token."""
        return {"content": [_chat_token(placed.token) for placed in tokens], "refusal": None}


def _chat_token(token: TokenLikelihood) -> dict[str, Any]:
    likeliest = [_chat_logprob(text, log_probability) for text, log_probability in token.likeliest]
    return {**_chat_logprob(token.text, token.log_probability), "top_logprobs": likeliest}


def _chat_logprob(text: str, log_probability: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_probability, "bytes": list(text.encode())}


TRIAL_CHAT = (
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Thanks."},
)
"""Over this chat the model's template has to end before it writes those of clients."""


def chat_tokens(decoder: SharedDecoder, messages: Sequence[ChatMessage], param: str) -> list[int]:
    """Return the tokens of a chat by the model's own template. Raises Refused, which names the field `param`.

    Before the first chat the template is tried in a process with limits, since it could loop for ever.
    """
    decoder.require_length(sum(len(message.content) for message in messages))
    fault = _template_fault(decoder.tokenizer)
    if fault is not None:
        raise Refused(f"{fault}; ask /v1/completions", param, status=404)
    chat = [message.model_dump() for message in messages]
    try:
        return list(decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # of the model's own template
        raise Refused(f"{param}: the model's chat template does not take them: {error}", param) from error


def _template_fault(tokenizer: Any) -> str | None:
    """Return why a model's chat template cannot be used for any chat; None where it can."""
    if not tokenizer.chat_template:
        return "this model's tokenizer has no chat template"
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # of several templates none is the default
        return f"this model's chat template is not clear: {error}"
    fault = template_fault(template, TRIAL_CHAT, tokenizer.special_tokens_map)
    return None if fault is None else f"this model's chat template is not used: {fault}"
