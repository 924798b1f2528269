"""Answer from the synthetic world's encyclopedia without a model: its sentences are read back by their templates.

The encyclopedia states relations of entities, such as the year in which a bridge was built. Each relation has
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

from toolformer_dag.synthetic.wordings import ENTITY_KINDS, Relation, get_relations
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.tool import NO_ANSWER, ToolResult

_SENTENCE_END_PATTERN = re.compile(r"(?<=[.]) ")
_PLACEHOLDER_PATTERN = re.compile(r"\{[ev]\}('s)?")
"""Where the entity (`{e}`, `{e}'s`) or the value (`{v}`) stands in a template."""
MIN_NAME_SHARE = 0.5
"""The least share of the words of an entity's name that a question about it has."""
SMOOTHING_COUNT = 0.1
"""What is added to the count of a word, so that a word that no wording has does not rule a relation out."""


@functools.cache
def _get_stem_analyzer() -> tantivy.TextAnalyzer:
    """Return tantivy's analyzer that cuts texts into words and reduces these to their stems: `bridges` to `bridg`."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.lowercase())
    builder = builder.filter(tantivy.Filter.ascii_fold())
    builder = builder.filter(tantivy.Filter.stemmer("english"))
    return builder.build()


def extract_stems(text: str) -> list[str]:
    """Return the stems of the words of a text, in order: `who`, `built`, `bridg` for `Who built bridges?`."""
    return list(_get_stem_analyzer().analyze(text))


@dataclass(frozen=True, slots=True)
class RelationWords:
    """The words with which a relation, such as the year in which a bridge was built, is expressed.

    A wording is a template of a sentence or a question about the relation: "{e} was built in {v}."

    Attributes:
        relation: The relation.
        wording_counts_by_stem: For each word stem, how many of the relation's wordings have it.
        wording_count: How many wordings the relation has.
        sentence_patterns: They match the relation's sentences. The groups `e` and `v` are entity and value.
    """

    relation: Relation
    wording_counts_by_stem: Mapping[str, int]
    wording_count: int
    sentence_patterns: tuple[re.Pattern[str], ...]

    def score_question(self, question_stems: Sequence[str]) -> float:
        """Compute how well a question fits the relation.

        Args:
            question_stems: The word stems of the question.

        Returns:
            The log probability that wordings of the relation have these stems, taken as independent. It is higher for a
            better fit, and at most 0.
        """
        log_probabilities = []
        for stem in question_stems:
            smoothed_count = self.wording_counts_by_stem.get(stem, 0) + SMOOTHING_COUNT
            probability = smoothed_count / (self.wording_count + 1)
            log_probabilities.append(math.log(probability))
        return sum(log_probabilities)

    def find_stated_value(self, sentence: str, entity: str) -> str | None:
        """Find the value of the relation that a sentence states for an entity.

        For "Alder Bridge was built in 1936." and the entity "Alder Bridge" it is "1936".

        Returns:
            The value, or None if the sentence is about another relation or entity.
        """
        for pattern in self.sentence_patterns:
            match = pattern.fullmatch(sentence)
            if match is None:
                continue
            is_about_entity = match["e"] == entity
            return match["v"] if is_about_entity else None
        return None


class Fact(NamedTuple):
    """A relation and its value, as a passage states it of its entity."""

    relation_words: RelationWords
    value: str


class Candidate(NamedTuple):
    """A fact that may answer a question; of several tuples, the largest fits the question best.

    Attributes:
        name_share: The share of the words of the entity's name that are in the question.
        relation_score: How well the fact's relation fits the other words of the question.
        value: The answer.
    """

    name_share: float
    relation_score: float
    value: str


@functools.cache
def _list_relation_words() -> tuple[RelationWords, ...]:
    """Return the words of all relations in the synthetic world."""
    all_relation_words = []
    for kind in ENTITY_KINDS:
        for relation in get_relations(kind):
            all_relation_words.append(_build_relation_words(relation))
    return tuple(all_relation_words)


def _build_relation_words(relation: Relation) -> RelationWords:
    """Count in how many wordings of a relation each word stem stands, and make patterns that read its sentences.

    By the counts a question is recognized as one about the relation, and by the patterns a sentence that answers it.

    Args:
        relation: A relation such as the year in which a bridge was built. Its wordings are templates of questions and
            sentences, such as "{e} was built in {v}."
    """
    wordings = (relation.question, relation.keyword, *relation.questions, *relation.statements, *relation.sentences)

    wording_counts_by_stem: Counter[str] = Counter()
    for wording in wordings:
        text = _PLACEHOLDER_PATTERN.sub("", wording)  # without entity and value
        distinct_stems = set(extract_stems(text))
        wording_counts_by_stem.update(distinct_stems)

    sentence_patterns = [_build_sentence_pattern(template) for template in relation.sentences]
    return RelationWords(relation, wording_counts_by_stem, len(wordings), tuple(sentence_patterns))


def _build_sentence_pattern(template: str) -> re.Pattern[str]:
    """Build the pattern of the sentences that a template writes, such as "{e} was built in {v}."

    Its groups `e` and `v` are the entity and the value.
    """
    pattern = re.escape(template)
    pattern = pattern.replace(r"\{e\}", "(?P<e>.+?)", 1)
    pattern = pattern.replace(r"\{v\}", "(?P<v>.+?)")
    return re.compile(pattern)


def iter_facts(passage: Passage) -> Iterator[Fact]:
    """Find what the sentences of a passage state about the entity that is its title.

    Yields:
        A relation and its value, such as the year in which the entity was built, in the order of the sentences.
    """
    for sentence in _SENTENCE_END_PATTERN.split(passage.text):
        for relation_words in _list_relation_words():
            value = relation_words.find_stated_value(sentence, passage.title)
            if value is not None:
                yield Fact(relation_words, value)


def answer_question(question: str, passages: Sequence[Passage]) -> str | None:
    """Answer a question from passages of the synthetic world's encyclopedia.

    Returns:
        The answer, or None if no fact in the passages fits the question.
    """
    question_stems = dict.fromkeys(extract_stems(question))  # distinct, in order

    candidates: list[Candidate] = []
    for passage in passages:
        candidates += _list_answer_candidates(question_stems.keys(), passage)

    if not candidates:
        return None
    # The one that shares most of its entity's name with the question, and of equals the one whose relation fits best.
    best_candidate = max(candidates)
    return best_candidate.value


def _list_answer_candidates(question_stems: KeysView[str], passage: Passage) -> list[Candidate]:
    """List the facts in a passage that may answer a question.

    Args:
        question_stems: The word stems of the question.
        passage: The passage, whose title is the entity that its facts are about.

    Returns:
        The facts, or none if the question hardly names the entity.
    """
    name_stems = extract_stems(passage.title)
    shared_stems = [stem for stem in name_stems if stem in question_stems]
    name_share = len(shared_stems) / max(len(name_stems), 1)
    if name_share < MIN_NAME_SHARE:
        return []

    other_stems = [stem for stem in question_stems if stem not in name_stems]

    candidates = []
    for fact in iter_facts(passage):
        relation_score = fact.relation_words.score_question(other_stems)
        candidates.append(Candidate(name_share, relation_score, fact.value))

    return candidates


def answer_by_wording(questions: Sequence[str], passages_per_question: Sequence[Sequence[Passage]]) -> list[ToolResult]:
    """Answer each question from its passages of the synthetic world's encyclopedia, without a model.

    The words of a question show which fact it asks for: "When was Alder Bridge built?" asks for the year.

    Args:
        questions: The questions.
        passages_per_question: For each question, the passages that may answer it.

    Returns:
        A result per question. Without an answer it has the reason `no_answer`.
    """
    results = []
    for question, question_passages in zip(questions, passages_per_question, strict=True):
        answer = answer_question(question, question_passages)
        result = ToolResult(answer) if answer else NO_ANSWER
        results.append(result)
    return results
