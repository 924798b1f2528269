"""Answer from the synthetic world's encyclopaedia without a model: its sentences are read back by their templates.

The encyclopaedia states relations of entities, such as the year in which a bridge was built. Each relation has
templates of its sentences and of questions about it. A question is answered by the relation whose words it most likely
has.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tantivy

from toolformer_dag.synthetic.wordings import KINDS, Relation, get_relations
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.tool import NO_ANSWER, ToolResult

_SENTENCE_END = re.compile(r"(?<=[.]) ")
_PLACEHOLDER = re.compile(r"\{[ev]\}('s)?")
"""Where the entity (`{e}`, `{e}'s`) or the value (`{v}`) stands in a template."""
LEAST_NAME_SHARE = 0.5
"""The least share of the words of an entity's name that a question about it has."""
ADDED_COUNT = 0.1
"""What is added to the count of a word, so that a word that no wording has does not rule a relation out."""


@functools.cache
def _get_analyzer() -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.lowercase())
    builder = builder.filter(tantivy.Filter.ascii_fold())
    builder = builder.filter(tantivy.Filter.stemmer("english"))
    return builder.build()


def stems(text: str) -> list[str]:
    """Return the stems of the words of a text, in order: `who`, `built`, `bridg` for `Who built bridges?`."""
    return list(_get_analyzer().analyze(text))


@dataclass(frozen=True, slots=True)
class RelationWords:
    """The words of a relation, such as "was built in", and how its sentences are read."""

    relation: Relation
    counts: Mapping[str, int]  # stem -> how many of the relation's wordings have it
    wordings: int  # how many the relation has
    patterns: tuple[re.Pattern[str], ...]  # match its sentences; the groups `e` and `v` are entity and value

    def score(self, question_stems: Sequence[str]) -> float:
        """Return how well a question fits the relation: the log probability of its word stems, taken as independent."""
        log_probabilities = []
        for stem in question_stems:
            probability = (self.counts.get(stem, 0) + ADDED_COUNT) / (self.wordings + 1)
            log_probabilities.append(math.log(probability))
        return sum(log_probabilities)

    def find_stated_value(self, sentence: str, entity: str) -> str | None:
        """Return the value that a sentence states for an entity; None if it does not state this relation of it."""
        for pattern in self.patterns:
            match = pattern.fullmatch(sentence)
            if match:
                return match["v"] if match["e"] == entity else None
        return None


class Fact(NamedTuple):
    """A relation and its value, as a passage states it of its entity."""

    relation: RelationWords
    value: str


class Candidate(NamedTuple):
    """A fact that may answer a question; the largest tuple fits the question best.

    - name_share: the share of the words of the entity's name that are in the question.
    - relation_score: how well the fact's relation fits the other words.
    - value: the answer.
    """

    name_share: float
    relation_score: float
    value: str


@functools.cache
def _list_relations() -> tuple[RelationWords, ...]:
    words = []
    for kind in KINDS:
        for relation in get_relations(kind):
            words.append(_build_relation_words(relation))
    return tuple(words)


def _build_relation_words(relation: Relation) -> RelationWords:
    """Count in how many wordings of a relation each word stem stands, and make patterns that read its sentences."""
    wordings = (relation.question, relation.keyword, *relation.questions, *relation.statements, *relation.sentences)
    counts: Counter[str] = Counter()
    for wording in wordings:
        distinct_stems = set(stems(_PLACEHOLDER.sub("", wording)))
        counts.update(distinct_stems)
    patterns = [_build_sentence_pattern(template) for template in relation.sentences]
    return RelationWords(relation, counts, len(wordings), tuple(patterns))


def _build_sentence_pattern(template: str) -> re.Pattern[str]:
    """Return the pattern of the sentences that a template writes; the groups `e` and `v` are entity and value."""
    pattern = re.escape(template)
    pattern = pattern.replace(r"\{e\}", "(?P<e>.+?)", 1)
    pattern = pattern.replace(r"\{v\}", "(?P<v>.+?)")
    return re.compile(pattern)


def facts(passage: Passage) -> Iterator[Fact]:
    """Yield what the sentences of a passage state of the entity that is its title."""
    for sentence in _SENTENCE_END.split(passage.text):
        for relation in _list_relations():
            value = relation.find_stated_value(sentence, passage.title)
            if value is not None:
                yield Fact(relation, value)


def answer(question: str, passages: Sequence[Passage]) -> str | None:
    """Answer a question from passages of the synthetic encyclopaedia; None if no fact in them fits the question."""
    question_stems = dict.fromkeys(stems(question))  # distinct, in order
    candidates: list[Candidate] = []
    for passage in passages:
        candidates += _list_candidates(question_stems.keys(), passage)
    if not candidates:
        return None
    return max(candidates).value


def _list_candidates(question_stems: KeysView[str], passage: Passage) -> list[Candidate]:
    """List the facts in a passage that may answer a question.

    Args:
        question_stems: The word stems of the question.
        passage: The passage, whose title is the entity that its facts are about.

    Returns:
        The facts, or none if the question hardly names the entity.
    """
    name_stems = stems(passage.title)
    shared_count = sum(stem in question_stems for stem in name_stems)
    name_share = shared_count / max(len(name_stems), 1)
    if name_share < LEAST_NAME_SHARE:
        return []

    other_stems = [stem for stem in question_stems if stem not in name_stems]

    candidates = []
    for fact in facts(passage):
        relation_score = fact.relation.score(other_stems)
        candidates.append(Candidate(name_share, relation_score, fact.value))

    return candidates


def read_by_wording(questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
    """Answer each question from its passages of the synthetic world's encyclopaedia."""
    results = []
    for question, question_passages in zip(questions, passages, strict=True):
        text = answer(question, question_passages)
        result = ToolResult(text) if text else NO_ANSWER
        results.append(result)
    return results
