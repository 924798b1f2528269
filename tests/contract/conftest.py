"""Small worlds for a suite that speaks as a user does: settings, the command line, SQL and Dagster's own interface.

Nothing here knows how the package is built inside, so the same tests hold before and after its inside changes. Figures
that were measured once lie in JSON files beside the tests. Write them anew, after a wanted change, with

    WRITE_CONTRACT=1 OMP_NUM_THREADS=1 pytest tests/contract

(one process: without -n), and read the difference before it is committed.
"""

import gzip
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for each other on more
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder that is missing is told without asking the hub

import dagster as dg
import duckdb
import polars as pl
import pytest
from polars.testing import assert_frame_equal

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
WRITE = bool(os.environ.get("WRITE_CONTRACT"))
STAGES = ("heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "swapped_results", "filtered_calls")
BY_HAND = {
    "training/finetuned_checkpoint",
    "training/baseline_checkpoint",
    "evaluation/accuracy",
    "evaluation/perplexity",
}
"""What `stale --run` leaves to `run`."""
IGNORED = "ccnet/shard_list"
ASSET = re.compile(r"^[A-Za-z_0-9]+/[a-z_0-9]+")
SPENT = re.compile(r"([\d,]+) tokens went through the model, ([\d,]+) tool calls were made")
MEASURED = ("seconds", "cost")
"""Columns that hold time: no two runs agree in them."""
PUBLIC = (
    "documents",
    "texts",
    "candidates",
    "tool_results",
    "loss_deltas",
    "swapped_results",
    "filtered_calls",
    "augmented_corpus",
    "rejections",
    "lanes",
)
PROMPT = "Call.\nInput: 1 and 2 make 3 .\nOutput: 1 and 2 make [{}(1+2)] 3 .\n"
SETTINGS = """
profile = "tests"
[profiles.tests]
[corpus]
shards = ["web/*.json.gz"]
segment_tokens = 40
[model]
name = "model"
device = "cpu"
[sampling]
max_call_tokens = 12
[tools.calculator]
prompt = "calculator.txt"
tau_s = 0.1
k = 2
m = 3
tau_f = 0.0
[tools.sums]
use = "contract_sums:Sums"
prompt = "sums.txt"
tau_s = 0.1
k = 2
m = 6
tau_f = 0.0
[training]
max_steps = 1
eval_steps = 1
batch_size = 2
sequence_length = 64
[evaluation]
questions = 1
[execution]
workers = 1
[decoding]
max_new_tokens = 4
"""
SUMS = '''
"""A tool of one's own: the sum of the numbers in a call."""

import re
from collections.abc import Sequence

from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolResult


class SumsOptions(ToolOptions):
    edition: int = 1


class Sums(Tool):
    name = "Search"
    version = "1"
    defaults = ToolDefaults(tau_s=0.1, k=2, m=6, tau_f=0.0)
    Options = SumsOptions

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(str(self.options.edition * sum(map(int, re.findall("[0-9]+", c.input))))) for c in calls]
'''


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Spent:
    """Tokens that went through the model, and calls of tools."""

    tokens: int
    calls: int


NOTHING = Spent(0, 0)


@dataclass(frozen=True)
class World:
    """A folder with toolformer.toml in it."""

    folder: Path

    @property
    def warehouse(self) -> Path:
        return self.folder / "lake" / "toolformer.duckdb"

    @property
    def environment(self) -> dict[str, str]:
        own = {"TOOLFORMER_CONFIG": "toolformer.toml", "DAGSTER_HOME": ".dagster"}
        return {name: str(self.folder / path) for name, path in own.items()}

    def cli(self, *arguments: str, stdin: str = "") -> Done:
        """Runs a command in this process, as if the process were a new one."""
        with _in(self.folder, self.environment):
            return command(*arguments, stdin=stdin)

    def ok(self, *arguments: str, stdin: str = "") -> str:
        """Runs a command that must end well and returns what it printed."""
        done = self.cli(*arguments, stdin=stdin)
        assert done.code == 0, done.err
        return done.out

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Starts a command in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "toolformer_dag.cli", *arguments],
            cwd=self.folder,
            env=os.environ | self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stale(self, *options: str) -> set[str]:
        """Names the stale assets, without partitions."""
        return names(self.ok("stale", *options))

    def run(self, *options: str) -> Spent:
        """Runs everything; returns what the last line tells."""
        return spent_of(self.ok("run", *options))

    def mend(self, *options: str) -> Spent:
        """Runs `stale --run`; returns what Dagster's events tell."""
        since = time.time()
        self.ok("stale", "--run", *options)
        return self.spent_since(since)

    @contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        with _in(self.folder, self.environment), dg.DagsterInstance.get() as instance:
            yield instance

    def spent_since(self, moment: float) -> Spent:
        with self.instance() as instance:
            landed = [event for key in instance.get_asset_keys() for event in _landed(instance, key, moment)]
        return Spent(
            sum(_figure(event, "tokens through the model") for event in landed),
            sum(_figure(event, "tool calls") for event in landed),
        )

    def materialized(self) -> set[str]:
        """Names what has landed at least once."""
        with self.instance() as instance:
            keys = instance.get_asset_keys()
            return {key.to_user_string() for key in keys if instance.get_latest_materialization_event(key)} - {IGNORED}

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(self.warehouse, read_only=True) as connection:
            return connection.execute(query).fetchall()

    def tables(self) -> dict[str, pl.DataFrame]:
        """Reads every public table, without what measures time, in an order that does not depend on the last bits."""
        with duckdb.connect(self.warehouse, read_only=True) as connection:
            return {name: _ordered(connection.table(name).pl()) for name in PUBLIC}

    def edit(self, file: str, old: str, new: str) -> None:
        """Changes a file as a person would."""
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


def command(*arguments: str, stdin: str = "") -> Done:
    """Calls the command line's root with the current folder and environment."""
    from toolformer_dag.cli import app

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")
    code: object = 0
    hook = sys.excepthook
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", given)
            app(list(arguments))
    except SystemExit as end:
        code = end.code
    finally:
        sys.excepthook = hook
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Done(code if isinstance(code, int) else int(code is not None), *texts)


@contextmanager
def _in(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Stands in a folder with these variables; then forgets the modules and paths that were found there."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name in [name for name in os.environ if name.startswith("TOOLFORMER__")]:
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            yield
    finally:
        sys.path[:] = path
        for name in {"contract_sums"} & (set(sys.modules) - modules):
            del sys.modules[name]


def names(printed: str) -> set[str]:
    """Finds the assets in what `stale` prints."""
    return {match.group() for line in printed.splitlines() if (match := ASSET.match(line))} - {IGNORED}


def spent_of(printed: str) -> Spent:
    """Reads the last line of `run`."""
    if match := SPENT.search(printed):
        return Spent(*(int(figure.replace(",", "")) for figure in match.groups()))
    assert "nothing ran" in printed, printed
    return NOTHING


def _landed(instance: dg.DagsterInstance, key: dg.AssetKey, moment: float) -> list[dg.AssetMaterialization]:
    found = instance.fetch_materializations(dg.AssetRecordsFilter(asset_key=key, after_timestamp=moment), limit=1000)
    return [record.asset_materialization for record in found.records if record.asset_materialization]


def _figure(event: dg.AssetMaterialization, name: str) -> int:
    value = event.metadata.get(name)
    return int(value.value or 0) if value is not None else 0


def _ordered(rows: pl.DataFrame) -> pl.DataFrame:
    """Sorts by what is exact first; columns by name, lists as text."""
    rows = rows.drop(*MEASURED, strict=False).select(sorted(set(rows.columns) - set(MEASURED)))
    nested = [name for name, kind in rows.schema.items() if kind.is_nested()]
    rows = rows.with_columns(pl.col(name).cast(pl.List(pl.String)).list.join(", ") for name in nested)
    exact = [name for name, kind in rows.schema.items() if not kind.is_float()]
    return rows.sort(*exact, *(name for name in rows.columns if name not in exact), nulls_last=True)


def assert_same(one: Mapping[str, pl.DataFrame], other: Mapping[str, pl.DataFrame]) -> None:
    """Compares row for row; numbers out of another batch may differ in their last bits."""
    assert one.keys() == other.keys()
    for name, table in one.items():
        assert table.height == other[name].height, name
        assert_frame_equal(table, other[name], rel_tol=1e-4, abs_tol=1e-4)


class Expected:
    """Figures in a JSON file; with $WRITE_CONTRACT they are taken from what is found."""

    def __init__(self, name: str) -> None:
        self.file = HERE / f"{name}.json"

    def of(self, key: str, found: Any) -> Any:
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        if WRITE:
            known[key] = json.loads(json.dumps(found))
            self.file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        return known[key]


def _sentence(generator: random.Random) -> str:
    a, b = generator.randrange(10), generator.randrange(10)
    return f" {a} and {b} make {a + b} ."


def _lines(generator: random.Random) -> list[str]:
    """Makes sums, half of them with a call, some of these malformed or to another tool."""
    made = [_sentence(generator) for _ in range(400)]
    calls = [" [Calculator({}+{})]"] * 8 + [" [Calculator]", " [Search({}+{})]", " [Calculator({}+)]"]
    return made + [
        line.replace(" make", " make" + generator.choice(calls).format(*line.split()[:3:2])) for line in made
    ]


def make_model(folder: Path, seed: int = 0) -> Path:
    """Saves a GPT-2 whose head holds how often a token follows another in a few lines, calls among them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts = _lines(random.Random(seed))
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<|end|>", eos_token="<|end|>")
    size = len(tokenizer) + len(tokenizer) % 2
    shape = {"n_positions": 192, "n_embd": size, "n_layer": 1, "n_head": 2, "n_inner": 16, "tie_word_embeddings": False}
    config = GPT2Config(vocab_size=size, bos_token_id=0, eos_token_id=0, initializer_range=0.1, **shape)
    counts = torch.full((size, size), 1e-4)
    for ids in tokenizer(texts).input_ids:
        for one, other in itertools.pairwise(ids):
            counts[one, other] += 1
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(40 * torch.eye(size))
        model.transformer.wpe.weight.mul_(0.1)
        model.lm_head.weight.copy_((counts / counts.sum(1, keepdim=True)).log().T / size**0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_shard(folder: Path, name: str, documents: int = 6) -> Path:
    """Writes a CCNet shard of sums, one sum per paragraph."""
    generator = random.Random(name)
    path = folder / f"{name}.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        for number in range(documents):
            record = {
                "url": f"https://example.org/{name}/{number}",
                "digest": f"sha1:{name}-{number}",
                "source_domain": "example.org",
                "title": f"Sums {number}",
                "raw_content": "\n".join(_sentence(generator).strip() for _ in range(6)),
                "language": "en",
            }
            stream.write(json.dumps(record) + "\n")
    return path


def new_world(folder: Path, model: Path) -> World:
    """Lays out a world in which nothing ran yet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toolformer.toml").write_text(SETTINGS)
    (folder / "contract_sums.py").write_text(SUMS)
    (folder / "calculator.txt").write_text(PROMPT.format("Calculator"))
    (folder / "sums.txt").write_text(PROMPT.format("Search"))
    shutil.copytree(model, folder / "model")
    for name in ("one", "two"):
        write_shard(folder / "web", name)
    return World(folder)


@pytest.fixture(scope="session")
def model(once: Callable[..., Path]) -> Path:
    return once("model-a", make_model)


@pytest.fixture(scope="session")
def other_model(once: Callable[..., Path]) -> Path:
    return once("model-b", lambda folder: make_model(folder, seed=1))


@pytest.fixture(scope="session")
def made(once: Callable[..., Path], model: Path) -> World:
    """A world in which everything has run once, training and evaluation too. Not to be changed."""
    return World(once("made", lambda folder: new_world(folder, model).run()))


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A copy of `made`, to be changed."""
    try:
        return World(shutil.copytree(made.folder, tmp_path / "world"))
    except shutil.Error:  # another process looked at `made`: SQLite's log came and went
        return World(shutil.copytree(made.folder, tmp_path / "world", dirs_exist_ok=True))


@pytest.fixture
def fresh(tmp_path: Path, model: Path) -> World:
    """A world in which nothing ran yet."""
    return new_world(tmp_path / "fresh", model)
