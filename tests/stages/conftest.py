"""A whole lane in a folder: made shards, the real calculator, and a model made on the spot without training.

The model is a GPT-2 whose head holds the logarithms of how often a token follows another in a few made lines, so it
writes calls, malformed ones too; one random layer makes a loss depend on what stands further back.
"""

import gzip
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from toolformer_dag.lane import Lane
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import LanguageModel, load_language_model
from toolformer_dag.model.requests import Sampling
from toolformer_dag.model.weights import model_identity
from toolformer_dag.stages.augmented_corpus import augmented_corpus
from toolformer_dag.stages.cut import Cut
from toolformer_dag.stages.filtered_calls import filtered_calls
from toolformer_dag.stages.heuristic_subset import heuristic_subset
from toolformer_dag.stages.loss_deltas import loss_deltas
from toolformer_dag.stages.raw_shards import raw_shards
from toolformer_dag.stages.report import StageReport
from toolformer_dag.stages.scored_candidates import scored_candidates
from toolformer_dag.stages.swapped_results import swapped_results
from toolformer_dag.stages.tool_results import tool_results
from toolformer_dag.storage.lake import Lake
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import ToolLimits
from toolformer_dag.tools.tool import Tool

torch.set_num_threads(1)  # models this small only wait for each other on more
PROMPT = "Call.\n"
CONTEXT = 192


def sentence(generator: random.Random) -> str:
    """A sum that the calculator wants to look at."""
    a, b = generator.randrange(10), generator.randrange(10)
    return f" {a} and {b} make {a + b} ."


def lines(generator: random.Random) -> list[str]:
    """Sums, half of them with a call, some of these malformed or to another tool."""
    made = [sentence(generator) for _ in range(400)]
    calls = [" [Calculator({}+{})]"] * 8 + [" [Calculator]", " [Search({}+{})]", " [Calculator({}+)]"]
    return made + [
        line.replace(" make", " make" + generator.choice(calls).format(*line.split()[:3:2])) for line in made
    ]


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level, so that any text has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")


def followers(tokenizer: PreTrainedTokenizerFast, texts: list[str], size: int) -> torch.Tensor:
    """[size, size]: row a holds the log-probabilities of the token after a."""
    counts = torch.full((size, size), 1e-4)
    for ids in tokenizer(texts).input_ids:
        for one, other in itertools.pairwise(ids):
            counts[one, other] += 1
    return (counts / counts.sum(1, keepdim=True)).log()


def make_model(folder: Path, seed: int = 0) -> Path:
    """Saves model and tokenizer in `folder` and returns it; another seed is another model."""
    torch.manual_seed(seed)
    texts = lines(random.Random(seed))
    tokenizer = tokenizer_of(texts)
    size = len(tokenizer) + len(tokenizer) % 2
    config = GPT2Config(
        vocab_size=size,
        n_positions=CONTEXT,
        n_embd=size,
        n_layer=1,
        n_head=2,
        n_inner=16,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(40 * torch.eye(size))
        model.transformer.wpe.weight.mul_(0.1)
        model.lm_head.weight.copy_(followers(tokenizer, texts, size).T / size**0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def calculator() -> Tool:
    """The real calculator with a prompt that leaves the small model room."""
    tool = load_tool("calculator", {})
    tool.prompt = PROMPT
    return tool


def write_shard(folder: Path, name: str, documents: int = 6, seed: int = 0) -> Path:
    """A CCNet shard of sums, one sum per paragraph."""
    generator = random.Random(f"{name} {seed}")
    path = folder / f"{name}.json.gz"
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        for number in range(documents):
            text = "\n".join(sentence(generator).strip() for _ in range(6))
            record = {
                "url": f"https://example.org/{name}/{number}",
                "digest": f"sha1:{name}-{number}",
                "source_domain": "example.org",
                "title": f"Sums {number}",
                "raw_content": text,
                "language": "en",
            }
            stream.write(json.dumps(record) + "\n")
    return path


@dataclass
class Line:
    """One lane over one lake. Change a field and run again."""

    folder: Path
    model_folder: Path
    lane: Lane = field(default_factory=lambda: Lane(calculator(), tau_s=0.1, k=3, m=4, tau_f=0.05, limits=ToolLimits()))
    shards: dict[str, Path] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=lambda: Sampling(max_call_tokens=12))
    dtype: str = "float32"
    max_tokens: int = 36
    chunk_texts: int = 4
    texts_per_shard: int | None = None
    swapped_texts: int = 3
    engines: int = 0
    progress: Callable[[int, int], None] = lambda done, total: None

    @property
    def lake(self) -> Lake:
        return Lake(self.folder / "lake")

    @property
    def model(self) -> dict[str, object]:
        return {**model_identity(str(self.model_folder)), "dtype": self.dtype}

    @property
    def cut(self) -> Cut:
        return Cut(self.max_tokens, self.language_model().count_tokens, model_identity(str(self.model_folder)))

    def language_model(self) -> LanguageModel:
        return load_language_model(str(self.model_folder), dtype=self.dtype, device="cpu")

    def engine(self) -> Engine:
        self.engines += 1
        return Engine(self.language_model())

    def stage(self, name: str, partition: str) -> StageReport:
        """Runs one stage of one partition."""
        lake, lane, known = self.lake, self.lane, {"model": self.model, "chunk_texts": self.chunk_texts}
        asked = {"engine": self.engine, "progress": self.progress, **known}
        if name == "raw_shards":
            return raw_shards(lake, partition, {partition: self.shards[partition]})
        if name == "heuristic_subset":
            limit = self.texts_per_shard
            return heuristic_subset(lake, lane, partition, cut=self.cut, texts_per_shard=limit)
        if name == "scored_candidates":
            return scored_candidates(lake, lane, partition, sampling=self.sampling, **asked)
        if name == "tool_results":
            return tool_results(lake, lane, partition, chunk_calls=self.chunk_texts, progress=self.progress)
        if name == "loss_deltas":
            return loss_deltas(lake, lane, partition, **asked)
        if name == "swapped_results":
            return swapped_results(lake, lane, partition, swapped_texts=self.swapped_texts, **asked)
        if name == "filtered_calls":
            return filtered_calls(lake, lane, sorted(self.shards), examples_per_tool=1000)
        return augmented_corpus(lake, [lane], sorted(self.shards), cut=self.cut)

    def run(self) -> dict[str, StageReport]:
        """Runs everything; `stage/partition` -> report."""
        reports = {}
        for partition in sorted(self.shards):
            for name in PARTITIONED:
                reports[f"{name}/{partition}"] = self.stage(name, partition)
        return reports | {name: self.stage(name, "all") for name in WHOLE}

    def work(self, reports: dict[str, StageReport], kind: str) -> tuple[int, int]:
        """(computed, reused) of one kind, over all partitions."""
        found = [report.work[kind] for report in reports.values() if kind in report.work]
        return sum(computed for computed, _ in found), sum(reused for _, reused in found)


PARTITIONED = ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas")
WHOLE = ("filtered_calls", "augmented_corpus")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="session")
def other_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "b", seed=1)


@pytest.fixture
def new_line(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Callable[..., Line]:
    """Makes lines with a lake of their own over the shards named, the same every time."""

    def make(shards: Sequence[str] = ("one", "two")) -> Line:
        folder = tmp_path_factory.mktemp("line")
        return Line(folder, model_folder, shards={name: write_shard(folder / "shards", name) for name in shards})

    return make
