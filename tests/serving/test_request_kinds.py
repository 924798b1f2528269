"""A further kind of request is a subclass of `ApiRequest` with its name in KINDS: here, a part of /v1/responses."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import orjson
import pytest
from pydantic import AliasChoices, Field, PrivateAttr

from tests.serving.conftest import SUM, Served
from toolformer_dag.serving import server, text_batches
from toolformer_dag.serving.api_answer import NewText, build_usage_object, build_whole_text
from toolformer_dag.serving.api_request import ApiRequest
from toolformer_dag.serving.shared_decoder import SharedDecoder
from toolformer_dag.serving.writings import Writing


class ResponsesRequest(ApiRequest):
    """A request with typed, numbered events, of which an answered call has several."""

    path: ClassVar[str] = "/v1/responses"
    limit_field: ClassVar[str] = "max_output_tokens"
    prompt_field: ClassVar[str] = "input"
    neutral_values: ClassVar[Mapping[str, object]] = {**ApiRequest.neutral_values, "text": {"format": {"type": "text"}}}

    input: str
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_output_tokens"))

    _number: int = PrivateAttr(0)

    @property
    def likeliest_count(self) -> int | None:
        return None

    def build_prompts(self, decoder: SharedDecoder) -> Sequence[str | list[int]]:
        return [self.input]

    def build_answer(self, writings: Sequence[Writing]) -> dict[str, Any]:
        [writing] = writings
        text = build_whole_text(0, writing, has_calls_in_text=self.has_calls_in_text)
        return {"object": "response", "output_text": text.text, "usage": build_usage_object(writings)}

    def format_stream_beginning(self) -> bytes:
        return self._typed("response.created")

    def format_stream_chunk(self, new_text: NewText) -> bytes:
        events = b""
        for call in new_text.answered_calls:
            events += self._typed("response.output_item.added", name=call.decoded_call.tool)
            events += self._typed("response.output_item.done", result=call.decoded_call.result)
        return events + self._typed("response.output_text.delta", delta=new_text.text) if new_text.text else events

    def format_stream_error(self, error_object: Mapping[str, Any]) -> bytes:
        return self._typed("error", **error_object["error"])

    def format_stream_end(self, writings: Sequence[Writing]) -> bytes:
        return self._typed("response.completed", usage=build_usage_object(writings))

    def _typed(self, kind: str, **fields: Any) -> bytes:
        event = {**fields, "type": kind, "sequence_number": self._number}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


@pytest.fixture
def address(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(server, "KINDS", (*server.KINDS, ResponsesRequest))
    with served.server() as (address, _):
        yield address


def events_of(address: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "embedded", "input": SUM, "stream": True, **fields}
    answer = httpx.post(f"{address}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def test_a_call_may_be_several_events_of_a_stream_which_the_request_numbers(served: Served, address: str) -> None:
    [expected] = served.expected([SUM], max_new_tokens=20)
    events = events_of(address, max_output_tokens=20)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(expected.calls)
    assert "".join(event.get("delta", "") for event in events) == expected.plain_text


def test_an_error_of_a_stream_has_the_form_of_its_request(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(text_batches, "write_next_tokens", fail)
    *_, last = events_of(address)
    assert (last["type"], last["message"]) == ("error", "RuntimeError: lost")


def test_the_refusal_of_an_unknown_path_names_all_paths(address: str) -> None:
    message = httpx.post(f"{address}/v1/complete", json={}).json()["error"]["message"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        assert path in message


def test_each_kind_of_request_stands_in_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "complete-texts.md"
    assert [kind.path for kind in server.KINDS if f"`{kind.path}`" not in page.read_text()] == []
