"""<tool>/heuristic_subset: the texts that a tool wants."""

import dagster as dg

from assets.checks import specs, unique_keys
from assets.metadata import result
from assets.plan import OWNERS, Plan
from assets.progress import progress
from assets.raw_shards import KEY as RAW_SHARDS
from resources.instance import SHARDS
from resources.language_model import LanguageModelResource
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.lane import Lane
from toolformer_dag.stages import heuristic_subset as stage
from toolformer_dag.stages.cut import Cut, text_budget
from toolformer_dag.storage.lake import Lake
from toolformer_dag.texts.segments import CUTTING


def heuristic_subset(plan: Plan, lane: Lane) -> dg.AssetsDefinition:
    """The lane's first stage."""
    corpus = plan.settings.corpus
    key = dg.AssetKey([lane.key, "heuristic_subset"])

    @dg.asset(
        key=key,
        group_name=lane.key,
        deps=[RAW_SHARDS],
        partitions_def=SHARDS,
        code_version=fingerprint(
            {
                "tool": lane.tool.version,
                "options": lane.tool.selection(),
                "prompt": lane.tool.prompt,
                "model": plan.model,
                "segment_tokens": corpus.segment_tokens,
                "cutting": CUTTING,
                "texts_per_shard": corpus.texts_per_shard,
                "max_call_tokens": plan.sampling.max_call_tokens,
                "name": lane.tool.name,
            }
        ),
        kinds={"python", "polars"},
        owners=OWNERS,
        check_specs=specs(key, "unique_keys"),
        description=f"Texts that {lane.tool.name} wants, cut so that P(x) and x fit the model, and why (appendix A).",
    )
    def texts(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], language_model: LanguageModelResource
    ) -> dg.MaterializeResult:
        report = stage.heuristic_subset(
            lake,
            lane,
            context.partition_key,
            cut=cut_of(plan, lane, language_model),
            texts_per_shard=corpus.texts_per_shard,
            progress=progress(context),
        )
        rows = lake.table(f"{lane.key}/heuristic_subset").scan([context.partition_key])
        return result(report, rows, [unique_keys(rows, stage.STAGE)])

    return texts


def cut_of(plan: Plan, lane: Lane, language_model: LanguageModelResource | None = None) -> Cut:
    """How documents are cut for a lane; loads the tokenizer, of the settings' model where none is given."""
    tokens = (language_model or LanguageModelResource(**plan.settings.model.model_dump())).tokens()
    budget = text_budget(
        segment_tokens=plan.settings.corpus.segment_tokens,
        context_length=tokens.context_length,
        prompt_tokens=tokens.prompt(lane.tool.prompt),
        max_call_tokens=plan.sampling.max_call_tokens,
    )
    return Cut(budget, tokens.count, plan.model)
