"""Compare verdicts on recorded calls with labels that people gave, and choose the setting `traces.share` by the labels.

A label says whether the answer after a call rests on its result. The conversations of labelled calls are halved by a
hash. On one half the threshold is chosen: the relative gain above which verdict and label agree best. On the other half
it is tested, on calls that did not choose it.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from toolformer_dag.files import UserError
from toolformer_dag.lake.warehouse import query

SAMPLES = 1000  # bootstrap samples of the interval
SCORED = """
SELECT conversation, record_id, turn, call, verdict, relative_gain FROM trace_calls
"""
SHARE = """
SELECT coalesce(avg((relative_gain > {threshold!r})::INT), 0) AS share FROM trace_chance WHERE counts
"""
"""Selects the share of swapped results that exceed a threshold."""
FORM = '{"conversation": "traces.jsonl:12", "turn": 1, "call": 0, "label": true}'


@dataclass(frozen=True)
class Label:
    """What a person says of a call.

    Attributes:
        conversation: the name of its conversation, as traces.jsonl:12, or the id of the record.
        turn: the number of its message in the conversation.
        call: the number of the call in that message.
        rests_on_result: whether the answer after the call rests on its result, as the person says.
    """

    conversation: str
    turn: int
    call: int
    rests_on_result: bool


@dataclass(frozen=True)
class LabelledCall:
    """A labelled call with its verdict.

    Attributes:
        conversation: the name of its conversation.
        rests_on_result: the label.
        helps: the verdict, true if it is "helps".
        relative_gain: the gain from which the verdict follows; None if the verdict is "cannot be told".
    """

    conversation: str
    rests_on_result: bool
    helps: bool
    relative_gain: float | None

    @property
    def gain(self) -> float:
        """The relative gain; 0 if there is none."""
        return self.relative_gain or 0.0


@dataclass(frozen=True)
class Agreement:
    """How verdicts agree with labels. Compared are the calls that have a label, and a verdict but "cannot be told".

    Attributes:
        labels: the number of labels.
        unmatched: the number of labels for which there is no recorded call.
        undecided: the number of labels of calls with the verdict "cannot be told".
        base_rate: the share of compared calls whose label says that the answer rests on the result.
        agree: the share of compared calls on which verdict and label agree.
        kappa: Cohen's kappa of verdicts and labels.
        auc: the AUC of the relative gain against the labels.
        low: the lower end of its 95 % interval, by a bootstrap over conversations.
        high: the upper end of that interval.
        share: the share of swapped results above the threshold that half of the conversations chooses.
        tested: the number of compared calls in the other half.
        tested_kappa: Cohen's kappa there, at that threshold.
    """

    labels: int
    unmatched: int
    undecided: int
    base_rate: float
    agree: float
    kappa: float
    auc: float
    low: float
    high: float
    share: float
    tested: int
    tested_kappa: float

    @property
    def compared(self) -> int:
        """The number of compared calls."""
        return self.labels - self.unmatched - self.undecided


def read_labels(file: Path) -> list[Label]:
    """Read a file of labels: JSON lines such as FORM.

    A line without the field `call` is about the first call of its message.

    Raises:
        UserError: The file cannot be read or has no label, or a line is not a label. Then the message has the number of
            the line.
    """
    labels: list[Label] = []
    for number, line in enumerate(_read_lines(file), 1):
        is_blank = not line.strip()
        if not is_blank:
            labels.append(_parse_label(line, f"--labels {file}, line {number}"))

    if not labels:
        raise UserError(f"--labels {file}: no label; write JSON lines such as {FORM}")
    return labels


def _read_lines(file: Path) -> list[bytes]:
    """Return the lines of a file. Raises UserError if it cannot be read."""
    try:
        return file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--labels {file}: {error.strerror}; name a file of JSON lines such as {FORM}") from error


def _parse_label(line: bytes, place: str) -> Label:
    """Parse a line of JSON such as FORM.

    Args:
        line: The line.
        place: The file and the number of the line, for error messages.

    Raises:
        UserError: The line is no JSON or no label.
    """
    try:
        fields: Any = orjson.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: no JSON ({error}); write {FORM}") from error

    label = _parse_label_fields(fields) if isinstance(fields, dict) else None
    if label is None:
        raise UserError(f"{place}: write a conversation, a turn and a label, as in {FORM}")
    return label


def _parse_label_fields(fields: Mapping[str, Any]) -> Label | None:
    """Convert the fields of a JSON object such as FORM to a label.

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


def label_agreement(database: Path, labels: Sequence[Label]) -> Agreement:
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

    ratings = _Ratings.of(compared)
    interval = _estimate_auc_interval(compared)  # of 95 %
    threshold_choice = _choose_threshold(compared)
    return Agreement(
        labels=len(labels),
        unmatched=len(labels) - len(labelled),
        undecided=len(labelled) - len(compared),
        base_rate=ratings.base_rate,
        agree=ratings.agreement,
        kappa=ratings.kappa,
        auc=auc_of(compared),
        low=interval.low,
        high=interval.high,
        share=_query_share_above(database, threshold_choice.threshold),
        tested=threshold_choice.tested,
        tested_kappa=threshold_choice.tested_kappa,
    )


def _select_compared_calls(labelled: Sequence[LabelledCall], label_count: int) -> list[LabelledCall]:
    """Select the labelled calls with a verdict other than "cannot be told".

    Args:
        labelled: The labelled calls.
        label_count: The number of labels, for the error message.

    Raises:
        UserError: These calls do not have labels of both kinds, true and false.
    """
    compared = [call for call in labelled if call.relative_gain is not None]  # None: it cannot be told

    kinds_of_labels = {call.rests_on_result for call in compared}
    if len(kinds_of_labels) < 2:
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
    def of(calls: Sequence[LabelledCall]) -> "_Ratings":
        """Return the labels and verdicts of calls."""
        return _Ratings(
            labels=[call.rests_on_result for call in calls],
            verdicts=[call.helps for call in calls],
        )

    @property
    def base_rate(self) -> float:
        """The share of calls whose label says that the answer rests on the result."""
        return sum(self.labels) / len(self.labels)

    @property
    def agreement(self) -> float:
        """The share of calls on which label and verdict agree."""
        return _compute_share_of_equal(self.labels, self.verdicts)

    @property
    def kappa(self) -> float:
        """Cohen's kappa of labels and verdicts."""
        return kappa(self.labels, self.verdicts)


class _ThresholdChoice(NamedTuple):
    """A threshold of the relative gain that one half of the conversations chose, and how it does on the other.

    Attributes:
        threshold: the threshold; a call above it counts as helpful.
        tested: the number of calls in the other half.
        tested_kappa: Cohen's kappa of labels and threshold there.
    """

    threshold: float
    tested: int
    tested_kappa: float


def _choose_threshold(calls: Sequence[LabelledCall]) -> _ThresholdChoice:
    """Choose the threshold on one half of the conversations, and test it on the other."""
    choosing = [call for call in calls if _is_in_first_half(call.conversation)]
    tested = [call for call in calls if not _is_in_first_half(call.conversation)]
    threshold = choose_best_threshold(choosing)
    return _ThresholdChoice(threshold, tested=len(tested), tested_kappa=_compute_kappa_at(threshold, tested))


def _compute_kappa_at(threshold: float, calls: Sequence[LabelledCall]) -> float:
    """Return Cohen's kappa of the labels, and of verdicts by which a call with a gain above a threshold helps."""
    labels = [call.rests_on_result for call in calls]
    verdicts = [call.gain > threshold for call in calls]
    return kappa(labels, verdicts)


def _query_share_above(database: Path, threshold: float) -> float:
    """Return the share of swapped results whose relative gain exceeds a threshold."""
    [share] = query(database, SHARE.format(threshold=threshold))["share"]
    return float(share)


def _join_labels_with_verdicts(database: Path, labels: Sequence[Label]) -> list[LabelledCall]:
    """Look up the verdicts on the labelled calls.

    Args:
        database: The file with the verdicts.
        labels: The labels, which name a conversation or the id of the record that it was read from.

    Returns:
        The labelled calls. Labels of calls that the file does not hold are left out.
    """
    row_by_call = _query_calls_by_name(database)
    labelled: list[LabelledCall] = []
    for label in labels:
        row = row_by_call.get((label.conversation, label.turn, label.call))
        if row is not None:
            labelled.append(_build_labeled_call(row, label))
    return labelled


def _query_calls_by_name(database: Path) -> dict[tuple[str, int, int], Mapping[str, Any]]:
    """Return the rows of SCORED by conversation, turn and call; the conversation by its name and by its record's id."""
    calls: dict[tuple[str, int, int], Mapping[str, Any]] = {}
    for row in query(database, SCORED).to_dicts():
        calls[row["record_id"], row["turn"], row["call"]] = row
        calls[row["conversation"], row["turn"], row["call"]] = row
    return calls


def _build_labeled_call(row: Mapping[str, Any], label: Label) -> LabelledCall:
    """Return a call, which is a row of SCORED, with its label."""
    has_verdict = row["verdict"] != "cannot be told"
    return LabelledCall(
        conversation=row["conversation"],
        rests_on_result=label.rests_on_result,
        helps=row["verdict"] == "helps",
        relative_gain=row["relative_gain"] if has_verdict else None,
    )


def kappa(labels: Sequence[bool], verdicts: Sequence[bool]) -> float:
    """Compute Cohen's kappa, which says how much more two ratings agree than by chance.

    Returns:
        1 if all labels and verdicts agree, 0 if they agree as often as by chance. Also 0 without labels, and if all
        labels and verdicts are the same.
    """
    if not labels:
        return 0.0
    by_chance = _compute_agreement_by_chance(labels, verdicts)
    if by_chance >= 1:
        return 0.0
    return (_compute_share_of_equal(labels, verdicts) - by_chance) / (1 - by_chance)


def _compute_share_of_equal(labels: Sequence[bool], verdicts: Sequence[bool]) -> float:
    """Return the share of calls on which label and verdict agree."""
    return sum(label == verdict for label, verdict in zip(labels, verdicts, strict=True)) / len(labels)


def _compute_agreement_by_chance(labels: Sequence[bool], verdicts: Sequence[bool]) -> float:
    """Return the share of calls on which they would agree if the verdicts were independent of the labels."""
    count = len(labels)
    both_true = sum(labels) * sum(verdicts)
    both_false = (count - sum(labels)) * (count - sum(verdicts))
    return (both_true + both_false) / count**2


def auc_of(calls: Sequence[LabelledCall]) -> float:
    """Compute the chance that a call whose label is true has a larger relative gain than one whose label is false.

    Equal gains count half. If all labels are alike, the chance is 0.5.
    """
    gains_of_true = [call.gain for call in calls if call.rests_on_result]
    gains_of_false = [call.gain for call in calls if not call.rests_on_result]
    if not gains_of_true or not gains_of_false:
        return 0.5

    won_comparisons = sum(_count_below(gain, gains_of_false) for gain in gains_of_true)
    return won_comparisons / (len(gains_of_true) * len(gains_of_false))


def _count_below(gain: float, others: Sequence[float]) -> float:
    """Return how many of the other gains are smaller; an equal one counts half."""
    return sum((gain > other) + 0.5 * (gain == other) for other in others)


class _Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


def _estimate_auc_interval(calls: Sequence[LabelledCall]) -> _Interval:
    """Return the 95 % interval of the AUC over bootstrap samples of conversations."""
    groups = _group_by_conversation(calls)
    chance = random.Random(1)
    aucs = sorted(_compute_sample_auc(groups, chance) for _ in range(SAMPLES))
    return _Interval(low=aucs[round(0.025 * SAMPLES)], high=aucs[round(0.975 * SAMPLES) - 1])


def _compute_sample_auc(groups: Sequence[Sequence[LabelledCall]], chance: random.Random) -> float:
    """Return the AUC of as many conversations as there are, drawn with replacement. groups: calls by conversation."""
    sample = chance.choices(groups, k=len(groups))
    return auc_of([call for group in sample for call in group])


def _group_by_conversation(calls: Sequence[LabelledCall]) -> list[list[LabelledCall]]:
    """Return the calls of each conversation, in the order of their names."""
    groups: dict[str, list[LabelledCall]] = {}
    for call in calls:
        groups.setdefault(call.conversation, []).append(call)
    return [groups[name] for name in sorted(groups)]


def choose_best_threshold(calls: Sequence[LabelledCall]) -> float:
    """Choose the relative gain above which calls should count as helpful, so that this agrees best with their labels.

    Returns:
        The gain of one of the calls, chosen by Cohen's kappa. Of several equally good ones it is the lowest. 0 without
        calls.
    """
    thresholds = sorted({call.gain for call in calls})
    return max(thresholds, key=lambda threshold: _compute_kappa_at(threshold, calls), default=0.0)


def _is_in_first_half(conversation: str) -> bool:
    """Return whether a hash puts a conversation into the half that chooses the threshold."""
    return blake2b(conversation.encode(), digest_size=1).digest()[0] < 128


def format_agreement_lines(agreement: Agreement) -> list[str]:
    """Return the three lines of `judge --labels`: what was compared, how it agrees, and which share fits the labels."""
    return [_format_counts_line(agreement), _format_agreement_line(agreement), _format_choice_line(agreement)]


def _format_counts_line(agreement: Agreement) -> str:
    """Return a line that says how many labels there are, and how many were compared."""
    return (
        f"{agreement.labels:,} labels: {agreement.unmatched:,} of no recorded call, {agreement.undecided:,} of calls "
        f"that cannot be told, {agreement.compared:,} compared, of which {agreement.base_rate:.0%} rest on their result"
    )


def _format_agreement_line(agreement: Agreement) -> str:
    """Return a line that says how verdicts and gains agree with the labels."""
    return (
        f"verdict and label agree on {agreement.agree:.0%}, kappa {agreement.kappa:.2f}; AUC of the relative gain "
        f"{agreement.auc:.2f} ({agreement.low:.2f}-{agreement.high:.2f})"
    )


def _format_choice_line(agreement: Agreement) -> str:
    """Return a line that says which share the labels choose, and how it does on other calls."""
    return (
        f"half of the conversations chooses --share {agreement.share:.3g}; on the other half ({agreement.tested:,} "
        f"calls) kappa {agreement.tested_kappa:.2f}"
    )
