"""What every piece of the language-model work needs."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolformer_dag.language_model.backbone import Backbone
from toolformer_dag.language_model.cached import CachedHead
from toolformer_dag.language_model.cached_prefixes import CachedPrefixes
from toolformer_dag.language_model.counts import TokenCounts
from toolformer_dag.language_model.encoding import Encoding
from toolformer_dag.language_model.heads import Head, Prefixes
from toolformer_dag.language_model.memory import TokenBudget
from toolformer_dag.language_model.recomputed import RecomputedHead, RecomputedPrefixes


@dataclass(frozen=True, slots=True)
class Runtime:
    """A model ready to run, how it is fed, and what is counted."""

    backbone: Backbone
    encoding: Encoding
    context_length: int
    budget: TokenBudget
    counts: TokenCounts
    head_type: type[CachedHead] | type[RecomputedHead]

    def head(self, ids: Sequence[int]) -> Head:
        """Runs the beginning that texts share."""
        self.counts.add("prompt", len(ids))
        self.counts.passes += 1
        if self.head_type is CachedHead:
            return CachedHead(self.backbone, ids)
        return RecomputedHead(self.backbone, ids, self.budget)

    def prefixes(self, prefixes: Sequence[Sequence[int]]) -> Prefixes:
        """Runs prefixes, in lexicographic order, behind which texts are to stand."""
        kind = CachedPrefixes if self.head_type is CachedHead else RecomputedPrefixes
        made = kind(self.backbone, prefixes, self.budget.tokens)
        self.counts.passes += made.passes
        return made
