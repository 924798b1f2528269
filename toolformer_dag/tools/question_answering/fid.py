"""Fusion-in-decoder (Izacard and Grave 2021), the reader of Atlas: passages encoded apart, attended to together."""

from collections.abc import Sequence
from typing import Any

from toolformer_dag.tools.question_answering.seq2seq import Seq2SeqReader
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import ToolResult


class FidReader(Seq2SeqReader):
    """Cost grows with the number of passages, not with its square. For checkpoints trained this way."""

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        most = max(map(len, passages), default=0) or 1
        pairs = zip(questions, passages, strict=True)
        texts = [text for question, own in pairs for text in passage_inputs(question, own, most)]
        return self.generate(self.fuse(self.encode(texts), most, [max(len(own), 1) for own in passages]))

    def fuse(self, batch: Any, most: int, counts: Sequence[int]) -> dict[str, Any]:
        """Encoder states (questions, most x tokens, d) and their mask, which leaves out what fills up."""
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        with torch.inference_mode():
            states = self.model.get_encoder()(**batch).last_hidden_state
        questions, tokens = len(counts), states.shape[1]
        mask = batch["attention_mask"].reshape(questions, most, tokens)
        there = torch.arange(most, device=mask.device)[None, :] < torch.tensor(counts, device=mask.device)[:, None]
        fused = states.reshape(questions, most * tokens, -1)
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=fused),
            "attention_mask": (mask * there[:, :, None]).reshape(questions, most * tokens),
        }


def passage_inputs(question: str, passages: Sequence[Passage], most: int) -> list[str]:
    """FiD's form of one input per passage, `most` of them; what is missing is filled with the bare question."""
    own = [f"question: {question} title: {passage.title} context: {passage.text}" for passage in passages]
    return own + [f"question: {question}"] * (most - len(own))
