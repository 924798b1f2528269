"""Decode the texts of many clients together: texts join and leave between two tokens, and tools run beside them."""

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

from toolformer_dag.computing.plan import Lane
from toolformer_dag.decoding.generation import DOES_NOT_FIT, DecodedCall
from toolformer_dag.decoding.rules import rules_for
from toolformer_dag.decoding.written_call import WrittenCall
from toolformer_dag.decoding.written_text import TextState
from toolformer_dag.files import UserError
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.serving.decoder_figures import DecoderFigures
from toolformer_dag.serving.text_batches import TextBatch, batch_for
from toolformer_dag.serving.tool_threads import ToolThreads
from toolformer_dag.serving.writings import AnsweredCall, Busy, NothingWritten, TextRequest, Watch, Writing
from toolformer_dag.settings.sections import Settings
from toolformer_dag.tools.tool import ToolResult

OUT_OF_TIME = "out_of_time"
"""The reason of a call whose text has waited for its tools as long as it may."""
RECENT = 0.1
"""What a finished text weighs in the mean of the seconds that texts take."""
Job = Callable[[], None]
"""What other threads ask of the thread that decodes: to take a new text, to drop one, to take the answer of a call."""
_log = logging.getLogger(__name__)


class SharedDecoder:
    """Completes texts in a thread of its own; each becomes what `generate` writes for it alone.

    - A text that calls a tool leaves its batch until the call is answered, and then comes before those that wait.
    - At most `serving.waiting` texts beside a full batch are open at once.
    - A text waits for its tools for at most `serving.tool_seconds` in all; calls after that have no result.

    Other threads call the public methods; these hand jobs over to the thread that decodes, which alone changes texts.
    """

    def __init__(
        self, language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings, k: int | None = None
    ) -> None:
        """Start the thread. `lanes`: the tools that texts may call. `k`: in place of that of the settings."""
        self.settings = settings
        self.figures = DecoderFigures()
        self.tools = {lane.tool.name: lane.tool for lane in lanes}
        # Tokenizers are not safe for threads: this one is for callers, that of the model for the thread that decodes.
        self.tokenizer = copy.deepcopy(language_model.tokenizer)
        self._encoding = Encoding(self.tokenizer)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))  # in characters
        self._backend = backend_of(language_model)
        rules = rules_for(language_model, lanes, settings)
        self._rules = rules if k is None else replace(rules, k=k)
        self._tool_threads = {lane.tool.name: ToolThreads(lane.tool, lane.limits) for lane in lanes}

        self._lock = threading.Lock()
        self._closed = False
        self._open: set[Writing] = set()  # all that have begun and not ended; changed under the lock or by the thread
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # None: to end
        # Of the thread that decodes alone:
        self._waiting: deque[Writing] = deque()  # texts that are to join a batch, the next one first
        self._calling: set[Writing] = set()  # texts that wait for a tool
        self._batches: list[TextBatch] = []
        self._mean_seconds = 1.0  # that texts take, recent ones above all
        self._missed_tokens = 0.0  # that waiting texts could have had since texts joined last
        self.figures.show_texts({"open": self._open, "waiting": self._waiting, "calling": self._calling})
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    # For other threads

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
        writings = [self._prepared(request, watch) for request in requests]
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
            raise NothingWritten(DOES_NOT_FIT)

    def drop(self, writing: Writing) -> None:
        """End a text that nobody waits for, if it has not ended."""
        self._jobs.put(partial(self._fail, [writing], InterruptedError("nobody waits for this text")))

    def close(self) -> None:
        """Drop all texts and end the thread. A tool that hangs holds nothing up."""
        self._jobs.put(None)
        self._thread.join()

    def _require_room(self, requests: Sequence[TextRequest]) -> None:
        most_open = self._backend.greedy_rows + self.settings.serving.waiting
        if len(self._open) + len(requests) > most_open:
            raise Busy(math.ceil(self._mean_seconds))

    def _prepared(self, request: TextRequest, watch: Watch | None) -> Writing:
        """Return a text (`Writing`) that is ready to be decoded after the prompt of a request, a string or token ids.

        Raises NothingWritten if the prompt is too long or nothing can be written after it.
        """
        prompt = request.prompt
        self.require_length(len(prompt))
        if isinstance(prompt, str):
            prompt_tokens = self._encoding.bos + self._encoding.texts([prompt])[0].ids
        else:
            prompt_tokens = list(prompt)
        writing = Writing(request, self._rules, prompt_tokens, watch)
        if writing.text.reason is not None:
            raise NothingWritten(writing.text.reason)
        return writing

    # For the thread that decodes

    def _work(self) -> None:
        """Decode until `close`: take jobs, let texts join, and write a token of each text, in turn."""
        try:
            while self._take_jobs():
                self._let_texts_join()
                for batch in self._batches:
                    self._advance(batch)
                self._batches = [batch for batch in self._batches if batch.writings]
        finally:
            with self._lock:
                self._closed = True
            self._fail(list(self._open), InterruptedError("the server ended"))

    def _take_jobs(self) -> bool:
        """Do what other threads asked for, and end the calls whose time is up. Return False once it is time to end.

        Where no text can be decoded now, wait for a job, at most until the next call is out of time.
        """
        next_deadline = min((writing.call_deadline for writing in self._calling), default=None)
        timeout = None if next_deadline is None else max(0.0, next_deadline - time.monotonic())
        may_wait = not (self._batches or self._waiting)
        while True:
            try:
                job = self._jobs.get(block=may_wait, timeout=timeout)
            except Empty:
                break
            if job is None:
                return False
            job()
            may_wait = False
        self._end_late_calls()
        return True

    def _end_late_calls(self) -> None:
        """Go on, without a result, with texts that have waited for their tools as long as they may."""
        now = time.monotonic()
        late = [writing for writing in self._calling if writing.call_deadline <= now]
        for writing in late:
            self._take_answer(writing, writing.text.call, ToolResult(None, OUT_OF_TIME))

    def _let_texts_join(self) -> None:
        """Let the texts that wait longest join a batch, as long as memory has room for them (`batch_for`).

        Joining costs one pass of the model, however many texts join. So texts wait until they have missed as much as
        one pass computes. In each step w waiting texts beside n texts that are decoded miss the share w / (n + w) of
        it: 1 text beside 3 misses 1/4 per step, so it joins after 4 steps.
        """
        decoded = sum(len(batch.writings) for batch in self._batches)
        waiting = len(self._waiting)
        self._missed_tokens += waiting / max(1, waiting + decoded)
        if self._missed_tokens < 1:
            return
        self._missed_tokens = 0.0
        while self._waiting:
            batch = batch_for(self._waiting[0].text, self._batches, self._backend)
            if batch is None:
                return
            if batch not in self._batches:
                self._batches.append(batch)
            batch.join(self._waiting.popleft())

    def _advance(self, batch: TextBatch) -> None:
        """Write a token of each text, and take care of those that left the batch. An error ends its texts alone."""
        try:
            left_batch = batch.step(self._backend)  # texts that have ended or have written a call
            for writing in left_batch:
                if writing in self._open:  # a client may have dropped its text meanwhile
                    self._go_on(writing)
        except Exception as error:  # noqa: BLE001 - such as too little memory
            _log.exception("texts were lost")
            self._fail([*batch.writings, *batch.joining], error)
            batch.writings = []
            batch.joining = []

    def _go_on(self, writing: Writing) -> None:
        """Do what a text needs that has left its batch: let it wait for another one, run its call, or finish it."""
        state = writing.text.state
        if state is TextState.READY:
            self._waiting.appendleft(writing)
        elif state is TextState.WAITING:
            self._run_call(writing)
        elif state is TextState.ENDED:
            self._finish(writing)

    def _run_call(self, writing: Writing) -> None:
        """Run the call that a text has just written, in a tool's thread, while other texts are decoded.

        The result comes back as a job for the decoding thread. A call that cannot run is answered at once, with its
        reason or OUT_OF_TIME.
        """
        text = writing.text
        written_call = text.call  # the tokens of the call: tells later whether the text still waits for this one
        call = text.open_call()  # the same call, read: tool, input, or the reason why it cannot run
        seconds_left = writing.seconds_for_tools(self.settings.serving.tool_seconds)
        writing.call_began = time.monotonic()
        writing.call_deadline = writing.call_began + seconds_left
        self._calling.add(writing)
        if call.reason is not None or seconds_left <= 0:
            self._take_answer(writing, written_call, ToolResult(None, call.reason or OUT_OF_TIME))
            return
        self._tool_threads[call.tool].submit(
            text.tool_call(),
            is_wanted=partial(self._waits_for, writing, written_call),
            on_result=partial(self._put_answer, writing, written_call),
        )

    def _put_answer(self, writing: Writing, written_call: WrittenCall | None, result: ToolResult) -> None:
        """Hand the answer of a call over to the thread that decodes; called in the thread of the tool."""
        self._jobs.put(partial(self._take_answer, writing, written_call, result))

    def _waits_for(self, writing: Writing, call: WrittenCall | None) -> bool:
        """Return whether a text waits for this call: it was not dropped, and has not gone on without an answer."""
        return writing in self._calling and writing.text.call is call

    def _take_answer(self, writing: Writing, written_call: WrittenCall | None, result: ToolResult) -> None:
        """Give a text the result of its call and go on writing it. Do nothing if the text no longer waits for it.

        The answered call is added to `writing.calls` and to the figures before the text goes on, because `watch` (the
        client's callback) gets the call then and reads it there.
        """
        if not self._waits_for(writing, written_call):
            return
        self._calling.discard(writing)
        text = writing.text
        opened = text.open_call()
        call = text.accepted(DecodedCall(opened.tool, opened.input, result.result, result.reason))
        seconds = time.monotonic() - writing.call_began
        writing.calls.append(
            AnsweredCall(call, seconds, text_offset=len(text.text), plain_offset=len(text.plain)),
        )
        self.figures.count_call(call.tool, seconds, has_result=call.reason is None, lost=result.lost)
        text.go_on(call)
        self._go_on(writing)

    def _finish(self, writing: Writing) -> None:
        """Pass the text to those who wait for it."""
        self._open.discard(writing)
        generation = writing.text.generation()
        seconds = time.monotonic() - writing.began
        self._mean_seconds += RECENT * (seconds - self._mean_seconds)
        self.figures.count_text(writing.prompt_tokens, generation)
        writing.done.set_result(generation)

    def _fail(self, writings: Iterable[Writing], error: Exception) -> None:
        """End texts without a result; their places are free from now on."""
        for writing in self._open.intersection(writings):
            self._open.discard(writing)
            self._calling.discard(writing)
            if writing in self._waiting:
                self._waiting.remove(writing)
            writing.text.drop()
            writing.done.set_exception(error)
