"""Each form against what it promises: nothing of a text is lost, masks cover results, pairs are those of the losses."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from datasets import load_dataset
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conftest import make_llama_tokenizer, make_tiny_tokenizer
from tests.runs.conftest import World
from tests.tiny_models import tokenizer_of
from toolformer_dag.computing.plan import Plan
from toolformer_dag.exports.corpus_export import export_corpus
from toolformer_dag.exports.export_forms import (
    build_masked_form,
    build_preference_form,
    build_text_form,
    find_result_spans,
)
from toolformer_dag.exports.structured_forms import (
    USER_INSTRUCTION,
    build_chat_form,
    build_functions_form,
    iter_conversation_messages,
)
from toolformer_dag.lake.warehouse import open_warehouse
from toolformer_dag.method.corpus_texts import CorpusText, ScoredCall, iter_corpus_texts
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.texts.calls import (
    Call,
    PlacedCall,
    clean_result,
    has_call_to_tools,
    parse_placed_calls,
    remove_calls,
    splice,
)
from toolformer_dag.training.sequences import IGNORED_LABEL, build_examples

NAMES = ["Calculator", "QA"]
PIECES = [" [", "]", "QA(", "->", " ", "\n", "é", "e\u0301", "😀", "\u202e", "東", "x", "\x00", "1", " 12", "ﬁ"]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
VALUES = TEXTS.map(lambda text: clean_result(text, 40))


def scored(offset: int, name: str, given: str, result: str, **values: float) -> ScoredCall:
    losses = {"delta": 1.0, "loss_empty": 2.0, "loss_call": 2.5, "loss_result": 1.0, **values}
    return ScoredCall(name.lower(), name, "one", 0, offset, 0, offset, given, result, **losses)


def text_of(plain: str, calls: Sequence[ScoredCall], rivals: Sequence[ScoredCall] = ()) -> CorpusText:
    placed = [PlacedCall(call.offset, Call(call.name, call.input), call.result) for call in calls]
    return CorpusText("d", 0, "one", None, "train", splice(plain, placed), plain, tuple(calls), tuple(rivals))


@st.composite
def hostile_texts(draw: st.DrawFn) -> CorpusText:
    """A text that no tool refuses, with up to four calls, with whatever a result may hold."""
    plain = draw(TEXTS)
    assume(not has_call_to_tools(plain, NAMES) and plain)
    offsets = draw(st.lists(st.integers(0, len(plain) - 1), max_size=4, unique=True))
    calls = [scored(at, draw(st.sampled_from(NAMES)), draw(VALUES), draw(VALUES)) for at in sorted(offsets)]
    return text_of(plain, calls)


@given(hostile_texts())
def test_no_form_loses_a_character(text: CorpusText) -> None:
    [row] = build_text_form().iter_rows(text)
    assert remove_calls(row["text"], NAMES) == row["plain"] == text.text_without_calls
    assert [call.offset for call in parse_placed_calls(row["text"], NAMES)] == [call["offset"] for call in row["calls"]]
    for begin, end in find_result_spans(text):
        assert text.text_with_calls[end] == "]" and text.text_with_calls[begin - 4 : begin] == ") -> "[1:]
    assert [text.text_with_calls[begin:end] for begin, end in find_result_spans(text)] == [
        call.result for call in text.calls
    ]
    messages = list(iter_conversation_messages(text))
    spoken = [message["content"] for message in messages if message["role"] != "tool"]
    assert "".join(spoken) == USER_INSTRUCTION + text.text_without_calls
    asked = [one["function"]["arguments"] for message in messages for one in message.get("tool_calls", ())]
    assert asked == [{"input": call.input} for call in text.calls]
    assert [message["content"] for message in messages if message["role"] == "tool"] == [c.result for c in text.calls]


ENCODINGS = [
    Encoding(make_tiny_tokenizer(one_token_start=True, bos=True)),
    Encoding(make_tiny_tokenizer(one_token_start=False, bos=False)),
    Encoding(make_llama_tokenizer("first")),
    Encoding(tokenizer_of("bos")),  # as Gemma's: " [" merges with a name
]


@given(hostile_texts(), st.sampled_from(ENCODINGS), st.integers(16, 60))
def test_masked_tokens_are_those_of_the_text_and_labels_leave_out_results_alone(
    text: CorpusText, encoding: Encoding, length: int
) -> None:
    rows = list(build_masked_form(encoding, "tiny", sequence_length=length).iter_rows(text))
    [tokens] = encoding.encode_texts_with_calls([text.text_with_calls])
    ids = rows[0]["input_ids"] + [token for row in rows[1:] for token in row["input_ids"][1:]]
    labels = rows[0]["labels"] + [label for row in rows[1:] for label in row["labels"][1:]]
    assert ids == [*encoding.bos_ids, *tokens.token_ids, encoding.tokenizer.eos_token_id]
    assert all(label in (token, IGNORED_LABEL) for token, label in zip(ids, labels, strict=True))
    assert all(len(row["input_ids"]) == len(row["labels"]) == sum(row["attention_mask"]) <= length for row in rows)
    starts = tokens.offsets.tolist()
    ends = [max(end, start + 1) for start, end in zip(starts, [*starts[1:], len(text.text_with_calls)], strict=True)]
    held = {place for begin, end in find_result_spans(text) for place in range(begin, end)}
    for start, end, label in zip(starts, ends, labels[len(encoding.bos_ids) :], strict=False):
        assert (label == IGNORED_LABEL) == bool(
            held & set(range(start, end))
        )  # character by character: the obvious way


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_paper_s_example_masked_as_finetuning_cuts_it(encoding: Encoding) -> None:
    text = text_of(
        "there were 42 apples, so.", [scored(10, "Calculator", "17 + 25", "42"), scored(21, "QA", "so?", "7")]
    )
    [row] = build_masked_form(encoding, "tiny", sequence_length=1024).iter_rows(text)
    [[trained]] = build_examples(encoding, [text.text_with_calls], 1024).sequences
    assert row["input_ids"] == trained
    begins = [
        at for at in range(len(trained)) if trained[at : at + len(encoding.call_start_ids)] == encoding.call_start_ids
    ]
    assert len(begins) == 2
    assert row["labels"][-1] == trained[-1] == encoding.tokenizer.eos_token_id
    pairs = zip(trained[len(encoding.bos_ids) :], row["labels"][len(encoding.bos_ids) :], strict=True)
    kept = [token for token, label in pairs if label != IGNORED_LABEL]
    read = encoding.tokenizer.decode(kept[:-1])
    assert "".join(read.split()) == "therewere[Calculator(17+25)->]42apples,[QA(so?)->]so."
    if encoding is ENCODINGS[0]:  # the space before a result is a token of its own
        whole = "there were [Calculator(17 + 25) -> ] 42 apples, [QA(so?) -> ] so.<end>"
        assert encoding.tokenizer.decode(kept) == whole


def test_pairs_are_a_kept_call_against_a_rejected_one_and_no_call_against_one_that_hurts() -> None:
    kept = scored(5, "QA", "a?", "b")
    rivals = [
        scored(5, "QA", "c?", "d", delta=0.2, loss_result=2.2),  # rejected
        scored(5, "Calculator", "1", "2", delta=-3.0, loss_result=9.0),  # of another tool, where a call was kept
        scored(7, "QA", "e?", "f", delta=-2.0, loss_result=4.0),  # hurts by 2
        scored(8, "QA", "g?", "h", delta=-0.1, loss_result=2.1),  # hurts by less than tau_f
        scored(9, "QA", "i?", "j", delta=-1.0, loss_empty=4.0, loss_call=0.5, loss_result=1.5),  # better than no call
    ]
    text = text_of("He is in the house.", [kept], rivals)
    found = list(build_preference_form({"qa": 0.5, "calculator": 0.5}).iter_rows(text))
    assert [(row["kind"], row["margin"]) for row in found] == [("rejected_call", pytest.approx(1.2)), ("no_call", 2.0)]
    assert found[0]["prompt"] == "He is" and found[1]["prompt"] == "He is i"
    assert (
        found[0]["chosen"] == " [QA(a?) -> b] in the house." and found[0]["rejected"] == " [QA(c?) -> d] in the house."
    )
    assert found[1]["chosen"] == "n the house." and found[1]["rejected"] == " [QA(e?) -> f]n the house."
    assert found[1]["chosen_call"] is None and found[0]["chosen_call"]["delta"] == 1.0
    same = text_of("He is in the house.", [kept], [scored(5, "QA", "a?", "b", delta=0.2)])
    above = text_of("He is in the house.", [kept], [scored(5, "QA", "c?", "d", delta=0.9)])
    assert not list(build_preference_form({"qa": 0.5}).iter_rows(same)) + list(
        build_preference_form({"qa": 0.5}).iter_rows(above)
    )


def test_exported_pairs_are_those_that_sql_finds(exported_world: World, plan: Plan, tmp_path: Path) -> None:
    export_corpus(plan, tmp_path / "pairs", build_preference_form({lane.key: lane.tau_f for lane in plan.lanes}))
    rows = [row for split in load_dataset(str(tmp_path / "pairs")).values() for row in split]
    key = ("tool", "shard", "segment", "position", "sample")
    for kind in ("rejected_call", "no_call"):
        found = {(row["digest"], *(row["rejected_call"][k] for k in key)) for row in rows if row["kind"] == kind}
        exists = "" if kind == "rejected_call" else "NOT"
        same_tool = "AND k.tool = l.tool AND l.delta < 0.0 AND (k.input, k.result) <> (l.input, l.result)"
        hurts = "AND l.loss_result > l.loss_empty" if kind == "no_call" else ""
        expected = exported_world.sql(
            "WITH least AS (SELECT * FROM loss_deltas WHERE reason IS NULL "
            "QUALIFY row_number() OVER (PARTITION BY tool, digest, segment, position ORDER BY delta, sample) = 1), "
            "best AS (SELECT * FROM filtered_calls "
            "QUALIFY row_number() OVER (PARTITION BY digest, char_offset ORDER BY delta DESC, tool DESC) = 1) "
            "SELECT digest, tool, l.shard, l.segment, position, sample FROM least AS l "
            "WHERE EXISTS (SELECT 1 FROM augmented_corpus AS c WHERE c.digest = l.digest AND char_offset >= c.offset "
            f"AND char_offset < c.offset + length(c.text)) {hurts} AND {exists} EXISTS (SELECT 1 FROM best AS k "
            f"WHERE k.digest = l.digest AND k.char_offset = l.char_offset {same_tool if not exists else ''})"
        )
        assert found == set(expected)
        assert found, kind
    assert all(row["rejected"].endswith(row["chosen"][-1:]) for row in rows)


def test_chats_keep_objects_as_objects(plan: Plan, tmp_path: Path) -> None:
    made = export_corpus(plan, tmp_path / "chat", build_chat_form(plan.lanes, ENCODINGS[0]))
    assert "not filtered in this form" in (tmp_path / "chat" / "README.md").read_text("utf-8")
    names = {"calculator": "Calculator", "sums": "Search"}
    with open_warehouse(plan.settings.warehouse_file) as connection:
        texts = {(text.digest, text.segment): text for text in iter_corpus_texts(connection, names)}
    longest = 0
    for row in (row for split in load_dataset(str(tmp_path / "chat")).values() for row in split):
        messages = list(iter_conversation_messages(texts[row["digest"], row["segment"]]))
        assert row["messages"] == messages
        assert [tool["function"]["name"] for tool in row["tools"]] == ["Calculator", "Search"]
        described = [tool["function"]["description"] for tool in row["tools"]]
        assert described == ["Computes an arithmetic expression, such as 400 / 1400.", "Call."]
        parts = [json.dumps(part, ensure_ascii=False) for part in (*row["tools"], *messages)]
        count = ENCODINGS[0].tokenizer
        longest = max(longest, sum(len(count(part, add_special_tokens=False).input_ids) for part in parts))
    assert made.made_from["longest"] == longest > 0
    assert f"the longest has {longest:,} tokens" in (tmp_path / "chat" / "README.md").read_text()


def test_functions_have_a_row_per_call_with_the_tools_beside(plan: Plan, tmp_path: Path) -> None:
    export_corpus(plan, tmp_path / "functions", build_functions_form(plan.lanes))
    rows = [row for split in load_dataset(str(tmp_path / "functions")).values() for row in split]
    with open_warehouse(plan.settings.warehouse_file) as connection:
        calls = sum(len(text.calls) for text in iter_corpus_texts(connection, plan.tool_name_by_lane_key))
    assert len(rows) == calls > 0
    for row in rows:
        [call] = row["calls"]
        [answer] = json.loads(row["answers"])
        assert answer == {"name": call["name"], "arguments": {"input": call["input"]}}
        assert answer["name"] in {tool["name"] for tool in json.loads(row["tools"])}
        assert len(row["query"]) == call["offset"]


def test_named_arguments_are_objects_in_a_conversation() -> None:
    schema = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
    call = scored(3, "Weather", 'city="a] -> b", days=2', "sunny")
    text = CorpusText("d", 0, "one", None, "train", "", "It is so.", (call, scored(6, "QA", "x=?", "y")))
    messages = list(iter_conversation_messages(text, {"Weather": schema}))
    asked = [one["function"]["arguments"] for message in messages for one in message.get("tool_calls", ())]
    assert asked == [{"city": "a] -> b", "days": 2}, {"input": "x=?"}]
