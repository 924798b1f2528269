"""The backend interface without any saving, as public ports annotate: a prefill per sample, a full pass per loss.

It is the reference of the benchmarks and of the tests of architectures.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.backend import (
    Ends,
    LogProbabilities,
    SamplePoint,
    TokenCounts,
    TokenQuery,
    TokenText,
)
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.greedy_rows import GreedyBatch
from toolformer_dag.model.loading import LanguageModel
from toolformer_dag.model.memory import TokenBudget
from toolformer_dag.model.own_cache import CacheUse, cache_argument
from toolformer_dag.model.requests import CallLosses, LossRequest
from toolformer_dag.model.sharing import RECOMPUTED, Sharing
from toolformer_dag.settings.sections import SamplingSettings


class NaiveBackend:
    """Runs every sequence alone; only the tokens of one sample share a cache, where `caches` is true."""

    greedy_rows = 1

    def __init__(self, language_model: LanguageModel, *, caches: bool = True) -> None:
        self.language_model = language_model
        self.context_length = language_model.context_length
        self.counts = TokenCounts()
        self.caches = caches

    @property
    def identity(self) -> str:
        """Return the name."""
        return "naive"

    @torch.inference_mode()
    def propose(
        self,
        head: Sequence[int],
        texts: Sequence[TokenText],
        start: Sequence[int],
        ends: Ends,
        sampling: SamplingSettings,
    ) -> list[list[list[int]]]:
        """Compute positions with a pass per text, samples one after another; plain sampling only."""
        return [self._propose([*head, *text.ids], len(head), text, start, ends) for text in texts]

    @torch.inference_mode()
    def log_probabilities(self, queries: Sequence[TokenQuery]) -> list[LogProbabilities]:
        """Run prefix and text of each query to their end."""
        return [self._answer(query) for query in queries]

    @torch.inference_mode()
    def greedy(self, sequences: Sequence[Sequence[int]]) -> GreedyBatch:
        """Recompute the whole sequence for every token, each row alone."""
        backbone = Backbone(self.language_model.model, TokenBudget(1))
        backbone.uses_custom_attention = False
        backbone.run_whole_model()
        rows = Sharing(RECOMPUTED, CacheUse(True, "none", whole=True)).rows(backbone)
        return GreedyBatch(backbone, rows, rows.add(sequences))

    def _propose(self, ids: list[int], head: int, text: TokenText, start: Sequence[int], ends: Ends) -> list[list[int]]:
        rows = self._logits(ids, "positions")[head + text.before - 1 :].softmax(-1)
        probabilities = rows[: text.asked, start[0]].cpu().numpy()
        for i in range(text.asked) if len(start) > 1 else ():
            before = [*ids[: head + text.before + i], *start[:-1]]
            further = self._logits(before, "positions")[-len(start) + 1 :].softmax(-1)
            probabilities[i] *= float(further[range(len(start) - 1), start[1:]].prod())
        return [
            sampled for point in text.choose(probabilities) for sampled in self._samples(ids, head, point, start, ends)
        ]

    def _samples(
        self, ids: list[int], head: int, point: SamplePoint, start: Sequence[int], ends: Ends
    ) -> list[list[int]]:
        prefix = [*ids[: head + point.kept], *start]
        return [self._sample(prefix, stream, ends) for stream in point.streams]

    def _sample(self, prefix: list[int], stream: np.ndarray[Any, Any], ends: Ends) -> list[int]:
        sampled: list[int] = []
        logits, cache = self._run(prefix, None)
        for uniform in stream:
            cumulative = logits[0, -1].float().softmax(-1).double().cumsum(-1)
            sampled.append(int(torch.searchsorted(cumulative, float(uniform) * cumulative[-1], right=True)))
            if ends.may_end(np.array(sampled[-1:]))[0] and ends.has_ended(sampled):
                break
            logits, cache = self._run(sampled[-1:], cache) if self.caches else self._run(prefix + sampled, None)
        return sampled

    def _run(self, ids: list[int], cache: Any) -> tuple[torch.Tensor, Any]:
        self.counts.add("samples", len(ids))
        self.counts.passes += cache is None
        self.counts.decoding_steps += cache is not None
        model = self.language_model.model
        inputs = torch.tensor([ids], device=self.language_model.device)
        if not self.caches:
            return model(inputs, use_cache=False).logits, None
        name = cache_argument(model)
        output = model(inputs, use_cache=True, **{name: cache})
        return output.logits, getattr(output, name)

    def _answer(self, query: TokenQuery) -> LogProbabilities:
        rows = self._logits([*query.prefix, *query.text], query.kind).log_softmax(-1)
        places = torch.tensor(list(query.places), device=rows.device) + len(query.prefix) - 1
        found: LogProbabilities = rows[places].gather(1, torch.tensor(query.tokens, device=rows.device)).cpu().numpy()
        return found

    def _logits(self, ids: Sequence[int], kind: str) -> torch.Tensor:
        self.counts.add(kind, len(ids))
        self.counts.passes += 1
        inputs = torch.tensor([list(ids)], device=self.language_model.device)
        logits: torch.Tensor = self.language_model.model(inputs, use_cache=False).logits[0].float()
        return logits


class Naive(Engine):
    """The engine over the naive backend, one call at a time: three passes for every call."""

    def __init__(self, language_model: LanguageModel, *, caches: bool = True) -> None:
        super().__init__(language_model, backend=NaiveBackend(language_model, caches=caches))

    def losses(self, requests: Sequence[LossRequest], floor: float | None = None) -> list[CallLosses]:
        """Compute three passes over the whole text for every call."""
        return [super(Naive, self).losses([request], floor)[0] for request in requests]
