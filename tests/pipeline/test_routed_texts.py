"""With tools by the dozen a text goes to the few that it fits; each is annotated for those alone."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unicodedata import normalize

import polars as pl
import pytest

from tests.pipeline.conftest import Line, NewLine, update_one
from toolformer_dag.computing.plan import Plan
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.tools.registry import load_tools
from toolformer_dag.tools.routing import Router

TOOLS = {
    "get_weather": ("Tells the weather of a town: rain, sun, temperature.", "city"),
    "convert_money": ("Converts an amount of money between currencies.", "amount"),
    "distance": ("Tells how many kilometres lie between two towns.", "start"),
    "book_flight": ("Books a seat on a flight.", "airport"),
    "translate": ("Translates a sentence into another language.", "sentence"),
    "stars": ("Counts the stars of the sky.", "sky"),
}
TEXTS = {
    "It rained in the town all day, at a temperature of three degrees.": "get_weather",
    "The currencies fell, so the amount of money was less.": "convert_money",
    "Between the two towns lie twelve kilometres of road.": "distance",
    "She missed the flight and slept at the airport.": "book_flight",
    "How many stars are in the sky?": "stars",
}


def sections() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, (description, argument) in TOOLS.items():
        name = key.title().replace("_", "")
        call = f"[{name}({argument}=1)]"
        schema = {"properties": {argument: {}}, "required": [argument]}
        told = {
            "description": description,
            "input_schema": schema,
            "examples": [f"So {call} it is.", f"It is {call} so."],
        }
        found[key] = {"use": "mcp", "server": "office", "url": "http://localhost/mcp", "tool": key, **told}
    return found


@pytest.mark.parametrize(("text", "key"), TEXTS.items())
def test_a_text_fits_the_tool_whose_words_it_has(text: str, key: str) -> None:
    scores = Router(list(load_tools(sections()).values())).rank_tools(text, 3)
    assert next(iter(scores)) == key
    assert list(scores.values()) == sorted(scores.values(), reverse=True) and len(scores) <= 3
    assert Router(list(reversed(load_tools(sections()).values()))).rank_tools(text, 3) == pytest.approx(scores)


def test_words_are_found_in_sentences_without_spaces_and_accents_may_be_composed_or_not() -> None:
    made = sections()
    made["stars"]["description"] = "数天上的星星。"
    made["translate"]["description"] = "Traduit un résumé."
    router = Router(list(load_tools(made).values()))
    assert next(iter(router.rank_tools("昨天晚上他们看了很多星星。", 1))) == "stars"
    assert next(iter(router.rank_tools(normalize("NFD", "Voici le résumé."), 1))) == "translate"


def test_a_tool_is_as_near_as_the_nearest_of_its_examples_and_neighbouring_words_count() -> None:
    made = sections()
    made["stars"]["examples"] += ["Above the barn hang [Stars(sky=1)] many.", "The barn door is [Stars(sky=2)] red."]
    made["distance"]["examples"] += ["The red barn [Distance(start=1)] stands far off.", "So [Distance(start=2)] far."]
    router = Router(list(load_tools(made).values()))
    assert next(iter(router.rank_tools("Whose is the red barn?", 2))) == "distance"
    assert next(iter(router.rank_tools("Who painted the barn door?", 2))) == "stars"
    more = [*made["distance"]["examples"], "A bridge of wood [Distance(start=3)] is near."]
    made["distance"]["examples"] = more
    assert next(iter(Router(list(load_tools(made).values())).rank_tools("Whose is the red barn?", 2))) == "distance"


def test_a_number_says_no_more_than_any_other() -> None:
    made = sections()
    for year, one in enumerate(made.values(), 2010):
        one["examples"] = [str(example).replace("So", f"In {year}") for example in one["examples"]]
    router = Router(list(load_tools(made).values()))
    for number in (2010, 2012, 7):
        assert router.rank_tools(f"In {number} they counted each star of the sky.", 1).keys() == {"stars"}


@pytest.mark.parametrize("text", ["", "?!", "zzz qqq"])
def test_a_text_that_shares_no_word_fits_none(text: str) -> None:
    assert Router(list(load_tools(sections()).values())).rank_tools(text, 3) == {}


def chosen(line: Line, most: int) -> tuple[pl.DataFrame, Counter[str]]:
    """The texts of all lanes, and why others were left out."""
    settings = load_settings(line.folder / "toolformer.toml", overrides=[f"corpus.tools_per_text={most}"])
    outputs = {output.name: output for output in list_table_outputs(Plan.from_settings(settings))}
    for name in (name for name in outputs if name.startswith("ccnet/")):
        update_one(outputs, name)
    left_out: Counter[str] = Counter()
    for key in TOOLS:
        left_out += Counter(update_one(outputs, f"{key}/heuristic_subset").rejections_by_reason)
    tables = [outputs[f"{key}/heuristic_subset"].table for key in TOOLS]
    return pl.concat([table.read_part(part) for table in tables for part in table.list_part_names()]), left_out


def test_each_text_goes_to_so_many_tools_and_the_others_are_counted(new_line: NewLine) -> None:
    line = new_line()
    documents = [
        {
            "url": f"https://x.org/{at}",
            "digest": f"sha1:{at}",
            "source_domain": "x.org",
            "title": "",
            "raw_content": text,
        }
        for at, text in enumerate(TEXTS)
    ]
    (line.web).mkdir(exist_ok=True)
    (line.web / "own.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in documents))
    write_settings(line.folder)
    every, left_out = chosen(line, 0)
    texts = every["text"].unique().to_list()
    assert len(texts) >= len(TEXTS) and every.height == len(texts) * len(TOOLS)
    assert not left_out["fits_other_tools"]
    found, left_out = chosen(line, 1)
    router = Router([lane.tool for lane in Plan.from_settings(load_settings(line.folder / "toolformer.toml")).lanes])
    expected = {(text, key) for text in texts for key in router.rank_tools(text, 1)}
    assert set(found.select("text", "tool").iter_rows()) == expected and len({key for _, key in expected}) > 2
    assert left_out["fits_other_tools"] == every.height - found.height
    assert found["wanted"].str.contains(r"^fits \d+\.\d$").all()


def write_settings(folder: Path) -> None:
    """A server of six tools, listed; no server is asked."""
    own = sections()
    listed = [{"name": key, **{n: own[key][n] for n in ("description", "input_schema")}} for key in own]
    (folder / "mcp_tools.json").write_text(json.dumps({"office": listed}))
    text = (folder / "toolformer.toml").read_text().replace("web/*.json.gz", "web/*.jsonl")
    start = text.index("[tools.calculator]")
    end = text.index("[training]")
    for key, one in own.items():
        (folder / f"{key}.txt").write_text(f"Call.\nInput: {key}\nOutput: {one['examples'][0].split()[1]} {key}\n")
    lanes = "".join(f'[tools.{key}]\nprompt = "{key}.txt"\n' for key in own)
    servers = '[servers.office]\nurl = "http://localhost/mcp"\n'
    (folder / "toolformer.toml").write_text(text[:start] + servers + lanes + text[end:])
