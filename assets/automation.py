"""When an asset runs by itself: hop by hop, and no further than something changed."""

import dagster as dg

_C = dg.AutomationCondition

WHEN_CHANGED = (
    (_C.any_deps_match(_C.data_version_changed()) | _C.code_version_changed()).since(
        _C.newly_requested() | _C.newly_updated() | _C.initial_evaluation()
    )
    & ~_C.any_deps_missing()
    & ~_C.any_deps_in_progress()
    & ~_C.in_progress()
)
"""Dagster's own `eager()` does not look at code versions, and so at no threshold."""

BY_HAND = ("training", "evaluation")


def automated(assets: list[dg.AssetsDefinition]) -> list[dg.AssetsDefinition]:
    """The graph that reruns what changed; finetuning and what is measured on it stay a person's decision."""

    def condition(spec: dg.AssetSpec) -> dg.AssetSpec:
        by_hand = spec.group_name in BY_HAND and spec.key.path[-1] != "augmented_corpus"
        return spec if by_hand else spec.replace_attributes(automation_condition=WHEN_CHANGED)

    return [asset.map_asset_specs(condition) for asset in assets]
