"""How many operations of torch a layer takes: on a GPU, small steps wait for the host that issues them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, GPTJConfig, LlamaConfig

from toolformer_dag.model.attention import create_tensor
from toolformer_dag.model.backbone import Backbone
from toolformer_dag.model.loading import fuse_activations
from toolformer_dag.model.memory import TokenBudget
from toolformer_dag.model.prefixes import CachedPrefixes
from toolformer_dag.model.shared_keys import CachedBranches, CachedPrompt
from toolformer_dag.model.sharing import SHARED_KEYS, Sharing

VIEWS = (
    *(
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "empty",
        "empty_like",
        "expand",
        "flatten",
    ),
    *(
        "mT",
        "narrow",
        "permute",
        "result_type",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
    ),
    *("unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex", "expand_as", "resolve_conj"),
)
"""Operations that only describe a tensor anew, and the allocations."""
MADE_OF_OTHERS = (
    *("_to_copy", "clone", "contiguous", "dropout", "gelu", "index_put_", "layer_norm", "linear", "matmul", "numpy_T"),
    *("repeat_interleave", "reshape", "scaled_dot_product_attention", "softmax", "stack", "to", "where"),
)
"""Operations whose work is done by those inside them."""


def llama(layers: int) -> Any:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(vocab_size=64, num_hidden_layers=layers, max_position_embeddings=128, **sizes)


def gptj(layers: int) -> Any:
    return GPTJConfig(vocab_size=64, n_positions=128, n_embd=32, n_layer=layers, n_head=4, rotary_dim=4)


def operations(work: Callable[[], object]) -> Counter[str]:
    """Count what the work asks of torch, without views."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    found = Counter[str]()
    waiting = [event for event in profiled.events() if event.cpu_parent is None]
    while waiting:
        event = waiting.pop()
        name = event.name.removeprefix("aten::")
        if name in MADE_OF_OTHERS or not event.name.startswith("aten::"):
            waiting += event.cpu_children
        elif name not in VIEWS:
            found[name] += 1
    return found


def samples(backbone: Backbone) -> CachedBranches:
    """Branches of three texts in disorder, after a common prompt."""
    texts = CachedPrompt(backbone, range(1, 30)).create_text_cache(slot_count=3, max_text_tokens=9)
    texts.run_texts([0, 1, 2], [range(1, 10), range(1, 8), range(1, 9)], 0)
    branches = texts.create_branch_cache(max_branches=6, max_tokens=8)
    branches.start_branches([0, 2, 1, 0, 2, 0], [8, 3, 5, 7, 6, 2])
    return branches


def greedy_rows(backbone: Backbone) -> CachedBranches:
    rows = Sharing(SHARED_KEYS).create_branch_cache(backbone)
    assert isinstance(rows, CachedBranches)
    rows.add_sequences([range(1, length) for length in (9, 14, 6)])
    return rows


def a_step(start: Callable[[Backbone], CachedBranches]) -> Callable[[Backbone], Counter[str]]:
    def counted(backbone: Backbone) -> Counter[str]:
        branches = start(backbone)
        tokens = create_tensor([7] * len(branches.branches), backbone.device)
        branches.run_next_tokens(tokens)
        return operations(lambda: branches.run_next_tokens(tokens))

    return counted


def losses(backbone: Backbone) -> Counter[str]:
    prefixes = CachedPrefixes(backbone, [[1, 2, 3, last] for last in range(4, 8)], 64)
    texts: Sequence[Sequence[int]] = [range(1, 12), range(1, 10), range(1, 9), range(1, 12)]
    return operations(lambda: prefixes.run_texts(range(4), texts))


@pytest.mark.parametrize(
    ("config", "counted", "most"),
    [
        pytest.param(gptj, a_step(samples), 29, id="gptj-samples"),
        pytest.param(gptj, a_step(greedy_rows), 25, id="gptj-greedy"),
        pytest.param(gptj, losses, 16, id="gptj-losses"),
        pytest.param(llama, a_step(samples), 53, id="llama-samples"),
        pytest.param(llama, a_step(greedy_rows), 48, id="llama-greedy"),
    ],
)
@torch.inference_mode()
def test_a_layer_takes_few_operations(
    config: Callable[[int], Any], counted: Callable[[Backbone], Counter[str]], most: int
) -> None:
    found = []
    for layers in (1, 3):
        model = AutoModelForCausalLM.from_config(config(layers)).eval()
        fuse_activations(model)
        found.append(counted(Backbone(model, TokenBudget(256))))
    more = found[1] - found[0]
    assert more.total() <= 2 * most, more
