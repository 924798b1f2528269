"""How many steps a regular expression takes: a backtracking matcher that counts them, and texts that make it backtrack.

The matcher walks the syntax tree of Python's `re` as its engine does, without the engine's shortcuts. A pattern is
linear where twice the text takes twice the steps. Nothing is timed.
"""

import re
import re._constants as codes  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

MOST_STEPS = 100_000
"""Steps after which a count ends: more than any linear pattern takes for the texts that are tried."""
SHORT = 10
"""How often the text in the middle is repeated at first."""
LONG = 50
"""How often it is repeated where the first count looks suspicious."""
MOST_GROWTH = 2.7
"""By how much the steps may grow where the text doubles; a quadratic pattern comes near to 4."""
SIGNS = "\n \t0aA_Z\"'\\()[]{}<>|.,;:=/-+%!?#@&*^~`$\u2028é中。”\x00"
"""Characters that stand for the classes which patterns tell apart."""

Tree = Sequence[tuple[Any, Any]]
Continue = Callable[[int], bool]


class TooManySteps(Exception):
    """A match took more than MOST_STEPS."""


@dataclass(slots=True)
class CountingMatcher:
    """Matches a pattern against a text, and counts the nodes of the syntax tree that it visits."""

    text: str
    flags: int
    steps: int = 0

    def search(self, tree: Tree) -> None:
        """Find every match, as `findall` and `sub` do: after a match, the next begins where it ends."""
        start = 0
        while start <= len(self.text):
            end = self.first_end(tree, start)
            start = start + 1 if end is None else max(start + 1, end)

    def first_end(self, tree: Tree, position: int) -> int | None:
        """Return where the first match at a position ends; None without one."""
        ends: list[int] = []

        def accept(end: int) -> bool:
            ends.append(end)
            return True

        return ends[0] if self.match(tree, 0, position, accept) else None

    def match(self, tree: Tree, index: int, position: int, then: Continue) -> bool:
        """Return whether the nodes from `index` on match at `position`, and `then` accepts where they end."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooManySteps
        if index == len(tree):
            return then(position)
        code, value = tree[index]

        def go_on(end: int) -> bool:
            return self.match(tree, index + 1, end, then)

        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            is_match = position < len(self.text) and fits(code, value, self.text[position], self.flags)
            return is_match and go_on(position + 1)
        if code is codes.SUBPATTERN:
            return self.match(value[3], 0, position, go_on)
        if code is codes.BRANCH:
            return any(self.match(branch, 0, position, go_on) for branch in value[1])
        if code is codes.MAX_REPEAT or code is codes.MIN_REPEAT:
            return self.repeat(value, position, 0, go_on)
        if code is codes.POSSESSIVE_REPEAT:
            end = self.longest(value, position)
            return end is not None and go_on(end)
        if code is codes.ATOMIC_GROUP:
            first_end = self.first_end(value, position)
            return first_end is not None and go_on(first_end)
        if code is codes.AT:
            return self.stands_at(value, position) and go_on(position)
        if code is codes.ASSERT or code is codes.ASSERT_NOT:
            return self.looks_around(value, position) is (code is codes.ASSERT) and go_on(position)
        if code is codes.GROUPREF:  # what a group matched is not kept: any one character stands for it
            return go_on(position + 1)
        if code is codes.FAILURE:
            return False
        raise NotImplementedError(code)

    def repeat(self, value: Any, position: int, count: int, then: Continue) -> bool:
        """Repeat a node; the longest way is tried first, which costs a lazy repetition as much where all fails."""
        least, most, body = value
        if len(body) == 1 and body[0][0] in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            end = self.run_of(body[0], position, most)
            return any(then(stop) for stop in range(end, position + least - 1, -1))

        def again(end: int) -> bool:
            return end > position and self.repeat(value, end, count + 1, then)

        if count < most and self.match(body, 0, position, again):
            return True
        return count >= least and then(position)

    def longest(self, value: Any, position: int) -> int | None:
        """Return where a possessive repetition ends; None where it does not match."""
        least, most, body = value
        if len(body) == 1 and body[0][0] in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            end = self.run_of(body[0], position, most)
            return end if end - position >= least else None
        count = 0
        while count < most:
            next_end = self.first_end(body, position)
            if next_end is None or next_end == position:
                break
            position = next_end
            count += 1
        return position if count >= least else None

    def run_of(self, node: tuple[Any, Any], position: int, most: Any) -> int:
        """Return where a run of characters that fit a node ends."""
        start = position
        while position < len(self.text) and position - start < most and fits(*node, self.text[position], self.flags):
            self.steps += 1
            position += 1
        return position

    def stands_at(self, place: Any, position: int) -> bool:
        """Return whether a position is the beginning, the end, or at the border of a word."""
        text = self.text
        if place in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            is_line = bool(self.flags & re.MULTILINE) and place is codes.AT_BEGINNING and position > 0
            return position == 0 or (is_line and text[position - 1] == "\n")
        if place in (codes.AT_END, codes.AT_END_STRING):
            is_line = bool(self.flags & re.MULTILINE) and place is codes.AT_END
            rest = text[position : position + 2]
            return rest == "" or (place is codes.AT_END and rest == "\n") or (is_line and rest[0] == "\n")
        sides = [bool(re.match(r"\w", text[at : at + 1])) if at >= 0 else False for at in (position - 1, position)]
        return (sides[0] != sides[1]) is (place is codes.AT_BOUNDARY)

    def looks_around(self, value: Any, position: int) -> bool:
        """Return whether what a look-ahead or look-behind asks for stands there."""
        direction, tree = value
        if direction > 0:
            return self.match(tree, 0, position, lambda end: True)
        width = tree.getwidth()[0]
        return position >= width and self.match(tree, 0, position - width, lambda end: end == position)


def fits(code: Any, value: Any, sign: str, flags: int) -> bool:
    """Return whether a character fits a node for one character."""
    if code is codes.ANY:
        return bool(flags & re.DOTALL) or sign != "\n"
    if code is codes.NOT_LITERAL:
        return ord(sign) != value
    signs = {sign, sign.lower(), sign.upper()} if flags & re.IGNORECASE else {sign}
    points = [ord(one) for one in signs if len(one) == 1]
    if code is codes.LITERAL:
        return value in points
    is_negated = value[0][0] is codes.NEGATE
    return any(_in_part(part, sign, points, flags) for part in value) is not is_negated


def _in_part(part: tuple[Any, Any], sign: str, points: Sequence[int], flags: int) -> bool:
    code, value = part
    if code is codes.LITERAL:
        return value in points
    if code is codes.RANGE:
        return any(value[0] <= point <= value[1] for point in points)
    if code is codes.CATEGORY:
        letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}[str(value).rpartition("_")[2]]
        is_in = re.match(f"\\{letter}", sign, flags & re.ASCII) is not None
        return is_in is not ("_NOT_" in str(value))
    return False


def growth(pattern: re.Pattern[Any], is_searched: bool) -> tuple[str, float] | None:
    """Return a text that takes more than twice the steps where it is twice as long, and by how much; None without one.

    is_searched: whether the pattern is tried at every character, as by `search`, `sub` and `findall`.
    """
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    flags = pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags
    tree = parser.parse(source, flags)

    repetitions = _unbounded(tree)
    if not repetitions or (repetitions == 1 and not is_searched):
        return None

    def steps(text: str) -> int:
        matcher = CountingMatcher(text, flags)
        try:
            matcher.search(tree) if is_searched else matcher.match(tree, 0, 0, lambda end: end == len(text))
        except TooManySteps:
            return MOST_STEPS
        return matcher.steps

    for before, pump, after in hostile_texts(tree, flags):
        growing = 0.0
        for count in (SHORT, LONG):
            short, long = (steps(before + pump * number + after) for number in (count, 2 * count))
            growing = long / short
            if growing < MOST_GROWTH and long < MOST_STEPS:
                break
        else:
            return f"{before!r} + {pump!r} * n + {after!r}", growing
    return None


def hostile_texts(tree: Tree, flags: int) -> Iterator[tuple[str, str, str]]:
    """Yield what stands before a repeated text, that text, and what stands behind it."""
    prefixes = [""]
    samples: list[str] = []
    _collect(tree, "", flags, prefixes, samples)
    signs = _told_apart(tree, flags)
    pumps = [*signs, *samples, *(prefix for prefix in prefixes if prefix)]
    pumps += ["".join(pair) for pair in product(signs[:9], repeat=2)]
    for before, pump in product(dict.fromkeys(prefixes), dict.fromkeys(pumps)):
        for after in ("", "~\n~"):
            yield before, pump, after


def _told_apart(tree: Tree, flags: int) -> list[str]:
    """Return one of SIGNS for each class of characters that the nodes of a tree tell apart."""
    nodes = list(_character_nodes(tree))
    classes: dict[tuple[bool, ...], str] = {}
    for sign in SIGNS:
        classes.setdefault(tuple(fits(*node, sign, flags) for node in nodes), sign)
    return [sign for fitting, sign in classes.items() if any(fitting)]


def _unbounded(tree: Tree) -> int:
    """Return how many repetitions of a tree have no upper limit."""
    count = 0
    for code, value in tree:
        repeats = code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
        count += repeats and value[1] is codes.MAXREPEAT
        count += sum(_unbounded(child) for child in _children(code, value))
    return count


def _character_nodes(tree: Tree) -> Iterator[tuple[Any, Any]]:
    for code, value in tree:
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            yield code, value
        for child in _children(code, value):
            yield from _character_nodes(child)


def _children(code: Any, value: Any) -> list[Tree]:
    if code is codes.SUBPATTERN:
        return [value[3]]
    if code is codes.BRANCH:
        return list(value[1])
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        return [value[2]]
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return [value[1]]
    return [value] if code is codes.ATOMIC_GROUP else []


def _collect(tree: Tree, before: str, flags: int, prefixes: list[str], samples: list[str]) -> str:
    """Add to `prefixes` a text that leads to each long repetition, and to `samples` what it repeats; return a match."""
    for code, value in tree:
        sample = ""
        if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            fitting = [chr(value)] if code is codes.LITERAL else [x for x in SIGNS if fits(code, value, x, flags)]
            sample = fitting[0] if fitting else "\ufffd"
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, most, body = value
            if most is codes.MAXREPEAT:
                prefixes.append(before)
            once = _collect(body, before, flags, prefixes, samples)[len(before) :]
            if most is codes.MAXREPEAT:
                samples.append(once)
            sample = once * max(least, int(code is not codes.MAX_REPEAT or most is codes.MAXREPEAT))
        elif code not in (codes.ASSERT, codes.ASSERT_NOT):
            matches = [_collect(child, before, flags, prefixes, samples) for child in _children(code, value)]
            if matches:
                sample = matches[0][len(before) :]
        before += sample
    return before
