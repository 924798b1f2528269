"""What `ServiceBackend` asks of an engine beside transformers: token ids in; tokens and log p out. Imports no torch.

An engine is a module whose `load_service`, a `LoadService`, returns a `TokenService`. Its package, options and objects
stay there. The plainest service, a forward pass per token, is `PlainService` in tests/language_model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolformer_dag.settings.model_settings import ModelSettings

MAX_LIKELIEST_TOKENS = 64
"""The most tokens whose log p `TokenRequest.likeliest` asks for."""

Scores = dict[int, float]
"""log p in nats by token, of the model itself: neither temperature nor a restriction of the next token changes it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRequest:
    """A request to continue `prompt` by at most `most` tokens, at least one.

    The prompt is complete: BOS is in it where the model has one, and nothing is added to it.

    The next token is the likeliest one, unless `forced`, `uniforms`, `grammar` or `forbidden` decides otherwise. The
    numbers of the model in the answer depend on `likeliest`, `scored` and `reads_prompt`.

    No other combinations are sent than these, each with `prompt` and `most`:

    | for | fields |
    |---|---|
    | log p of a text's own tokens | `reads_prompt`; `most` is 1 |
    | log p of other tokens along a text, such as ` [` | `forced`, `scored` (or none: the forced ones alone) |
    | the likeliest tokens along a written call | `forced`, `likeliest` |
    | a sample | `uniforms`, `temperature`, `top_p`, `ends` |
    | the next tokens of an answer | `likeliest` |
    | the likeliest token that is not forbidden | `forbidden`; `most` is 1 |
    | a call | `grammar`, `ends` |

    Prompt and written tokens fit the model's context, but for the last of them, which the model predicts and need not
    read.

    Attributes:
        prompt: The tokens to continue.
        most: The maximum number of tokens to write.
        ends: The tokens after which the answer ends; such a token is part of the answer. EOS ends nothing unless it is
            among them.
        forced: The tokens to write, as many as `most`, whatever their log p. An engine may read them as a prompt
            instead, if it can give the scores from there on; the answer is the same.
        uniforms: Random numbers in [0, 1), as many as `most`, one per token; a token is the first whose cumulative
            probability, under `temperature` and `top_p`, exceeds its number. It is summed in the order of the token
            ids, as `draw_next_tokens` of model/drawing.py does: of [0.2, 0.5, 0.3] the number 0.6 draws token 1.
        temperature: Divides the logits before a token is drawn by `uniforms`.
        top_p: The probability of the likeliest tokens from which a token is drawn by `uniforms`.
        grammar: An llguidance grammar in the syntax of Lark, to which all that is written keeps. Once it is complete,
            only EOS may follow, which is in `ends`. An engine that does not know llguidance can mask by its `LLMatcher`
            over the model's tokenizer.
        forbidden: Tokens that may not be written.
        likeliest: Log p of so many of the likeliest tokens, and of the written one, at each written place. If tokens
            are equally likely, any of them may be left out.
        scored: Log p of these tokens, and of the written one, at each written place. Where tokens are forced, there is
            at least that of the written one.
        reads_prompt: Log p of each token of the prompt. The token that is written after it is not used.
    """

    prompt: Sequence[int]
    most: int = 1
    ends: Sequence[int] = ()
    forced: Sequence[int] = ()
    uniforms: NDArray[np.float64] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    grammar: str | None = None
    forbidden: Collection[int] = ()
    likeliest: int = 0
    scored: Sequence[int] = ()
    reads_prompt: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenAnswer:
    """The answer to a `TokenRequest`.

    Attributes:
        tokens: The written tokens.
        scores: The requested log p at each of them, before it is written, or nothing if none were requested.
        prompt: Log p of each token of the prompt, NaN for the first, or nothing if they were not requested.
        ran: How many tokens went through the model for it, without those whose keys the engine had cached.
    """

    tokens: list[int]
    ran: int
    scores: Sequence[Scores] = ()
    prompt: Sequence[float] = ()


class TokenService(Protocol):
    """An engine that continues token ids.

    Promises: numbers are those of a sequence alone, but for rounding; neither batches nor what is cached change them.
    Memory and processes that it holds are given back when nothing refers to it. Its processes end with this one, which
    may be killed or end without tidying up (`end_with_parent` of processes.py).

    Attributes:
        library: Its name and version, such as `vllm 0.32.0`. Records of tables name it.
        dtype: The data type that it computes in, such as `bfloat16`.
        vocabulary: The number of the model's logits. Every token of the tokenizer that a text may hold is below it.
    """

    library: str
    dtype: str
    vocabulary: int

    def run(self, requests: Sequence[TokenRequest]) -> list[TokenAnswer]:
        """Answer requests in their order, with as many in flight as the engine has room for.

        It is never called by two threads at once.

        Args:
            requests: At least one request. They may differ in kind.

        Raises:
            ModelError: A request fails. No request is answered then.
        """


class LoadService(Protocol):
    """The function `load_service` of an engine's module, which `EngineKind.service_module` names."""

    def __call__(self, model: ModelSettings, dtype: str, config: Any, context_length: int) -> TokenService:
        """Load a model into the engine in this process, or connect to the servers at `model.url` that run it.

        Without `url` it runs on the first `model.gpus_per_model` of the GPUs that this process sees. For a checkpoint,
        `model.name` is its folder, and `url` is empty.

        Before it reads files, it calls `check_model_is_undamaged` of model/weights.py.

        Args:
            model: The settings. An engine has to follow these: the name `resolve_model_name(model)`, `revision`,
                `quantization`, `trust_remote_code`, `url`, and the engine's own options, such as `model.vllm`.
            dtype: The data type, such as "bfloat16", or "auto" for the data type of the checkpoint.
            config: The model's config in transformers.
            context_length: The maximum number of tokens in a sequence.

        Raises:
            ModelError: An option is unknown, or the engine or a server cannot run the model. The message has a remedy.
            DamagedModel: A file of the model is damaged.
        """
