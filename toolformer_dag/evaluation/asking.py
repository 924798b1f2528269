"""A model that is asked, and all that determines what it writes after a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolformer_dag.decoding.generate import generate
from toolformer_dag.decoding.generation import DECODING, Generation
from toolformer_dag.lane import Lane
from toolformer_dag.language_model.load import LanguageModel
from toolformer_dag.settings.settings import Settings
from toolformer_dag.stages import tool_results


@dataclass(frozen=True, slots=True)
class Asking:
    """`language_model`: one of `load_identified`. `k` as in decoding. `withheld`: tools, by name in the text, that are
    not called where `lanes` has them.
    """

    settings: Settings
    lanes: Sequence[Lane]
    language_model: LanguageModel
    k: int
    withheld: frozenset[str]

    def identity(self) -> dict[str, Any]:
        """What determines a text beside its prompt and context; tools count where a call can begin.

        Raises ValueError for a model without an identity: its texts would be taken for those of another.
        """
        if not self.language_model.identity:
            raise ValueError(f"{self.language_model.name} has no identity; load it with load_identified")
        weights = {**self.language_model.identity, "dtype": self.settings.model.dtype}
        written = {"model": weights, "max_new_tokens": self.settings.decoding.max_new_tokens, "decoding": DECODING}
        if self.k == 0:
            return written
        return {
            **written,
            "k": self.k,
            "max_call_tokens": self.settings.sampling.max_call_tokens,
            "tools": {lane.key: tool_results.settings(lane) for lane in self.lanes},
            "withheld": sorted(self._not_called),
        }

    def write(self, prompts: Sequence[str], contexts: Sequence[str]) -> list[Generation]:
        """One per prompt; `contexts`: ISO dates for the calendar, else empty."""
        return generate(
            self.language_model,
            prompts,
            {lane.tool.name: lane.tool for lane in self.lanes},
            k=self.k,
            withheld=self._not_called,
            max_new_tokens=self.settings.decoding.max_new_tokens,
            max_call_tokens=self.settings.sampling.max_call_tokens,
            contexts=contexts,
            limits={lane.tool.name: lane.limits for lane in self.lanes},
        )

    @property
    def _not_called(self) -> frozenset[str]:
        return self.withheld & {lane.tool.name for lane in self.lanes}
