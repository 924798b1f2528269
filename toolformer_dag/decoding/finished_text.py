"""What is finished of a text that is being written: all up to its last tool call, as `Generation` returns it."""

from dataclasses import dataclass, field

from toolformer_dag.decoding.generation import Generation, StartChance, TokenLikelihood
from toolformer_dag.decoding.text_memory import TextMemory
from toolformer_dag.decoding.text_since_call import TextSinceCall
from toolformer_dag.decoding.written_call import WrittenCall


@dataclass(slots=True)
class FinishedText:
    """The finished part of a text after its prompt, and what `Generation` counts and records of it.

    Attributes:
        text: The text with its calls and their results.
        plain_text: The text without calls.
        token_count: The number of tokens that the model chose, including those of calls.
        look_alike_count: How many texts were removed that only looked like calls.
        start_chances: The model's p of ` [`, which begins a call, before each token, if the rules trace it.
        token_likelihoods: Log p of each token outside calls, if the rules ask for it.
        start_probability: The model's p of ` [` where the first call began. Before that call, the largest p so far.
    """

    text: str = ""
    plain_text: str = ""
    token_count: int = 0
    look_alike_count: int = 0
    start_chances: list[StartChance] = field(default_factory=list)
    token_likelihoods: list[TokenLikelihood] = field(default_factory=list)
    start_probability: float | None = None

    def add_text(self, text_since_call: TextSinceCall, following_text: str | None) -> None:
        """Append the plain text that was written since the last tool call, with the probabilities recorded for it.

        Args:
            text_since_call: The text since the last call.
            following_text: What follows it: " [" before a call, "" at the end of the text, None if plain text goes on
                there.
        """
        new_text = text_since_call.decode_text()
        self.text += new_text  # besides plain text, it has the calls with their results
        self.plain_text += new_text
        self.token_count += text_since_call.token_count

        # This is empty unless the rules trace how likely a call was before each token.
        self.start_chances += text_since_call.list_start_chances(following_text)

        records_log_p = text_since_call.rules.likeliest_token_count is not None
        if records_log_p:
            for token_index in range(text_since_call.token_count):
                self.token_likelihoods.append(text_since_call.get_likelihood(token_index))

    def count_call_tokens(self, call: WrittenCall) -> None:
        """Add the tokens of a written call to `token_count`, including those of ` [`, with which it begins."""
        self.token_count += len(call.vocabulary.start_tokens) + len(call.tokens)

    def record_start_probability(self, text_since_call: TextSinceCall, *, is_before_call: bool) -> None:
        """Record in `start_probability` how likely the first call of a text was to begin: the probability of ` [`.

        Example:
            Without a call, probabilities of 0.1, 0.3 and 0.2 give 0.3, the largest so far. If a call began at the third
            of these tokens, they give 0.2.

        Args:
            text_since_call: The text since the last call, with the probability of ` [` at each recorded token.
            is_before_call: Whether a call began at the end of this text.
        """
        p_by_token_index = text_since_call.token_scores.start_probability_by_index
        if is_before_call:
            call_index = text_since_call.token_count
            self.start_probability = p_by_token_index.get(call_index)
        else:
            largest_so_far = self.start_probability or 0.0
            self.start_probability = max([largest_so_far, *p_by_token_index.values()])

    def build_generation(self, memory: TextMemory, reason: str | None) -> Generation:
        """Build the final result of decoding, once the text has ended.

        Args:
            memory: What the text remembers of its tool calls.
            reason: Why nothing could be written. None for a usual text.
        """
        return Generation(
            text=self.text,
            plain_text=self.plain_text,
            calls=tuple(memory.answered_calls),
            token_count=self.token_count,
            reason=reason,
            look_alike_count=self.look_alike_count,
            start_chances=tuple(self.start_chances),
            token_likelihoods=tuple(self.token_likelihoods),
            start_probability=self.start_probability,
        )
