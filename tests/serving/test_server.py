"""What clients get: the texts of `generate`, calls beside or inside, streams, limits and refusals by name."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from langchain_openai import ChatOpenAI, OpenAI

from tests.command_line import cli
from tests.serving.conftest import SUM, TEMPLATE, Served
from tests.ui_server import free_port
from toolformer_dag.cli import connections
from toolformer_dag.serving.shared_decoder import OUT_OF_TIME, SharedDecoder
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult

PROMPTS = [f"Jack had {a} nails and bought {b} more. In total he has" for a in (17, 23) for b in (25, 31)]


class Hanging(Tool):
    """Answers when it is let go."""

    name = "Calculator"
    version = "1"
    defaults = ToolDefaults(0.0, 20, 10, 0.5)
    free = threading.Event()

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.free.wait()
        return [ToolResult("42") for _ in calls]


def client(address: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", **{"api_key": "none", "max_retries": 0, **options})


def wait_for(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends, "what was waited for has not come within a minute"
        time.sleep(0.01)


@contextmanager
def stopped_child(others: Sequence[psutil.Process]) -> Iterator[None]:
    """Wait until this process has started a child beside `others`; that is stopped until the block ends."""
    process = psutil.Process()
    wait_for(lambda: set(process.children()) > set(others))
    [child] = set(process.children()) - set(others)
    child.suspend()
    try:
        yield
    finally:
        child.resume()


def open_texts(decoder: SharedDecoder, state: str = "open") -> float:
    value = decoder.figures.registry.get_sample_value("toolformer_texts", {"state": state})
    assert value is not None
    return value


def test_texts_are_those_of_generate_and_calls_stand_beside_them_or_in_them(served: Served) -> None:
    first, *_ = usual = served.expected(PROMPTS, ends_after_one_sentence=True)
    long = served.expected([SUM], max_new_tokens=20, max_call_positions=2)[0]
    assert first.calls and long.calls
    with served.server() as (address, _):
        ask = client(address).completions.create
        given: dict[str, Any] = {"model": "embedded", "prompt": SUM, "max_tokens": 20, "extra_body": {"max_calls": 2}}
        several = ask(model="embedded", prompt=PROMPTS)
        assert [one.text for one in several.choices] == [one.plain_text for one in usual]
        assert several.usage.completion_tokens == sum(one.token_count for one in usual)
        apart = ask(**given, temperature=0, seed=3, logprobs=2).choices[0]
        assert (apart.text, apart.finish_reason) == (long.plain_text, "length")
        assert [(call["tool"], call["input"], call["result"]) for call in apart.calls] == [
            (call.tool, call.input, call.result) for call in long.calls
        ]
        text = apart.text
        for call in reversed(apart.calls):
            written = f" [{call['tool']}({call['input']}) -> {call['result']}]"
            text = text[: call["offset"]] + written + text[call["offset"] :]
        assert text == long.text
        assert "".join(apart.logprobs.tokens) == long.plain_text
        found = apart.logprobs
        for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert len(top) == 2 and value <= max(top.values()) and top.get(token, value) == value
        given["extra_body"] |= {"calls": "in_text"}
        assert ask(**given).choices[0].text == long.text
        pieces = list(ask(**given, stream=True, stream_options={"include_usage": True}))
        assert "".join(one.choices[0].text for one in pieces[:-1]) == long.text
        assert len(pieces) > 10 and pieces[-1].usage.completion_tokens == long.token_count
        stopped = ask(**{**given, "extra_body": {}}, stop=["stu", "zzz"], stream=True)
        assert "".join(one.choices[0].text for one in stopped) == long.plain_text.partition("stu")[0]
        for off, left in (({"tools": []}, []), ({"tools": ["Calendar"]}, ["Calendar"]), ({"max_calls": 0}, [])):
            assert [call["tool"] for call in ask(**{**given, "extra_body": off}).choices[0].calls] == left


def test_a_stream_has_the_logprobs_of_the_whole_and_reads_each_token_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are decoded texts: a token with two likeliest ones is four, whatever was written before."""
    decoded = 0
    decode = served.model.tokenizer.decode

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode(*arguments, **options)

    monkeypatch.setattr(served.model.tokenizer, "decode", counting)
    request: dict[str, Any] = {"model": "embedded", "prompt": SUM, "max_tokens": 60, "extra_body": {"max_calls": 2}}
    with served.server() as (address, _):
        ask = client(address).completions.create
        whole: Any = ask(**request, logprobs=2).choices[0]
        decoded = 0
        list(ask(**request, stream=True))
        without_logprobs = decoded
        decoded = 0
        pieces: list[Any] = [chunk.choices[0] for chunk in ask(**request, stream=True, logprobs=2)]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [item for piece in pieces for item in getattr(piece.logprobs, field)]
        assert streamed == getattr(whole.logprobs, field)
    tokens = len(whole.logprobs.tokens)
    assert tokens > 20 and whole.calls
    assert decoded - without_logprobs <= 4 * (tokens + 2)


def test_a_chat_is_answered_where_there_is_a_template_and_other_clients_understand_it(served: Served) -> None:
    expected = served.expected([SUM], max_new_tokens=20)[0]
    with served.server() as (address, decoder):
        shared: dict[str, Any] = {"model": "embedded", "base_url": f"{address}/v1", "api_key": "none", "temperature": 0}
        chat = ChatOpenAI(**shared, max_tokens=20, logprobs=True, top_logprobs=1)
        whole = chat.invoke(SUM)
        assert whole.content == expected.plain_text and whole.response_metadata["finish_reason"] == "length"
        assert "".join(one["token"] for one in whole.response_metadata["logprobs"]["content"]) == expected.plain_text
        assert "".join(str(piece.content) for piece in chat.stream(SUM)) == expected.plain_text
        assert OpenAI(**shared, max_tokens=20).invoke(SUM) == expected.plain_text
        tool: Any = {"type": "function", "function": {"name": "Calendar"}}
        ask = client(address).chat.completions.create
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": SUM}]}]
        for fewer, left in (({"tools": [tool]}, ["Calendar"]), ({"tool_choice": "none"}, [])):
            choice: Any = ask(model="embedded", messages=messages, max_completion_tokens=20, **fewer).choices[0]
            assert [call["tool"] for call in choice.calls] == left
        with pytest.raises(openai.BadRequestError) as too_long:
            ask(model="embedded", messages=[{"role": "user", "content": "word " * 3000}])
        assert (too_long.value.param, too_long.value.code) == ("messages", "does_not_fit")
        decoder.tokenizer.chat_template = None
        with pytest.raises(openai.NotFoundError, match="no chat template"):
            ask(model="embedded", messages=messages)
        decoder.tokenizer.chat_template = "{{ 'x' * 10 ** 11 }}"
        with pytest.raises(openai.NotFoundError, match=r"more than 1024 MiB .*; ask /v1/completions"):
            ask(model="embedded", messages=messages)


@pytest.mark.parametrize(
    ("param", "value", "status"),
    [
        ("model", "gpt-4", 404),
        ("temperature", 0.7, 400),
        ("n", 2, 400),
        ("echo", True, 400),
        ("top_p", 0.5, 400),
        ("prompt", [1, 2], 400),
        ("prompt", [], 400),
        ("prompt", "word " * 3000, 400),
        ("max_tokens", 100_000, 400),
        ("max_calls", 100, 400),
        ("stop", [""], 400),
        ("stop", ["a"] * 33, 400),
        ("stop", "a" * 257, 400),
        ("context", "2023-13-45", 400),
        ("context", "tomorrow", 400),
        ("tools", ["os.system"], 400),
        ("tools", [{"type": "retrieval"}], 400),
        ("tools", [{"type": "function", "function": {"name": "os.system", "parameters": {}}}], 400),
        ("calls", "both", 400),
        ("guided_json", {}, 400),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served: Served, param: str, value: Any, status: int) -> None:
    with served.server() as (address, _), pytest.raises(openai.APIStatusError) as refused:
        client(address).completions.create(model="embedded", prompt=SUM, extra_body={param: value})
    assert refused.value.status_code == status
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")


def test_clients_answers_and_tools_are_taken_as_they_send_them(served: Served) -> None:
    function = {"name": "Calculator", "description": "d", "parameters": {"type": "object", "properties": {}}}
    user: dict[str, Any] = {"role": "user", "content": SUM, "name": "ada"}
    with served.server() as (address, _):
        asked = client(address)
        ask = asked.chat.completions.create
        given = {"model": "embedded", "max_tokens": 5}
        first: Any = ask(messages=[user], **given).choices[0].message
        for answer in (first, first.model_dump(), {**first.model_dump(), "content": None, "reasoning_content": "x"}):
            again: Any = [user, answer, {"role": "user", "content": ["Why", {"type": "text", "text": "?"}]}]
            assert ask(messages=again, **given, extra_body={"audio": None, "stop": None}).choices[0].message.role
            assert list(ask(messages=again, **given, stream=True))
        tools: Any = [{"type": "function", "function": function}]
        assert ask(messages=[user], tools=tools, **given).choices[0].message.content == first.content
        chat: Any = ChatOpenAI(model="embedded", base_url=f"{address}/v1", api_key="none", temperature=0, max_tokens=5)
        bound = chat.bind_tools(tools)
        turn = bound.invoke(SUM)
        assert turn.content == first.content and bound.invoke([("user", SUM), turn, ("user", "Why?")]).content
        assert "".join(piece.content for piece in bound.stream(SUM)) == first.content
        assert asked.models.retrieve("embedded").id == "embedded"
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
            asked.models.retrieve("gpt-4")


HELLO = {"role": "user", "content": SUM}
FUNCTION = {
    "type": "function",
    "function": {"name": "Calculator", "description": "d", "parameters": {}, "strict": True},
}
SENT: dict[str, dict[str, Any]] = {
    "an agent's tools": {"tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False},
    "parts and tools as the newer interface has them": {
        "messages": [{"role": "user", "content": [{"type": "input_text", "text": SUM}]}],
        "tools": [{"type": "function", "name": "Calculator", "parameters": {}}],
    },
    "the older limit beside the newer one, and a part without text": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": None}, {"type": "text", "text": SUM}]}],
        "max_completion_tokens": 5,
    },
    "an editor's chat": {
        "messages": [HELLO, {"role": "assistant", "content": " ", "tool_calls": []}, HELLO],
        "stream": True,
        **dict.fromkeys(("top_p", "frequency_penalty", "presence_penalty", "stop", "prediction", "tools")),
    },
    "a web page's chat": {
        "messages": [HELLO, {"role": "assistant", "content": "42", "annotations": [], "audio": None}, HELLO],
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": {"name": "Ada", "id": "1", "email": "ada@example.org", "role": "admin"},
        "metadata": {"chat_id": "1"},
    },
    "notes and defaults": {
        "service_tier": "auto",
        "safety_identifier": "a",
        "prompt_cache_key": "b",
        "modalities": ["text"],
        "store": False,
        "n": 1,
        "logit_bias": {},
    },
}


@pytest.mark.parametrize("kind", SENT)
def test_what_programs_send_by_themselves_changes_no_answer(served: Served, kind: str) -> None:
    body = {"model": "embedded", "messages": [HELLO], "max_tokens": 5, **SENT[kind]}
    plain = {name: body[name] for name in ("model", "messages", "max_tokens")}
    with served.server() as (address, _):
        answer = httpx.post(f"{address}/v1/chat/completions", json=body)
        expected = httpx.post(f"{address}/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"]
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert "".join(one["delta"]["content"] for chunk in chunks for one in chunk["choices"]) == expected
    else:
        assert answer.json()["choices"][0]["message"]["content"] == expected


def test_half_a_character_is_read_as_one_that_is_unknown(served: Served) -> None:
    asked = '{"model": "embedded", "max_tokens": 3, "messages": [{"role": "user", "content": "a %s b"}]}'
    with served.server() as (address, _):
        half, whole = (
            httpx.post(f"{address}/v1/chat/completions", content=(asked % one).encode()).json()["choices"]
            for one in ("\\ud83d", "\ufffd")
        )
    assert half == whole


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("completions", {"prompt": [1, 2]}, "prompt.0: token ids are not supported; give text"),
        ("completions", {"prompt": [[1, 2]]}, "prompt.0: token ids are not supported; give text"),
        ("completions", {"prompt": SUM, "stop": 7}, "stop: Input should be a valid list"),
        ("completions", {"prompt": SUM, "tools": [7]}, "tools.0: give a tool of this server, by its name"),
        ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]},
         "messages.0.content: a part of type image_url is not supported; send text alone"),
        ("completions", {"prompt": SUM, "context": "2023-13-45"},
         "context: '2023-13-45' is no date; write year, month and day, as in 2023-01-30"),
        ("chat/completions", {"messages": [HELLO], "tool_choice": "required"},
         "tool_choice: the model decides where it calls; give 'auto' or 'none'"),
        ("chat/completions", {"messages": [HELLO], "tool_choice": FUNCTION}, "tool_choice: the model decides"),
        ("chat/completions", {"messages": [HELLO], "max_completion_tokens": 4096}, "max_tokens: 4096 is above the 512"),
        ("chat/completions", {"messages": [{"role": "user", "content": 7}]}, "messages.0.content: a part of type int"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]},
         "messages.0.role: 'tool' is not supported; tools run inside the answer, and roles are system"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field_and_the_remedy(served: Served, path: str, body: Any, told: str) -> None:
    with served.server() as (address, _):
        answer = httpx.post(f"{address}/v1/{path}", json={"model": "embedded", **body})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(told)


SUMS = [f"Bo had {a} pens and got {a % 7 + 2} more, so in total there were" for a in range(11, 75)]


async def asked_by_32(address: str) -> list[tuple[int, str]]:
    """Ask for SUMS by 32 clients that go on at once; return the texts, every third streamed."""
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as asked:
        found = []
        places = iter(range(len(SUMS)))

        async def one() -> None:
            given: dict[str, Any] = {"model": "embedded", "max_tokens": 12}
            for at in places:
                answer: Any = await asked.completions.create(prompt=SUMS[at], stream=at % 3 == 0, **given)
                chunks = [one async for one in answer] if at % 3 == 0 else [answer]
                found.append((at, "".join(chunk.choices[0].text for chunk in chunks)))

        await asyncio.gather(*(one() for _ in range(32)))
        return found


def test_many_clients_share_batches_and_get_the_texts_of_each_alone(served: Served) -> None:
    expected = served.expected(SUMS, max_new_tokens=12)
    with served.server() as (address, decoder):
        found = asyncio.run(asked_by_32(address))
        assert sorted(found) == [(at, one.plain_text) for at, one in enumerate(expected)]
        figures = httpx.get(f"{address}/metrics").text
        assert f'toolformer_tokens_total{{kind="written"}} {sum(one.token_count for one in expected)}.0' in figures
        assert 'toolformer_requests_total{path="/v1/completions",status="200"} 64.0' in figures
        assert open_texts(decoder) == 0


def test_an_unknown_path_or_method_is_refused_in_the_protocols_form(served: Served) -> None:
    with served.server() as (address, _):
        for method, path, status in (("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)):
            answer = httpx.request(method, address + path)
            told = answer.json()["error"]
            assert (answer.status_code, told["type"]) == (status, "invalid_request_error")
            assert told["message"].startswith(f"{method} {path}: ")
        assert answer.headers["allow"] == "POST"


def test_a_tool_that_hangs_holds_nobody_else_and_its_text_ends_at_its_limit(served: Served) -> None:
    tool = Hanging("calculator", ToolOptions(), "")
    tool.free = threading.Event()
    expected = served.expected([SUM], max_new_tokens=20, top_k=0)[0]
    with served.server(calculator=tool, serving={"tool_seconds": 3}) as (address, decoder):
        ask = client(address).completions.create
        slow = ask(model="embedded", prompt=SUM, stream=True)
        wait_for(lambda: open_texts(decoder, "calling") == 1)
        assert (
            ask(model="embedded", prompt=SUM, max_tokens=20, extra_body={"tools": []}).choices[0].text
            == expected.plain_text
        )
        assert open_texts(decoder, "calling") == 1
        calls = [call for chunk in slow for call in chunk.choices[0].calls]
        assert [(call["tool"], call["result"], call["reason"]) for call in calls] == [("Calculator", None, OUT_OF_TIME)]
        assert calls[0]["seconds"] >= 3
        tool.free.set()


def test_a_client_that_leaves_frees_its_place_and_too_many_are_told_when_to_come_again(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    tool = Hanging("calculator", ToolOptions(), "")
    tool.free = threading.Event()
    with served.server(calculator=tool, serving={"waiting": 0}) as (address, decoder):
        body = {"model": "embedded", "prompt": SUM, "stream": True}
        for stream in (True, False):
            with httpx.Client() as http:
                if stream:
                    with http.stream("POST", f"{address}/v1/completions", json=body):
                        wait_for(lambda: open_texts(decoder, "calling") == 1)
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        http.post(f"{address}/v1/completions", json={**body, "stream": False}, timeout=0.5)
            wait_for(lambda: open_texts(decoder) == 0)
        with pytest.raises(openai.RateLimitError) as busy:
            client(address).completions.create(model="embedded", prompt=[SUM] * 65)
        assert int(busy.value.response.headers["retry-after"]) >= 1 and open_texts(decoder) == 0
        tool.free.set()
    gc.collect()  # asyncio says then whose end nobody looked at
    assert "never retrieved" not in caplog.text


def test_nothing_is_written_for_a_client_that_has_left_before_its_turn(served: Served) -> None:
    with served.server() as (address, decoder), ThreadPoolExecutor(1) as threads:
        decoder.tokenizer.chat_template = TEMPLATE + "{# tried anew, which takes a while #}"
        chat = {"model": "embedded", "messages": [HELLO], "max_tokens": 3}
        body = json.dumps({"model": "embedded", "prompt": SUM, "stream": True}).encode()
        port = int(address.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: %d\r\n\r\n" % (port, len(body))
        other_children = psutil.Process().children()
        answer = threads.submit(httpx.post, f"{address}/v1/chat/completions", json=chat, timeout=60)
        with stopped_child(other_children):  # the process that tries the template: the chat has its turn meanwhile
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", port)) as client_that_leaves:
                    client_that_leaves.sendall(head + body)
        assert answer.result().status_code == 200
        left = 'toolformer_requests_total{path="/v1/completions",status="499"} 5.0'
        wait_for(lambda: left in httpx.get(f"{address}/metrics").text)
        assert open_texts(decoder) == 0


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        ("completions", {"prompt": "a", **{f"field {number}": 1 for number in range(60_000)}}, 400),
        ("completions", {"prompt": "a" * 1_000_000}, 400),
        ("completions", {"prompt": " " * 1_000_000}, 400),
        ("completions", {"prompt": ["a"] * 120_000}, 429),
        ("chat/completions", {"messages": [{"role": "user", "content": " " * 1_000_000}]}, 400),
        ("completions", {"prompt": [0] * 300_000}, 400),
        ("completions", {"prompt": "a", "tools": [0] * 300_000}, 400),
        ("chat/completions", {"messages": [{}] * 300_000}, 400),
    ],
)
def test_the_largest_requests_are_refused_before_they_are_tokenized(
    served: Served, path: str, asked: dict[str, Any], status: int
) -> None:
    with served.server() as (address, _), ThreadPoolExecutor(1) as threads:
        answer = threads.submit(httpx.post, f"{address}/v1/{path}", json={"model": "embedded", **asked}, timeout=10)
        while not answer.done():
            assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        assert answer.result().status_code == status


def test_no_error_repeats_a_large_request(served: Served) -> None:
    with served.server() as (address, _):
        told = httpx.post(f"{address}/v1/completions", json={"model": "x" * 500_000, "prompt": SUM})
        assert told.status_code == 404 and len(told.content) < 2000


def test_a_connection_that_does_not_ask_ends_and_one_that_is_answered_goes_on(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    with served.server() as (address, _):
        port = int(address.rpartition(":")[2])
        body = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: 9\r\n\r\n{" % port
        for begun in (b"", b"GET /health HTTP/1.1\r\nHost: 127.0", body):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as half:
                half.sendall(begun)
                with suppress(ConnectionResetError):
                    assert half.recv(1) == b""
        asked = {"model": "embedded", "prompt": SUM, "max_tokens": 100}
        assert httpx.post(f"{address}/v1/completions", json=asked, timeout=60).status_code == 200
        told = b""
        with socket.create_connection(("127.0.0.1", port), timeout=30) as flood, suppress(ConnectionError):
            flood.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % port + b"X: 1\r\n" * 100_000 + b"\r\n")
            told = flood.recv(20)
        assert told in (b"", b"HTTP/1.1 400 Bad Req")
    monkeypatch.setattr(connections, "MOST", 2)
    with served.server() as (address, _), ExitStack() as stack:
        port = int(address.rpartition(":")[2])
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(3)]
        with suppress(ConnectionResetError):
            assert held[-1].recv(1) == b""


def test_a_key_that_no_client_can_send_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n")
    monkeypatch.chdir(tmp_path)
    for key in ("schlüssel", " key", "a\nb"):
        monkeypatch.setenv("TOOLFORMER_DAG_API_KEY", key)
        done = cli("serve")
        assert done.returncode == 1 and "TOOLFORMER_DAG_API_KEY has characters" in done.stderr


def test_a_key_and_the_own_address_are_asked_for(served: Served) -> None:
    with served.server(key="secret") as (address, _):
        with pytest.raises(openai.AuthenticationError):
            client(address).models.list()
        [model] = client(address, api_key="secret").models.list().data
        assert (model.id, model.tools) == ("embedded", ["Calculator", "Calendar"])  # type: ignore[attr-defined]
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
        assert httpx.get(f"{address}/metrics").status_code == 401
        for headers in ({"origin": "http://e.org"}, {"host": "e.org"}):
            assert httpx.get(f"{address}/health", headers=headers).status_code == 403


def test_beyond_this_machine_it_wants_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOOLFORMER_DAG_API_KEY", raising=False)
    done = cli("serve", "--host", "0.0.0.0")
    assert done.returncode == 1 and "set TOOLFORMER_DAG_API_KEY" in done.stderr


@pytest.mark.long
def test_a_killed_server_leaves_nothing_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n")
    port = free_port()
    command = [sys.executable, "-m", "toolformer_dag.cli", "serve", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    for end in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as server:
            assert server.stdout is not None and f"embedded at http://127.0.0.1:{port}/v1" in server.stdout.readline()
            asked = client(f"http://127.0.0.1:{port}", max_retries=20)
            stream = asked.completions.create(model="embedded", prompt=SUM, max_tokens=300, stream=True)
            next(iter(stream))
            os.killpg(server.pid, end)
            if end is signal.SIGKILL:
                with suppress(openai.APIConnectionError):  # all of it may have come before
                    list(stream)
                with pytest.raises(openai.APIConnectionError):
                    asked.with_options(max_retries=0).models.list()
            else:
                assert list(stream)[-1].choices[0].finish_reason
                assert server.stdout.read() == "stopped\n"
            assert server.wait() == (-signal.SIGKILL if end is signal.SIGKILL else 0)
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)
    socket.create_server(("127.0.0.1", port)).close()
