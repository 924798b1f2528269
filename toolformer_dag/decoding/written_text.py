"""A text while it is written: the states from its prompt to its end, and what leads from one to the next."""

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
    """What a text is doing. The numbers are those of the walk in `toolformer_dag.decoding`."""

    READY = "ready"  # waits for its tokens to be prefilled (1)
    WRITING_TEXT = "writing text"  # gets a token at each step of its batch (2)
    WRITING_CALL = "writing a call"  # so too, after ` [` (3)
    WAITING = "waiting for a tool"  # has an open call, and is in no batch (4)
    ENDED = "ended"


class WrittenText:
    """A text that is being written after a prompt, with its calls.

    There is one object per text, from its prompt to its end. What a rule has to remember about a text has its
    place here: `rules` are shared by all texts, and a `Stretch` ends with each call. Not safe for threads.

    | from | to | by |
    |---|---|---|
    | READY | WRITING_TEXT | `start_writing`, once its tokens are prefilled |
    | WRITING_TEXT | WRITING_CALL | `append` of the last token of ` [` |
    | WRITING_TEXT | READY | `stop_before_look_alike` |
    | WRITING_TEXT | ENDED | `append` or `stop_before_sentence`: an end token, a stop word, a sentence, a limit |
    | WRITING_CALL | WAITING | `append` of `->` or of the last token that fits; `end_call` |
    | WRITING_CALL | READY | `append` of the name of a tool that needs a likelier start: the call is taken back |
    | WAITING | READY, ENDED | `go_on` with the answer of the call |
    | any | ENDED | `drop` |

    - `prompt`: the index of the prompt. `context`: what its calls are run with, such as the date.
    - `stretch`: the part since the prompt or the last call (see there). `call`: the open call, if there is one.
    - `text`, `plain`: what was written before the stretch, with calls and without; once the stretch is over, because
      a call waits or the text has ended, with it.
    - `calls`: the answered calls. `reason`: why nothing can be written; else None.
    """

    def __init__(
        self, rules: DecodingRules, prompt_tokens: Sequence[int], *, prompt: int = 0, context: str = ""
    ) -> None:
        """Begin READY after the tokens of a prompt; ENDED where the prompt is empty or fills the context.

        prompt: its index among the prompts. context: what tools are told beside their input, such as the date.
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
        self._tokens = 0  # chosen by the model in stretches and calls that are over
        self._look_alikes = 0
        self._chances: list[StartChance] = []
        self._likelihoods: list[TokenLikelihood] = []  # of the tokens of stretches that are over
        self._p_start: float | None = None
        self._feed = PieceFeed(rules, prompt)
        self._forced: list[int] = []  # the next tokens, whatever the model's scores
        self.stretch = Stretch(rules, list(prompt_tokens), rules.max_new_tokens, CallSite(), after_call=False)
        if not prompt_tokens:
            self.reason = EMPTY_PROMPT
        elif self.stretch.room <= 0:
            self.reason = DOES_NOT_FIT
        if self.reason is not None or self.stretch.is_full:
            self._end()

    # What it is doing

    @property
    def is_writing(self) -> bool:
        """Return whether it takes the next token of its batch."""
        return self.state in (TextState.WRITING_TEXT, TextState.WRITING_CALL)

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more is written."""
        return self.state is TextState.ENDED

    @property
    def is_full(self) -> bool:
        """Return whether a limit of tokens ends the text where it is, or has ended it."""
        return self.stretch.is_full

    @property
    def is_free(self) -> bool:
        """Return whether the model chooses the next token of the text: no call is open, and no token is forced."""
        return self.state is TextState.WRITING_TEXT and not self._forced

    @property
    def may_begin_call(self) -> bool:
        """Return whether ` [` may come next and fits the context."""
        stretch = self.stretch
        fits = stretch.room - stretch.place >= len(self.rules.vocabulary.start)
        return self.is_free and fits and stretch.may_begin_call(stretch.place)

    @property
    def notes_start(self) -> bool:
        """Return whether p of ` [` says something here: where one more call is allowed, or none was made yet."""
        return self.is_free and (self.stretch.has_calls_left(self.stretch.place) or not self.calls)

    @property
    def most_tokens(self) -> int:
        """Return the most tokens that the text may have before its next prefill, an open call among them."""
        return len(self.stretch.prefix) + self.stretch.budget + self.rules.max_call_tokens

    def generation(self) -> Generation:
        """Return what was written, once the text has ended."""
        return Generation(
            text=self.text,
            plain=self.plain,
            calls=tuple(self.calls),
            tokens=self._tokens,
            reason=self.reason,
            look_alikes=self._look_alikes,
            chances=tuple(self._chances),
            likelihoods=tuple(self._likelihoods),
            p_start=self._p_start,
        )

    # 1. Prefill

    def tokens_to_prefill(self) -> list[int]:
        """Return the tokens that are to be prefilled: those of the prompt and of all that was written so far."""
        return self.stretch.prefix

    def start_writing(self) -> None:
        """READY -> WRITING_TEXT: a batch has read the tokens. A text that was dropped meanwhile stays ENDED."""
        if self.state is TextState.READY:
            self.state = TextState.WRITING_TEXT

    # 2. Choose

    def note_start(self, start: StartScore) -> None:
        """Keep p of ` [` at this place."""
        scores = self.stretch.scores
        if self.notes_start:
            scores.p_starts[self.stretch.place] = start.probability
        if self.rules.traced:
            scores.starts[self.stretch.place] = start

    def note_likeliest(self, log_probabilities: dict[int, float]) -> None:
        """Keep log p of the likeliest tokens at this place."""
        self.stretch.scores.likeliest[self.stretch.place] = log_probabilities

    def stop_before_sentence(self, token: int) -> None:
        """End the text where it is a complete sentence and `token`, the likeliest next one, begins another.

        "It was 3." goes on before "5" and ends before " Then". Without effect inside a tool call.
        """
        if not self.is_free:
            return
        text = self.plain + self.stretch.text()
        if not may_have_ended(text):
            return
        is_end_token = token in self.rules.vocabulary.ends
        if is_end_token or answer_end(text + self.stretch.addition(token)) == len(text):
            self._end()

    def stop_before_look_alike(self, token: int) -> None:
        """WRITING_TEXT -> READY where `token`, the likeliest next one, would complete a look-alike of a call.

        A look-alike is the name of a tool behind another bracket, such as `<QA(`. It is removed from its bracket on,
        and the text is prefilled again; its next token may not be a bracket.
        """
        if not self.is_free:
            return
        start = self.stretch.look_alike_start(token)
        if start is not None:
            self.stretch.take_back_to(start)
            self._feed.show_text(self.stretch, self._likelihoods, whole=True)
            self._take_back(no_bracket=True)

    def begin_call(self) -> None:
        """Force ` [` as the next tokens."""
        self._forced = list(self.rules.vocabulary.start)

    def bars(self, token: int) -> bool:
        """Return whether a rule forbids `token` as the next one of the text (`Stretch.bars`)."""
        return self.is_free and self.stretch.bars(token)

    def next_token(self, likeliest: int) -> int:
        """Return the token that comes next: the one that is forced, else the `likeliest` one."""
        return self._forced[0] if self._forced else likeliest

    def append(self, token: int) -> None:
        """Append a token to the text or to its open call; see the class for where that leads."""
        if self.call is not None:
            self._append_to_call(self.call, token)
        else:
            self._append_to_text(token)

    def _append_to_text(self, token: int) -> None:
        """Append a token outside calls, and do what follows from it.

        A call opens where ` [` is complete. The text ends at an end token, a stop word, the end of its only sentence,
        or a limit of tokens. Else whoever watches gets what is new.
        """
        self._forced = self._forced[1:]
        if token in self.rules.vocabulary.ends:
            self._end()
            return
        stretch = self.stretch
        stretch.written.append(token)
        if self._ends_with_start():
            self._open_call()
            return
        end = self._end_of_answer()
        if end is not None:
            stretch.characters = max(end - len(self.plain), 0)
            self._end()
        elif stretch.is_full and not self._forced:
            self._end()
        else:
            self._feed.show_text(self.stretch, self._likelihoods, whole=False)

    def _ends_with_start(self) -> bool:
        """Return whether the stretch ends with all tokens of ` [`, where a call is allowed."""
        start = self.rules.vocabulary.start
        stretch = self.stretch
        return stretch.written[-len(start) :] == start and stretch.has_calls_left(stretch.place - len(start))

    def _end_of_answer(self) -> int | None:
        """Return after how many characters of the text without calls it ends; None where it goes on.

        It ends before the first of the `stop` words and, under `one_sentence`, after its first sentence or line.
        """
        if not (self.rules.stop or self.rules.one_sentence):
            return None
        text = self.plain + self.stretch.text()
        ends = [text.find(word) for word in self.rules.stop if word in text]
        if self.rules.one_sentence:
            sentence_end = answer_end(text)
            if sentence_end is not None:
                ends.append(sentence_end)
        return min(ends, default=None)

    # 3. Write a call

    def _open_call(self) -> None:
        """WRITING_TEXT -> WRITING_CALL: open a tool call at the ` [` that was just written.

        ` [` moves from the text to the call. The call's grammar is fixed here: the tools that it may name, without
        those that failed at this place, and its most tokens.
        """
        stretch = self.stretch
        vocabulary = self.rules.vocabulary
        del stretch.written[-len(vocabulary.start) :]
        self._feed.show_text(self.stretch, self._likelihoods, whole=True)
        if stretch.site.failed_tools:
            tools = stretch.callable_tools(stretch.place) - stretch.site.failed_tools
        else:
            # Also tools that need a likelier ` [`: a call to one of these is removed once its name is written.
            tools = stretch.offered_tools(stretch.place)
        context_left = stretch.room - stretch.place - len(vocabulary.start)  # tokens
        form = vocabulary.form(tools, self.rules.schemas, most=min(self.rules.max_call_tokens, context_left))
        self.call = WrittenCall(vocabulary, form)
        self.state = TextState.WRITING_CALL
        self._feed.begin_call()
        self._feed.show_call(self.call, is_over=False)

    def _append_to_call(self, call: WrittenCall, token: int) -> None:
        """Append a token to the open call: it may then be taken back, wait for its tool, or go on."""
        call.append(token)
        if self._needs_likelier_start(call):
            self._take_back(no_start=True)
        elif call.has_ended:
            self.end_call()
        else:
            self._feed.show_call(call, is_over=False)

    def _needs_likelier_start(self, call: WrittenCall) -> bool:
        """Return whether the name of the tool is written, and p of ` [` was below its `min_probability`."""
        if not self.rules.min_probability:
            return False
        tool, bracket, _ = call.body().partition("(")
        return bool(bracket) and tool not in self.stretch.callable_tools(self.stretch.place)

    def end_call(self) -> None:
        """WRITING_CALL -> WAITING: the call is written, or nothing may follow what is written of it."""
        assert self.call is not None
        self.state = TextState.WAITING
        self._feed.show_call(self.call, is_over=True)
        self._close_stretch(last_text=API_START)

    # 4. Wait for its tool

    def open_call(self) -> DecodedCall:
        """Return the call that waits, without a result; its `reason` says why it cannot be run, if it cannot."""
        assert self.call is not None
        return read_call(self.call.closed_body())

    def tool_call(self) -> ToolCall:
        """Return what the tool of the open call gets."""
        return ToolCall(self.open_call().input, self.context)

    # 5. Go on

    def accepted(self, call: DecodedCall) -> DecodedCall:
        """Return an answered call as it is; a repetition is returned without its result, with the reason REPEATED.

        A repetition has tool and input of an earlier call of this text that has a result.
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
        ` [Calculator(2+3) -> 5]`. Without one it is left out, and another tool is called at the same place; but where
        it repeats a call or directly follows one, the text just goes on.
        """
        stretch = self.stretch
        p_start = stretch.scores.p_starts.get(stretch.place, 0.0)  # the model's p of ` [` where the call began
        next_site = self._site_after(call)
        tokens = stretch.tokens()
        inserted_text = call_text(call)  # "" without a result
        if inserted_text:
            tokens += self.rules.vocabulary.encoding.calls([inserted_text])[0]
        self.text += inserted_text
        self.calls.append(call)
        self.call = None
        self._feed.show_answer(call)
        self._begin_stretch(tokens, next_site)
        if next_site.failed_tools:
            self._call_another_tool(call.tool, p_start)

    def _site_after(self, call: DecodedCall) -> CallSite:
        """Return the limits on calls at the place of a call that was just answered.

        After a result another call may follow at once, in a chain. After a call without a result another tool is tried
        there; but no call begins there where the failed one followed another call, or repeated one.
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
        """Begin a call to another tool at the place where a call failed; end the text where none is left.

        - failed_tool: the tool of the failed call; "" where its name was never completed, which ends the text.
        - p_start: the model's p of ` [` at this place, by which tools may be called.
        """
        stretch = self.stretch
        stretch.scores.p_starts[0] = p_start
        all_have_failed = stretch.callable_tools(0) <= stretch.site.failed_tools
        if not failed_tool or all_have_failed or not stretch.has_calls_left(0):
            self._end()
        else:
            self.begin_call()

    # Stretches and ends

    def drop(self) -> None:
        """End the text here, without what its generation would hold: nobody waits for it."""
        self.state = TextState.ENDED

    def _begin_stretch(self, tokens: list[int], site: CallSite) -> None:
        """Begin the next part of the text after `tokens`, all that it has so far: READY, or ENDED at the limit.

        The new part may have as many tokens as the last one left of its limit. `site`: which calls may begin there.
        """
        budget = self.stretch.budget - self.stretch.place
        self.stretch = Stretch(self.rules, tokens, budget, site, after_call=bool(self.calls))
        self.state = TextState.READY
        self._forced = []
        self._feed.begin_stretch()
        if self.stretch.is_full:
            self._end()

    def _take_back(self, *, no_start: bool = False, no_bracket: bool = False) -> None:
        """WRITING_CALL or WRITING_TEXT -> READY: drop the open call, if there is one, and go on where it began.

        - no_start: no call may begin there again.
        - no_bracket: no call was dropped but a look-alike of one, and no bracket may come there again.
        """
        tokens_kept = self.stretch.tokens()
        is_at_old_site = self.stretch.place == 0  # nothing was written since the last call or the last removal
        if is_at_old_site and self.stretch.site.no_start:
            no_start = True  # it was forbidden here before, and stays so
        site = replace(self._site_here(), no_start=no_start, no_bracket=no_bracket)
        if no_bracket:
            self._look_alikes += 1
        self._close_stretch(last_text=API_START if self.call is not None else None)
        self.call = None
        self._begin_stretch(tokens_kept, site)

    def _site_here(self) -> CallSite:
        """Return the limits on calls after the last token, as if no call had been tried there."""
        site = self.stretch.site
        is_right_after_calls = self.stretch.place == 0
        return CallSite(site.places_with_calls, results_before=site.results_before if is_right_after_calls else 0)

    def _end(self) -> None:
        """-> ENDED: nothing more is written."""
        self.state = TextState.ENDED
        self._feed.show_text(self.stretch, self._likelihoods, whole=True)
        self._close_stretch(last_text="")

    def _close_stretch(self, last_text: str | None) -> None:
        """Add what the current stretch holds to the text: characters, counts of tokens, and the model's scores.

        A stretch is the part since the prompt or the last call. The tokens of an open call after it are counted too.
        `last_text`: what stands after its last token: ` [`, or "" at the end; None where the next stretch writes there.
        """
        stretch = self.stretch
        text = stretch.text()
        self.text += text
        self.plain += text
        self._tokens += stretch.place
        if self.call is not None:
            self._tokens += len(self.rules.vocabulary.start) + len(self.call.tokens)
        self._chances += stretch.start_chances(last_text)
        if self.rules.likeliest is not None:
            for place in range(stretch.place):
                self._likelihoods.append(stretch.likelihood(place))
        self._note_p_start()

    def _note_p_start(self) -> None:
        """Keep p of ` [` where the first call began; before it, the largest one so far."""
        if self.calls:
            return
        p_starts = self.stretch.scores.p_starts
        if self.call is not None:
            self._p_start = p_starts.get(self.stretch.place)
        else:
            self._p_start = max([self._p_start or 0.0, *p_starts.values()])
