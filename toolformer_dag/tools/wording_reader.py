"""Answer from the synthetic world's encyclopaedia without a model: its sentences are read back by their templates."""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import tantivy

from toolformer_dag.synthetic.wordings import KINDS, Relation, relations
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.tool import NO_ANSWER, ToolResult

_SENTENCE_END = re.compile(r"(?<=[.]) ")
LEAST = 0.5
"""The share of a name that a question has at least."""


@functools.cache
def _analyzer() -> tantivy.TextAnalyzer:
    folding = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.lowercase())
    return folding.filter(tantivy.Filter.ascii_fold()).filter(tantivy.Filter.stemmer("english")).build()


def stems(text: str) -> list[str]:
    """Return the stems of the words of a text."""
    return list(_analyzer().analyze(text))


@dataclass(frozen=True, slots=True)
class RelationWords:
    """In how many of the wordings of a relation each stem stands, and the patterns of the encyclopaedia's sentences."""

    relation: Relation
    counts: Mapping[str, int]
    wordings: int
    patterns: tuple[re.Pattern[str], ...]

    def score(self, asked: Sequence[str]) -> float:
        """Return the log likelihood of a question's words, all of them as likely without the relation."""
        return sum(math.log((self.counts.get(stem, 0) + 0.1) / (self.wordings + 1)) for stem in asked)


@functools.cache
def _known() -> tuple[RelationWords, ...]:
    return tuple(_words(relation) for kind in KINDS for relation in relations(kind))


def _words(relation: Relation) -> RelationWords:
    wordings = (relation.question, relation.keyword, *relation.questions, *relation.statements, *relation.sentences)
    texts = [re.sub(r"\{[ev]\}('s)?", "", text) for text in wordings]
    counts = Counter(stem for text in texts for stem in set(stems(text)))
    patterns = [
        re.compile(re.escape(text).replace(r"\{e\}", "(?P<e>.+?)", 1).replace(r"\{v\}", "(?P<v>.+?)"))
        for text in relation.sentences
    ]
    return RelationWords(relation, counts, len(texts), tuple(patterns))


def facts(passage: Passage) -> Iterator[tuple[RelationWords, str]]:
    """Yield what a passage tells of its entity, in the words of the encyclopaedia."""
    for sentence in _SENTENCE_END.split(passage.text):
        for known in _known():
            match = next(filter(None, (pattern.fullmatch(sentence) for pattern in known.patterns)), None)
            if match and match["e"] == passage.title:
                yield known, match["v"]


def answer(question: str, passages: Sequence[Passage]) -> str | None:
    """Return the value of the likeliest relation of the entity that a question names; None where it names none."""
    asked = dict.fromkeys(stems(question))
    values: list[tuple[float, float, str]] = []
    for passage in passages:
        name = stems(passage.title)
        named = sum(stem in asked for stem in name) / max(len(name), 1)
        if named >= LEAST:
            words = [stem for stem in asked if stem not in name]
            values += [(named, known.score(words), value) for known, value in facts(passage)]
    return max(values)[2] if values else None


def read_by_wording(questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
    """Answer each question from its passages of the synthetic world's encyclopaedia."""
    answers = [answer(question, own) for question, own in zip(questions, passages, strict=True)]
    return [ToolResult(text) if text else NO_ANSWER for text in answers]
