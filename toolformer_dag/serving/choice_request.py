"""Requests to /v1/completions and /v1/chat/completions of OpenAI's protocol: their answers have a choice per text."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from toolformer_dag.decoding.generation import TokenLikelihood
from toolformer_dag.serving.api_answer import NewText, PlacedToken, build_call_object, usage, whole_text
from toolformer_dag.serving.api_request import ApiRequest, Refused, Texts
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import Writing
from toolformer_dag.traces.template_trial import find_template_fault

ROLES = ("system", "developer", "user", "assistant")
"""The roles that messages of a chat may have."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of those parts of a message that hold text."""
Part = Literal["message", "delta"]
"""The field of a chat's choice that holds text: `message` for a whole answer, `delta` for what a chunk adds."""


class ChoiceRequest(ApiRequest):
    """A request whose answer has one choice per text, each with its tool calls.

    `id_prefix`: the beginning of the ids of answers, such as "cmpl".
    """

    id_prefix: ClassVar[str]

    def answer(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the whole answer: a choice per text, and the token counts. Raises the error of a text."""
        choices = []
        for index, writing in enumerate(writings):
            text = whole_text(index, writing, calls_in_text=self.has_calls_in_text)
            choices.append(self._build_choice(text, "message"))
        return self._build_envelope(choices) | {"usage": usage(writings)}

    def stream_chunk(self, new: NewText) -> bytes:
        """Return a chunk of one choice, with what is new in its text, as an event."""
        return self.stream_event(self._build_envelope([self._build_choice(new, "delta")], is_chunk=True))

    def stream_end(self, writings: Sequence[Writing]) -> bytes:
        """Return the events at the end of a stream: the token counts, if the client wants them, and `[DONE]`."""
        end = b"data: [DONE]\n\n"
        wants_usage = (self.stream_options or {}).get("include_usage")
        if not wants_usage:
            return end
        usage_chunk = self._build_envelope([], is_chunk=True) | {"usage": usage(writings)}
        return self.stream_event(usage_chunk) + end

    def _build_envelope(self, choices: Sequence[Mapping[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        """Return an answer, or a chunk of a stream, that holds these choices."""
        return {
            "id": f"{self.id_prefix}-{self._id}",
            "object": self.object_name(is_chunk=is_chunk),
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }

    def _build_choice(self, new: NewText, part: Part) -> dict[str, Any]:
        """Return the choice of a text: its characters, calls and log p, or what is new of them."""
        return {
            "index": new.index,
            "finish_reason": new.finish_reason,
            "logprobs": None if self.likeliest is None else self.build_logprobs_object(new.tokens),
            "calls": [build_call_object(call, calls_in_text=self.has_calls_in_text) for call in new.calls],
            **self.build_text_object(new.text, part),
        }

    @abstractmethod
    def object_name(self, *, is_chunk: bool) -> str:
        """Return the value of the field `object` of a whole answer or of a chunk."""

    @abstractmethod
    def build_text_object(self, text: str, part: Part) -> dict[str, Any]:
        """Return the field of a choice that holds its text, as {"text": "..."}."""

    @abstractmethod
    def build_logprobs_object(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return the tokens with log p, each with the likeliest tokens in its place, in the form of this request."""


class CompletionRequest(ChoiceRequest):
    """A request to /v1/completions: each prompt is continued by a text."""

    path: ClassVar[str] = "/v1/completions"
    id_prefix: ClassVar[str] = "cmpl"

    prompt: Annotated[Texts, Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens the client wants for each token; None if it wants no log p."""
        return self.logprobs

    @property
    def one_sentence(self) -> bool:
        """Whether a text ends with its first sentence or line, as in `generate`: if the client sets no `max_tokens`."""
        return self.max_tokens is None

    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the prompts as the client sent them."""
        return self.prompt

    def object_name(self, *, is_chunk: bool) -> str:
        """Return "text_completion", for whole answers and for chunks."""
        return "text_completion"

    def build_text_object(self, text: str, part: Part) -> dict[str, Any]:
        """Return {"text": "..."}."""
        return {"text": text}

    def build_logprobs_object(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return four lists, each with an item per token."""
        return {
            "tokens": [placed.token.text for placed in tokens],
            "token_logprobs": [placed.token.log_probability for placed in tokens],
            "top_logprobs": [dict(placed.token.likeliest) for placed in tokens],
            "text_offset": [placed.offset for placed in tokens],
        }


def _join_parts(content: Any) -> str:
    """Return the content of a message as one text: its parts, texts or objects, are joined; "" for null.

    Raises PydanticCustomError for parts that hold no text.
    """
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    return "".join(_get_part_text(part) for part in parts)


def _get_part_text(part: Any) -> str:
    """Get the text of a part of a message, such as "Hi" of "Hi" or of {"type": "text", "text": "Hi"}.

    Raises:
        PydanticCustomError: The part is not text, but for example an image.
    """
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


def _require_auto_or_none(tool_choice: Any) -> Any:
    """Return `tool_choice` unchanged. Raises PydanticCustomError for values that force a call."""
    if tool_choice not in ("auto", "none"):
        message = "the model decides where it calls; give 'auto' or 'none', and name in `tools` those that it may call"
        raise PydanticCustomError("not_supported", message)
    return tool_choice


class ChatMessage(BaseModel):
    """A message of a chat, as the model's template takes it. Other fields that clients send are ignored."""

    role: str
    content: Annotated[str, BeforeValidator(_join_parts)] = ""

    @field_validator("role")
    @classmethod
    def _known_role(cls, role: str) -> str:
        """Return `role` unchanged. Raises PydanticCustomError unless it is one of ROLES."""
        if role not in ROLES:
            message = "{role} is not supported; tools run inside the answer, and roles are {roles}"
            raise PydanticCustomError("not_supported", message, {"role": repr(role[:40]), "roles": ", ".join(ROLES)})
        return role


class ChatRequest(ChoiceRequest):
    """A request to /v1/chat/completions: messages of a chat, after which the assistant's next one is written."""

    path: ClassVar[str] = "/v1/chat/completions"
    prompt_field: ClassVar[str] = "messages"
    id_prefix: ClassVar[str] = "chatcmpl"

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Annotated[str, BeforeValidator(_require_auto_or_none)] | None = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens the client wants for each token; None if it wants no log p."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return one prompt: the token ids of the chat by the model's template, special tokens included."""
        return [encode_chat(decoder, self.messages, self.prompt_field)]

    def withheld(self, decoder: SharedDecoder) -> frozenset[str]:
        """Return the tools that may not be called: all of them if `tool_choice` is "none"."""
        if self.tool_choice == "none":
            return frozenset(decoder.tools)
        return super().withheld(decoder)

    def object_name(self, *, is_chunk: bool) -> str:
        """Return "chat.completion", or "chat.completion.chunk" for a chunk."""
        return "chat.completion.chunk" if is_chunk else "chat.completion"

    def build_text_object(self, text: str, part: Part) -> dict[str, Any]:
        """Return the text as the content of an assistant's message, or of what a chunk adds to it."""
        return {part: {"role": "assistant", "content": text}}

    def build_logprobs_object(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return a list with an object per token."""
        return {"content": [_build_chat_token(placed.token) for placed in tokens], "refusal": None}


def _build_chat_token(token: TokenLikelihood) -> dict[str, Any]:
    """Return a token with its log p and the likeliest tokens in its place, in OpenAI's form for chats."""
    likeliest = [_build_chat_logprob(text, log_probability) for text, log_probability in token.likeliest]
    return {**_build_chat_logprob(token.text, token.log_probability), "top_logprobs": likeliest}


def _build_chat_logprob(text: str, log_probability: float) -> dict[str, Any]:
    """Return a token's text, log p and UTF-8 bytes, in OpenAI's form for chats."""
    return {"token": text, "logprob": log_probability, "bytes": list(text.encode())}


TRIAL_CHAT = (
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Thanks."},
)
"""The chat with which a model's template is tried before it renders those of clients."""


def encode_chat(decoder: SharedDecoder, messages: Sequence[ChatMessage], param: str) -> list[int]:
    """Convert a chat to token ids with the model's own template, up to where the assistant's message begins.

    Args:
        param: The field of the request that holds the messages, for errors.

    Raises:
        NothingWritten: The messages are too long.
        Refused: The model has no template that can be used, or the template does not accept these messages.
    """
    decoder.require_length(sum(len(message.content) for message in messages))

    fault = _find_template_fault(decoder.tokenizer)
    if fault is not None:
        raise Refused(f"{fault}; ask /v1/completions", param, status=404)

    try:
        return _encode_messages(decoder.tokenizer, messages)
    except Exception as error:  # whatever the model's template raises
        raise Refused(f"{param}: the model's chat template does not take them: {error}", param) from error


def _encode_messages(tokenizer: Any, messages: Sequence[ChatMessage]) -> list[int]:
    """Return the token ids that a model's chat template makes of messages; raises what the template raises."""
    chat = [message.model_dump() for message in messages]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def _find_template_fault(tokenizer: Any) -> str | None:
    """Find out why a model's chat template cannot be used.

    Returns:
        The reason, or None if the template can be used.
    """
    if not tokenizer.chat_template:
        return "this model's tokenizer has no chat template"

    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # there are several templates, and none is the default
        return f"this model's chat template is not clear: {error}"

    fault = find_template_fault(template, TRIAL_CHAT, tokenizer.special_tokens_map)
    return None if fault is None else f"this model's chat template is not used: {fault}"
