"""Write a conversation as the tokens that a model reads, and say which of them the assistant wrote.

A rendering is a chat template: the model's own where it writes calls and results, else ChatML with Hermes' marks, else
plain lines. What stands before a call, around the weighted words and these words are tokenized apart, so that the words
have the same tokens whatever result stands before them.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.traces.conversations import RecordedCall, RecordedMessage, to_openai

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
"""ChatML, the results in a user's message, as Hermes' models were trained."""
PLAIN = (
    "{%- for m in messages %}{{ '\nResult' if m.role == 'tool' else '\n' + m.role.capitalize() }}:"
    "{{ ' ' + m.content if m.content else '' }}"
    "{%- for c in m.tool_calls or [] %} [{{ c.function.name }}({{ c.function.arguments | tojson }})]{% endfor %}"
    "{%- endfor %}{{ '\nAssistant:' if add_generation_prompt else '' }}"
)
"""Lines for a model that knows no chat."""
WORD = "\ue000"
"""What no template writes: after it stands how a message of the assistant ends."""
TRIAL = (
    RecordedMessage("user", "How warm is it in Alba, and in Benton?"),
    RecordedMessage("assistant", "I look.", (RecordedCall("warmth", {"town": "Alba"}, result="17 degrees"),)),
    RecordedMessage("assistant", "", (RecordedCall("warmth", {"town": "Benton"}, result="23 degrees"),)),
    RecordedMessage("assistant", "17 and 23."),
    RecordedMessage("user", "Thanks."),
)
WRITTEN = ("warmth", '"Alba"', "17 degrees", '"Benton"', "23 degrees")
"""What a template for tools writes of TRIAL."""


class RenderingError(UserError):
    """A template that cannot write conversations with calls so that the assistant's words can be told apart."""


class Rendering:
    """A chat template with a tokenizer. `name`: template, hermes or plain."""

    def __init__(self, name: str, template: str, tokenizer: Any) -> None:
        self.name, self.template, self._tokenizer = name, template, tokenizer
        self.fingerprint = fingerprint({"template": template})
        self.ids = lru_cache(4096)(self._ids)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": WORD}]
        self._end = self._text(turns).partition(WORD)[2]

    def render(self, messages: Sequence[RecordedMessage], at: int, weighted: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens before message `at`, and behind it, in turn, what is not weighted and what is.

        They end with the words of the last of the `weighted` messages. Raises RenderingError where a message changes
        what the template wrote before it.
        """
        numbered = list(to_openai(messages))
        written = [one for _, one in numbered]
        starts = {number: index for index, (number, _) in reversed(list(enumerate(numbered)))}
        whole = self._text(written[: starts[max(weighted)] + 1])
        cuts = [0, len(self._stable(written[: starts[at]], whole)) if at else 0]
        for number in weighted:
            begun = len(self._stable(written[: starts[number]], whole, add_generation_prompt=True))
            ended = self._stable(written[: starts[number] + 1], whole).removesuffix(self._end)
            cuts += [begun, max(begun, len(ended))]
        return [self.ids(whole[begin:end]) for begin, end in pairwise(cuts)]

    def _stable(self, messages: Sequence[dict[str, Any]], whole: str, **options: bool) -> str:
        text = self._text(messages, **options)
        if not whole.startswith(text):
            raise RenderingError(f"the template {self.name} writes earlier messages otherwise once others follow")
        return text

    def _text(self, messages: Sequence[dict[str, Any]], **options: bool) -> str:
        """Write messages; a special token in a content is broken by a space, so that it ends no message."""
        shown = [{**one, "content": self._harmless(one["content"])} for one in messages]
        always = {"tokenize": False, "chat_template": self.template, "date_string": "26 Jul 2024"}  # no day of today's
        try:
            return str(self._tokenizer.apply_chat_template(shown, **always, **options))
        except Exception as error:  # templates raise what they like
            raise RenderingError(f"the template {self.name} refuses a conversation: {error}") from error

    def _harmless(self, text: str) -> str:
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def rendering_of(wanted: str, encoding: "Encoding") -> Rendering:
    """Return the rendering that the settings name; of `auto` the first that fits: template, hermes, plain.

    Raises RenderingError where the model has no template, or one that does not write calls and results.
    """
    tokenizer, reason = encoding.tokenizer, "the model has no chat template"
    own = tokenizer.chat_template
    templates = {"template": own.get("tool_use") if isinstance(own, dict) else own, "hermes": HERMES, "plain": PLAIN}
    if wanted == "auto" and "<|im_start|>" not in tokenizer.get_vocab():
        del templates["hermes"]
    for name, template in templates.items():
        if template and wanted in ("auto", name):
            try:
                return _tried(Rendering(name, template, tokenizer), tokenizer)
            except RenderingError as error:
                reason = str(error)
    raise RenderingError(f'traces.rendering = "{wanted}": {reason}; set it to "hermes" or "plain"')


def _tried(rendering: Rendering, tokenizer: Any) -> Rendering:
    """Return a rendering that has written a conversation of two calls. Raises RenderingError."""
    pieces = [tokenizer.decode(piece) for piece in rendering.render(TRIAL, 1, [2, 3])]
    text = "".join(pieces)
    if not all(word in text for word in WRITTEN) or '"Benton"' not in pieces[2] or "17 and 23" not in pieces[4]:
        raise RenderingError(f"the template {rendering.name} does not write calls and their results")
    return rendering
