"""A prompt is checked before anything is annotated with it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.texts.calls import Call, format_call
from toolformer_dag.tools.prompts import ToolError, check_prompt

SOURCE = Path("prompts/qa.txt")
INSTRUCTION = 'Add calls to a QA API. Write "[QA(question)]". Here are some examples:\n'


def prompt(*examples: tuple[str, str]) -> str:
    return INSTRUCTION + "".join(f"Input: {text}\nOutput: {output}\n" for text, output in examples)


BIDEN = ("Joe Biden was born in Scranton.", 'Joe Biden was born in [QA("Where was Joe Biden born?")] Scranton.')
MT = ("il gatto is a cat.", "[QA(gatto)] il gatto is a cat.")


@pytest.mark.parametrize(
    "examples",
    [
        [("One [1].\n\nTwo [2].", "One [1].\n\nTwo [QA(x)] [2].")],
        [BIDEN, ("Nothing to ask.", "Nothing to ask.")],
    ],
    ids=["lines and brackets", "without a call"],
)
def test_what_may_stand_in_a_prompt(examples: list[tuple[str, str]]) -> None:
    check_prompt(prompt(*examples), "QA", SOURCE)


def test_inputs_and_outputs() -> None:
    assert check_prompt(prompt(BIDEN, MT), "QA", SOURCE) == [BIDEN, MT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no instruction"),
        ("Input: a\nOutput: [QA(x)] a\n", "no instruction"),
        (INSTRUCTION, "no example"),
        (INSTRUCTION + "Input: a\n", "example 1: write one"),
        (INSTRUCTION + "Input: a\nOutput: a\nOutput: a\n", "example 1: write one"),
        (INSTRUCTION + "Input:\nOutput: a\n", "example 1: write one"),
        (prompt(("a", "a")), r"no example holds a call; add calls as \[QA\(input\)\]"),
        (prompt(BIDEN, ("a b", "a [Search(x)] b")), "example 2: .*calls 'Search'.*name is 'QA'; rename"),
        (prompt(("a b", "a [QA(x -> y)] b")), "example 1: .*is not a call.*arrow_in_input"),
        (prompt(("a b", "a [QA(x]) b")), "example 1: .*is not a call"),
    ],
)
def test_what_cannot_teach_is_refused_with_its_place_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ToolError, match=rf"(?s)prompts/qa\.txt: .*{message}"):
        check_prompt(text, "QA", SOURCE)


@pytest.mark.parametrize(
    ("output", "reads", "other"),
    [("a [QA(x)] c", "c", "b"), ("a[QA(x)] b", "[QA(x)] b", " b"), ("[QA(x)] a [QA x] b", "[QA x] b", "b")],
)
def test_an_output_that_is_another_text_is_warned_of(
    caplog: pytest.LogCaptureFixture, output: str, reads: str, other: str
) -> None:
    check_prompt(prompt(BIDEN, ("a b", output)), "QA", SOURCE)
    [told] = caplog.messages
    difference = f"the Output reads {reads!r} where the Input reads {other!r}"
    assert told.startswith(f"prompts/qa.txt: example 2: without its calls {difference}")
    assert told.endswith("make both equal, with a single space before each call")


WORDS = st.lists(st.from_regex(r"[a-zäß,.\d]{1,8}", fullmatch=True), min_size=1, max_size=6)


@given(words=WORDS, at=st.integers(0, 6), asked=st.from_regex(r"[ \w\"'()*/%.,?-]{0,20}", fullmatch=True))
def test_any_call_put_before_a_word_passes(words: list[str], at: int, asked: str) -> None:
    at = min(at, len(words))
    if "->" in asked or asked.splitlines() not in ([], [asked]):
        return
    call = format_call(Call("QA", asked))
    output = " ".join(words[:at]) + call + "".join(f" {word}" for word in words[at:])
    check_prompt(prompt((" ".join(words), output.strip())), "QA", SOURCE)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        check_prompt(text, "QA", SOURCE)
    except ToolError as error:
        assert str(SOURCE) in str(error)
