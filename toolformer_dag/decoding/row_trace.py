"""What a row keeps for whoever looks at it: what the model gave at its places, and what may be shown of its text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from toolformer_dag.decoding.generation import UNLISTED, StartChance, TokenLikelihood
from toolformer_dag.decoding.look_alikes import BEGUN
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.written_call import INCOMPLETE
from toolformer_dag.texts.calls import API_START, RESULT_ARROW, find_behind_input


@dataclass(slots=True)
class RowTrace:
    """What the model gave outside calls, by place: the number of tokens that the row had written there.

    - `p_starts`: p of ` [`, as far as it was asked; `min_probability` is held against it.
    - `chances`: p of ` [` and its rank, where the rules trace them.
    - `likeliest`: log p by token, the likeliest first, where the rules keep the likeliest.
    """

    p_starts: dict[int, float] = field(default_factory=dict)
    chances: dict[int, tuple[float, int]] = field(default_factory=dict)
    likeliest: dict[int, dict[int, float]] = field(default_factory=dict)

    def start_chances(self, texts: Sequence[str]) -> list[StartChance]:
        """Return the chances of the places that have a text: what was written there."""
        return [StartChance(texts[at], *chance) for at, chance in self.chances.items() if at < len(texts)]

    def likelihoods(self, rules: DecodingRules, prefix: list[int], written: list[int]) -> list[TokenLikelihood]:
        """Return log p of each token written after `prefix`, and the likeliest at its place, where the rules say so."""
        found = []
        for at, token in enumerate(written if rules.likeliest is not None else ()):
            context, scores = [*prefix, *written[:at]], self.likeliest[at]
            others = list(islice(scores.items(), rules.likeliest))
            texts = [rules.vocabulary.text([one], context) for one in (token, *(other for other, _ in others))]
            likeliest = tuple(zip(texts[1:], (value for _, value in others), strict=True))
            found.append(TokenLikelihood(texts[0], scores.get(token, UNLISTED), likeliest))
        return found


def shown_text(text: str, stop: Sequence[str]) -> str:
    """Return an unfinished text without an end that may become another character, ` [` or one of the `stop` words."""
    lengths = [length for word in stop for length in range(1, len(word)) if text.endswith(word[:length])]
    certain = text[: len(text) - max(lengths, default=0)]
    return BEGUN.sub("", certain).rstrip(f" {INCOMPLETE}")


def shown_call(body: str, arrow: str) -> str:
    """Return ` [` and an open call up to `->`, without an end that may become another character or `arrow`.

    `body`: the text written after ` [`. `arrow`: the model's marker for `->`.
    """
    end = find_behind_input(RESULT_ARROW, body)
    return API_START + (body if end < 0 else body[:end]).rstrip(f" {arrow.strip()[:-1]}{INCOMPLETE}")
