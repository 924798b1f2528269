"""Train the upper layers of a small model on answers after results, and see whether it repeats the result's values.

The lower layers stay as they are, so what enters the upper ones is computed once per text. Models are those whose
transformer has `layers`, `norm` and `embed_tokens`, as Llama's and Qwen's.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.cleaning.recorded_answers import RecordedAnswer, pattern
from toolformer_dag.model.loading import load_model
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.traces.rendering_choice import choose_rendering
from toolformer_dag.traces.written_conversation import WrittenConversation

TRAINED_SHARE = 0.4  # of the layers, the upper ones
LONGEST = 200  # tokens; longer texts are left out
STEPS = 40
WARMUP = 5
BATCH = 8
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class AnswerText:
    """The tokens of an answer and of what stands before it.

    `answer_start`: number of the first token of the answer. `value_spans`: the tokens of each value that the answer
    repeats, counted from there.
    """

    conversation: int
    tokens: tuple[int, ...]
    answer_start: int
    value_spans: Sequence[Sequence[int]]


class AnswerTrainer:
    """A model whose upper layers are trained anew for each choice of answers.

    State: the weights of the last training; `train` begins from those that were loaded. What enters the trained layers
    is computed once for each text.
    """

    def __init__(self, settings: ModelSettings) -> None:
        loaded = load_model(settings, dtype="float32")
        self.encoding = loaded.encoding
        self.rendering = choose_rendering("auto", loaded.encoding)
        self._head: nn.Module = loaded.model.get_output_embeddings()
        self._body: Any = loaded.model.get_decoder()
        self._layers: nn.ModuleList = self._body.layers
        self._first_trained = round(len(self._layers) * (1 - TRAINED_SHARE))
        loaded.model.requires_grad_(False)
        self._trained = [*self._layers[self._first_trained :].parameters(), *self._body.norm.parameters()]
        self._loaded_weights = [weight.detach().clone() for weight in self._trained]
        self._entering_of_tokens: dict[tuple[int, ...], Tensor] = {}

    def text(self, call: RecordedAnswer) -> AnswerText | None:
        """Return the text of an answer from the question before it on; None where it is too long."""
        question = max(number for number in range(call.turn + 1) if call.messages[number].role != "assistant")
        messages = call.messages[question : call.turn + 2]
        turn = call.turn - question
        pieces = WrittenConversation.from_recorded_messages(self.rendering, messages).cut_around_unit(turn, [turn + 1])
        before = [*self.rendering.encode_text(pieces.text_before), *self.rendering.encode_text(pieces.unit_text)]
        written = self.encoding.tokenizer(call.answer, add_special_tokens=False, return_offsets_mapping=True)
        spans: list[list[int]] = []
        for value in call.repeated_values():
            place = pattern(value).search(call.answer)
            if place is not None and place.start() > 0:  # to begin with the value is one of several wordings
                spans.append(_overlapping(written.offset_mapping, place.start(), place.end()))
        tokens = (*before, *written.input_ids, *self.encoding.eos_ids)
        return AnswerText(call.conversation, tokens, len(before), spans) if len(tokens) <= LONGEST else None

    def _entering(self, tokens: tuple[int, ...]) -> Tensor:
        """Return what enters the trained layers: [tokens, width]."""
        if tokens not in self._entering_of_tokens:
            self._entering_of_tokens[tokens] = self._below(tokens)
        return self._entering_of_tokens[tokens]

    @torch.no_grad()
    def _below(self, tokens: Sequence[int]) -> Tensor:
        """Run the layers that are not trained, and return what they give: [tokens, width]."""
        norm = self._body.norm
        self._body.layers = self._layers[: self._first_trained]
        self._body.norm = nn.Identity()
        try:
            with torch.autocast("cpu", torch.bfloat16):
                embedded = self._body.embed_tokens(torch.tensor([tokens]))
                states: Tensor = self._body(inputs_embeds=embedded, use_cache=False).last_hidden_state
                return states[0].float()
        finally:
            self._body.layers = self._layers
            self._body.norm = norm

    def _answer_logits(self, texts: Sequence[AnswerText]) -> Tensor:
        """Return the logits of the answers' tokens, of one text after the other: [tokens, vocabulary]."""
        width = max(len(text.tokens) for text in texts)
        entering = torch.zeros(len(texts), width, self._body.config.hidden_size)
        for row, text in enumerate(texts):
            entering[row, : len(text.tokens)] = self._entering(text.tokens)
        self._body.layers = self._layers[self._first_trained :]
        try:
            with torch.autocast("cpu", torch.bfloat16):
                states = self._body(inputs_embeds=entering, use_cache=False).last_hidden_state
                rows = [states[row, text.answer_start - 1 : len(text.tokens) - 1] for row, text in enumerate(texts)]
                logits: Tensor = self._head(torch.cat(rows))
                return logits.float()
        finally:
            self._body.layers = self._layers

    def train(self, texts: Sequence[AnswerText], seed: int) -> None:
        """Train from the loaded weights on answers, in the order that the seed draws; without texts nothing changes."""
        with torch.no_grad():
            for weight, loaded in zip(self._trained, self._loaded_weights, strict=True):
                weight.copy_(loaded)
        if not texts:
            return
        for weight in self._trained:
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(self._trained, lr=LEARNING_RATE, weight_decay=0.0, betas=(0.9, 0.99))
        order = _drawn(texts, seed)
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1, (step + 1) / WARMUP) * (1 - step / STEPS)
            batch = sorted((next(order) for _ in range(BATCH)), key=lambda text: len(text.tokens))
            tokens = sum(len(text.tokens) - text.answer_start for text in batch)
            optimizer.zero_grad()
            for half in (batch[: BATCH // 2], batch[BATCH // 2 :]):  # of like lengths
                loss = cross_entropy(self._answer_logits(half), _answer_tokens(half), reduction="sum") / tokens
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._trained, 1.0)
            optimizer.step()
        for weight in self._trained:
            weight.requires_grad_(False)

    @torch.no_grad()
    def hits(self, texts: Sequence[AnswerText]) -> dict[int, list[bool]]:
        """Return, by conversation, whether all tokens of a repeated value are the likeliest ones, for each value."""
        hits: dict[int, list[bool]] = {}
        for first in range(0, len(texts), BATCH):
            batch = texts[first : first + BATCH]
            is_likeliest = self._answer_logits(batch).argmax(-1) == _answer_tokens(batch)
            lengths = [len(text.tokens) - text.answer_start for text in batch]
            for text, likeliest in zip(batch, torch.split(is_likeliest, lengths), strict=True):
                of_conversation = hits.setdefault(text.conversation, [])
                of_conversation += [bool(likeliest[span].all()) for span in text.value_spans]
        return hits


def _overlapping(token_places: Sequence[tuple[int, int]], start: int, end: int) -> list[int]:
    """Return the numbers of the tokens that hold characters from start to end."""
    return [
        number
        for number, (token_start, token_end) in enumerate(token_places)
        if token_start < end and token_end > start
    ]


def _answer_tokens(texts: Sequence[AnswerText]) -> Tensor:
    return torch.tensor([token for text in texts for token in text.tokens[text.answer_start :]])


def _drawn(texts: Sequence[AnswerText], seed: int) -> Iterator[AnswerText]:
    """Yield the texts in ever new orders."""
    chance = random.Random(seed)
    while True:
        yield from chance.sample(list(texts), len(texts))
