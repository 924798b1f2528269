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
from toolformer_dag.decoding.rules import DecodingRules, build_decoding_rules
from toolformer_dag.decoding.written_call import WrittenCall
from toolformer_dag.decoding.written_text import TextState
from toolformer_dag.files import UserError
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import get_backend
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.serving.decoder_figures import DecoderFigures
from toolformer_dag.serving.text_batches import TextBatch, choose_batch
from toolformer_dag.serving.tool_threads import ToolThreads
from toolformer_dag.serving.writings import AnsweredCall, Busy, NothingWritten, PieceCallback, TextRequest, Writing
from toolformer_dag.settings.sections import Settings
from toolformer_dag.tools.tool import ToolResult

OUT_OF_TIME = "out_of_time"
"""The reason of a call without a result whose text has waited for its tools as long as it may."""
RECENT_TEXT_WEIGHT = 0.1
"""The weight of the text that finished last in the moving mean of the seconds per text."""
Job = Callable[[], None]
"""Work that other threads hand to the decoding thread, such as to take a new text or the answer of a call."""
_log = logging.getLogger(__name__)


class _JoinTimer:
    """Decides when waiting texts join a batch.

    Joining costs about one run of the model, however many texts join. So the texts wait until the tokens that they
    miss by waiting add up to one run. In a step that decodes 3 texts while 1 waits, it misses 1/4 of the possible
    tokens: the text joins after four of these steps. If nothing is decoded, it joins at once.
    """

    def __init__(self) -> None:
        """Begin with nothing missed."""
        # What the waiting texts have missed since texts joined last, in runs of the model.
        self._missed_runs = 0.0

    def is_join_due(self, *, waiting_count: int, decoded_count: int) -> bool:
        """Count one step of decoding, and return whether the waiting texts join now.

        If one text waits while three are decoded, the step misses 1/4 of its possible tokens. Once such shares add up
        to one run of the model, here after four steps, the texts join.

        Args:
            waiting_count: How many texts wait during this step.
            decoded_count: How many texts get a token in this step.
        """
        text_count = max(1, waiting_count + decoded_count)  # without any texts, nothing is missed
        self._missed_runs += waiting_count / text_count
        if self._missed_runs < 1:
            return False

        self._missed_runs = 0.0
        return True


def _build_decoding_rules(
    language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings, k: int | None
) -> DecodingRules:
    """Build the rules of decoding from the settings, with another k if one is given.

    Args:
        language_model: The model that writes.
        lanes: The tools that texts may call, with their thresholds and limits.
        settings: The settings of the project.
        k: A call may begin if ` [` is among the k likeliest tokens. None for the k of the settings.
    """
    rules = build_decoding_rules(language_model, lanes, settings)
    if k is None:
        return rules
    return replace(rules, top_k=k)


class _PromptTokenizer:
    """Tokenizes prompts, for one thread at a time.

    Attributes:
        longest_token_characters: The number of characters of the longest token in the tokenizer's vocabulary.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Prepare to tokenize prompts with a Hugging Face tokenizer."""
        self._encoding = Encoding(tokenizer)
        self.longest_token_characters = max(map(len, tokenizer.get_vocab()))

    def tokenize_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, with the token BOS before them if the model has one.

        Args:
            prompt: A text, or its token ids with BOS, which are returned as they are.
        """
        if not isinstance(prompt, str):
            return list(prompt)

        [encoded_text] = self._encoding.encode_texts([prompt])
        return [*self._encoding.bos_ids, *encoded_text.token_ids]


class SharedDecoder:
    """Completes the texts of many clients in one thread, each as `generate` would write it alone.

    - A text that calls a tool leaves its batch until the call is answered. Then it is the next to join a batch.
    - Only so many texts are open at once as a full batch holds, and `serving.waiting` more.
    - A text waits for its tools for at most `serving.tool_seconds` in total. Calls after that have no result.

    Other threads call the public methods. These hand jobs to the decoding thread, which alone changes texts. A text
    with its request is a `Writing`: it is open until it has ended, and in the meantime either is in a batch, waits to
    join one, or waits for a tool ("calling").

    Attributes:
        settings: The settings of the project, whose limits requests are checked against.
        tools_by_name: The tools that texts may call, by name.
        figures: The counts for Prometheus.
        tokenizer: A copy of the model's tokenizer, for the threads of callers.
    """

    def __init__(
        self, language_model: LanguageModel, lanes: Sequence[Lane], settings: Settings, k: int | None = None
    ) -> None:
        """Start the decoding thread.

        Args:
            language_model: The model that writes the texts.
            lanes: The tools that texts may call, with their thresholds and limits.
            settings: The settings of the project.
            k: Replaces `k` of the settings: a call may begin if ` [` is among the k likeliest tokens.
        """
        self.settings = settings
        self.figures = DecoderFigures()
        self.tools_by_name = {lane.tool.name: lane.tool for lane in lanes}

        # Tokenizers are not safe for threads: callers use this copy, the decoding thread the model's own.
        self.tokenizer = copy.deepcopy(language_model.tokenizer)
        self._prompt_tokenizer = _PromptTokenizer(self.tokenizer)
        self._backend = get_backend(language_model)
        self._decoding_rules = _build_decoding_rules(language_model, lanes, settings, k)
        self._tool_threads_by_name = {lane.tool.name: ToolThreads(lane.tool, lane.limits) for lane in lanes}

        self._lock = threading.Lock()  # held to add to `_open_texts` and to set `_is_closed`
        self._is_closed = False  # whether no text is taken any more
        self._open_texts: set[Writing] = set()  # begun and not ended; callers add, the decoding thread removes
        self._job_queue: SimpleQueue[Job | None] = SimpleQueue()  # from other threads; None ends the decoding thread

        # Once the decoding thread has taken an open text, it is in one of these three, which no other thread changes:
        self._waiting_texts: deque[Writing] = deque()  # texts that are to join a batch, the next one first
        self._calling_texts: set[Writing] = set()  # texts that wait for a tool
        self._open_batches: list[TextBatch] = []  # texts that are being decoded
        self._join_timer = _JoinTimer()
        self._mean_text_seconds = 1.0  # moving mean of the time from a text's request to its end

        # The metrics show the sizes of these collections whenever they are read.
        self.figures.register_text_gauges(
            {"open": self._open_texts, "waiting": self._waiting_texts, "calling": self._calling_texts}
        )

        self._decoding_thread = threading.Thread(target=self._run_decoding, daemon=True)
        self._decoding_thread.start()

    # Called by other threads

    @property
    def is_alive(self) -> bool:
        """Whether the decoding thread runs."""
        return self._decoding_thread.is_alive()

    def begin_texts(self, text_requests: Sequence[TextRequest], on_piece: PieceCallback | None = None) -> list[Writing]:
        """Begin to write texts for a client, and return without waiting for them.

        Only one thread at a time may call this, because the tokenizer is not thread-safe.

        Args:
            text_requests: What to write, a request per text.
            on_piece: Called in the decoding thread with each piece of text as it is decoded.

        Returns:
            A `Writing` per request. Its `generation_future` gets the finished text, or the error that ended it.

        Raises:
            Busy: Too many texts are open.
            NothingWritten: A prompt is empty or too long.
            UserError: The decoding thread has ended.
        """
        # A first check, so that prompts are not tokenized in vain.
        self._require_room(text_requests)
        writings = [self._prepare_writing(request, on_piece) for request in text_requests]

        with self._lock:
            if self._is_closed:
                raise UserError("nothing is decoded any more; see the log, and start anew")

            # Once more: under the lock, the answer still holds when the texts are added.
            self._require_room(text_requests)
            self._open_texts.update(writings)

        for writing in writings:
            # From here on the future cannot be cancelled. To end the text, `drop_text` is called.
            writing.generation_future.set_running_or_notify_cancel()

            # Only the decoding thread may change `_waiting_texts`, so this is a job for it.
            add_to_waiting = partial(self._waiting_texts.append, writing)
            self._job_queue.put(add_to_waiting)
        return writings

    def require_fitting_length(self, character_count: int) -> None:
        """Check that a prompt is not too long for the model, whatever its tokens are.

        This is cheap, because it does not tokenize the prompt. A prompt that passes may still be too long.

        Args:
            character_count: The number of characters of the prompt. For a prompt of token ids, their number.

        Raises:
            NothingWritten: The prompt would not fit even if all its tokens were as long as the longest one.
        """
        max_characters = self._backend.context_length * self._prompt_tokenizer.longest_token_characters
        if character_count > max_characters:
            raise NothingWritten(DOES_NOT_FIT)

    def drop_text(self, writing: Writing) -> None:
        """End a text whose client has left, if it has not ended yet."""
        error = InterruptedError("nobody waits for this text")
        self._job_queue.put(partial(self._fail_texts, [writing], error))

    def close(self) -> None:
        """End all texts and the decoding thread, without waiting for tools that still run."""
        self._job_queue.put(None)  # in place of a job, this ends the thread
        self._decoding_thread.join()

    def _require_room(self, text_requests: Sequence[TextRequest]) -> None:
        """Check that so many more texts may be open at once.

        Raises:
            Busy: They may not. A client is told to try again after the mean time that a text takes.
        """
        max_open_texts = self._backend.max_greedy_rows + self.settings.serving.waiting
        if len(self._open_texts) + len(text_requests) > max_open_texts:
            raise Busy(math.ceil(self._mean_text_seconds))

    def _prepare_writing(self, text_request: TextRequest, on_piece: PieceCallback | None) -> Writing:
        """Tokenize the prompt of a request, and prepare its text for decoding.

        Args:
            text_request: What to write.
            on_piece: Called in the decoding thread with each piece of the text.

        Raises:
            NothingWritten: The prompt is empty or does not fit into the model's context.
        """
        # A cheap test, before a long text is tokenized.
        self.require_fitting_length(len(text_request.prompt))
        prompt_token_ids = self._prompt_tokenizer.tokenize_prompt(text_request.prompt)

        writing = Writing(text_request, self._decoding_rules, prompt_token_ids, on_piece)

        # A text has a reason from the beginning if its prompt is empty or fills the context.
        reason = writing.written_text.reason
        if reason is not None:
            raise NothingWritten(reason)
        return writing

    # Run in the decoding thread

    def _run_decoding(self) -> None:
        """Decode the texts of all clients until the decoder is closed. This is the body of the decoding thread.

        Each round runs the jobs of other threads, lets waiting texts join batches, and writes one token of each text.
        At the end, even after an error, no more texts are accepted, and all open ones end with InterruptedError.
        """
        try:
            while self._run_queued_jobs():  # it returns False once the decoder is closed
                self._join_waiting_texts()
                for batch in self._open_batches:
                    self._advance_batch(batch)

                # A batch that all texts have left is given up, with its memory.
                self._open_batches = [batch for batch in self._open_batches if batch.writings]
        finally:
            with self._lock:
                self._is_closed = True  # from here on, `begin_texts` adds no text to `_open_texts`
            self._fail_texts(list(self._open_texts), InterruptedError("the server ended"))

    def _run_queued_jobs(self) -> bool:
        """Run the jobs that other threads queued, and end the calls that are out of time.

        If there is no text to decode, wait for a job, but no longer than until the next call is out of time.

        Returns:
            False if the decoder was closed, otherwise True.
        """
        has_text_to_decode = bool(self._open_batches or self._waiting_texts)
        waits_for_job = not has_text_to_decode
        timeout = self._compute_seconds_to_deadline()  # counts only while waiting; None for no limit

        while True:
            try:
                job = self._job_queue.get(block=waits_for_job, timeout=timeout)
            except Empty:
                break

            if job is None:  # from `close`
                return False
            job()

            # After the first job, others are run only if they are queued already.
            waits_for_job = False

        self._end_late_calls()
        return True

    def _compute_seconds_to_deadline(self) -> float | None:
        """Return in how many seconds the next call is out of time, at least 0. None if no text waits for a tool."""
        if not self._calling_texts:
            return None

        next_deadline = min(writing.call_deadline for writing in self._calling_texts)
        return max(0.0, next_deadline - time.monotonic())

    def _end_late_calls(self) -> None:
        """Let texts go on without a result if they have waited for their tools as long as they may."""
        now = time.monotonic()

        # A list, because `_calling_texts` changes below.
        late_writings = [writing for writing in self._calling_texts if writing.call_deadline <= now]

        for writing in late_writings:
            no_result = ToolResult(result=None, reason=OUT_OF_TIME)
            self._accept_tool_result(writing, writing.written_text.current_call, no_result)

    def _join_waiting_texts(self) -> None:
        """Move waiting texts into batches, in their order, until memory is full.

        This is called before every token, so `_JoinTimer` decides whether to try at all.
        """
        waiting_count = len(self._waiting_texts)
        decoded_count = sum(len(batch.writings) for batch in self._open_batches)
        if not self._join_timer.is_join_due(waiting_count=waiting_count, decoded_count=decoded_count):
            return

        while self._waiting_texts:
            next_writing = self._waiting_texts[0]
            batch = choose_batch(next_writing.written_text, self._open_batches, self._backend)
            if batch is None:
                return  # memory is full: the texts behind this one wait too, so that the order is kept

            self._waiting_texts.popleft()
            if batch not in self._open_batches:  # a new batch
                self._open_batches.append(batch)
            batch.add_writing(next_writing)

    def _advance_batch(self, batch: TextBatch) -> None:
        """Write one token of each text of a batch, and take the next step for the texts that leave it.

        An error, such as too little memory, is logged and ends all texts of this batch. The other batches go on.
        """
        try:
            writings_that_left = batch.write_next_tokens(self._backend)
            for writing in writings_that_left:
                # A text whose client has left is not open any more, because `_fail_texts` ended it.
                if writing in self._open_texts:
                    self._dispatch_text(writing)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other batches go on
            _log.exception("texts were lost")
            self._fail_texts([*batch.writings, *batch.joining_writings], error)
            batch.writings = []
            batch.joining_writings = []

    def _dispatch_text(self, writing: Writing) -> None:
        """Take the next step for a text that is in no batch.

        A text that must be read by the model again is the next to join a batch. If a text waits for a tool, its call is
        run. If it has ended, it is passed to its client.
        """
        state = writing.written_text.state
        if state is TextState.READY:
            self._waiting_texts.appendleft(writing)
        elif state is TextState.WAITING:
            self._run_call(writing)
        elif state is TextState.ENDED:
            self._finish_text(writing)

    def _run_call(self, writing: Writing) -> None:
        """Have the open call of a text answered: run its tool in another thread.

        The answer comes back as a job for the decoding thread (`_accept_tool_result`). A call that cannot be run, or
        has no time left, is answered at once with the reason.
        """
        # This object tells the answer of this call from a late answer of an earlier one (`_is_waiting_for`).
        written_call = writing.written_text.current_call

        # The same call, parsed: its tool and input, or why it cannot be run.
        parsed_call = writing.written_text.parse_open_call()

        # From here on, the text is in `_calling_texts`.
        reason = self._begin_waiting_for_tool(writing, parsed_call)
        if reason is not None:
            self._accept_tool_result(writing, written_call, ToolResult(result=None, reason=reason))
            return

        tool_threads = self._tool_threads_by_name[parsed_call.tool]
        tool_threads.submit_call(
            writing.written_text.build_tool_call(),
            is_wanted=partial(self._is_waiting_for, writing, written_call),
            on_result=partial(self._queue_tool_result, writing, written_call),
        )

    def _begin_waiting_for_tool(self, writing: Writing, decoded_call: DecodedCall) -> str | None:
        """Let a text wait for the answer of its open call, with a deadline, and decide whether the call is run.

        If it is not run, the text waits until the caller answers the call with the reason.

        Args:
            writing: The text.
            decoded_call: Its open call, parsed. It has a reason if it cannot be run.

        Returns:
            Why the call is not run: the reason of the call, or OUT_OF_TIME if the text may not wait for tools any
            longer. None if it is run.
        """
        seconds_left = writing.compute_tool_seconds_left(self.settings.serving.tool_seconds)
        writing.call_began_at = time.monotonic()
        writing.call_deadline = writing.call_began_at + seconds_left
        self._calling_texts.add(writing)

        if decoded_call.reason is not None:
            return decoded_call.reason
        if seconds_left <= 0:
            return OUT_OF_TIME
        return None

    def _queue_tool_result(self, writing: Writing, written_call: WrittenCall | None, tool_result: ToolResult) -> None:
        """Hand the answer of a call to the decoding thread. This is called in the thread of the tool."""
        self._job_queue.put(partial(self._accept_tool_result, writing, written_call, tool_result))

    def _is_waiting_for(self, writing: Writing, written_call: WrittenCall | None) -> bool:
        """Return whether a text still waits for this call: it was not dropped, and the call is not out of time."""
        return writing in self._calling_texts and writing.written_text.current_call is written_call

    def _accept_tool_result(self, writing: Writing, written_call: WrittenCall | None, tool_result: ToolResult) -> None:
        """Let a text go on after its call was answered.

        The call is recorded and counted, and the client of a stream gets it. Then the text waits for a batch, or ends.

        Args:
            writing: The text.
            written_call: The answered call. If the text no longer waits for it, nothing happens.
            tool_result: The answer.
        """
        if not self._is_waiting_for(writing, written_call):
            return

        self._calling_texts.discard(writing)
        answered_call = self._build_answered_call(writing, tool_result)
        decoded_call = answered_call.decoded_call

        # This comes before the text goes on, which passes the call to the stream: the stream reads this list.
        writing.answered_calls.append(answered_call)
        self.figures.count_call(
            decoded_call.tool,
            answered_call.waited_seconds,
            has_result=decoded_call.reason is None,
            is_lost=tool_result.lost,
        )

        # This changes the state of the text. A call with a result becomes part of the text.
        writing.written_text.continue_after_call(decoded_call)
        self._dispatch_text(writing)

    def _build_answered_call(self, writing: Writing, tool_result: ToolResult) -> AnsweredCall:
        """Combine the open call of a text with its result, the time that it took, and its position.

        If the text already has the same call with its result, the reason "repeated_call" takes the place of the result.

        Args:
            writing: The text, which waits for this call.
            tool_result: What the tool answered.
        """
        written_text = writing.written_text
        parsed_call = written_text.parse_open_call()
        call_with_result = replace(parsed_call, result=tool_result.result, reason=tool_result.reason)
        decoded_call = written_text.drop_repeated_result(call_with_result)

        # All that is finished of the text stands before this call, so its length is the call's position: once in the
        # text with its earlier calls, and once in the plain text, without them.
        return AnsweredCall(
            decoded_call,
            waited_seconds=time.monotonic() - writing.call_began_at,
            text_offset=len(written_text.text),
            plain_offset=len(written_text.plain_text),
        )

    def _finish_text(self, writing: Writing) -> None:
        """Count a text that has ended, and pass it to whoever waits for its `generation_future`."""
        self._open_texts.discard(writing)
        generation = writing.written_text.build_generation()

        # A moving mean, in which later texts weigh more.
        text_seconds = time.monotonic() - writing.began_at
        self._mean_text_seconds += RECENT_TEXT_WEIGHT * (text_seconds - self._mean_text_seconds)

        self.figures.count_text(writing.prompt_token_count, generation)
        writing.generation_future.set_result(generation)

    def _fail_texts(self, writings: Iterable[Writing], error: Exception) -> None:
        """End texts with an error in place of a result. Texts that have ended already are left alone.

        Args:
            writings: The texts.
            error: The error that their clients get.
        """
        for writing in self._open_texts.intersection(writings):
            self._open_texts.discard(writing)
            self._calling_texts.discard(writing)
            if writing in self._waiting_texts:
                self._waiting_texts.remove(writing)

            # If the text is in a batch, the batch drops it with its next step.
            writing.written_text.abandon()
            writing.generation_future.set_exception(error)
