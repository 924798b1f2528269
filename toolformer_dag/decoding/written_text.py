"""A text while it is written after a prompt: its states, and what leads from one state to the next."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from toolformer_dag.decoding.answer_end import answer_end, may_have_ended
from toolformer_dag.decoding.generation import (
    DOES_NOT_FIT,
    EMPTY_PROMPT,
    REPEATED,
    DecodedCall,
    Generation,
    StartChance,
    TokenLikelihood,
    call_text,
)
from toolformer_dag.decoding.piece_feed import PieceFeed
from toolformer_dag.decoding.place_scores import StartScore
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.stretch import CallSite, Stretch
from toolformer_dag.decoding.written_call import WrittenCall, read_call
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

    There is one object per text, from its prompt to its end, and all that rules have to remember about a text is in
    it: `rules` are shared by all texts, and a `Stretch` ends with each call. Not safe for threads.

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

    - `prompt`: the index of the prompt among those of a batch.
    - `context`: what its tools get beside their input, such as the date.
    - `stretch`: the tokens since the prompt or the last call, with the position of the next token (`Stretch`).
    - `call`: the call that is being written or waits for its tool; else None.
    - `text`: what was written before the stretch, with calls. When a call waits or the text has ended, it includes the
      stretch.
    - `plain`: the same without calls.
    - `calls`: the calls that were answered, with results or with reasons.
    - `reason`: why nothing can be written, such as EMPTY_PROMPT; else None.
    """

    def __init__(
        self, rules: DecodingRules, prompt_tokens: Sequence[int], *, prompt: int = 0, context: str = ""
    ) -> None:
        """Start in the state READY after the tokens of a prompt; ENDED if the prompt is empty or fills the context.

        prompt: its index among the prompts. context: what tools get beside their input, such as the date.
        """
        self.rules = rules
        self.prompt = prompt
        self.context = context
        self.state = TextState.READY
        self.call: WrittenCall | None = None
        self.text = ""
        self.plain = ""
        self.calls: list[DecodedCall] = []
        self.reason: str | None = None
        # What finished stretches and calls add to `generation`.
        self._token_count = 0  # tokens that the model chose
        self._look_alikes = 0  # removed texts that only looked like calls
        self._chances: list[StartChance] = []  # the model's p of ` [` before each token
        self._likelihoods: list[TokenLikelihood] = []  # log p of each token outside calls
        self._p_start: float | None = None  # p of ` [` where the first call began; before it, the largest p
        self._feed = PieceFeed(rules, prompt)  # passes new text to `rules.watch`
        self._forced: list[int] = []  # the next tokens, chosen by a rule and not by the model
        self.stretch = Stretch(
            rules, prefix=list(prompt_tokens), budget=rules.max_new_tokens, site=CallSite(), after_call=False
        )
        self._end_if_nothing_fits()

    def _end_if_nothing_fits(self) -> None:
        """End the text if its prompt is empty, fills the context, or no token may be written; set `reason`."""
        if not self.stretch.prefix:
            self.reason = EMPTY_PROMPT
        elif self.stretch.context_left <= 0:
            self.reason = DOES_NOT_FIT
        if self.reason is not None or self.stretch.is_full:
            self._end()

    # Its state

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
        return self.stretch.is_full

    @property
    def model_chooses_next(self) -> bool:
        """Return whether the model chooses the next token of plain text: no call is open, and no token is forced."""
        return self.state is TextState.WRITING_TEXT and not self._forced

    @property
    def may_begin_call(self) -> bool:
        """Return whether the rules let a call begin here and its ` [` fits into the context."""
        stretch = self.stretch
        fits = stretch.context_left - stretch.token_count >= len(self.rules.vocabulary.start)
        return self.model_chooses_next and fits and stretch.may_begin_call(stretch.token_count)

    @property
    def notes_start(self) -> bool:
        """Return whether to keep p of ` [` here: one more call is allowed, or no call was made yet."""
        return self.model_chooses_next and (self.stretch.has_calls_left(self.stretch.token_count) or not self.calls)

    @property
    def most_tokens(self) -> int:
        """Return how long the text may become, in tokens, before its next prefill: prompt, text and an open call."""
        return len(self.stretch.prefix) + self.stretch.budget + self.rules.max_call_tokens

    def generation(self) -> Generation:
        """Return what was written, once the text has ended."""
        return Generation(
            text=self.text,
            plain=self.plain,
            calls=tuple(self.calls),
            tokens=self._token_count,
            reason=self.reason,
            look_alikes=self._look_alikes,
            chances=tuple(self._chances),
            likelihoods=tuple(self._likelihoods),
            p_start=self._p_start,
        )

    # 1. Prefill

    def tokens_to_prefill(self) -> list[int]:
        """Return the tokens of the prompt and of all text so far, which the model reads before it goes on."""
        return self.stretch.prefix

    def start_writing(self) -> None:
        """READY -> WRITING_TEXT, once the model has read the tokens. A text dropped in the meantime stays ENDED."""
        if self.state is TextState.READY:
            self.state = TextState.WRITING_TEXT

    # 2. Choose

    def note_start(self, start: StartScore) -> None:
        """Keep the model's p of ` [` after the last token, for `min_probability` and for the trace."""
        scores = self.stretch.scores
        if self.notes_start:
            scores.p_starts[self.stretch.token_count] = start.probability
        if self.rules.traced:
            scores.starts[self.stretch.token_count] = start

    def note_likeliest(self, log_probabilities: dict[int, float]) -> None:
        """Keep log p of the likeliest next tokens, by token."""
        self.stretch.scores.likeliest[self.stretch.token_count] = log_probabilities

    def stop_before_sentence(self, token: int) -> None:
        """End the text if it is a complete sentence and `token`, the likeliest next one, begins another.

        "It was 3." goes on before "5" and ends before " Then". Does nothing inside a tool call.
        """
        if not self.model_chooses_next:
            return
        text = self._text_without_calls()
        if not may_have_ended(text):
            return
        is_end_token = token in self.rules.vocabulary.ends
        sentence_length = answer_end(text + self.stretch.addition(token))  # None while the first sentence goes on
        if is_end_token or sentence_length == len(text):
            self._end()

    def _text_without_calls(self) -> str:
        """Return all text so far, without calls and their results, while plain text is being written."""
        return self.plain + self.stretch.text()

    def stop_before_look_alike(self, token: int) -> None:
        """WRITING_TEXT -> READY if `token`, the likeliest next one, would complete a look-alike of a call.

        A look-alike is the name of a tool after another bracket, such as `<QA(`. It is removed, bracket included. Then
        the text is prefilled again, and its next token may not be a bracket. Does nothing inside a tool call.
        """
        if not self.model_chooses_next:
            return
        look_alike_start = self.stretch.look_alike_start(token)  # its first character; None without one
        if look_alike_start is not None:
            self.stretch.shorten_to(look_alike_start)
            self._feed.show_text(self.stretch, self._likelihoods, whole=True)
            self._look_alikes += 1
            self._restart_stretch(no_bracket=True)

    def begin_call(self) -> None:
        """Make ` [`, which begins a call, the next tokens, whatever the model's scores."""
        self._forced = list(self.rules.vocabulary.start)

    def forbids(self, token: int) -> bool:
        """Return whether a rule forbids `token` as the next one of the text (`Stretch.forbids`)."""
        return self.model_chooses_next and self.stretch.forbids(token)

    def next_token(self, likeliest: int) -> int:
        """Return the token to append next: a forced one if there is any, else `likeliest`."""
        return self._forced[0] if self._forced else likeliest

    def append(self, token: int) -> None:
        """Append a token to the open call, or else to the text; this may change the state (table of the class)."""
        if self.call is not None:
            self._append_to_call(self.call, token)
        else:
            self._append_to_text(token)

    def _append_to_text(self, token: int) -> None:
        """Append a token outside calls; then open a call, end the text, or show the watcher what is new.

        A call opens once ` [` is complete. The text ends at an end token, a stop word, the end of its only sentence,
        or a limit of tokens.
        """
        del self._forced[:1]  # if a token was forced, it is this one
        if token in self.rules.vocabulary.ends:
            self._end()
            return
        self.stretch.written.append(token)
        if self._ends_with_call_start():
            self._open_call()
            return
        answer_length = self._answer_length()
        if answer_length is not None:
            self._end_answer(answer_length)
        elif self.stretch.is_full and not self._forced:  # the forced tokens of ` [` may exceed the limit
            self._end()
        else:
            self._feed.show_text(self.stretch, self._likelihoods, whole=False)

    def _end_answer(self, answer_length: int) -> None:
        """-> ENDED: end the text after so many characters of the text without calls."""
        # The answer may end before the stretch begins: then no character of the stretch is left.
        self.stretch.characters = max(answer_length - len(self.plain), 0)
        self._end()

    def _ends_with_call_start(self) -> bool:
        """Return whether the text now ends with ` [` and one more call is allowed there."""
        start_tokens = self.rules.vocabulary.start
        ends_with_start = self.stretch.written[-len(start_tokens) :] == start_tokens
        return ends_with_start and self.stretch.has_calls_left(self.stretch.token_count - len(start_tokens))

    def _answer_length(self) -> int | None:
        """Return after how many characters of the text without calls the answer ends; None if it goes on.

        It ends before the first stop word of `rules.stop` and, under `one_sentence`, after its first sentence or line.
        """
        if not (self.rules.stop or self.rules.one_sentence):
            return None
        text = self._text_without_calls()
        ends = [text.find(word) for word in self.rules.stop if word in text]
        if self.rules.one_sentence:
            sentence_end = answer_end(text)
            if sentence_end is not None:
                ends.append(sentence_end)
        return min(ends, default=None)

    # 3. Write a call

    def _open_call(self) -> None:
        """WRITING_TEXT -> WRITING_CALL: open a tool call at the ` [` that was just written.

        Moves ` [` from the stretch to the call, and fixes the call's grammar: the tools that it may name, and the
        maximum number of its tokens.
        """
        start_tokens = self.rules.vocabulary.start
        del self.stretch.written[-len(start_tokens) :]
        self._feed.show_text(self.stretch, self._likelihoods, whole=True)
        context_left = self.stretch.context_left - self.stretch.token_count - len(start_tokens)
        form = self.rules.vocabulary.form(
            self._tools_of_new_call(), self.rules.schemas, max_tokens=min(self.rules.max_call_tokens, context_left)
        )
        self.call = WrittenCall(self.rules.vocabulary, form)
        self.state = TextState.WRITING_CALL
        self._feed.begin_call()
        self._feed.show_call(self.call, is_over=False)

    def _tools_of_new_call(self) -> frozenset[str]:
        """Return the tools that a call after the last token may name.

        After a failed call these are the other tools that can be called. Else they include tools for which p of ` [` is
        too small: a call to one is removed once its name is written (`_needs_likelier_start`).
        """
        place = self.stretch.token_count
        failed_tools = self.stretch.site.failed_tools
        if failed_tools:
            return self.stretch.callable_tools(place) - failed_tools
        return self.stretch.offered_tools(place)

    def _append_to_call(self, call: WrittenCall, token: int) -> None:
        """Append a token to the open call; then remove the call, let it wait for its tool, or show what is new."""
        call.append(token)
        if self._needs_likelier_start(call):
            self._restart_stretch(no_start=True)
        elif call.has_ended:
            self.end_call()
        else:
            self._feed.show_call(call, is_over=False)

    def _needs_likelier_start(self, call: WrittenCall) -> bool:
        """Return whether the tool's name is written and p of ` [` was below the tool's `min_probability`."""
        if not self.rules.min_probability:
            return False
        tool, bracket, _ = call.body().partition("(")
        return bool(bracket) and tool not in self.stretch.callable_tools(self.stretch.token_count)

    def end_call(self) -> None:
        """WRITING_CALL -> WAITING: the call is complete, or no further token fits it."""
        assert self.call is not None
        self.state = TextState.WAITING
        self._feed.show_call(self.call, is_over=True)
        self._close_stretch(last_text=API_START)

    # 4. Wait for its tool

    def open_call(self) -> DecodedCall:
        """Return the waiting call, parsed and without a result; `reason` is set if it cannot be run."""
        assert self.call is not None
        return read_call(self.call.closed_body())

    def tool_call(self) -> ToolCall:
        """Return the input and the context with which the tool of the waiting call is run."""
        return ToolCall(self.open_call().input, self.context)

    # 5. Go on

    def accepted(self, call: DecodedCall) -> DecodedCall:
        """Return `call` unchanged, or without its result and with the reason REPEATED if it is a repetition.

        A repetition has the tool and the input of an earlier call of this text that has a result.
        """
        if call.result is None:
            return call
        for earlier in self.calls:
            is_same = (earlier.tool, earlier.input) == (call.tool, call.input)
            if is_same and earlier.result is not None:
                return replace(call, result=None, reason=REPEATED)
        return call

    def go_on(self, call: DecodedCall) -> None:
        """WAITING -> READY or ENDED: go on after the open call, now that its tool has answered.

        `call`: the answered call, as `accepted` returns it. With a result it becomes part of the text, as
        ` [Calculator(2+3) -> 5]`. Without one it is left out, and another tool is called at the same place. But if it
        repeats a call or directly follows one, the text just goes on.
        """
        p_start = self.stretch.scores.p_starts.get(self.stretch.token_count, 0.0)  # p of ` [` where the call began
        next_site = self._site_after(call)
        tokens = self.stretch.tokens()
        if call.result is not None:
            inserted_text = call_text(call)
            tokens += self.rules.vocabulary.encoding.calls([inserted_text])[0]
            self.text += inserted_text
        self.calls.append(call)
        self.call = None
        self._feed.show_answer(call)
        self._begin_stretch(tokens, next_site)
        is_another_tool_next = bool(next_site.failed_tools)
        if is_another_tool_next:
            self._call_another_tool(call.tool, p_start)

    def _site_after(self, call: DecodedCall) -> CallSite:
        """Return which calls may begin where the text goes on after `call`, which was just answered.

        - After a result, another call may follow at once, in a chain.
        - After a repeated call, or a failed one that directly followed another call, no call may begin there.
        - After any other failed call, another tool is called there.
        """
        site = self._site_here()
        follows_another_call = self.stretch.is_right_after_result
        if not follows_another_call:
            site = replace(site, places_with_calls=site.places_with_calls + 1)

        if call.result is not None:
            return replace(site, results_before=site.results_before + 1)
        if follows_another_call or call.reason == REPEATED:
            return replace(site, no_start=True)
        return replace(site, failed_tools=self.stretch.site.failed_tools | {call.tool})

    def _call_another_tool(self, failed_tool: str, p_start: float) -> None:
        """Begin a call to another tool where a call just failed; end the text if no tool is left.

        - failed_tool: the tool of the failed call; "" if its name was never completed, which ends the text.
        - p_start: the model's p of ` [` there, which decides by `min_probability` what tools can be called.
        """
        stretch = self.stretch  # a new one without tokens: the failed call was at its place 0
        stretch.scores.p_starts[0] = p_start
        remaining_tools = stretch.callable_tools(0) - stretch.site.failed_tools
        if failed_tool and remaining_tools and stretch.has_calls_left(0):
            self.begin_call()
        else:
            self._end()

    # Stretches and ends

    def drop(self) -> None:
        """-> ENDED at once, because nobody waits for the text: `generation` is not complete then."""
        self.state = TextState.ENDED

    def _begin_stretch(self, tokens: list[int], site: CallSite) -> None:
        """Begin a new stretch after `tokens`, which are all tokens of the text so far: READY, or ENDED at a limit.

        It has the token budget that the last stretch left over. `site`: which calls may begin at its first token.
        """
        budget_left = self.stretch.budget - self.stretch.token_count
        self.stretch = Stretch(self.rules, prefix=tokens, budget=budget_left, site=site, after_call=bool(self.calls))
        self.state = TextState.READY
        self._forced = []
        self._feed.begin_stretch()
        if self.stretch.is_full:
            self._end()

    def _restart_stretch(self, *, no_start: bool = False, no_bracket: bool = False) -> None:
        """-> READY: go on after the last token of the stretch, without the open call if there is one.

        - no_start: no call may begin there again.
        - no_bracket: no opening bracket may come there again.
        """
        # A ban on calls at the first token of the stretch stays while nothing is written after it.
        stays_forbidden = self.stretch.token_count == 0 and self.stretch.site.no_start
        site = replace(self._site_here(), no_start=no_start or stays_forbidden, no_bracket=no_bracket)
        tokens = self.stretch.tokens()
        self._close_stretch(last_text=None if self.call is None else API_START)
        self.call = None
        self._begin_stretch(tokens, site)

    def _site_here(self) -> CallSite:
        """Return which calls may begin after the last token, as if none had been tried there."""
        site = self.stretch.site
        is_right_after_calls = self.stretch.token_count == 0
        return CallSite(site.places_with_calls, results_before=site.results_before if is_right_after_calls else 0)

    def _end(self) -> None:
        """-> ENDED: nothing more is written."""
        self.state = TextState.ENDED
        self._feed.show_text(self.stretch, self._likelihoods, whole=True)
        self._close_stretch(last_text="")

    def _close_stretch(self, last_text: str | None) -> None:
        """Add the finished stretch, and the open call after it, to what `generation` returns.

        That is: its text, the number of its tokens, and the model's probabilities. `last_text`: what follows its last
        token: ` [` before a call, "" at the end of the text, None if plain text goes on there.
        """
        stretch = self.stretch
        text = stretch.text()
        self.text += text
        self.plain += text
        self._token_count += stretch.token_count
        if self.call is not None:
            self._token_count += len(self.rules.vocabulary.start) + len(self.call.tokens)
        self._chances += stretch.start_chances(last_text)
        if self.rules.likeliest is not None:
            self._likelihoods += [stretch.likelihood(place) for place in range(stretch.token_count)]
        self._note_p_start()

    def _note_p_start(self) -> None:
        """Set `_p_start` to p of ` [` where the first call began; before that call, to the largest p so far."""
        if self.calls:
            return
        p_starts = self.stretch.scores.p_starts
        if self.call is not None:
            self._p_start = p_starts.get(self.stretch.token_count)
        else:
            self._p_start = max([self._p_start or 0.0, *p_starts.values()])
