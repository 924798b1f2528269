"""Which texts machine translation looks at, and which kept calls it takes back (appendix A)."""

import gzip
import json
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.segments import Segment, split_into_paragraphs
from toolformer_dag.tools.foreign_text import COMMON_WORDS, iter_foreign_chunks, join_chunk, split_paragraph_into_chunks
from toolformer_dag.tools.language_identifier import Identifier
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.tool import Tool

BEFORE = "On the first evening the old captain stood up and told all of us quietly:"
GERMAN = "Wir haben gestern im alten Garten unter dem Apfelbaum gesessen und sehr lange miteinander geredet"
AFTER = "and nobody at the table understood what he had said, but we all clapped for him."
CHINESE = "南京高淳县住房和城乡建设局城市新区设计"


@pytest.fixture(scope="module")
def identifier() -> Identifier:
    return Identifier(None)


@pytest.fixture(scope="module")
def tool() -> Tool:
    return load_tool("machine_translation", {})


def document(text: str) -> Document:
    return Document("s", "d", "http://x.org/", "x.org", "", date(2020, 1, 1), "en", text)


def wanted(tool: Tool, text: str) -> bool:
    reasons = {tool.wants_document(document(text)), tool.wants(text, document(text))}
    assert len(reasons) == 1
    return reasons == {"foreign_chunk"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{BEFORE} {GERMAN} {AFTER}", True),
        (f"A title.\n{BEFORE} {GERMAN} {AFTER}\nThe end.", True),
        (
            f"The plan of the city was made by the office called {CHINESE} and it was built in the years after that.",
            True,
        ),
        (f"{BEFORE}\n{GERMAN}\n{AFTER}", True),
        (f"{GERMAN} {GERMAN} {GERMAN}", False),
        (f"{BEFORE} {GERMAN} {GERMAN}", False),
        (f"{BEFORE} {AFTER} {BEFORE} {AFTER}", False),
        (f"{BEFORE} {'12 345 % -- 67 ' * 8} {AFTER}", False),
        ("", False),
    ],
)
def test_a_foreign_chunk_with_english_before_and_after_is_wanted(tool: Tool, text: str, expected: bool) -> None:
    assert wanted(tool, text) is expected


def test_in_the_papers_profiles_english_stands_around_it_in_its_paragraph() -> None:
    section = load_settings(profile="gptj", environment={}).tools["machine_translation"]
    paper, wide = (load_tool("machine_translation", options) for options in (section.get_tool_options(), {}))
    assert (paper.by_paragraph, wide.by_paragraph) == (True, False)
    for text, expected in [(f"{BEFORE} {GERMAN} {AFTER}", 1), (f"{BEFORE}\n{GERMAN}\n{AFTER}", 0)]:
        found = [
            one.text for one in split_into_paragraphs([Segment(0, 0, text)]) if paper.wants(one.text, document(text))
        ]
        assert found == [text] * expected and wanted(wide, text)
    assert load_tool("machine_translation", {"english_around": "text"}).selection() == wide.selection()


@pytest.mark.parametrize(
    "sentence",
    [
        "Empresas do setor no país têm de entregar a declaração.",
        "As duas partidas no campeonato a equipa do treinador perdeu.",
        "No me lo creo, dijo, y no he vuelto a verlo.",
        "Und wer so etwas will, der geht in an Dörfern vorbei.",
        "In die tijd was er over het plan nog niets bekend.",
    ],
)
def test_words_that_other_languages_share_do_not_make_a_chunk_english(tool: Tool, sentence: str) -> None:
    assert wanted(tool, f"{BEFORE}\n{sentence}\n{AFTER}")
    assert not wanted(tool, f"{sentence}\n{GERMAN}\n{sentence}")


@pytest.mark.parametrize("beside", ["1 2 3 4 5 6 7 8 9 10", "http://example.com", "© 2019", "--- *** --- ***", "II 7"])
def test_digits_addresses_and_marks_are_not_english(tool: Tool, beside: str) -> None:
    assert not wanted(tool, f"{beside}\n{GERMAN}\n{beside}")
    assert not wanted(tool, f"{BEFORE}\n{GERMAN}\n{beside}")
    assert wanted(tool, f"{BEFORE}\n{beside}\n{GERMAN}\n{beside}\n{AFTER}")


def slow_foreign_chunks(text: str, identifier: Identifier) -> list[str]:
    """The rule as it is written down, every chunk asked; plainly English ones are not foreign, as in the fast path."""
    chunks = [chunk for paragraph in text.splitlines() for chunk in split_paragraph_into_chunks(paragraph)]
    asked = [identifier.identify_languages([join_chunk(chunk)])[0] for chunk in chunks]
    plain = [len(COMMON_WORDS & set(chunk)) >= 3 for chunk in chunks]
    english = [
        one.label == "en" and one.confidence >= 0.5 and any(map(str.isalpha, join_chunk(chunk)))
        for chunk, one in zip(chunks, asked, strict=True)
    ]
    return [
        join_chunk(chunk)
        for place, (chunk, one) in enumerate(zip(chunks, asked, strict=True))
        if len(chunk) == 10 and any(map(str.isalpha, join_chunk(chunk)))
        if one.label != "en" and one.confidence > 0.8 and not plain[place]
        if any(english[:place]) and any(english[place + 1 :])
    ]


def test_the_fast_way_agrees_with_the_rule_as_written(shared: Path, identifier: Identifier) -> None:
    with gzip.open(shared / "data/ccnet/en_head_0001.json.gz", "rt") as lines:
        texts = [json.loads(line)["raw_content"] for line, _ in zip(lines, range(120), strict=False)]
    found = [list(iter_foreign_chunks(text, identifier)) for text in texts]
    assert found == [slow_foreign_chunks(text, identifier) for text in texts]
    assert any(found)


def test_the_publishers_foreign_phrases_are_found(shared: Path, tool: Tool) -> None:
    with gzip.open(shared / "data/ccnet/foreign_phrase_docs.jsonl.gz", "rt") as lines:
        marked = {record["digest"] for record in map(json.loads, lines)}
    with gzip.open(shared / "data/ccnet/en_head_0000.json.gz", "rt") as lines:
        records = [
            record for n, record in enumerate(map(json.loads, lines)) if record["digest"] in marked or n % 8 == 0
        ]
    found = {record["digest"] for record in records if tool.wants_document(document(record["raw_content"]))}
    here = {record["digest"] for record in records} & marked
    assert len(here) > 20
    assert len(found & here) / len(here) > 0.6
    assert len(found - here) < len(records) / 50


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_chunks_overlap_by_half_and_hold_every_token(paragraph: str) -> None:
    chunks = split_paragraph_into_chunks(paragraph)
    tokens = [token for chunk in chunks[:1] for token in chunk] + [token for chunk in chunks[1:] for token in chunk[5:]]
    assert "".join(tokens) == "".join(paragraph.split())
    assert all(earlier[5:] == later[:5] for earlier, later in pairwise(chunks))


def test_a_chunk_has_ten_words_or_characters_of_an_unspaced_script() -> None:
    assert [(chunk[0], chunk[-1]) for chunk in split_paragraph_into_chunks(" ".join(map(str, range(23))))] == [
        ("0", "9"),
        ("5", "14"),
        ("10", "19"),
        ("15", "22"),
    ]
    assert [join_chunk(chunk) for chunk in split_paragraph_into_chunks(f"a plan: {CHINESE}")][:2] == [
        "a plan: 南京高淳县住房和",
        "淳县住房和城乡建设局",
    ]


@pytest.mark.parametrize(
    ("text", "offset", "removed"),
    [
        ("He wrote O homem suprimido in 1990.", 9, True),
        ("He wrote O homem suprimido in 1990.", 27, False),
        ("O homem suprimido, or O homem suprimido.", 20, False),
        ("He wrote O homem\n suprimido in 1990.", 9, True),
        ("He wrote it in 1990.", 9, False),
    ],
)
def test_a_call_whose_input_only_follows_is_taken_back(tool: Tool, text: str, offset: int, removed: bool) -> None:
    assert tool.keeps(text, offset, '"O homem suprimido"') is not removed


@given(st.text("ab ", max_size=12), st.integers(0, 12), st.text("ab", min_size=1, max_size=3))
def test_the_rule_for_kept_calls_in_plain_words(tool: Tool, text: str, offset: int, input: str) -> None:
    offset = min(offset, len(text))
    after = any(text.startswith(input, at) for at in range(offset, len(text)))
    before = any(text.startswith(input, at) and at + len(input) <= offset for at in range(offset))
    assert tool.keeps(text, offset, input) is not (after and not before)


def test_the_embedded_backend_wants_phrases_of_its_lexicon() -> None:
    tool = load_tool("machine_translation", {"backend": "embedded"})
    assert tool.wants("The song la rana was translated as the frog.", document("")) == "lexicon_phrase"
    assert tool.wants("la rana", document("")) is None
    spanish = "Ayer por la tarde vimos la rana en el jardín de mi abuela, que vive cerca del río."
    assert tool.wants(spanish, document("")) is None
    assert tool.wants(f"We read this on the wall of the inn: {spanish}", document("")) is None
    assert tool.wants(f"We read it on the wall: {spanish} Nobody told us what it means.", document("")) is None
    assert tool.wants("We saw la rana on the wall, and nobody told us what it means.", document("")) == "lexicon_phrase"
    assert tool.wants("The song was translated, and the die was cast.", document("")) is None
