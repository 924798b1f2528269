"""OpenAI's protocol: what a request may ask for, and what an answer looks like. What is not supported is refused."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

import orjson
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from toolformer_dag.decoding.generation import Generation, TokenLikelihood, WrittenPiece, call_text
from toolformer_dag.files import UserError
from toolformer_dag.serving.shared_decoder import MadeCall, SharedDecoder, TextRequest, Writing
from toolformer_dag.texts.formats import read_json

ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a message that hold text."""
SURROGATE = b"\\ud"
Part = Literal["message", "delta"]
"""The field of a chat's choice that holds its text: whole, or what a chunk adds."""


class Refused(UserError):
    """A request that is not answered: the field that is wrong, the HTTP status, and OpenAI's code."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _tool_name(tool: Any) -> str:
    """Take a tool by its name or in OpenAI's forms; description and parameters are the server's own."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else tool
    if not isinstance(name, str):
        raise PydanticCustomError("not_supported", "give a tool of this server, by its name or as a function with one")
    return name


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _text(given: Any) -> Any:
    if isinstance(given, int | list):
        raise PydanticCustomError("not_supported", "token ids are not supported; give text")
    return given


def _joined(content: Any) -> str:
    """Join the parts of a message."""
    texts = []
    for part in content if isinstance(content, list) else ["" if content is None else content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = (part.get("text") or "") if isinstance(part, dict) and kind in TEXT_PARTS else part
        if not isinstance(text, str):
            message = "a part of type {kind} is not supported; send text alone"
            raise PydanticCustomError("not_supported", message, {"kind": str(kind)[:40]})
        texts.append(text)
    return "".join(texts)


def _choice(given: Any) -> Any:
    if given not in ("auto", "none"):
        message = "the model decides where it calls; give 'auto' or 'none', and name in `tools` those that it may call"
        raise PydanticCustomError("not_supported", message)
    return given


Texts = Annotated[list[Annotated[str, BeforeValidator(_text)]], Field(fail_fast=True), BeforeValidator(_listed)]
"""One fault is told, so the first ends the reading: a list may have a million."""


class Asked(_Strict, ABC):
    """What every kind of request may hold.

    - `neutral`: fields whose only value says what this server does anyway: decoding is greedy.
    - `limit`: the field that limits the tokens of an answer, for messages.
    - `passed_over`: fields that change no answer here, whatever they hold: notes of the client, and how calls would be
      handed to it.
    - `seed`: every seed gives the same text.
    - `calls`: whether calls are taken out of the text (`apart`) or stand in it.
    - `max_calls`: the most calls of the answer. `context`: the date for the calendar, as 2023-01-30.
    """

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
    tools: list[Annotated[str, BeforeValidator(_tool_name)]] | None = Field(None, fail_fast=True)
    calls: Literal["apart", "in_text"] = "apart"
    max_calls: int | None = Field(None, ge=0)
    context: str = ""

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are asked for beside log p of each token; None where not even that is."""

    @abstractmethod
    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the texts that are asked for, or their tokens. Raises Refused, NothingWritten."""

    @abstractmethod
    def answer(self, model: str) -> "Answer":
        """Return what the texts are answered with."""

    @property
    def one_sentence(self) -> bool:
        """Whether a text ends with its first sentence or line."""
        return False

    def withheld(self, decoder: SharedDecoder) -> frozenset[str]:
        """Return the tools that may not be called: with `tools`, all that it does not name. Raises Refused."""
        named = set(self.tools or ())
        if unknown := sorted(named - set(decoder.tools)):
            known = ", ".join(decoder.tools)
            raise Refused(f"tools: this server has no {unknown[0]!r}; a request can only choose among {known}", "tools")
        return frozenset() if self.tools is None else frozenset(decoder.tools) - named


class CompletionRequest(Asked):
    """A request to /v1/completions."""

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

    def answer(self, model: str) -> "Answer":
        """Return the answer to a completion."""
        return CompletionAnswer(self, model)


class Message(BaseModel):
    """A message of a chat, as templates take it; clients add a name, and what an answer holds besides."""

    role: str
    content: Annotated[str, BeforeValidator(_joined)] = ""

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in ROLES:
            message = "{role} is not supported; tools run inside the answer, and roles are {roles}"
            raise PydanticCustomError("not_supported", message, {"role": repr(role[:40]), "roles": ", ".join(ROLES)})
        return role


class ChatRequest(Asked):
    """A request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tool_choice: Annotated[str, BeforeValidator(_choice)] | None = None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        """Return the tokens of the chat, in which the template's special tokens are such."""
        return [chat_tokens(decoder, self.messages, "messages")]

    def answer(self, model: str) -> "Answer":
        """Return the answer to a chat."""
        return ChatAnswer(self, model)

    def withheld(self, decoder: SharedDecoder) -> frozenset[str]:
        """Return the tools that may not be called: with `tool_choice` none, all."""
        return frozenset(decoder.tools) if self.tool_choice == "none" else super().withheld(decoder)


def chat_tokens(decoder: SharedDecoder, messages: Sequence[Message], param: str) -> list[int]:
    """Return the tokens of a chat by the model's own template. Raises Refused, which names the field `param`."""
    decoder.require_length(sum(len(message.content) for message in messages))
    if not decoder.tokenizer.chat_template:
        raise Refused("this model's tokenizer has no chat template; ask /v1/completions", param, status=404)
    try:
        said = [message.model_dump() for message in messages]
        return list(decoder.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # of the model's own template
        raise Refused(f"{param}: the model's chat template does not take them: {error}", param) from error


def parsed(kind: type[Asked], body: bytes) -> Asked:
    """Parse a request. Raises Refused, which names the field."""
    try:
        fields = _loaded(body)
        return kind.model_validate(_without_neutral(kind, fields) if isinstance(fields, dict) else fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        message = f"{where} is not supported; leave it out" if first["type"] == "extra_forbidden" else None
        raise Refused(message or f"{where}: {first['msg']}", where.partition(".")[0], code=first["type"]) from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}") from error


def _loaded(body: bytes) -> Any:
    """Read JSON; half a surrogate pair, which clients cut a text to, is U+FFFD."""
    try:
        return orjson.loads(body)
    except ValueError:
        if SURROGATE not in body.lower():
            raise
        return read_json(body.decode())


def _without_neutral(kind: type[Asked], fields: dict[str, Any]) -> dict[str, Any]:
    for param in kind.neutral.keys() & fields:
        given, allowed = fields[param], kind.neutral[param]
        if given is not None and (given != allowed or isinstance(given, bool) != isinstance(allowed, bool)):
            raise Refused(f"{param}: {given!r} is not supported; leave it out, or give {allowed!r}", param)
    left_out = kind.neutral.keys() | kind.passed_over
    left_out |= {"max_tokens"} if fields.get("max_completion_tokens") is not None else set()  # its newer name wins
    return {param: given for param, given in fields.items() if param not in left_out and given is not None}


def text_requests(asked: Asked, model: str, decoder: SharedDecoder) -> list[TextRequest]:
    """Return the texts that are asked for. Raises Refused."""
    require_model(asked.model, model)
    if asked.likeliest is not None and asked.calls == "in_text":
        raise Refused("logprobs are those of the text without calls; leave `calls` out", "logprobs")
    stop = tuple(asked.stop or ())
    if "" in stop:
        raise Refused("stop: a stop word has at least one character", "stop")
    decoding, serving = decoder.settings.decoding, decoder.settings.serving
    one_sentence = asked.one_sentence
    usual = decoding.max_new_tokens if one_sentence else serving.max_tokens
    tokens = _limited(asked.limit, asked.max_tokens, usual, serving.max_tokens)
    calls = _limited("max_calls", asked.max_calls, decoding.calls, serving.calls)
    withheld, likeliest = asked.withheld(decoder), asked.likeliest
    return [
        TextRequest(prompt, tokens, calls, asked.context, one_sentence, withheld, stop, likeliest)
        for prompt in asked.prompts(decoder)
    ]


def require_model(asked: str, model: str) -> None:
    """Raise Refused where another model is asked for than this server has."""
    if asked != model:
        message = f"there is no model {asked!r}; this server has {model!r}"
        raise Refused(message, "model", status=404, code="model_not_found")


def _limited(param: str, given: int | None, usual: int, most: int) -> int:
    if given is not None and given > most:
        raise Refused(f"{param}: {given} is above the {most} that this server allows; ask for less", param)
    return min(usual, most) if given is None else given


@dataclass(frozen=True, slots=True)
class NewText:
    """A text, or what is new in it: its number, and what it ended for, None before its end.

    `tokens`: each with the character at which it begins.
    """

    index: int
    text: str
    tokens: Sequence[tuple[int, TokenLikelihood]]
    calls: Sequence[MadeCall]
    finish_reason: str | None


@dataclass(eq=False)
class Answer(ABC):
    """What a request gets, whole or as server-sent events."""

    asked: Asked
    model: str
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def in_text(self) -> bool:
        """Whether calls stand in the text."""
        return self.asked.calls == "in_text"

    @abstractmethod
    def whole(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the answer once all texts are written."""

    @abstractmethod
    def chunk(self, new: NewText) -> dict[str, Any]:
        """Return what is sent of a text while it is written."""

    def begin(self) -> bytes:
        """Return what a stream begins with."""
        return b""

    def event(self, chunk: Mapping[str, Any]) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    @abstractmethod
    def end(self, writings: Sequence[Writing]) -> bytes:
        """Return what a stream ends with."""


class ChoiceAnswer(Answer):
    """An answer with a choice per text."""

    def whole(self, writings: Sequence[Writing]) -> dict[str, Any]:
        """Return the choices and the usage."""
        choices = []
        for index, writing in enumerate(writings):
            written = writing.done.result()
            text = written.text if self.in_text else written.plain
            tokens = _within(written.likelihoods, len(written.plain))
            choices.append(self.choice(NewText(index, text, tokens, writing.calls, finish(writing)), "message"))
        return self.body(choices) | {"usage": usage(writings)}

    def chunk(self, new: NewText) -> dict[str, Any]:
        """Return the choice with what is new in it."""
        return self.body([self.choice(new, "delta")], ".chunk")

    def end(self, writings: Sequence[Writing]) -> bytes:
        """Return the usage, where it is asked for, and the mark of the end."""
        asked = (self.asked.stream_options or {}).get("include_usage")
        last = self.event(self.body([], ".chunk") | {"usage": usage(writings)}) if asked else b""
        return last + b"data: [DONE]\n\n"

    def body(self, choices: Sequence[Mapping[str, Any]], chunk: str = "") -> dict[str, Any]:
        """Return what stands around choices; `chunk`: the end of the kind's name."""
        prefix, kind = self.kind(chunk)
        head = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    @abstractmethod
    def kind(self, chunk: str) -> tuple[str, str]:
        """Return how ids begin, and the name of the object."""

    @abstractmethod
    def written(self, text: str, part: Part) -> dict[str, Any]:
        """Return where a choice holds its text."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[tuple[int, TokenLikelihood]]) -> dict[str, Any]:
        """Return the likelihoods of tokens, each with the character at which it begins."""

    def choice(self, new: NewText, part: Part) -> dict[str, Any]:
        """Return a choice."""
        return {
            "index": new.index,
            "finish_reason": new.finish_reason,
            "logprobs": None if self.asked.likeliest is None else self.logprobs(new.tokens),
            "calls": [self._call(made) for made in new.calls],
            **self.written(new.text, part),
        }

    def _call(self, made: MadeCall) -> dict[str, Any]:
        call, offset = made.call, made.text_offset if self.in_text else made.plain_offset
        fields = {"tool": call.tool, "input": call.input, "result": call.result, "reason": call.reason}
        return {**fields, "seconds": round(made.seconds, 6), "offset": offset}


class CompletionAnswer(ChoiceAnswer):
    """The answer of /v1/completions."""

    def kind(self, chunk: str) -> tuple[str, str]:
        """Return how ids begin, and the name of the object."""
        return "cmpl", "text_completion"

    def written(self, text: str, part: Part) -> dict[str, Any]:
        """Return the text as it is."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[tuple[int, TokenLikelihood]]) -> dict[str, Any]:
        """Return lists, one item per token."""
        return {
            "tokens": [one.text for _, one in tokens],
            "token_logprobs": [one.log_probability for _, one in tokens],
            "top_logprobs": [dict(one.likeliest) for _, one in tokens],
            "text_offset": [at for at, _ in tokens],
        }


class ChatAnswer(ChoiceAnswer):
    """The answer of /v1/chat/completions."""

    def kind(self, chunk: str) -> tuple[str, str]:
        """Return how ids begin, and the name of the object."""
        return "chatcmpl", f"chat.completion{chunk}"

    def written(self, text: str, part: Part) -> dict[str, Any]:
        """Return the text as the content of a message."""
        return {part: {"role": "assistant", "content": text}}

    def logprobs(self, tokens: Sequence[tuple[int, TokenLikelihood]]) -> dict[str, Any]:
        """Return an object per token."""

        def one_of(text: str, value: float) -> dict[str, Any]:
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        content = [
            {**one_of(token.text, token.log_probability), "top_logprobs": [one_of(*other) for other in token.likeliest]}
            for _, token in tokens
        ]
        return {"content": content, "refusal": None}


@dataclass(eq=False)
class TextStream:
    """The chunks of one text. `shown`: characters of plain text so far; `tokens`, `calls`: how many were sent."""

    answer: Answer
    index: int
    writing: Writing
    shown: int = 0
    tokens: int = 0
    calls: int = 0

    def chunks(
        self, what: WrittenPiece | Generation, likelihoods: Sequence[TokenLikelihood]
    ) -> Iterator[dict[str, Any]]:
        """Yield what a piece of text adds, or the end of the text; of a call, nothing before it has its answer."""
        if isinstance(what, Generation):
            yield self._chunk("", what.likelihoods, finish_reason=finish(self.writing))
        elif what.call is not None:
            self.calls += 1
            text = call_text(what.call) if self.answer.in_text else ""
            yield self._chunk(text, (), self.writing.calls[self.calls - 1 : self.calls])
        else:
            self.shown += len(what.text)
            yield self._chunk(what.text, likelihoods)

    def _chunk(
        self,
        text: str,
        likelihoods: Sequence[TokenLikelihood],
        calls: Sequence[MadeCall] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        new = _within(likelihoods, self.shown)[self.tokens :]
        self.tokens += len(new)
        return self.answer.chunk(NewText(self.index, text, new, calls, finish_reason))


def usage(writings: Sequence[Writing]) -> dict[str, int]:
    """Count tokens; those of calls that the model wrote are among the completion's."""
    prompt = sum(writing.prompt_tokens for writing in writings)
    written = sum(writing.done.result().tokens for writing in writings)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def finish(writing: Writing) -> str:
    """Return why a text ended: `length` for a limit of tokens, else `stop`."""
    return "length" if writing.row.full else "stop"


def _within(likelihoods: Sequence[TokenLikelihood], characters: int) -> list[tuple[int, TokenLikelihood]]:
    """Return the tokens that begin within so many characters of the plain text, with the character."""
    begins = accumulate((len(one.text) for one in likelihoods), initial=0)
    return [(at, one) for at, one in zip(begins, likelihoods, strict=False) if at < characters]
