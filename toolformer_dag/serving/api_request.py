"""OpenAI's protocol: what every kind of request may hold, and how it is read. What is not supported is refused."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
from toolformer_dag.tools.tool import context_fault

MOST_FIELDS = 100
"""Fields of a request; each that is not known costs a message of its own."""
MOST_STOP_WORDS = 32
"""Stop words of a request; the text is searched for each of them after each token."""
LONGEST_STOP_WORD = 256
"""Characters of a stop word."""
SURROGATE = b"\\ud"
"""How JSON writes half of a surrogate pair begins so."""


class Refused(UserError):
    """A request that is not answered: the field that is wrong, the HTTP status, and OpenAI's code."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


def _as_tool_name(tool: Any) -> str:
    """Return the name of a tool that is named, or sent in one of OpenAI's forms.

    Its description and parameters are passed over: this server has its own.
    """
    name = tool
    if isinstance(tool, dict):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError("not_supported", "give a tool of this server, by its name or as a function with one")
    return name


def _as_list(value: Any) -> Any:
    """Return a single text as a list of it; everything else as it is."""
    return [value] if isinstance(value, str) else value


def _without_token_ids(value: Any) -> Any:
    """Return an item of a list of texts. Raises for token ids, as numbers or lists of them."""
    if isinstance(value, int | list):
        raise PydanticCustomError("not_supported", "token ids are not supported; give text")
    return value


Texts = Annotated[
    list[Annotated[str, BeforeValidator(_without_token_ids)]], Field(fail_fast=True), BeforeValidator(_as_list)
]
"""A text, or a list of texts. An error names one fault, so the first ends the reading: a list may have a million."""


class ApiRequest(BaseModel, ABC):
    """A request for texts, and the form of its answer. A kind of request is one subclass, and a route by its `path`.

    Of the class:

    - `path`: where it is sent.
    - `neutral`: fields that are accepted only at the value that matches greedy decoding.
    - `limit`: the field that limits the tokens of an answer, for messages.
    - `passed_over`: fields that change no answer here, whatever they hold: notes of the client, and how calls would be
      handed to it.

    Of a request:

    - `seed`: every seed gives the same text.
    - `tools`: those that may be called; default: all of the server.
    - `calls`: whether calls are taken out of the text (`apart`) or stand in it.
    - `max_calls`: the most calls of the answer.
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
    passed_over: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"}
    )

    model: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens"))
    stop: Texts | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    tools: list[Annotated[str, BeforeValidator(_as_tool_name)]] | None = Field(None, fail_fast=True)
    calls: Literal["apart", "in_text"] = "apart"
    max_calls: int | None = Field(None, ge=0)
    context: str = ""

    _id: str = PrivateAttr(default_factory=lambda: uuid4().hex)
    _created: int = PrivateAttr(default_factory=lambda: int(time.time()))  # seconds since 1970

    # What is asked for

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are asked for beside log p of each token; None where not even that is."""

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
        """Return the prompts as texts, or as tokens with BOS. Raises Refused, NothingWritten."""

    def withheld(self, decoder: SharedDecoder) -> frozenset[str]:
        """Return the tools that may not be called: with `tools`, all that it does not name. Raises Refused."""
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
    def stream_chunk(self, new: NewText) -> dict[str, Any]:
        """Return what is sent of a text while it is written; `stream_event` makes an event of it."""

    def stream_event(self, chunk: Mapping[str, Any]) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    @abstractmethod
    def stream_end(self, writings: Sequence[Writing]) -> bytes:
        """Return the events with which a stream ends."""

    # How it is read

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read the body of a request. Raises Refused, which names the field."""
        try:
            fields = _json(body)
            if isinstance(fields, dict):
                fields = cls._with_known_values(fields)
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            message = f"{place}: {first['msg']}"
            if first["type"] == "extra_forbidden":
                message = f"{place} is not supported; leave it out"
            raise Refused(message, place.partition(".")[0], code=first["type"]) from error
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from error

    @classmethod
    def _with_known_values(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that change an answer and have a value.

        Raises Refused for neutral ones at other values, and for more than MOST_FIELDS.
        """
        if len(fields) > MOST_FIELDS:
            raise Refused(f"the body has {len(fields):,} fields; send at most {MOST_FIELDS}")
        for param in cls.neutral.keys() & fields:
            _require_neutral(param, fields[param], cls.neutral[param])
        left_out = cls.neutral.keys() | cls.passed_over
        if fields.get("max_completion_tokens") is not None:
            left_out |= {"max_tokens"}  # its newer name wins
        return {param: value for param, value in fields.items() if param not in left_out and value is not None}


def _require_neutral(param: str, value: Any, neutral: object) -> None:
    """Raise Refused for a value that asks for anything but greedy decoding; True is not 1 here, nor False 0."""
    if value is None:
        return
    is_same_kind = isinstance(value, bool) == isinstance(neutral, bool)
    if value != neutral or not is_same_kind:
        raise Refused(f"{param}: {value!r} is not supported; leave it out, or give {neutral!r}", param)


def _json(body: bytes) -> Any:
    """Read JSON; half a surrogate pair, which clients cut a text to, is U+FFFD. Raises ValueError."""
    try:
        return orjson.loads(body)
    except ValueError:
        if SURROGATE not in body.lower():
            raise
        return read_json(body.decode())


def text_requests(request: ApiRequest, model: str, decoder: SharedDecoder) -> list[TextRequest]:
    """Return the texts that a request asks for, under the limits of the server. Raises Refused, NothingWritten.

    `model`: the name by which clients ask for the server's model.
    """
    require_model(request.model, model)
    if request.likeliest is not None and request.has_calls_in_text:
        raise Refused("logprobs are those of the text without calls; leave `calls` out", "logprobs")
    _require_stop_words(request.stop or ())
    fault = context_fault(request.context, decoder.tools.values())
    if fault is not None:
        raise Refused(fault, "context")
    decoding = decoder.settings.decoding
    serving = decoder.settings.serving
    usual_tokens = decoding.max_new_tokens if request.one_sentence else serving.max_tokens
    max_new_tokens = _limited(request.limit, request.max_tokens, usual=usual_tokens, most=serving.max_tokens)
    calls = _limited("max_calls", request.max_calls, usual=decoding.calls, most=serving.calls)
    withheld = request.withheld(decoder)
    return [
        TextRequest(
            prompt,
            max_new_tokens=max_new_tokens,
            calls=calls,
            context=request.context,
            one_sentence=request.one_sentence,
            withheld=withheld,
            stop=tuple(request.stop or ()),
            likeliest=request.likeliest,
        )
        for prompt in request.prompts(decoder)
    ]


def require_model(requested: str, model: str) -> None:
    """Raise Refused where a client asks for another model than this server has."""
    if requested != model:
        message = f"there is no model {requested!r}; this server has {model!r}"
        raise Refused(message, "model", status=404, code="model_not_found")


def _require_stop_words(words: Sequence[str]) -> None:
    """Raise Refused for stop words that are empty, or would take long to look for after each token."""
    if "" in words:
        raise Refused("stop: a stop word has at least one character", "stop")
    longest = max(map(len, words), default=0)
    if len(words) > MOST_STOP_WORDS or longest > LONGEST_STOP_WORD:
        message = f"stop: at most {MOST_STOP_WORDS} words of at most {LONGEST_STOP_WORD} characters; give fewer"
        raise Refused(message, "stop")


def _limited(param: str, value: int | None, *, usual: int, most: int) -> int:
    """Return a limit that a client may set, at most `most`; `usual` where it sets none. Raises Refused."""
    if value is None:
        return min(usual, most)
    if value > most:
        raise Refused(f"{param}: {value} is above the {most} that this server allows; ask for less", param)
    return value
