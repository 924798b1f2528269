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
from toolformer_dag.tools.wording_reader import answer_by_wording


class Seq2SeqReader:
    """A reader that lets a sequence-to-sequence model write answers, greedily."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer("AutoTokenizer", options)
        self.model = load_model("AutoModelForSeq2SeqLM", options)

    def answer_questions(
        self, questions: Sequence[str], passages_per_question: Sequence[Sequence[Passage]]
    ) -> list[ToolResult]:
        """Let the model write an answer to each question from its passages, all in one batch.

        Args:
            questions: The questions.
            passages_per_question: For each question, the passages that may answer it.

        Returns:
            A result per question. If the model writes nothing, it has the reason `no_answer`.
        """
        input_texts = []
        for question, question_passages in zip(questions, passages_per_question, strict=True):
            input_texts.append(format_reader_input(question, question_passages))

        answers = [output_text.strip() for output_text in self._generate_outputs(input_texts)]
        return [ToolResult(answer) if answer else NO_ANSWER for answer in answers]

    def _generate_outputs(self, input_texts: Sequence[str]) -> list[str]:
        """Let the model write a text for each input, greedily and all in one batch.

        Returns:
            The texts, in order. Each has at most `max_answer_tokens` tokens.
        """
        import torch

        batch = self.encode_texts(input_texts)

        with torch.inference_mode():
            output_token_ids = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=self.options.max_answer_tokens,
                do_sample=False,
                num_beams=1,
            )

        output_texts: list[str] = self.tokenizer.batch_decode(output_token_ids, skip_special_tokens=True)
        return output_texts

    def encode_texts(self, texts: Sequence[str]) -> Any:
        """Tokenize texts, truncated to `max_input_tokens` tokens.

        Returns:
            `input_ids` and `attention_mask` of shape [texts, tokens], padded and on the model's device.
        """
        batch = self.tokenizer(
            list(texts), truncation=True, max_length=self.options.max_input_tokens, padding=True, return_tensors="pt"
        )
        return batch.to(self.model.device)


class TokenSpan(NamedTuple):
    """Consecutive tokens that may be an answer.

    Attributes:
        score: How much likelier the model finds them than no answer, in logits.
        first_token_index: The index of the first token.
        last_token_index: The index of the last token, which belongs to the span.
    """

    score: float
    first_token_index: int
    last_token_index: int


class AnswerSpan(NamedTuple):
    """An answer in a passage: its text, and how much likelier the model finds it than no answer (in logits)."""

    score: float
    answer_text: str


NO_SPAN = AnswerSpan(score=0.0, answer_text="")
"""Stands for a passage without an answer."""


def find_best_span(
    start_logits: NDArray[np.float32],
    end_logits: NDArray[np.float32],
    passage_mask: NDArray[np.bool_],
    max_answer_tokens: int,
) -> TokenSpan | None:
    """Find the span of tokens that is most likely the answer.

    The score of a span is the sum of the logits of its first and last token, minus the same sum for token 0, which
    stands for no answer.

    Args:
        start_logits: [n] For each token of the input, the logit that the answer begins there.
        end_logits: [n] For each token, the logit that the answer ends there.
        passage_mask: [n] Whether the token belongs to the passage.
        max_answer_tokens: The largest number of tokens in a span.

    Returns:
        The span, or None if no span scores above 0.
    """
    logit_sums = start_logits[:, None] + end_logits[None, :]  # [n, n]: a row per first token, a column per last token
    no_answer_sum = logit_sums[0, 0]

    span_mask = _build_span_mask(passage_mask, max_answer_tokens)
    span_sums = np.where(span_mask, logit_sums, -np.inf)

    best_index = int(span_sums.argmax())  # counted row by row
    first, last = np.unravel_index(best_index, span_sums.shape)  # its row and column
    score = float(span_sums[first, last] - no_answer_sum)

    if not score > 0:  # also for NaN
        return None
    return TokenSpan(score, int(first), int(last))


def _build_span_mask(passage_mask: NDArray[np.bool_], max_answer_tokens: int) -> NDArray[np.bool_]:
    """Mark the pairs of a first and a last token between which an answer may stand.

    Args:
        passage_mask: [n] Whether each token belongs to the passage.
        max_answer_tokens: The largest number of tokens in an answer.

    Returns:
        [n, n] Whether an answer may go from the token of the row to the token of the column.
    """
    token_indices = np.arange(len(passage_mask))
    distances = token_indices[None, :] - token_indices[:, None]  # [n, n] from the first to the last token
    fits_length = (distances >= 0) & (distances < max_answer_tokens)

    are_both_in_passage = passage_mask[:, None] & passage_mask[None, :]
    span_mask: NDArray[np.bool_] = are_both_in_passage & fits_length
    return span_mask


class QuestionPassage(NamedTuple):
    """A question and one of its passages; `question_index` is the position of the question in its batch."""

    question_index: int
    question: str
    passage_text: str


class SpanLogits(NamedTuple):
    """The logits of a batch of questions with passages.

    Attributes:
        start_logits: [pairs, tokens] For each token, the logit that the answer begins there.
        end_logits: [pairs, tokens] For each token, the logit that the answer ends there.
    """

    start_logits: NDArray[np.float32]
    end_logits: NDArray[np.float32]


class ExtractiveReader:
    """A reader whose model marks the answer in a passage, run on all pairs of question and passage in one batch.

    Long passages are truncated.
    """

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self._options = options
        self._tokenizer = load_tokenizer("AutoTokenizer", options)
        self._model = load_model("AutoModelForQuestionAnswering", options)

    def answer_questions(
        self, questions: Sequence[str], passages_per_question: Sequence[Sequence[Passage]]
    ) -> list[ToolResult]:
        """Answer each question with words of one of its passages: those that the model scores highest.

        If scores are equal, the earlier passage is used.

        Args:
            questions: The questions.
            passages_per_question: For each question, the passages that may answer it.

        Returns:
            A result per question. Without an answer it has the reason `no_answer`.
        """
        pairs = _pair_questions_with_passages(questions, passages_per_question)

        best_spans = [NO_SPAN] * len(questions)
        for pair, span in zip(pairs, self._find_answer_spans(pairs), strict=True):
            if span.score > best_spans[pair.question_index].score:
                best_spans[pair.question_index] = span

        return [NO_ANSWER if span is NO_SPAN else ToolResult(span.answer_text) for span in best_spans]

    def _find_answer_spans(self, pairs: Sequence[QuestionPassage]) -> list[AnswerSpan]:
        """Find, for each pair of question and passage, the part of the passage that best answers the question.

        Returns:
            A span per pair, which is NO_SPAN if the passage has no answer.
        """
        if not pairs:
            return []

        batch = self._encode_pairs(pairs)
        token_offsets = batch.pop("offset_mapping").tolist()  # of each token of each pair, its start and end characters
        logits = self._compute_logits(batch)

        answer_spans = []
        for row, pair in enumerate(pairs):
            # Of the two texts of a pair, 0 is the question and 1 is the passage.
            passage_mask = np.array([text_index == 1 for text_index in batch.sequence_ids(row)])
            token_span = find_best_span(
                logits.start_logits[row], logits.end_logits[row], passage_mask, self._options.max_answer_tokens
            )
            answer_spans.append(_build_answer_span(token_span, token_offsets[row], pair.passage_text))

        return answer_spans

    def _compute_logits(self, batch: Any) -> SpanLogits:
        """Run the model on a batch of tokenized pairs of question and passage."""
        import torch

        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device))
        return SpanLogits(
            start_logits=logits.start_logits.float().cpu().numpy(),
            end_logits=logits.end_logits.float().cpu().numpy(),
        )

    def _encode_pairs(self, pairs: Sequence[QuestionPassage]) -> Any:
        """Tokenize each question with its passage. Long passages are truncated.

        Returns:
            Padded token IDs of shape [pairs, tokens], and for each token the characters of its text where it starts and
            ends.
        """
        return self._tokenizer(
            [pair.question for pair in pairs],
            [pair.passage_text for pair in pairs],
            truncation="only_second",
            max_length=self._options.max_input_tokens,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )


def _pair_questions_with_passages(
    questions: Sequence[str], passages_per_question: Sequence[Sequence[Passage]]
) -> list[QuestionPassage]:
    """Return each question with each of its passages, in order."""
    pairs = []
    for question_index, question in enumerate(questions):
        for passage in passages_per_question[question_index]:
            pairs.append(QuestionPassage(question_index, question, passage.text))
    return pairs


def _build_answer_span(
    token_span: TokenSpan | None, token_offsets: Sequence[tuple[int, int]], passage_text: str
) -> AnswerSpan:
    """Cut the text of a span of tokens out of its passage.

    Args:
        token_span: The tokens, or None if the passage has no answer.
        token_offsets: For each token of question and passage, the characters of its text where it starts and ends.
        passage_text: The passage.

    Returns:
        The text with its score, or NO_SPAN if there is no answer.
    """
    if token_span is None:
        return NO_SPAN

    start, _ = token_offsets[token_span.first_token_index]
    _, end = token_offsets[token_span.last_token_index]
    return AnswerSpan(token_span.score, passage_text[start:end])


def load_reader(options: QuestionAnsweringOptions) -> Reader:
    """Load the reader that the options name, and return its function that answers questions from passages.

    The reader is a set of rules, an endpoint or a model.

    Raises:
        ModelError: The weights of a model cannot be loaded.
        ToolDown: The key of an endpoint is missing.
    """
    match options.reader:
        case "embedded":
            return answer_by_wording
        case "http":
            return HttpReader(options).answer_questions
        case "seq2seq":
            return Seq2SeqReader(options).answer_questions
        case "extractive":
            return ExtractiveReader(options).answer_questions
