"""Choose the rendering for a model: the chat template with which conversations are written as text.

It is the model's own template if that writes calls; else ChatML with Hermes' marks for calls, for models that know
ChatML; else plain lines.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, iter_indexed_openai_messages
from toolformer_dag.traces.rendering import TEMPLATE_VARIABLES, Rendering, RenderingError
from toolformer_dag.traces.template_trial import find_template_fault
from toolformer_dag.traces.written_conversation import WrittenConversation

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

HERMES_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '' if loop.first and not m.content else '\n' }}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{%- endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""ChatML with results in a user's message, the format in which the Hermes models were trained."""
PLAIN_TEMPLATE = (
    "{%- for m in messages %}{{ '\nResult' if m.role == 'tool' else '\n' + m.role.capitalize() }}:"
    "{{ ' ' + m.content if m.content else '' }}"
    "{%- for c in m.tool_calls or [] %} [{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}"
    "{%- endfor %}{{ '\nAssistant:' if add_generation_prompt else '' }}"
)
"""Lines for a model that knows no chat."""
TRIAL_MESSAGES = (
    RecordedMessage("user", "How warm is it in Alba, and in Benton?"),
    RecordedMessage("assistant", "I look.", (RecordedCall("warmth", {"town": "Alba"}, result="17 degrees"),)),
    RecordedMessage("assistant", "", (RecordedCall("warmth", {"town": "Benton"}, result="23 degrees"),)),
    RecordedMessage("assistant", "17 and 23."),
    RecordedMessage("user", "Thanks."),
)
"""A conversation that a template must be able to write."""
TRIAL_WORDS = ("warmth", '"Alba"', "17 degrees", '"Benton"', "23 degrees")
"""Words of its calls and results that must occur in the text."""


def choose_rendering(rendering_setting: str, encoding: "Encoding") -> Rendering:
    """Return the rendering (a chat template with a tokenizer) for the value of the setting `traces.rendering`.

    Args:
        rendering_setting: "template", "hermes", "plain", or "auto", which takes the first of the three that writes a
            short trial conversation.
        encoding: The tokenizer of the model.

    Raises:
        RenderingError: The model has no template, or the template loses calls and results, or it takes too long or too
            much memory.
    """
    last_failure = "the model has no chat template"
    for name, template in _list_templates_by_name(rendering_setting, encoding.tokenizer).items():
        try:
            if name == "template":  # the model's own; it may loop for ever
                _require_template_within_limits(template, encoding.tokenizer)
            rendering = Rendering(name, template, encoding.tokenizer)
            _require_rendered_calls(rendering, encoding.tokenizer)
        except RenderingError as error:
            last_failure = str(error)
        else:
            return rendering
    raise RenderingError(f'traces.rendering = "{rendering_setting}": {last_failure}; set it to "hermes" or "plain"')


def _list_templates_by_name(rendering_setting: str, tokenizer: Any) -> dict[str, str]:
    """Return the templates to try, by the name of their rendering, in order of preference.

    "auto" tries the model's own template, "hermes" if the model has a token <|im_start|>, and "plain".
    """
    template_by_name = {}

    model_template = _find_model_template(tokenizer)
    if model_template and rendering_setting in ("auto", "template"):
        template_by_name["template"] = model_template

    knows_chatml = "<|im_start|>" in tokenizer.get_vocab()
    if rendering_setting == "hermes" or (rendering_setting == "auto" and knows_chatml):
        template_by_name["hermes"] = HERMES_TEMPLATE

    if rendering_setting in ("auto", "plain"):
        template_by_name["plain"] = PLAIN_TEMPLATE
    return template_by_name


def _find_model_template(tokenizer: Any) -> str | None:
    """Return the chat template of a model, or None if it has none. Of several templates it is the one for tools."""
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        return template.get("tool_use")
    return template


def _require_template_within_limits(template: str, tokenizer: Any) -> None:
    """Check that the model's own template renders the trial conversation within limits of time and memory.

    A template is a program, which may loop for ever. So it is rendered in another process, which is ended then.

    Raises:
        RenderingError: The template takes too long or too much memory.
    """
    messages = [message for _, message in iter_indexed_openai_messages(TRIAL_MESSAGES)]
    variables = {**tokenizer.special_tokens_map, **TEMPLATE_VARIABLES}
    fault = find_template_fault(template, messages, variables)
    if fault is not None:
        raise RenderingError(f"the chat template of the model {tokenizer.name_or_path} is not used: {fault}")


def _require_rendered_calls(rendering: Rendering, tokenizer: Any) -> None:
    """Check that a rendering writes calls and results into the text of a conversation, by a trial.

    The trial conversation is cut into pieces, as recorded ones are later. Each word has to be in its own piece.

    Raises:
        RenderingError: The template refuses the conversation, or its text lacks calls or results.
    """
    conversation = WrittenConversation.from_recorded_messages(rendering, TRIAL_MESSAGES)
    # Message 1 has the first call, message 2 the second call, and message 3 the answer. The pieces are the text before
    # message 1, that from there to the words of message 2, these words, what is between, and the words of message 3.
    pieces = conversation.cut_around_unit(unit_message_index=1, weighted_message_indexes=[2, 3])

    # Encoded and decoded again, since a tokenizer may lack characters.
    piece_texts = [tokenizer.decode(rendering.encode_text(text)) for text in pieces.texts_without_ending]
    whole_text = "".join(piece_texts)
    has_all_words = all(word in whole_text for word in TRIAL_WORDS)
    if not has_all_words or not _has_words_in_order(piece_texts):
        raise RenderingError(f"the template {rendering.name} does not write calls and their results")


def _has_words_in_order(piece_texts: Sequence[str]) -> bool:
    """Return whether the second call of the trial conversation and its answer are in the pieces where they belong."""
    second_call, _, answer = piece_texts[2:]  # after the first call and its result
    return '"Benton"' in second_call and "17 and 23" in answer
