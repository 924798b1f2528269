"""Readers that answer from passages: sequence-to-sequence, extractive, HTTP endpoint."""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from toolformer_dag.tools.options import (
    MAX_SECONDS,
    PretrainedName,
    PretrainedOptions,
    WebAddress,
    load_model,
    load_tokenizer,
    shown_url,
    url_secrets,
    without,
)
from toolformer_dag.tools.passage_search import RetrievalOptions
from toolformer_dag.tools.passages import EMBEDDED, Passage
from toolformer_dag.tools.tool import NO_ANSWER, NoResult, RetryableError, ToolDown, ToolResult
from toolformer_dag.tools.wording_reader import read_by_wording

if TYPE_CHECKING:
    import httpx  # a quarter of a second of CPU, which only an endpoint is worth

ReaderName = Literal["seq2seq", "extractive", "http", "embedded"]


class InferenceReader(BaseModel):
    """The reader that answers a finetuned model; what is left out is as while C* is made, but for the revision."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reader: ReaderName | None = None
    model: PretrainedName | None = None
    revision: str | None = None


class QuestionAnsweringOptions(RetrievalOptions, PretrainedOptions):
    """Options of question answering.

    - reader: `seq2seq` (Flan-T5 and similar), `extractive` (a model of AutoModelForQuestionAnswering), `http` (an
      OpenAI-compatible endpoint) or `embedded` (rules, no weights).
    - inference: the reader, model and revision that answer a finetuned model, in evaluation and `generate`, where they
      differ from those that answer while C* is made. C* does not depend on them.
    - passages_read: how many passages the reader gets; 0 only for `seq2seq` and `http`, which then use no passages.
    - max_input_tokens: the limit of an input, for `extractive` of a passage.
    - max_answer_tokens: the limit of an answer.
    - For `http` only: url, including `/v1`; api_key_variable, the environment variable with the key;
      request_timeout_s, the deadline of a whole answer. A URL with a user, a query or a key in its path is recorded by
      its hash.
    """

    reader: ReaderName = "seq2seq"
    inference: InferenceReader | None = None
    model: PretrainedName = "google/flan-t5-base"
    passages_read: int = Field(5, ge=0)
    max_input_tokens: int = Field(512, ge=16)
    max_answer_tokens: int = Field(32, ge=1)
    url: WebAddress | None = None
    api_key_variable: str | None = None
    request_timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for reader in {self.reader, self.at_inference().reader}:
            if reader == "http" and not self.url:
                raise ValueError("reader = 'http' needs url, such as 'http://localhost:8000/v1'")
            if self.passages_read == 0 and reader not in ("seq2seq", "http"):
                raise ValueError(f"reader = {reader!r} answers from passages only: set passages_read to 1 or more")
            if reader == "embedded" and self.passages != EMBEDDED:
                raise ValueError("reader = 'embedded' reads only passages = 'embedded'; choose another reader")
        return self

    def at_inference(self) -> Self:
        """Return the options with which the tool answers a finetuned model."""
        if self.inference is None:
            return self
        chosen = self.inference.model_dump(exclude_none=True)
        revision = {} if self.inference.model is None else {"revision": self.inference.revision}
        return self.model_copy(update={"inference": None, **chosen, **revision})


Reader = Callable[[Sequence[str], Sequence[Sequence[Passage]]], list[ToolResult]]
"""Answers each question from its passages, best passage first."""


def reader_input(question: str, passages: Sequence[Passage]) -> str:
    """Format question and passages; the question comes first, so that truncation cuts the last passages."""
    if not passages:
        return f"Answer the question in a few words.\nQuestion: {question}"
    listed = "\n".join(f"{passage.title}: {passage.text}" for passage in passages)
    return f"Answer the question in a few words, from the passages.\nQuestion: {question}\nPassages:\n{listed}"


class Seq2SeqReader:
    """A sequence-to-sequence model, decoded greedily; an empty output has the reason `no_answer`."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer("AutoTokenizer", options)
        self.model = load_model("AutoModelForSeq2SeqLM", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        import torch

        batch = self.encode([reader_input(question, own) for question, own in zip(questions, passages, strict=True)])
        with torch.inference_mode():
            tokens = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.options.max_answer_tokens,
                do_sample=False,
                num_beams=1,
            )
        answers = map(str.strip, self.tokenizer.batch_decode(tokens, skip_special_tokens=True))
        return [ToolResult(answer) if answer else NO_ANSWER for answer in answers]

    def encode(self, texts: Sequence[str]) -> Any:
        """Tokenize texts to padded ids and mask on the model's device, truncated to `max_input_tokens`."""
        batch = self.tokenizer(
            list(texts), truncation=True, max_length=self.options.max_input_tokens, padding=True, return_tensors="pt"
        )
        return batch.to(self.model.device)


Scores = NDArray[np.float32]
Span = tuple[float, int, int]
"""A score, and where a span begins and ends."""


def best_span(
    starts: NDArray[np.float32], ends: NDArray[np.float32], allowed: NDArray[np.bool_], max_tokens: int
) -> Span | None:
    """Return the best span of allowed tokens, first to last inclusive; None unless it scores above no answer.

    The score is the sum of its logits minus that of the first token, which stands for no answer.
    """
    sums = starts[:, None] + ends[None, :]
    places = np.arange(len(starts))
    length = places[None, :] - places[:, None]
    fits = allowed[:, None] & allowed[None, :] & (length >= 0) & (length < max_tokens)
    scores = np.where(fits, sums, -np.inf)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    score = float(scores[first, last] - sums[0, 0])
    return (score, int(first), int(last)) if score > 0 else None


class ExtractiveReader:
    """An extractive model on all pairs of question and passage in a batch; long passages are truncated."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer("AutoTokenizer", options)
        self._model = load_model("AutoModelForQuestionAnswering", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        pairs = [(n, passage.text) for n, own in enumerate(passages) for passage in own]
        best: dict[int, tuple[float, str]] = {}
        for (n, text), span in zip(pairs, self._spans([(questions[n], text) for n, text in pairs]), strict=True):
            if span and span[0] > best.get(n, (0.0, ""))[0]:
                best[n] = span[0], text[span[1] : span[2]]
        return [ToolResult(best[n][1]) if n in best else NO_ANSWER for n in range(len(questions))]

    def _spans(self, pairs: Sequence[tuple[str, str]]) -> list[Span | None]:
        """Return the score and the characters of the best span of each pair of question and text."""
        import torch

        if not pairs:
            return []
        batch = self._tokenizer(
            [question for question, _ in pairs],
            [text for _, text in pairs],
            truncation="only_second",
            max_length=self._options.max_input_tokens,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets = batch.pop("offset_mapping").tolist()
        in_text = np.array([[part == 1 for part in batch.sequence_ids(row)] for row in range(len(pairs))])
        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device))
        starts, ends = (scores.float().cpu().numpy() for scores in (logits.start_logits, logits.end_logits))
        most = self._options.max_answer_tokens
        spans = [best_span(*row, most) for row in zip(starts, ends, in_text, strict=True)]
        return [span and (span[0], at[span[1]][0], at[span[2]][1]) for span, at in zip(spans, offsets, strict=True)]


MAX_ANSWER_BYTES = 4 << 20
"""The longest answer, after decompression."""


class Endpoint:
    """A URL that is asked with JSON, a POST request per answer, which is bounded in bytes and in time.

    Safe for several threads, whose requests share connections.

    Requests run in an event loop of their own, so that one deadline ends all of a request: connecting, sending, headers
    and body. A limit per read, as blocking clients have, lets an answer of a byte a second go on for ever.
    """

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        import httpx

        self.shown = shown_url(url)
        self._url, self._seconds = url, seconds
        self._secrets = [*url_secrets(url), *(value.split()[-1] for value in headers.values())]
        self._client = httpx.AsyncClient(timeout=seconds, headers={"Accept-Encoding": "gzip, deflate", **headers})
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def post(self, body: object) -> tuple[int, bytes]:
        """Send `body` as JSON; return the status and the decompressed body.

        Raises RetryableError for a lost connection or a passed deadline, NoResult("answer_too_long") over
        MAX_ANSWER_BYTES, and NoResult("malformed_response") for compressed data that is damaged.
        """
        import httpx

        try:
            return asyncio.run_coroutine_threadsafe(self._answer(body), self._loop).result()
        except TimeoutError as error:
            raise RetryableError(f"{self.shown}: no whole answer within {self._seconds:g} s") from error
        except httpx.TransportError as error:
            raise RetryableError(f"{self.shown}: {type(error).__name__}: {self.public(str(error))}") from error

    def public(self, text: str) -> str:
        """Return a message of the backend without the secrets of the URL and the headers."""
        return without(self._secrets, text)

    async def _answer(self, body: object) -> tuple[int, bytes]:
        async with asyncio.timeout(self._seconds), self._client.stream("POST", self._url, json=body) as response:
            return response.status_code, await _content(response)


async def _content(response: "httpx.Response") -> bytes:
    """Read and decompress a body block by block: a megabyte of gzip can hold a gigabyte."""
    import httpx

    content = bytearray()
    try:
        async for block in response.aiter_bytes():
            if len(content) + len(block) > MAX_ANSWER_BYTES:
                raise NoResult("answer_too_long")
            content += block
    except httpx.DecodingError as error:
        raise NoResult("malformed_response") from error
    return bytes(content)


UNKNOWN = "unknown"
INSTRUCTION = f"Reply with the answer alone, in as few words as possible, or with `{UNKNOWN}`."
BUSY = frozenset({408, 409, 425, 429})
REFUSED = frozenset({401, 402, 403, 404, 405, *range(300, 400)})


class HttpReader:
    """An OpenAI-compatible endpoint, with a request per question; the runner handles retries and limits."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        parts = urlsplit(str(options.url))
        url = parts._replace(path=f"{parts.path.rstrip('/')}/chat/completions").geturl()
        self._endpoint = Endpoint(url, _headers(options.api_key_variable), options.request_timeout_s)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Answer each question. Raises RetryableError for a lost connection or busy server, ToolDown else."""
        return [self._ask(reader_input(question, own)) for question, own in zip(questions, passages, strict=True)]

    def _ask(self, text: str) -> ToolResult:
        shown = self._endpoint.shown
        try:
            status, content = self._endpoint.post(
                {
                    "model": self._options.model,
                    "messages": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}],
                    "temperature": 0,
                    "max_tokens": self._options.max_answer_tokens,
                }
            )
        except NoResult as error:
            return ToolResult(None, error.reason)
        if status in BUSY or status >= 500:
            raise RetryableError(f"{shown}: status {status}")
        if status in REFUSED:
            excerpt = self._endpoint.public(content[:200].decode("utf-8", "replace"))
            raise ToolDown(
                f"{shown} answered with status {status}: {excerpt}; correct url, "
                "model or api_key_variable of [tools.question_answering], or check the account"
            )
        if status != 200:
            return ToolResult(None, f"status_{status}")
        body = _json(content)
        if sent := body.get("error"):  # some gateways send errors with status 200
            raise RetryableError(f"{shown}: {self._endpoint.public(str(sent)[:200])}")
        return _result(body)


def _headers(variable: str | None) -> Mapping[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):
        reason = "holds characters that no header can" if key else "is empty"
        raise ToolDown(f"the environment variable {variable} {reason}; set it to the key, or remove api_key_variable")
    return {"Authorization": f"Bearer {key}"}


def _json(content: bytes) -> Mapping[str, Any]:
    """Return the answer's JSON object; empty where it holds none."""
    try:
        body = json.loads(content, parse_int=float)  # an integer of thousands of digits is an error of its own
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _result(body: Mapping[str, Any]) -> ToolResult:
    """Return the answer, with the cost where the endpoint reports it (`usage.cost`), in whatever form."""
    usage = body.get("usage")
    cost = usage.get("cost") if isinstance(usage, dict) else None
    try:
        answer = body["choices"][0]["message"]["content"].strip()
    except (LookupError, TypeError, AttributeError):
        return ToolResult(None, "malformed_response", cost=cost)
    if not answer or answer.lower().strip(".`") == UNKNOWN:
        return ToolResult(None, NO_ANSWER.reason, cost=cost)
    return ToolResult(answer, cost=cost)


def load_reader(options: QuestionAnsweringOptions) -> Reader:
    """Load the reader and its weights. Raises ModelError."""
    if options.reader == "embedded":
        return read_by_wording
    if options.reader == "http":
        return HttpReader(options).read
    return Seq2SeqReader(options).read if options.reader == "seq2seq" else ExtractiveReader(options).read
