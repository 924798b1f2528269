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

from toolformer_dag.computing.plan import load_lanes
from toolformer_dag.evaluation.asking import Asking
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.language_modeling import compute_perplexity
from toolformer_dag.files import UserError
from toolformer_dag.model.loading import load_model
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.training.training_report import find_finetuned_or_base_model

HARNESS_MODEL_NAME = "toolformer"
"""The name of the model in the harness."""
METRIC_NAME = "acc"
"""The metric of the tasks of `harness_task`."""


@register_model(HARNESS_MODEL_NAME)
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
        withheld_names = frozenset(withheld.split("+"))  # {""} if there are none: a name that no tool has
        settings = load_settings(Path(config) if config else None)

        # `loglikelihood` needs the logits of whole texts, which only the engine "transformers" gives.
        model_settings = settings.model.model_copy(update={"engine": "transformers"})
        self._language_model = load_model(model_settings, model or find_finetuned_or_base_model(settings))

        inference_lanes = [lane.build_inference_lane() for lane in load_lanes(settings)]
        self._asking = Asking(
            settings=settings,
            lanes=inference_lanes,  # the tools with their settings for decoding
            language_model=self._language_model,
            k=settings.decoding.k if k is None else int(k),  # the harness may hand numbers over as text
            withheld=withheld_names,
        )
        self._max_new_tokens = int(max_new_tokens or settings.decoding.max_new_tokens)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a text after each prompt, and return it without its calls, up to the task's first stop string.

        Args:
            requests: Objects of the harness. Their `args` are a prompt and options such as
                {"until": ["\\n"], "max_gen_toks": 64}: the stop strings, and the limit of tokens. Their `doc` may
                have a `context`, the date that the calendar returns ("2019-01-01").

        Raises:
            UserError: The task samples (`do_sample`, or a temperature above 0).
        """
        texts = [""] * len(requests)
        for max_new_tokens, indices in self._group_indices_by_token_limit(requests):
            requests_of_limit = [requests[index] for index in indices]
            texts_of_limit = self._generate_texts(requests_of_limit, max_new_tokens)
            for index, text in zip(indices, texts_of_limit, strict=True):
                texts[index] = text

        self._cache_texts(requests, texts)
        return texts

    def _cache_texts(self, requests: Sequence[Any], texts: Sequence[str]) -> None:
        """Let the harness remember the text that was generated for each request."""
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)

    def _group_indices_by_token_limit(self, requests: Sequence[Any]) -> list[tuple[int, list[int]]]:
        """Group the requests by their limit of tokens, since those with the same limit are generated together.

        Returns:
            For each limit, in ascending order, the limit and the indices of its requests.
        """
        indices_by_limit: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            _prompt, generation_options = request.args
            token_limit = self._choose_token_limit(generation_options)
            indices_by_limit.setdefault(token_limit, []).append(index)
        return sorted(indices_by_limit.items())

    def _generate_texts(self, requests: Sequence[Any], max_new_tokens: int) -> list[str]:
        """Return the generated text after each prompt, without calls, cut at the stop strings of its request."""
        prompts = [request.args[0] for request in requests]
        contexts = [_get_context(request.doc) for request in requests]
        generations = self._asking.generate_texts(prompts, contexts, max_new_tokens)

        texts = []
        for request, generation in zip(requests, generations, strict=True):
            generation_options = request.args[1]
            texts.append(_cut_at_stop_strings(generation.plain_text, generation_options))
        return texts

    def _choose_token_limit(self, generation_options: dict[str, Any]) -> int:
        """Return the most tokens that may be generated for a request.

        Raises:
            UserError: The request samples, that is, it draws tokens at random.
        """
        temperature = generation_options.get("temperature") or 0
        if generation_options.get("do_sample") or temperature > 0:
            raise UserError("decoding with tools is greedy; give the task do_sample=False and temperature=0")

        limit_of_task = generation_options.get("max_gen_toks") or generation_options.get("max_new_tokens")
        return int(limit_of_task or self._max_new_tokens)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Compute the log probability of each continuation, and whether greedy decoding without calls writes it.

        A context that does not fit loses its beginning.

        Args:
            requests: Objects of the harness. Their `args` are a context and a continuation.
            disable_tqdm: Not used.

        Returns:
            For each request, log p of the continuation in nats, and whether each of its tokens is the likeliest.
        """
        return [self._score_continuation(*request.args) for request in requests]

    def _score_continuation(self, context: str, continuation: str) -> tuple[float, bool]:
        """Compute the log probability of a continuation of a text.

        A text that exceeds the model's context loses its beginning.

        Returns:
            log p of the continuation in nats, and whether greedy decoding would write it. (0, True) without any tokens.
        """
        encoding = self._language_model.encoding
        # Both are tokenized as one text, whose last tokens then are the continuation's.
        context_tokens, all_tokens = encoding.encode_texts([context, context + continuation])
        continuation_length = len(all_tokens.token_ids) - len(context_tokens.token_ids)

        input_ids = [*encoding.bos_ids, *all_tokens.token_ids]
        scored_token_count = min(continuation_length, len(input_ids) - 1)  # nothing predicts the first token
        if scored_token_count < 1:
            return 0.0, True

        last_input_ids = input_ids[-self._language_model.context_length :]
        return self._score_last_tokens(last_input_ids, scored_token_count)

    @torch.no_grad()
    def _score_last_tokens(self, input_ids: list[int], scored_token_count: int) -> tuple[float, bool]:
        """Compute the log probability of the last tokens of a text.

        Returns:
            log p of the last `scored_token_count` tokens in nats, and whether each of them is the likeliest.
        """
        inputs = torch.tensor([input_ids], device=self._language_model.device)  # [1, tokens]
        all_logits = self._language_model.model(inputs, use_cache=False).logits[0]  # [tokens, vocabulary]

        # The logits at a token predict the next one.
        scoring_logits = all_logits[-scored_token_count - 1 : -1].float()
        scored_ids = inputs[0, -scored_token_count:]

        all_log_p = scoring_logits.log_softmax(-1)  # [scored tokens, vocabulary]
        scored_log_p = all_log_p.gather(-1, scored_ids[:, None])
        is_greedy = (scoring_logits.argmax(-1) == scored_ids).all()
        return float(scored_log_p.double().sum()), bool(is_greedy)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log p of each text in nats, or 0 for a text with nothing to predict.

        The first token of a text is only predicted if the model has a token BOS, which stands before it. A long text is
        read in windows, as for perplexity.
        """
        log_p_by_text = []
        for request in requests:
            text = request.args[0]
            try:
                perplexity = compute_perplexity(self._language_model, [text], disable_calls=False)
            except ValueError:  # nothing to predict
                log_p_by_text.append(0.0)
            else:
                log_p_by_text.append(-perplexity.total_nats)
        return log_p_by_text


def harness_task(benchmark: Benchmark, name: str, max_new_tokens: int) -> dict[str, Any]:
    """Define a task of lm-evaluation-harness from a benchmark, for `simple_evaluate(tasks=[...])`.

    The metric of the task is `acc`.

    Args:
        benchmark: The benchmark.
        name: The name of the task.
        max_new_tokens: The limit of tokens per answer.

    Returns:
        The configuration of the task. Its functions take a document: a question, as `_build_documents` gives it.

    Raises:
        UserError: The benchmark judges calls, but the harness only sees texts without calls.
    """
    if benchmark.requires_no_call or benchmark.max_function_calls:
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
        "metric_list": [{"metric": METRIC_NAME, "aggregation": "mean", "higher_is_better": True}],
        "metadata": {},
    }


def _judge_document(benchmark: Benchmark, document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Judge the text that was generated for a question: {"acc": 1.0} if it is right, {"acc": 0.0} otherwise."""
    is_right = benchmark.is_correct(results[0], document["answers"])
    return {METRIC_NAME: float(is_right)}


def _build_documents(benchmark: Benchmark) -> Dataset:
    """Return the questions of a benchmark as the harness's data set, with the columns prompt, answers and context."""
    documents = []
    for question in benchmark.questions:
        document = {
            "prompt": question.prompt,
            "answers": list(question.right_answers),
            "context": question.context,
        }
        documents.append(document)
    return Dataset.from_list(documents)


def _get_context(document: dict[str, Any] | None) -> str:
    """Return the context of a task's document, such as a date. It is empty if there is no document or no context."""
    if not document:
        return ""
    return str(document.get("context") or "")


def _cut_at_stop_strings(text: str, generation_options: dict[str, Any]) -> str:
    """Return the beginning of a text up to the first stop string of the task.

    Args:
        text: The text.
        generation_options: Options of the harness. `until` is a stop string or a list of them, and may be missing.
    """
    stop_strings = generation_options.get("until") or []
    if isinstance(stop_strings, str):
        stop_strings = [stop_strings]

    for stop_string in stop_strings:
        if stop_string:
            text, _, _ = text.partition(stop_string)
    return text


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
