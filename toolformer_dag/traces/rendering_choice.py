"""Choose the rendering for a model: the chat template with which conversations are written as text.

It is the model's own template if that writes calls; else ChatML with Hermes' marks for calls, for models that know
ChatML; else plain lines.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, to_openai
from toolformer_dag.traces.rendering import VARIABLES, Rendering, RenderingError
from toolformer_dag.traces.template_trial import find_template_fault
from toolformer_dag.traces.written_conversation import WrittenConversation

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

HERMES = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '' if loop.first and not m.content else '\n' }}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{%- endif %}{{ '\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""ChatML with results in a user's message, the format in which the Hermes models were trained."""
PLAIN = (
    "{%- for m in messages %}{{ '\nResult' if m.role == 'tool' else '\n' + m.role.capitalize() }}:"
    "{{ ' ' + m.content if m.content else '' }}"
    "{%- for c in m.tool_calls or [] %} [{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}"
    "{%- endfor %}{{ '\nAssistant:' if add_generation_prompt else '' }}"
)
"""Lines for a model that knows no chat."""
TRIAL = (
    RecordedMessage("user", "How warm is it in Alba, and in Benton?"),
    RecordedMessage("assistant", "I look.", (RecordedCall("warmth", {"town": "Alba"}, result="17 degrees"),)),
    RecordedMessage("assistant", "", (RecordedCall("warmth", {"town": "Benton"}, result="23 degrees"),)),
    RecordedMessage("assistant", "17 and 23."),
    RecordedMessage("user", "Thanks."),
)
"""A conversation that a template must be able to write."""
TRIAL_WORDS = ("warmth", '"Alba"', "17 degrees", '"Benton"', "23 degrees")
"""Words of its calls and results that must occur in the text."""


def choose_rendering(setting: str, encoding: "Encoding") -> Rendering:
    """Return the rendering (a chat template with a tokenizer) for the value of the setting `traces.rendering`.

    The value is "template", "hermes", "plain" or "auto", which takes the first of the three that writes a short trial
    conversation. Raises RenderingError if the model has no template, or if the template loses calls and results, or
    takes too long or too much memory.
    """
    last_failure = "the model has no chat template"
    for name, template in _list_templates(setting, encoding.tokenizer).items():
        try:
            if name == "template":  # the model's own; it may loop for ever
                _require_end(template, encoding.tokenizer)
            rendering = Rendering(name, template, encoding.tokenizer)
            _try_rendering(rendering, encoding.tokenizer)
        except RenderingError as error:
            last_failure = str(error)
        else:
            return rendering
    raise RenderingError(f'traces.rendering = "{setting}": {last_failure}; set it to "hermes" or "plain"')


def _list_templates(setting: str, tokenizer: Any) -> dict[str, str]:
    """Return the templates to try, by the name of their rendering, in order of preference.

    "auto" tries the model's own template, "hermes" if the model has a token <|im_start|>, and "plain".
    """
    templates = {}
    model_template = _find_model_template(tokenizer)
    if model_template and setting in ("auto", "template"):
        templates["template"] = model_template
    knows_chatml = "<|im_start|>" in tokenizer.get_vocab()
    if setting == "hermes" or (setting == "auto" and knows_chatml):
        templates["hermes"] = HERMES
    if setting in ("auto", "plain"):
        templates["plain"] = PLAIN
    return templates


def _find_model_template(tokenizer: Any) -> str | None:
    """Return the chat template of a model; of several by name the one for tools. None if it has none."""
    template: str | dict[str, str] | None = tokenizer.chat_template
    return template.get("tool_use") if isinstance(template, dict) else template


def _require_end(template: str, tokenizer: Any) -> None:
    """Raise RenderingError if the model's template takes too long or too much memory for the trial conversation.

    It is rendered in another process, which is ended then.
    """
    messages = [message for _, message in to_openai(TRIAL)]
    fault = find_template_fault(template, messages, {**tokenizer.special_tokens_map, **VARIABLES})
    if fault is not None:
        raise RenderingError(f"the chat template of the model {tokenizer.name_or_path} is not used: {fault}")


def _try_rendering(rendering: Rendering, tokenizer: Any) -> None:
    """Write the trial conversation, cut around its first call. Raises RenderingError if the text lacks its calls."""
    pieces = WrittenConversation.of(rendering, TRIAL).pieces(1, [2, 3])
    # Encoded and decoded again, since a tokenizer may lack characters.
    texts = [tokenizer.decode(rendering.ids(text)) for text in pieces.texts]
    written = "".join(texts)
    has_all_words = all(word in written for word in TRIAL_WORDS)
    if not has_all_words or not _has_words_in_order(texts):
        raise RenderingError(f"the template {rendering.name} does not write calls and their results")


def _has_words_in_order(texts: Sequence[str]) -> bool:
    """Return whether the second call of the trial and its answer are where they belong. texts: of its pieces."""
    second_call, _, answer = texts[2:]  # after the first call and its result
    return '"Benton"' in second_call and "17 and 23" in answer
