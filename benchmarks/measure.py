"""What benchmarks share: costs, the machine's peak rates, random models, texts, and a naive engine to compare with."""

import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, LlamaConfig, PreTrainedTokenizerFast

from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import (
    Ends,
    LogProbabilities,
    SamplePoint,
    TokenCounts,
    TokenQuery,
    TokenText,
)
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.greedy_rows import GreedyBatch
from toolformer_dag.model.loading import LanguageModel, wrap_language_model
from toolformer_dag.model.memory import TokenBudget
from toolformer_dag.model.model_cache import CacheUse, find_cache_argument
from toolformer_dag.model.requests import CallLosses, LossRequest
from toolformer_dag.model.sharing import RECOMPUTED, Sharing
from toolformer_dag.settings.model_settings import SamplingSettings


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


def busy_share(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Return the share of `work` in which the device runs a kernel, or a CPU an operator of torch; and its seconds."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
    events = profiled.key_averages()
    busy = sum(e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total for e in events) / 1e6
    return busy / seconds, seconds


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
    repeats = 0
    begin = _now(device)
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
LLAMA: Any = {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0}
SHAPES: dict[str, Any] = {
    "gpt2-4x256": GPT2Config(n_positions=1024, **SMALL),
    "gptj-small": GPTJConfig(rotary_dim=32, n_positions=2048, **SMALL),
    "gptj-6b": GPTJConfig(bos_token_id=0, eos_token_id=0),
    "llama-4x256": LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        **LLAMA,
    ),
    "llama-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        **LLAMA,
    ),
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
    a = draw.randint(20, 900)
    b = draw.randint(2, 400)
    name = draw.choice(NAMES)
    place = draw.choice(PLACES)
    things = draw.choice(THINGS)
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


class NaiveBackend:
    """The backend interface without any saving, as public ports annotate: a pass per sample and per loss.

    Runs every sequence alone; only the tokens of one sample share a cache, where `caches` is true.
    """

    max_greedy_rows = 1

    def __init__(self, language_model: LanguageModel, *, caches: bool = True) -> None:
        self.language_model = language_model
        self.context_length = language_model.context_length
        self.token_counts = TokenCounts()
        self.caches = caches

    @property
    def identity(self) -> str:
        """Return the name."""
        return "naive"

    @torch.inference_mode()
    def sample_calls(
        self,
        prompt_ids: Sequence[int],
        texts: Sequence[TokenText],
        call_start_ids: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Compute positions with a pass per text, samples one after another; plain sampling only."""
        return [
            self._propose([*prompt_ids, *text.token_ids], len(prompt_ids), text, call_start_ids, ends) for text in texts
        ]

    @torch.inference_mode()
    def compute_log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Run prefix and text of each query to their end."""
        return [self._answer(query) for query in queries]

    @torch.inference_mode()
    def start_greedy_rows(self, token_sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Recompute the whole sequence for every token, each row alone."""
        backbone = Backbone(self.language_model.model, TokenBudget(1))
        backbone.uses_custom_attention = False
        backbone.stop_splitting_model()
        rows = Sharing(
            RECOMPUTED, CacheUse(can_run_chunks=True, batching="single", recomputes_rows=True)
        ).create_branch_cache(backbone)
        return GreedyBatch(backbone, rows, rows.add_sequences(token_sequences))

    def _propose(self, ids: list[int], head: int, text: TokenText, start: Sequence[int], ends: Ends) -> list[list[int]]:
        rows = self._logits(ids, "positions")[head + text.first_place - 1 :].softmax(-1)
        probabilities = rows[: text.place_count, start[0]].cpu().numpy()
        if len(start) > 1:
            for place in range(text.place_count):
                before = ids[: head + text.first_place + place]
                probabilities[place] *= self._later_probability(before, start)
        sampled: list[list[int]] = []
        for point in text.choose_points(probabilities):
            sampled += self._samples(ids, head, point, start, ends)
        return sampled

    def _later_probability(self, before: list[int], start: Sequence[int]) -> float:
        """Return the probability of the tokens of ` [` after its first one. before: the tokens before ` [`."""
        rows = self._logits([*before, *start[:-1]], "positions")[-len(start) + 1 :].softmax(-1)
        return float(rows[range(len(start) - 1), start[1:]].prod())

    def _samples(
        self, ids: list[int], head: int, point: SamplePoint, start: Sequence[int], ends: Ends
    ) -> list[list[int]]:
        prefix = [*ids[: head + point.token_count_before], *start]
        return [self._sample(prefix, stream, ends) for stream in point.uniforms]

    def _sample(self, prefix: list[int], stream: np.ndarray[Any, Any], ends: Ends) -> list[int]:
        sampled: list[int] = []
        logits, cache = self._run(prefix, None)
        for uniform in stream:
            cumulative = logits[0, -1].float().softmax(-1).double().cumsum(-1)
            sampled.append(int(torch.searchsorted(cumulative, float(uniform) * cumulative[-1], right=True)))
            if ends.can_end_sample(np.array(sampled[-1:]))[0] and ends.has_sample_ended(sampled):
                break
            logits, cache = self._run(sampled[-1:], cache) if self.caches else self._run(prefix + sampled, None)
        return sampled

    def _run(self, ids: list[int], cache: Any) -> tuple[torch.Tensor, Any]:
        self.token_counts.add_tokens("samples", len(ids))
        self.token_counts.passes += cache is None
        self.token_counts.decoding_steps += cache is not None
        model = self.language_model.model
        inputs = torch.tensor([ids], device=self.language_model.device)
        if not self.caches:
            return model(inputs, use_cache=False).logits, None
        name = find_cache_argument(model)
        output = model(inputs, use_cache=True, **{name: cache})
        return output.logits, getattr(output, name)

    def _answer(self, query: TokenQuery) -> LogProbabilities:
        rows = self._logits([*query.prefix_ids, *query.text_ids], query.count_field).log_softmax(-1)
        places = torch.tensor(list(query.query_positions), device=rows.device) + len(query.prefix_ids) - 1
        found: LogProbabilities = (
            rows[places].gather(1, torch.tensor(query.target_ids_by_place, device=rows.device)).cpu().numpy()
        )
        return found

    def _logits(self, ids: Sequence[int], kind: str) -> torch.Tensor:
        self.token_counts.add_tokens(kind, len(ids))
        self.token_counts.passes += 1
        inputs = torch.tensor([list(ids)], device=self.language_model.device)
        logits: torch.Tensor = self.language_model.model(inputs, use_cache=False).logits[0].float()
        return logits


class Naive(Engine):
    """The engine over the naive backend, one call at a time: three passes for every call."""

    def __init__(self, language_model: LanguageModel, *, caches: bool = True) -> None:
        super().__init__(language_model, backend=NaiveBackend(language_model, caches=caches))

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Compute three passes over the whole text for every call."""
        return [super(Naive, self).losses([request], floor)[0] for request in requests]
