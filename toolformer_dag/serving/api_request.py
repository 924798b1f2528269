"""OpenAI's protocol: what every kind of request may hold, and how it is read. What is not supported is refused."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self
from uuid import uuid4

import orjson
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from toolformer_dag.files import UserError
from toolformer_dag.serving.api_answer import NewText
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import TextRequest, Writing
from toolformer_dag.texts.formats import parse_json_text
from toolformer_dag.tools.tool import find_context_fault

MAX_FIELDS = 100
"""The maximum number of fields of a request: pydantic builds an error for each unknown one."""
MAX_STOP_WORDS = 32
"""The maximum number of stop words of a request: after each token the text is searched for each."""
MAX_STOP_WORD_CHARACTERS = 256
"""The maximum number of characters of a stop word."""
SURROGATE_ESCAPE_PREFIX = b"\\ud"
"""How the JSON escape of half a surrogate pair begins, such as "\\ud83d"."""


class Refused(UserError):
    """A request is refused, because it is wrong or not supported.

    Attributes:
        param: The faulty field of the request. None if it is not one field.
        status_code: The HTTP status of the answer.
        code: A short reason, such as "model_not_found". None if the message says it all.
    """

    def __init__(
        self, message: str, param: str | None = None, *, status_code: int = 400, code: str | None = None
    ) -> None:
        """Build the error with the message that the client gets."""
        super().__init__(message)
        self.param = param
        self.status_code = status_code
        self.code = code


def _parse_tool_name(tool: Any) -> str:
    """Get the name of a tool from its name alone or from one of OpenAI's forms.

    The name is "QA" for "QA", {"name": "QA"} and {"type": "function", "function": {"name": "QA"}}. The description and
    the parameters of a function are ignored, because the server has its own.

    Args:
        tool: An item of the field `tools`, as the client sent it.

    Raises:
        PydanticCustomError: There is no name.
    """
    name = tool
    if isinstance(tool, dict):
        # In the longer form, the name is inside of "function".
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None

    if not isinstance(name, str):
        raise PydanticCustomError("not_supported", "give a tool of this server, by its name or as a function with one")
    return name


def _wrap_text_in_list(value: Any) -> Any:
    """Return a text as a list with this text, and every other value unchanged."""
    if isinstance(value, str):
        return [value]
    return value


def _refuse_token_ids(value: Any) -> Any:
    """Return an item of a list of texts unchanged, unless it is a token id or a list.

    OpenAI's protocol takes token ids in place of texts. This server does not.

    Raises:
        PydanticCustomError: The item is a token id or a list.
    """
    if isinstance(value, int | list):
        raise PydanticCustomError("not_supported", "token ids are not supported; give text")
    return value


Texts = Annotated[
    list[Annotated[str, BeforeValidator(_refuse_token_ids)]], Field(fail_fast=True), BeforeValidator(_wrap_text_in_list)
]
"""A text, or a list of texts. Validation stops at the first fault, since a list may have a million items."""


class ApiRequest(BaseModel, ABC):
    """A request for texts, and the form of its answer. Each kind of request is a subclass with its own route, `path`.

    A request is answered once, whole by `build_answer` or as a stream by the methods `format_stream_...`. So what a
    stream has to remember, such as the number of its next event, is a private attribute (`PrivateAttr`).

    Attributes of the class:

    - `path`: the URL path to which it is sent.
    - `neutral_values`: fields that are accepted only at the value that matches greedy decoding.
    - `limit_field`: the name of the field that limits the tokens of an answer, for messages.
    - `prompt_field`: the name of the field that holds the prompts, for messages.
    - `ignored_fields`: fields that are accepted and ignored: notes of the client, and how calls would be sent to it.

    Attributes of a request, beside those of OpenAI's protocol:

    - `seed`: accepted and without effect, since every seed gives the same text.
    - `tools`: the tools that may be called; by default all tools of the server.
    - `calls`: `apart` if calls are listed beside the text, `in_text` if they are part of it.
    - `max_calls`: the maximum number of calls in the answer.
    - `context`: the date for the calendar, as 2023-01-30.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    path: ClassVar[str]
    neutral_values: ClassVar[Mapping[str, object]] = {
        "temperature": 0,
        "top_p": 1,
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "echo": False,
        "suffix": "",
        "store": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
    }
    limit_field: ClassVar[str] = "max_tokens"
    prompt_field: ClassVar[str] = "prompt"
    ignored_fields: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"}
    )

    model: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    stop: Texts | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    tools: list[Annotated[str, BeforeValidator(_parse_tool_name)]] | None = Field(None, fail_fast=True)
    calls: Literal["apart", "in_text"] = "apart"
    max_calls: int | None = Field(None, ge=0)
    context: str = ""

    _answer_id: str = PrivateAttr(default_factory=lambda: uuid4().hex)
    _created_timestamp: int = PrivateAttr(default_factory=lambda: int(time.time()))  # seconds since 1970

    # What the client wants

    @property
    @abstractmethod
    def likeliest_count(self) -> int | None:
        """How many of the likeliest tokens the client wants with each token's log p. None if it wants no log p."""

    @property
    def is_one_sentence(self) -> bool:
        """Whether a text ends with its first sentence or line."""
        return False

    @property
    def has_calls_in_text(self) -> bool:
        """Whether calls stand in the text of the answer."""
        return self.calls == "in_text"

    @abstractmethod
    def build_prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the prompts of the request as texts, or as token ids, to which no BOS is added anymore.

        Args:
            decoder: Has the tokenizer, and knows how long a prompt may be.

        Raises:
            Refused: The model cannot take these prompts.
            NothingWritten: A prompt is too long.
        """

    def find_withheld_tools(self, decoder: SharedDecoder) -> frozenset[str]:
        """Find the tools that may not be called.

        If the request names `tools`, these are all other tools of the server. Otherwise every tool may be called.

        Args:
            decoder: Has the tools of the server.

        Raises:
            Refused: The request names a tool that the server does not have.
        """
        if self.tools is None:
            return frozenset()

        unknown_tools = sorted(set(self.tools).difference(decoder.tools_by_name))
        if unknown_tools:
            known_names = ", ".join(decoder.tools_by_name)
            message = f"tools: this server has no {unknown_tools[0]!r}; a request can only choose among {known_names}"
            raise Refused(message, "tools")
        return frozenset(decoder.tools_by_name).difference(self.tools)

    # How it is answered

    @abstractmethod
    def build_answer(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the whole answer as a JSON object, once all texts have ended.

        Raises:
            Exception: The error that ended a text, if there was one.
        """

    def format_stream_beginning(self) -> bytes:
        """Return the events with which a stream begins."""
        return b""

    @abstractmethod
    def format_stream_chunk(self, new_text: NewText) -> bytes:
        """Return the event, or several, with what is new in a text."""

    def format_stream_error(self, error_object: Mapping[str, Any]) -> bytes:
        """Return the events with which a stream ends early.

        Args:
            error_object: The JSON object of an error, in OpenAI's form.
        """
        return self.format_stream_event(error_object)

    @abstractmethod
    def format_stream_end(self, writings: Sequence[Writing]) -> bytes:
        """Return the events with which a stream ends, once all texts have ended."""

    def format_stream_event(self, json_object: Mapping[str, Any]) -> bytes:
        """Return a JSON object as the bytes of a server-sent event, such as b'data: {"id":1}\\n\\n'."""
        return b"data: " + orjson.dumps(json_object) + b"\n\n"

    # How it is read

    @classmethod
    def parse_body(cls, body: bytes) -> Self:
        """Parse the JSON body of a request.

        Raises:
            Refused: The body is not JSON, or a field is wrong. The message names the field.
        """
        try:
            fields = _parse_json(body)
            if isinstance(fields, dict):
                fields = cls._select_effective_fields(fields)
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _build_refusal(error) from error
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from error

    @classmethod
    def _select_effective_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Select the fields of a request that can change its answer and are not null.

        A field in `neutral_values` is accepted only at the value at which it changes nothing, such as "temperature": 0.

        Args:
            fields: The fields of the body, as the client sent them.

        Raises:
            Refused: A field in `neutral_values` has another value, or there are more than MAX_FIELDS fields.
        """
        if len(fields) > MAX_FIELDS:
            raise Refused(f"the body has {len(fields):,} fields; send at most {MAX_FIELDS}")

        for field_name in cls.neutral_values.keys() & fields:
            _require_neutral_value(field_name, fields[field_name], cls.neutral_values[field_name])

        # The fields in `neutral_values`, and ignored ones such as "user".
        without_effect = cls._list_fields_without_effect(fields)

        effective_fields = {}
        for field_name, value in fields.items():
            if field_name not in without_effect and value is not None:
                effective_fields[field_name] = value
        return effective_fields

    @classmethod
    def _list_fields_without_effect(cls, fields: Mapping[str, Any]) -> Set[str]:
        """Return the names of all fields that cannot change the answer to a request.

        Args:
            fields: The fields of the request. If they limit the tokens under two names, the older name has no effect.
        """
        without_effect = cls.neutral_values.keys() | cls.ignored_fields
        if fields.get("max_completion_tokens") is not None:
            without_effect |= {"max_tokens"}  # the older name
        return without_effect


def _build_refusal(error: ValidationError) -> Refused:
    """Build the error that a client gets for a request that does not validate. It names the first faulty field.

    In the message, a field within others has a path, such as "messages.0.role". The error itself names the outermost
    field, "messages". Both name "the body" if the error is of no single field.
    """
    first_error = error.errors(include_url=False)[0]
    field_path = ".".join(str(part) for part in first_error["loc"]) or "the body"

    if first_error["type"] == "extra_forbidden":
        message = f"{field_path} is not supported; leave it out"
    else:
        message = f"{field_path}: {first_error['msg']}"

    top_field, _, _ = field_path.partition(".")
    return Refused(message, top_field, code=first_error["type"])


def _require_neutral_value(field_name: str, value: Any, neutral_value: object) -> None:
    """Check that a field is null, or has the value at which it changes nothing.

    True does not count as 1 here, nor False as 0, though they are equal in Python.

    Args:
        field_name: The name of the field.
        value: The value that the client sent.
        neutral_value: The value that matches greedy decoding, such as 0 for "temperature".

    Raises:
        Refused: The field has another value.
    """
    if value is None:
        return

    is_same_kind = isinstance(value, bool) == isinstance(neutral_value, bool)
    if value != neutral_value or not is_same_kind:
        raise Refused(f"{field_name}: {value!r} is not supported; leave it out, or give {neutral_value!r}", field_name)


def _parse_json(body: bytes) -> Any:
    """Parse a JSON text, even if it has an escaped half of a surrogate pair, which becomes U+FFFD.

    Such a half, as "\\ud83d", is left over when a client cuts a text within an emoji.

    Raises:
        ValueError: The text is not JSON.
    """
    try:
        return orjson.loads(body)  # refuses half a surrogate pair
    except ValueError:
        may_have_half_pair = SURROGATE_ESCAPE_PREFIX in body.lower()
        if not may_have_half_pair:
            raise
        return parse_json_text(body.decode())


def build_text_requests(api_request: ApiRequest, model_name: str, decoder: SharedDecoder) -> list[TextRequest]:
    """Build a `TextRequest` for each prompt of a client's request, within the limits of the server.

    Args:
        api_request: What the client wants.
        model_name: The name of the server's model.
        decoder: Has the settings, the tools and the tokenizer of the server.

    Raises:
        Refused: The request asks for something that the server does not have or allow.
        NothingWritten: A prompt is too long.
    """
    _require_supported(api_request, model_name, decoder)

    # All texts of a request differ only in the prompt.
    request_without_prompt = TextRequest(
        prompt="",
        max_new_tokens=_choose_max_new_tokens(api_request, decoder),
        max_calls=_choose_max_calls(api_request, decoder),
        context=api_request.context,
        is_one_sentence=api_request.is_one_sentence,
        withheld_tools=api_request.find_withheld_tools(decoder),
        stop_words=tuple(api_request.stop or ()),
        likeliest_count=api_request.likeliest_count,
    )

    prompts = api_request.build_prompts(decoder)
    return [replace(request_without_prompt, prompt=prompt) for prompt in prompts]


def _choose_max_new_tokens(api_request: ApiRequest, decoder: SharedDecoder) -> int:
    """Choose how many tokens each text of a request may have.

    Without a limit of the client, a text of one sentence gets that of the decoding settings, and any other text the
    largest limit that the server allows.

    Raises:
        Refused: The client asks for more tokens than the server allows.
    """
    max_limit = decoder.settings.serving.max_tokens
    default_limit = decoder.settings.decoding.max_new_tokens if api_request.is_one_sentence else max_limit
    return _choose_limit(
        api_request.limit_field, api_request.max_tokens, default_limit=default_limit, max_limit=max_limit
    )


def _choose_max_calls(api_request: ApiRequest, decoder: SharedDecoder) -> int:
    """Choose how many calls each text of a request may have.

    Raises:
        Refused: The client asks for more calls than the server allows.
    """
    settings = decoder.settings
    return _choose_limit(
        "max_calls", api_request.max_calls, default_limit=settings.decoding.calls, max_limit=settings.serving.calls
    )


def _require_supported(api_request: ApiRequest, model_name: str, decoder: SharedDecoder) -> None:
    """Check that the server can answer a request.

    Raises:
        Refused: The request asks for another model, or for log probabilities of a text with calls in it, or it has bad
            stop words or a context that the tools cannot read.
    """
    require_model(api_request.model, model_name)

    wants_logprobs = api_request.likeliest_count is not None
    if wants_logprobs and api_request.has_calls_in_text:
        raise Refused("logprobs are those of the text without calls; leave `calls` out", "logprobs")

    _require_valid_stop_words(api_request.stop or ())

    context_fault = find_context_fault(api_request.context, decoder.tools_by_name.values())
    if context_fault is not None:
        raise Refused(f"context: {context_fault}", "context")


def require_model(requested_name: str, served_name: str) -> None:
    """Check that a client requests the model of this server.

    Args:
        requested_name: The name of the model that the client requests.
        served_name: The name of the server's model.

    Raises:
        Refused: The names differ. The HTTP status is 404.
    """
    if requested_name != served_name:
        message = f"there is no model {requested_name!r}; this server has {served_name!r}"
        raise Refused(message, "model", status_code=404, code="model_not_found")


def _require_valid_stop_words(stop_words: Sequence[str]) -> None:
    """Check that stop words are not empty, not too many and not too long.

    They are limited because after each token the whole text is searched for each of them.

    Raises:
        Refused: A stop word is empty, or there are more than MAX_STOP_WORDS, or one is longer than
            MAX_STOP_WORD_CHARACTERS.
    """
    if "" in stop_words:
        raise Refused("stop: a stop word has at least one character", "stop")

    max_length = max((len(stop_word) for stop_word in stop_words), default=0)
    if len(stop_words) > MAX_STOP_WORDS or max_length > MAX_STOP_WORD_CHARACTERS:
        message = f"stop: at most {MAX_STOP_WORDS} words of at most {MAX_STOP_WORD_CHARACTERS} characters; give fewer"
        raise Refused(message, "stop")


def _choose_limit(field_name: str, requested_limit: int | None, *, default_limit: int, max_limit: int) -> int:
    """Choose a limit: the client's own if it has set one, otherwise the default.

    Args:
        field_name: The name of the field with the client's limit, for the message.
        requested_limit: The client's limit, or None.
        default_limit: The limit if the client has set none. It is lowered to `max_limit` if necessary.
        max_limit: The largest limit that the server allows.

    Raises:
        Refused: The client's limit is too large.
    """
    if requested_limit is None:
        return min(default_limit, max_limit)

    if requested_limit > max_limit:
        raise Refused(
            f"{field_name}: {requested_limit} is above the {max_limit} that this server allows; ask for less",
            field_name,
        )
    return requested_limit
