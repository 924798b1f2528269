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


def build_calls_join(calls_column: str) -> str:
    """Return an SQL query, shown on the card, that finds the calls of exported rows in the warehouse again.

    calls_column: the SQL expression for the calls of a row, such as `unnest(calls)`.
    """
    return f"""\
SELECT row.digest, call.input, call.delta, scored.delta
FROM (SELECT digest, {calls_column} AS call FROM 'FOLDER/data/*.parquet') AS row
JOIN loss_deltas AS scored
  ON (scored.tool, scored.shard, scored.digest, scored.segment, scored.position, scored.sample)
   = (call.tool, call.shard, row.digest, call.segment, call.position, call.sample)"""


@dataclass(frozen=True, slots=True)
class ExportForm:
    """A form of training data: the columns, and a function that makes rows of a text.

    - `name`: its name on the command line
    - `schema`: the columns, each with its `comment`
    - `rows`: yields the rows of a text of C*; there may be none
    - `card`: what the card of the data set says of the form
    - `settings`: what determines the rows besides the texts
    - `join`: a query from rows to loss_deltas, for the card
    - `preferences`: whether `rows` reads `least_helpful` of a text
    - `length`: returns the tokens of a row if a trainer has to encode it, else 0
    """

    name: FormName
    schema: pa.Schema
    rows: Callable[[CorpusText], Iterator[Mapping[str, Any]]]
    card: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    join: str = build_calls_join("unnest(calls)")
    preferences: bool = False
    length: Callable[[Mapping[str, Any]], int] = lambda row: 0


def column(name: str, kind: pa.DataType, comment: str) -> pa.Field:
    """Return a column with its comment in the metadata."""
    return pa.field(name, kind, metadata={"comment": comment})


CALL = pa.struct(
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
CALLS = column("calls", pa.list_(CALL), f"the calls in order: {CALL_COMMENT}")
ORIGIN = (
    column("digest", pa.string(), "digest of the document"),
    column(
        "segment", pa.int32(), "number of the text in the document; (digest, segment) is its row in augmented_corpus"
    ),
    column("url", pa.string(), "where the document was found"),
    column("split", pa.string(), "train or heldout, by the document"),
)


def shared_columns(text: CorpusText) -> dict[str, Any]:
    """Return the values of the columns CALLS and ORIGIN, which rows of every form have; pairs have no `calls`."""
    return {
        "calls": [asdict(call) for call in text.calls],
        "digest": text.digest,
        "segment": text.segment,
        "url": text.url,
        "split": text.split,
    }


def text_form() -> ExportForm:
    """Return the form of x* and x as texts (paper, section 2), which the project's own finetuning trains on."""
    schema = pa.schema(
        [
            column("text", pa.string(), "x*: the text with its calls"),
            column("plain", pa.string(), "x: the text without calls; the baseline's corpus C"),
            CALLS,
            *ORIGIN,
        ]
    )
    about = (
        "Plain language modelling on `text` is what the paper trains; on `plain` it gives the paper's baseline.\n"
        "Results are predicted too, as in the paper; the form `masked` leaves them out of the loss."
    )
    return ExportForm(name="text", schema=schema, rows=_iter_text_rows, card=about)


def _iter_text_rows(text: CorpusText) -> Iterator[Mapping[str, Any]]:
    """Yield the row of a text in the form `text`."""
    yield {"text": text.text, "plain": text.plain, **shared_columns(text)}


def masked_form(encoding: "Encoding", tokenizer: str, *, sequence_length: int) -> ExportForm:
    """Define the export form of token sequences for training, where results of tools are not learned.

    Tokens of results have the label -100, which training ignores. A text of more than `sequence_length` tokens
    becomes several rows. Each begins with the last token of the row before.

    Args:
        tokenizer: The name of the tokenizer for people.
    """
    about = (
        f"Tokens are those of {tokenizer}, at most {sequence_length:,} in a row. Results have the label -100: a tool\n"
        "writes them, so the model need not learn to. The paper does predict them (`--form text`)."
    )

    tokenizer_identity = fingerprint(encoding.tokenizer.backend_tokenizer.to_str())

    return ExportForm(
        name="masked",
        schema=_build_masked_schema(tokenizer),
        rows=partial(_iter_masked_rows, encoding, sequence_length),
        card=about,
        settings={"tokenizer": tokenizer_identity, "sequence_length": sequence_length},
    )


def _build_masked_schema(tokenizer: str) -> pa.Schema:
    """Return the columns of the form `masked`. tokenizer: its name for people."""
    return pa.schema(
        [
            column("input_ids", pa.list_(pa.int32()), f"tokens of x* by the tokenizer of {tokenizer}"),
            column("labels", pa.list_(pa.int32()), "the same, with -100 for tokens of results"),
            column("attention_mask", pa.list_(pa.int8()), "1 for each token: nothing is padded"),
            column("window", pa.int32(), "number of the row within its text"),
            CALLS,
            *ORIGIN,
        ]
    )


def _iter_masked_rows(encoding: "Encoding", sequence_length: int, text: CorpusText) -> Iterator[Mapping[str, Any]]:
    """Split a text with calls into rows of at most `sequence_length` tokens with labels.

    A label is the token itself, or -100 if the token is in the result of a call. Training ignores such labels.
    """
    from toolformer_dag.training.sequences import windows

    [tokens] = encoding.with_calls([text.text])
    labels = _build_labels(tokens, text, encoding.markers)

    id_windows = windows(_with_ends(encoding, tokens.ids), sequence_length)
    label_windows = windows(_with_ends(encoding, labels), sequence_length)

    for number, (window_ids, window_labels) in enumerate(zip(id_windows, label_windows, strict=True)):
        yield {
            "input_ids": window_ids,
            "labels": window_labels,
            "attention_mask": [1] * len(window_ids),
            "window": number,
            **shared_columns(text),
        }


def _with_ends(encoding: "Encoding", ids: Sequence[int]) -> list[int]:
    """Return the tokens of a text with BOS before them and EOS after them, where the tokenizer has these."""
    return [*encoding.bos, *ids, *encoding.eos]


def _build_labels(tokens: "TextTokens", text: CorpusText, markers: CallMarkers) -> list[int]:
    """Return the tokens of a text, with IGNORED (-100) for those in the result of a call: tools write these."""
    from toolformer_dag.training.sequences import IGNORED

    in_result = _mark_tokens_in_spans(tokens.offsets, len(text.text), find_result_spans(text, markers))
    labels: list[int] = np.where(in_result, IGNORED, tokens.ids).tolist()
    return labels


class TextSpan(NamedTuple):
    """A part of a text: the index of its first character, and the index after its last."""

    start: int
    end: int


def find_result_spans(text: CorpusText, markers: CallMarkers = PAPER_MARKERS) -> list[TextSpan]:
    """Return the character spans of the calls' results in x*, the text with its calls."""
    spans = []
    inserted = 0  # characters of the calls so far
    for call in text.calls:
        inserted += len(call.written(markers))
        result_end = call.offset + inserted - len(markers.end)
        spans.append(TextSpan(result_end - len(call.result), result_end))
    return spans


def _mark_tokens_in_spans(starts: NDArray[np.int32], length: int, spans: Sequence[TextSpan]) -> NDArray[np.bool_]:
    """Mark the tokens of which at least one character is in a span.

    Args:
        starts: For each token, the index of its first character in the text.
        length: The number of characters of the text.
    """
    # A token ends where the next begins. Several tokens of one character begin at that character and hold it all:
    # for starts 0, 2, 2, 5 in a text of 8 characters the ends are 2, 3, 5, 8.
    ends = np.maximum(np.append(starts[1:], length), starts + 1)

    within = np.zeros(len(starts), np.bool_)
    for span in spans:
        if span.start < span.end:
            within |= (starts < span.end) & (ends > span.start)

    return within


PREFERENCES = pa.schema(
    [
        column("prompt", pa.string(), "the text before the call"),
        column("chosen", pa.string(), "the kept call with its result, or no call, and the rest of the text"),
        column("rejected", pa.string(), "the rejected call with its own result, and the rest of the text"),
        column("kind", pa.string(), "rejected_call: a kept call against it; no_call: no call against it"),
        column("margin", pa.float64(), "by how much lower the loss after `chosen` is, nats"),
        column("chosen_call", CALL, f"the call in `chosen`, null for no_call: {CALL_COMMENT}"),
        column("rejected_call", CALL, "the call in `rejected`, likewise"),
        *ORIGIN,
    ]
)
"""The columns of pairs."""
ABOUT_PREFERENCES = (
    "`kind` says what `rejected` is compared with.\n\n"
    "- `rejected_call`: the kept call against the scored call of the same tool at the same position that helps\n"
    "  least, with its own result.\n"
    "- `no_call`: no call against a call that raised the loss by at least the tool's tau_f\n"
    "  (loss_result - loss_empty).\n\n"
    "The texts are those of C*. Other calls of a text are left out of both sides, as they were when the losses\n"
    "were measured. Both sides hold the rest of the text, because trainers append an end token."
)
"""What the card says of pairs."""


def preference_form(tau_f: Mapping[str, float], markers: CallMarkers = PAPER_MARKERS) -> ExportForm:
    """Define the export form of pairs of a better and a worse text, for DPO and similar training.

    Args:
        tau_f: For each lane (a tool with its settings) the threshold by which the filter kept its calls.
        markers: The strings with which calls begin and end, such as `[` and `]`.
    """
    thresholds = dict(tau_f)

    return ExportForm(
        name="preference",
        schema=PREFERENCES,
        rows=partial(_iter_preference_rows, thresholds, markers),
        card=ABOUT_PREFERENCES,
        settings={"tau_f": thresholds},
        join=build_calls_join("rejected_call"),
        preferences=True,
    )


def _iter_preference_rows(
    tau_f: Mapping[str, float], markers: CallMarkers, text: CorpusText
) -> Iterator[Mapping[str, Any]]:
    """Yield a row per pair of a text."""
    for pair in iter_preference_pairs(text, tau_f, markers):
        yield {**pair, **shared_columns(text)}
