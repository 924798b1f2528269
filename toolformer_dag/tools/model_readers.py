"""Readers that answer questions from passages with a model: sequence-to-sequence or extractive."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.tools.http_reader import HttpReader
from toolformer_dag.tools.options import load_model, load_tokenizer
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, Reader, format_reader_input
from toolformer_dag.tools.tool import NO_ANSWER, ToolResult
from toolformer_dag.tools.wording_reader import read_by_wording


class Seq2SeqReader:
    """A sequence-to-sequence model, decoded greedily; an empty output has the reason `no_answer`."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer("AutoTokenizer", options)
        self.model = load_model("AutoModelForSeq2SeqLM", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Let the model write an answer to each question after its passages, all in one batch."""
        inputs = []
        for question, question_passages in zip(questions, passages, strict=True):
            inputs.append(format_reader_input(question, question_passages))
        answers = [output.strip() for output in self._generate_outputs(inputs)]
        return [ToolResult(answer) if answer else NO_ANSWER for answer in answers]

    def _generate_outputs(self, inputs: Sequence[str]) -> list[str]:
        """Let the model write a text for each input, greedily and all in one batch."""
        import torch

        batch = self.encode(inputs)

        with torch.inference_mode():
            tokens = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.options.max_answer_tokens,
                do_sample=False,
                num_beams=1,
            )

        outputs: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return outputs

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


NO_SPAN = AnswerSpan(score=0.0, text="")
"""Stands for a passage without an answer."""


def find_best_span(
    starts: NDArray[np.float32], ends: NDArray[np.float32], allowed: NDArray[np.bool_], max_tokens: int
) -> TokenSpan | None:
    """Find the span of tokens that is most likely the answer.

    The score of a span is the sum of the logits of its first and last token, minus the same sum for token 0, which
    stands for no answer.

    Args:
        starts: [n] For each token of the input, the logit that the answer begins there.
        ends: [n] For each token, the logit that the answer ends there.
        allowed: [n] Whether the token belongs to the passage.
        max_tokens: The largest number of tokens in a span.

    Returns:
        The span, or None if no span scores above 0.
    """
    sums = starts[:, None] + ends[None, :]  # [n, n]: a row per first token, a column per last token
    no_answer_sum = sums[0, 0]
    span_sums = np.where(_is_span(allowed, max_tokens), sums, -np.inf)

    first, last = np.unravel_index(int(span_sums.argmax()), span_sums.shape)  # row and column of the highest sum
    score = float(span_sums[first, last] - no_answer_sum)

    if not score > 0:  # NaN is no score
        return None
    return TokenSpan(score, int(first), int(last))


def _is_span(allowed: NDArray[np.bool_], max_tokens: int) -> NDArray[np.bool_]:
    """Return [n, n]: whether an answer may go from the token of the row to the token of the column."""
    indices = np.arange(len(allowed))
    tokens_after_first = indices[None, :] - indices[:, None]
    fits_length = (tokens_after_first >= 0) & (tokens_after_first < max_tokens)
    is_span: NDArray[np.bool_] = allowed[:, None] & allowed[None, :] & fits_length
    return is_span


class QuestionPassage(NamedTuple):
    """A question and one of its passages; `question_index` counts the questions of its batch."""

    question_index: int
    question: str
    text: str


class SpanLogits(NamedTuple):
    """The logits that the answer begins, and ends, at each token, [pairs, tokens]."""

    starts: NDArray[np.float32]
    ends: NDArray[np.float32]


class ExtractiveReader:
    """A model that marks the answer in a passage, run on all pairs of question and passage in one batch.

    Long passages are truncated.
    """

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer("AutoTokenizer", options)
        self._model = load_model("AutoModelForQuestionAnswering", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Answer each question with words of one of its passages: those that the model scores highest.

        If scores are equal, the earlier passage is used.

        Returns:
            A result per question. Without an answer it has the reason `no_answer`.
        """
        pairs = _pair_questions_with_passages(questions, passages)

        best_spans = [NO_SPAN] * len(questions)
        for pair, span in zip(pairs, self._find_spans(pairs), strict=True):
            if span.score > best_spans[pair.question_index].score:
                best_spans[pair.question_index] = span

        return [NO_ANSWER if span is NO_SPAN else ToolResult(span.text) for span in best_spans]

    def _find_spans(self, pairs: Sequence[QuestionPassage]) -> list[AnswerSpan]:
        """Find, for each pair of question and passage, the part of the passage that best answers the question.

        Returns:
            A span per pair, which is NO_SPAN if the passage has no answer.
        """
        if not pairs:
            return []

        batch = self._encode(pairs)
        offsets = batch.pop("offset_mapping").tolist()  # for each pair, the first and last character of each token
        logits = self._compute_logits(batch)

        spans = []
        for row, pair in enumerate(pairs):
            is_of_passage = np.array([sequence == 1 for sequence in batch.sequence_ids(row)])  # 0 is the question
            token_span = find_best_span(
                logits.starts[row], logits.ends[row], is_of_passage, self._options.max_answer_tokens
            )
            spans.append(_build_answer_span(token_span, offsets[row], pair.text))  # NO_SPAN for None

        return spans

    def _compute_logits(self, batch: Any) -> SpanLogits:
        """Run the model on a batch of encoded pairs."""
        import torch

        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device))
        return SpanLogits(
            starts=logits.start_logits.float().cpu().numpy(),
            ends=logits.end_logits.float().cpu().numpy(),
        )

    def _encode(self, pairs: Sequence[QuestionPassage]) -> Any:
        """Tokenize each question with its passage. Long passages are truncated.

        Returns:
            Padded token IDs, and for each token its first and last character in the text.
        """
        return self._tokenizer(
            [pair.question for pair in pairs],
            [pair.text for pair in pairs],
            truncation="only_second",
            max_length=self._options.max_input_tokens,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )


def _pair_questions_with_passages(
    questions: Sequence[str], passages: Sequence[Sequence[Passage]]
) -> list[QuestionPassage]:
    """Return each question with each of its passages."""
    pairs = []
    for index, question in enumerate(questions):
        for passage in passages[index]:
            pairs.append(QuestionPassage(index, question, passage.text))
    return pairs


def _build_answer_span(tokens: TokenSpan | None, offsets: Sequence[tuple[int, int]], text: str) -> AnswerSpan:
    """Return the text of a span of tokens, or NO_SPAN. offsets: first and last character of each token."""
    if tokens is None:
        return NO_SPAN
    start, _ = offsets[tokens.first]
    _, end = offsets[tokens.last]
    return AnswerSpan(tokens.score, text[start:end])


def load_reader(options: QuestionAnsweringOptions) -> Reader:
    """Return the function that answers questions from passages, by the options: rules, an endpoint or a model.

    Raises ModelError if weights cannot be loaded, ToolDown if an endpoint's key is missing.
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
