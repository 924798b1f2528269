"""Run a checkpoint with its tools under lm-evaluation-harness (extra `lm-eval`).

    python -m toolformer_dag.evaluation.harness_adapter --model toolformer --tasks gsm8k

is the harness's own command line with the model `toolformer`. `harness_task` makes a task of a benchmark of this
package: its prompts, its rule of correctness.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from toolformer_dag.computing.plan import lanes
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.language_modeling import perplexity
from toolformer_dag.files import UserError
from toolformer_dag.model.loading import load_model
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.training.training_report import find_finetuned_or_base

NAME = "toolformer"
"""The name of the model in the harness."""
METRIC = "acc"
"""The metric of the tasks of `harness_task`."""


@register_model(NAME)
class HarnessModel(LM):  # type: ignore[misc]  # the extra is not installed where types are checked
    """A checkpoint that calls its tools when it generates text; greedy, at most `decoding.calls` calls per prompt.

    Tasks that compare log-probabilities of fixed answers make no calls: nothing is generated.
    """

    def __init__(
        self,
        config: str | None = None,
        model: str | None = None,
        k: int | None = None,
        withheld: str = "",
        max_new_tokens: int | None = None,
        **ignored: Any,
    ) -> None:
        """Load the model and its tools.

        Args:
            config: The path of toolformer.toml.
            model: A folder or hub id. By default, the finetuned checkpoint of the settings.
            k: A call may begin if ` [` is among the k likeliest tokens. 0 disables calls. By default, the setting.
            withheld: The names of tools that may not be called, joined by `+`, such as "QA+Calculator".
            max_new_tokens: The limit of tokens for tasks that set none.
            ignored: The batch size and device of the harness. Here they come from the settings.

        Raises:
            SettingsError: The settings cannot be read.
            ModelError: The model cannot be loaded.
            ToolError: A tool cannot be loaded.
        """
        super().__init__()
        names_not_called = frozenset(withheld.split("+"))  # {""} if there are none: a name that no tool has
        settings = load_settings(Path(config) if config else None)

        # loglikelihood needs the logits of whole texts, which only the engine "transformers" gives.
        model_settings = settings.model.model_copy(update={"engine": "transformers"})
        self._model = load_model(model_settings, model or find_finetuned_or_base(settings))

        self._asking = Asking(
            settings=settings,
            lanes=[lane.at_inference() for lane in lanes(settings)],  # tools with the settings for decoding
            language_model=self._model,
            k=settings.decoding.k if k is None else int(k),  # the harness may hand numbers over as text
            withheld=names_not_called,
        )
        self._max_new_tokens = int(max_new_tokens or settings.decoding.max_new_tokens)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Write a text after each prompt, and return it without its calls, up to the task's first stop string.

        Args:
            requests: Objects of the harness. Their `args` are a prompt and options such as
                {"until": ["\\n"], "max_gen_toks": 64}: the stop strings, and the limit of tokens. Their `doc` may
                have a `context`, the date that the calendar returns ("2019-01-01").

        Raises:
            UserError: The task samples (`do_sample`, or a temperature above 0).
        """
        texts = [""] * len(requests)
        for max_new_tokens, indices in self._group_indices_by_limit(requests):
            written = self._write_texts([requests[index] for index in indices], max_new_tokens)
            for index, text in zip(indices, written, strict=True):
                texts[index] = text

        self._cache(requests, texts)
        return texts

    def _cache(self, requests: Sequence[Any], texts: Sequence[str]) -> None:
        """Let the harness remember what was written for each request."""
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)

    def _group_indices_by_limit(self, requests: Sequence[Any]) -> list[tuple[int, list[int]]]:
        """Return (limit of tokens, indices of the requests with this limit), since these are generated together."""
        indices_of_limit: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            _, options = request.args
            indices_of_limit.setdefault(self._choose_token_limit(options), []).append(index)
        return sorted(indices_of_limit.items())

    def _write_texts(self, requests: Sequence[Any], max_new_tokens: int) -> list[str]:
        """Return the text after each prompt, without calls, cut at the stop strings of its request."""
        prompts = [request.args[0] for request in requests]
        contexts = [_get_context(request.doc) for request in requests]
        options = [request.args[1] for request in requests]
        generations = self._asking.write(prompts, contexts, max_new_tokens)
        texts = [generation.plain for generation in generations]
        return [_cut_at_stops(text, request_options) for text, request_options in zip(texts, options, strict=True)]

    def _choose_token_limit(self, options: dict[str, Any]) -> int:
        """Return the most tokens that a request may write. Raises UserError for a request that samples."""
        samples = options.get("do_sample") or (options.get("temperature") or 0) > 0
        if samples:
            raise UserError("decoding with tools is greedy; give the task do_sample=False and temperature=0")
        return int(options.get("max_gen_toks") or options.get("max_new_tokens") or self._max_new_tokens)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log p of each continuation in nats, and whether greedy decoding without calls writes it.

        A context that does not fit loses its beginning.
        """
        return [self._score_continuation(*request.args) for request in requests]

    def _score_continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        """Compute the probability of a continuation of a text.

        A text that exceeds the model's context loses its beginning.

        Returns:
            log p of the continuation in nats, and whether greedy decoding would write it. (0, True) without any tokens.
        """
        # Both are tokenized as one text, whose last tokens then are the continuation's.
        context_tokens, all_tokens = self._model.encoding.texts([context, context + continuation])
        continuation_length = len(all_tokens.ids) - len(context_tokens.ids)
        ids = [*self._model.encoding.bos, *all_tokens.ids]

        scored_tokens = min(continuation_length, len(ids) - 1)  # nothing predicts the first token
        if scored_tokens < 1:
            return 0.0, True
        return self._score_last(ids[-self._model.context_length :], scored_tokens)

    @torch.no_grad()
    def _score_last(self, ids: list[int], scored_tokens: int) -> tuple[float, bool]:
        """Return log p of the last `scored_tokens` of a text in nats, and whether each is the likeliest."""
        inputs = torch.tensor([ids], device=self._model.device)
        logits_of_text = self._model.model(inputs, use_cache=False).logits[0]  # [tokens, vocabulary]
        logits = logits_of_text[-scored_tokens - 1 : -1].float()  # the logits at a token predict the next one
        targets = inputs[0, -scored_tokens:]
        log_p = logits.log_softmax(-1).gather(-1, targets[:, None])
        is_greedy = (logits.argmax(-1) == targets).all()
        return float(log_p.double().sum()), bool(is_greedy)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each text in nats, computed in windows like perplexity; 0 for a text of one token."""
        log_p = []
        for request in requests:
            try:
                log_p.append(-perplexity(self._model, [request.args[0]], disabled=False).nats)
            except ValueError:  # nothing to predict
                log_p.append(0.0)
        return log_p


def harness_task(benchmark: Benchmark, name: str, max_new_tokens: int) -> dict[str, Any]:
    """Define a task of lm-evaluation-harness from a benchmark, for `simple_evaluate(tasks=[...])`.

    The metric of the task is `acc`.

    Raises:
        UserError: The benchmark judges calls, but the harness only sees texts without calls.
    """
    judges_calls = benchmark.calls_nothing or benchmark.function_calls
    if judges_calls:
        raise UserError(f"{benchmark.name}: the harness sees no calls; name it under [evaluation.benchmarks] instead")

    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": _build_documents(benchmark)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": lambda document: document["prompt"],
        "doc_to_target": lambda document: document["answers"][0],
        "process_results": lambda document, results: _judge_document(benchmark, document, results),
        "generation_kwargs": {"until": [], "max_gen_toks": max_new_tokens, "do_sample": False},
        "metric_list": [{"metric": METRIC, "aggregation": "mean", "higher_is_better": True}],
        "metadata": {},
    }


def _judge_document(benchmark: Benchmark, document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return whether the text that was written for a question is right, as the value of METRIC."""
    is_right = benchmark.correct(results[0], document["answers"])
    return {METRIC: float(is_right)}


def _build_documents(benchmark: Benchmark) -> Dataset:
    """Return the questions of a benchmark as the harness's data set: prompt, answers, context."""
    documents = []
    for question in benchmark.questions:
        documents.append({"prompt": question.prompt, "answers": list(question.answers), "context": question.context})
    return Dataset.from_list(documents)


def _get_context(document: dict[str, Any] | None) -> str:
    """Return the context of a task's document, empty without one."""
    return str((document or {}).get("context") or "")


def _cut_at_stops(text: str, options: dict[str, Any]) -> str:
    """Return a text up to the first of the task's stop strings (`until`: a text or a list of them)."""
    stops = options.get("until") or []
    if isinstance(stops, str):
        stops = [stops]
    for stop in stops:
        if stop:
            text = text.partition(stop)[0]
    return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
