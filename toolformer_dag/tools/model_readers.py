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
        """Let the model write an answer to each question after its passages, all in one batch."""
        inputs = []
        for question, question_passages in zip(questions, passages, strict=True):
            inputs.append(reader_input(question, question_passages))
        answers = [output.strip() for output in self._outputs(inputs)]
        return [ToolResult(answer) if answer else NO_ANSWER for answer in answers]

    def _outputs(self, inputs: Sequence[str]) -> list[str]:
        """Return the text that the model writes greedily for each input, all in one batch."""
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


def best_span(
    starts: NDArray[np.float32], ends: NDArray[np.float32], allowed: NDArray[np.bool_], max_tokens: int
) -> TokenSpan | None:
    """Return the span of tokens that most likely is the answer; None where no span scores above no answer.

    - starts, ends [n]: for each token of the input, the logits that the answer begins and ends there.
    - allowed [n]: whether the token belongs to the passage.
    - max_tokens: the most tokens of a span.

    The score is starts[first] + ends[last], minus the same sum for token 0, which stands for no answer.
    """
    sums = starts[:, None] + ends[None, :]  # [n, n]: a row per first token, a column per last token
    scores = np.where(_is_span(allowed, max_tokens), sums, -np.inf)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    score = float(scores[first, last] - sums[0, 0])
    return TokenSpan(score, int(first), int(last)) if score > 0 else None


def _is_span(allowed: NDArray[np.bool_], max_tokens: int) -> NDArray[np.bool_]:
    """Return a table [n, n]: whether an answer may go from the token of the row to the token of the column."""
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
        """Answer each question with the words of one of its passages that the model scores highest.

        Of equal scores the first passage's counts. Where no span of a passage scores above 0, the score of having no
        answer, the result has the reason `no_answer`.
        """
        pairs = _pairs(questions, passages)
        results = [NO_ANSWER] * len(questions)
        best_scores = [0.0] * len(questions)
        for pair, span in zip(pairs, self._spans(pairs), strict=True):
            if span is not None and span.score > best_scores[pair.question_index]:
                best_scores[pair.question_index] = span.score
                results[pair.question_index] = ToolResult(span.text)
        return results

    def _spans(self, pairs: Sequence[QuestionPassage]) -> list[AnswerSpan | None]:
        """Return for each pair the part of the passage that best answers the question, all in one batch.

        None where the model scores no part above no answer.
        """
        if not pairs:
            return []
        batch = self._encode(pairs)
        offsets = batch.pop("offset_mapping").tolist()  # for each pair, the first and last character of each token
        logits = self._logits(batch)
        spans = []
        for row, pair in enumerate(pairs):
            is_of_text = np.array([sequence == 1 for sequence in batch.sequence_ids(row)])  # 0 is the question
            tokens = best_span(logits.starts[row], logits.ends[row], is_of_text, self._options.max_answer_tokens)
            spans.append(_answer_span(tokens, offsets[row], pair.text))
        return spans

    def _logits(self, batch: Any) -> SpanLogits:
        """Run the model on a batch of encoded pairs."""
        import torch

        with torch.inference_mode():
            logits = self._model(**batch.to(self._model.device))
        return SpanLogits(
            starts=logits.start_logits.float().cpu().numpy(),
            ends=logits.end_logits.float().cpu().numpy(),
        )

    def _encode(self, pairs: Sequence[QuestionPassage]) -> Any:
        """Tokenize each question with its passage to padded ids with character offsets; long passages are truncated."""
        return self._tokenizer(
            [pair.question for pair in pairs],
            [pair.text for pair in pairs],
            truncation="only_second",
            max_length=self._options.max_input_tokens,
            padding=True,
            return_offsets_mapping=True,
            return_tensors="pt",
        )


def _pairs(questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[QuestionPassage]:
    """Return each question with each of its passages."""
    pairs = []
    for index, question in enumerate(questions):
        for passage in passages[index]:
            pairs.append(QuestionPassage(index, question, passage.text))
    return pairs


def _answer_span(tokens: TokenSpan | None, offsets: Sequence[tuple[int, int]], text: str) -> AnswerSpan | None:
    """Return the characters of a span of tokens; None for None.

    offsets: the first and last character in `text` of each token.
    """
    if tokens is None:
        return None
    start, _ = offsets[tokens.first]
    _, end = offsets[tokens.last]
    return AnswerSpan(tokens.score, text[start:end])


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
