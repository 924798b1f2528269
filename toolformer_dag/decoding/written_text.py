"""A text while it is written after a prompt: its states, and what leads from one state to the next."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from toolformer_dag.decoding.answer_end import answer_end, may_have_ended
from toolformer_dag.decoding.finished_text import FinishedText
from toolformer_dag.decoding.generation import (
    DOES_NOT_FIT,
    EMPTY_PROMPT,
    REPEATED,
    DecodedCall,
    Generation,
    format_decoded_call,
)
from toolformer_dag.decoding.piece_feed import PieceFeed
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.text_memory import TextMemory
from toolformer_dag.decoding.text_since_call import FirstTokenRules, TextSinceCall
from toolformer_dag.decoding.token_scores import StartScore
from toolformer_dag.decoding.written_call import WrittenCall, parse_written_call
from toolformer_dag.texts.calls import API_START
from toolformer_dag.tools.tool import ToolCall


class TextState(Enum):
    """What a text is doing. The numbers are those of the steps in `toolformer_dag.decoding`."""

    READY = "ready"  # waits until the model reads its tokens, the prefill (1)
    WRITING_TEXT = "writing text"  # gets a token at each step of its batch (2)
    WRITING_CALL = "writing a call"  # its open call gets a token at each step, after ` [` (3)
    WAITING = "waiting for a tool"  # waits for the answer of its open call, and is in no batch (4)
    ENDED = "ended"


class WrittenText:
    """A text that is being written after a prompt, with its calls.

    There is one object per text, from its prompt to its end. What rules have to remember about the text is in its
    `memory`; `rules` are shared by all texts. Not safe for threads.

    | from | to | by |
    |---|---|---|
    | READY | WRITING_TEXT | `start_writing`, once its tokens are prefilled |
    | WRITING_TEXT | WRITING_CALL | `append` of the last token of ` [` |
    | WRITING_TEXT | READY | `stop_before_look_alike` |
    | WRITING_TEXT | ENDED | `append` or `stop_before_sentence`: an end token, a stop word, a sentence, a limit |
    | WRITING_CALL | WAITING | `append` of `->` or of the last token that fits; `end_call` |
    | WRITING_CALL | READY | `append` of the name of a tool that needs a likelier start: the call is removed |
    | WAITING | READY, ENDED | `go_on` with the answer of the call |
    | any | ENDED | `drop` |

    - `prompt`: the index of its prompt among the prompts.
    - `context`: what its tools get in addition to their input, such as the date.
    - `memory`: the answered calls and what else counts for later tokens.
    - `finished`: what was written up to the last call. When a call waits or the text has ended, it includes the text
      since that call.
    - `since_call`: the tokens since the prompt or the last call, with the index of the next token.
    - `call`: the call that is being written or waits for its tool; else None.
    - `reason`: why nothing can be written, such as EMPTY_PROMPT; else None.
    """

    def __init__(
        self, rules: DecodingRules, prompt_tokens: Sequence[int], *, prompt: int = 0, context: str = ""
    ) -> None:
        """Start a text after its prompt.

        It is ready to be written, or has ended if the prompt is empty, fills the model's context, or no token may be
        written.

        Args:
            rules: The rules of decoding, which all texts share.
            prompt_tokens: The tokens of the prompt.
            prompt: The index of the prompt among all prompts.
            context: What tools get in addition to their input, such as the date.
        """
        self.rules = rules
        self.prompt = prompt
        self.context = context
        self.state = TextState.READY

        self.memory = TextMemory()  # the answered calls; grows with each answer
        self.finished = FinishedText()  # what was written up to the last call
        self.call: WrittenCall | None = None  # the call that is being written or waits for its tool
        self.reason: str | None = None  # why nothing can be written

        self._piece_feed = PieceFeed(rules, prompt)  # passes new text to `rules.watch`
        self._forced_tokens: list[int] = []  # the next tokens, if a rule has chosen them and not the model

        # The tokens since the prompt. Each call, and each removal of text, replaces it by a new one (`_begin_text`).
        self.since_call = self._build_text(list(prompt_tokens), rules.max_new_tokens, FirstTokenRules())
        self._end_if_nothing_fits()

    def _end_if_nothing_fits(self) -> None:
        """End the text if nothing can be written.

        That is so if the prompt is empty or fills the context, which sets `reason`, or if no token may be written.
        """
        if not self.since_call.tokens_before:
            self.reason = EMPTY_PROMPT
        elif self.since_call.context_left <= 0:
            self.reason = DOES_NOT_FIT

        if self.reason is not None or self.since_call.is_full:
            self._end()

    # Its state

    @property
    def text(self) -> str:
        """Return the finished text with calls and their results."""
        return self.finished.text

    @property
    def plain(self) -> str:
        """Return the finished text without calls."""
        return self.finished.plain

    @property
    def is_writing(self) -> bool:
        """Return whether the text, or its open call, gets a token at the next step of its batch."""
        return self.state in (TextState.WRITING_TEXT, TextState.WRITING_CALL)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more is written."""
        return self.state is TextState.ENDED

    @property
    def is_full(self) -> bool:
        """Return whether the limit of tokens or the model's context is reached."""
        return self.since_call.is_full

    @property
    def model_chooses_next(self) -> bool:
        """Return whether the model chooses the next token of plain text: no call is open, and no token is forced."""
        return self.state is TextState.WRITING_TEXT and not self._forced_tokens

    @property
    def may_begin_call(self) -> bool:
        """Return whether the rules let a call begin here and its ` [` fits into the context."""
        since_call = self.since_call
        context_left = since_call.context_left - since_call.token_count
        start_fits = context_left >= len(self.rules.vocabulary.start)
        return self.model_chooses_next and start_fits and since_call.may_begin_call(since_call.token_count)

    @property
    def keeps_start_probability(self) -> bool:
        """Return whether to keep p of ` [` here: one more call is allowed, or no call was made yet."""
        if not self.model_chooses_next:
            return False
        return self.since_call.has_calls_left(self.since_call.token_count) or not self.memory.calls

    @property
    def most_tokens(self) -> int:
        """Return how long the text may become, in tokens, before its next prefill: prompt, text and an open call."""
        return len(self.since_call.tokens_before) + self.since_call.max_tokens + self.rules.max_call_tokens

    def generation(self) -> Generation:
        """Return what was written, once the text has ended."""
        return self.finished.generation(self.memory, self.reason)

    # 1. Prefill

    def get_tokens_to_prefill(self) -> list[int]:
        """Return the tokens of the prompt and of all text so far, which the model reads before it goes on."""
        return self.since_call.tokens_before

    def start_writing(self) -> None:
        """READY -> WRITING_TEXT, once the model has read the tokens. A text dropped in the meantime stays ENDED."""
        if self.state is TextState.READY:
            self.state = TextState.WRITING_TEXT

    # 2. Choose

    def keep_start_score(self, start: StartScore) -> None:
        """Keep the model's p of ` [` after the last token, for `min_probability` and for the trace."""
        token_index = self.since_call.token_count
        scores = self.since_call.scores
        if self.keeps_start_probability:
            scores.start_probabilities[token_index] = start.probability
        if self.rules.traced:
            scores.starts[token_index] = start

    def keep_likeliest(self, log_probabilities: dict[int, float]) -> None:
        """Keep log p of the likeliest next tokens, by token."""
        self.since_call.scores.likeliest[self.since_call.token_count] = log_probabilities

    def stop_before_sentence(self, token: int) -> None:
        """End the text if it is a complete sentence and the likeliest next token does not continue it.

        "It was 3." goes on before "5" and ends before " Then". Nothing happens inside a tool call.

        Args:
            token: The likeliest next token.
        """
        if not self.model_chooses_next:
            return

        text = self._get_text_without_calls()
        if not may_have_ended(text):  # it does not end with the punctuation of a sentence
            return

        text_with_token = text + self.since_call.addition(token)
        first_sentence_length = answer_end(text_with_token)
        token_begins_next_sentence = first_sentence_length == len(text)
        is_end_token = token in self.rules.vocabulary.ends
        if token_begins_next_sentence or is_end_token:
            self._end()

    def _get_text_without_calls(self) -> str:
        """Return all text so far, without calls and their results, while plain text is being written."""
        return self.finished.plain + self.since_call.text()

    def stop_before_look_alike(self, token: int) -> None:
        """Remove text that only looks like a tool call, if the likeliest next token would complete it.

        Such text is the name of a tool after a wrong bracket, as in `<QA(`. It is removed from its bracket on, and no
        bracket may be written there again. The text is then ready to be read by the model again, or ends at a limit.
        Nothing happens inside a call.

        Args:
            token: The likeliest next token, which is not appended.
        """
        if not self.model_chooses_next:
            return

        look_alike_start = self.since_call.look_alike_start(token)  # the index of its first character
        if look_alike_start is None:
            return

        self.since_call.shorten_to(look_alike_start)
        self._show_complete_text()  # before new text begins, whose characters are counted from 0
        self.finished.look_alikes += 1
        self._go_on_after_removal(no_bracket=True)

    def begin_call(self) -> None:
        """Make ` [`, which begins a call, the next tokens, whatever the model's scores."""
        self._forced_tokens = list(self.rules.vocabulary.start)

    def forbids(self, token: int) -> bool:
        """Return whether a rule forbids `token` as the next one of the text (`TextSinceCall.forbids`)."""
        return self.model_chooses_next and self.since_call.forbids(token)

    def next_token(self, likeliest: int) -> int:
        """Return the token to append next: a forced one if there is any, else `likeliest`."""
        return self._forced_tokens[0] if self._forced_tokens else likeliest

    def append(self, token: int) -> None:
        """Append a token to the open call, or to the plain text if no call is open.

        This may change the state, as the table of the class says.
        """
        if self.call is not None:
            self._append_to_call(self.call, token)
        else:
            self._append_to_text(token)

    def _append_to_text(self, token: int) -> None:
        """Append a token to the plain text.

        If it completes ` [` and one more call is allowed, a tool call begins. Otherwise the text may end, which it does
        at an end token, a stop word, a sentence or a limit.
        """
        # If rules have chosen the next tokens, the first of them is this token.
        del self._forced_tokens[:1]

        if token in self.rules.vocabulary.ends:
            self._end()
            return

        self.since_call.tokens.append(token)
        if self._ends_with_call_start():
            self._open_call()
        else:
            self._end_or_show_text()

    def _end_or_show_text(self) -> None:
        """End the text if its answer is complete or a limit is reached, otherwise show the watcher what is new."""
        answer_length = self._find_answer_length()
        if answer_length is not None:
            self._end_answer(answer_length)
        elif self.since_call.is_full and not self._forced_tokens:  # the forced tokens of ` [` may exceed the limit
            self._end()
        else:
            self._piece_feed.show_text(self.since_call, self.finished.likelihoods, whole=False)

    def _end_answer(self, answer_length: int) -> None:
        """End the text after a number of characters, which are counted without calls (WRITING_TEXT -> ENDED)."""
        # The answer may end before the last call. Then no character since that call is left.
        self.since_call.cut_length = max(answer_length - len(self.finished.plain), 0)
        self._end()

    def _ends_with_call_start(self) -> bool:
        """Return whether the text now ends with ` [` and one more call is allowed there."""
        start_tokens = self.rules.vocabulary.start
        ends_with_start = self.since_call.tokens[-len(start_tokens) :] == start_tokens
        start_index = self.since_call.token_count - len(start_tokens)
        return ends_with_start and self.since_call.has_calls_left(start_index)

    def _find_answer_length(self) -> int | None:
        """Find where the answer ends, if the rules end it at a stop word or after one sentence.

        Returns:
            The number of characters, not counting calls, before the first stop word or up to the end of the first
            sentence or line, whichever is smaller. None if the answer goes on.
        """
        if not (self.rules.stop or self.rules.one_sentence):
            return None

        text = self._get_text_without_calls()
        possible_ends = [text.find(word) for word in self.rules.stop if word in text]
        if self.rules.one_sentence:
            sentence_end = answer_end(text)
            if sentence_end is not None:
                possible_ends.append(sentence_end)
        return min(possible_ends, default=None)

    # 3. Write a call

    def _open_call(self) -> None:
        """Open a tool call at the ` [` that was just written (WRITING_TEXT -> WRITING_CALL)."""
        # The tokens of ` [` belong to the call, not to the plain text before it.
        start_tokens = self.rules.vocabulary.start
        del self.since_call.tokens[-len(start_tokens) :]
        self._show_complete_text()

        self.call = self._build_call()
        self.state = TextState.WRITING_CALL
        self._piece_feed.begin_call()
        self._piece_feed.show_call(self.call, is_over=False)

    def _build_call(self) -> WrittenCall:
        """Build an empty tool call, which begins after the text so far.

        Its grammar says which tools it may name and how many tokens it may have.
        """
        vocabulary = self.rules.vocabulary

        start_length = len(vocabulary.start)  # the tokens of ` [`, with which the call began
        context_left = self.since_call.context_left - self.since_call.token_count - start_length
        max_tokens = min(self.rules.max_call_tokens, context_left)

        tools = self._choose_tools_for_call()
        grammar = vocabulary.form(tools, self.rules.schemas, max_tokens=max_tokens)
        return WrittenCall(vocabulary, grammar)

    def _choose_tools_for_call(self) -> frozenset[str]:
        """Choose the tools that a new call may name after the text so far.

        Usually these are all tools that the rules offer for this text. The model may then name a tool for which ` [` is
        not likely enough here (`min_probability`). Such a call is removed once the name is written.

        Where a call has just failed, they are the other tools, if ` [` is likely enough for them.
        """
        token_index = self.since_call.token_count
        failed_tools = self.since_call.first_token.failed_tools
        if failed_tools:
            return self.since_call.callable_tools(token_index) - failed_tools
        return self.since_call.offered_tools(token_index)

    def _append_to_call(self, call: WrittenCall, token: int) -> None:
        """Append a token to the open tool call.

        Then the call is removed if ` [` was not likely enough for its tool, or waits for its tool if it has ended.
        Otherwise the watcher gets what is new.
        """
        call.append(token)
        if self._needs_likelier_start(call):
            self._go_on_after_removal(no_call=True)
        elif call.has_ended:
            self.end_call()
        else:
            self._piece_feed.show_call(call, is_over=False)

    def _needs_likelier_start(self, call: WrittenCall) -> bool:
        """Return whether the name of the tool is written and ` [` was not likely enough for this tool.

        A tool may need a least probability of ` [` (`rules.min_probability`).
        """
        if not self.rules.min_probability:
            return False

        tool, bracket, _ = call.body().partition("(")
        name_is_complete = bool(bracket)
        return name_is_complete and tool not in self.since_call.callable_tools(self.since_call.token_count)

    def end_call(self) -> None:
        """End the open call, which is complete or can get no further token (WRITING_CALL -> WAITING)."""
        assert self.call is not None
        self.state = TextState.WAITING
        self._piece_feed.show_call(self.call, is_over=True)
        self._finish_text_since_call(last_text=API_START)

    # 4. Wait for its tool

    def open_call(self) -> DecodedCall:
        """Return the waiting call, parsed and without a result; `reason` is set if it cannot be run."""
        assert self.call is not None
        return parse_written_call(self.call.closed_body())

    def tool_call(self) -> ToolCall:
        """Return the input and the context with which the tool of the waiting call is run."""
        return ToolCall(self.open_call().input, self.context)

    # 5. Go on

    def accepted(self, call: DecodedCall) -> DecodedCall:
        """Take the result away from an answered call that only repeats an earlier one.

        Returns:
            The call without its result and with the reason REPEATED, if an earlier call of this text has the same tool
            and input, and a result. Otherwise the call, unchanged.
        """
        is_repetition = call.result is not None and self.memory.has_result_of(call)
        if is_repetition:
            return replace(call, result=None, reason=REPEATED)
        return call

    def go_on(self, call: DecodedCall) -> None:
        """Go on after the open tool call, now that its tool has answered (WAITING -> READY or ENDED).

        A call with a result becomes part of the text. A call without one is left out, and another tool may be called in
        its place.

        Args:
            call: The answered call, as `accepted` returns it.
        """
        text_before_call = self.since_call  # the text between the previous call and this one
        first_token_rules = text_before_call.rules_after_call(call)

        self.memory.add(call, follows_result=text_before_call.is_right_after_result)
        all_tokens = text_before_call.all_tokens() + self._insert_call(call)
        self._piece_feed.show_answer(call)
        self._begin_text(all_tokens, first_token_rules)  # from here on, `self.since_call` is the text after the call

        # There are no failed tools after a result, or where no other call may follow.
        another_tool_is_due = bool(first_token_rules.failed_tools)
        if another_tool_is_due:
            self._call_another_tool(call.tool, start_probability=text_before_call.last_start_probability)

    def _insert_call(self, call: DecodedCall) -> list[int]:
        """Close the open tool call and add it with its result to the finished text.

        Returns:
            The tokens that this adds to the text. A call without a result adds nothing.
        """
        self.call = None
        if call.result is None:
            return []

        inserted_text = format_decoded_call(call)
        self.finished.text += inserted_text
        return self.rules.vocabulary.encoding.calls([inserted_text])[0]

    def _call_another_tool(self, failed_tool: str, start_probability: float) -> None:
        """Begin a call to another tool where a call has just failed, or end the text if there is no other tool.

        Args:
            failed_tool: The tool of the failed call. It is "" if the model never completed its name, and then the text
                ends too.
            start_probability: The model's probability of ` [`, which begins a call, at this place.
        """
        since_call = self.since_call  # begins where the failed call was, and has no tokens yet
        call_index = 0

        # Tools may need a least probability of ` [`, which `callable_tools` looks up here.
        since_call.scores.start_probabilities[call_index] = start_probability
        remaining_tools = since_call.callable_tools(call_index) - since_call.first_token.failed_tools

        if failed_tool and remaining_tools and since_call.has_calls_left(call_index):
            self.begin_call()
        else:
            self._end()

    # Its parts and its end

    def drop(self) -> None:
        """-> ENDED at once, because nobody waits for the text: `generation` is not complete then."""
        self.state = TextState.ENDED

    def _build_text(self, tokens_before: list[int], max_tokens: int, first_token: FirstTokenRules) -> TextSinceCall:
        """Build a part of the text in which nothing is written yet.

        Args:
            tokens_before: All tokens before it, including the prompt.
            max_tokens: How many tokens it may have at most.
            first_token: The rules for its first token.
        """
        return TextSinceCall(
            self.rules,
            self.memory,
            tokens_before=tokens_before,
            max_tokens=max_tokens,
            first_token=first_token,
        )

    def _begin_text(self, tokens_before: list[int], first_token: FirstTokenRules) -> None:
        """Begin a new part of the text after all tokens so far, which the model has to read first.

        The text is READY then, or ENDED if no token is left.

        Args:
            tokens_before: All tokens so far, including the prompt.
            first_token: The rules for the first new token.
        """
        tokens_left = self.since_call.max_tokens - self.since_call.token_count
        self.since_call = self._build_text(tokens_before, tokens_left, first_token)
        self.state = TextState.READY
        self._forced_tokens = []
        self._piece_feed.begin_text()

        if self.since_call.is_full:
            self._end()

    def _go_on_after_removal(self, *, no_call: bool = False, no_bracket: bool = False) -> None:
        """Go on after the plain text so far, because the open call or text that looked like one is removed.

        The text is READY then, or ENDED at a limit.

        Args:
            no_call: Whether to forbid that a call begins here again.
            no_bracket: Whether to forbid an opening bracket here.
        """
        first_token_rules = self.since_call.rules_after_removal(no_call=no_call, no_bracket=no_bracket)
        all_tokens = self.since_call.all_tokens()  # with the prompt, and without the open call

        call_began_here = self.call is not None
        self._finish_text_since_call(last_text=API_START if call_began_here else None)
        self.call = None
        self._begin_text(all_tokens, first_token_rules)

    def _end(self) -> None:
        """-> ENDED: nothing more is written."""
        self.state = TextState.ENDED
        self._show_complete_text()
        self._finish_text_since_call(last_text="")

    def _show_complete_text(self) -> None:
        """Show the watcher all text since the last call, now that it is complete."""
        self._piece_feed.show_text(self.since_call, self.finished.likelihoods, whole=True)

    def _finish_text_since_call(self, last_text: str | None) -> None:
        """Add the text since the last call to `finished`, and count the tokens of the open call after it.

        Args:
            last_text: What follows the text: " [" before a call, "" at the end, None if plain text goes on there.
        """
        self.finished.add_text(self.since_call, last_text)
        if self.call is not None:
            self.finished.count_call(self.call)

        # The probability of the first call is wanted, so nothing more is recorded once a call was answered.
        no_call_was_answered = not self.memory.calls
        if no_call_was_answered:
            self.finished.record_start_probability(self.since_call, before_call=self.call is not None)
