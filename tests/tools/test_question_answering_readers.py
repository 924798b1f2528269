"""Readers with weights, on tiny checkpoints made on the spot, and the reader behind a real HTTP server."""

import gzip
import json
import resource
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.tools.tiny_readers import write_extractive, write_seq2seq
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.built_in.question_answering import QuestionAnswering
from toolformer_dag.tools.http_reader import MAX_ANSWER_BYTES
from toolformer_dag.tools.model_readers import Seq2SeqReader, find_best_span
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.prompts import ToolError
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, format_reader_input
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDown

FACTS = [
    ("Where was Joe Biden born?", Passage("1", "Joe Biden", "", "Joe Biden was born in Scranton ."), "scranton"),
    ("Who manufactures Coca Cola?", Passage("2", "Coca Cola", "", "Coca Cola is made in Atlanta ."), "atlanta"),
    ("What is Metformin?", Passage("3", "Metformin", "", "Metformin is a drug ."), "a drug"),
]
QUESTIONS = [question for question, _, _ in FACTS]
ANSWERS = [answer for _, _, answer in FACTS]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def passages(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("passages") / "p.jsonl"
    rows = ({"id": p.id, "title": p.title, "text": p.text} for _, p, _ in FACTS)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def seq2seq(tmp_path_factory: pytest.TempPathFactory) -> str:
    pairs = [(format_reader_input(question, [passage]), answer) for question, passage, answer in FACTS]
    return str(write_seq2seq(tmp_path_factory.mktemp("t5"), pairs))


@pytest.fixture(scope="module")
def extractive(tmp_path_factory: pytest.TempPathFactory) -> str:
    examples = [
        (question, passage.text, answer.replace("s", "S", 1).replace("atl", "Atl") if found else "")
        for question, _, answer in FACTS
        for _, passage, other in FACTS
        for found in [answer == other]
    ]
    return str(write_extractive(tmp_path_factory.mktemp("bert"), examples))


def load(options: dict[str, object]) -> QuestionAnswering:
    tool = load_tool("question_answering", options)
    assert isinstance(tool, QuestionAnswering)
    return tool


def answers(tool: Tool, questions: list[str]) -> list[str | None]:
    return [result.result or result.reason for result in tool.run([ToolCall(text) for text in questions])]


def test_a_seq2seq_reader_answers_a_batch_in_order(seq2seq: str, passages: str) -> None:
    tool = load({"model": seq2seq, "passages": passages, "passages_read": 1})
    assert answers(tool, QUESTIONS) == ANSWERS
    assert answers(tool, ['"What is Metformin?"', "?", "Where was Joe Biden born?"]) == [
        "a drug",
        "no_question",
        "scranton",
    ]
    assert [answers(tool, [question])[0] for question in QUESTIONS] == ANSWERS


def test_the_answer_is_bounded(seq2seq: str, passages: str) -> None:
    options = {"model": seq2seq, "passages": passages, "passages_read": 1, "max_answer_tokens": 1}
    assert answers(load(options), QUESTIONS[2:]) == ["a"]


def test_a_finetuned_model_is_answered_by_the_reader_of_inference(seq2seq: str, extractive: str, passages: str) -> None:
    options = {"model": seq2seq, "revision": "a", "passages": passages, "passages_read": 1}
    plain = load(options)
    tool = load({**options, "inference": {"reader": "extractive", "model": extractive}})
    assert plain.at_inference() is plain
    assert tool.identity() == plain.identity()
    assert answers(tool, QUESTIONS) == ANSWERS
    at_inference = tool.at_inference()
    assert answers(at_inference, QUESTIONS) == ["Scranton", "Atlanta", "a drug"]
    assert at_inference.identity() == load({**options, "reader": "extractive", "model": extractive}).identity()
    assert tool.at_inference().at_inference().identity() == at_inference.identity()


def test_a_long_input_loses_the_end_of_the_passages_not_the_question(seq2seq: str) -> None:
    reader = Seq2SeqReader(QuestionAnsweringOptions(model=seq2seq, max_input_tokens=24))
    long = Passage("1", "Joe Biden", "", "Joe Biden was born in Scranton . " * 50)
    ids = reader.encode_texts([format_reader_input(QUESTIONS[0], [long])]).input_ids
    assert ids.shape == (1, 24)
    assert "where was joe biden born" in reader.tokenizer.decode(ids[0])


def test_an_extractive_reader_finds_the_span_over_all_passages(extractive: str, passages: str) -> None:
    tool = load({"reader": "extractive", "model": extractive, "passages": passages})
    assert answers(tool, QUESTIONS) == ["Scranton", "Atlanta", "a drug"]
    assert answers(tool, ["nothing zzz", *QUESTIONS[:1]]) == ["no_answer", "Scranton"]


FLOATS = st.floats(-5, 5, width=32)


@given(arrays(np.float32, 6, elements=FLOATS), arrays(np.float32, 6, elements=FLOATS), st.integers(1, 6), st.data())
def test_the_best_span_is_the_best_of_all_spans(
    starts: np.ndarray, ends: np.ndarray, most: int, data: st.DataObject
) -> None:
    allowed = np.array([False, *data.draw(st.lists(st.booleans(), min_size=5, max_size=5))])
    spans = [
        (float(starts[a] + ends[b] - (starts[0] + ends[0])), a, b)
        for a in range(6)
        for b in range(a, min(a + most, 6))
        if allowed[a] and allowed[b]
    ]
    best = max(spans, default=(0.0, 0, 0))
    found = find_best_span(starts, ends, allowed, most)
    assert (found is not None) == (best[0] > 0)
    if found:
        score, first, last = found
        assert score == pytest.approx(best[0], abs=1e-5) and allowed[first] and 0 <= last - first < most


def test_weights_that_do_not_fit_the_reader_stop_the_lane(tmp_path: Path, passages: str) -> None:
    tool = load({"model": str(tmp_path), "passages": passages})
    with pytest.raises(ToolDown, match=r"tools\.question_answering.*save_pretrained"):
        run_calls(tool, [ToolCall("Who?")], ToolLimits())


# ---- the reader behind an endpoint ----


@pytest.fixture
def endpoint() -> Iterator[tuple[str, dict[str, object]]]:
    """A server that answers with what the test puts under `status` and `body`, and keeps what it was asked."""
    state: dict[str, object] = {"status": 200, "body": {}, "asked": None, "key": None}

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state["path"] = self.path
            state["key"] = self.headers.get("Authorization")
            state["asked"] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = state["body"]
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(int(str(state["status"])))
            if "encoding" in state:
                self.send_header("Content-Encoding", str(state["encoding"]))
            if "drip" not in state:
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            else:  # a byte at a time, in the headers or in the body, until the client has gone
                self.send_header("Content-Length", "1000000")
                if state["drip"] == "body":
                    self.end_headers()
                else:
                    self.flush_headers()
                with suppress(ConnectionError):
                    while True:
                        self.wfile.write(b"x")
                        time.sleep(0.01)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", state
    server.shutdown()
    server.server_close()


def reply(text: object, **more: object) -> dict[str, object]:
    return {"choices": [{"message": {"content": text}}], **more}


def http_tool(url: str, passages: str, **more: object) -> QuestionAnswering:
    return load_tool(
        "question_answering", {"reader": "http", "url": url, "model": "atlas", "passages": passages, **more}
    )


def test_an_endpoint_gets_question_and_passages(
    endpoint: tuple[str, dict[str, object]], passages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, state = endpoint
    monkeypatch.setenv("A_KEY", "secret")
    state["body"] = reply(" Scranton\n", usage={"cost": 0.002})
    tool = http_tool(url, passages, api_key_variable="A_KEY", passages_read=1)
    [result] = tool.run([ToolCall('"Where was Joe Biden born?"')])
    assert (result.result, result.cost) == ("Scranton", 0.002)
    asked = state["asked"]
    assert isinstance(asked, dict)
    assert (state["path"], state["key"], asked["model"], asked["temperature"]) == (
        "/v1/chat/completions",
        "Bearer secret",
        "atlas",
        0,
    )
    assert asked["messages"][1]["content"] == format_reader_input("Where was Joe Biden born?", [FACTS[0][1]])
    assert "secret" not in str(tool.identity())


DIGITS = json.dumps(reply("Scranton", usage={"cost": 1})).replace("1}", "9" * 5000 + "}").encode()


@pytest.mark.parametrize(
    ("status", "body", "outcome", "cost"),
    [
        (200, reply("Unknown."), "no_answer", None),
        (200, reply("", usage={"cost": 1}), "no_answer", 1),
        (200, reply(None), "malformed_response", None),
        (200, {"choices": []}, "malformed_response", None),
        (200, b"<html>", "malformed_response", None),
        (400, {"error": "too long"}, "status_400", None),
        (200, reply("Scranton", error=None), "Scranton", None),
        (200, reply("Scranton", usage={"cost": "$0.0004"}), "Scranton", 0.0004),
        *[(200, reply("Scranton", usage=usage), "Scranton", None) for usage in ({"cost": {}}, {"cost": "free"}, 5, [])],
        (200, DIGITS, "Scranton", None),
    ],
)
def test_an_answer_is_read_or_has_a_reason_and_an_odd_cost_costs_no_answer(
    endpoint: tuple[str, dict[str, object]], passages: str, status: int, body: object, outcome: str, cost: float | None
) -> None:
    url, state = endpoint
    state.update(status=status, body=body)
    (result,) = run_calls(http_tool(url, passages), [ToolCall("Who?")], ToolLimits())
    assert (result.result or result.reason, result.cost) == (outcome, cost)


@pytest.mark.parametrize(
    ("status", "body", "error", "told"),
    [
        *[(status, {}, RetryableError, str(status)) for status in (429, 500, 503)],
        (200, {"error": {"code": 429, "message": "slow down"}}, RetryableError, "slow down"),
        *[(status, {}, ToolDown, "api_key_variable") for status in (307, 401, 402, 404, 405)],
    ],
)
def test_a_busy_endpoint_may_be_asked_again_and_one_that_refuses_stops_the_lane(
    endpoint: tuple[str, dict[str, object]], passages: str, status: int, body: object, error: type[Exception], told: str
) -> None:
    url, state = endpoint
    state.update(status=status, body=body)
    with pytest.raises(error, match=told):
        http_tool(url, passages).run([ToolCall("Who?")])


def test_a_lost_connection_may_be_tried_again(passages: str) -> None:
    with pytest.raises(RetryableError, match="ConnectError"):
        http_tool("http://127.0.0.1:9/v1", passages).run([ToolCall("Who?")])


@pytest.mark.parametrize("where", ["headers", "body"])
def test_an_answer_that_only_drips_is_ended_by_the_deadline(
    endpoint: tuple[str, dict[str, object]], passages: str, where: str
) -> None:
    url, state = endpoint
    state["drip"] = where
    tool = http_tool(url, passages, request_timeout_s=0.3)
    with pytest.raises(RetryableError, match=r"no whole answer within 0\.3 s"):
        tool.run([ToolCall("Who?")])


def test_a_compressed_answer_is_read_up_to_a_limit_of_what_it_holds(
    endpoint: tuple[str, dict[str, object]], passages: str
) -> None:
    url, state = endpoint
    tool = http_tool(url, passages)
    plain = json.dumps(reply("Scranton")).encode()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for encoding, body, outcome in (
        ("gzip", gzip.compress(plain), "Scranton"),
        ("deflate", zlib.compress(plain), "Scranton"),
        ("gzip", gzip.compress(bytes(500 * MAX_ANSWER_BYTES // 10)), "answer_too_long"),
        ("gzip", b"no gzip", "malformed_response"),
        ("br", b"anything", "malformed_response"),
        ("identity", reply("x" * MAX_ANSWER_BYTES), "answer_too_long"),
    ):
        state.update(encoding=encoding, body=body)
        assert answers(tool, ["Who?"]) == [outcome]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 40 * MAX_ANSWER_BYTES


def test_no_secret_of_a_url_or_a_header_is_told(
    endpoint: tuple[str, dict[str, object]],
    passages: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, state = endpoint
    monkeypatch.setenv("A_KEY", "sk-header-secret")
    full = url.replace("http://", "http://me:pass-secret@") + "/4f9a0c-path-secret?key=query-secret"
    tool = http_tool(full, passages, api_key_variable="A_KEY")
    state.update(status=503)
    told = [json.dumps(tool.identity())]
    run_calls(tool, [ToolCall("Who?")], ToolLimits(retries=0))
    state.update(status=401, body={"error": f"wrong key sk-header-secret, path {full}"})
    with pytest.raises(ToolDown) as refused:
        tool.run([ToolCall("Who?")])
    state.update(status=200, body={"error": "sk-header-secret and query-secret"})
    run_calls(tool, [ToolCall("Who?")], ToolLimits(retries=0))
    down = http_tool("http://me:pass-secret@127.0.0.1:9/v1?key=query-secret", passages)
    run_calls(down, [ToolCall("Who?")], ToolLimits(retries=0))
    told += [str(refused.value), caplog.text]
    assert "127.0.0.1" in told[0] and "wrong key ***" in told[1] and "status 503" in told[2]
    assert "-secret" not in " ".join(told)
    assert state["path"] == "/v1/4f9a0c-path-secret/chat/completions?key=query-secret"
    assert tool.identity() != http_tool(full + "2", passages, api_key_variable="A_KEY").identity()


def test_a_missing_key_and_impossible_options_are_named(passages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ToolDown, match="NO_SUCH_KEY"):
        http_tool("http://127.0.0.1:9/v1", passages, api_key_variable="NO_SUCH_KEY").run([ToolCall("Who?")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *[
            ({"reader": "http", "url": url}, "url")
            for url in ("localhost:8000/v1", "http://", "http://[::1", "http://x:99999", "http://x y", "http://x\n/v1")
        ],
        *[
            ({"reader": "http", "url": "http://x/v1", "request_timeout_s": seconds}, "request_timeout_s")
            for seconds in (0, -1, 1e300, float("inf"), float("nan"))
        ],
        ({"reader": "http"}, "needs url"),
        ({"reader": "extractive", "passages_read": 0}, "passages_read"),
        ({"inference": {"reader": "http"}}, "needs url"),
        ({"passages_read": 0, "inference": {"reader": "extractive"}}, "answers from passages only"),
        ({"inference": {"modle": "x"}}, r"inference\.modle"),
        ({"reader": "embedded", "passages": "own.jsonl"}, "reads only passages = 'embedded'; choose another reader"),
        ({"passages": "own.jsonl", "inference": {"reader": "embedded"}}, "choose another reader"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_read(options: dict[str, object], told: str) -> None:
    with pytest.raises(ToolError, match=told):
        load(options)


def test_an_endpoint_may_be_asked_without_passages(endpoint: tuple[str, dict[str, object]]) -> None:
    url, state = endpoint
    state["body"] = reply("Scranton")
    tool = http_tool(url, "nowhere.jsonl", passages_read=0)
    assert answers(tool, ["Where?"]) == ["Scranton"]
    assert "passages" not in tool.identity()
