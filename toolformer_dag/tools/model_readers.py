"""Readers that answer questions from passages with a model: sequence-to-sequence or extractive."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.tools.http_reader import HttpReader
from toolformer_dag.tools.options import load_model, load_tokenizer
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, Reader, reader_input
from toolformer_dag.tools.tool import NO_ANSWER, ToolResult
from toolformer_dag.tools.wording_reader import read_by_wording


class Seq2SeqReader:
    """A sequence-to-sequence model, decoded greedily; an empty output has the reason `no_answer`."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer("AutoTokenizer", options)
        self.model = load_model("AutoModelForSeq2SeqLM", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Let the model write an answer to each question after its passages, greedily, all in one batch."""
        import torch

        inputs = []
        for question, question_passages in zip(questions, passages, strict=True):
            inputs.append(reader_input(question, question_passages))
        batch = self.encode(inputs)
        with torch.inference_mode():
            tokens = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.options.max_answer_tokens,
                do_sample=False,
                num_beams=1,
            )
        answers = [answer.strip() for answer in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        return [ToolResult(answer) if answer else NO_ANSWER for answer in answers]

    def encode(self, texts: Sequence[str]) -> Any:
        """Tokenize texts to padded ids and mask on the model's device, truncated to `max_input_tokens`."""
        batch = self.tokenizer(
            list(texts), truncation=True, max_length=self.options.max_input_tokens, padding=True, return_tensors="pt"
        )
        return batch.to(self.model.device)


class TokenSpan(NamedTuple):
    """Consecutive tokens that may be an answer: their score above no answer, the first and the last one."""

    score: float
    first: int
    last: int


class AnswerSpan(NamedTuple):
    """An answer in a passage: its score above no answer, and its text."""

    score: float
    text: str


def best_span(
    starts: NDArray[np.float32], ends: NDArray[np.float32], allowed: NDArray[np.bool_], max_tokens: int
) -> TokenSpan | None:
    """Return the span of tokens that most likely is the answer, as extractive question answering models mark it.

    - starts, ends [n]: for each token of the input, the logits that the answer begins and ends there.
    - allowed [n]: whether the answer may begin and end at the token: whether it belongs to the passage.
    - max_tokens: the most tokens of a span.

    The score of a span is starts[first] + ends[last], minus the same sum for token 0, which stands for no answer. None
    where no span scores above that.
    """
    # Tables [n, n] with a row per first token and a column per last token.
    sums = starts[:, None] + ends[None, :]
    indices = np.arange(len(starts))
    tokens_after_first = indices[None, :] - indices[:, None]
    fits_length = (tokens_after_first >= 0) & (tokens_after_first < max_tokens)
    is_span = allowed[:, None] & allowed[None, :] & fits_length
    scores = np.where(is_span, sums, -np.inf)

    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    score = float(scores[first, last] - sums[0, 0])
    return TokenSpan(score, int(first), int(last)) if score > 0 else None


class ExtractiveReader:
    """A model that marks the answer in a passage, run on all pairs of question and passage in one batch.

    Long passages are truncated.
    """

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer("AutoTokenizer", options)
        self._model = load_model("AutoModelForQuestionAnswering", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Answer each question with the words of one of its passages that the model scores highest.

        Every pair of a question and a passage is scored. Of equal scores the first passage's counts; where no score is
        above that of no answer, the result has the reason `no_answer`.
        """
        question_of_pair = []  # the index of each pair's question
        text_of_pair = []
        for index, question_passages in enumerate(passages):
            for passage in question_passages:
                question_of_pair.append(index)
                text_of_pair.append(passage.text)
        spans = self._spans([questions[index] for index in question_of_pair], text_of_pair)

        results = [NO_ANSWER] * len(questions)
        best_scores = [0.0] * len(questions)
        for index, span in zip(question_of_pair, spans, strict=True):
            if span is not None and span.score > best_scores[index]:
                best_scores[index] = span.score
                results[index] = ToolResult(span.text)
        return results

    def _spans(self, questions: Sequence[str], texts: Sequence[str]) -> list[AnswerSpan | None]:
        """Return for each pair of a question and a text the part of the text that best answers it.

        None where the model scores no part above no answer. All pairs run in one batch; long texts are truncated.
        """
        import torch

        if not texts:
            return []
        batch = self._tokenizer(
            list(questions),
            list(texts),
            truncation="only_second",
            max_length=self._options.max_input_tokens,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        offsets = batch.pop("offset_mapping").tolist()  # for each pair, the first and last character of each token
        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device))
        starts = logits.start_logits.float().cpu().numpy()
        ends = logits.end_logits.float().cpu().numpy()

        spans: list[AnswerSpan | None] = []
        for row, text in enumerate(texts):
            is_of_text = np.array([sequence == 1 for sequence in batch.sequence_ids(row)])  # 0 is the question
            tokens = best_span(starts[row], ends[row], is_of_text, self._options.max_answer_tokens)
            if tokens is None:
                spans.append(None)
                continue
            start, _ = offsets[row][tokens.first]
            _, end = offsets[row][tokens.last]
            spans.append(AnswerSpan(tokens.score, text[start:end]))
        return spans


def load_reader(options: QuestionAnsweringOptions) -> Reader:
    """Return the function that answers questions from passages, by the options: rules, an endpoint or a model.

    Weights are loaded here. Raises ModelError where they cannot be, ToolDown where an endpoint's key is missing.
    """
    match options.reader:
        case "embedded":
            return read_by_wording
        case "http":
            return HttpReader(options).read
        case "seq2seq":
            return Seq2SeqReader(options).read
        case "extractive":
            return ExtractiveReader(options).read
