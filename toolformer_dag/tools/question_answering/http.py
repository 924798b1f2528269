"""A reader behind an OpenAI-compatible endpoint: whatever model somebody serves."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from toolformer_dag.tools.question_answering.options import QuestionAnsweringOptions
from toolformer_dag.tools.question_answering.reader import NO_ANSWER
from toolformer_dag.tools.question_answering.seq2seq import reader_input
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import RetryableError, ToolDown, ToolResult

UNKNOWN = "unknown"
INSTRUCTION = f"Reply with the answer alone, in as few words as possible, or with `{UNKNOWN}`."
BUSY = frozenset({408, 409, 425, 429})
REFUSED = frozenset({401, 402, 403, 404, 405, *range(300, 400)})


class HttpReader:
    """One request per question; retries and limits are the runner's."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        self._client = httpx.Client(timeout=options.request_timeout_s, headers=_headers(options.api_key_variable))

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Raises RetryableError for a lost connection or a busy server, ToolDown where asking again is no use."""
        return [self._ask(reader_input(question, own)) for question, own in zip(questions, passages, strict=True)]

    def _ask(self, text: str) -> ToolResult:
        try:
            response = self._client.post(
                f"{str(self._options.url).rstrip('/')}/chat/completions", json=self._body(text)
            )
        except httpx.TransportError as error:
            raise RetryableError(f"{self._options.url}: {type(error).__name__}: {error}") from error
        if response.status_code in BUSY or response.status_code >= 500:
            raise RetryableError(f"{self._options.url}: status {response.status_code}")
        if response.status_code in REFUSED:
            raise ToolDown(
                f"{self._options.url} answered with status {response.status_code}: {response.text[:200]}; correct url, "
                "model, api_key_variable or account of [tools.question_answering]"
            )
        if response.status_code != 200:
            return ToolResult(None, f"status_{response.status_code}")
        if sent := (body := _json(response)).get("error"):  # some gateways send their errors under status 200
            raise RetryableError(f"{self._options.url}: {str(sent)[:200]}")
        return _result(body)

    def _body(self, text: str) -> Mapping[str, object]:
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}]
        return {
            "model": self._options.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self._options.max_answer_tokens,
        }


def _headers(variable: str | None) -> Mapping[str, str]:
    if variable is None:
        return {}
    if not os.environ.get(variable):
        raise ToolDown(
            f"the environment variable {variable} is empty; set it to the key, or leave api_key_variable out"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _json(response: httpx.Response) -> Mapping[str, Any]:
    """The object that was sent; empty where it is none."""
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _result(body: Mapping[str, Any]) -> ToolResult:
    """The answer, with the cost where the endpoint tells it (`usage.cost`)."""
    try:
        answer = body["choices"][0]["message"]["content"].strip()
        cost = (body.get("usage") or {}).get("cost")
    except (KeyError, IndexError, TypeError, AttributeError):
        return ToolResult(None, "malformed_response")
    if not answer or answer.lower().strip(".`") == UNKNOWN:
        return ToolResult(None, NO_ANSWER.reason, cost=cost)
    return ToolResult(answer, cost=cost)
