"""A seq2seq reader (Flan-T5: Chung et al. 2022): one input with the question and all its passages."""

from collections.abc import Sequence
from typing import Any

from toolformer_dag.tools.pretrained import load_model, load_tokenizer
from toolformer_dag.tools.question_answering.options import QuestionAnsweringOptions
from toolformer_dag.tools.question_answering.reader import NO_ANSWER
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import ToolResult


def reader_input(question: str, passages: Sequence[Passage]) -> str:
    """The question comes first: what a too long input loses is the end of the last passages."""
    if not passages:
        return f"Answer the question in a few words.\nQuestion: {question}"
    found = "\n".join(f"{passage.title}: {passage.text}" for passage in passages)
    return f"Answer the question in a few words, from the passages.\nQuestion: {question}\nPassages:\n{found}"


class Seq2SeqReader:
    """Greedy and batched; an empty output is `no_answer`."""

    def __init__(self, options: QuestionAnsweringOptions) -> None:
        self.options = options
        self.tokenizer = load_tokenizer("AutoTokenizer", options)
        self.model = load_model("AutoModelForSeq2SeqLM", options)

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        texts = [reader_input(question, own) for question, own in zip(questions, passages, strict=True)]
        return self.generate(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> Any:
        """Padded token ids and mask on the model's device, at most `max_input_tokens` long."""
        batch = self.tokenizer(
            list(texts), truncation=True, max_length=self.options.max_input_tokens, padding=True, return_tensors="pt"
        )
        return batch.to(self.model.device)

    def generate(self, inputs: Any) -> list[ToolResult]:
        """One answer per row of whatever the model's `generate` takes."""
        import torch

        with torch.inference_mode():
            tokens = self.model.generate(
                input_ids=inputs.get("input_ids"),
                attention_mask=inputs["attention_mask"],
                encoder_outputs=inputs.get("encoder_outputs"),
                max_new_tokens=self.options.max_answer_tokens,
                do_sample=False,
                num_beams=1,
            )
        answers = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [ToolResult(answer.strip()) if answer.strip() else NO_ANSWER for answer in answers]
