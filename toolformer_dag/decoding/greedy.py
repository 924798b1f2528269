"""Decode texts greedily with tools: top-k trigger, at most one call per input by default (paper, section 4.2).

Where calls begin:

- A call begins if ` [` is among the k likeliest next tokens, unless the limit on calls is reached, or p of ` [` is
  below the minimum of every tool (`min_start_probability_by_tool`). Calls have text between them. Only in a chain, up
  to `max_chain_calls` calls directly follow each other: after a call the next one begins if ` [` is the likeliest
  token.
- With `choose_offered_tools`, only the tools that fit the text best may be called, and none if no tool shares a word
  with it.
- Text that only looks like a call, such as `<QA(`, is removed from its bracket on, and the text goes on without a
  bracket there.

How a call is written:

- After ` [`, a token is permitted only if the text can still become `Name(input) ->`, with a tool that may be
  called. If p of ` [` is below the minimum of this tool, the call is removed after its name.
- At the limit of tokens, a call is cut where `)` was likeliest in its input, if it was among the k likeliest tokens
  there; else it has no result.

What follows a call:

- A text whose call is complete leaves its batch, and the calls of all texts run together. Then e(c, r), the call
  with its result, tokenized as in C*, replaces the call, and decoding continues.
- A call without a result is removed, for C* has none. At the same position the next likeliest tool is called, each
  once. If none answers, the text ends there, and its last call has the reason.
- A call that is already in the text with its result is not repeated: the text goes on without it.
- After a call, `->` and closing brackets that nothing opened are not written: they would end an invented call.
"""

from collections.abc import Sequence
from math import ceil

from toolformer_dag.decoding.generation import Generation
from toolformer_dag.decoding.open_calls import run_open_calls
from toolformer_dag.decoding.rules import DecodingRules
from toolformer_dag.decoding.token_choice import write_next_tokens
from toolformer_dag.decoding.written_text import TextState, WrittenText
from toolformer_dag.model.backend import Backend
from toolformer_dag.model.engine import get_backend
from toolformer_dag.model.memory import iter_batches

MAX_BATCH_TOKENS = 16_384
"""The maximum size of a batch in tokens: the length of its longest text times the number of texts."""


def generate(
    rules: DecodingRules,
    prompts: Sequence[str],
    contexts: Sequence[str] | None = None,
    *,
    backend: Backend | None = None,
) -> list[Generation]:
    """Continue each prompt with the likeliest tokens, and let the model call tools on the way.

    This is decoding as in section 4.2 of the paper. The module docstring says where calls begin, how they are written,
    and what follows them.

    Args:
        rules: Says which tools may be called, where calls may begin, and what ends a text.
        prompts: The texts to continue.
        contexts: For each prompt an ISO date, which the calendar gets.
        backend: Runs the model. By default this is the model's own backend.

    Returns:
        One result per prompt, in the same order.
    """
    if backend is None:
        backend = get_backend(rules.language_model)
    if not contexts:
        contexts = [""] * len(prompts)

    texts = _start_texts(rules, prompts, contexts)

    while not all(text.has_ended for text in texts):
        ready_texts = _select_texts_in_state(texts, TextState.READY)
        for batch in _split_into_batches(backend, ready_texts):
            _write_until_calls(backend, batch)

        waiting_texts = _select_texts_in_state(texts, TextState.WAITING)
        _run_and_continue_calls(waiting_texts, rules)

    return [text.build_generation() for text in texts]


def _select_texts_in_state(texts: Sequence[WrittenText], state: TextState) -> list[WrittenText]:
    """Return the texts that are in a state, in order."""
    return [text for text in texts if text.state is state]


def _write_until_calls(backend: Backend, texts: list[WrittenText]) -> None:
    """Write a batch of texts until the model can write none of them any further.

    Each text has then ended, waits for the result of a tool, or must be read by the model again.
    """
    batch = backend.start_greedy_rows([text.get_tokens_to_prefill() for text in texts])
    for text in texts:
        text.start_writing()

    # Each round writes a token in each text and returns the texts that go on. The others leave the batch.
    while texts:
        texts = write_next_tokens(batch, texts)


def _run_and_continue_calls(texts: Sequence[WrittenText], rules: DecodingRules) -> None:
    """Run the call for which each text waits, and let the texts go on after it."""
    answered_calls = run_open_calls(texts, rules)
    for text, call in zip(texts, answered_calls, strict=True):
        text.continue_after_call(text.drop_repeated_result(call))


def _start_texts(rules: DecodingRules, prompts: Sequence[str], contexts: Sequence[str]) -> list[WrittenText]:
    """Start a text for each prompt, with nothing written after the prompt yet.

    Args:
        rules: The rules of decoding, which all texts share.
        prompts: The prompts. A BOS token is put before each if the model has one.
        contexts: For each prompt, what its tools get in addition to their input, such as the date.
    """
    encoding = rules.language_model.encoding

    texts = []
    for index, encoded in enumerate(encoding.encode_texts(prompts)):
        prompt_tokens = encoding.bos_ids + encoded.token_ids
        text = WrittenText(rules, prompt_tokens, prompt_index=index, tool_context=contexts[index])
        texts.append(text)
    return texts


def _split_into_batches(backend: Backend, texts: Sequence[WrittenText]) -> list[list[WrittenText]]:
    """Split texts into batches for the model, with texts of similar length in the same batch.

    A batch has at most `backend.max_greedy_rows` texts, and at most MAX_BATCH_TOKENS tokens if all its texts grow as
    long as the longest one may. Only a batch with a single text may be larger. How texts are split changes no result.
    """
    texts_by_length = sorted(texts, key=lambda text: len(text.get_tokens_to_prefill()))
    # Each count is at least MAX_BATCH_TOKENS / `max_greedy_rows`, so that the limit of tokens also limits the texts.
    token_counts = [_count_reserved_tokens(text, backend) for text in texts_by_length]

    batches_of_texts = []
    for indices in iter_batches(range(len(texts_by_length)), token_counts, MAX_BATCH_TOKENS):
        batches_of_texts.append([texts_by_length[index] for index in indices])
    return batches_of_texts


def _count_reserved_tokens(text: WrittenText, backend: Backend) -> int:
    """Return how many of the MAX_BATCH_TOKENS tokens of a batch are reserved for a text.

    These are the tokens that it may grow to. A short text gets more, so that a batch is full before it has more than
    `backend.max_greedy_rows` texts.
    """
    # A text that may outgrow the context gets a batch of its own: others would be padded to it, beyond the context.
    if text.max_tokens_until_prefill > backend.context_length:
        return MAX_BATCH_TOKENS

    least_tokens = ceil(MAX_BATCH_TOKENS / backend.max_greedy_rows)
    return max(text.max_tokens_until_prefill, least_tokens)
