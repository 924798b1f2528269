"""Measure the cost of work and the machine's peak rates; make models with random weights, and texts, to work on."""

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, PreTrainedTokenizerFast

from toolformer_dag.model.loading import LanguageModel, wrap_language_model


@dataclass
class Cost:
    """Seconds of processor time (wall-clock on a GPU), and the peak memory of the process so far in MB."""

    seconds: float = 0.0
    memory: float = 0.0


@contextmanager
def measured(device: torch.device) -> Iterator[Cost]:
    """Measure the cost of the block; the result is complete after it."""
    cost = Cost()
    begin = _now(device)
    yield cost
    cost.seconds = _now(device) - begin
    cost.memory = peak_memory(device)


def peak_memory(device: torch.device) -> float:
    """Return the most memory in MB so far: what torch allocated on a GPU, else what the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def product_rate(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """Measure operations per second of a plain matrix product [rows, width] x [width, 4 width]."""
    a, b = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, width), (width, 4 * width)))
    return 2 * rows * width * 4 * width / _seconds_each(lambda: a @ b, device)


def copy_rate(device: torch.device, size: int = 1 << 28) -> float:
    """Measure bytes read and written per second when a large tensor is copied."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_each(lambda: target.copy_(source), device)


def _seconds_each(work: Callable[[], object], device: torch.device) -> float:
    work()
    repeats, begin = 0, _now(device)
    while (elapsed := _now(device) - begin) < 0.5:
        work()
        repeats += 1
    return elapsed / repeats


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


VOCABULARY = 8192
SMALL: Any = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
SHAPES: dict[str, Any] = {
    "gpt2-4x256": GPT2Config(n_positions=1024, **SMALL),
    "gptj-small": GPTJConfig(rotary_dim=32, n_positions=2048, **SMALL),
    "gptj-6b": GPTJConfig(bos_token_id=0, eos_token_id=0),
}


def random_model(shape: str, prompt: str, device: str, dtype: torch.dtype) -> LanguageModel:
    """Create random weights of a shape on the device in `dtype`."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(prompt)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=dtype)
    return wrap_language_model(shape, model, tokenizer)


def make_tokenizer(prompt: str) -> Any:
    """Train a byte BPE, sized so that the calculator's prompt takes about 375 tokens, as with GPT-2's vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*[prompt] * 5, *texts(400, seed=1)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


NAMES = ["Anna", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena"]
PLACES = ["Bergen", "Cordoba", "Dresden", "Esbjerg", "Fukuoka", "Geneva", "Hamburg", "Izmir", "Jaipur", "Krakow"]
THINGS = ["pens", "bicycles", "tickets", "houses", "trees", "letters", "students", "machines", "boats", "books"]
SENTENCES = 8
CLOSING = " That is all that the book of the town says about it."


def sentence(draw: random.Random) -> str:
    """Generate a sentence with a sum."""
    a, b = draw.randint(20, 900), draw.randint(2, 400)
    name, place, things = draw.choice(NAMES), draw.choice(PLACES), draw.choice(THINGS)
    wordings = [
        f"{name} had {a} {things} and bought {b} more in {place}, so that makes {a + b} in all.",
        f"Of the {a + b} {things} in {place}, {b} were sold to {name}, which leaves {a}.",
        f"The town of {place} counted {a} {things} and then {b} new ones, a total of {a + b}.",
    ]
    return draw.choice(wordings)


def text(draw: random.Random) -> str:
    """Generate eight sums and a closing sentence."""
    return " ".join(sentence(draw) for _ in range(SENTENCES)) + CLOSING


def texts(count: int, seed: int = 0) -> list[str]:
    """Generate distinct texts, deterministically by seed."""
    draw = random.Random(seed)
    return [text(draw) for _ in range(count)]
