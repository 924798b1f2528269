"""Calls after calls in decoding: as many as the depth allows, and none twice."""

from collections.abc import Mapping

import pytest

from tests.decoded import generate
from tests.decoding.conftest import teach
from tests.decoding.test_generate import TOOLS
from tests.tiny_models import tiny_model, tokenizer_of
from toolformer_dag.model.loading import LanguageModel

TWO = " [Calculator(3 + 4) -> 7] [Calculator(7 + 1) -> 8]"
SCRIPTS: Mapping[str, str] = {
    "Two steps, and": f"{TWO} 8 in all.",
    "The same again, and": " [Calculator(2 + 2) -> 4] [Calculator(2 + 2) -> 4] four.",
    "It fails, and": " [Calculator(5 + 5) -> 10] [Calculator(x) -> 1] ten.",
}


@pytest.fixture(scope="module")
def chaining(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return teach(tiny_model("GPT-2", tokenizer_of("merged")), SCRIPTS, 80, tmp_path_factory.mktemp("chains"))


def test_a_call_stands_behind_another_within_the_depth(chaining: LanguageModel) -> None:
    deep, single = (
        generate(chaining, ["Two steps, and"], TOOLS, max_new_tokens=6, max_chain_calls=depth)[0] for depth in (2, 1)
    )
    assert deep.text.startswith(TWO) and [call.result for call in deep.calls] == ["7", "8"]
    assert [call.result for call in single.calls] == ["7"] and " [" not in single.plain_text


@pytest.mark.parametrize(
    ("prompt", "reason"), [("The same again, and", "repeated_call"), ("It fails, and", "not_a_sum")]
)
def test_the_text_goes_on_where_the_second_call_gives_nothing(
    chaining: LanguageModel, prompt: str, reason: str
) -> None:
    [found] = generate(chaining, [prompt], TOOLS, max_new_tokens=6, max_chain_calls=2)
    assert [call.reason for call in found.calls] == [None, reason]
    assert found.text.count(" [") == 1 and found.plain_text.strip()
