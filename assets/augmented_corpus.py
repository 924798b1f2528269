"""training/augmented_corpus: C*, the texts with the kept calls of all tools in their places."""

import dagster as dg

from assets.checks import gives_text_back, specs, unique_keys
from assets.metadata import result
from assets.plan import OWNERS, Plan
from assets.raw_shards import KEY as RAW_SHARDS
from resources.instance import shard_names
from resources.language_model import LanguageModelResource
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.stages import augmented_corpus as stage
from toolformer_dag.stages.cut import Cut
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.texts.segments import CUTTING

KEY = dg.AssetKey(["training", "augmented_corpus"])


def augmented_corpus(plan: Plan) -> dg.AssetsDefinition:
    """A row per text of C*, made of the kept calls of all lanes and the documents that hold them (section 2)."""
    tokens_per_text = plan.settings.corpus.segment_tokens

    @dg.asset(
        key=KEY,
        group_name="training",
        deps=[RAW_SHARDS, *(dg.AssetKey([lane.key, "filtered_calls"]) for lane in plan.lanes)],
        code_version=fingerprint(
            {
                "segment_tokens": tokens_per_text,
                "cutting": CUTTING,
                "merging": stage.MERGING,
                "tools": plan.tool_names,
                "model": plan.model,
            }
        ),
        kinds={"polars", "parquet"},
        owners=OWNERS,
        check_specs=specs(KEY, "unique_keys", "gives_text_back"),
        description="C*: texts with their calls in them (paper, section 2); without these they are C, byte for byte.",
    )
    def corpus(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], language_model: LanguageModelResource
    ) -> dg.MaterializeResult:
        shards = shard_names(context.instance)
        cut = Cut(tokens_per_text, language_model.tokens().count, plan.model)
        report = stage.augmented_corpus(lake, plan.lanes, shards, cut=cut)
        rows = lake.table("training/augmented_corpus").scan([WHOLE])
        return result(report, rows, [unique_keys(rows, stage.STAGE), gives_text_back(rows, plan.tool_names)])

    return corpus
