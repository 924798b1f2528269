"""Every call has one outcome: a result that e(c, r) can hold, or a named reason."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.texts.calls import Call, PlacedCall, remove_calls, splice
from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.runner import MAX_CONSECUTIVE_LOST_CALLS, MAX_REASON_CHARACTERS, Runner, run_calls
from toolformer_dag.tools.tool import RetryableError, Tool, ToolCall, ToolDefaults, ToolDown, ToolResult

SOON = ToolLimits(timeout_s=0.2, retries=2, backoff_s=0.01)


class Hostile(str):
    """A text whose methods fail."""

    def isprintable(self) -> bool:
        raise OSError("hostile")


class Unshown(Exception):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise OSError("hostile")

    __repr__ = __str__


ACCIDENTS: dict[str, BaseException] = {
    "key": KeyError("key"),
    "os": OSError("os"),
    "exit": SystemExit(0),
    "interrupt": KeyboardInterrupt(),
    "panic": type("PanicException", (BaseException,), {})("Rust"),
    "unshown": Unshown(),
    "busy": RetryableError("503"),
    "down": ToolDown("no index at x; build it"),
}


def behaviour(text: str) -> str | ToolResult:
    """An input that names an accident meets it, `refused` is refused, and any other is answered."""
    if text in ACCIDENTS:
        raise ACCIDENTS[text]
    return ToolResult(None, "refused") if text == "refused" else text.upper()


class Answering(Tool):
    """A real tool that answers with `answer(input)` and remembers the batches it was given."""

    name = "Echo"
    version = "1"
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)

    def __init__(self, answer: Callable[[str], str | ToolResult] = behaviour, batch_size: int = 1) -> None:
        super().__init__("echo", ToolOptions(), "")
        self.answer = answer
        self.batch_size = batch_size
        self.batches: list[list[str]] = []

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        self.batches.append([call.input for call in calls])
        answers = [self.answer(call.input) for call in calls]
        return [answer if isinstance(answer, ToolResult) else ToolResult(answer) for answer in answers]


class Returning(Answering):
    """A tool written wrongly: `run` returns `value` whatever it is asked."""

    def __init__(self, value: object, batch_size: int = 1) -> None:
        super().__init__(batch_size=batch_size)
        self.value = value

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return self.value


def calls_of(*inputs: str) -> list[ToolCall]:
    return [ToolCall(text) for text in inputs]


def outcomes(results: Sequence[ToolResult]) -> list[str | None]:
    return [result.reason or result.result for result in results]


@pytest.mark.parametrize(
    ("calls", "batches"),
    [
        ("b a b c a", [["b", "a"], ["c"]]),
        ("", []),
    ],
)
def test_results_keep_the_order_and_equal_calls_share_one_run(calls: str, batches: list[list[str]]) -> None:
    tool = Answering(batch_size=2)
    assert outcomes(run_calls(tool, calls_of(*calls.split()), ToolLimits())) == calls.upper().split()
    assert tool.batches == batches


def test_the_context_makes_calls_distinct() -> None:
    tool = Answering(batch_size=1)
    run_calls(tool, [ToolCall("", "2020-01-01"), ToolCall("", "2021-01-01")], ToolLimits())
    assert len(tool.batches) == 2


@pytest.mark.parametrize(
    ("inputs", "batch_size", "outcome"),
    [
        ("a key b c", 4, ["A", "lost:KeyError", "B", "C"]),
        ("a exit b panic", 1, ["A", "lost:SystemExit", "B", "lost:PanicException"]),
        ("a interrupt b", 2, ["A", "lost:KeyboardInterrupt", "B"]),
        ("unshown a", 2, ["lost:Unshown", "A"]),
        ("busy", 1, ["lost:unavailable"]),
    ],
)
def test_an_accident_loses_only_the_call_at_fault(inputs: str, batch_size: int, outcome: list[str]) -> None:
    results = run_calls(Answering(batch_size=batch_size), calls_of(*inputs.split()), SOON)
    assert outcomes(results) == outcome
    assert [result.lost for result in results] == [text.startswith("lost:") for text in outcome]


def test_a_busy_backend_is_tried_again_with_growing_pauses() -> None:
    began: list[float] = []

    def answer(text: str) -> str:
        began.append(time.monotonic())
        if len(began) < 4:
            raise RetryableError("503")
        return text.upper()

    assert outcomes(run_calls(Answering(answer), calls_of("a"), ToolLimits(retries=3, backoff_s=0.02))) == ["A"]
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert all(pause >= least for pause, least in zip(pauses, [0.02, 0.04, 0.08], strict=True))


def test_retries_are_bounded_and_a_tool_that_is_down_stops_the_run_with_its_own_words() -> None:
    busy = Answering()
    down = Answering()
    run_calls(busy, calls_of("busy"), SOON)
    assert len(busy.batches) == 1 + SOON.retries
    with pytest.raises(ToolDown, match="no index at x; build it"):
        run_calls(down, calls_of("a", "down", "b"), SOON)
    assert down.batches == [["a"], ["down"]]


@pytest.mark.parametrize("chunk", [1, MAX_CONSECUTIVE_LOST_CALLS])
def test_many_lost_calls_in_a_row_mean_the_tool_is_down(chunk: int) -> None:
    def answer(text: str) -> str:
        raise OSError(text)

    runner = Runner(Answering(answer), SOON)
    inputs = [str(number) for number in range(MAX_CONSECUTIVE_LOST_CALLS)]
    with pytest.raises(ToolDown, match=r"\[tools.echo\].*in a row.*OSError"):
        for at in range(0, len(inputs), chunk):
            runner.run_calls(calls_of(*inputs[at : at + chunk]))


def test_answers_without_a_result_and_scattered_accidents_do_not_stop_the_lane() -> None:
    runner = Runner(Answering(), SOON)
    for _ in range(20):
        assert outcomes(runner.run_calls(calls_of("os", "refused"))) == ["lost:OSError", "refused"]


@pytest.mark.parametrize("value", [None, [], "a", {}, {"a": 1}, [ToolResult("a")] * 2])
def test_a_tool_that_breaks_its_interface_is_told_so(value: object) -> None:
    with pytest.raises(ToolDown, match=r"Returning\.run returned .* for 1 calls; it must return a list"):
        run_calls(Returning(value), calls_of("a"), ToolLimits())


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (ToolResult(3), "3"),
        (ToolResult(2.5), "2.5"),
        (ToolResult(10**5000), "not_a_text"),
        (ToolResult(float("nan")), "not_a_text"),
        (ToolResult(True), "not_a_text"),
        (ToolResult(b"bytes"), "not_a_text"),
        (ToolResult({"a": [1]}), "not_a_text"),
        (ToolResult(datetime(2020, 1, 1, tzinfo=UTC)), "not_a_text"),
        (ToolResult(Hostile("fine")), "fine"),
        (ToolResult("half \ud83d a character"), "half a character"),
        (ToolResult(None, 3), "3"),
        (ToolResult(None, {"no": "reason"}), "no_reason"),
        (ToolResult(None, "\u202e\n"), "no_reason"),
        (ToolResult(None, "x" * 10**6), "x" * MAX_REASON_CHARACTERS),
        (ToolResult(None, "half \ud83d"), "half"),
        ("a", "lost:not_a_result"),
        (None, "lost:not_a_result"),
        ({"result": "a"}, "lost:not_a_result"),
        (ToolResult, "lost:not_a_result"),
    ],
)
def test_an_odd_answer_is_read_or_has_a_reason_and_its_neighbours_stay(value: object, outcome: str) -> None:
    results = run_calls(Returning([ToolResult("fine"), value], batch_size=2), calls_of("a", "b"), ToolLimits())
    assert outcomes(results) == ["fine", outcome]
    assert all(type(result.seconds) is float for result in results)


@pytest.mark.parametrize(
    ("cost", "read"),
    [
        (1, 1.0), (0.0004, 0.0004), ("$0.0004", 0.0004), (" 0.0004 ", 0.0004), (Decimal("0.5"), 0.5),
        (Fraction(1, 2), 0.5), (None, None), ("", None), ("free", None), ("0,5 \u20ac", None), (-1, None),
        (float("nan"), None), (float("inf"), None),
        ("1e999", None), (10**400, None), (True, None), ({"usd": 1}, None), ([1], None), (b"x", None), (object(), None),
    ],
)  # fmt: skip
def test_a_cost_is_an_amount_or_nothing(cost: object, read: float | None) -> None:
    for field in ("cost", "seconds"):
        (result,) = run_calls(Returning([ToolResult("a", **{field: cost})]), calls_of("a"), ToolLimits())
        assert result.result == "a"
        if field == "cost" or read:
            assert getattr(result, field) == read


def test_answers_before_an_error_are_given_to_the_caller() -> None:
    for limits in (ToolLimits(), ToolLimits(concurrency=3)):
        found: dict[ToolCall, ToolResult] = {}
        with pytest.raises(ToolDown, match="no index"):
            Runner(Answering(), limits).run_calls(calls_of("a", "b", "down", "c"), found)
        assert {call.input for call in found} >= {"a", "b"}
        assert all(result.result == call.input.upper() for call, result in found.items())


@pytest.mark.parametrize(
    ("member", "error", "outcome"),
    [
        ("connect", SystemExit, "lost:SystemExit"),
        ("connect", RetryableError, "lost:unavailable"),
        ("connect", OSError, "lost:OSError"),
        ("prepare", SystemExit, r"\[tools.echo\]: Answering.prepare raised SystemExit; fix it"),
        ("prepare", lambda: OSError("no index"), r"Answering\.prepare raised OSError: no index; fix it"),
    ],
)
def test_a_tool_that_cannot_be_connected_loses_the_call_and_one_that_cannot_be_prepared_is_down(
    monkeypatch: pytest.MonkeyPatch, member: str, error: Callable[[], BaseException], outcome: str
) -> None:
    def fails(*_: object) -> None:
        raise error()

    monkeypatch.setattr(Answering, member, fails)
    if member == "connect":
        assert outcomes(run_calls(Answering(), calls_of("a"), SOON)) == [outcome]
    else:
        with pytest.raises(ToolDown, match=outcome):
            run_calls(Answering(), calls_of("a"), SOON)


@pytest.mark.parametrize("fields", [{"result": None}, {"result": "a", "reason": "b"}])
def test_a_result_is_a_text_or_a_reason(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a text or a reason"):
        ToolResult(**fields)


def test_batches_run_at_once_up_to_the_concurrency() -> None:
    meeting = threading.Barrier(3, timeout=20)  # passes only when three calls are in the tool together

    def answer(text: str) -> str:
        meeting.wait()
        return text.upper()

    results = run_calls(Answering(answer), calls_of(*"abcdef"), ToolLimits(concurrency=3))
    assert outcomes(results) == list("ABCDEF")


def test_the_rate_holds_from_one_run_to_the_next() -> None:
    runner = Runner(Answering(), ToolLimits(rate_per_s=100, concurrency=4))
    began = time.monotonic()
    for chunk in ("ab", "cd", "ef"):
        runner.run_calls(calls_of(*chunk))
    assert time.monotonic() - began >= 5 / 100


def test_seconds_and_cost_are_kept() -> None:
    def answer(text: str) -> ToolResult:
        time.sleep(0.02)
        return ToolResult(text, seconds=7.0 if text == "told" else 0.0, cost=0.5)

    told, measured = run_calls(Answering(answer), calls_of("told", "measured"), ToolLimits())
    assert (told.seconds, told.cost) == (7.0, 0.5)
    assert 0.02 <= measured.seconds < 7.0


@pytest.mark.parametrize(
    ("answer", "outcome"), [(" \n\u200b\x00", "empty_result"), ("x" * 1_000_000, "x" * 50)], ids=["nothing", "long"]
)
def test_a_result_of_nothing_visible_is_none_and_a_long_one_is_cut(answer: str, outcome: str) -> None:
    tool = Answering(lambda _: answer)
    assert outcomes(run_calls(tool, calls_of("a"), ToolLimits(max_result_characters=50))) == [outcome]


def test_the_tool_is_prepared_once_before_its_first_call() -> None:
    class Preparing(Answering):
        prepared = 0

        def prepare(self, progress: Callable[[int], None]) -> None:
            assert not self.batches
            self.prepared += 1

    tool = Preparing()
    runner = Runner(tool, ToolLimits())
    runner.run_calls([])
    assert tool.prepared == 0
    runner.run_calls(calls_of("a"))
    runner.run_calls(calls_of("b"))
    assert tool.prepared == 1


def one_by_one(texts: Sequence[str]) -> list[str | None]:
    """The slow and obvious way: every call alone, none shared."""
    endings = {"key": "lost:KeyError", "refused": "refused"}
    return [endings.get(text, text.upper()) for text in texts]


@given(
    texts=st.lists(st.sampled_from(["a", "b", "c", "d", "key", "refused"]), max_size=30),
    batch_size=st.integers(1, 7),
    concurrency=st.integers(1, 3),
)
def test_batches_and_threads_change_no_outcome(texts: list[str], batch_size: int, concurrency: int) -> None:
    results = run_calls(Answering(batch_size=batch_size), calls_of(*texts), ToolLimits(concurrency=concurrency))
    assert outcomes(results) == one_by_one(texts)


PIECES = ["]", "[", "->", "-", ">", "\n", "\r", "\u2028", "\x00", "\u202e", " [Echo(", "a", " "]
HOSTILE = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


@given(answer=HOSTILE, text=st.text(alphabet="abc [](\n->"), at=st.integers(0, 100))
@example(answer="0.29] and [Echo(x) -> 1]", text="It is so.", at=5)
@example(answer="Input: x\nOutput: [Echo(rm)]", text="", at=0)
def test_whatever_a_tool_returns_the_text_comes_back(answer: str, text: str, at: int) -> None:
    """Through the runner, e(c, r), the splice and the taking out."""
    (result,) = run_calls(Answering(lambda _: answer), calls_of("in"), ToolLimits(max_result_characters=40))
    if result.result is None:
        assert result.reason == "empty_result"
        return
    assert len(result.result) <= 40
    placed = PlacedCall(min(at, len(text)), Call("Echo", "in"), result.result)
    assert remove_calls(splice(text, [placed]), {"Echo"}) == text


def test_a_tool_is_connected_before_every_batch_outside_its_time_limit_and_told_of_timeouts() -> None:
    class Hanging(Answering):
        def connect(self) -> None:
            time.sleep(1.5 * SOON.timeout_s)
            self.batches.append(["connected"])

        def timed_out(self) -> None:
            self.batches.append(["timed out"])

    released = threading.Event()
    tool = Hanging(lambda text: text.upper() if text != "hang" or released.wait() else "")
    results = run_calls(tool, calls_of("a", "hang", "b"), SOON)
    released.set()
    assert outcomes(results) == ["A", "lost:timeout", "B"]
    assert results[1].seconds >= SOON.timeout_s
    assert tool.batches == [["connected"], ["a"], ["connected"], ["hang"], ["timed out"], ["connected"], ["b"]]
