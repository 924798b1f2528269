"""Compare verdicts on recorded calls with labels that people gave, and choose the setting `traces.share` by the labels.

A label says whether the answer after a call rests on its result. The conversations of labelled calls are halved by a
hash. On one half the threshold is chosen: the relative gain above which verdict and label agree best. On the other half
it is tested, on calls that did not choose it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query

BOOTSTRAP_SAMPLE_COUNT = 1000
"""How many bootstrap samples the interval of the AUC is estimated from."""
SCORED_CALLS_SQL = """
SELECT conversation, record_id, turn, call, verdict, relative_gain FROM trace_calls
"""
SHARE_ABOVE_THRESHOLD_SQL = """
SELECT coalesce(avg((relative_gain > {threshold!r})::INT), 0) AS share FROM trace_chance WHERE counts
"""
"""Selects the share of swapped results that exceed a threshold."""
LABEL_EXAMPLE = '{"conversation": "traces.jsonl:12", "turn": 1, "call": 0, "label": true}'


@dataclass(frozen=True)
class Label:
    """What a person says of a call: whether the answer after it rests on its result.

    Attributes:
        conversation_name: the name of its conversation, as traces.jsonl:12, or the id of the record.
        message_index: the number of its message in the conversation.
        call_index: the number of the call in that message.
        rests_on_result: whether the answer after the call rests on its result, as the person says.
    """

    conversation_name: str
    message_index: int
    call_index: int
    rests_on_result: bool


@dataclass(frozen=True)
class LabelledCall:
    """A labelled call with its verdict.

    Attributes:
        conversation_name: the name of its conversation.
        rests_on_result: the label.
        is_judged_helpful: the verdict, true if it is "helps".
        relative_gain: the gain from which the verdict follows; None if the verdict is "cannot be told".
    """

    conversation_name: str
    rests_on_result: bool
    is_judged_helpful: bool
    relative_gain: float | None

    @property
    def relative_gain_or_zero(self) -> float:
        """The relative gain; 0 if there is none."""
        return self.relative_gain or 0.0


@dataclass(frozen=True)
class Agreement:
    """How verdicts agree with labels. Compared are the calls that have a label, and a verdict but "cannot be told".

    Attributes:
        label_count: the number of labels.
        unmatched_label_count: the number of labels for which there is no recorded call.
        undecided_label_count: the number of labels of calls with the verdict "cannot be told".
        base_rate: the share of compared calls whose label says that the answer rests on the result.
        agreement_share: the share of compared calls on which verdict and label agree.
        kappa: Cohen's kappa of verdicts and labels.
        auc: the AUC of the relative gain against the labels.
        auc_low: the lower end of its 95 % interval, by a bootstrap over conversations.
        auc_high: the upper end of that interval.
        chosen_share: the share of swapped results above the threshold that half of the conversations chooses.
        tested_call_count: the number of compared calls in the other half.
        tested_kappa: Cohen's kappa there, at that threshold.
    """

    label_count: int
    unmatched_label_count: int
    undecided_label_count: int
    base_rate: float
    agreement_share: float
    kappa: float
    auc: float
    auc_low: float
    auc_high: float
    chosen_share: float
    tested_call_count: int
    tested_kappa: float

    @property
    def compared_call_count(self) -> int:
        """The number of compared calls."""
        return self.label_count - self.unmatched_label_count - self.undecided_label_count


def read_labels(file: Path) -> list[Label]:
    """Read a file of labels: JSON lines such as LABEL_EXAMPLE.

    A line without the field `call` is about the first call of its message.

    Raises:
        UserError: The file cannot be read or has no label, or a line is not a label. Then the message has the number of
            the line.
    """
    labels: list[Label] = []
    for line_number, line in enumerate(_read_lines(file), 1):
        is_blank = not line.strip()
        if not is_blank:
            labels.append(_parse_label(line, f"--labels {file}, line {line_number}"))

    if not labels:
        raise UserError(f"--labels {file}: no label; write JSON lines such as {LABEL_EXAMPLE}")
    return labels


def _read_lines(file: Path) -> list[bytes]:
    """Return the lines of a file. Raises UserError if it cannot be read."""
    try:
        return file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f"--labels {file}: {error.strerror}; name a file of JSON lines such as {LABEL_EXAMPLE}"
        ) from error


def _parse_label(line: bytes, location: str) -> Label:
    """Parse a line of JSON such as LABEL_EXAMPLE.

    Args:
        line: The line.
        location: The file and the number of the line, for error messages.

    Raises:
        UserError: The line is no JSON or no label.
    """
    try:
        fields: Any = orjson.loads(line)
    except ValueError as error:
        raise UserError(f"{location}: no JSON ({error}); write {LABEL_EXAMPLE}") from error

    label = _parse_label_fields(fields) if isinstance(fields, dict) else None
    if label is None:
        raise UserError(f"{location}: write a conversation, a turn and a label, as in {LABEL_EXAMPLE}")
    return label


def _parse_label_fields(fields: Mapping[str, Any]) -> Label | None:
    """Convert the fields of a JSON object such as LABEL_EXAMPLE to a label.

    The field `record_id`, the id of a record, may stand in place of `conversation`.

    Returns:
        The label, or None if a field is missing or has another type.
    """
    conversation = fields.get("conversation", fields.get("record_id"))
    turn = fields.get("turn")
    call = fields.get("call", 0)
    rests_on_result = fields.get("label")

    if not isinstance(conversation, str):
        return None
    if rests_on_result not in (True, False):  # 1 and 0 are labels too, since they equal these
        return None
    if type(turn) is not int or type(call) is not int:  # True is an instance of int, but no number of a message
        return None
    return Label(conversation, turn, call, bool(rests_on_result))


def measure_label_agreement(database: Path, labels: Sequence[Label]) -> Agreement:
    """Measure how well the verdicts on calls agree with labels that people gave.

    Only calls with a verdict are compared, not the calls that "cannot be told". The labels of about half of the
    conversations choose a threshold, the relative gain above which a call counts as helpful. The threshold is tested on
    the other half.

    Args:
        database: The file with the verdicts, which `judge` wrote.
        labels: The labels.

    Raises:
        UserError: The compared calls do not have labels of both kinds, true and false.
    """
    labelled = _join_labels_with_verdicts(database, labels)
    compared = _select_compared_calls(labelled, label_count=len(labels))

    ratings = _Ratings.from_calls(compared)
    interval = _estimate_auc_interval(compared)  # of 95 %
    threshold_choice = _choose_and_test_threshold(compared)
    return Agreement(
        label_count=len(labels),
        unmatched_label_count=len(labels) - len(labelled),
        undecided_label_count=len(labelled) - len(compared),
        base_rate=ratings.base_rate,
        agreement_share=ratings.agreement,
        kappa=ratings.kappa,
        auc=compute_auc(compared),
        auc_low=interval.low,
        auc_high=interval.high,
        chosen_share=_query_share_above_threshold(database, threshold_choice.threshold),
        tested_call_count=threshold_choice.tested_call_count,
        tested_kappa=threshold_choice.tested_kappa,
    )


def _select_compared_calls(labelled_calls: Sequence[LabelledCall], label_count: int) -> list[LabelledCall]:
    """Select the labelled calls with a verdict other than "cannot be told".

    Args:
        labelled_calls: The labelled calls. A call that "cannot be told" has no relative gain.
        label_count: The number of labels, for the error message.

    Raises:
        UserError: These calls do not have labels of both kinds, true and false.
    """
    compared = [call for call in labelled_calls if call.relative_gain is not None]  # None: it cannot be told

    distinct_labels = {call.rests_on_result for call in compared}
    if len(distinct_labels) < 2:
        raise UserError(
            f"{len(compared)} of {label_count} labels are of calls that can be told; label some of either kind"
        )
    return compared


@dataclass(frozen=True)
class _Ratings:
    """Two ratings of the same calls, at least one.

    Attributes:
        labels: for each call, whether the answer rests on its result, as a person says.
        verdicts: for each call, whether it helps, as the judge says.
    """

    labels: Sequence[bool]
    verdicts: Sequence[bool]

    @staticmethod
    def from_calls(calls: Sequence[LabelledCall]) -> "_Ratings":
        """Return the labels and verdicts of calls."""
        return _Ratings(
            labels=[call.rests_on_result for call in calls],
            verdicts=[call.is_judged_helpful for call in calls],
        )

    @property
    def base_rate(self) -> float:
        """The share of calls whose label says that the answer rests on the result."""
        return sum(self.labels) / len(self.labels)

    @property
    def agreement(self) -> float:
        """The share of calls on which label and verdict agree."""
        return _compute_agreement_share(self.labels, self.verdicts)

    @property
    def kappa(self) -> float:
        """Cohen's kappa of labels and verdicts."""
        return compute_kappa(self.labels, self.verdicts)


class _ThresholdChoice(NamedTuple):
    """A threshold of the relative gain that one half of the conversations chose, and how it does on the other.

    Attributes:
        threshold: the threshold; a call above it counts as helpful.
        tested_call_count: the number of calls in the other half.
        tested_kappa: Cohen's kappa of labels and threshold there.
    """

    threshold: float
    tested_call_count: int
    tested_kappa: float


def _choose_and_test_threshold(calls: Sequence[LabelledCall]) -> _ThresholdChoice:
    """Choose the threshold on one half of the conversations, and test it on the other."""
    choosing_calls = [call for call in calls if _is_in_choosing_half(call.conversation_name)]
    tested_calls = [call for call in calls if not _is_in_choosing_half(call.conversation_name)]

    threshold = choose_best_threshold(choosing_calls)
    return _ThresholdChoice(
        threshold=threshold,
        tested_call_count=len(tested_calls),
        tested_kappa=_compute_kappa_at_threshold(threshold, tested_calls),
    )


def _compute_kappa_at_threshold(threshold: float, calls: Sequence[LabelledCall]) -> float:
    """Return Cohen's kappa of the labels and of other verdicts, by which a call with a gain above a threshold helps."""
    labels = [call.rests_on_result for call in calls]
    verdicts = [call.relative_gain_or_zero > threshold for call in calls]
    return compute_kappa(labels, verdicts)


def _query_share_above_threshold(database: Path, threshold: float) -> float:
    """Return the share of swapped results whose relative gain exceeds a threshold.

    A swapped result was put in place of a call's own, so a high gain is due to chance there.
    """
    sql = SHARE_ABOVE_THRESHOLD_SQL.format(threshold=threshold)
    [share] = query(database, sql)["share"]
    return float(share)


def _join_labels_with_verdicts(database: Path, labels: Sequence[Label]) -> list[LabelledCall]:
    """Look up the verdicts on the labelled calls.

    Args:
        database: The file with the verdicts.
        labels: The labels, which name a conversation or the id of the record that it was read from.

    Returns:
        The labelled calls. Labels of calls that the file does not hold are left out.
    """
    row_by_position = _query_call_rows_by_position(database)  # a call is there under its conversation and its record
    labelled_calls: list[LabelledCall] = []
    for label in labels:
        # `conversation_name` may also hold the id of a record.
        position = (label.conversation_name, label.message_index, label.call_index)
        row = row_by_position.get(position)
        if row is not None:
            labelled_calls.append(_build_labeled_call(row, label))
    return labelled_calls


def _query_call_rows_by_position(database: Path) -> dict[tuple[str, int, int], Mapping[str, Any]]:
    """Return the row of each call by its position: conversation, number of the message, number of the call in it.

    Each call is there twice, because a label may name the conversation or the id of the record it was read from. The
    rows are those of SCORED_CALLS_SQL.
    """
    row_by_position: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    for row in query(database, SCORED_CALLS_SQL).to_dicts():
        row_by_position[row["record_id"], row["turn"], row["call"]] = row
        row_by_position[row["conversation"], row["turn"], row["call"]] = row
    return row_by_position


def _build_labeled_call(call_row: Mapping[str, Any], label: Label) -> LabelledCall:
    """Return a call, which is a row of SCORED_CALLS_SQL, with its label."""
    has_verdict = call_row["verdict"] != "cannot be told"
    return LabelledCall(
        conversation_name=call_row["conversation"],
        rests_on_result=label.rests_on_result,
        is_judged_helpful=call_row["verdict"] == "helps",
        relative_gain=call_row["relative_gain"] if has_verdict else None,
    )


def compute_kappa(labels: Sequence[bool], verdicts: Sequence[bool]) -> float:
    """Compute Cohen's kappa, which says how much more two ratings agree than by chance.

    Returns:
        1 if each verdict agrees with its label, 0 if they agree as often as by chance. Also 0 without labels, and if
        all labels and all verdicts are true, or all are false: then they agree, but would by chance too.
    """
    if not labels:
        return 0.0

    agreement_by_chance = _compute_agreement_by_chance(labels, verdicts)
    if agreement_by_chance >= 1:
        return 0.0

    agreement = _compute_agreement_share(labels, verdicts)
    return (agreement - agreement_by_chance) / (1 - agreement_by_chance)


def _compute_agreement_share(labels: Sequence[bool], verdicts: Sequence[bool]) -> float:
    """Return the share of calls on which label and verdict agree."""
    agreement_count = sum(label == verdict for label, verdict in zip(labels, verdicts, strict=True))
    return agreement_count / len(labels)


def _compute_agreement_by_chance(labels: Sequence[bool], verdicts: Sequence[bool]) -> float:
    """Return the share of calls on which both would agree if the verdicts were independent of the labels."""
    count = len(labels)
    both_true = sum(labels) * sum(verdicts)
    both_false = (count - sum(labels)) * (count - sum(verdicts))
    return (both_true + both_false) / count**2


def compute_auc(calls: Sequence[LabelledCall]) -> float:
    """Compute the chance that a call whose label is true has a larger relative gain than one whose label is false.

    This is the AUC, the area under the ROC curve: 1 if the gains tell the two kinds of calls apart, 0.5 if they say
    nothing. Equal gains count half. If all labels are alike, the chance is 0.5.
    """
    gains_of_true = [call.relative_gain_or_zero for call in calls if call.rests_on_result]
    gains_of_false = [call.relative_gain_or_zero for call in calls if not call.rests_on_result]
    if not gains_of_true or not gains_of_false:
        return 0.5

    won_comparisons = sum(_count_smaller_gains(gain, gains_of_false) for gain in gains_of_true)
    comparison_count = len(gains_of_true) * len(gains_of_false)
    return won_comparisons / comparison_count


def _count_smaller_gains(gain: float, other_gains: Sequence[float]) -> float:
    """Return how many of the other gains are smaller; an equal one counts half."""
    return sum((gain > other) + 0.5 * (gain == other) for other in other_gains)


class _Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


def _estimate_auc_interval(calls: Sequence[LabelledCall]) -> _Interval:
    """Estimate the 95 % interval of the AUC by a bootstrap over conversations.

    A bootstrap draws samples with replacement, and takes the spread of their AUCs. Whole conversations are drawn,
    because the calls of one are alike. The random numbers are the same in every run.
    """
    calls_of_conversations = _group_calls_by_conversation(calls)
    random_generator = random.Random(1)
    aucs = sorted(_compute_sample_auc(calls_of_conversations, random_generator) for _ in range(BOOTSTRAP_SAMPLE_COUNT))

    low_index = round(0.025 * BOOTSTRAP_SAMPLE_COUNT)
    high_index = round(0.975 * BOOTSTRAP_SAMPLE_COUNT) - 1
    return _Interval(low=aucs[low_index], high=aucs[high_index])


def _compute_sample_auc(
    calls_of_conversations: Sequence[Sequence[LabelledCall]], random_generator: random.Random
) -> float:
    """Return the AUC of as many conversations as there are, drawn with replacement."""
    drawn_conversations = random_generator.choices(calls_of_conversations, k=len(calls_of_conversations))
    return compute_auc(list(chain.from_iterable(drawn_conversations)))


def _group_calls_by_conversation(calls: Sequence[LabelledCall]) -> list[list[LabelledCall]]:
    """Return the calls of each conversation, in the order of their names."""
    calls_by_conversation: dict[str, list[LabelledCall]] = {}
    for call in calls:
        calls_by_conversation.setdefault(call.conversation_name, []).append(call)
    return [calls_by_conversation[name] for name in sorted(calls_by_conversation)]


def choose_best_threshold(calls: Sequence[LabelledCall]) -> float:
    """Choose the relative gain above which calls should count as helpful, so that this agrees best with their labels.

    Returns:
        The gain of one of the calls, chosen by Cohen's kappa. Of several equally good ones it is the lowest. 0 without
        calls.
    """
    thresholds = sorted({call.relative_gain_or_zero for call in calls})
    return max(thresholds, key=lambda threshold: _compute_kappa_at_threshold(threshold, calls), default=0.0)


def _is_in_choosing_half(conversation_name: str) -> bool:
    """Return whether a hash puts a conversation into the half that chooses the threshold."""
    [hash_byte] = blake2b(conversation_name.encode(), digest_size=1).digest()
    return hash_byte < 128


def format_agreement_lines(agreement: Agreement) -> list[str]:
    """Return the three lines of `judge --labels`: what was compared, how it agrees, and which share fits the labels."""
    return [_format_counts_line(agreement), _format_agreement_line(agreement), _format_choice_line(agreement)]


def _format_counts_line(agreement: Agreement) -> str:
    """Return a line that says how many labels there are, and how many were compared."""
    return (
        f"{agreement.label_count:,} labels: {agreement.unmatched_label_count:,} of no recorded call, "
        f"{agreement.undecided_label_count:,} of calls that cannot be told, "
        f"{agreement.compared_call_count:,} compared, of which {agreement.base_rate:.0%} rest on their result"
    )


def _format_agreement_line(agreement: Agreement) -> str:
    """Return a line that says how verdicts and gains agree with the labels."""
    return (
        f"verdict and label agree on {agreement.agreement_share:.0%}, kappa {agreement.kappa:.2f}; "
        f"AUC of the relative gain {agreement.auc:.2f} ({agreement.auc_low:.2f}-{agreement.auc_high:.2f})"
    )


def _format_choice_line(agreement: Agreement) -> str:
    """Return a line that says which share the labels choose, and how it does on other calls."""
    return (
        f"half of the conversations chooses --share {agreement.chosen_share:.3g}; "
        f"on the other half ({agreement.tested_call_count:,} calls) kappa {agreement.tested_kappa:.2f}"
    )
