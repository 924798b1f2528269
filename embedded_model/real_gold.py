"""Find places in real text where a tool would help, and write documents of the pretraining mix about them.

Results are taken from the text itself: a number becomes the result of a sum, a name or number the answer to a question,
the date of the page the calendar's result, a sentence of the same article the result of a search, and a phrase the
translation of its foreign twin.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from itertools import accumulate
from pathlib import Path
from random import Random

from embedded_model.demonstrations import (
    PretrainingDocument,
    bracketed,
    content,
    demonstration,
    guessed_input,
    instruction,
    noisy_place,
    note,
    with_call,
    with_notes,
)
from embedded_model.real_text import Page, RealText, load_real_text
from toolformer_dag.synthetic.phenomena import TOOLS
from toolformer_dag.synthetic.sentences import Phenomenon
from toolformer_dag.synthetic.today import MONTHS, WEEK_DAYS, today_is

NUMBER = re.compile(r"(?<= )\d[\d,]*(?:\.\d+)?(?![\d%])")
NAME = re.compile(r"(?<=[a-z,] )[A-Z][A-Za-z\u00c0-\u017f]+(?: [A-Z][A-Za-z\u00c0-\u017f]+)*")
WORD = re.compile(r"(?<= )[a-z]{7,}")
MONTH = "|".join(MONTHS)
DATE = re.compile(rf"(?<= )({MONTH}) (\d{{1,2}})(?:st|nd|rd|th)?,? ((?:19|20)\d\d)\b")
WEEK_DAY = re.compile(rf"(?<= )(?:{'|'.join(WEEK_DAYS)})\b(?!,? (?:\d|{MONTH}))")
LANGUAGES = {"de": "German", "fr": "French", "es": "Spanish", "vi": "Vietnamese"}
PHRASES = (
    ('The {language} phrase "{foreign}" means', ' "{english}"'),
    ('In {language}, "{foreign}" means', ' "{english}"'),
    ('"{foreign}" is {language} for', ' "{english}"'),
    ('Somebody said in {language}: "{foreign}" That is,', ' "{english}"'),
    ("They wrote {foreign} In English this is", " {english}"),
    ("The {language} sentence {foreign} was translated as", " {english}"),
)
OUTRIGHT_SHARE = 0.3  # of the questions: they stand in the text and are passed on as they are
OUTRIGHT = (" The answer is", " Answer:", " It is", "", " I think it is", " They said:")
TRIES = 12
LARGEST = 20_000  # characters; longer pages are drawn no more often than pages of this length
WINDOW = 2000  # characters of a page that are looked at for a place


class RealGold:
    """Draw excerpts with a place for a tool, as Phenomenon without wording."""

    def __init__(self, real: RealText) -> None:
        self.real = real
        self.pages = [page for page in (*real.web, *real.articles) if any(text for _, text in page.passages)]
        self._sizes = list(accumulate(min(LARGEST, sum(len(text) for _, text in page.passages)) for page in self.pages))
        self._dated = [dated for page in self.pages for dated in _dates(page)]
        self._draws: dict[str, Callable[[Random], Phenomenon | None]] = {
            "calculator": self._calculator,
            "calendar": self._calendar,
            "question_answering": self._question,
            "wiki_search": self._search,
            "machine_translation": self._translation,
        }

    def page(self, random: Random) -> Page:
        """Draw a page; longer pages are more frequent."""
        return random.choices(self.pages, cum_weights=self._sizes)[0]

    def gold(self, random: Random, tool: str) -> Phenomenon | None:
        """Draw a place for the tool; return None where TRIES pages have none."""
        drawn = (self._draws[tool](random) for _ in range(TRIES))
        return next((gold for gold in drawn if gold is not None), None)

    def _place(self, random: Random, patterns: tuple[re.Pattern[str], ...]) -> tuple[Page, str, re.Match[str]] | None:
        page = self.page(random)
        _, text = random.choice(page.passages)
        start = random.randrange(max(1, len(text) - WINDOW))
        found = [hit for pattern in patterns for hit in pattern.finditer(text, start, start + WINDOW)]
        found = [hit for hit in found if hit.start() > 12]
        return (page, text, random.choice(found)) if found else None

    def _calculator(self, random: Random) -> Phenomenon | None:
        found = self._place(random, (NUMBER,))
        value = _number(found[2][0]) if found else None
        if found is None or value is None:
            return None
        return _gold(random, "calculator", found[1], found[2], _sum_for(random, value), f"{value:g}")

    def _calendar(self, random: Random) -> Phenomenon | None:
        if not self._dated:
            return None
        text, place, day = random.choice(self._dated)
        return _around(random, "calendar", text, place, ("", today_is(day), text[place : place + 20]))

    def _question(self, random: Random) -> Phenomenon | None:
        found = self._place(random, (NUMBER, NAME, NAME, WORD))
        if found is None:
            return None
        _, text, hit = found
        asked = f"{_wh(random, hit[0])} {_left(random, text, hit.start(), 7)}?"
        if random.random() < OUTRIGHT_SHARE:
            return _outright(random, text, hit, asked)
        return _gold(random, "question_answering", text, hit, f'"{asked}"', hit[0])

    def _search(self, random: Random) -> Phenomenon | None:
        found = self._place(random, (NUMBER, NAME, NAME, WORD))
        if found is None:
            return None
        page, text, hit = found
        known = _elsewhere(random, page, text, hit)
        if known is None:
            return None
        asked = random.choice((page.title, f"{page.title} {_left(random, text, hit.start(), 3)}"))
        return _gold(random, "wiki_search", text, hit, f'"{asked}"', known)

    def _translation(self, random: Random) -> Phenomenon | None:
        if not self.real.phrases:
            return None
        language, foreign, english = (part.strip('"') for part in random.choice(self.real.phrases))
        before, after = (
            part.format(language=LANGUAGES.get(language, "foreign"), foreign=foreign, english=english)
            for part in random.choice(PHRASES)
        )
        return Phenomenon("machine_translation", before, after + ".", foreign, english, english, "")


def read_real_gold(paths: Sequence[Path]) -> RealGold | None:
    """Read the text of the paths that is not held out; None without paths. Raises UserError."""
    return RealGold(load_real_text(paths)) if paths else None


def _gold(random: Random, tool: str, text: str, hit: re.Match[str], asked: str, result: str) -> Phenomenon:
    return _around(random, tool, text, hit.start(), (asked, result, hit[0]))


def _outright(random: Random, text: str, hit: re.Match[str], asked: str) -> Phenomenon:
    """Write some text, a question and its answer."""
    lead, _ = excerpt(random, text, random.randrange(len(text)), 150)
    before = f"{lead} {asked}{random.choice(OUTRIGHT)}"
    return Phenomenon("question_answering", before, f" {hit[0]}.", f'"{asked}"', hit[0], hit[0], "")


def _around(random: Random, tool: str, text: str, place: int, call: tuple[str, str, str]) -> Phenomenon:
    """Cut an excerpt; `call` is (input, result, answer). The place moves before the space that precedes it."""
    cut, offset = excerpt(random, text, place, random.choice((150, 250, 400, 700)))
    offset -= cut[:offset].endswith(" ")
    asked, result, answer = call
    return Phenomenon(tool, cut[:offset], cut[offset:], asked, result, answer, "")


def _dates(page: Page) -> Iterator[tuple[str, int, date]]:
    """Yield the mentions of a date: the passage that has it, the character offset, and the date."""
    for _, text in page.passages:
        said = ((hit.start(), _day(hit)) for hit in DATE.finditer(text))
        yield from ((text, place, day) for place, day in said if day is not None)
        if page.date is not None:
            yield from ((text, place, page.date) for place in _mentions(text, page.date))
        yield from ((text, hit.start(), _date_on(hit[0], hit.start())) for hit in WEEK_DAY.finditer(text))


def _date_on(week_day: str, number: int) -> date:
    """Choose a date on that day of the week; different numbers give different dates."""
    return date(2003, 1, 6 + WEEK_DAYS.index(week_day)) + timedelta(weeks=number * 7919 % 1095)


def _day(hit: re.Match[str]) -> date | None:
    try:
        return date(int(hit[3]), MONTHS.index(hit[1]) + 1, int(hit[2]))
    except ValueError:  # such as February 30
        return None


def _mentions(text: str, day: date) -> list[int]:
    marks = (str(day.year), f"{MONTHS[day.month - 1]} {day.day}")
    pattern = re.compile("(?<= )(?:" + "|".join(re.escape(mark) for mark in marks) + r")\b")
    return [hit.start() for hit in pattern.finditer(text)]


def _number(text: str) -> float | None:
    value = float(text.replace(",", "").rstrip("."))
    return value if value < 1e6 and f"{value:g}" == text.replace(",", "") else None


def _sum_for(random: Random, value: float) -> str:
    """Write a sum whose result is the value."""
    other = random.randint(2, 99)
    whole = value == int(value)
    if whole and value >= 4 and random.random() < 0.3:
        divisors = [n for n in range(2, 60) if int(value) % n == 0 and n < value]
        if divisors:
            return f"{(n := random.choice(divisors))} * {int(value) // n}"
    if random.random() < 0.3:
        return f"{round(value * other, 4):g} / {other}"
    if random.random() < 0.5:
        return f"{round(value + other, 4):g} - {other}"
    part = random.randint(0, int(value))
    return f"{part} + {round(value - part, 4):g}"


def _left(random: Random, text: str, place: int, most: int) -> str:
    words = text[max(0, place - 80) : place].replace("\n", " ").split()[1:]
    return " ".join(words[-random.randint(1, most) :]).strip("\"'()[].,;:->") or "this"


def _wh(random: Random, answer: str) -> str:
    if answer[0].isdigit():
        return random.choice(("When", "How many", "What"))
    return random.choice(("Who", "What", "Where", "Which"))


def _elsewhere(random: Random, page: Page, text: str, hit: re.Match[str]) -> str | None:
    """Return `title > section > sentence`, a distant sentence of the page that contains the same words."""
    near = text[max(0, hit.start() - 700) : hit.end() + 700]
    found = [(section, sentence) for section, sentence in _sentences_with(page, hit[0]) if sentence not in near]
    if not found:
        return None
    section, sentence = random.choice(found)
    parts = [part for part in (page.title, section) if part and random.random() < 0.7]
    return " > ".join([*parts, sentence[:240]])


def _sentences_with(page: Page, words: str) -> Iterator[tuple[str, str]]:
    whole = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)")
    for section, passage in page.passages:
        if words in passage:
            yield from ((section, sentence) for sentence in sentences(passage) if whole.search(sentence))


SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=[A-Z\"“‘(])|\n+")


def excerpt(random: Random, text: str, place: int, characters: int) -> tuple[str, int]:
    """Return about so many characters of whole sentences around `place`, and the offset of the place in them."""
    starts = [0, *(end.end() for end in SENTENCE_END.finditer(text))]
    before = [start for start in starts if place - characters // 2 <= start <= place]
    middle = max(0, place - characters // 2)
    word = max(text.rfind(" ", 0, middle), text.rfind("\n", 0, middle)) + 1
    start = random.choice(before) if before else word
    ends = [end for end in (*starts[1:], len(text)) if place < end <= start + characters]
    stop = random.choice(ends[-3:]) if ends else start + characters
    return text[start:stop].rstrip(), place - start


def sentences(text: str) -> list[str]:
    """Split a text into sentences; drop those of up to 15 characters."""
    return [part.strip() for part in SENTENCE_END.split(text) if len(part.strip()) > 15]


NOTE_WEIGHTS = {
    "calculator": 14,
    "calendar": 22,
    "question_answering": 26,
    "wiki_search": 26,
    "machine_translation": 12,
}
PLAIN_LENGTHS = (400, 1000, 1800, 3000)
WRONG_INPUT = 0.4


def plain(random: Random, source: RealGold) -> PretrainingDocument:
    """Return some paragraphs of a page."""
    _, text = random.choice(source.page(random).passages)
    return (excerpt(random, text, random.randrange(len(text)), random.choice(PLAIN_LENGTHS))[0],) if text else ("",)


def note_then_text(random: Random, source: RealGold) -> PretrainingDocument:
    """Write a note with the excerpt it was taken from, or with another excerpt."""
    gold, other = (_any_gold(random, source) for _ in range(2))
    if gold is None:
        return plain(random, source)
    return with_notes(random, gold.text, [note(random, gold, gold.text)], [content(random, other)] if other else [])


def told_before(random: Random, source: RealGold) -> PretrainingDocument:
    """Write a note, then an excerpt that says the same for the first time, as e(c, r) stands before x."""
    gold = _any_gold(random, source)
    if gold is None or gold.answer in gold.before:
        return plain(random, source)
    return f" {bracketed(random, content(random, gold))}", gold.text


def demonstrate(random: Random, source: RealGold) -> PretrainingDocument:
    """Write two to four examples for a tool."""
    tool = random.choice(TOOLS)
    examples = [_annotated(random, source, tool) for _ in range(random.randint(2, 4))]
    return demonstration(random, instruction(random, tool), examples)


def _any_gold(random: Random, source: RealGold) -> Phenomenon | None:
    return source.gold(random, random.choices(list(NOTE_WEIGHTS), list(NOTE_WEIGHTS.values()))[0])


def _annotated(random: Random, source: RealGold, tool: str) -> tuple[str, list[str]]:
    gold = source.gold(random, tool)
    if gold is None:
        text = "".join(plain(random, source))[:300]
        return text, [text]
    offset = noisy_place(random, gold.text, len(gold.before))
    if offset is None:
        return gold.text, [gold.text]
    guessed = tool == "calculator" or offset != len(gold.before) or random.random() < WRONG_INPUT
    asked = guessed_input(random, tool, gold.text[:offset]) if guessed else gold.input
    return gold.text, [gold.text] if asked is None else with_call(gold.text, offset, tool, asked)
