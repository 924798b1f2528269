"""An extractive reader: the span that a model of AutoModelForQuestionAnswering scores highest over all passages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.tools.pretrained import load_model, load_tokenizer
from toolformer_dag.tools.question_answering.options import QuestionAnsweringOptions
from toolformer_dag.tools.question_answering.reader import NO_ANSWER
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import ToolResult

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `last` (inclusive) and the sum of their logits, less that of the first token (no answer)."""

    first: int
    last: int
    score: float


def best_span(starts: Scores, ends: Scores, allowed: NDArray[np.bool_], max_tokens: int) -> Span | None:
    """The best span of allowed tokens, if it scores above the first token, which stands for no answer."""
    sums = starts[:, None] + ends[None, :]
    places = np.arange(len(starts))
    length = places[None, :] - places[:, None]
    fits = allowed[:, None] & allowed[None, :] & (length >= 0) & (length < max_tokens)
    scores = np.where(fits, sums, -np.inf)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    score = float(scores[first, last] - sums[0, 0])
    return Span(int(first), int(last), score) if score > 0 else None


class ExtractiveReader:
    """Every question with every passage in one batch; a passage's beginning is read where it is too long."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer("AutoTokenizer", options)
        self._model = load_model("AutoModelForQuestionAnswering", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        pairs = [(n, passage.text) for n, own in enumerate(passages) for passage in own]
        found: dict[int, tuple[float, str]] = {}
        for (n, text), span in zip(pairs, self._spans([(questions[n], text) for n, text in pairs]), strict=True):
            if span and span[0] > found.get(n, (0.0, ""))[0]:
                found[n] = span[0], text[span[1] : span[2]]
        return [ToolResult(found[n][1]) if n in found else NO_ANSWER for n in range(len(questions))]

    def _spans(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, int, int] | None]:
        """For each question and text the score and the characters of its best span."""
        if not pairs:
            return []
        batch = self._tokenizer(
            [question for question, _ in pairs],
            [text for _, text in pairs],
            truncation="only_second",
            max_length=self._options.max_input_tokens,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets = batch.pop("offset_mapping").tolist()
        in_text = np.array([[part == 1 for part in batch.sequence_ids(row)] for row in range(len(pairs))])
        starts, ends = self._scores(batch)
        rows = zip(starts, ends, in_text, offsets, strict=True)
        return [self._characters(start, end, allowed, places) for start, end, allowed, places in rows]

    def _scores(self, batch: Any) -> tuple[Scores, Scores]:
        import torch

        with torch.inference_mode():
            scores = self._model(**batch.to(self._model.device))
        return scores.start_logits.float().cpu().numpy(), scores.end_logits.float().cpu().numpy()

    def _characters(
        self, starts: Scores, ends: Scores, allowed: NDArray[np.bool_], places: list[list[int]]
    ) -> tuple[float, int, int] | None:
        span = best_span(starts, ends, allowed, self._options.max_answer_tokens)
        return (span.score, places[span.first][0], places[span.last][1]) if span else None
