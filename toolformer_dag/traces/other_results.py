"""Choose results of other conversations to put in place of the result of a recorded call.

They are results that the same tool gave elsewhere. If what follows the call rests on its result, it is less likely with
another one in its place. If the tool gave too few, see `alternatives.py`. These are pure functions over plain values;
the caller decides where the results come from:

- a shard's own calls first (`Donors`), so that a file that comes or goes changes nothing for the calls of others
- results of other shards (`exchanged_results.py`) only if the shard has too few of the tool

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

METHOD = 4
"""A version number, raised when the same calls would get other results."""
DONORS = 1000
"""The maximum number of results of a tool that are kept for the calls of a shard: the ones with the smallest hashes."""
LONGEST_DONOR = 1 << 16
"""The maximum number of characters of a result that are kept; the judge reads `traces.result_tokens` tokens of it."""


class Donor(NamedTuple):
    """A result that other calls may get in place of their own.

    Attributes:
        hash: a hash of the whole result; donors are sorted by it, so the order of the conversations does not matter.
        result: its first LONGEST_DONOR characters.
        document: the hash that names its conversation (`identify_document`); of several the smallest.
    """

    hash: str
    result: str
    document: str


class Donors:
    """The donors of each tool, collected call by call: per tool the `most` results with the smallest hashes.

    Memory: twice `most` results per tool, whatever the number of calls. Failed calls give no donor.
    """

    def __init__(self, most: int = DONORS) -> None:
        self._most = most
        self._by_tool: dict[str, dict[str, Donor]] = {}  # tool -> hash -> donor
        self._largest_hash: dict[str, str] = {}  # of the donors that a full tool has; larger ones are passed over

    def add(self, document: str, call: RecordedCall) -> None:
        """Keep the result of a call as a donor, if its hash is among the smallest of its tool.

        Calls that failed or have no result are passed over. Up to twice `most` results of a tool are held before the
        half with the larger hashes is dropped.

        Args:
            document: The document of the call (`identify_document`).
            call: The call.
        """
        if call.result is None or call.failed:
            return

        result_hash = hash_text(call.result)
        largest_hash = self._largest_hash.get(call.tool)  # None until the larger half was dropped once
        if largest_hash is None or result_hash <= largest_hash:
            donor = Donor(result_hash, _cut_result(call.result), document)
            self._add_donor(call.tool, donor)

    def _add_donor(self, tool: str, donor: Donor) -> None:
        """Keep a donor of a tool, and drop the half with the larger hashes if there are too many."""
        donors = self._by_tool.setdefault(tool, {})

        # Of several donors with the same result, the one with the smallest document is kept.
        earlier = donors.get(donor.hash, donor)
        donors[donor.hash] = donor if donor.document <= earlier.document else earlier

        if len(donors) >= 2 * self._most:
            self._drop_larger_half(tool)

    def _drop_larger_half(self, tool: str) -> None:
        """Keep the `most` donors of a tool with the smallest hashes; from now on pass over larger hashes."""
        smallest = dict(sorted(self._by_tool[tool].items())[: self._most])
        self._by_tool[tool] = smallest
        self._largest_hash[tool] = max(smallest)

    def of_tools(self) -> Iterator[tuple[str, list[Donor]]]:
        """Yield each tool with its donors in the order of their hashes."""
        for tool, donors in self._by_tool.items():
            yield tool, sorted(donors.values())[: self._most]

    def circles(self) -> dict[str, "Circle"]:
        """Return the donors of each tool as a circle, from which calls take theirs."""
        return {tool: Circle.of(donors) for tool, donors in self.of_tools()}


@dataclass(frozen=True, slots=True)
class Circle:
    """The donors of a tool in the order of their hashes; after the last comes the first.

    A document is a group of conversations that begin alike; its calls get no results of each other.

    Attributes:
        donors: the donors, sorted by hash.
        to_other_document: for each donor, how many donors further the next one of another document is; 0 if there is
            none.
    """

    donors: Sequence[Donor]
    to_other_document: Sequence[int]

    @staticmethod
    def of(donors: Sequence[Donor]) -> "Circle":
        """Return a circle of donors, which must be sorted by hash."""
        return Circle(donors, _count_steps_to_other([donor.document for donor in donors]))

    def others(self, document: str, call: RecordedCall) -> Iterator[str]:
        """Iterate over the results that may be put in place of the result of a call.

        The donors are sorted by hash. The walk begins where the hash of the call would stand, and goes round once. So
        a donor that comes or goes hardly changes which results a call gets first.

        Args:
            document: The document of the call (`identify_document`).
            call: The call.

        Yields:
            Results of other documents, with other values than the result of the call.
        """
        call_result = _cut_result(call.result or "")  # donors are cut in the same way
        start_hash = hash_call(document, call)
        for donor in self._iter_donors_of_other_documents(document, start_hash):
            if not have_same_values(donor.result, call_result):
                yield donor.result

    def _iter_donors_of_other_documents(self, document: str, start_hash: str) -> Iterator[Donor]:
        """Walk once round the circle, and skip the donors of a document.

        Args:
            document: The document to skip.
            start_hash: The walk begins at the first donor whose hash is not below this one. After the last donor comes
                the first.
        """
        start = bisect_left(self.donors, start_hash, key=attrgetter("hash"))
        steps = 0  # from the start
        while steps < len(self.donors):
            index = (start + steps) % len(self.donors)
            donor = self.donors[index]
            if donor.document != document:
                yield donor
                steps += 1
                continue

            # Skip all donors of the document that follow each other.
            steps_to_other = self.to_other_document[index]
            if steps_to_other == 0:  # all donors are of this document
                return
            steps += steps_to_other


def _count_steps_to_other(documents: Sequence[str]) -> list[int]:
    """Count, for each document of a circle, the steps to the next document that is not equal to it.

    Example:
        The documents a, a, b give 2, 1, 1, because after the last comes the first.

    Returns:
        The number of steps for each document. All are 0 if there is no other document.
    """
    count = len(documents)
    steps = [0] * count
    if len(set(documents)) < 2:
        return steps

    # Backwards, because the steps of a document follow from the steps of the next one. Twice, because in the first pass
    # the last document does not yet know the steps of the first.
    backwards = range(count - 1, -1, -1)
    for index in [*backwards, *backwards]:
        next_index = (index + 1) % count
        is_other = documents[next_index] != documents[index]
        steps[index] = 1 if is_other else steps[next_index] + 1
    return steps


def choose_results(circles: Iterable[Circle], document: str, call: RecordedCall, swaps: int) -> tuple[str, ...]:
    """Choose distinct results to put in place of the result of a call.

    Args:
        circles: Where to look for results. A later circle is used only if the earlier ones have too few.
        document: The document of the call (`identify_document`). Its own results are not chosen.
        call: The call.
        swaps: How many results are wanted.

    Returns:
        The results, or fewer than wanted if the circles have no more.
    """
    chosen: list[str] = []
    for circle in circles:
        for result in circle.others(document, call):
            if len(chosen) == swaps:
                return tuple(chosen)
            if result not in chosen:
                chosen.append(result)
    return tuple(chosen)


def exchange(calls: Sequence[tuple[str, RecordedCall]], swaps: int) -> list[tuple[str, ...]]:
    """Choose for each call results that the same tool gave to the other calls, in other documents.

    Args:
        calls: The calls, each with its document (`identify_document`). Their order does not change what a call gets.
        swaps: How many distinct results a call gets. It gets fewer if there are no more.
    """
    donors = Donors(most=len(calls))  # so many that none is dropped
    for document, call in calls:
        donors.add(document, call)

    circle_by_tool = donors.circles()
    results = []
    for document, call in calls:
        circles_of_tool = [circle_by_tool[call.tool]] if call.tool in circle_by_tool else []
        results.append(choose_results(circles_of_tool, document, call, swaps))
    return results


def lacks_donors(donors: Sequence[Donor], swaps: int) -> bool:
    """Return whether a call may find fewer than `swaps` results of other documents among the donors of its tool."""
    donors_by_document = Counter(donor.document for donor in donors)
    in_largest_document = max(donors_by_document.values(), default=0)
    equal_result = 1  # another document may have given the same result as the call's
    return len(donors) - in_largest_document - equal_result < swaps


def identify_document(messages: Sequence[RecordedMessage]) -> str:
    """Return a hash of what is said to the assistant before the first call.

    Conversations about the same question have the same hash; they are one document.
    """
    before_calls = takewhile(lambda message: not message.calls, messages)
    return beginnings([message for message in before_calls if message.role != "assistant"])[-1]


def beginnings(messages: Sequence[RecordedMessage]) -> list[str]:
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
        text = separator + _to_hashed_text(message)
        running_hash.update(text.encode("utf-8", "surrogatepass"))

    hashes.append(_hash_list_so_far(running_hash))
    return hashes


def _to_hashed_text(message: RecordedMessage) -> str:
    """Return the role, content, calls and results of a message as the text that is hashed."""
    calls = [(call.tool, call.arguments, call.result) for call in message.calls]
    return repr((message.role, message.content, calls))


def _hash_list_so_far(running_hash: "blake2b") -> str:
    """Return the hash of a list whose items were hashed so far; `running_hash` itself stays open."""
    closed = running_hash.copy()
    closed.update(b"]")
    return closed.hexdigest()


def hash_call(document: str, call: RecordedCall) -> str:
    """Return a hash of a call in its document, which says where in the circle of its tool it looks for results."""
    return hash_text(f"{document} {call.arguments} {call.result}")


def hash_text(text: str) -> str:
    """Return a hash of a text, 16 hexadecimal digits, the same on every machine and in every version."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _cut_result(result: str) -> str:
    """Return the part of a result that is kept, the first LONGEST_DONOR characters."""
    return result[:LONGEST_DONOR]
