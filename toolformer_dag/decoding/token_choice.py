"""Choose the next token of each text of a batch: the likeliest one that no rule forbids, or the beginning of a call."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from toolformer_dag.decoding.generation import MAX_RECORDED_RANK
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.token_scores import StartScore
from toolformer_dag.decoding.written_call import WrittenCall
from toolformer_dag.decoding.written_text import WrittenText
from toolformer_dag.model.backend import CallForm, GreedyRows

RECORDED_TOKEN_COUNT = 64
"""How many of the likeliest tokens a text gets with log p. The token that it writes is nearly always among them."""


def write_next_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[WrittenText]:
    """Write one more token in each text of a batch.

    Args:
        batch: The texts as rows of the model, in the same order. Rows of texts that stop writing are removed.
        texts: The texts of the batch.

    Returns:
        The texts that get another token. The others have ended, wait for the result of a tool, or lost their last
        characters and must be read by the model again.
    """
    # Read the model's scores of the next tokens before any token is forbidden.
    call_starts = _rank_call_starts(batch, texts)  # how likely ` [` is in each text, which begins a tool call
    _record_scores(batch, texts, call_starts)
    _stop_before_sentences(batch, texts)
    _begin_likely_calls(texts, call_starts)
    _record_likely_closings(batch, texts)

    # Forbid tokens, then choose among the others and write.
    _forbid_tokens_outside_grammar(batch, texts)
    tokens = _append_next_tokens(batch, texts)
    return _run_remaining_texts(batch, texts, tokens)


def _append_next_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[int]:
    """Append the next token to each text that is still being written.

    A token that a rule has chosen comes first, otherwise the likeliest token that is not forbidden.

    Args:
        batch: The texts as rows of the model, in the same order.
        texts: The texts of the batch.

    Returns:
        One token per text. For a text that is no longer written it has no meaning.
    """
    likeliest_tokens = _choose_likeliest_tokens(batch, texts)

    next_tokens = []
    for text, likeliest_token in zip(texts, likeliest_tokens, strict=True):
        token = text.get_next_token(likeliest_token=likeliest_token)
        next_tokens.append(token)
        if text.is_writing:
            text.append_token(token)
    return next_tokens


def _run_remaining_texts(batch: GreedyRows, texts: Sequence[WrittenText], tokens: Sequence[int]) -> list[WrittenText]:
    """Run the model on the new tokens of the texts that are still being written.

    Args:
        batch: The texts as rows of the model. It keeps only the rows of texts that are still being written, and then
            has the scores of their next tokens.
        texts: The texts before any are removed.
        tokens: The last token of each text.

    Returns:
        The texts that are still being written.
    """
    remaining_rows = [row for row, text in enumerate(texts) if text.is_writing]
    if not remaining_rows:
        return []

    if len(remaining_rows) < len(texts):
        batch.keep_rows(remaining_rows)

    remaining_texts = [texts[row] for row in remaining_rows]
    last_tokens = [tokens[row] for row in remaining_rows]
    new_grammars = _collect_new_grammars(remaining_texts)  # of calls that have just begun, by row
    batch.append_tokens(last_tokens, new_grammars)
    return remaining_texts


@dataclass(frozen=True, slots=True)
class _CallStart:
    """The tokens of ` [`, which begins a call, as the next tokens of one row of a batch.

    Attributes:
        start_tokens: The tokens of ` [`.
        first_token_rank: How many tokens are likelier than the first of these.
    """

    batch: GreedyRows
    row: int
    start_tokens: Sequence[int]
    first_token_rank: int

    def compute_rank(self) -> int:
        """Return how many next tokens are likelier than ` [`.

        If ` [` has several tokens, its probability is the product of theirs.
        """
        if len(self.start_tokens) == 1:
            return self.first_token_rank
        return self.batch.compute_sequence_rank(self.row, self.start_tokens)

    def is_among_top_k(self, top_k: int) -> bool:
        """Return whether ` [` is among the `top_k` likeliest next tokens."""
        # The rank of the first token is tested first. It is cheap to get, and the rank of ` [` is never lower.
        return self.first_token_rank < top_k and self.compute_rank() < top_k

    def compute_score(self) -> StartScore:
        """Compute the probability of ` [` and its rank."""
        log_probability = self.batch.compute_log_probability(self.row, self.start_tokens)
        return StartScore(probability=exp(log_probability), rank=self.compute_rank())


def _rank_call_starts(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[_CallStart]:
    """Look up in each text how many tokens are likelier next than the first token of ` [`, which begins a call."""
    start_tokens = texts[0].rules.vocabulary.start_tokens  # all texts of a batch have the same vocabulary
    first_ranks = batch.compute_token_ranks(start_tokens[0])
    return [_CallStart(batch, row, start_tokens, first_ranks[row]) for row in range(len(texts))]


def _record_scores(batch: GreedyRows, texts: Sequence[WrittenText], call_starts: Sequence[_CallStart]) -> None:
    """Record the model's scores of the next token in each text that writes plain text.

    These are the probability of ` [`, which begins a call, if it is likely enough to matter, and the log probabilities
    of the likeliest tokens, if the rules ask for them.

    Args:
        batch: The texts as rows of the model.
        texts: The texts, which get the scores.
        call_starts: For each text, how likely ` [` comes next.
    """
    for row, (text, call_start) in enumerate(zip(texts, call_starts, strict=True)):
        # Skip texts that are writing a call, or whose next token was chosen by a rule.
        if not text.can_model_choose_next:
            continue

        if _is_start_score_recorded(call_start, text.rules):
            text.record_start_score(call_start.compute_score())
        if text.rules.likeliest_token_count is not None:
            # As many for all rules, so that the written token is nearly always among them. The number that the rules
            # ask for applies when the tokens are read (`TextSinceCall.get_likelihood`).
            text.record_likeliest_tokens(batch.find_likeliest_tokens(row, RECORDED_TOKEN_COUNT))


def _is_start_score_recorded(call_start: _CallStart, rules: DecodingRules) -> bool:
    """Return whether to record how likely a call, which begins with ` [`, is to begin here.

    It is recorded at every place if the rules trace all places. Otherwise it is only needed for calls that may really
    begin, some of which have to reach a minimum probability. So places where ` [` is unlikely are skipped.
    """
    return (
        rules.traces_start_chances
        or call_start.first_token_rank < MAX_RECORDED_RANK
        or call_start.is_among_top_k(rules.top_k)
    )


def _stop_before_sentences(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """End each text that may only have one sentence, if that sentence is complete.

    A sentence is complete if it ends with punctuation such as ".", and the likeliest next token begins another sentence
    or ends the text.

    Args:
        batch: The texts as rows of the model, in the same order.
        texts: The texts of the batch.
    """
    if not any(text.rules.ends_after_one_sentence for text in texts):
        return

    likeliest_tokens = batch.find_best_tokens()
    for row, text in enumerate(texts):
        if text.rules.ends_after_one_sentence:
            text.stop_before_sentence(likeliest_tokens[row])


def _begin_likely_calls(texts: Sequence[WrittenText], call_starts: Sequence[_CallStart]) -> None:
    """Begin a tool call in each text where ` [` is among the k likeliest next tokens and the rules allow a call.

    Args:
        texts: The texts. Where a call begins, the tokens of ` [` become the next tokens.
        call_starts: For each text, how likely ` [` comes next.
    """
    for text, call_start in zip(texts, call_starts, strict=True):
        top_k = text.text_since_call.top_k

        # The cheapest test comes first: ` [` is never likelier than its first token.
        first_token_is_likely = call_start.first_token_rank < top_k
        if first_token_is_likely and text.can_begin_call and call_start.is_among_top_k(top_k):
            text.begin_call()


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A tool call that is being written, as a row of a batch.

    Attributes:
        row: The index of the row.
        call: The call.
        top_k: The k of the rules of its text. An end of the input counts if it is among the k likeliest next tokens.
    """

    row: int
    call: WrittenCall
    top_k: int

    def record_closing_if_allowed(self, batch: GreedyRows, closing_token: int, closing_text: str) -> None:
        """Let the call remember that its input may end here, in case it has to be cut later.

        A call that reaches its limit of tokens is cut at the likeliest of the remembered ends. The call keeps only
        that one (`likeliest_closing`). Nothing happens if its grammar forbids the end.

        Args:
            batch: The rows of the model, with this call in one of them.
            closing_token: The token that would close the input.
            closing_text: The text of this token, such as `)`.
        """
        if self.call.call_form.is_token_allowed(closing_token):
            log_probability = batch.compute_log_probability(self.row, [closing_token])
            self.call.record_likelier_closing(log_probability, closing_text)


def _list_open_calls(texts: Sequence[WrittenText]) -> list[_OpenCall]:
    """List the tool calls that are being written and already have the complete name of their tool."""
    open_calls = []
    for row, text in enumerate(texts):
        if text.current_call is not None and text.current_call.has_tool_name:
            open_calls.append(_OpenCall(row, text.current_call, top_k=text.rules.top_k))
    return open_calls


def _record_likely_closings(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Let each unfinished tool call remember the likeliest place so far at which its input could end.

    If the call later reaches its limit of tokens, it is cut there. A place counts if a closing token, whose text is `)`
    or `")`, is among the k likeliest next tokens, and the grammar of the call allows it.

    Args:
        batch: The texts as rows of the model, in the same order.
        texts: The texts of the batch.
    """
    open_calls = _list_open_calls(texts)
    if not open_calls:
        return

    vocabulary = texts[0].rules.vocabulary  # all texts of a batch have the same one
    for closing_token, closing_text in vocabulary.closing_text_by_token.items():
        rank_by_row = batch.compute_token_ranks(closing_token)  # the number of likelier tokens in each row
        for open_call in open_calls:
            is_among_top_k = rank_by_row[open_call.row] < open_call.top_k
            if is_among_top_k:
                open_call.record_closing_if_allowed(batch, closing_token, closing_text)


def _forbid_tokens_outside_grammar(batch: GreedyRows, texts: Sequence[WrittenText]) -> None:
    """Forbid the tokens that do not fit the grammar of the tool call that a text is writing.

    If no token fits, the call ends.

    Args:
        batch: The texts as rows of the model, in the same order.
        texts: The texts of the batch.
    """
    for row, text in enumerate(texts):
        if text.is_writing and text.current_call is not None:
            some_token_fits = batch.apply_call_form(row, text.current_call.call_form)
            if not some_token_fits:
                text.end_call()


def _choose_likeliest_tokens(batch: GreedyRows, texts: Sequence[WrittenText]) -> list[int]:
    """Choose the likeliest next token of each text that no rule forbids.

    If the likeliest token of a text would complete something that only looks like a tool call, such as `<QA(`, this is
    removed. The text is then not written any further in this batch (`is_writing` is False): it has ended, or waits
    until the model reads it again.

    Args:
        batch: The texts as rows of the model, in the same order.
        texts: The texts of the batch.

    Returns:
        One token per text. For a text that is no longer written it has no meaning.
    """
    while True:
        likeliest_tokens = batch.find_best_tokens()

        forbidden_tokens = []  # pairs of a row and a token
        for row, text in enumerate(texts):
            token = likeliest_tokens[row]

            # If the text stops here, `is_forbidden` returns False.
            text.stop_before_look_alike(token)
            if text.is_forbidden(token):
                forbidden_tokens.append((row, token))

        if not forbidden_tokens:
            return likeliest_tokens
        batch.forbid_tokens(forbidden_tokens)  # then look at the likeliest of the other tokens, in all texts again


def _collect_new_grammars(texts: Sequence[WrittenText]) -> dict[int, CallForm]:
    """Collect the grammar of each tool call that has just begun, by the index of its text."""
    grammar_by_row = {}
    for row, text in enumerate(texts):
        if text.current_call is not None and not text.current_call.tokens:  # a call without tokens has just begun
            grammar_by_row[row] = text.current_call.call_form
    return grammar_by_row
