"""The options of question answering."""

from typing import Literal, Self

from pydantic import Field, model_validator

from toolformer_dag.tools.pretrained import ModelName, PretrainedOptions
from toolformer_dag.tools.retrieval.options import RetrievalOptions

ReaderName = Literal["seq2seq", "fid", "extractive", "http", "embedded"]


class QuestionAnsweringOptions(RetrievalOptions, PretrainedOptions):
    """reader: `seq2seq` (Flan-T5 and the like), `fid` (the same, passages encoded apart and fused in the decoder),
    `extractive` (a model of AutoModelForQuestionAnswering), `http` (an OpenAI-compatible endpoint) or `embedded` (no
    weights); passages_read: how many passages the reader gets, 0 for `seq2seq` and `http` that know by themselves;
    max_input_tokens: of one input, for `fid` and `extractive` of one passage; max_answer_tokens: where an answer ends.

    http only: url, up to and with `/v1`; api_key_variable: the environment variable with the key; request_timeout_s.
    """

    reader: ReaderName = "seq2seq"
    model: ModelName = "google/flan-t5-base"
    passages_read: int = Field(5, ge=0)
    max_input_tokens: int = Field(512, ge=16)
    max_answer_tokens: int = Field(32, ge=1)
    url: str | None = Field(None, pattern=r"^https?://")
    api_key_variable: str | None = None
    request_timeout_s: float = Field(60.0, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.reader == "http" and not self.url:
            raise ValueError("reader = 'http' needs url, such as 'http://localhost:8000/v1'")
        if self.passages_read == 0 and self.reader not in ("seq2seq", "http"):
            raise ValueError(f"reader = {self.reader!r} answers from passages only: set passages_read to 1 or more")
        return self
