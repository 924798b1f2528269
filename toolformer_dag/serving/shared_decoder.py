"""Decode the texts of many clients together: rows join and leave between two tokens, and tools run beside them."""

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from toolformer_dag.computing.plan import Lane
from toolformer_dag.decoding.generation import DecodedCall, Generation, WrittenPiece, open_call, why_nothing
from toolformer_dag.decoding.greedy import BATCH_TOKENS, advance
from toolformer_dag.decoding.rules import rules_for
from toolformer_dag.decoding.written_row import DecodingRow
from toolformer_dag.files import UserError
from toolformer_dag.model.backend import GreedyRows
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.serving.tool_threads import ToolThreads
from toolformer_dag.settings.sections import Settings
from toolformer_dag.tools.tool import ToolCall, ToolResult

OUT_OF_TIME = "out_of_time"
"""The reason of a call whose text has waited for its tools as long as it may."""
RECENT = 0.1
"""What a finished text weighs in the mean of the seconds that texts take."""
_log = logging.getLogger(__name__)


class Busy(UserError):
    """As many texts are open as may be. `seconds`: when to ask again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"too many texts wait here; ask again in {seconds} s")
        self.seconds = seconds


class NothingWritten(UserError):
    """A text that cannot be completed. `reason`: that of its Generation."""

    def __init__(self, reason: str) -> None:
        super().__init__(why_nothing(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to complete as `generate` does, under limits of its own.

    `prompt`: a text, or its tokens with BOS. `stop`, `likeliest`: as in DecodingRules.
    """

    prompt: str | Sequence[int]
    max_new_tokens: int
    calls: int
    context: str = ""
    one_sentence: bool = False
    withheld: frozenset[str] = frozenset()
    stop: tuple[str, ...] = ()
    likeliest: int | None = None


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call, the seconds that its text waited for it, and the characters of `text` and `plain` before it."""

    call: DecodedCall
    seconds: float
    text_offset: int
    plain_offset: int


@dataclass(eq=False, slots=True)
class Writing:
    """A text on its way. `done` gets what was written, or why that came to nothing; `row` is the newest row.

    `calling`: since when the text waits for a tool, by `time.monotonic`; `deadline`: until when.
    """

    request: TextRequest
    prompt_tokens: int
    row: DecodingRow = field(init=False)
    done: Future[Generation] = field(default_factory=Future)
    calls: list[MadeCall] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    calling: float = 0.0
    deadline: float = 0.0


Watch = Callable[[Writing, WrittenPiece], None]


class Figures:
    """What one server counts, for Prometheus."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("toolformer_requests", "Requests, by status.", ["path", "status"], registry=own)
        self.texts = Gauge("toolformer_texts", "Texts now: open; waiting, calling among them.", ["state"], registry=own)
        self.tokens = Counter("toolformer_tokens", "Tokens of finished texts.", ["kind"], registry=own)
        self.calls = Histogram("toolformer_call_seconds", "Seconds that texts waited.", ["tool", "got"], registry=own)


@dataclass(eq=False, slots=True)
class _Batch:
    """Texts that run together, and those that join. `most`, `longest`: how many and how long they were, for memory."""

    running: GreedyRows | None = None
    writings: list[Writing] = field(default_factory=list)
    joining: list[Writing] = field(default_factory=list)
    most: int = 0
    longest: int = 0

    def with_row(self, row: DecodingRow) -> tuple[int, int]:
        """Return `most` and `longest` with a further row."""
        return max(self.most, len(self.writings) + len(self.joining) + 1), max(self.longest, row.longest)


class SharedDecoder:
    """Completes texts in a thread of its own; each becomes what `generate` writes for it alone.

    - A text that calls a tool leaves its batch until the call is answered, and then comes before those that wait.
    - At most `serving.waiting` texts beside a full batch are open at once.
    - A text waits for its tools for at most `serving.tool_seconds` in all; calls after that have no result.
    """

    def __init__(
        self, language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings, k: int | None = None
    ) -> None:
        self.settings, self.figures = settings, Figures()
        self.tools = {lane.tool.name: lane.tool for lane in lanes}
        self.tokenizer = copy.deepcopy(language_model.tokenizer)  # the other one is used in the thread
        self._encoding, self._lock, self._closed = Encoding(self.tokenizer), threading.Lock(), False
        rules, self._backend = rules_for(language_model, lanes, settings), backend_of(language_model)
        self._rules = rules if k is None else replace(rules, k=k)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        self._threads = {lane.tool.name: ToolThreads(lane.tool, lane.limits) for lane in lanes}
        self._seconds, self._missed = 1.0, 0.0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._open: set[Writing] = set()
        self._waiting: deque[Writing] = deque()
        self._calling: set[Writing] = set()
        self._batches: list[_Batch] = []
        for state, texts in (("open", self._open), ("waiting", self._waiting), ("calling", self._calling)):
            self.figures.texts.labels(state).set_function(texts.__len__)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return whether texts are decoded."""
        return self._thread.is_alive()

    def begin(self, requests: Sequence[TextRequest], watch: Watch | None = None) -> list[Writing]:
        """Begin texts. Raises Busy where not all of them may wait, NothingWritten, and UserError after the end.

        `watch` gets each piece as it is decoded, in the thread that decodes. One caller at a time, in a thread: texts
        are tokenized here, once it is known that there is room for them.
        """
        self._require_room(requests)
        writings = [self._begun(request, watch) for request in requests]
        with self._lock:
            if self._closed:
                raise UserError("nothing is decoded any more; see the log, and start anew")
            self._require_room(requests)
            self._open.update(writings)
        for writing in writings:
            writing.done.set_running_or_notify_cancel()  # from now on `drop` alone cancels it
            self._jobs.put(partial(self._waiting.append, writing))
        return writings

    def require_length(self, characters: int) -> None:
        """Raise NothingWritten for a prompt of more characters than tokens of the model's context can hold."""
        if characters > self._backend.context_length * self._longest_token:
            raise NothingWritten("does_not_fit")

    def _require_room(self, requests: Sequence[TextRequest]) -> None:
        if len(self._open) + len(requests) > self._backend.greedy_rows + self.settings.serving.waiting:
            raise Busy(math.ceil(self._seconds))

    def drop(self, writing: Writing) -> None:
        """End a text that nobody waits for, if it has not ended."""
        self._jobs.put(partial(self._fail, [writing], InterruptedError("nobody waits for this text")))

    def close(self) -> None:
        """Drop all texts and end the thread. A tool that hangs holds nothing up."""
        self._jobs.put(None)
        self._thread.join()

    def _begun(self, request: TextRequest, watch: Watch | None) -> Writing:
        prompt = request.prompt
        self.require_length(len(prompt))
        ids = self._encoding.bos + self._encoding.texts([prompt])[0].ids if isinstance(prompt, str) else list(prompt)
        writing = Writing(request, len(ids))
        rules = replace(
            self._rules,
            max_new_tokens=request.max_new_tokens,
            calls=request.calls,
            withheld=request.withheld,
            one_sentence=request.one_sentence,
            stop=request.stop,
            likeliest=request.likeliest,
            watch=watch and partial(watch, writing),
        )
        writing.row = DecodingRow(rules, 0, ids, rules.max_new_tokens, Generation("", "", (), 0))
        if reason := writing.row.generation().reason:
            raise NothingWritten(reason)
        return writing

    def _work(self) -> None:
        try:
            while self._take_jobs():
                self._join()
                for batch in self._batches:
                    try:
                        self._advance(batch)
                    except Exception as error:  # noqa: BLE001 - such as too little memory: it ends these texts alone
                        _log.exception("texts were lost")
                        self._fail([*batch.writings, *batch.joining], error)
                        batch.writings, batch.joining = [], []
                self._batches = [batch for batch in self._batches if batch.writings]
        finally:
            with self._lock:
                self._closed = True
            self._fail(list(self._open), InterruptedError("the server ended"))

    def _take_jobs(self) -> bool:
        """Do what was asked of this thread, wait for it where no text runs; return whether to go on."""
        until = min((writing.deadline for writing in self._calling), default=None)
        patience = until and max(0.0, until - time.monotonic())
        idle = not (self._batches or self._waiting)
        try:
            while (job := self._jobs.get(idle, patience)) is not None:
                job()
                idle = False
            return False
        except Empty:
            now = time.monotonic()
            for writing in [one for one in self._calling if one.deadline <= now]:
                self._answered(writing, writing.row, ToolResult(None, OUT_OF_TIME))
            return True

    def _join(self) -> None:
        """Let those that wait longest join a batch, as long as the keys of all batches stay within BATCH_TOKENS.

        Joining costs a pass, whoever joins. So they wait until the tokens that they miss would have cost one: of a step
        with n rows, each of w that wait misses 1 / (n + w).
        """
        decoded = sum(len(batch.writings) for batch in self._batches)
        self._missed += len(self._waiting) / max(1, len(self._waiting) + decoded)
        if self._missed < 1:
            return
        self._missed = 0.0
        while self._waiting and (batch := self._batch_for(self._waiting[0].row)) is not None:
            batch.most, batch.longest = batch.with_row(self._waiting[0].row)
            batch.joining.append(self._waiting.popleft())

    def _batch_for(self, row: DecodingRow) -> _Batch | None:
        """Return the batch that a row joins; one that may reach the end of the context runs alone (`decode_rows`)."""
        taken = sum(batch.most * batch.longest for batch in self._batches)
        for batch in self._batches:
            most, longest = batch.with_row(row)
            fits = most <= self._backend.greedy_rows and longest <= self._backend.context_length
            if fits and taken - batch.most * batch.longest + most * longest <= BATCH_TOKENS:
                return batch
        if self._batches and taken + row.longest > BATCH_TOKENS:
            return None
        self._batches.append(_Batch())
        return self._batches[-1]

    def _advance(self, batch: _Batch) -> None:
        """Write a token of each text, and go on with those that stopped."""
        prefixes = [writing.row.prefix for writing in batch.joining]
        if batch.running is None:
            batch.running = self._backend.greedy(prefixes)
        elif prefixes:
            batch.running.add(prefixes)
        batch.writings, batch.joining = batch.writings + batch.joining, []
        advance(batch.running, [writing.row for writing in batch.writings])
        stopped = [writing for writing in batch.writings if writing.row.stopped]
        batch.writings = [writing for writing in batch.writings if not writing.row.stopped]
        for writing in self._open.intersection(stopped):
            self._go_on(writing, writing.row)

    def _go_on(self, writing: Writing, row: DecodingRow) -> None:
        """Let a text wait for its next token, or for its call; finish it where it has ended."""
        writing.row = row
        if not row.stopped:
            self._waiting.appendleft(writing)
        elif (taken_back := row.taken_back()) is not None:
            self._go_on(writing, taken_back)
        elif row.in_call:
            self._call(writing, row)
        else:
            self._open.discard(writing)
            written = row.generation()
            self._seconds += RECENT * (time.monotonic() - writing.began - self._seconds)
            self.figures.tokens.labels("prompt").inc(writing.prompt_tokens)
            self.figures.tokens.labels("written").inc(written.tokens)
            writing.done.set_result(written)

    def _call(self, writing: Writing, row: DecodingRow) -> None:
        """Run the open call of a row; its answer comes as a job."""
        call, writing.calling = open_call(row.body_text()), time.monotonic()
        left = self.settings.serving.tool_seconds - sum(made.seconds for made in writing.calls)
        writing.deadline = writing.calling + left
        self._calling.add(writing)
        if call.reason is not None or left <= 0:
            self._answered(writing, row, ToolResult(None, call.reason or OUT_OF_TIME))
        else:
            self._threads[call.tool].ask(
                ToolCall(call.input, writing.request.context),
                lambda: writing.row is row and writing in self._calling,
                lambda result: self._jobs.put(partial(self._answered, writing, row, result)),
            )

    def _answered(self, writing: Writing, row: DecodingRow, result: ToolResult) -> None:
        """Go on after a call, unless its text was dropped or has gone on without an answer."""
        if writing.row is not row or writing not in self._calling:
            return
        self._calling.discard(writing)
        opened, so_far, seconds = open_call(row.body_text()), row.generation(), time.monotonic() - writing.calling
        call = row.accepted(DecodedCall(opened.tool, opened.input, result.result, result.reason))
        writing.calls.append(MadeCall(call, seconds, len(so_far.text), len(so_far.plain)))
        got = "result" if call.reason is None else "lost" if result.lost else "none"
        self.figures.calls.labels(call.tool, got).observe(seconds)
        self._go_on(writing, row.after(call))

    def _fail(self, writings: Sequence[Writing], error: Exception) -> None:
        """End texts without a result; their places are free from now on."""
        for writing in self._open.intersection(writings):
            self._open.discard(writing)
            self._calling.discard(writing)
            if writing in self._waiting:
                self._waiting.remove(writing)
            writing.row.stopped = True
            writing.done.set_exception(error)
