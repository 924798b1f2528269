"""What is finished of a text that is being written: all up to its last tool call, as `Generation` returns it."""

from dataclasses import dataclass, field

from toolformer_dag.decoding.generation import Generation, StartChance, TokenLikelihood
from toolformer_dag.decoding.text_memory import TextMemory
from toolformer_dag.decoding.text_since_call import TextSinceCall
from toolformer_dag.decoding.written_call import WrittenCall


@dataclass(slots=True)
class FinishedText:
    """The finished part of a text after its prompt, and what `Generation` counts and records of it.

    - `text`: the text with its calls and their results.
    - `plain`: the text without calls.
    - `token_count`: the number of tokens that the model chose, including those of calls.
    - `look_alikes`: how many texts were removed that only looked like calls.
    - `chances`: p of ` [`, which begins a call, before each token, if the rules trace it.
    - `likelihoods`: log p of each token outside calls, if the rules ask for it.
    - `start_probability`: p of ` [` where the first call began; before that call, the largest p so far.
    """

    text: str = ""
    plain: str = ""
    token_count: int = 0
    look_alikes: int = 0
    chances: list[StartChance] = field(default_factory=list)
    likelihoods: list[TokenLikelihood] = field(default_factory=list)
    start_probability: float | None = None

    def add_text(self, added: TextSinceCall, last_text: str | None) -> None:
        """Add the text since the last call, with the number of its tokens and the model's probabilities.

        `last_text`: what follows it: ` [` before a call, "" at the end of the text, None if plain text goes on there.
        """
        text = added.text()
        self.text += text
        self.plain += text
        self.token_count += added.token_count
        self.chances += added.start_chances(last_text)
        if added.rules.likeliest is not None:
            self.likelihoods += [added.likelihood(token_index) for token_index in range(added.token_count)]

    def count_call(self, call: WrittenCall) -> None:
        """Add the tokens of a call that is written, ` [` included, to `token_count`."""
        self.token_count += len(call.vocabulary.start) + len(call.tokens)

    def record_start_probability(self, added: TextSinceCall, *, before_call: bool) -> None:
        """Set `start_probability` by the text since the last call. To be called before the first call is answered.

        before_call: whether a call was written after this text: then p of ` [` where the call began counts.
        """
        probabilities = added.scores.start_probabilities
        if before_call:
            self.start_probability = probabilities.get(added.token_count)
        else:
            self.start_probability = max([self.start_probability or 0.0, *probabilities.values()])

    def generation(self, memory: TextMemory, reason: str | None) -> Generation:
        """Return the text as a `Generation`, with the calls that it remembers.

        `reason`: why nothing could be written, None for a usual text.
        """
        return Generation(
            text=self.text,
            plain=self.plain,
            calls=tuple(memory.calls),
            tokens=self.token_count,
            reason=reason,
            look_alikes=self.look_alikes,
            chances=tuple(self.chances),
            likelihoods=tuple(self.likelihoods),
            p_start=self.start_probability,
        )
