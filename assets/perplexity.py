"""evaluation/perplexity: what finetuning on calls does to plain language modelling."""

from collections.abc import Iterator

import dagster as dg
import polars as pl

from assets.augmented_corpus import KEY as CORPUS
from assets.finetuned_checkpoint import CHECKPOINT_KEYS
from assets.metadata import frame_table
from assets.plan import OWNERS, Plan
from toolformer_dag.evaluation.results import PERPLEXITY, publish
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages.split import HELDOUT, heldout_texts
from toolformer_dag.storage.lake import Lake


def perplexity(plan: Plan) -> dg.AssetsDefinition:
    """Calls are disabled throughout, as in section 4.3 of the paper."""
    texts = plan.settings.training.heldout_texts
    determining = {"chosen_on": texts, "model": plan.model}

    @dg.asset(
        key=["evaluation", "perplexity"],
        group_name="evaluation",
        deps=[*CHECKPOINT_KEYS, CORPUS],
        code_version=fingerprint(determining),
        kinds={"pytorch"},
        owners=OWNERS,
        pool="gpu",
        description="Perplexity and bits per byte on held-out texts, calls disabled: base, base + C, Toolformer.",
    )
    def scores(lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        from toolformer_dag.evaluation.accuracy import Condition
        from toolformer_dag.evaluation.compared import compared
        from toolformer_dag.evaluation.perplexity import perplexity as measure
        from toolformer_dag.language_model.load import LanguageModel

        corpus = lake.table("training/augmented_corpus").read("all")
        heldout = heldout_texts(corpus.filter(pl.col("split") == HELDOUT)["text"].to_list(), texts).measuring

        def row(model: LanguageModel, conditions: list[Condition]) -> Iterator[tuple[str, int, float, float]]:
            found = measure(model, heldout)
            yield conditions[0].name, len(heldout), found.perplexity, found.bits_per_byte

        columns = {"condition": pl.String, "texts": pl.Int64, "perplexity": pl.Float64, "bits_per_byte": pl.Float64}
        table = pl.DataFrame(list(compared(plan.settings, row)), schema=columns, orient="row")
        version = publish(lake, PERPLEXITY, table, determining)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={"dagster/row_count": table.height, "perplexity": dg.MetadataValue.md(frame_table(table))},
        )

    return scores
