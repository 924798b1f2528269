"""Decode texts greedily with tools: top-k trigger, at most one call per input by default (paper, section 4.2)."""

from collections.abc import Sequence
from math import ceil

from toolformer_dag.decoding.generation import Generation
from toolformer_dag.decoding.open_calls import run_open_calls
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.token_choice import write_tokens
from toolformer_dag.decoding.written_text import TextState, WrittenText
from toolformer_dag.model.backend import Backend
from toolformer_dag.model.engine import backend_of
from toolformer_dag.model.memory import batches

BATCH_TOKENS = 16_384
"""The most tokens of a batch: those of its longest text times the number of texts."""


def generate(
    rules: DecodingRules,
    prompts: Sequence[str],
    contexts: Sequence[str] | None = None,
    *,
    backend: Backend | None = None,
) -> list[Generation]:
    """Continue each prompt greedily, with calls to tools, and return a `Generation` for each (paper, section 4.2).

    - A call starts where ` [` is among the k most likely next tokens, but neither after the last of the calls that
      the rules allow nor where p is below every tool's `min_probability`. Calls have text between them, but for up to
      `depth` that follow each other: after a call the next one starts where ` [` is the likeliest token.
    - A call that stands in the text with its result is not repeated: the text goes on without it.
    - Where p of ` [` is below a tool's `min_probability`, a call to it ends after its name, and the text goes on
      without it.
    - After ` [`, a token is permitted only if the text can still become `Name(input) ->`, with the name of a tool that
      is not withheld. At the limit of tokens an open call ends where `)` was likeliest in its input, if it was among
      the k most likely tokens there; else it has no result.
    - At `->` in the text, the row leaves its batch. The calls of all rows run together. Then e(c, r), tokenized as in
      C*, replaces the open call, and decoding continues.
    - A call without a result is taken back: C* holds none. Within `calls`, the same place calls the next likeliest
      tool, each once. Where none answers, the text ends there, and the last of its calls has the reason.
    - Where tools are offered (`offer`), only those that the text before a place fits best may be called there, and none
      where it shares no word with any.
    - A look-alike of a call, such as `<QA(`, is not written: the text goes on before its bracket, without one there.
    - After a call, `->` and closing brackets that nothing opened are not written: they would end an invented call.

    `contexts` are ISO dates for the calendar. `backend` runs the model; by default its own (`backend_of`).
    """
    if backend is None:
        backend = backend_of(rules.language_model)
    texts = _texts(rules, prompts, contexts or [""] * len(prompts))
    while not all(text.has_ended for text in texts):
        for batch in _batches(backend, [text for text in texts if text.state is TextState.READY]):
            # 1. Prefill.
            running = backend.greedy([text.tokens_to_prefill() for text in batch])
            for text in batch:
                text.start_writing()
            # 2. Choose a token of each text, and 3. of each open call, until all have left the batch.
            while batch:
                batch = write_tokens(running, batch)
        # 4. Run the calls for which texts wait.
        waiting = [text for text in texts if text.state is TextState.WAITING]
        answers = run_open_calls(waiting, rules)
        # 5. Go on after them.
        for text, call in zip(waiting, answers, strict=True):
            text.go_on(text.accepted(call))
    return [text.generation() for text in texts]


def _texts(rules: DecodingRules, prompts: Sequence[str], contexts: Sequence[str]) -> list[WrittenText]:
    """Return a `WrittenText` for each prompt, with nothing written yet after its tokens (and BOS, if the model has it).

    contexts: for each prompt, what its tools get beside their input, such as the date.
    """
    encoding = rules.language_model.encoding
    texts = []
    for index, encoded in enumerate(encoding.texts(prompts)):
        prompt_tokens = encoding.bos + encoded.ids
        texts.append(WrittenText(rules, prompt_tokens, prompt=index, context=contexts[index]))
    return texts


def _batches(backend: Backend, texts: Sequence[WrittenText]) -> list[list[WrittenText]]:
    """Split texts into batches for the model, with texts of similar length together; this changes no result.

    A batch has at most `backend.greedy_rows` texts and, in the sum of `_counted_length`, at most BATCH_TOKENS tokens.
    """
    by_length = sorted(texts, key=lambda text: len(text.tokens_to_prefill()))
    counted_lengths = [_counted_length(text, backend) for text in by_length]
    batches_of_texts = []
    for indices in batches(range(len(by_length)), counted_lengths, BATCH_TOKENS):
        batches_of_texts.append([by_length[index] for index in indices])
    return batches_of_texts


def _counted_length(text: WrittenText, backend: Backend) -> int:
    """Return how many of the BATCH_TOKENS tokens of a batch a text takes: the tokens that it may grow to.

    It counts as at least BATCH_TOKENS / `greedy_rows` tokens, so that no batch gets more than `greedy_rows` texts. A
    text that may outgrow the model's context counts as a whole batch: in a batch of several, rows are padded to the
    longest, and the padding could exceed the context.
    """
    if text.most_tokens > backend.context_length:
        return BATCH_TOKENS
    return max(text.most_tokens, ceil(BATCH_TOKENS / backend.greedy_rows))
