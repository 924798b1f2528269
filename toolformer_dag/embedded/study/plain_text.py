"""What finetuning on calls does to plain text that none of the models has seen, made and real."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl

from toolformer_dag.embedded.study.settings import PAGE_CHARACTERS, PLAIN_TEXTS
from toolformer_dag.embedded.training.real_text import load_real_text
from toolformer_dag.embedded.web import records
from toolformer_dag.evaluation.compared import compared
from toolformer_dag.evaluation.condition import Condition
from toolformer_dag.evaluation.perplexity import perplexity
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings.settings import Settings


def plain_texts(seed: int, real_text: Sequence[Path]) -> dict[str, list[str]]:
    """Held-out texts by kind. Raises RealTextError."""
    found = {"made pages": [record["raw_content"] for record in records(seed, "evaluation", PLAIN_TEXTS)]}
    if real_text:
        pages = load_real_text(real_text, held_out=True).web
        some = pages[:: max(1, len(pages) // PLAIN_TEXTS)]
        texts = ["\n".join(text for _, text in page.passages)[:PAGE_CHARACTERS] for page in some]
        found["real pages"] = [text for text in texts if text.strip()]
    return found


def plain_text_table(settings: Settings, texts: Mapping[str, Sequence[str]]) -> pl.DataFrame:
    """Columns text, condition, perplexity, bits_per_byte; calls are disabled."""

    def rows(model: LanguageModel, conditions: list[Condition]) -> Iterator[tuple[str, str, float, float]]:
        for kind, some in texts.items():
            measured = perplexity(model, some)
            yield kind, conditions[0].name, measured.perplexity, measured.bits_per_byte

    return pl.DataFrame(
        list(compared(settings, rows)), schema=["text", "condition", "perplexity", "bits_per_byte"], orient="row"
    )
