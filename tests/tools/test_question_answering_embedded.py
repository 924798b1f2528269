"""The reader without weights: general rules of English, held against the made world and against real questions."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.tools.extraction import extract
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.question_parsing import _ABBREVIATION, _SENTENCE_END, parse_question, sentences, stem, words
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool, ToolCall

GHANA = Passage(
    "1",
    "Ghana",
    "History",
    "Ghana gained independence from the United Kingdom on 6 March 1957. Its first president was Kwame Nkrumah, "
    "who led the country until 1966. The population of Ghana is 32,833,031 people. Ghana lies on the Gulf of Guinea.",
)
OTHER = Passage("2", "Togo", "", "Togo gained independence in 1960. Its first president was Sylvanus Olympio.")


def even(word: str) -> float:
    return 1.0


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield load_tool("question_answering", {"reader": "embedded", "passages": "embedded"})


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("Who was the first president of Ghana?", "person"),
        ("What is the name of the person who founded Orrcorp?", "person"),
        ("where is ghana", "place"),
        ("In which country is Accra?", "place"),
        ("when did ghana become independent", "date"),
        ("In what year did Ghana become independent?", "year"),
        ("how many people live in ghana", "number"),
        ("What is the population of Ghana?", "number"),
        ("The capital of Ghana is called what?", "place"),
        ("The population of Ghana is what?", "number"),
        ("The year of its independence was which one?", "year"),
        ("What is Ghana known for?", "thing"),
        ("why is the sky blue", "thing"),
        ("Ghana", "thing"),
        ("Tell me the capital of Ghana.", "place"),
        ("Ghana's capital, please?", "place"),
        ("What is Kwame Nkrumah's birthplace?", "place"),
        ("There's a lake in Ghana and a river; what is it called?", "place"),
        ("Could you name the president of Ghana?", "person"),
        ("Whereabouts was Kwame Nkrumah born?", "place"),
        ("What is the color of Ghana?", "thing"),
        ("Tell me more.", "thing"),
    ],
)
def test_the_question_word_tells_the_kind_of_the_answer(question: str, kind: str) -> None:
    assert parse_question(question, even).kind == kind


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("When did Ghana gain independence?", "6 March 1957"),
        ("In which year did Ghana gain independence?", "1957"),
        ("Who was the first president of Ghana?", "Kwame Nkrumah"),
        ("What is the population of Ghana?", "32,833,031 people"),
        ("how many people live in Ghana?", "32,833,031"),
    ],
)
def test_an_answer_is_the_span_of_its_kind_near_the_questions_words(question: str, answer: str) -> None:
    found = extract(question, [GHANA, OTHER], even)
    assert found is not None
    assert found.text == answer


@pytest.mark.parametrize(
    ("question", "told", "answer"),
    [
        ("When was Ada born?", "Ada was born in 1815, and her brother was born in 1820.", "1815"),
        (
            "Who painted Guernica?",
            "Guernica was painted by Pablo Picasso, while the copy was painted by Juan Gris.",
            "Pablo Picasso",
        ),
    ],
)
def test_of_a_word_that_stands_twice_the_nearer_place_counts(question: str, told: str, answer: str) -> None:
    found = extract(question, [Passage("7", "", "", told)], even)
    assert found is not None and found.text == answer


def test_what_stands_before_the_noun_that_is_asked_for_is_no_answer() -> None:
    town = Passage("3", "Dunwood", "Product", "The main product of Dunwood is shoes. Dunwood lies on the river Fala.")
    found = extract("What product do people make in Dunwood?", [town], lambda word: 1.0 if word == "Dunwood" else 3.0)
    assert found is not None and found.text == "shoes"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the first town on the Romen?", "Walville"),
        ("What is the last sea on the Romen?", "the Coral Sea"),
        ("Where does the Romen begin?", "Walville"),
    ],
)
def test_a_place_of_another_class_than_the_one_asked_for_is_no_answer(question: str, answer: str) -> None:
    facts = ["The Romen flows to the Coral Sea.", "The source of the Romen is near Walville."]
    for told in (facts, facts[::-1]):
        found = extract(question, [Passage("4", "Romen", "", " ".join(told))], even)
        assert found is not None and found.text == answer


def test_a_namesake_is_no_answer() -> None:
    hugo = Passage("5", "Hugo Garwick", "", "The teacher of Hugo Garwick was Grace Torovic.")
    grace = Passage("6", "Grace Garwick", "", "Grace Garwick was taught by the teacher Gina Hartner.")
    for passages in ([hugo, grace], [grace, hugo]):
        found = extract("Whose pupil was Grace Garwick?", passages, even)
        assert found is not None and found.text == "Gina Hartner"


def test_passages_that_share_nothing_give_no_answer() -> None:
    assert extract("Who painted the ceiling of the chapel?", [GHANA, OTHER], even) is None
    assert extract("Who?", [], even) is None


def test_sentences_do_not_end_at_initials_and_abbreviations() -> None:
    assert sentences("Dr. John F. Kennedy met Mr. Smith. He left. (She stayed.) “Why?” They knew.") == [
        "Dr. John F. Kennedy met Mr. Smith.",
        "He left.",
        "(She stayed.)",
        "“Why?”",
        "They knew.",
    ]


def slow_sentences(text: str) -> list[str]:
    """Each sentence is written out and searched from its beginning before anything is put behind it."""
    found: list[str] = []
    for piece in _SENTENCE_END.split(text):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += " " + piece
        else:
            found.append(piece)
    return found


PIECES = ["Dr.", "No.", "J.", "U.S.", "(A.)", "c.", "an.", "Why?", "“So!”", "Yes", "1.", " ", "\n", ". ", "é", "_A."]


@given(st.text(max_size=60) | st.lists(st.sampled_from([*PIECES, " ", " "])).map("".join))
def test_sentences_are_those_of_the_slow_way(text: str) -> None:
    assert sentences(text) == slow_sentences(text)


def test_a_passage_of_nothing_but_initials_is_one_sentence() -> None:
    assert sentences("A. B. " * 100_000) == ["A. B. " * 100_000]


def test_forms_and_families_of_a_word_share_a_stem() -> None:
    assert stem("painters") == stem("painter")
    assert stem("lives") == stem("residence") == stem("home")
    assert stem("living") == stem("profession")
    assert stem("ghana's") == stem("ghana")
    assert stem("begins") == stem("source") != stem("empties") == stem("flow")


@given(st.text(max_size=60), st.text(max_size=120), st.text(max_size=20))
def test_any_text_is_read_without_an_exception_and_answers_stand_in_a_passage(a: str, b: str, c: str) -> None:
    passage = Passage("1", c, "", b)
    found = extract(a, [passage], even)
    assert found is None or found.text in b
    assert all(b[word.start : word.end] == word.text for word in words(b))


def test_the_made_world_is_answered(tool: Tool) -> None:
    from toolformer_dag.synthetic.phenomena import phenomenon
    from toolformer_dag.synthetic.world import the_world

    random = Random(11)
    made = [
        phenomenon(random, the_world(), "question_answering", part, wordings)
        for part in ("corpus", "evaluation")
        for wordings in ("seen", "unseen")
        for _ in range(75)
    ]
    results = tool.run([ToolCall(one.input) for one in made])
    right = sum(result.result == one.result for result, one in zip(results, made, strict=True))
    assert right / len(made) > 0.98


def test_what_is_no_question_or_unheard_of_has_a_reason(tool: Tool) -> None:
    assert [result.reason for result in tool.run([ToolCall('""'), ToolCall("zzqx?")])] == ["no_question", "no_answer"]


def test_identity_tells_passages_and_reader(tool: Tool, tmp_path: Path) -> None:
    identity = tool.identity()
    assert identity["reader"] == "embedded"
    assert identity["passages"] == load_tool("wiki_search", {"passages": "embedded"}).identity()["passages"]
    assert load_tool("question_answering", {"reader": "embedded", "passages_read": 3}).identity() != identity


def test_real_questions_are_answered_sometimes(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(tmp_path))
    passages = str(shared / "data/wikipedia/passages.jsonl.gz")
    tool = load_tool("question_answering", {"reader": "embedded", "passages": passages})
    lines = (shared / "data/benchmarks/nq_open/NQ-open.dev.jsonl").read_text().splitlines()[:100]
    asked = [json.loads(line) for line in lines]
    results = tool.run([ToolCall(one["question"]) for one in asked])
    exact = sum((result.result or "") in one["answer"] for result, one in zip(results, asked, strict=True))
    assert exact >= 2  # benchmarks/qa.py measures it on all of them


def test_a_unit_of_measure_stays_where_the_question_names_it_and_what_was_counted_does_not() -> None:
    passage = Passage("1", "Haley", "", "The river Haley is 612 miles long. Along the Haley live 12 families.")
    answers = [
        extract(asked, [passage], even)
        for asked in ("How many miles long is the Haley?", "How many families live along the Haley?")
    ]
    assert [answer.text for answer in answers if answer] == ["612 miles", "12"]
