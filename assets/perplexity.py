"""evaluation/perplexity: what finetuning on calls does to plain language modelling."""

from collections.abc import Iterator
from typing import Any

import dagster as dg
import polars as pl

from assets.augmented_corpus import KEY as CORPUS
from assets.finetuned_checkpoint import CHECKPOINT_KEYS, checkpoint_versions
from assets.metadata import frame_table
from assets.plan import OWNERS, Plan
from toolformer_dag.evaluation.accuracy_tables import PERPLEXITY, publish
from toolformer_dag.evaluation.benchmark_files import content, wikitext
from toolformer_dag.evaluation.catalogue import READING
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages.split import HELDOUT, heldout_texts
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE

COLUMNS = {
    "source": pl.String,
    "condition": pl.String,
    "texts": pl.Int64,
    "perplexity": pl.Float64,
    "bits_per_byte": pl.Float64,
}


def perplexity_settings(plan: Plan) -> dict[str, Any]:
    """What determines the numbers beside the checkpoints and C. Raises BenchmarkError."""
    file = plan.settings.evaluation.wikitext
    return {
        "chosen_on": plan.settings.training.heldout_texts,
        "model": plan.model,
        "wikitext": (content(file), READING) if file else None,
    }


def perplexity(plan: Plan) -> dg.AssetsDefinition:
    """Calls are disabled throughout, as in section 4.3 of the paper."""
    texts, wikitext_file = plan.settings.training.heldout_texts, plan.settings.evaluation.wikitext
    determining = perplexity_settings(plan)

    @dg.asset(
        key=["evaluation", "perplexity"],
        group_name="evaluation",
        deps=[*CHECKPOINT_KEYS, CORPUS],
        code_version=fingerprint(determining),
        kinds={"pytorch"},
        owners=OWNERS,
        pool="gpu",
        description="Perplexity and bits per byte of held-out texts of C and, where named, WikiText; calls disabled.",
    )
    def scores(lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        from toolformer_dag.evaluation.asking import compared
        from toolformer_dag.evaluation.language_modeling import perplexity as measure
        from toolformer_dag.evaluation.scores import Condition
        from toolformer_dag.model.loading import LanguageModel

        versions = checkpoint_versions(plan)  # before measuring: what is replaced meanwhile makes this stale
        corpus = lake.table("training/augmented_corpus").read(WHOLE)
        heldout = heldout_texts(corpus.filter(pl.col("split") == HELDOUT)["text"].to_list(), texts).measuring
        sources = {"C, held out": heldout} | ({"WikiText": wikitext(wikitext_file)} if wikitext_file else {})

        def rows(model: LanguageModel, conditions: list[Condition]) -> Iterator[tuple[str, str, int, float, float]]:
            for source, some in sources.items():
                found = measure(model, some)
                yield source, conditions[0].name, len(some), found.perplexity, found.bits_per_byte

        table = pl.DataFrame(list(compared(plan.settings, rows)), schema=COLUMNS, orient="row")
        version = publish(lake, PERPLEXITY, table, determining, versions)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(version),
            metadata={"dagster/row_count": table.height, "perplexity": dg.MetadataValue.md(frame_table(table))},
        )

    return scores
