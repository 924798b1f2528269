"""Decode the texts of many clients together: texts join and leave between two tokens, and tools run in parallel."""

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
from typing import Any

from toolformer_dag.computing.plan import Lane
from toolformer_dag.decoding.generation import DOES_NOT_FIT, DecodedCall
from toolformer_dag.decoding.rules import DecodingRules, rules_for
from toolformer_dag.decoding.written_call import WrittenCall
from toolformer_dag.decoding.written_text import TextState
from toolformer_dag.files import UserError
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.serving.decoder_figures import DecoderFigures
from toolformer_dag.serving.text_batches import TextBatch, choose_batch
from toolformer_dag.serving.tool_threads import ToolThreads
from toolformer_dag.serving.writings import AnsweredCall, Busy, NothingWritten, TextRequest, Watch, Writing
from toolformer_dag.settings.sections import Settings
from toolformer_dag.tools.tool import ToolResult

OUT_OF_TIME = "out_of_time"
"""The reason of a call whose text has waited for its tools as long as it may."""
RECENT = 0.1
"""The weight of the text that finished last in the moving mean of the seconds per text."""
Job = Callable[[], None]
"""Work that other threads hand to the decoding thread: take a new text, drop one, or take the answer of a call."""
_log = logging.getLogger(__name__)


class _JoinTimer:
    """Decides when waiting texts join a batch.

    Joining costs about one run of the model, however many texts join. So the texts wait until the tokens that they
    miss by waiting add up to one run. In a step that decodes 3 texts while 1 waits, it misses 1/4 of the possible
    tokens: the text joins after four of these steps. If nothing is decoded, it joins at once.
    """

    def __init__(self) -> None:
        self._missed_runs = 0.0  # since texts joined last

    def is_due(self, *, waiting: int, decoded: int) -> bool:
        """Count a step that decodes `decoded` texts while `waiting` texts wait; return whether they join now."""
        self._missed_runs += waiting / max(1, waiting + decoded)
        if self._missed_runs < 1:
            return False
        self._missed_runs = 0.0
        return True


def _rules(language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings, k: int | None) -> DecodingRules:
    """Return the rules of decoding of the settings, with another k if one is given."""
    rules = rules_for(language_model, lanes, settings)
    return rules if k is None else replace(rules, k=k)


class _PromptTokenizer:
    """Tokenizes prompts; for one thread at a time. `longest_token`: in characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._encoding = Encoding(tokenizer)
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    def tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt with BOS; a prompt of token ids has it already."""
        if not isinstance(prompt, str):
            return list(prompt)
        [text] = self._encoding.texts([prompt])
        return [*self._encoding.bos, *text.ids]


class SharedDecoder:
    """Completes the texts of many clients in one thread, each as `generate` would write it alone.

    - A text that calls a tool leaves its batch until the call is answered. Then it is the next to join a batch.
    - Only so many texts are open at once as a full batch holds, and `serving.waiting` more.
    - A text waits for its tools for at most `serving.tool_seconds` in total; calls after that have no result.

    Other threads call the public methods. These hand jobs to the decoding thread, which alone changes texts. A text
    with its request is a `Writing`: it is open until it has ended, and in the meantime either is in a batch, waits to
    join one, or waits for a tool ("calling").

    - `settings`, `tools` (by name): what requests are checked against.
    - `figures`: the counts for Prometheus.
    - `tokenizer`: a copy for the threads of callers.
    """

    def __init__(
        self, language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings, k: int | None = None
    ) -> None:
        """Start the decoding thread.

        Args:
            lanes: The tools that texts may call, with their thresholds and limits.
            k: Replaces `k` of the settings: a call may begin if ` [` is among the k likeliest tokens.
        """
        self.settings = settings
        self.figures = DecoderFigures()
        self.tools = {lane.tool.name: lane.tool for lane in lanes}

        # Tokenizers are not safe for threads: callers use this copy, the decoding thread the model's own.
        self.tokenizer = copy.deepcopy(language_model.tokenizer)
        self._prompts = _PromptTokenizer(self.tokenizer)
        self._backend = backend_of(language_model)
        self._rules = _rules(language_model, lanes, settings, k)
        self._tool_threads = {lane.tool.name: ToolThreads(lane.tool, lane.limits) for lane in lanes}

        self._lock = threading.Lock()  # held to add to `_open` and to set `_closed`
        self._closed = False  # whether no text is taken any more
        self._open: set[Writing] = set()  # begun and not ended; callers add, the decoding thread removes
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # from other threads; None ends the decoding thread

        # Once the decoding thread has taken an open text, it is in one of these three, which no other thread changes:
        self._waiting: deque[Writing] = deque()  # texts that are to join a batch, the next one first
        self._calling: set[Writing] = set()  # texts that wait for a tool
        self._batches: list[TextBatch] = []  # texts that are being decoded
        self._join_timer = _JoinTimer()
        self._mean_seconds = 1.0  # moving mean of the time from a text's request to its end

        # The metrics show the sizes of these collections whenever they are read.
        self.figures.show_texts({"open": self._open, "waiting": self._waiting, "calling": self._calling})

        self._thread = threading.Thread(target=self._run_decoding, daemon=True)
        self._thread.start()

    # Called by other threads

    @property
    def alive(self) -> bool:
        """Whether the decoding thread runs."""
        return self._thread.is_alive()

    def begin(self, requests: Sequence[TextRequest], watch: Watch | None = None) -> list[Writing]:
        """Begin to write texts for a client.

        Only one thread at a time may call this, because the tokenizer is not thread-safe.

        Args:
            requests: What to write, a request per text.
            watch: Called in the decoding thread with each piece of text as it is decoded.

        Returns:
            A `Writing` per request. Its future `done` gets the finished text.

        Raises:
            Busy: Too many texts are open.
            NothingWritten: A prompt is empty or too long.
            UserError: The decoding thread has ended.
        """
        self._require_room(requests)  # before the prompts are tokenized, which would be in vain
        writings = [self._prepare_writing(request, watch) for request in requests]

        with self._lock:
            if self._closed:
                raise UserError("nothing is decoded any more; see the log, and start anew")
            self._require_room(requests)  # once more, under the lock: this answer holds
            self._open.update(writings)

        for writing in writings:
            writing.done.set_running_or_notify_cancel()  # its future cannot be cancelled now; `drop` ends the text
            add_to_waiting = partial(self._waiting.append, writing)
            self._jobs.put(add_to_waiting)  # the decoding thread runs it: no other may change `_waiting`
        return writings

    def require_length(self, characters: int) -> None:
        """Raise NothingWritten for a prompt of so many characters if it cannot fit into the model's context."""
        if characters > self._backend.context_length * self._prompts.longest_token:
            raise NothingWritten(DOES_NOT_FIT)

    def drop(self, writing: Writing) -> None:
        """End a text whose client has left, if it has not ended."""
        self._jobs.put(partial(self._fail_texts, [writing], InterruptedError("nobody waits for this text")))

    def close(self) -> None:
        """End all texts and the decoding thread, without waiting for tools that still run."""
        self._jobs.put(None)
        self._thread.join()

    def _require_room(self, requests: Sequence[TextRequest]) -> None:
        """Raise Busy if `requests` would exceed the number of texts that may be open at once."""
        most_open = self._backend.greedy_rows + self.settings.serving.waiting
        if len(self._open) + len(requests) > most_open:
            raise Busy(math.ceil(self._mean_seconds))

    def _prepare_writing(self, request: TextRequest, watch: Watch | None) -> Writing:
        """Tokenize the prompt of a request, and prepare its text for decoding.

        Raises:
            NothingWritten: The prompt is empty or does not fit into the model's context.
        """
        self.require_length(len(request.prompt))  # a cheap test, before a long text is tokenized
        prompt_tokens = self._prompts.tokens(request.prompt)

        writing = Writing(request, self._rules, prompt_tokens, watch)
        if writing.text.reason is not None:  # a text has ended at once if its prompt is empty or fills the context
            raise NothingWritten(writing.text.reason)

        return writing

    # Run in the decoding thread

    def _run_decoding(self) -> None:
        """Decode until the decoder is closed, as the body of the decoding thread.

        Each round runs the jobs of other threads, lets waiting texts join batches, and writes one token of each text.
        At the end, even after an error, no more texts are accepted, and all open ones end with InterruptedError.
        """
        try:
            while self._take_jobs():  # False once the decoder was closed
                self._let_texts_join()
                for batch in self._batches:
                    self._advance_batch(batch)

                self._batches = [batch for batch in self._batches if batch.writings]
        finally:
            with self._lock:  # `begin` adds no text to `_open` after this
                self._closed = True
            self._fail_texts(list(self._open), InterruptedError("the server ended"))

    def _take_jobs(self) -> bool:
        """Run the jobs that other threads queued, and end the calls that are out of time.

        If there is no text to decode, wait for a job, but no longer than until the next call is out of time.

        Returns:
            False if the decoder was closed, otherwise True.
        """
        may_wait = not (self._batches or self._waiting)
        timeout = self._compute_seconds_to_deadline()

        while True:
            try:
                job = self._jobs.get(block=may_wait, timeout=timeout)
            except Empty:
                break
            if job is None:  # from `close`
                return False
            job()  # such as to add a new text to `_waiting`
            may_wait = False  # the other jobs are run only if they are queued already

        self._end_late_calls()
        return True

    def _compute_seconds_to_deadline(self) -> float | None:
        """Return in how many seconds the next call is out of time; None if no text waits for a tool."""
        next_deadline = min((writing.call_deadline for writing in self._calling), default=None)
        return None if next_deadline is None else max(0.0, next_deadline - time.monotonic())

    def _end_late_calls(self) -> None:
        """Let texts go on without a result if they have waited for their tools as long as they may."""
        now = time.monotonic()
        late = [writing for writing in self._calling if writing.call_deadline <= now]
        for writing in late:
            self._take_answer(writing, writing.text.call, ToolResult(result=None, reason=OUT_OF_TIME))

    def _let_texts_join(self) -> None:
        """Move waiting texts into batches, in their order, until memory is full.

        This is called before every token, so `_JoinTimer` decides whether to try at all.
        """
        decoded = sum(len(batch.writings) for batch in self._batches)
        if not self._join_timer.is_due(waiting=len(self._waiting), decoded=decoded):
            return

        while self._waiting:
            batch = choose_batch(self._waiting[0].text, self._batches, self._backend)
            if batch is None:
                return  # texts behind it wait too, so that the order is kept
            self._join_batch(batch, self._waiting.popleft())

    def _join_batch(self, batch: TextBatch, writing: Writing) -> None:
        """Let a text join a batch, an open one or a new one."""
        if batch not in self._batches:
            self._batches.append(batch)
        batch.join(writing)

    def _advance_batch(self, batch: TextBatch) -> None:
        """Write one token of each text of a batch, and handle the texts that left it.

        An error, such as too little memory, ends all texts of this batch. The other batches go on.
        """
        try:
            texts_that_left = batch.step(self._backend)
            for writing in texts_that_left:
                was_dropped = writing not in self._open  # its client has left, which ended the text (`_fail_texts`)
                if not was_dropped:
                    self._dispatch_text(writing)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other batches go on
            _log.exception("texts were lost")
            self._fail_texts([*batch.writings, *batch.joining], error)
            batch.writings = []
            batch.joining = []

    def _dispatch_text(self, writing: Writing) -> None:
        """Take the next step for a text that is in no batch: queue it for one, run its call, or finish it."""
        state = writing.text.state
        if state is TextState.READY:
            self._waiting.appendleft(writing)
        elif state is TextState.WAITING:
            self._run_call(writing)
        elif state is TextState.ENDED:
            self._finish_text(writing)

    def _run_call(self, writing: Writing) -> None:
        """Have the open call of a text answered: run its tool in another thread.

        The answer comes back as a job for the decoding thread (`_take_answer`). A call that cannot be run, or has
        no time left, is answered at once with the reason.
        """
        # this object tells the answer of this call from a late one (`_is_waiting_for`)
        written_call = writing.text.call
        parsed_call = writing.text.open_call()  # the same call: its tool, its input, or why it cannot be run
        reason = self._begin_waiting(writing, parsed_call)  # the text is in `_calling` from here on

        if reason is not None:
            self._take_answer(writing, written_call, ToolResult(result=None, reason=reason))
            return

        self._tool_threads[parsed_call.tool].submit(
            writing.text.tool_call(),  # the input and the context for the tool
            is_wanted=partial(self._is_waiting_for, writing, written_call),
            on_result=partial(self._put_answer, writing, written_call),
        )

    def _begin_waiting(self, writing: Writing, call: DecodedCall) -> str | None:
        """Let a text wait for its open call; return why there is no result: it cannot be run, or no time is left."""
        seconds_left = writing.seconds_for_tools(self.settings.serving.tool_seconds)
        writing.call_began = time.monotonic()
        writing.call_deadline = writing.call_began + seconds_left
        self._calling.add(writing)
        if call.reason is None and seconds_left <= 0:
            return OUT_OF_TIME
        return call.reason

    def _put_answer(self, writing: Writing, written_call: WrittenCall | None, result: ToolResult) -> None:
        """Hand the answer of a call to the decoding thread; called in the thread of the tool."""
        self._jobs.put(partial(self._take_answer, writing, written_call, result))

    def _is_waiting_for(self, writing: Writing, written_call: WrittenCall | None) -> bool:
        """Return whether a text still waits for this call: it was not dropped, and the call is not out of time."""
        return writing in self._calling and writing.text.call is written_call

    def _take_answer(self, writing: Writing, written_call: WrittenCall | None, result: ToolResult) -> None:
        """Let a text go on after its call was answered.

        The call is recorded and counted, and the watcher gets it. Then the text waits for a batch, or ends.

        Args:
            written_call: The answered call. If the text no longer waits for it, nothing happens.
            result: The answer.
        """
        if not self._is_waiting_for(writing, written_call):
            return

        self._calling.discard(writing)
        answered = self._build_answered_call(writing, result)
        call = answered.call

        # Recorded before the text goes on: then the watcher gets the call, and reads its seconds and offsets here.
        writing.calls.append(answered)
        self.figures.count_call(call.tool, answered.seconds, has_result=call.reason is None, lost=result.lost)

        writing.text.go_on(call)  # changes the text's state; a call with a result becomes part of the text
        self._dispatch_text(writing)

    def _build_answered_call(self, writing: Writing, result: ToolResult) -> AnsweredCall:
        """Combine the open call of a text with its result, the time that it took, and its position.

        If the text already has the same call with its result, the reason "repeated_call" takes the place of the result.
        """
        text = writing.text
        parsed_call = text.open_call()  # without a result
        call = replace(parsed_call, result=result.result, reason=result.reason)

        # All that is finished of the text stands before this call; `plain` is the same without calls.
        return AnsweredCall(
            text.accepted(call),  # `call`, unless it is a repetition
            seconds=time.monotonic() - writing.call_began,
            text_offset=len(text.text),
            plain_offset=len(text.plain),
        )

    def _finish_text(self, writing: Writing) -> None:
        """Count a text that has ended, and pass it to whoever waits for `writing.done`."""
        self._open.discard(writing)
        generation = writing.text.generation()
        seconds = time.monotonic() - writing.began
        self._mean_seconds += RECENT * (seconds - self._mean_seconds)
        self.figures.count_text(writing.prompt_token_count, generation)
        writing.done.set_result(generation)

    def _fail_texts(self, writings: Iterable[Writing], error: Exception) -> None:
        """End those of `writings` that are still open, with `error` in place of a text."""
        for writing in self._open.intersection(writings):
            self._open.discard(writing)
            self._calling.discard(writing)
            if writing in self._waiting:
                self._waiting.remove(writing)
            writing.text.drop()
            writing.done.set_exception(error)
