"""Small worlds for tests: shards of sums, two lanes over them, and a language model made on the spot without training.

Nothing here knows how the package is built inside: settings and tool are as a user writes them. The model is a GPT-2
whose head holds the logarithms of how often a token follows another in a few lines, so that it writes calls, malformed
ones too; one random layer makes a loss depend on what stands further back.
"""

import gzip
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.tokenizers import byte_level

torch.set_num_threads(1)  # models this small only wait for each other on more
CONTEXT = 192
PROMPT = "Call.\nInput: 1 and 2 make 3 .\nOutput: 1 and 2 make [{}(1+2)] 3 .\n"
MODEL = """
profile = "tests"
[profiles.tests]
[model]
name = "model"
device = "cpu"
"""
BASE = f"""{MODEL}
[sampling]
max_call_tokens = 12
[corpus]
shards = ["web/*.json.gz"]
"""
SETTINGS = f"""{BASE}
segment_tokens = 40
[tools.calculator]
prompt = "calculator.txt"
tau_s = 0.1
k = 2
m = 3
tau_f = 0.0
[tools.sums]
use = "sums_tool:Sums"
prompt = "sums.txt"
tau_s = 0.1
k = 2
m = 6
tau_f = 0.0
[training]
max_steps = 1
min_texts = 1
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

from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult


class SumsOptions(ToolOptions):
    edition: int = 1


class Sums(Tool):
    name = "Search"
    version = "1"
    defaults = ToolDefaults(0.1, 2, 6, 0.0)
    Options = SumsOptions

    def run(self, calls):
        return [ToolResult(str(self.options.edition * sum(map(int, re.findall("[0-9]+", c.input))))) for c in calls]
'''


def sentence(generator: random.Random) -> str:
    """Return a sum that the calculator wants to look at."""
    a = generator.randrange(10)
    b = generator.randrange(10)
    return f" {a} and {b} make {a + b} ."


def lines(generator: random.Random) -> list[str]:
    """Return sums, half of them with a call, some of these malformed or to another tool."""
    made = [sentence(generator) for _ in range(400)]
    calls = [" [Calculator({}+{})]"] * 8 + [" [Calculator]", " [Search({}+{})]", " [Calculator({}+)]"]
    return made + [
        line.replace(" make", " make" + generator.choice(calls).format(*line.split()[:3:2])) for line in made
    ]


def followers(tokenizer: PreTrainedTokenizerFast, texts: list[str], size: int) -> torch.Tensor:
    """Return [size, size]: row a holds the log-probabilities of the token after a."""
    counts = torch.full((size, size), 1e-4)
    for ids in tokenizer(texts).input_ids:
        for one, other in itertools.pairwise(ids):
            counts[one, other] += 1
    return (counts / counts.sum(1, keepdim=True)).log()


def make_model(
    folder: Path,
    seed: int = 0,
    heads: int = 2,
    width: int = 0,
    texts: list[str] | None = None,
    vocabulary: int = 310,
    context: int = CONTEXT,
    brackets: tuple[str, str] | None = None,
    alone: str | None = None,
) -> Path:
    """Save model and tokenizer in `folder` and return it; another seed is another model.

    The width is that of the vocabulary; a larger one adds dimensions that hold nothing. `texts`: what it writes.
    `brackets`: tokens that calls begin and end with in place of " [" and "]". `alone`: characters that the tokenizer
    keeps apart.
    """
    torch.manual_seed(seed)
    texts = texts or lines(random.Random(seed))
    tokenizer = byte_level(texts, vocabulary, alone=alone)
    if brackets is not None:
        tokenizer.add_tokens([AddedToken(bracket, special=True) for bracket in (*brackets, "<tool_response>")])
        texts = [text.replace(" [", brackets[0]).replace("]", brackets[1]) for text in texts]
    size = len(tokenizer) + len(tokenizer) % 2
    width = width or size
    config = GPT2Config(
        vocab_size=size,
        n_positions=context,
        n_embd=width,
        n_layer=1,
        n_head=heads,
        n_inner=16,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(40 * torch.eye(size, width))
        model.transformer.wpe.weight.mul_(0.1)
        likely = followers(tokenizer, texts, size).T / size**0.5
        model.lm_head.weight.copy_(torch.nn.functional.pad(likely, (0, width - size)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_shard(folder: Path, name: str, documents: int = 6, seed: int = 0) -> Path:
    """Write a CCNet shard of sums, one sum per paragraph; return its path."""
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


def lay_out(folder: Path, model: Path) -> Path:
    """Write settings, prompts, a tool, a copy of the model and two shards, and run nothing; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "toolformer.toml").write_text(SETTINGS)
    (folder / "sums_tool.py").write_text(SUMS)
    (folder / "calculator.txt").write_text(PROMPT.format("Calculator"))
    (folder / "sums.txt").write_text(PROMPT.format("Search"))
    shutil.copytree(model, folder / "model")
    for name in ("one", "two"):
        write_shard(folder / "web", name)
    return folder


def copy_world(world: Path, folder: Path) -> Path:
    """Copy a world to a folder that is not there yet; return it."""
    try:
        return shutil.copytree(world, folder)
    except shutil.Error:  # another process looked at it: SQLite's log came and went
        return shutil.copytree(world, folder, dirs_exist_ok=True)


@dataclass(frozen=True)
class WorldFolder:
    """A folder with toolformer.toml in it."""

    folder: Path

    def edit(self, old: str, new: str, file: str = "toolformer.toml") -> None:
        """Change a file as a person would."""
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def start(self, *arguments: str, output: int = subprocess.PIPE, **variables: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, as a terminal has it."""
        return subprocess.Popen(
            [sys.executable, "-m", "toolformer_dag.cli", *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
