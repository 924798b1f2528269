"""Requests to /v1/completions and /v1/chat/completions of OpenAI's protocol: their answers have a choice per text."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from toolformer_dag.decoding.generation import TokenLikelihood
from toolformer_dag.serving.api_answer import (
    NewText,
    PlacedToken,
    build_call_object,
    build_usage_object,
    build_whole_text,
)
from toolformer_dag.serving.api_request import ApiRequest, Refused, Texts
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import Writing
from toolformer_dag.traces.template_trial import find_template_fault

ALLOWED_ROLES = ("system", "developer", "user", "assistant")
"""The roles that messages of a chat may have."""
TEXT_PART_TYPES = ("text", "input_text", "output_text")
"""The types of those parts of a message that hold text."""
MessageKey = Literal["message", "delta"]
"""The field of a chat's choice that holds text: `message` for a whole answer, `delta` for what a chunk adds."""


class ChoiceRequest(ApiRequest):
    """A request whose answer has one choice per text, each with its tool calls.

    A choice is OpenAI's word for one of the texts that an answer holds.

    Attributes of the class:

    - `id_prefix`: the beginning of the ids of answers, such as "cmpl".
    """

    id_prefix: ClassVar[str]

    def build_answer(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the whole answer as a JSON object: a choice per text, and the token counts.

        Args:
            writings: The texts, which must have ended.

        Raises:
            Exception: The error that ended a text, if there was one.
        """
        choices = []
        for text_index, writing in enumerate(writings):
            whole_text = build_whole_text(text_index, writing, has_calls_in_text=self.has_calls_in_text)
            choices.append(self._build_choice(whole_text, "message"))

        answer = self._build_envelope(choices)
        answer["usage"] = build_usage_object(writings)
        return answer

    def format_stream_chunk(self, new_text: NewText) -> bytes:
        """Return an event with one choice, which holds what is new in its text."""
        choice = self._build_choice(new_text, "delta")
        chunk = self._build_envelope([choice], is_chunk=True)
        return self.format_stream_event(chunk)

    def format_stream_end(self, writings: Sequence[Writing]) -> bytes:
        """Return the events at the end of a stream: the token counts, if the client wants them, and `[DONE]`.

        The client wants the counts if its `stream_options` have a true "include_usage".

        Args:
            writings: The texts, which must have ended.
        """
        end_event = b"data: [DONE]\n\n"
        stream_options = self.stream_options or {}
        if not stream_options.get("include_usage"):
            return end_event

        # A chunk without choices, as in OpenAI's protocol.
        usage_chunk = self._build_envelope([], is_chunk=True)
        usage_chunk["usage"] = build_usage_object(writings)
        return self.format_stream_event(usage_chunk) + end_event

    def _build_envelope(self, choices: Sequence[Mapping[str, Any]], *, is_chunk: bool = False) -> dict[str, Any]:
        """Return the JSON object of an answer, or of a chunk of a stream, that holds some choices."""
        return {
            "id": f"{self.id_prefix}-{self._answer_id}",
            "object": self.get_object_name(is_chunk=is_chunk),
            "created": self._created_timestamp,
            "model": self.model,
            "choices": choices,
        }

    def _build_choice(self, new_text: NewText, message_key: MessageKey) -> dict[str, Any]:
        """Build the JSON object of a choice, with the characters, calls and log probabilities of its text.

        Args:
            new_text: A whole text, or what a chunk of a stream adds to it.
            message_key: The field that holds the characters in a chat, "message" for a whole text, "delta" for a chunk.
        """
        logprobs_object = None
        if self.likeliest_count is not None:
            logprobs_object = self.build_logprobs_object(new_text.placed_tokens)

        call_objects = []
        for call in new_text.answered_calls:
            call_objects.append(build_call_object(call, has_calls_in_text=self.has_calls_in_text))

        return {
            "index": new_text.text_index,
            "finish_reason": new_text.finish_reason,
            "logprobs": logprobs_object,
            "calls": call_objects,
            **self.build_text_object(new_text.text, message_key),
        }

    @abstractmethod
    def get_object_name(self, *, is_chunk: bool) -> str:
        """Return the value of the field `object` of a whole answer or of a chunk."""

    @abstractmethod
    def build_text_object(self, text: str, message_key: MessageKey) -> dict[str, Any]:
        """Return the field of a choice that holds its text, such as {"text": "Hello"}.

        Args:
            text: The characters.
            message_key: The name of this field in a chat, "message" or "delta".
        """

    @abstractmethod
    def build_logprobs_object(self, placed_tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return the JSON object with the log probabilities of tokens, and of the likeliest tokens in their places.

        Each kind of request has its own form for it in OpenAI's protocol.
        """


class CompletionRequest(ChoiceRequest):
    """A request to /v1/completions: each prompt is continued by a text."""

    path: ClassVar[str] = "/v1/completions"
    id_prefix: ClassVar[str] = "cmpl"

    prompt: Annotated[Texts, Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def likeliest_count(self) -> int | None:
        """How many of the likeliest tokens the client wants for each token; None if it wants no log p."""
        return self.logprobs

    @property
    def is_one_sentence(self) -> bool:
        """Whether a text ends with its first sentence or line. It does if the client sets no `max_tokens`."""
        return self.max_tokens is None

    def build_prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the prompts as the client sent them."""
        return self.prompt

    def get_object_name(self, *, is_chunk: bool) -> str:
        """Return "text_completion", for whole answers and for chunks."""
        return "text_completion"

    def build_text_object(self, text: str, message_key: MessageKey) -> dict[str, Any]:
        """Return {"text": "..."}."""
        return {"text": text}

    def build_logprobs_object(self, placed_tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return four lists, each with an item per token: texts, log p, likeliest tokens, and offsets in the text."""
        return {
            "tokens": [placed.token.text for placed in placed_tokens],
            "token_logprobs": [placed.token.log_probability for placed in placed_tokens],
            "top_logprobs": [dict(placed.token.likeliest_tokens) for placed in placed_tokens],
            "text_offset": [placed.offset for placed in placed_tokens],
        }


def _join_message_parts(message_content: Any) -> str:
    """Return the content of a chat message as one text, by joining its parts.

    For example, "Hi" is returned for "Hi" and for ["H", {"type": "text", "text": "i"}].

    Args:
        message_content: A part, a list of parts, or None, for which "" is returned.

    Raises:
        PydanticCustomError: A part holds no text.
    """
    if message_content is None:
        return ""

    parts = message_content if isinstance(message_content, list) else [message_content]
    return "".join(_get_part_text(part) for part in parts)


def _get_part_text(message_part: Any) -> str:
    """Get the text of a part of a message, such as "Hi" from "Hi" or from {"type": "text", "text": "Hi"}.

    Raises:
        PydanticCustomError: The part is not text, but for example an image.
    """
    if isinstance(message_part, str):
        return message_part

    part_type = type(message_part).__name__  # for the message, if the part is no object
    if isinstance(message_part, dict):
        part_type = str(message_part.get("type"))
        text = message_part.get("text") or ""
        if part_type in TEXT_PART_TYPES and isinstance(text, str):
            return text

    message = "a part of type {kind} is not supported; send text alone"
    raise PydanticCustomError("not_supported", message, {"kind": part_type[:40]})


def _require_auto_or_none(tool_choice: Any) -> Any:
    """Return the field `tool_choice` unchanged if it is "auto" or "none".

    Raises:
        PydanticCustomError: It has another value, such as one that forces a call.
    """
    if tool_choice not in ("auto", "none"):
        message = "the model decides where it calls; give 'auto' or 'none', and name in `tools` those that it may call"
        raise PydanticCustomError("not_supported", message)
    return tool_choice


ToolChoice = Annotated[str, BeforeValidator(_require_auto_or_none)]
"""Whether tools may be called: "auto" or "none"."""


class ChatMessage(BaseModel):
    """A message of a chat, as the model's template takes it. Other fields that clients send are ignored."""

    role: str
    content: Annotated[str, BeforeValidator(_join_message_parts)] = ""

    @field_validator("role")
    @classmethod
    def _require_allowed_role(cls, role: str) -> str:
        """Return the role of a message unchanged if it is one of ALLOWED_ROLES.

        Raises:
            PydanticCustomError: It is another role, such as "tool".
        """
        if role in ALLOWED_ROLES:
            return role

        message = "{role} is not supported; tools run inside the answer, and roles are {roles}"
        message_values = {"role": repr(role[:40]), "roles": ", ".join(ALLOWED_ROLES)}
        raise PydanticCustomError("not_supported", message, message_values)


class ChatRequest(ChoiceRequest):
    """A request to /v1/chat/completions: the messages of a chat, after which the assistant's next one is written."""

    path: ClassVar[str] = "/v1/chat/completions"
    prompt_field: ClassVar[str] = "messages"
    id_prefix: ClassVar[str] = "chatcmpl"

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: ToolChoice | None = None

    @property
    def likeliest_count(self) -> int | None:
        """How many of the likeliest tokens the client wants for each token; None if it wants no log p."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0

    def build_prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return one prompt, the token ids of the chat in the form of the model's template.

        Raises:
            Refused: The model's template cannot be used, or does not accept these messages.
            NothingWritten: The messages are too long.
        """
        return [encode_chat(decoder, self.messages, self.prompt_field)]

    def find_withheld_tools(self, decoder: SharedDecoder) -> frozenset[str]:
        """Find the tools that may not be called, which are all of them if `tool_choice` is "none".

        Raises:
            Refused: The request names a tool that the server does not have.
        """
        if self.tool_choice == "none":
            return frozenset(decoder.tools_by_name)
        return super().find_withheld_tools(decoder)

    def get_object_name(self, *, is_chunk: bool) -> str:
        """Return "chat.completion", or "chat.completion.chunk" for a chunk."""
        return "chat.completion.chunk" if is_chunk else "chat.completion"

    def build_text_object(self, text: str, message_key: MessageKey) -> dict[str, Any]:
        """Return the text as the content of an assistant's message, or of what a chunk adds to it."""
        return {message_key: {"role": "assistant", "content": text}}

    def build_logprobs_object(self, placed_tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return the JSON object with an object per token, in its field "content"."""
        token_objects = [_build_chat_token(placed.token) for placed in placed_tokens]
        return {"content": token_objects, "refusal": None}


def _build_chat_token(token: TokenLikelihood) -> dict[str, Any]:
    """Return a token with its log p and the likeliest tokens in its place, in OpenAI's form for chats."""
    likeliest_objects = [_build_chat_logprob(text, log_probability) for text, log_probability in token.likeliest_tokens]

    token_object = _build_chat_logprob(token.text, token.log_probability)
    token_object["top_logprobs"] = likeliest_objects
    return token_object


def _build_chat_logprob(text: str, log_probability: float) -> dict[str, Any]:
    """Return a token's text, log p and UTF-8 bytes, in OpenAI's form for chats."""
    return {"token": text, "logprob": log_probability, "bytes": list(text.encode())}


TRIAL_CHAT = (
    {"role": "user", "content": "What is 6 times 7?"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Thanks."},
)
"""The chat with which a model's template is tried before it renders those of clients."""


def encode_chat(decoder: SharedDecoder, messages: Sequence[ChatMessage], field_name: str) -> list[int]:
    """Convert a chat to token ids with the model's own template, up to where the assistant's next message begins.

    A chat template says how a model marks the roles and the ends of messages in its text.

    Args:
        decoder: Has the tokenizer with the template.
        messages: The messages of the chat.
        field_name: The field of the request that holds the messages, for errors.

    Raises:
        NothingWritten: The messages are too long.
        Refused: The model has no template that can be used, or the template does not accept these messages.
    """
    character_count = sum(len(message.content) for message in messages)
    decoder.require_fitting_length(character_count)

    template_fault = _find_template_fault(decoder.tokenizer)
    if template_fault is not None:
        raise Refused(f"{template_fault}; ask /v1/completions", field_name, status_code=404)

    try:
        return _encode_messages(decoder.tokenizer, messages)
    except Exception as error:  # whatever the model's template raises
        raise Refused(f"{field_name}: the model's chat template does not take them: {error}", field_name) from error


def _encode_messages(tokenizer: Any, messages: Sequence[ChatMessage]) -> list[int]:
    """Return the token ids that a model's chat template makes of messages.

    Raises:
        Exception: Whatever the template raises, for example for roles in an order that it does not accept.
    """
    chat = [message.model_dump() for message in messages]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))


def _find_template_fault(tokenizer: Any) -> str | None:
    """Find out why a model's chat template cannot be used.

    To see whether it works, it is tried with a short chat.

    Returns:
        The reason, as the message for a client. None if the template can be used.
    """
    if not tokenizer.chat_template:
        return "this model's tokenizer has no chat template"

    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # there are several templates, and none is the default
        return f"this model's chat template is not clear: {error}"

    fault = find_template_fault(template, TRIAL_CHAT, tokenizer.special_tokens_map)
    if fault is None:
        return None
    return f"this model's chat template is not used: {fault}"
