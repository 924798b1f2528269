"""The state of a row during decoding: its permitted tokens, its call, and why it stops."""

from dataclasses import dataclass, field, replace

from toolformer_dag.decoding.answer_end import answer_end, may_have_ended
from toolformer_dag.decoding.generation import REPEATED, DecodedCall, Generation, WrittenPiece, call_text
from toolformer_dag.decoding.look_alikes import OPENING, closes_nothing, look_alike
from toolformer_dag.decoding.row_trace import RowTrace, shown_call, shown_text
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_call import INCOMPLETE, CallSite, WrittenCall
from toolformer_dag.texts.calls import API_START


@dataclass(slots=True)
class DecodingRow:
    """A row during decoding: from the prompt, or from the last call, to the next call or the end of the text.

    - `prompt`: the index of the prompt.
    - `prefix`: the fixed tokens, including the prompt.
    - `budget`: the most tokens outside a call.
    - `before`: what was written before this row.
    - `site`: which calls may begin at the end of the prefix.
    - `written`: the tokens written so far outside a call; `call`: the open one, None outside of a call.
    - `forced`: the next tokens, whatever the model's scores.
    - `stopped`: whether the text or the call has ended; `at_look_alike`: whether before a look-alike of a call.
    - `trace`: what the model gave at each place.
    """

    rules: DecodingRules
    prompt: int
    prefix: list[int]
    budget: int
    before: Generation
    site: CallSite = field(default_factory=CallSite)
    written: list[int] = field(default_factory=list)
    call: WrittenCall | None = None
    forced: list[int] = field(default_factory=list)
    stopped: bool = False
    at_look_alike: bool = False
    trace: RowTrace = field(default_factory=RowTrace)
    _kept: int | None = None  # characters of the written text, where it ends inside a token
    _shown: int = 0  # characters of the text or the call that `watch` got
    _offers: dict[int, frozenset[str]] = field(default_factory=dict)  # the tools offered, by place

    def __post_init__(self) -> None:
        self.stopped = self.full or not self.prefix

    @property
    def place(self) -> int:
        """Return how many tokens are written outside a call: where the row is."""
        return len(self.written)

    @property
    def room(self) -> int:
        """Return how many tokens the context has space for after the prefix."""
        return self.rules.language_model.context_length - len(self.prefix)

    @property
    def longest(self) -> int:
        """Return the most tokens that the row may have, with an open call."""
        return len(self.prefix) + self.budget + self.rules.max_call_tokens

    @property
    def full(self) -> bool:
        """Return whether a limit ends the text here: that of its tokens, or the context."""
        return self._kept is None and self.place >= min(self.budget, self.room)

    @property
    def in_call(self) -> bool:
        """Return whether the row is, or stopped, inside a call."""
        return self.call is not None

    @property
    def after_call(self) -> bool:
        """Return whether a call was made before this row."""
        return bool(self.before.calls)

    @property
    def at_call(self) -> bool:
        """Return whether the place is right after a call: there the depth limits calls, and ` [` is the likeliest."""
        return bool(self.site.results) and not self.written

    @property
    def may_chain(self) -> bool:
        """Return whether a call may start right after those that end the prefix."""
        return 0 < self.site.results < self.rules.depth

    @property
    def k(self) -> int:
        """Return among how many of the likeliest tokens ` [` has to be here."""
        return min(self.rules.k, 1) if self.at_call else self.rules.k

    @property
    def may_call(self) -> bool:
        """Return whether a call may start somewhere in this row."""
        return self._may_call(self.place)

    def _may_call(self, place: int) -> bool:
        """Return whether a call may start after so many written tokens, or later in this row."""
        return (self.rules.k > 0 and self.site.places < self.rules.calls) or (not place and self.may_chain)

    @property
    def is_free(self) -> bool:
        """Return whether the model chooses the next token of the text."""
        return not (self.stopped or self.in_call or self.forced)

    @property
    def may_begin_call(self) -> bool:
        """Return whether ` [` may come next and fits the context."""
        fits = self.room - self.place >= len(self.rules.vocabulary.start)
        here = self.may_call and (bool(self.written) or not self.after_call or self.may_chain)
        return here and fits and self.is_free and bool(self._callable(self.place))

    @property
    def asks_start(self) -> bool:
        """Return whether p of ` [` says something here: where a call may begin, or none was made yet."""
        return self.is_free and (self.may_call or not self.after_call)

    def _callable(self, place: int) -> frozenset[str]:
        """Return the tools that may be called after so many written tokens."""
        if self.site.no_start and not place:
            return frozenset()
        probability, least = self.trace.p_starts.get(place, 0.0), self.rules.min_probability
        return frozenset(name for name in self._offered(place) if least.get(name, 0.0) <= probability)

    def _offered(self, place: int) -> frozenset[str]:
        """Return the tools that the text up to there is for."""
        if self.rules.offer is None:
            return self.rules.names
        if place not in self._offers:
            text = self.rules.vocabulary.text([*self.prefix, *self.written[:place]], [])
            self._offers[place] = self.rules.offer(text, self.rules.names)
        return self._offers[place]

    @property
    def _p_start(self) -> float | None:
        """p of ` [` where the first call began, else the largest so far."""
        if self.after_call:
            return self.before.p_start
        if self.in_call:
            return self.trace.p_starts.get(self.place)
        return max([self.before.p_start or 0.0, *self.trace.p_starts.values()])

    def generation(self) -> Generation:
        """Return what is written so far, without an open call."""
        before, text, reason = self.before, self.written_text(), None
        if not self.prefix:
            reason = "empty_prompt"
        elif self.room <= 0 and not before.calls:
            reason = "does_not_fit"
        tokens = before.tokens + self.place
        if self.call is not None:
            tokens += len(self.rules.vocabulary.start) + len(self.call.body)
        text, plain = before.text + text, before.plain + text
        chances = (*before.chances, *self.trace.start_chances(self._texts()))
        likelihoods = (*before.likelihoods, *self.trace.likelihoods(self.rules, self.prefix, self.written))
        return Generation(
            text, plain, before.calls, tokens, reason, before.look_alikes, chances, likelihoods, self._p_start
        )

    def accepted(self, call: DecodedCall) -> DecodedCall:
        """Return an answered call as it counts: without its result where the same call stands in the text with one."""
        asked = (call.tool, call.input)
        repeated = any((one.tool, one.input) == asked and one.result is not None for one in self.before.calls)
        return replace(call, result=None, reason=REPEATED) if repeated and call.result is not None else call

    def after(self, call: DecodedCall) -> "DecodingRow":
        """Return the row that goes on after this row's `accepted` call.

        Where the call found nothing, the row begins a call to another tool, or the text ends where none is left; after
        another call, and where the same call has its result already, the text goes on without it.
        """
        so_far, inserted = self.generation(), call_text(call)
        prefix = self.prefix + self.written
        if inserted:
            prefix += self.rules.vocabulary.encoding.calls([inserted])[0]
        before = replace(so_far, text=so_far.text + inserted, calls=(*so_far.calls, call))
        if self.rules.watch is not None:
            self.rules.watch(WrittenPiece(self.prompt, "", True, call))
        site = replace(self._site, places=self.site.places + (not self.at_call))
        if inserted:
            return self._following(prefix, before, replace(site, results=site.results + 1))
        if self.at_call or call.reason == REPEATED:
            return self._following(prefix, before, replace(site, no_start=True))
        row = self._following(prefix, before, replace(site, failed=self.site.failed | {call.tool}))
        row.forced = list(self.rules.vocabulary.start)
        row.trace.p_starts[0] = self.trace.p_starts.get(self.place, 0.0)
        row.stopped = not call.tool or row.site.failed >= row._callable(0) or not row.may_call
        return row

    def taken_back(self) -> "DecodingRow | None":
        """Return the row that goes on before a look-alike or a refused call; None where neither stopped this one."""
        if not (self.at_look_alike or self.refused):
            return None
        so_far = self.generation()
        before = replace(so_far, look_alikes=so_far.look_alikes + self.at_look_alike)
        no_start = self.refused or (self.site.no_start and not self.written)
        site = replace(self._site, no_start=no_start, no_bracket=self.at_look_alike)
        return self._following(self.prefix + self.written, before, site)

    @property
    def _site(self) -> CallSite:
        """The place where the row is, as if nothing had been tried there."""
        return CallSite(self.site.places, 0 if self.written else self.site.results)

    def _following(self, prefix: list[int], before: Generation, site: CallSite) -> "DecodingRow":
        """Return the row that goes on after what this one wrote outside a call."""
        return DecodingRow(self.rules, self.prompt, prefix, self.budget - self.place, before, site)

    def written_text(self) -> str:
        """Return the text written outside the call."""
        return self.rules.vocabulary.text(self.written, self.prefix)[: self._kept]

    def body_text(self) -> str:
        """Return the text written after ` [`; of a call that ended without `->`, the likeliest end of its input."""
        return "" if self.call is None else self.call.ended_text() if self.stopped else self.call.text()

    def _texts(self) -> list[str]:
        """Return what was written at each place: a token; at the last one ` [` of a call, or "" where the text ended.

        Before a look-alike the last one has none: the row that goes on writes there.
        """
        before, tokens = self.prefix, self.written
        texts = [self.rules.vocabulary.text([token], [*before, *tokens[:at]]) for at, token in enumerate(tokens)]
        return texts if self.at_look_alike else [*texts, API_START if self.in_call else ""]

    def bars(self, token: int) -> bool:
        """Return whether the text may not go on with `token`, the most likely next one.

        - Where no call may start, the end of ` [` is barred.
        - Where `token` would complete a look-alike of a call, the row stops before its bracket. There, in the
          row `taken_back`, every opening bracket is barred.
        - After a call, `->` and closing brackets that nothing opened are barred: a model that misses a result invents
          one.
        """
        vocabulary = self.rules.vocabulary
        if not self.is_free or token not in vocabulary.with_brackets:
            return False
        new = vocabulary.text([token], [*self.prefix, *self.written])
        if self._stops_before_look_alike(new):
            return False
        opens = self.site.no_bracket and not self.written and OPENING.search(new) is not None
        begins = token == vocabulary.start[-1] and self._bars_start()
        return opens or begins or (self.after_call and self._ends_call(new))

    def _stops_before_look_alike(self, new: str) -> bool:
        """Return whether `new` would complete a look-alike of a call, before which the row then stops."""
        text = self.written_text()
        found = look_alike(frozenset(self.rules.tools)).search(text + new)
        if found is None:
            return False
        while len(text) > found.start():
            self.written.pop()
            text = self.written_text()
        self.at_look_alike = True
        self.stop()
        return True

    def _ends_call(self, new: str) -> bool:
        so_far = self.rules.vocabulary.text([*self.prefix, *self.written], [])
        places = (
            (so_far + new).find(sign, max(len(so_far) - len(sign) + 1, 0)) for sign in self.rules.vocabulary.signs
        )
        return max(places) >= 0 or closes_nothing(so_far, new)

    def _bars_start(self) -> bool:
        """Return whether all tokens of ` [` but the last are written, and no call may start."""
        begun = self.rules.vocabulary.start[:-1]
        before = [*self.prefix[-len(begun) - 1 :], *self.written]
        if before[len(before) - len(begun) :] != begun:
            return False
        place = max(self.place - len(begun), 0)
        cut = self._inside_character(self.written[:place]) or not self._callable(place)
        taken = self.after_call and self.place <= len(begun) and not self.may_chain
        return not self._may_call(place) or cut or taken

    def stop_before(self, token: int) -> None:
        """Stop where the sentence ends before `token`, the most likely next one."""
        if not self.is_free:
            return
        text = self.before.plain + self.written_text()
        if may_have_ended(text):
            following = self.rules.vocabulary.text([token], [*self.prefix, *self.written])
            if token in self.rules.vocabulary.ends or answer_end(text + following) == len(text):
                self.stop()

    def begin_call(self) -> None:
        """Force ` [` as the next tokens, but inside an incomplete character."""
        if not self._inside_character(self.written):
            self.forced = list(self.rules.vocabulary.start)

    def append(self, token: int) -> None:
        """Append a token, and stop the row or open a call where it does so."""
        self.forced = self.forced[1:]
        if self.call is not None:
            self.call.append(token)
            self.stopped = self.refused or self.call.has_ended
        elif token in self.rules.vocabulary.ends:
            self.stopped = True
        else:
            self.written.append(token)
            self._after_token()
        self._show()

    @property
    def refused(self) -> bool:
        """Return whether the name of the open call is written, and its tool needs a likelier start."""
        if not self.rules.min_probability:
            return False
        name, bracket, _ = self.body_text().partition("(")
        return bool(bracket) and name not in self._callable(self.place)

    def stop(self) -> None:
        """End the text or the call here."""
        self.stopped = True
        self._show()

    def _after_token(self) -> None:
        """Open a call after ` [`; end the text with its sentence or its budget."""
        start = self.rules.vocabulary.start
        if self.written[-len(start) :] == start and self._may_call(self.place - len(start)):
            del self.written[-len(start) :]
            self._show(whole=True)
            self._shown, place, failed = 0, self.place, self.site.failed
            names = self._callable(place) - failed if failed else self._offered(place)
            most = min(self.rules.max_call_tokens, self.room - place - len(start))
            form = self.rules.vocabulary.form(names, self.rules.schemas, most)
            self.call = WrittenCall(self.rules.vocabulary, form)
            return
        before = self.before.plain
        if (end := self._end(before + self.written_text())) is not None:
            self._kept, self.stopped = max(end - len(before), 0), True
        elif self.full and not self.forced:
            self.stopped = True

    def _end(self, text: str) -> int | None:
        """Return the number of characters before a stop word, or of the sentence; None where the text goes on."""
        ends: list[int] = [text.find(word) for word in self.rules.stop if word in text]
        sentence = answer_end(text) if self.rules.one_sentence else None
        return min(ends if sentence is None else [*ends, sentence], default=None)

    def _show(self, whole: bool = False) -> None:
        """Pass new text to `watch`, but for an end that may become something else; `whole`: with that end."""
        if self.rules.watch is None:
            return
        if self.in_call:
            if self.rules.min_probability and (self.refused or "(" not in self.body_text()):
                return
            text = shown_call(self.body_text(), self.rules.vocabulary.encoding.markers.arrow)
        else:
            text = self.written_text()
            if not (whole or self.stopped):
                text = shown_text(text, self.rules.stop)
        if len(text) > self._shown:
            self.rules.watch(WrittenPiece(self.prompt, text[self._shown :], self.in_call))
            self._shown = len(text)

    def _inside_character(self, written: list[int]) -> bool:
        vocabulary = self.rules.vocabulary
        return vocabulary.text(written, vocabulary.start).endswith(INCOMPLETE)
