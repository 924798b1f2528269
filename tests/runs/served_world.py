"""A project over the tools of tests/tools/typed_server.py: texts that are for one tool each, and calls of a file."""

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command_line import cli
from tests.tools import typed_server
from tests.worlds import MODEL, make_model
from toolformer_dag.settings.servers import LISTING_FILE_NAME

HOSTILE = 'Ny "X"] -> (Y'
"""A town whose name holds what ends calls; JSON escapes its quotes."""
TOWNS = ("Oslo", "Rome", "Bergen", "Lima", HOSTILE)
SETTINGS = """
[sampling]
max_call_tokens = 40
[corpus]
shards = ["web/*.jsonl"]
segment_tokens = 100
[training]
max_steps = 1
min_texts = 1
eval_steps = 1
batch_size = 2
sequence_length = 128
[evaluation]
questions = 1
swapped_texts = 2
[execution]
workers = 1
[decoding]
max_new_tokens = 4
[servers.typed]
command = {command}
"""
LANE = """
[tools.{key}]
examples = {examples}
proposals = {sources}
tau_s = 0.05
k = 2
m = 6
tau_f = -100.0
"""


@dataclass(frozen=True)
class Asked:
    """A sentence for a tool: the call stands between `before` and `after`."""

    before: str
    arguments: Mapping[str, Any]
    after: str

    @property
    def input(self) -> str:
        return ", ".join(f"{name}={json.dumps(value)}" for name, value in self.arguments.items())


Ask = Callable[[random.Random], Asked]


def population(draw: random.Random) -> Asked:
    town = draw.choice(TOWNS)
    people = typed_server.population(town)
    return Asked(f"The people who live in the town of {town} are", {"town": town}, f" {people} in number.")


def total(draw: random.Random) -> Asked:
    count = draw.randrange(2, 9)
    price = draw.randrange(2, 9)
    before = f"{count} things at a price of {price} francs each cost"
    return Asked(before, {"count": count, "price": price}, f" {typed_server.total(count, price)}.")


def distance(draw: random.Random) -> Asked:
    amount = draw.randrange(2, 90) / 2
    unit = draw.choice(("miles", "kilometres"))
    told = typed_server.distance(amount, unit)
    arguments = {"amount": amount, "unit": unit}
    return Asked(f"A distance of {amount} converts to", arguments, f" {told} miles or kilometres.")


def mean(draw: random.Random) -> Asked:
    numbers = draw.sample(range(20), 3)
    return Asked(f"The mean of the numbers {numbers} is", {"numbers": numbers}, f" {typed_server.mean(numbers)}.")


def travel(draw: random.Random) -> Asked:
    start, end = draw.sample(TOWNS, 2)
    trip: dict[str, Any] = {"start": start, "end": end, "days": draw.randrange(2, 9)}
    return Asked(f"A trip of {trip['days']} days from {start} to {end} is", {"trip": trip}, " by train.")


def rounded(draw: random.Random) -> Asked:
    value = draw.randrange(1, 90) + 0.5
    up = draw.random() < 0.5
    told = typed_server.rounded(value, up)
    arguments = {"value": value, "up": True} if up else {"value": value}
    return Asked(f"The decimal value {value} is, {'up' if up else 'down'} to a whole,", arguments, f" {told}.")


SIX: Mapping[str, Ask] = {ask.__name__: ask for ask in (population, total, distance, mean, travel, rounded)}


def tool_name(key: str) -> str:
    return "".join(word.capitalize() for word in key.split("_"))


def written(key: str, asked: Asked) -> str:
    return f"{asked.before} [{tool_name(key)}({asked.input})]{asked.after}"


def lay_out_served(folder: Path) -> Path:
    """Write settings, model, texts and a file of calls per tool, and list the server's tools; run nothing.

    Each shard has two documents of six sentences per tool, and lines for none, some of which are held out; the file of
    a tool has the call of the first sentence of each document. A model this small mostly gets wrong what it samples.
    """
    draw = random.Random(1)
    folder.mkdir(parents=True)
    (folder / "web").mkdir()
    command = [sys.executable, typed_server.__file__]
    settings = (MODEL + SETTINGS).replace("{command}", json.dumps(command))
    for key, ask in SIX.items():
        examples = [written(key, ask(draw)) for _ in range(2)]
        lane = {"key": key, "examples": json.dumps(examples), "sources": json.dumps(["model", f"{key}.jsonl"])}
        settings += LANE.format(**lane)
    (folder / "toolformer.toml").write_text(settings)
    for shard in ("one", "two"):
        _write_shard(folder, shard, draw)
    lines = [form for key, ask in SIX.items() for _ in range(60) for form in _lines(key, ask(draw))]
    make_model(folder / "model", texts=lines, vocabulary=500, context=2048)
    listed = cli("servers", "--config", str(folder / "toolformer.toml"))
    assert listed.returncode == 0 and "typed: 6 tools" in listed.stdout, listed.stdout + listed.stderr
    assert (folder / LISTING_FILE_NAME).is_file()
    return folder


def _lines(key: str, asked: Asked) -> tuple[str, str]:
    return f" {asked.before}{asked.after}", f" {written(key, asked)}"


def _write_shard(folder: Path, shard: str, draw: random.Random) -> None:
    records: list[str] = []
    for key, ask in SIX.items():
        calls: list[str] = []
        for number in range(2):
            sentences = [ask(draw) for _ in range(6)]
            digest = f"{shard}-{key}-{number}"
            text = "\n".join(asked.before + asked.after for asked in sentences)
            records.append(_record(digest, text))
            at = len(sentences[0].before)
            calls.append(json.dumps({"digest": digest, "char_offset": at, "input": sentences[0].input}))
        with (folder / f"{key}.jsonl").open("a") as stream:
            stream.write("".join(f"{line}\n" for line in calls))
    records += [_record(f"{shard}-{number}", f"Nobody spoke. {number} slept.") for number in range(40)]
    (folder / "web" / f"{shard}.jsonl").write_text("".join(f"{line}\n" for line in records))


def _record(digest: str, text: str) -> str:
    return json.dumps({"url": f"https://example.org/{digest}", "digest": digest, "raw_content": text})
