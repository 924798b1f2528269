"""Choose results of other conversations to put in place of the result of a recorded call.

They are results that the same tool gave elsewhere. If what follows the call rests on its result, it is less likely with
another one in its place. If the tool gave too few, see `alternatives`. These are pure functions over plain values;
the caller decides where the results come from:

- a shard's own calls first (`Donors`), so that a file that comes or goes changes nothing for the calls of others
- results of other shards (`exchanged_results`) only if the shard has too few of the tool

Conversations that begin alike are one *document*: their results may be right for each other, and are not exchanged.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.traces.result_values import have_same_values

EXCHANGE_VERSION = 4
"""A version number, raised when the same calls would get other results."""
MAX_DONORS_PER_TOOL = 1000
"""The maximum number of results of a tool that are kept for the calls of a shard: the ones with the smallest hashes."""
MAX_DONOR_CHARACTERS = 1 << 16
"""The maximum number of characters of a result that are kept; the judge reads `traces.result_tokens` tokens of it."""


class Donor(NamedTuple):
    """A result that other calls may get in place of their own.

    Attributes:
        hash: a hash of the whole result; donors are sorted by it, so the order of the conversations does not matter.
        result: its first MAX_DONOR_CHARACTERS characters.
        document: the hash that names its conversation (`compute_document_hash`); of several the smallest.
    """

    hash: str
    result: str
    document: str


class Donors:
    """The donors of each tool, collected call by call: results that other calls may get in place of their own.

    Of each tool the `max_donors_per_tool` results with the smallest hashes are kept. Failed calls give no donor.

    Memory: twice `max_donors_per_tool` results per tool, whatever the number of calls.
    """

    def __init__(self, max_donors_per_tool: int = MAX_DONORS_PER_TOOL) -> None:
        self._max_donors_per_tool = max_donors_per_tool
        self._donors_by_tool: dict[str, dict[str, Donor]] = {}  # tool -> hash -> donor
        # The largest hash of the donors of a tool that was full once. Larger ones are passed over.
        self._largest_hash_by_tool: dict[str, str] = {}

    def add_call_result(self, document_hash: str, call: RecordedCall) -> None:
        """Keep the result of a call, which other calls may get, if its hash is among the smallest of its tool.

        Calls that failed or have no result are passed over.

        Args:
            document_hash: The document of the call (`compute_document_hash`).
            call: The call.
        """
        if call.result is None or call.failed:
            return

        result_hash = hash_text(call.result)
        largest_hash = self._largest_hash_by_tool.get(call.tool)  # None until the larger half was dropped once
        if largest_hash is None or result_hash <= largest_hash:
            donor = Donor(result_hash, _cut_result(call.result), document_hash)
            self._add_donor(call.tool, donor)

    def _add_donor(self, tool: str, donor: Donor) -> None:
        """Keep a donor (a result that other calls may get) of a tool, in `_donors_by_tool`.

        If there are too many then, the half with the larger hashes is dropped.
        """
        donors = self._donors_by_tool.setdefault(tool, {})

        # Of several donors with the same result, the one with the smallest document is kept.
        earlier_donor = donors.get(donor.hash, donor)
        if donor.document <= earlier_donor.document:
            donors[donor.hash] = donor

        if len(donors) >= 2 * self._max_donors_per_tool:
            self._drop_larger_half(tool)

    def _drop_larger_half(self, tool: str) -> None:
        """Keep the donors of a tool with the smallest hashes, and pass over larger hashes from now on."""
        donors_by_ascending_hash = sorted(self._donors_by_tool[tool].items())
        kept_donors = dict(donors_by_ascending_hash[: self._max_donors_per_tool])
        self._donors_by_tool[tool] = kept_donors
        self._largest_hash_by_tool[tool] = max(kept_donors)

    def iter_donors_by_tool(self) -> Iterator[tuple[str, list[Donor]]]:
        """Yield each tool with its donors in the order of their hashes."""
        for tool, donors in self._donors_by_tool.items():
            yield tool, sorted(donors.values())[: self._max_donors_per_tool]

    def build_circle_by_tool(self) -> dict[str, "Circle"]:
        """Return the donors of each tool as a circle, from which calls take theirs."""
        return {tool: Circle.from_sorted_donors(donors) for tool, donors in self.iter_donors_by_tool()}


@dataclass(frozen=True, slots=True)
class Circle:
    """The donors of a tool in the order of their hashes; after the last comes the first.

    A document is a group of conversations that begin alike; its calls get no results of each other.

    Attributes:
        donors: the donors, sorted by hash.
        steps_to_other_document: for each donor, how many donors further the next one of another document is; 0 if there
            is none.
    """

    donors: Sequence[Donor]
    steps_to_other_document: Sequence[int]

    @staticmethod
    def from_sorted_donors(donors: Sequence[Donor]) -> "Circle":
        """Return a circle of donors, which must be sorted by hash."""
        document_hashes = [donor.document for donor in donors]
        return Circle(donors, _count_steps_to_other_document(document_hashes))

    def iter_other_results(self, document_hash: str, call: RecordedCall) -> Iterator[str]:
        """Iterate over the donors' results, which may be put in place of the result of a call.

        Donors are sorted by hash, as in a circle. The walk begins where the hash of the call would stand, and goes
        round once. So a donor that comes or goes hardly changes which results a call gets first.

        Args:
            document_hash: The document of the call (`compute_document_hash`).
            call: The call.

        Yields:
            Results of other documents, with other values than the result of the call.
        """
        call_result = _cut_result(call.result or "")  # donors are cut in the same way
        start_hash = hash_call(document_hash, call)
        for donor in self._iter_donors_of_other_documents(document_hash, start_hash):
            if not have_same_values(donor.result, call_result):
                yield donor.result

    def _iter_donors_of_other_documents(self, document_hash: str, start_hash: str) -> Iterator[Donor]:
        """Yield the donors (results that other calls may get) once each, without those of one document.

        Args:
            document_hash: The document to skip.
            start_hash: The first is the donor whose hash comes next after this one, or is this one. After the last
                donor comes the first, as in a circle.
        """
        start = bisect_left(self.donors, start_hash, key=attrgetter("hash"))
        steps = 0  # from the start
        while steps < len(self.donors):
            index = (start + steps) % len(self.donors)
            donor = self.donors[index]
            if donor.document != document_hash:
                yield donor
                steps += 1
                continue

            # Skip all donors of the document that follow each other.
            steps_to_other = self.steps_to_other_document[index]
            if steps_to_other == 0:  # all donors are of this document
                return
            steps += steps_to_other


def _count_steps_to_other_document(document_hashes: Sequence[str]) -> list[int]:
    """Count, for each document of a circle, the steps to the next document that is not equal to it.

    Example:
        The documents a, a, b give 2, 1, 1, because after the last comes the first.

    Returns:
        The number of steps for each document. All are 0 if there is no other document.
    """
    count = len(document_hashes)
    steps = [0] * count
    if len(set(document_hashes)) < 2:
        return steps

    # Backwards, because the steps of a document follow from the steps of the next one. Twice, because in the first pass
    # the last document does not yet know the steps of the first.
    backwards = range(count - 1, -1, -1)
    for index in [*backwards, *backwards]:
        next_index = (index + 1) % count
        is_other = document_hashes[next_index] != document_hashes[index]
        steps[index] = 1 if is_other else steps[next_index] + 1
    return steps


def choose_other_results(
    circles: Iterable[Circle], document_hash: str, call: RecordedCall, max_results: int
) -> tuple[str, ...]:
    """Choose distinct results to put in place of the result of a call.

    Args:
        circles: Where to look for results. A circle has the results of a tool, sorted by their hashes. A later one is
            used only if the earlier ones have too few.
        document_hash: The document of the call (`compute_document_hash`). Its own results are not chosen.
        call: The call.
        max_results: How many results are wanted.

    Returns:
        The results, or fewer than wanted if the circles have no more.
    """
    chosen: list[str] = []
    for circle in circles:
        for result in circle.iter_other_results(document_hash, call):
            if len(chosen) == max_results:
                return tuple(chosen)
            if result not in chosen:
                chosen.append(result)
    return tuple(chosen)


def choose_other_results_of_calls(
    calls_with_documents: Sequence[tuple[str, RecordedCall]], results_per_call: int
) -> list[tuple[str, ...]]:
    """Choose for each call results that the same tool gave to the other calls, in other documents.

    Args:
        calls_with_documents: The calls, each after its document (`compute_document_hash`). Their order does not change
            what a call gets.
        results_per_call: How many distinct results a call gets. It gets fewer if there are no more.
    """
    donors = Donors(max_donors_per_tool=len(calls_with_documents))  # so many that none is dropped
    for document, call in calls_with_documents:
        donors.add_call_result(document, call)

    circle_by_tool = donors.build_circle_by_tool()
    results = []
    for document, call in calls_with_documents:
        # The circle of the tool: its results sorted by hash, read from the call's own hash on and around the end. It is
        # missing if all calls of the tool failed or have no result.
        circles_of_tool = [circle_by_tool[call.tool]] if call.tool in circle_by_tool else []
        results.append(choose_other_results(circles_of_tool, document, call, results_per_call))
    return results


def has_too_few_donors(donors: Sequence[Donor], results_per_call: int) -> bool:
    """Return whether a call of a tool may find too few results of other documents to put in place of its own.

    Args:
        donors: The distinct results of the tool, with their documents (groups of conversations that begin alike).
        results_per_call: How many results a call should get.
    """
    # At worst, the call is in the document with the most results, none of which it may get.
    donor_count_by_document = Counter(donor.document for donor in donors)
    largest_document_count = max(donor_count_by_document.values(), default=0)
    equal_result_count = 1  # another document may have given the same result as the call's
    usable_count = len(donors) - largest_document_count - equal_result_count
    return usable_count < results_per_call


def compute_document_hash(messages: Sequence[RecordedMessage]) -> str:
    """Return a hash of what is said to the assistant before the first call.

    Conversations about the same question have the same hash; they are one document.
    """
    messages_before_calls = takewhile(lambda message: not message.calls, messages)
    messages_to_assistant = [message for message in messages_before_calls if message.role != "assistant"]
    return hash_beginnings(messages_to_assistant)[-1]


def hash_beginnings(messages: Sequence[RecordedMessage]) -> list[str]:
    """Hash every beginning of a conversation, from no messages at all to all of them.

    Two conversations have the same hash where they begin alike. Ids and places of calls do not count.

    Returns:
        For each message a hash of the messages before it, then a hash of all messages.
    """
    hashes = []
    # What is hashed is the text of a list, "[message, message]", so that each message is hashed once.
    running_hash = blake2b(b"[", digest_size=8)
    for number, message in enumerate(messages):
        hashes.append(_hash_list_so_far(running_hash))

        separator = ", " if number > 0 else ""
        text = separator + _format_message_for_hash(message)
        running_hash.update(text.encode("utf-8", "surrogatepass"))

    hashes.append(_hash_list_so_far(running_hash))
    return hashes


def _format_message_for_hash(message: RecordedMessage) -> str:
    """Return the role, content, calls and results of a message as the text that is hashed."""
    calls = [(call.tool, call.arguments, call.result) for call in message.calls]
    return repr((message.role, message.content, calls))


def _hash_list_so_far(running_hash: "blake2b") -> str:
    """Return the hash of a list whose items were hashed so far; `running_hash` itself stays open."""
    closed = running_hash.copy()
    closed.update(b"]")
    return closed.hexdigest()


def hash_call(document_hash: str, call: RecordedCall) -> str:
    """Return a hash of a call in its document, which says where in the circle of its tool it looks for results."""
    return hash_text(f"{document_hash} {call.arguments} {call.result}")


def hash_text(text: str) -> str:
    """Return a hash of a text, 16 hexadecimal digits, the same on every machine and in every version."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _cut_result(result: str) -> str:
    """Return the part of a result that is kept, the first MAX_DONOR_CHARACTERS characters."""
    return result[:MAX_DONOR_CHARACTERS]
