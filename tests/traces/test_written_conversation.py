"""The text of a conversation, cut around a call: put together from single messages, it is that of the whole."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.conftest import settings_at
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, remove_call, replace_result
from toolformer_dag.model.encoding import Encoding
from toolformer_dag.model.loading import load_encoding
from toolformer_dag.traces.rendering import Rendering, RenderingError, TemplateMessage
from toolformer_dag.traces.rendering_choice import HERMES_TEMPLATE, PLAIN_TEMPLATE
from toolformer_dag.traces.units import CallPosition, iter_call_positions
from toolformer_dag.traces.windows import WINDOWS_BY_NAME
from toolformer_dag.traces.written_conversation import Pieces, WrittenConversation

TEMPLATES = Path(__file__).parents[1] / "exports" / "templates"
FORGETFUL = (
    "{%- for m in messages %}<{{ m.role }}>"
    "{%- if m.role == 'tool' and messages | length - loop.index > 6 %}...{% else %}{{ m.content }}{% endif %}"
    "{%- for c in m.tool_calls or [] %} [{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}"
    "{%- endfor %}{{ '<assistant>' if add_generation_prompt else '' }}"
)
"""A template that leaves out results once more than six messages follow: it is not local in a long conversation."""


def templates() -> dict[str, str]:
    """Templates by name: of models, our own, and the forgetful one."""
    of_models = {name: (TEMPLATES / f"{name}.jinja").read_text("utf-8") for name in ("qwen", "llama3", "mistral")}
    return {**of_models, "hermes": HERMES_TEMPLATE, "plain": PLAIN_TEMPLATE, "forgetful": FORGETFUL}


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return load_encoding(settings_at(tmp_path_factory.mktemp("encoding")).model)


def cut_by_rendering_each_beginning(
    rendering: Rendering, messages: tuple[RecordedMessage, ...], call_message: int, weighted: list[int]
) -> Pieces | None:
    """The pieces, slowly: the whole conversation is rendered anew up to each cut. None where they do not fit."""

    def beginning(end: int, *, with_message: bool = False, generation_prompt: bool = False) -> str:
        written = [one for message in messages[:end] for one in rendering.build_template_messages(message)]
        if with_message:
            written.append(rendering.build_template_messages(messages[end])[0])
        return rendering.render_text(written, generation_prompt)

    try:
        text = beginning(weighted[-1], with_message=True)
        before = beginning(call_message) if call_message else ""
        beginnings = [before]
        cuts = [len(before)]
        for number in weighted:
            prompt = beginning(number, generation_prompt=True)
            words = beginning(number, with_message=True)
            beginnings += [prompt, words]
            cuts += [len(prompt), max(len(prompt), len(words.removesuffix(rendering.text_after_answer)))]
    except RenderingError:
        return None
    if not all(text.startswith(some) for some in beginnings):
        return None
    parts = [text[start:end] for start, end in pairwise([0, *cuts])]
    return Pieces(parts[0], parts[1], tuple(parts[2:]), text[cuts[-1] :])


def cut(
    rendering: Rendering, messages: tuple[RecordedMessage, ...], call_message: int, weighted: list[int]
) -> Pieces | None:
    """The pieces as they are cut by the product; None where it refuses the conversation."""
    try:
        return WrittenConversation.from_recorded_messages(rendering, messages).cut_around_unit(call_message, weighted)
    except RenderingError:
        return None


TEXTS = st.text(st.sampled_from('aä 1.\n"<>{}'), max_size=12)
CALLS = st.builds(
    RecordedCall,
    tool=st.sampled_from(["search", "warmth"]),
    arguments=st.dictionaries(st.sampled_from(["town", "day"]), TEXTS, max_size=2),
    result=st.none() | TEXTS,
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[RecordedMessage, ...]:
    """Messages in an order that is usual or odd: several of one role, calls of a user, none of the user at all."""
    messages = []
    for number in range(draw(st.integers(2, 9))):
        role = draw(st.sampled_from(["assistant", "assistant", "assistant", "user", "user", "system"]))
        calls = []
        if role != "system":
            for index, call in enumerate(draw(st.lists(CALLS, max_size=2))):
                calls.append(RecordedCall(call.tool, call.arguments, number=(number, index), result=call.result))
        messages.append(RecordedMessage(role, draw(TEXTS), tuple(calls)))
    return tuple(messages)


@pytest.mark.parametrize("name", list(templates()))
@settings(max_examples=60)
@given(messages=conversations(), data=st.data())
def test_pieces_are_those_of_the_whole_conversation(
    name: str, messages: tuple[RecordedMessage, ...], data: st.DataObject, encoding: Encoding
) -> None:
    rendering = Rendering(name, templates()[name], encoding.tokenizer)
    window = WINDOWS_BY_NAME[data.draw(st.sampled_from(sorted(WINDOWS_BY_NAME)))]
    written = WrittenConversation.from_recorded_messages(rendering, messages)
    for place in iter_call_positions(messages):
        weighted = window.list_weighted_message_indexes(messages, range(place.message_index + 1, len(messages)))
        if not weighted:
            continue
        expected = cut_by_rendering_each_beginning(rendering, messages, place.message_index, weighted)
        assert cut(rendering, messages, place.message_index, weighted) == expected
        has_result = messages[place.message_index].calls[place.call_index].result is not None
        if expected is not None and has_result:
            check_others(rendering, written, expected, messages, place, weighted)


def check_others(
    rendering: Rendering,
    written: WrittenConversation,
    recorded: Pieces,
    messages: tuple[RecordedMessage, ...],
    place: CallPosition,
    weighted: list[int],
) -> None:
    """A conversation with another result, or without the call, has the text that the template writes of the whole."""
    message = messages[place.message_index]
    others = [replace_result([message], 0, place.call_index, "-3 <b>"), remove_call([message], 0, place.call_index)]
    texts = []
    for other in others:
        whole = (*messages[: place.message_index], *other, *messages[place.message_index + 1 :])
        texts.append(text_up_to(rendering, whole, weighted[-1] + len(other) - 1))
    try:
        pieces = written.cut_other_conversations(recorded, place.message_index, others, weighted)
    except RenderingError:
        return
    for piece, text in zip(pieces, texts, strict=True):
        assert piece.word_texts == recorded.word_texts
        # A template that wants roles to alternate may refuse the whole without the call, and not the part around it.
        assert text in ("".join([*piece.texts_without_ending, piece.ending]), "refused")


def text_up_to(rendering: Rendering, messages: Sequence[RecordedMessage], last: int) -> str:
    """What the template writes of a conversation up to a message, without its results; "refused" where nothing."""
    written = [one for message in messages[:last] for one in rendering.build_template_messages(message)]
    written.append(rendering.build_template_messages(messages[last])[0])
    try:
        return rendering.render_text(written)
    except RenderingError:
        return "refused"


class CountingRendering(Rendering):
    """Counts the messages that it renders."""

    messages = 0

    def text(self, messages: Sequence[TemplateMessage], generation_prompt: bool = False) -> str:
        self.messages += len(messages)
        return super().render_text(messages, generation_prompt)


def messages_rendered(rendering: CountingRendering, turns: int) -> int:
    """How many messages are rendered until all calls of a conversation are cut, with and without their results."""
    messages = []
    for turn in range(turns):
        call = RecordedCall("warmth", {"town": turn}, number=(3 * turn + 1, 0), result=f"{turn} degrees")
        messages.append(RecordedMessage("user", f"How warm is it in town {turn}?"))
        messages.append(RecordedMessage("assistant", "", (call,)))
        messages.append(RecordedMessage("assistant", f"{turn} degrees."))
    rendering.messages = 0
    written = WrittenConversation.from_recorded_messages(rendering, messages)
    for place in iter_call_positions(messages):
        weighted = WINDOWS_BY_NAME["next_words"].list_weighted_message_indexes(
            messages, range(place.message_index + 1, len(messages))
        )
        recorded = written.cut_around_unit(place.message_index, weighted)
        message = messages[place.message_index]
        others = [replace_result([message], 0, 0, "-3"), remove_call([message], 0, 0)]
        written.cut_other_conversations(recorded, place.message_index, others, weighted)
    return rendering.messages


@pytest.mark.parametrize("name", ["qwen", "hermes", "plain"])
def test_twice_the_turns_are_rendered_at_twice_the_cost(name: str, encoding: Encoding) -> None:
    rendering = CountingRendering(name, templates()[name], encoding.tokenizer)
    growth = messages_rendered(rendering, turns=80) - messages_rendered(rendering, turns=40)
    assert growth == messages_rendered(rendering, turns=120) - messages_rendered(rendering, turns=80)
