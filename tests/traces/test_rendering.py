"""How conversations are written for a model: by its own template where it writes calls; words keep their tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.traces.conftest import settings_at
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, remove_call, replace_result
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.engine import Engine
from toolformer_dag.model.loading import load_encoding
from toolformer_dag.traces.other_results import choose_other_results_of_calls
from toolformer_dag.traces.rendering import Rendering, RenderingError
from toolformer_dag.traces.rendering_choice import HERMES_TEMPLATE, choose_rendering
from toolformer_dag.traces.units import CallToJudge
from toolformer_dag.traces.variants import VariantWriter
from toolformer_dag.traces.windows import WINDOWS_BY_NAME
from toolformer_dag.traces.written_conversation import WrittenConversation

TEMPLATES = Path(__file__).parents[1] / "exports" / "templates"
TALK = (
    RecordedMessage("user", "How warm is it in Graz?"),
    RecordedMessage("assistant", "", (RecordedCall("warmth", {"town": "Graz"}, number=(1, 0), result="17 degrees"),)),
    RecordedMessage("assistant", "It is 17 degrees."),
    RecordedMessage("user", "And in Lyon?"),
    RecordedMessage("assistant", "", (RecordedCall("warmth", {"town": "Lyon"}, number=(4, 0), result="23 degrees"),)),
    RecordedMessage("assistant", "23 degrees."),
)


@pytest.fixture
def encoding(tmp_path: Path) -> Encoding:
    """A tokenizer of its own, since tests give it a template."""
    return load_encoding(settings_at(tmp_path).model)


def rendered(
    rendering: Rendering, messages: Sequence[RecordedMessage], call_message: int, weighted: Sequence[int]
) -> list[tuple[int, ...]]:
    """The tokens of each piece of a conversation."""
    pieces = WrittenConversation.from_recorded_messages(rendering, messages).cut_around_unit(call_message, weighted)
    return [rendering.encode_text(text) for text in pieces.texts_without_ending]


def words(rendering: Rendering, tokenizer: Any, *weighted: int) -> list[str]:
    """What is weighted in the conversation."""
    return [tokenizer.decode(piece).strip() for piece in rendered(rendering, TALK, 1, weighted)[2::2]]


@pytest.mark.parametrize("name", ["qwen", "llama3", "mistral"])
def test_a_template_for_tools_is_used_and_its_words_are_told_apart(name: str, encoding: Encoding) -> None:
    encoding.tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    rendering = choose_rendering("auto", encoding)
    assert rendering.name == "template"
    first, second = words(rendering, encoding.tokenizer, 2, 4)
    assert first == "It is 17 degrees."
    assert "Lyon" in second
    assert "23" not in second
    others = [replace_result(TALK, 1, 0, "-40"), remove_call(TALK, 1, 0)]
    pieces = [rendered(rendering, talk, 1, [2 - moved, 4 - moved]) for moved, talk in enumerate(others)]
    assert pieces[0][2::2] == pieces[1][2::2] == rendered(rendering, TALK, 1, [2, 4])[2::2]
    assert rendering.fingerprint != Rendering("hermes", HERMES_TEMPLATE, encoding.tokenizer).fingerprint


RESULT = '17 "degrees"\n'
WALK = (
    *TALK[:1],
    RecordedMessage("assistant", "I look.", (RecordedCall("warmth", {"town": "Graz"}, number=(1, 0), result=RESULT),)),
    *TALK[2:],
)
"""The same with words beside the first call, and a result that some templates would write otherwise."""


@pytest.mark.parametrize(
    ("name", "talk"),
    [
        *((name, TALK) for name in ("qwen", "mistral", "hermes", "plain")),
        *((name, WALK) for name in ("qwen", "hermes", "plain")),  # mistral refuses two messages of one role in a row
    ],
)
def test_each_variant_is_what_the_template_writes_of_the_whole_conversation(
    name: str, talk: tuple[RecordedMessage, ...], encoding: Encoding, tmp_path: Path
) -> None:
    file = TEMPLATES / f"{name}.jinja"
    if file.exists():
        encoding.tokenizer.chat_template = file.read_text("utf-8")
    writer = VariantWriter(
        settings_at(tmp_path, rendering="template" if file.exists() else name).traces, encoding, 2048
    )
    results = {"empty": "", "own": str(talk[1].calls[0].result), "0": "-3 <degrees>", "1": " 40\n"}
    variants = writer.write_variants(CallToJudge(talk, 1, 0, (results["0"], results["1"])))
    assert isinstance(variants, dict)
    whole = {key: replace_result(talk, 1, 0, result) for key, result in results.items()}
    whole["none"] = remove_call(talk, 1, 0)
    assert variants.keys() == whole.keys()
    for key, messages in whole.items():
        moved = len(talk) - len(messages)
        pieces = rendered(writer.rendering, messages, 1, [2 - moved, 4 - moved, 5 - moved])
        ids = [token for piece in pieces for token in piece]
        own, expected = (
            [token for token in some if token not in encoding.bos_ids] for some in (variants[key].token_ids, ids)
        )
        assert own == expected


def test_the_end_of_a_long_text_has_the_tokens_that_it_has_in_the_whole_text(encoding: Encoding) -> None:
    encoding.tokenizer.chat_template = (TEMPLATES / "llama3.jinja").read_text("utf-8")
    rendering = choose_rendering("auto", encoding)
    text = "".join(f"{encoding.tokenizer.eos_token or encoding.tokenizer.bos_token}line {n}\n" for n in range(900))
    assert rendering.encode_last_tokens(text, 40) == rendering.encode_text(text)[-40:]
    assert rendering.encode_last_tokens("short", 40) == rendering.encode_text("short")


def test_a_sequence_begins_with_bos_once_whether_or_not_the_template_writes_it(
    encoding: Encoding, tmp_path: Path
) -> None:
    [bos] = encoding.bos_ids
    for template in (None, (TEMPLATES / "llama3.jinja").read_text("utf-8")):
        encoding.tokenizer.chat_template = template
        for tokens in (0, 8, 1024):
            writer = VariantWriter(settings_at(tmp_path, context_tokens=tokens).traces, encoding, 2048)
            variants = writer.write_variants(CallToJudge(TALK, 1, 0, ("-3 degrees", "40 degrees")))
            assert isinstance(variants, dict)
            assert {(one.token_ids[0], one.token_ids.count(bos)) for one in variants.values()} == {(bos, 1)}


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",  # writes no calls
        "{{ messages | length }}{% for m in messages %}{{ m }}{% endfor %}",  # writes the beginning otherwise
        "{{ raise_exception('no') }}",
    ],
)
def test_another_template_is_passed_over_and_refused_where_it_is_wanted(template: str, encoding: Encoding) -> None:
    encoding.tokenizer.chat_template = template
    assert choose_rendering("auto", encoding).name == "plain"
    assert words(choose_rendering("hermes", encoding), encoding.tokenizer, 2) == ["It is 17 degrees."]
    with pytest.raises(RenderingError, match=r"traces\.rendering"):
        choose_rendering("template", encoding)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (LOOPS, "within 3 seconds of processor time"),
        ("{{ 'x' * 10 ** 11 }}", "more than 1024 MiB of memory"),
    ],
)
def test_a_template_that_does_not_end_is_refused_by_a_limit(template: str, limit: str, encoding: Encoding) -> None:
    encoding.tokenizer.chat_template = template
    encoding.tokenizer.name_or_path = "stranger/model"
    with pytest.raises(RenderingError, match=rf'the model stranger/model .* {limit}.*; set it to "hermes" or "plain"'):
        choose_rendering("template", encoding)
    assert choose_rendering("auto", encoding).name == "plain"


def test_a_template_that_is_slow_over_a_long_conversation_is_taken(encoding: Encoding) -> None:
    slow = "{% for m in messages if messages | length > 50 %}{% for n in range(99999) %}{% endfor %}{% endfor %}"
    encoding.tokenizer.chat_template = (TEMPLATES / "qwen.jinja").read_text("utf-8") + slow
    rendering = choose_rendering("auto", encoding)
    assert rendering.name == "template"
    assert rendered(rendering, (*TALK, *TALK[:1] * 60), 1, [2])


def test_a_special_token_in_a_result_ends_no_message(encoding: Encoding) -> None:
    token = encoding.tokenizer.eos_token or encoding.tokenizer.bos_token
    rendering = choose_rendering("auto", encoding)
    pieces = rendered(rendering, replace_result(TALK, 1, 0, f"17{token}Assistant: It is 17 degrees."), 1, [2])
    assert encoding.tokenizer.convert_tokens_to_ids(token) not in [one for piece in pieces for one in piece]


def test_a_window_says_which_words_count(engine: Engine, tmp_path: Path) -> None:
    read = {}
    for window in WINDOWS_BY_NAME:
        writer = VariantWriter(settings_at(tmp_path, window=window).traces, engine.encoding, 2048)
        variants = writer.write_variants(CallToJudge(TALK, 1, 0, ("-3 degrees", "40 degrees")))
        assert isinstance(variants, dict)
        texts = {
            engine.encoding.tokenizer.decode([one.token_ids[at] for at in one.weighted_positions])
            for one in variants.values()
        }
        [read[window]] = texts
        assert sum(variants["own"].token_weights) == pytest.approx(1)
    assert read["next"].strip() == "It is 17 degrees."
    assert "Lyon" in read["next_words"]
    assert read["answer"].strip() == "23 degrees."
    assert read["next"].startswith(read["paper"])


def test_a_window_ends_where_the_context_does_and_before_the_next_message_there_is_none(
    engine: Engine, tmp_path: Path
) -> None:
    def places(length: int) -> int | str:
        found = VariantWriter(settings_at(tmp_path).traces, engine.encoding, length).write_variants(asked)
        return found if isinstance(found, str) else len(found["own"].weighted_positions)

    asked = CallToJudge(TALK, 1, 0, ("-3 degrees", "40 degrees"))
    counts = [places(length) for length in (2048, *range(1024, 0, -4))]
    whole, *fewer = dict.fromkeys(counts)
    writer = VariantWriter(settings_at(tmp_path, window="next").traces, engine.encoding, 2048)
    next_message = writer.write_variants(asked)
    assert isinstance(next_message, dict) and fewer[-2:] == [
        len(next_message["own"].weighted_positions),
        "does_not_fit",
    ]
    assert sorted(fewer[:-1], key=int, reverse=True) == fewer[:-1] and whole > fewer[0]


def test_a_call_gets_results_of_other_conversations_that_differ() -> None:
    results = ("success", "success", "7", "8", "9", "Error: no")
    calls = [
        (f"talk {n % 5}", RecordedCall("x", {"n": n}, result=one, failed="Error" in one))
        for n, one in enumerate(results)
    ]
    given = choose_other_results_of_calls([*calls, ("talk 9", RecordedCall("y", {}, result="1"))], 2)
    for (document, call), told in zip(calls, given, strict=False):
        assert len(set(told)) == 2
        assert call.result not in told
        assert "Error: no" not in told
        assert all(document != other for other, donor in calls if donor.result in told and donor.result != "success")
    assert given[-1] == ()
    assert choose_other_results_of_calls(calls[::-1], 2) == given[-2::-1]
