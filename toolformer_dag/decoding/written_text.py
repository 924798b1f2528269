"""A text while it is written after a prompt: its states, and what leads from one state to the next."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from toolformer_dag.decoding.answer_end import find_answer_end, has_final_punctuation
from toolformer_dag.decoding.finished_text import FinishedText
from toolformer_dag.decoding.generation import (
    DOES_NOT_FIT,
    EMPTY_PROMPT,
    REPEATED_CALL,
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
from toolformer_dag.texts.calls import PAPER_BEGIN_MARKER
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
    `memory`. Other texts may share its `rules`. It is not safe for threads.

    | from | to | by |
    |---|---|---|
    | READY | WRITING_TEXT | `start_writing`, once its tokens are prefilled |
    | WRITING_TEXT | WRITING_CALL | `append_token` of the last token of ` [` |
    | WRITING_TEXT | READY | `stop_before_look_alike` |
    | WRITING_TEXT | ENDED | `append_token` or `stop_before_sentence`: an end token, a stop word, a sentence, a limit |
    | WRITING_CALL | WAITING | `append_token` of `->` or of the last token that fits; `end_call` |
    | WRITING_CALL | READY | `append_token` of the name of a tool that needs a likelier start: the call is removed |
    | WAITING | READY, ENDED | `continue_after_call` with the answer of the call |
    | any | ENDED | `abandon` |

    Attributes:
        prompt_index: The index of its prompt among the prompts.
        tool_context: What its tools get in addition to their input, such as the date.
        memory: The answered calls and what else counts for later tokens.
        finished_text: What was written up to the last call. When a call waits or the text has ended, it includes the
            text since that call.
        text_since_call: The tokens since the prompt or the last call, with the index of the next token.
        current_call: The call that is being written or waits for its tool. Otherwise None.
        reason: Why nothing can be written, such as EMPTY_PROMPT. Otherwise None.
    """

    def __init__(
        self, rules: DecodingRules, prompt_tokens: Sequence[int], *, prompt_index: int = 0, tool_context: str = ""
    ) -> None:
        """Start a text after its prompt.

        It is ready to be written, or has ended if the prompt is empty, fills the model's context, or no token may be
        written.

        Args:
            rules: The rules of decoding, which other texts may share.
            prompt_tokens: The tokens of the prompt.
            prompt_index: The index of the prompt among all prompts.
            tool_context: What tools get in addition to their input, such as the date.
        """
        self.rules = rules
        self.prompt_index = prompt_index
        self.tool_context = tool_context
        self.state = TextState.READY

        self.memory = TextMemory()  # the answered calls; grows with each answer
        self.finished_text = FinishedText()  # what was written up to the last call
        self.current_call: WrittenCall | None = None  # the call that is being written or waits for its tool
        self.reason: str | None = None  # why nothing can be written

        self._piece_feed = PieceFeed(rules, prompt_index)  # passes new text to `rules.watch_piece`
        self._forced_tokens: list[int] = []  # the next tokens, if a rule has chosen them and not the model

        # The tokens since the prompt. Each call, and each removal of text, replaces this object by a new one
        # (`_begin_text_since_call`).
        self.text_since_call = self._build_text_since_call(list(prompt_tokens), rules.max_new_tokens, FirstTokenRules())
        self._end_if_nothing_fits()

    def _end_if_nothing_fits(self) -> None:
        """End the text if nothing can be written.

        That is so if the prompt is empty or fills the context, which sets `reason`, or if no token may be written.
        """
        if not self.text_since_call.preceding_tokens:
            self.reason = EMPTY_PROMPT
        elif self.text_since_call.context_tokens_left <= 0:
            self.reason = DOES_NOT_FIT

        if self.reason is not None or self.text_since_call.is_full:
            self._end_text()

    # Its state

    @property
    def text(self) -> str:
        """Return the finished text with calls and their results."""
        return self.finished_text.text

    @property
    def plain_text(self) -> str:
        """Return the finished text without calls."""
        return self.finished_text.plain_text

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
        return self.text_since_call.is_full

    @property
    def can_model_choose_next(self) -> bool:
        """Return whether the model chooses the next token of plain text: no call is open, and no token is forced."""
        return self.state is TextState.WRITING_TEXT and not self._forced_tokens

    @property
    def can_begin_call(self) -> bool:
        """Return whether the rules let a call begin here, and its ` [` fits into the model's context."""
        if not self.can_model_choose_next:
            return False

        token_index = self.text_since_call.token_count
        context_left = self.text_since_call.context_tokens_left - token_index
        start_fits = context_left >= len(self.rules.vocabulary.start_tokens)
        return start_fits and self.text_since_call.can_begin_call(token_index)

    @property
    def keeps_start_probability(self) -> bool:
        """Return whether to record the model's probability that ` [`, which begins a tool call, comes next.

        It is recorded where the model chooses the next token, and where one more call is allowed or no call was
        answered yet.
        """
        if not self.can_model_choose_next:
            return False

        token_index = self.text_since_call.token_count
        # Then `Generation.start_probability` may become this probability, even if no call is allowed here.
        no_call_was_answered = not self.memory.answered_calls
        return no_call_was_answered or self.text_since_call.has_calls_left(token_index)

    @property
    def max_tokens_until_prefill(self) -> int:
        """Return how many tokens the text may have, with the prompt and an open call, before its next prefill.

        The prefill is when the model reads all tokens of the text again.
        """
        since_call = self.text_since_call
        return len(since_call.preceding_tokens) + since_call.max_tokens + self.rules.max_call_tokens

    def build_generation(self) -> Generation:
        """Return what was written, once the text has ended."""
        return self.finished_text.build_generation(self.memory, self.reason)

    # 1. Prefill

    def get_tokens_to_prefill(self) -> list[int]:
        """Return the tokens of the prompt and of all text so far, which the model reads before it goes on."""
        return self.text_since_call.preceding_tokens

    def start_writing(self) -> None:
        """Begin to write plain text, once the model has read the tokens (READY -> WRITING_TEXT).

        A text that was dropped in the meantime stays ENDED.
        """
        if self.state is TextState.READY:
            self.state = TextState.WRITING_TEXT

    # 2. Choose

    def record_start_score(self, start_score: StartScore) -> None:
        """Record how likely ` [`, which begins a tool call, is after the last token.

        A tool may need a minimum probability of ` [`, and the rules may trace it for every place of the text.

        Args:
            start_score: The model's probability of ` [`, and how many tokens are likelier.
        """
        token_index = self.text_since_call.token_count
        scores = self.text_since_call.token_scores
        if self.keeps_start_probability:
            scores.start_probability_by_index[token_index] = start_score.probability
        if self.rules.traces_start_chances:
            scores.start_score_by_index[token_index] = start_score

    def record_likeliest_tokens(self, log_probability_by_token: dict[int, float]) -> None:
        """Record the log probabilities of the likeliest next tokens, by token and likeliest first."""
        token_index = self.text_since_call.token_count
        self.text_since_call.token_scores.likeliest_by_index[token_index] = log_probability_by_token

    def stop_before_sentence(self, likeliest_token: int) -> None:
        """End the text if it is a complete sentence and the likeliest next token does not continue it.

        "It was 3." goes on before "5" and ends before " Then". Nothing happens inside a tool call.

        Args:
            likeliest_token: The likeliest next token.
        """
        if not self.can_model_choose_next:
            return

        text = self._get_text_without_calls()
        if not has_final_punctuation(text):
            return

        text_with_token = text + self.text_since_call.decode_addition(likeliest_token)
        # The text has only this one sentence, for it would have ended after an earlier one. The sentence ends where the
        # text does, unless the token continues it.
        first_sentence_length = find_answer_end(text_with_token)
        token_begins_next_sentence = first_sentence_length == len(text)
        is_end_token = likeliest_token in self.rules.vocabulary.end_tokens
        if token_begins_next_sentence or is_end_token:
            self._end_text()

    def _get_text_without_calls(self) -> str:
        """Return all text so far, without calls and their results, while plain text is being written."""
        return self.finished_text.plain_text + self.text_since_call.decode_text()

    def stop_before_look_alike(self, likeliest_token: int) -> None:
        """Remove text that only looks like a tool call, if the likeliest next token would complete it.

        Such text is the name of a tool after a wrong bracket, as in `<QA(`. It is removed from its bracket on, and no
        bracket may be written there again. Nothing happens inside a call.

        Args:
            likeliest_token: The likeliest next token, which is not appended.
        """
        if not self.can_model_choose_next:
            return

        # The index of the look-alike's first bracket, in characters of the text since the call.
        look_alike_start = self.text_since_call.find_look_alike_start(likeliest_token)
        if look_alike_start is None:
            return

        self.text_since_call.shorten_text(look_alike_start)
        self._show_complete_text()  # before new text begins, whose characters are counted from 0
        self.finished_text.look_alike_count += 1
        self._continue_after_removal(forbids_opening_bracket=True)

    def begin_call(self) -> None:
        """Make the tokens of ` [`, which begins a call, the next tokens, however likely they are."""
        self._forced_tokens = list(self.rules.vocabulary.start_tokens)

    def is_forbidden(self, token: int) -> bool:
        """Return whether a rule forbids `token` as the next one of the text (`TextSinceCall.is_forbidden`)."""
        return self.can_model_choose_next and self.text_since_call.is_forbidden(token)

    def get_next_token(self, likeliest_token: int) -> int:
        """Return the token to append next: a forced one if there is any, else `likeliest_token`."""
        return self._forced_tokens[0] if self._forced_tokens else likeliest_token

    def append_token(self, token: int) -> None:
        """Append a token to the open call, or to the plain text if no call is open.

        This may change the state, as the table of the class says.
        """
        if self.current_call is not None:
            self._append_token_to_call(self.current_call, token)
        else:
            self._append_token_to_text(token)

    def _append_token_to_text(self, token: int) -> None:
        """Append a token to the plain text.

        If it completes ` [` and one more call is allowed, a tool call begins. Otherwise the text may end, which it does
        at an end token, a stop word, a sentence or a limit.
        """
        # If a rule has chosen the next tokens, the first of them is this token.
        del self._forced_tokens[:1]

        if token in self.rules.vocabulary.end_tokens:
            self._end_text()
            return

        self.text_since_call.tokens.append(token)
        if self._ends_with_call_start():
            self._open_call()
        else:
            self._end_or_show_text()

    def _end_or_show_text(self) -> None:
        """End the text if its answer is complete or a limit is reached, otherwise show the watcher what is new."""
        answer_length = self._find_answer_length()
        if answer_length is not None:
            self._end_answer(answer_length)
        elif self.text_since_call.is_full and not self._forced_tokens:
            # A limit is reached. Forced tokens, those of ` [`, may exceed it, so the text does not end before them.
            self._end_text()
        else:
            self._piece_feed.show_text(self.text_since_call, self.finished_text.token_likelihoods, is_complete=False)

    def _end_answer(self, answer_length: int) -> None:
        """End the text after a number of characters, which are counted without calls (WRITING_TEXT -> ENDED)."""
        # The answer may end before the last call. Then no character since that call is left.
        self.text_since_call.cut_length = max(answer_length - len(self.finished_text.plain_text), 0)
        self._end_text()

    def _ends_with_call_start(self) -> bool:
        """Return whether the text now ends with ` [` and one more call is allowed there."""
        start_tokens = self.rules.vocabulary.start_tokens
        ends_with_start = self.text_since_call.tokens[-len(start_tokens) :] == start_tokens
        start_index = self.text_since_call.token_count - len(start_tokens)
        return ends_with_start and self.text_since_call.has_calls_left(start_index)

    def _find_answer_length(self) -> int | None:
        """Find where the answer ends, if the rules end it at a stop word or after one sentence.

        Returns:
            The number of characters, not counting calls, before the first stop word or up to the end of the first
            sentence or line, whichever is smaller. None if the answer goes on.
        """
        if not (self.rules.stop_words or self.rules.ends_after_one_sentence):
            return None

        text = self._get_text_without_calls()
        possible_ends = [text.find(word) for word in self.rules.stop_words if word in text]
        if self.rules.ends_after_one_sentence:
            sentence_end = find_answer_end(text)
            if sentence_end is not None:
                possible_ends.append(sentence_end)
        return min(possible_ends, default=None)

    # 3. Write a call

    def _open_call(self) -> None:
        """Open a tool call at the ` [` that was just written (WRITING_TEXT -> WRITING_CALL)."""
        # The tokens of ` [` belong to the call, not to the plain text before it.
        start_length = len(self.rules.vocabulary.start_tokens)
        del self.text_since_call.tokens[-start_length:]
        self._show_complete_text()

        self.current_call = self._build_call()
        self.state = TextState.WRITING_CALL
        self._piece_feed.begin_call()
        self._piece_feed.show_call(self.current_call, is_complete=False)

    def _build_call(self) -> WrittenCall:
        """Build an empty tool call, which begins after the text so far.

        Its grammar says which tools it may name and how many tokens it may have.
        """
        vocabulary = self.rules.vocabulary

        # What is left of the context after the text since the call and the tokens of ` [`, which are not in this text.
        # `context_tokens_left` is counted at the beginning of this text.
        start_length = len(vocabulary.start_tokens)
        context_left = self.text_since_call.context_tokens_left - self.text_since_call.token_count - start_length
        max_tokens = min(self.rules.max_call_tokens, context_left)

        tools = self._choose_tools_for_call()
        grammar = vocabulary.build_call_form(tools, self.rules.schemas_by_tool, max_tokens=max_tokens)
        return WrittenCall(vocabulary, grammar)

    def _choose_tools_for_call(self) -> frozenset[str]:
        """Choose the tools that a new call may name after the text so far.

        Usually these are all tools that the rules offer for this text. Where a call has just failed, they are the
        other tools, if ` [`, which begins a call, is likely enough for them.
        """
        token_index = self.text_since_call.token_count
        failed_tools = self.text_since_call.first_token_rules.failed_tool_names
        if failed_tools:
            return self.text_since_call.get_callable_tools(token_index) - failed_tools
        # For some of them, ` [` may not be likely enough. A call to them is removed once the name is written.
        return self.text_since_call.get_offered_tools(token_index)

    def _append_token_to_call(self, call: WrittenCall, token: int) -> None:
        """Append a token to the open tool call.

        Then the call is removed if ` [` was not likely enough for its tool, or waits for its tool if it has ended.
        Otherwise the watcher gets what is new.
        """
        call.append_token(token)
        if self._needs_likelier_start(call):
            self._continue_after_removal(forbids_call=True)
        elif call.has_ended:
            self.end_call()
        else:
            self._piece_feed.show_call(call, is_complete=False)

    def _needs_likelier_start(self, call: WrittenCall) -> bool:
        """Return whether the name of the tool is written and ` [` was not likely enough for this tool.

        A tool may need a minimum probability of ` [` (`rules.min_start_probability_by_tool`).
        """
        if not self.rules.min_start_probability_by_tool:
            return False

        tool, bracket, _ = call.decode_body().partition("(")
        name_is_complete = bool(bracket)
        if not name_is_complete:
            return False

        call_token_index = self.text_since_call.token_count
        # The tools whose minimum the probability of ` [` reached where the call began.
        callable_tools = self.text_since_call.get_callable_tools(call_token_index)
        return tool not in callable_tools

    def end_call(self) -> None:
        """End the open call, which is complete or can get no further token (WRITING_CALL -> WAITING)."""
        assert self.current_call is not None
        self.state = TextState.WAITING
        self._piece_feed.show_call(self.current_call, is_complete=True)
        self._finish_text_since_call(following_text=PAPER_BEGIN_MARKER)

    # 4. Wait for its tool

    def parse_open_call(self) -> DecodedCall:
        """Return the waiting call, parsed and without a result; `reason` is set if it cannot be run."""
        assert self.current_call is not None
        return parse_written_call(self.current_call.build_closed_body())

    def build_tool_call(self) -> ToolCall:
        """Return the input and the context with which the tool of the waiting call is run."""
        return ToolCall(self.parse_open_call().input, self.tool_context)

    # 5. Go on

    def drop_repeated_result(self, call: DecodedCall) -> DecodedCall:
        """Take the result away from an answered call that only repeats an earlier one.

        Returns:
            The call without its result and with the reason REPEATED_CALL, if an earlier call of this text has the same
            tool and input, and a result. Otherwise the call, unchanged.
        """
        is_repetition = call.result is not None and self.memory.has_same_call_with_result(call)
        if is_repetition:
            return replace(call, result=None, reason=REPEATED_CALL)
        return call

    def continue_after_call(self, answered_call: DecodedCall) -> None:
        """Go on after the open tool call, now that its tool has answered (WAITING -> READY or ENDED).

        A call with a result becomes part of the text. A call without one is left out, and another tool may be called in
        its place.

        Args:
            answered_call: The answered call, as `drop_repeated_result` returns it.
        """
        text_before_call = self.text_since_call  # the text between the previous call and this one
        first_token_rules = text_before_call.build_rules_after_call(answered_call)
        self.memory.add_call(answered_call, follows_result=text_before_call.is_right_after_result)

        inserted_tokens = self._insert_call(answered_call)
        all_tokens = text_before_call.list_all_tokens() + inserted_tokens
        self._piece_feed.show_answered_call(answered_call)

        # From here on, `self.text_since_call` is the text after the call.
        self._begin_text_since_call(all_tokens, first_token_rules)

        # The tools that gave no result at this place. There are none after a result, or if no other call may follow.
        another_tool_is_due = bool(first_token_rules.failed_tool_names)
        if another_tool_is_due:
            self._call_another_tool(answered_call.tool, start_probability=text_before_call.last_start_probability)

    def _insert_call(self, call: DecodedCall) -> list[int]:
        """Close the open tool call and add it with its result to the finished text.

        Returns:
            The tokens that this adds to the text. A call without a result adds nothing.
        """
        self.current_call = None
        if call.result is None:
            return []

        inserted_text = format_decoded_call(call)
        self.finished_text.text += inserted_text
        [inserted_tokens] = self.rules.vocabulary.encoding.encode_calls([inserted_text])
        return inserted_tokens

    def _call_another_tool(self, failed_tool: str, start_probability: float) -> None:
        """Begin a call to another tool where a call has just failed, or end the text if there is no other tool.

        Args:
            failed_tool: The tool of the failed call. It is "" if the model never completed its name, and then the text
                ends too.
            start_probability: The model's probability of ` [`, which begins a call, at this place.
        """
        since_call = self.text_since_call  # begins where the failed call was, and has no tokens yet
        call_token_index = 0  # a call would begin before the first of them

        # Tools may need a minimum probability of ` [`, which `get_callable_tools` looks up here.
        since_call.token_scores.start_probability_by_index[call_token_index] = start_probability
        failed_tools = since_call.first_token_rules.failed_tool_names
        remaining_tools = since_call.get_callable_tools(call_token_index) - failed_tools

        if failed_tool and remaining_tools and since_call.has_calls_left(call_token_index):
            self.begin_call()
        else:
            self._end_text()

    # Its parts and its end

    def abandon(self) -> None:
        """End the text at once, because nobody waits for it any more.

        The result of `build_generation` is not complete then.
        """
        self.state = TextState.ENDED

    def _build_text_since_call(
        self, preceding_tokens: list[int], max_tokens: int, first_token_rules: FirstTokenRules
    ) -> TextSinceCall:
        """Build the empty object that collects the next tokens, up to the next call or removal of text.

        Args:
            preceding_tokens: All tokens before it, including the prompt.
            max_tokens: How many tokens it may have at most.
            first_token_rules: The rules for its first token.
        """
        return TextSinceCall(
            self.rules,
            self.memory,
            preceding_tokens=preceding_tokens,
            max_tokens=max_tokens,
            first_token_rules=first_token_rules,
        )

    def _begin_text_since_call(self, preceding_tokens: list[int], first_token_rules: FirstTokenRules) -> None:
        """Replace `text_since_call` by an empty one, which the model continues after it has read all tokens so far.

        The new one may have as many tokens as the old one had left. The state of the text is READY then, or ENDED if
        none is left.

        Args:
            preceding_tokens: All tokens so far, including the prompt.
            first_token_rules: The rules for the first new token.
        """
        tokens_left = self.text_since_call.max_tokens - self.text_since_call.token_count
        self.text_since_call = self._build_text_since_call(preceding_tokens, tokens_left, first_token_rules)
        self.state = TextState.READY
        self._forced_tokens = []
        self._piece_feed.begin_text()

        if self.text_since_call.is_full:
            self._end_text()

    def _continue_after_removal(self, *, forbids_call: bool = False, forbids_opening_bracket: bool = False) -> None:
        """Remove the open call, if there is one, and go on after the plain text before it.

        Text that only looked like a call, such as `<QA(`, was removed from `text_since_call` before. The state is READY
        (the model reads the tokens again) then, or ENDED at a limit.

        Args:
            forbids_call: Whether to forbid that a call begins here again.
            forbids_opening_bracket: Whether to forbid an opening bracket here.
        """
        first_token_rules = self.text_since_call.build_rules_after_removal(
            forbids_call=forbids_call, forbids_opening_bracket=forbids_opening_bracket
        )
        all_tokens = self.text_since_call.list_all_tokens()  # with the prompt, and without the open call

        # A removed call counts in the recorded chances of calls too, because the model did begin it here.
        call_began_here = self.current_call is not None
        following_text = PAPER_BEGIN_MARKER if call_began_here else None
        self._finish_text_since_call(following_text)
        self.current_call = None
        self._begin_text_since_call(all_tokens, first_token_rules)

    def _end_text(self) -> None:
        """End the text: the watcher gets what is left of it, and nothing more is written."""
        self.state = TextState.ENDED
        self._show_complete_text()
        self._finish_text_since_call(following_text="")

    def _show_complete_text(self) -> None:
        """Show the watcher all text since the last call, now that it is complete."""
        self._piece_feed.show_text(self.text_since_call, self.finished_text.token_likelihoods, is_complete=True)

    def _finish_text_since_call(self, following_text: str | None) -> None:
        """Add the text since the last call to `finished_text`, which collects what the model wrote.

        If a call is open after it, its tokens are counted too, but its text is not added here.

        Args:
            following_text: What follows the text: " [" before a call, "" at the end, None if plain text goes on there.
        """
        self.finished_text.add_text(self.text_since_call, following_text)
        if self.current_call is not None:
            self.finished_text.count_call_tokens(self.current_call)

        # Recorded is how likely the first call was to begin, so nothing more is recorded once a call was answered.
        no_call_was_answered = not self.memory.answered_calls
        if no_call_was_answered:
            self.finished_text.record_start_probability(
                self.text_since_call, is_before_call=self.current_call is not None
            )
