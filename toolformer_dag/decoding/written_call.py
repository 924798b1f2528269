"""A call of a row: where it may begin, its tokens, what may follow them, and where its input may end."""

from dataclasses import dataclass, field

from toolformer_dag.decoding.vocabulary import Vocabulary
from toolformer_dag.model.backend import CallForm
from toolformer_dag.texts.calls import RESULT_ARROW, find_behind_input, in_paper_form

INCOMPLETE = "\ufffd"
"""The text that the bytes of an incomplete character decode to."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Which calls may begin at a place, by those before it.

    - `places`: at how many places calls were made so far.
    - `results`: how many calls with results stand right before it.
    - `failed`: the tools that were called here and found nothing; another one is called now.
    - `no_start`: whether no call may begin here, since one was refused.
    - `no_bracket`: whether no opening bracket may come here, since it would begin a look-alike of a call.
    """

    places: int = 0
    results: int = 0
    failed: frozenset[str] = frozenset()
    no_start: bool = False
    no_bracket: bool = False


@dataclass(slots=True)
class WrittenCall:
    """An open call: `body` is its tokens after ` [`, and `form` what may follow them."""

    vocabulary: Vocabulary
    form: CallForm
    body: list[int] = field(default_factory=list)
    _closing: tuple[float, str] | None = None  # the likeliest end of the input so far: its log p, the call up to there

    def append(self, token: int) -> None:
        """Append a token."""
        self.body.append(token)
        self.form.matcher.consume_token(token)

    @property
    def has_ended(self) -> bool:
        """Return whether `->` is written behind the input, or as many tokens as may be."""
        return len(self.body) >= self.form.most or find_behind_input(RESULT_ARROW, self.text()) >= 0

    def text(self) -> str:
        """Return the text written after ` [`, in the paper's markers."""
        return in_paper_form(self.vocabulary.text(self.body, self.vocabulary.start), self.vocabulary.encoding.markers)

    def ended_text(self) -> str:
        """Return the text up to `->`; of a call that has none, up to the likeliest end of its input."""
        text = self.text()
        return self._closing[1] if self._closing is not None and find_behind_input(RESULT_ARROW, text) < 0 else text

    def measure_closing(self, log_probability: float, text: str) -> None:
        """Keep `text` as the end of the input here, where it ends it and is likelier than every end before."""
        written = self.text()
        closed = f"{written}{text} {RESULT_ARROW}"
        likelier = self._closing is None or log_probability > self._closing[0]
        if likelier and not written.endswith(INCOMPLETE) and find_behind_input(RESULT_ARROW, closed) >= 0:
            self._closing = log_probability, closed
