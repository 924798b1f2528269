"""Rows that change only together with the version constant that is raised by hand.

The rows stand in golden_rows.json beside the versions that gave them. After raising a constant, write them anew:

    python -m tests.pipeline.test_golden_rows
"""

import gzip
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import polars as pl
import pytest

from tests.cuts import fitting, words
from tests.pipeline.conftest import Line, engine_of
from tests.worlds import make_model
from toolformer_dag.decoding import generation
from toolformer_dag.evaluation import catalogue
from toolformer_dag.evaluation.benchmark import is_in_first_words
from toolformer_dag.model.requests import LossRequest
from toolformer_dag.pipeline import (
    control_calls,
    losses,
    merging,
    raw_shards,
    sample_store,
    scored_candidates,
    swapped_results,
)
from toolformer_dag.pipeline.controls import CHANCE_CONTROL
from toolformer_dag.pipeline.merging import AugmentedText, KeptCall
from toolformer_dag.settings.sections import ControlSettings
from toolformer_dag.texts import segments as cutting
from toolformer_dag.texts.calls import MalformedCall, parse_call
from toolformer_dag.texts.chains import ChainLink
from toolformer_dag.texts.segments import Segment

GOLDEN = Path(__file__).with_name("golden_rows.json")
WRITE = "python -m tests.pipeline.test_golden_rows"
TOLERANCE = 2e-4
"""What another processor may add to or take from a loss or a probability."""
Rows = list[Any]


def documents(folder: Path, model: Path) -> Rows:
    """Read a shard with good and bad lines."""
    fields = {"url": "https://News.example.org/2020/02/03/x", "source_domain": "news.example.org", "title": " A\tb "}
    good = {**fields, "digest": "a", "language": "en", "raw_content": "First line.  \r\n\r\nSecond\u00a0line. 😀\n"}
    lines: list[object] = [
        good,
        good,
        {**good, "digest": "b", "url": "https://example.org/1999/13/45/", "raw_content": "x\u0000y"},
        {**good, "digest": "c", "url": None, "title": None, "language": None},
        {"digest": "d", "url": "no text"},
        {**good, "digest": "e", "raw_content": " \n"},
        {**good, "digest": 7},
        [1],
        {"digest": "f", "raw_content": "the fewest fields"},
    ]
    content = b"".join(json.dumps(one).encode() + b"\n" for one in lines) + b"{\n\xff\xfe\n"
    line = Line.new(folder, model, [])
    line.web.mkdir()
    (line.web / "one.json.gz").write_bytes(gzip.compress(content))
    line.update("raw_shards")
    rejected = line.lake.get_table(raw_shards.REJECTED_LINES_TABLE).read_part("one").select("line", "reason")
    return [line.read("raw_shards").cast({"date": pl.String}).rows(), rejected.rows()]


def pieces(folder: Path, model: Path) -> Rows:
    """Cut documents; a token is a word."""
    texts = [
        "One two three. Four five six! Seven eight?\nNine ten.\n\n  Eleven twelve thirteen fourteen fifteen sixteen.",
        "a b c d e f g h i j k l m n o p",
        "„Eins zwei.“ Drei vier fünf sechs.\r\nSieben 第一。第二 acht",
        "short",
    ]
    return [list(map(str, fitting(text, most, words))) for text in texts for most in (3, 5)]


def samples(folder: Path, model: Path) -> Rows:
    """Sample calls with the small model."""
    line = Line.new(folder, model, ["one"])
    line.set(corpus__texts_per_shard=2)
    line.update("raw_shards", "heuristic_subset", "scored_candidates")
    columns = ("digest", "segment", "position", "sample", "char_offset", "p_api", "body", "reason")
    return list(line.read("scored_candidates").select(columns).rows())


def parsed(folder: Path, model: Path) -> Rows:
    """Parse what may be sampled."""
    bodies = [
        "Calculator(1 + 2)",
        " Calculator(1)",
        "Calculator(1) ",
        "Calculator()",
        "Calculator",
        "Calculator(1",
        "(1)",
    ]
    bodies += [
        "QA(Who (was) that?)",
        "QA(a -> b)",
        "QA(a]b)",
        "QA(a\nb)",
        "2x(1)",
        "QA(x [Calculator(1))",
        "Q A(1)",
        "",
    ]
    return [[body, *_parsed(body)] for body in bodies]


def _parsed(body: str) -> tuple[str, str | None]:
    try:
        call = parse_call(body)
    except MalformedCall as error:
        return error.reason, None
    return call.tool, call.input


def loss_rows(folder: Path, model: Path) -> Rows:
    """Score calls with the small model."""
    line = Line.new(folder, model, [])
    engine = engine_of(line.plan().settings.model)
    text = "3 and 4 make 7 .\n5 and 1 make 6 .\n2 and 2 make 4 ."
    asked = [(0, "3+4", "7"), (6, "3+4", "7"), (6, "3+4", "12"), (12, "5 + 1", "6"), (16, "", "x" * 300)]
    found = engine.losses([LossRequest(text, i, "Calculator", call, result) for i, call, result in asked])
    return [[one.loss_empty, one.loss_call, one.loss_result, one.reason] for one in found]


def exchanged(folder: Path, model: Path) -> Rows:
    """Swap results of calls in two shards."""
    rows = [
        (
            shard,
            digest,
            0,
            position,
            sample,
            f"{digest}{position}",
            f"r{(ord(digest) + position + sample) % 3}",
            0.1 * (position + 1),
        )
        for shard in ("one", "two")
        for digest in "abc"
        for position in range(2)
        for sample in range(2)
    ]
    calls = pl.DataFrame(
        rows, ["shard", "digest", "segment", "position", "sample", "input", "result", "p_api"], orient="row"
    )
    texts = calls.select("shard", "digest", "segment").unique(maintain_order=True)
    texts = texts.with_columns(text_digest=pl.concat_str("shard", "digest"))
    found = control_calls.exchange_results(
        calls,
        control=CHANCE_CONTROL,
        settings=ControlSettings(),
        texts=texts,
        likeliest_places=control_calls.select_likeliest_places(calls),
        max_texts=2,
    )
    return list(found.select("shard", "digest", "position", "sample", "result", "swap_reason").rows())


def merged(folder: Path, model: Path) -> Rows:
    """Put the calls of two tools into a document."""
    text = "It is Friday and two\nand two are four. Calls: [Calendar() are not made by hand."
    cut = [Segment(0, 0, text[:20]), Segment(1, 21, text[21:38]), Segment(2, 39, text[39:])]
    names = {"calculator": "Calculator", "calendar": "Calendar"}
    kept = [
        KeptCall(tool, offset, delta, (ChainLink(names[tool], "2 + 2", result),))
        for tool, offset, result, delta in (
            ("calendar", 5, "Friday", 1.0),
            ("calculator", 5, "4", 0.9),
            ("calculator", 20, "4", 1.0),
            ("calculator", 32, "4", 1.0),
            ("calendar", 21, "Friday", 2.0),
            ("calculator", 50, "4", 1.0),
        )
    ]
    found = merging.iter_augmented_texts(cut, kept, list(names.values()))
    return [
        [one.segment.index, one.text_with_calls, len(one.calls)]
        if isinstance(one, AugmentedText)
        else [one.reason, one.call_count]
        for one in found
    ]


def questions(folder: Path, model: Path) -> Rows:
    """Read small benchmarks and judge answers."""
    problem = {"Body": "Ada has 2 pens", "Question": "How many with 3 more?", "Answer": 5.0, "Type": "Addition"}
    team = {"query": "Alex plays for _X_.", "answer": {"name": "Orlando"}, "date": "2012", "relation": "P54"}
    files: dict[str, list[Any]] = {
        "svamp": [problem, {**problem, "Body": "Ada has 2 pens.", "Answer": "many"}],
        "webquestions": [
            {"utterance": "who?", "targetValue": '(list (description Ada) (description "Bo \\\\"B\\\\""))'}
        ],
        "templama": [team, {**team, "query": "_X_ coaches Alex."}],
    }
    read: Rows = []
    for name, records in files.items():
        file = folder / f"{name}.json"
        text = "\n".join(map(json.dumps, records)) if name == "templama" else json.dumps(records)
        file.write_text(text)
        for one in catalogue.read_benchmark(name, file):
            asked = [[q.prompt, q.right_answers, q.target_tool_key, q.context, q.wording] for q in one.questions]
            read.append([one.name, asked, sorted(one.withheld), dict(one.left_out_counts)])
    made = catalogue.build_synthetic_benchmark("calculator", 2, 7, "seen")
    read.append([made.name, [[q.prompt, q.right_answers] for q in made.questions]])
    outputs = [" 5.", " 2 + 3 = 5", " about 1,005", " -5", " COVID-19 5", " five", " .5 + 4.5 = 5 pens", " The Bo 5"]
    return [*read, [[text, made.is_correct(text, ("5",)), is_in_first_words(text, ("bo", "5"), 2)] for text in outputs]]


def written(folder: Path, model: Path) -> Rows:
    """Decode with the small model and the calculator."""
    from tests.decoded import generate
    from toolformer_dag.model.loading import load_model

    plan = Line.new(folder, model, []).plan()
    tools = {lane.tool.name: lane.tool for lane in plan.lanes}
    language_model = load_model(plan.settings.model)
    prompts = ["3 and 4 make", "5 and 1", "2 and 2 make 4 .\n7 and"]
    found = [
        one
        for k in (0, 1, 10)
        for one in generate(language_model, prompts, tools, max_new_tokens=8, top_k=k, max_call_tokens=8)
    ]
    return [[one.text, one.plain_text, [[c.tool, c.input, c.result, c.reason] for c in one.calls]] for one in found]


MADE: dict[tuple[ModuleType, str], Callable[[Path, Path], Rows]] = {
    (raw_shards, "READER"): documents,
    (cutting, "CUTTING_VERSION"): pieces,
    (sample_store, "METHOD"): samples,
    (scored_candidates, "PARSING"): parsed,
    (losses, "METHOD"): loss_rows,
    (swapped_results, "METHOD"): exchanged,
    (merging, "MERGING"): merged,
    (catalogue, "READING_VERSION"): questions,
    (generation, "DECODING_VERSION"): written,
}
"""The constants that stand for how rows come about, and what makes these."""
NAMED = {
    f"{module.__name__.removeprefix('toolformer_dag.')}.{constant}": (int(getattr(module, constant)), make)
    for (module, constant), make in MADE.items()
}


def rounded(value: Any) -> Any:
    """Round every number to 5 digits; NaN becomes a word."""
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else round(value, 5)
    return value


def alike(one: Any, other: Any) -> bool:
    """Compare rows; numbers may differ in their last digits."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE
    return bool(one == other)


def complaint(name: str, version: int, rows: Rows, kept: Mapping[str, Any]) -> str | None:
    """Say what is wrong with rows of a version, given those that are kept; None where nothing is."""
    if version != kept["version"]:
        return f"{name} is {version}, the golden rows are of {kept['version']}: write them anew with `{WRITE}`"
    if alike(rows, kept["rows"]):
        return None
    changed = [pair for pair in zip(rows, kept["rows"], strict=False) if not alike(*pair)]
    first = f"; the first is {changed[0][0]}, not {changed[0][1]}" if changed else ""
    return f"rows changed: raise {name} and write the golden rows anew with `{WRITE}`{first}"


def stored() -> dict[str, Any]:
    """Read the golden rows; a new constant has none yet."""
    nothing = {name: {"version": None, "rows": []} for name in NAMED}
    return nothing | json.loads(GOLDEN.read_text("utf-8"))


def told(name: str, folder: Path, model: Path) -> tuple[str | None, Rows]:
    """Make the rows that a constant stands for; return what is wrong with them, and the rows."""
    version, make = NAMED[name]
    rows = json.loads(json.dumps(rounded(make(folder, model))))
    return complaint(name, version, rows, stored()[name]), rows


@pytest.mark.parametrize("name", NAMED)
def test_rows_change_only_with_their_version(name: str, tmp_path: Path, model: Path) -> None:
    wrong, _ = told(name, tmp_path, model)
    assert wrong is None, wrong


def write() -> None:
    """Write rows whose version was raised; refuse rows that changed without it."""
    found = stored()
    with TemporaryDirectory() as root:
        model = make_model(Path(root) / "model")
        for number, name in enumerate(NAMED):
            folder = Path(root) / str(number)
            folder.mkdir()
            wrong, rows = told(name, folder, model)
            if wrong and wrong.startswith("rows changed"):
                raise SystemExit(wrong)
            found[name] = {"version": NAMED[name][0], "rows": rows if wrong else found[name]["rows"]}
    entries = ",\n".join(
        f'{json.dumps(name)}: {{"version": {found[name]["version"]}, "rows": [\n'
        + ",\n".join(json.dumps(row, ensure_ascii=False) for row in found[name]["rows"])
        + "\n]}"
        for name in NAMED
    )
    GOLDEN.write_text("{\n" + entries + "\n}\n", "utf-8")


if __name__ == "__main__":
    write()
