"""Wikipedia search over real indexes on disk."""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unicodedata import normalize

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.damage import flip, rot
from toolformer_dag import identity
from toolformer_dag.files import list_damaged_files
from toolformer_dag.settings.tool_settings import ToolLimits
from toolformer_dag.tools.passage_index import MANIFEST_FILE_NAME, compute_index_folder, ensure_index, write_index
from toolformer_dag.tools.passage_search import PassageSearch
from toolformer_dag.tools.passage_terms import get_word_analyzer, parse_query_terms
from toolformer_dag.tools.passages import Passage, PassageError
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import run_calls
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDown

LOAD = (lambda done: None, 90)
WORDS = [
    "river",
    "painter",
    "castle",
    "bridge",
    "museum",
    "harbour",
    "glass",
    "treaty",
    "violin",
    "comet",
    "tower",
    "mill",
]


def made_passages(count: int, seed: int = 0) -> list[Passage]:
    chance = random.Random(seed)
    return [
        Passage(
            str(n),
            f"{chance.choice(WORDS)} {n}",
            chance.choice(["", "History"]),
            " ".join(chance.choices(WORDS, k=chance.randint(3, 30))),
        )
        for n in range(count)
    ]


def write(file: Path, passages: list[Passage]) -> str:
    rows = ({"id": p.id, "title": p.title, "section": p.section, "text": p.text} for p in passages)
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[PassageSearch, list[Passage]]:
    passages = made_passages(300)
    folder = tmp_path_factory.mktemp("index")
    write_index(passages, folder, lambda done: None, passages_per_commit=90)
    return PassageSearch(folder), passages


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield load_tool("wiki_search", {"passages": "embedded"})


def bm25_scores(passages: list[Passage], terms: list[str]) -> list[float]:
    """The formula written out over all passages; lengths are rounded down to what one byte holds, as Lucene does."""
    documents = [Counter(get_word_analyzer().analyze(p.build_searched_text())) for p in passages]
    lengths = [sum(document.values()) for document in documents]
    mean = sum(lengths) / len(lengths)
    scores = [0.0] * len(passages)
    for term in terms:
        found = sum(term in document for document in documents)
        idf = math.log(1 + (len(passages) - found + 0.5) / (found + 0.5))
        for number, document in enumerate(documents):
            rate = document[term]
            scores[number] += idf * rate * 2.2 / (rate + 1.2 * (0.25 + 0.75 * lengths[number] / mean)) if rate else 0
    return scores


@pytest.mark.parametrize(
    "query", ["river castle", "the painter of the bridge", "violin violin comet", "tower", "history mill glass"]
)
def test_ranking_is_bm25(searched: tuple[PassageSearch, list[Passage]], query: str) -> None:
    search, passages = searched
    scores = bm25_scores(passages, parse_query_terms(query))
    expected = sorted(range(len(passages)), key=lambda n: (-round(scores[n], 4), n))
    hits = search.find_passages(query, 10)
    assert [int(passage.id) for _, passage in hits] == expected[:10]
    assert [score for score, _ in hits] == pytest.approx([scores[n] for n in expected[:10]], rel=1e-4)


def test_many_equal_scores_stand_in_the_order_of_the_source_however_the_index_was_built(tmp_path: Path) -> None:
    same = [Passage(str(n), "Kestrel", "", "a small falcon") for n in range(300)]
    for name, commit_every in (("whole", 1000), ("pieces", 17)):
        write_index(same, tmp_path / name, lambda done: None, passages_per_commit=commit_every)
        assert [one.id for _, one in PassageSearch(tmp_path / name).find_passages("falcon", 3)] == ["0", "1", "2"]


@given(st.text(max_size=80))
@example("title:river")
@example("river AND NOT river")
@example('+river -river "river')
@example("river~2^9 (")
@example("words:river*")
def test_no_query_is_parsed_as_query_language(searched: tuple[PassageSearch, list[Passage]], query: str) -> None:
    hits = searched[0].find_passages(query, 3)
    assert len(hits) <= 3
    assert "river" not in parse_query_terms(query) or any(
        "river" in passage.build_searched_text() for _, passage in hits
    )


def test_stop_words_alone_are_searched() -> None:
    assert parse_query_terms("The Who") == ["the", "who"]
    assert parse_query_terms("who was the Café owner") == ["cafe", "owner"]


WORLD = [
    Passage("1", "Curricula", "", "Résumés and cafés are told apart by their accents."),
    Passage("2", "東京", "歴史", "私は東京に行く前に、お茶を飲んだ。コーヒーはない。"),
    Passage("3", "北京", "", "北京是中华人民共和国的首都，有两千多万人口。"),
    Passage("4", "ประเทศไทย", "", "ประเทศไทยมีประชากรหกสิบล้านคนและกรุงเทพเป็นเมืองหลวง"),
    Passage("5", "हिन्दी", "", "हिन्दी भारत की भाषा है।"),
]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("re\u0301sume\u0301s", "1"),
        ("行く前", "2"),
        ("茶", "2"),
        ("コーヒー", "2"),
        ("首都人口", "3"),
        ("where is 中华?", "3"),
        ("เมืองหลวง", "4"),
        ("ประชากร", "4"),
        ("भाषा", "5"),
    ],
)
def test_accents_may_be_composed_or_not_and_words_are_found_in_sentences_without_spaces(
    query: str, best: str, tmp_path: Path
) -> None:
    for form in ("NFC", "NFD"):
        write_index([Passage(p.id, p.title, p.section, normalize(form, p.text)) for p in WORLD], tmp_path / form, *LOAD)
        assert [one.id for _, one in PassageSearch(tmp_path / form).find_passages(query, 1)] == [best]
    assert PassageSearch(tmp_path / "NFC").find_passages("上海", 1) == []


def test_how_ascii_passages_are_indexed_did_not_change(tmp_path: Path) -> None:
    embedded = load_tool("wiki_search", {"passages": "embedded"}).identity()
    assert embedded["index_version"] == 1
    given = load_tool("wiki_search", {"passages": write(tmp_path / "p.jsonl", WORLD)}).identity()
    assert given["index_version"] == 2


def test_a_killed_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", made_passages(6_000))
    root = tmp_path / "indexes"
    program = (
        "import sys,time; from pathlib import Path; from toolformer_dag.tools.passage_index import ensure_index\n"
        "def told(done):\n    print(done, flush=True)\n    if done >= 4000: time.sleep(60)\n"
        "ensure_index(sys.argv[1], Path(sys.argv[2]), told, 2000)"
    )
    environment = {**os.environ, "TOOLFORMER_CACHE": str(tmp_path / "cache")}
    child = subprocess.Popen(
        [sys.executable, "-c", program, source, str(root)], stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    while int(child.stdout.readline()) < 4000:
        time.sleep(0)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not [folder for folder in root.iterdir() if folder.name.endswith("-v1")]
    told: list[int] = []
    folder = ensure_index(source, root, told.append, 2000)
    assert told[0] == 4000
    assert told[-1] == 6_000
    resumed = PassageSearch(folder).find_passages("river castle", 10)
    write_index(made_passages(6_000), tmp_path / "whole", lambda done: None, 250_000)
    assert resumed == PassageSearch(tmp_path / "whole").find_passages("river castle", 10)


def test_a_whole_index_is_found_again_by_its_content_and_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(tmp_path / "cache"))
    first, second = (write(tmp_path / name, made_passages(5)) for name in ("a.jsonl", "b.jsonl"))
    inode = ensure_index(first).stat().st_ino
    told = list[int]()
    assert ensure_index(second, report_progress=told.append) == compute_index_folder(second)
    assert compute_index_folder(second).stat().st_ino == inode and told == []


def test_a_tilde_in_the_variable_of_the_cache_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOOLFORMER_CACHE", "~/cache")
    assert compute_index_folder("embedded").parent == tmp_path / "cache" / "indexes"


def whole_files(folder: Path) -> list[Path]:
    """Return the files of an index that hold something."""
    return [path for path in sorted(folder.iterdir()) if path.stat().st_size]


def test_a_flipped_bit_in_any_file_of_an_index_is_named_and_the_index_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "a.jsonl", made_passages(50))
    chance = random.Random(0)
    folder = ensure_index(source)
    before = PassageSearch(folder).find_passages("river castle", 10)
    kinds = {file.suffix for file in whole_files(folder)}
    assert len(kinds) > 5
    for kind in sorted(kinds):
        file = next(one for one in whole_files(folder) if one.suffix == kind)
        flip(file, chance)
        assert list_damaged_files(folder / MANIFEST_FILE_NAME) == [file]
        caplog.clear()
        ensure_index(source)
        assert str(file) in caplog.text and "set aside" in caplog.text
        assert list_damaged_files(folder / MANIFEST_FILE_NAME, force_read=True) == []
        assert PassageSearch(folder).find_passages("river castle", 10) == before
    monkeypatch.setattr(identity, "REMEMBERED_MIN_BYTES", 0)
    file = next(one for one in whole_files(folder) if one.suffix == ".store")
    rot(file, chance)
    assert list_damaged_files(folder / MANIFEST_FILE_NAME) == []
    caplog.clear()
    ensure_index(source)
    assert str(file) in caplog.text and "set aside" in caplog.text
    assert PassageSearch(folder).find_passages("river castle", 10) == before
    assert list_damaged_files(folder / MANIFEST_FILE_NAME, force_read=True) == []
    (folder / "meta.json").unlink()
    assert list_damaged_files(folder / MANIFEST_FILE_NAME) == [folder / "meta.json"]
    caplog.clear()
    ensure_index(source)
    assert str(folder / "meta.json") in caplog.text and "set aside" in caplog.text
    assert PassageSearch(folder).find_passages("river castle", 10) == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(tmp_path / "cache"))
    source = write(tmp_path / "a.jsonl", made_passages(5))
    with pytest.raises(PassageError, match="index_folder"):
        ensure_index(source, Path(source))


def test_the_tool_answers_with_the_article_and_its_section(tool: Tool) -> None:
    from toolformer_dag.synthetic.world import get_world, iter_article_passages

    wanted = list(iter_article_passages(get_world()))[::400]
    results = tool.run([ToolCall(f'"{p.title} {p.section}"') for p in wanted])
    assert [result.result for result in results] == [p.snippet for p in wanted]


@pytest.mark.parametrize(
    ("query", "reason"), [('""', "no_search_terms"), ("?!", "no_search_terms"), ("zzqx", "nothing_found")]
)
def test_a_search_without_words_or_hits_has_no_result(tool: Tool, query: str, reason: str) -> None:
    [result] = tool.run([ToolCall(query)])
    assert (result.result, result.reason) == (None, reason)


def test_the_snippet_length_is_a_setting_and_part_of_the_identity(tool: Tool) -> None:
    short = load_tool("wiki_search", {"snippet_characters": 20})
    [result] = short.run([ToolCall("Fulford river")])
    assert result.result is not None
    assert len(result.result) <= 20
    assert short.identity() != tool.identity()
    assert "embedded" not in str(tool.identity())


def test_missing_passages_stop_the_lane(tmp_path: Path) -> None:
    with pytest.raises(ToolDown, match=r"tools\.wiki_search.*gone\.jsonl"):
        run_calls(
            load_tool("wiki_search", {"passages": str(tmp_path / "gone.jsonl")}), [ToolCall("river")], ToolLimits()
        )


def test_relative_passages_lie_beside_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLFORMER_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "p.jsonl", [Passage("1", "Kestrel", "", "a small falcon")])
    tool = load_tool("wiki_search", {"passages": "p.jsonl", "index_folder": "idx"}, root=tmp_path)
    assert tool.run([ToolCall('"falcon"')])[0].result == "Kestrel > a small falcon"
    assert (tmp_path / "idx").is_dir()
