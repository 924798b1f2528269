"""The forms of C* as training data: a form is a schema and a function of one text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from toolformer_dag.exports import FormName
from toolformer_dag.identity import fingerprint
from toolformer_dag.method.corpus_texts import CorpusText, iter_preference_pairs
from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding, TextTokens


def build_calls_join_sql(calls_column: str) -> str:
    """Build the SQL query that finds the calls of exported rows in the warehouse again. The card shows it.

    Args:
        calls_column: The SQL expression for the calls of a row, such as "unnest(calls)".
    """
    return f"""\
SELECT row.digest, call.input, call.delta, scored.delta
FROM (SELECT digest, {calls_column} AS call FROM 'FOLDER/data/*.parquet') AS row
JOIN loss_deltas AS scored
  ON (scored.tool, scored.shard, scored.digest, scored.segment, scored.position, scored.sample)
   = (call.tool, call.shard, row.digest, call.segment, call.position, call.sample)"""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """A form of training data: the columns, and a function that converts a text of C* to rows.

    Attributes:
        name: The name of the form on the command line.
        schema: The columns, each with a `comment` in its metadata.
        iter_rows: Yields the rows of a text of C* (the texts with the kept calls). There may be none.
        card_text: What the card of the data set says about the form.
        settings: The values besides the texts on which the rows depend.
        join_sql: A query that joins the rows with the table loss_deltas, for the card.
        needs_least_helpful_calls: Whether `iter_rows` reads `least_helpful` of a text.
        count_row_tokens: Returns the number of tokens of a row that a trainer has to encode, or else 0.
    """

    name: FormName
    schema: pa.Schema
    iter_rows: Callable[[CorpusText], Iterator[Mapping[str, Any]]]
    card_text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    join_sql: str = build_calls_join_sql("unnest(calls)")
    needs_least_helpful_calls: bool = False
    count_row_tokens: Callable[[Mapping[str, Any]], int] = lambda row: 0


def build_column(name: str, data_type: pa.DataType, comment: str) -> pa.Field:
    """Build a column of a schema, with its comment in the metadata."""
    return pa.field(name, data_type, metadata={"comment": comment})


CALL_TYPE = pa.struct(
    [
        ("offset", pa.int64()),
        ("tool", pa.string()),
        ("name", pa.string()),
        ("input", pa.string()),
        ("result", pa.string()),
        ("delta", pa.float64()),
        ("loss_empty", pa.float64()),
        ("loss_call", pa.float64()),
        ("loss_result", pa.float64()),
        ("shard", pa.string()),
        ("segment", pa.int32()),
        ("position", pa.int32()),
        ("sample", pa.int32()),
    ]
)
CALL_COMMENT = (
    "offset (character of `plain`, from 0, before which the call stands), tool, name in the text, input, result, "
    "delta, loss_empty, loss_call, loss_result; (tool, shard, segment, position, sample), with the row's digest, is "
    "its row in loss_deltas"
)
CALLS_COLUMN = build_column("calls", pa.list_(CALL_TYPE), f"the calls in order: {CALL_COMMENT}")
ORIGIN_COLUMNS = (
    build_column("digest", pa.string(), "digest of the document"),
    build_column(
        "segment", pa.int32(), "number of the text in the document; (digest, segment) is its row in augmented_corpus"
    ),
    build_column("url", pa.string(), "where the document was found"),
    build_column("split", pa.string(), "train or heldout, by the document"),
)


def build_shared_columns(corpus_text: CorpusText) -> dict[str, Any]:
    """Return the values of the columns that rows of every form have: the calls, and the origin of the text.

    Rows of pairs have no column `calls`, so that value is ignored there.
    """
    return {
        "calls": [asdict(call) for call in corpus_text.calls],
        "digest": corpus_text.digest,
        "segment": corpus_text.segment,
        "url": corpus_text.url,
        "split": corpus_text.split,
    }


def build_text_form() -> ExportForm:
    """Define the export form of plain texts, with calls (x* in the paper) and without (x).

    The project's own finetuning trains on these texts.
    """
    schema = pa.schema(
        [
            build_column("text", pa.string(), "x*: the text with its calls"),
            build_column("plain", pa.string(), "x: the text without calls; the baseline's corpus C"),
            CALLS_COLUMN,
            *ORIGIN_COLUMNS,
        ]
    )
    card_text = (
        "Plain language modelling on `text` is what the paper trains; on `plain` it gives the paper's baseline.\n"
        "Results are predicted too, as in the paper; the form `masked` leaves them out of the loss."
    )
    return ExportForm(name="text", schema=schema, iter_rows=_iter_text_rows, card_text=card_text)


def _iter_text_rows(corpus_text: CorpusText) -> Iterator[Mapping[str, Any]]:
    """Yield the row of a text: the text with its calls, the text without them, and the columns of every form."""
    yield {
        "text": corpus_text.text_with_calls,
        "plain": corpus_text.text_without_calls,
        **build_shared_columns(corpus_text),
    }


def build_masked_form(encoding: "Encoding", tokenizer_name: str, *, sequence_length: int) -> ExportForm:
    """Define the export form of token sequences for training, where results of tools are not learned.

    Tokens of results have the label -100, which training ignores. A text of more than `sequence_length` tokens
    becomes several rows. Each begins with the last token of the row before.

    Args:
        encoding: Encodes texts as tokens.
        tokenizer_name: The name of the tokenizer, which the card shows.
        sequence_length: The maximum number of tokens of a row.
    """
    card_text = (
        f"Tokens are those of {tokenizer_name}, at most {sequence_length:,} in a row. Results have the label -100: "
        "a tool\nwrites them, so the model need not learn to. The paper does predict them (`--form text`)."
    )

    tokenizer_identity = fingerprint(encoding.tokenizer.backend_tokenizer.to_str())

    return ExportForm(
        name="masked",
        schema=_build_masked_schema(tokenizer_name),
        iter_rows=partial(_iter_masked_rows, encoding, sequence_length),
        card_text=card_text,
        settings={"tokenizer": tokenizer_identity, "sequence_length": sequence_length},
    )


def _build_masked_schema(tokenizer_name: str) -> pa.Schema:
    """Return the columns of the export form `masked`: tokens of texts with calls (x*), and labels for training.

    Args:
        tokenizer_name: The name of the tokenizer, which a column's comment shows.
    """
    return pa.schema(
        [
            build_column("input_ids", pa.list_(pa.int32()), f"tokens of x* by the tokenizer of {tokenizer_name}"),
            build_column("labels", pa.list_(pa.int32()), "the same, with -100 for tokens of results"),
            build_column("attention_mask", pa.list_(pa.int8()), "1 for each token: nothing is padded"),
            build_column("window", pa.int32(), "number of the row within its text"),
            CALLS_COLUMN,
            *ORIGIN_COLUMNS,
        ]
    )


def _iter_masked_rows(
    encoding: "Encoding", sequence_length: int, corpus_text: CorpusText
) -> Iterator[Mapping[str, Any]]:
    """Split a text with calls into rows of at most `sequence_length` tokens with labels.

    A label is the token itself, or -100 if the token is in the result of a call. Training ignores such labels.
    """
    from toolformer_dag.training.sequences import iter_windows

    [tokens] = encoding.encode_texts_with_calls([corpus_text.text_with_calls])
    labels = _build_labels(tokens, corpus_text, encoding.markers)

    id_windows = iter_windows(_add_bos_and_eos(encoding, tokens.token_ids), sequence_length)
    label_windows = iter_windows(_add_bos_and_eos(encoding, labels), sequence_length)

    for number, (window_ids, window_labels) in enumerate(zip(id_windows, label_windows, strict=True)):
        yield {
            "input_ids": window_ids,
            "labels": window_labels,
            "attention_mask": [1] * len(window_ids),
            "window": number,
            **build_shared_columns(corpus_text),
        }


def _add_bos_and_eos(encoding: "Encoding", token_ids: Sequence[int]) -> list[int]:
    """Return the tokens of a text with the tokenizer's BOS before them and its EOS after them, if it has these."""
    return [*encoding.bos_ids, *token_ids, *encoding.eos_ids]


def _build_labels(text_tokens: "TextTokens", corpus_text: CorpusText, markers: CallMarkers) -> list[int]:
    """Build a label for each token of a text with calls.

    The label is the token itself, or IGNORED_LABEL (-100) if the token is in the result of a call, because tools write
    results.

    Args:
        text_tokens: The tokens of the text, and the character at which each begins.
        corpus_text: The text with its calls.
        markers: The texts around a call and before its result.
    """
    from toolformer_dag.training.sequences import IGNORED_LABEL

    result_spans = find_result_spans(corpus_text, markers)
    text_length = len(corpus_text.text_with_calls)
    is_in_result = _mark_tokens_in_spans(text_tokens.offsets, text_length, result_spans)

    labels: list[int] = np.where(is_in_result, IGNORED_LABEL, text_tokens.token_ids).tolist()
    return labels


class TextSpan(NamedTuple):
    """A part of a text: the index of its first character, and the index after its last."""

    start: int
    end: int


def find_result_spans(corpus_text: CorpusText, markers: CallMarkers = PAPER_MARKERS) -> list[TextSpan]:
    """Find where the results of the calls stand in a text with calls.

    Example:
        For the text "a [Add(1, 2) -> 3] b" the span is (16, 17), where "3" stands.

    Args:
        corpus_text: The text. The offset of a call is counted in the text without calls.
        markers: The texts around a call and before its result.
    """
    spans = []
    inserted_characters = 0  # the length of the calls so far
    for call in corpus_text.calls:
        inserted_characters += len(call.format_with_result(markers))
        call_end = call.offset + inserted_characters
        result_end = call_end - len(markers.end)
        result_start = result_end - len(call.result)
        spans.append(TextSpan(result_start, result_end))
    return spans


def _mark_tokens_in_spans(
    token_starts: NDArray[np.int32], text_length: int, spans: Sequence[TextSpan]
) -> NDArray[np.bool_]:
    """Mark the tokens that have at least one character in a span.

    Args:
        token_starts: For each token, the index of its first character in the text. Shape: (tokens,).
        text_length: The number of characters of the text.
        spans: The parts of the text. Empty ones mark no token.

    Returns:
        True or False for each token.
    """
    # A token ends where the next begins. Several tokens of one character begin at that character and hold it all:
    # for starts 0, 2, 2, 5 in a text of 8 characters the ends are 2, 3, 5, 8.
    next_starts = np.append(token_starts[1:], text_length)
    token_ends = np.maximum(next_starts, token_starts + 1)

    is_in_span = np.zeros(len(token_starts), np.bool_)
    for span in spans:
        if span.start < span.end:
            is_in_span |= (token_starts < span.end) & (token_ends > span.start)

    return is_in_span


PREFERENCE_SCHEMA = pa.schema(
    [
        build_column("prompt", pa.string(), "the text before the call"),
        build_column("chosen", pa.string(), "the kept call with its result, or no call, and the rest of the text"),
        build_column("rejected", pa.string(), "the rejected call with its own result, and the rest of the text"),
        build_column("kind", pa.string(), "rejected_call: a kept call against it; no_call: no call against it"),
        build_column("margin", pa.float64(), "by how much lower the loss after `chosen` is, nats"),
        build_column("chosen_call", CALL_TYPE, f"the call in `chosen`, null for no_call: {CALL_COMMENT}"),
        build_column("rejected_call", CALL_TYPE, "the call in `rejected`, likewise"),
        *ORIGIN_COLUMNS,
    ]
)
"""The columns of pairs."""
PREFERENCE_CARD_TEXT = (
    "`kind` says what `rejected` is compared with.\n\n"
    "- `rejected_call`: the kept call against the scored call of the same tool at the same position that helps\n"
    "  least, with its own result.\n"
    "- `no_call`: no call against a call that raised the loss by at least the tool's tau_f\n"
    "  (loss_result - loss_empty).\n\n"
    "The texts are those of C*. Other calls of a text are left out of both sides, as they were when the losses\n"
    "were measured. Both sides hold the rest of the text, because trainers append an end token."
)
"""What the card says of pairs."""


def build_preference_form(tau_f_by_lane: Mapping[str, float], markers: CallMarkers = PAPER_MARKERS) -> ExportForm:
    """Define the export form of pairs of a better and a worse text, for DPO and similar training.

    Args:
        tau_f_by_lane: For each lane (a tool with its settings), the threshold by which the filter kept its calls.
        markers: The texts around a call and before its result, such as " [", " -> " and "]".
    """
    thresholds = dict(tau_f_by_lane)

    return ExportForm(
        name="preference",
        schema=PREFERENCE_SCHEMA,
        iter_rows=partial(_iter_preference_rows, thresholds, markers),
        card_text=PREFERENCE_CARD_TEXT,
        settings={"tau_f": thresholds},
        join_sql=build_calls_join_sql("rejected_call"),
        needs_least_helpful_calls=True,
    )


def _iter_preference_rows(
    tau_f_by_lane: Mapping[str, float], markers: CallMarkers, corpus_text: CorpusText
) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each pair of a better and a worse version of a text.

    Args:
        tau_f_by_lane: For each lane (a tool with its settings), the threshold by which the filter kept its calls.
        markers: The texts around a call and before its result.
        corpus_text: The text with its calls.
    """
    for pair in iter_preference_pairs(corpus_text, tau_f_by_lane, markers):
        yield {**pair, **build_shared_columns(corpus_text)}
