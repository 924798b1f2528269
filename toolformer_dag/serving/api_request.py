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
from toolformer_dag.texts.formats import read_json
from toolformer_dag.tools.tool import find_context_fault

MOST_FIELDS = 100
"""The maximum number of fields of a request: pydantic builds an error for each unknown one."""
MOST_STOP_WORDS = 32
"""The maximum number of stop words of a request: after each token the text is searched for each."""
LONGEST_STOP_WORD = 256
"""The maximum number of characters of a stop word."""
SURROGATE = b"\\ud"
"""How the JSON escape of half a surrogate pair begins, such as "\\ud83d"."""


class Refused(UserError):
    """A request that is refused. `param`: the faulty field. `status`: of HTTP. `code`: OpenAI's word for the reason."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


def _to_tool_name(tool: Any) -> str:
    """Get the name of a tool that is given by its name or in one of OpenAI's forms.

    The name is "QA" for "QA", {"name": "QA"} and {"type": "function", "function": {"name": "QA"}}. The description and
    the parameters are ignored, because the server has its own.

    Raises:
        PydanticCustomError: There is no name.
    """
    name = tool
    if isinstance(tool, dict):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError("not_supported", "give a tool of this server, by its name or as a function with one")
    return name


def _to_list(value: Any) -> Any:
    """Return ["a"] for "a", and every other value unchanged."""
    return [value] if isinstance(value, str) else value


def _without_token_ids(value: Any) -> Any:
    """Return an item of a list of texts unchanged. Raises PydanticCustomError for a token id or a list of these."""
    if isinstance(value, int | list):
        raise PydanticCustomError("not_supported", "token ids are not supported; give text")
    return value


Texts = Annotated[
    list[Annotated[str, BeforeValidator(_without_token_ids)]], Field(fail_fast=True), BeforeValidator(_to_list)
]
"""A text, or a list of texts. Validation stops at the first fault, since a list may have a million items."""


class ApiRequest(BaseModel, ABC):
    """A request for texts, and the form of its answer. Each kind of request is a subclass with its own route, `path`.

    A request is answered once, whole by `answer` or as a stream by the methods `stream_...`, so what a stream has to
    remember, such as the number of its next event, is a private attribute (`PrivateAttr`).

    Attributes of the class:

    - `path`: the URL path to which it is sent.
    - `neutral`: fields that are accepted only at the value that matches greedy decoding.
    - `limit`: the name of the field that limits the tokens of an answer, for messages.
    - `prompt_field`: the name of the field that holds the prompts, for messages.
    - `passed_over`: fields that are accepted and ignored: notes of the client, and how calls would be sent to it.

    Attributes of a request, beside those of OpenAI's protocol:

    - `seed`: accepted and without effect, since every seed gives the same text.
    - `tools`: the tools that may be called; by default all tools of the server.
    - `calls`: `apart` if calls are listed beside the text, `in_text` if they are part of it.
    - `max_calls`: the maximum number of calls in the answer.
    - `context`: the date for the calendar, as 2023-01-30.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    path: ClassVar[str]
    neutral: ClassVar[Mapping[str, object]] = {
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
    limit: ClassVar[str] = "max_tokens"
    prompt_field: ClassVar[str] = "prompt"
    passed_over: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"}
    )

    model: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    stop: Texts | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    tools: list[Annotated[str, BeforeValidator(_to_tool_name)]] | None = Field(None, fail_fast=True)
    calls: Literal["apart", "in_text"] = "apart"
    max_calls: int | None = Field(None, ge=0)
    context: str = ""

    _id: str = PrivateAttr(default_factory=lambda: uuid4().hex)
    _created: int = PrivateAttr(default_factory=lambda: int(time.time()))  # seconds since 1970

    # What the client wants

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens the client wants with each token's log p; None if it wants no log p."""

    @property
    def one_sentence(self) -> bool:
        """Whether a text ends with its first sentence or line."""
        return False

    @property
    def has_calls_in_text(self) -> bool:
        """Whether calls stand in the text of the answer."""
        return self.calls == "in_text"

    @abstractmethod
    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the prompts as texts, or as token ids with BOS. Raises Refused, NothingWritten."""

    def withheld(self, decoder: SharedDecoder) -> frozenset[str]:
        """Find the tools that may not be called. If the request names `tools`, these are all others.

        Raises:
            Refused: The request names a tool that the server does not have.
        """
        if self.tools is None:
            return frozenset()

        unknown = sorted(set(self.tools).difference(decoder.tools))
        if unknown:
            names = ", ".join(decoder.tools)
            message = f"tools: this server has no {unknown[0]!r}; a request can only choose among {names}"
            raise Refused(message, "tools")
        return frozenset(decoder.tools).difference(self.tools)

    # How it is answered

    @abstractmethod
    def answer(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the whole answer, once all texts have ended. Raises the error of a text."""

    def stream_begin(self) -> bytes:
        """Return the events with which a stream begins."""
        return b""

    @abstractmethod
    def stream_chunk(self, new: NewText) -> bytes:
        """Return the events, one or several, that tell a client what is new in a text."""

    def stream_error(self, error: Mapping[str, Any]) -> bytes:
        """Return the events with which a stream ends early. `error`: the JSON object of an error, in OpenAI's form."""
        return self.stream_event(error)

    @abstractmethod
    def stream_end(self, writings: Sequence[Writing]) -> bytes:
        """Return the events with which a stream ends, once all texts have ended."""

    def stream_event(self, chunk: Mapping[str, Any]) -> bytes:
        """Return a JSON object as a server-sent event."""
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    # How it is read

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the JSON body of a request.

        Raises:
            Refused: The body is not JSON, or a field is wrong. The message names the field.
        """
        try:
            fields = _parse_json(body)
            if isinstance(fields, dict):
                fields = cls._with_known_values(fields)
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _build_refusal(error) from error
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from error

    @classmethod
    def _with_known_values(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Select the fields that can change an answer and are not null.

        A field in `neutral` is accepted only at the value at which it changes nothing, such as "temperature": 0.

        Raises:
            Refused: Such a field has another value, or there are more than MOST_FIELDS fields.
        """
        if len(fields) > MOST_FIELDS:
            raise Refused(f"the body has {len(fields):,} fields; send at most {MOST_FIELDS}")

        for name in cls.neutral.keys() & fields:
            _require_neutral(name, fields[name], cls.neutral[name])

        without_effect = cls._list_fields_without_effect(fields)  # those of `neutral`, and ignored ones such as "user"
        return {name: value for name, value in fields.items() if name not in without_effect and value is not None}

    @classmethod
    def _list_fields_without_effect(cls, fields: Mapping[str, Any]) -> Set[str]:
        """Return the names of fields that change no answer to this request."""
        without_effect = cls.neutral.keys() | cls.passed_over
        if fields.get("max_completion_tokens") is not None:
            without_effect |= {"max_tokens"}  # if both are there, the newer name counts
        return without_effect


def _build_refusal(error: ValidationError) -> Refused:
    """Return the error for a client, which names the first faulty field."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "the body"
    message = f"{field}: {first['msg']}"
    if first["type"] == "extra_forbidden":
        message = f"{field} is not supported; leave it out"
    return Refused(message, field.partition(".")[0], code=first["type"])


def _require_neutral(param: str, value: Any, neutral: object) -> None:
    """Check that a field is null, or has the value that changes nothing.

    True does not count as 1 here, nor False as 0.

    Args:
        param: The name of the field.
        neutral: The value that matches greedy decoding.

    Raises:
        Refused: The field has another value.
    """
    if value is None:
        return

    is_same_kind = isinstance(value, bool) == isinstance(neutral, bool)
    if value != neutral or not is_same_kind:
        raise Refused(f"{param}: {value!r} is not supported; leave it out, or give {neutral!r}", param)


def _parse_json(body: bytes) -> Any:
    """Parse a JSON text.

    Half a surrogate pair becomes U+FFFD. It is left over when a client cuts a text in two.

    Raises:
        ValueError: The text is not JSON.
    """
    try:
        return orjson.loads(body)
    except ValueError:
        if SURROGATE not in body.lower():
            raise
        return read_json(body.decode())


def build_text_requests(request: ApiRequest, model: str, decoder: SharedDecoder) -> list[TextRequest]:
    """Build a `TextRequest` for each prompt of a client's request, within the limits of the server.

    Args:
        model: The name of the server's model.

    Raises:
        Refused: The request asks for something that the server does not have or allow.
        NothingWritten: A prompt is too long.
    """
    _require_supported(request, model, decoder)

    without_prompt = TextRequest(
        prompt="",
        max_new_tokens=_choose_max_new_tokens(request, decoder),
        calls=_choose_max_calls(request, decoder),
        context=request.context,
        one_sentence=request.one_sentence,
        withheld=request.withheld(decoder),
        stop=tuple(request.stop or ()),
        likeliest=request.likeliest,
    )

    return [replace(without_prompt, prompt=prompt) for prompt in request.prompts(decoder)]


def _choose_max_new_tokens(request: ApiRequest, decoder: SharedDecoder) -> int:
    """Return how many tokens a text of a request may have. Raises Refused if the client asks for too many."""
    decoding = decoder.settings.decoding
    serving = decoder.settings.serving
    usual = decoding.max_new_tokens if request.one_sentence else serving.max_tokens
    return _choose_limit(request.limit, request.max_tokens, usual=usual, most=serving.max_tokens)


def _choose_max_calls(request: ApiRequest, decoder: SharedDecoder) -> int:
    """Return how many calls a text of a request may have. Raises Refused if the client asks for too many."""
    settings = decoder.settings
    return _choose_limit("max_calls", request.max_calls, usual=settings.decoding.calls, most=settings.serving.calls)


def _require_supported(request: ApiRequest, model: str, decoder: SharedDecoder) -> None:
    """Check that the server can answer a request.

    Raises:
        Refused: The request asks for another model, for logprobs of a text with calls, or has bad stop words or an
            unusable context.
    """
    require_model(request.model, model)

    wants_logprobs = request.likeliest is not None
    if wants_logprobs and request.has_calls_in_text:
        raise Refused("logprobs are those of the text without calls; leave `calls` out", "logprobs")

    _require_stop_words(request.stop or ())
    fault = find_context_fault(request.context, decoder.tools.values())  # None if the tools can read it
    if fault is not None:
        raise Refused(f"context: {fault}", "context")


def require_model(requested: str, model: str) -> None:
    """Raise Refused if the model that a client requests is not `model`, the one of this server."""
    if requested != model:
        message = f"there is no model {requested!r}; this server has {model!r}"
        raise Refused(message, "model", status=404, code="model_not_found")


def _require_stop_words(words: Sequence[str]) -> None:
    """Raise Refused for empty stop words, and for too many or too long ones: each token is followed by a search."""
    if "" in words:
        raise Refused("stop: a stop word has at least one character", "stop")
    longest = max(map(len, words), default=0)
    if len(words) > MOST_STOP_WORDS or longest > LONGEST_STOP_WORD:
        message = f"stop: at most {MOST_STOP_WORDS} words of at most {LONGEST_STOP_WORD} characters; give fewer"
        raise Refused(message, "stop")


def _choose_limit(param: str, value: int | None, *, usual: int, most: int) -> int:
    """Choose a limit: the one that the client has set, otherwise the usual one.

    Args:
        param: The name of the field with the client's limit.
        value: The client's limit, or None.
        usual: The limit without one of the client. It is lowered to `most` if necessary.
        most: The largest limit that the server allows.

    Raises:
        Refused: The client's limit is too large.
    """
    if value is None:
        return min(usual, most)
    if value > most:
        raise Refused(f"{param}: {value} is above the {most} that this server allows; ask for less", param)
    return value
