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

    def add_text(self, since_call: TextSinceCall, last_text: str | None) -> None:
        """Append the plain text that was written since the last tool call, with the probabilities recorded for it.

        Args:
            since_call: The text since the last call.
            last_text: What follows it: " [" before a call, "" at the end of the text, None if plain text goes on there.
        """
        new_text = since_call.text()
        self.text += new_text  # besides plain text, it has the calls with their results
        self.plain += new_text
        self.token_count += since_call.token_count

        # This is empty unless the rules trace how likely a call was before each token.
        self.chances += since_call.list_start_chances(last_text)

        records_log_p = since_call.rules.likeliest is not None
        if records_log_p:
            self.likelihoods += [since_call.likelihood(index) for index in range(since_call.token_count)]

    def count_call(self, call: WrittenCall) -> None:
        """Add the tokens of a written call to `token_count`, including those of ` [`, with which it begins."""
        self.token_count += len(call.vocabulary.start) + len(call.tokens)

    def record_start_probability(self, since_call: TextSinceCall, *, before_call: bool) -> None:
        """Record in `start_probability` how likely the first call of the text was to begin.

        This is the model's probability of ` [` where the call began. As long as there is no call, it is the largest
        probability so far. The method is only used until the first call is answered.

        Args:
            since_call: The text since the last call, with the probabilities of ` [` recorded in it.
            before_call: Whether a call began at the end of this text.
        """
        p_by_token_index = since_call.scores.start_probabilities
        if before_call:
            call_index = since_call.token_count
            self.start_probability = p_by_token_index.get(call_index)
        else:
            largest_so_far = self.start_probability or 0.0
            self.start_probability = max([largest_so_far, *p_by_token_index.values()])

    def generation(self, memory: TextMemory, reason: str | None) -> Generation:
        """Build the final result of decoding, once the text has ended.

        Args:
            memory: What the text remembers of its tool calls.
            reason: Why nothing could be written. None for a usual text.
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
