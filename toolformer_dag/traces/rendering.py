"""Write a conversation as the tokens that a model reads, and say which of them the assistant wrote.

A rendering is a chat template: the model's own where it writes calls and results, else ChatML with Hermes' marks, else
plain lines. What stands before a call, around the weighted words and these words are tokenized apart, so that the words
have the same tokens whatever result stands before them.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage, to_openai
from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.traces.template_trial import template_fault

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


Turn = dict[str, Any]
"""A message as a chat template gets it: role, content, perhaps calls. A result is one of its own."""
QUESTION: Sequence[Turn] = ({"role": "user", "content": "?"},)
"""What stands before a message that is rendered alone."""
TEXTS_REMEMBERED = 4096
"""Texts, such as results, that are not tokenized twice."""
BEGINNINGS_REMEMBERED = 32
"""Beginnings of a conversation that are not rendered twice: its calls are judged in their order."""
LONG_TOKEN = 16
"""Characters of a long token, with which it is estimated how much of a text is tokenized."""
VARIABLES = {"date_string": "26 Jul 2024"}
"""What templates get beside the conversation: no day of today's."""


class RenderingError(UserError):
    """A template that cannot write conversations with calls so that the assistant's words can be told apart."""


class Rendering:
    """A chat template with a tokenizer. `name`: template, hermes or plain."""

    def __init__(self, name: str, template: str, tokenizer: Any) -> None:
        self.name = name
        self.template = template
        self._tokenizer = tokenizer
        self._special_tokens = [str(token) for token in tokenizer.all_special_tokens]
        self.fingerprint = fingerprint({"template": template})
        self.ids = lru_cache(TEXTS_REMEMBERED)(self._ids)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": WORD}]
        self.end = self.text(turns).partition(WORD)[2]
        """What stands behind the words of a message of the assistant."""

    def render(self, messages: Sequence[RecordedMessage], at: int, weighted: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the tokens before message `at`, and behind it, in turn, what is not weighted and what is.

        They end with the words of the last of the `weighted` messages. Raises RenderingError where a message changes
        what the template wrote before it.
        """
        pieces = WrittenConversation.of(self, messages).pieces(at, weighted)
        return [self.ids(text) for text in pieces.texts]

    def text(self, turns: Sequence[Turn], generation: bool = False) -> str:
        """Return turns as the template writes them. `generation`: with the beginning of a message of the assistant.

        Raises RenderingError.
        """
        always = {"tokenize": False, "chat_template": self.template, **VARIABLES}
        if generation:
            always["add_generation_prompt"] = True
        try:
            return str(self._tokenizer.apply_chat_template(list(turns), **always))
        except Exception as error:  # templates raise what they like
            raise RenderingError(f"the template {self.name} refuses a conversation: {error}") from error

    def turns(self, message: RecordedMessage) -> list[Turn]:
        """Return a message as the template gets it: a turn, and one for each of its results.

        A special token in a content is broken by a space, so that it ends no message.
        """
        return [{**turn, "content": self._harmless(turn["content"])} for _, turn in to_openai([message])]

    def last_ids(self, text: str, most: int) -> tuple[int, ...]:
        """Return the last `most` tokens of a text, or all where it has fewer.

        Of a long text no more is tokenized than what follows a special token far enough before its end: text on the two
        sides of a special token is tokenized apart anyway.
        """
        characters = most * LONG_TOKEN
        while characters < len(text):
            start = self._last_special_token(text, before=len(text) - characters)
            if start is None:
                break
            ids = self._ids(text[start:])
            if len(ids) >= most:
                return ids[len(ids) - most :]
            characters *= 2
        ids = self._ids(text)
        return ids[max(0, len(ids) - most) :]

    def _last_special_token(self, text: str, before: int) -> int | None:
        """Return where the last special token begins whose beginning is before this character; None without one."""
        starts = [text.rfind(token, 0, before) for token in self._special_tokens]
        start = max(starts, default=-1)
        return start if start > 0 else None

    def _harmless(self, text: str) -> str:
        for token in self._special_tokens:
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


class Pieces(NamedTuple):
    """The text of a conversation, cut around a call and around the words that are weighted.

    - `before`: what stands before the message with the call
    - `after_call`: from that message to the first weighted words
    - `words`: the weighted words of a message and, in turn, what stands between them and those of the next
    - `rest`: what ends the last message behind its words; no variant reads it
    """

    before: str
    after_call: str
    words: tuple[str, ...]
    rest: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The pieces that are read, in their order."""
        return (self.before, self.after_call, *self.words)


class WrittenConversation:
    """A conversation as a rendering writes it, cut around its calls.

    The beginnings of the conversation are rendered once, whichever of its calls asks for them: each is remembered until
    BEGINNINGS_REMEMBERED others were rendered.
    """

    def __init__(self, rendering: Rendering, turns_of_messages: Sequence[Sequence[Turn]]) -> None:
        self._rendering = rendering
        self._turns_of_messages = turns_of_messages
        self._turns: list[Turn] = []
        self._first_turn: list[int] = []
        """The number of each message's first turn; the results of its calls are the turns behind that."""
        for turns in turns_of_messages:
            self._first_turn.append(len(self._turns))
            self._turns += turns
        self._beginning = lru_cache(BEGINNINGS_REMEMBERED)(self._rendered_beginning)

    @staticmethod
    def of(rendering: Rendering, messages: Sequence[RecordedMessage]) -> "WrittenConversation":
        """Return a conversation of these messages."""
        return WrittenConversation(rendering, [rendering.turns(message) for message in messages])

    def with_message(self, at: int, changed: Sequence[RecordedMessage]) -> "WrittenConversation":
        """Return the conversation with another message, or none, in the place of message `at`."""
        turns = [self._rendering.turns(message) for message in changed]
        before = self._turns_of_messages[:at]
        behind = self._turns_of_messages[at + 1 :]
        return WrittenConversation(self._rendering, [*before, *turns, *behind])

    def pieces(self, at: int, weighted: Sequence[int]) -> Pieces:
        """Return the text, cut around message `at` and the words of the `weighted` messages, with which it ends.

        Raises RenderingError where a message changes what the template wrote before it.
        """
        end = self._first_turn[weighted[-1]] + 1
        whole = self._beginning(end)
        cuts = [len(self._stable(self._first_turn[at], whole)) if at else 0]
        for number in weighted:
            turn = self._first_turn[number]
            begun = len(self._stable(turn, whole, generation=True))
            ended = self._stable(turn + 1, whole).removesuffix(self._rendering.end)
            cuts += [begun, max(begun, len(ended))]
        parts = [whole[begin:end] for begin, end in pairwise([0, *cuts])]
        return Pieces(before=parts[0], after_call=parts[1], words=tuple(parts[2:]), rest=whole[cuts[-1] :])

    def pieces_like(self, other: Pieces, at: int, weighted: Sequence[int]) -> Pieces:
        """Return the same as `pieces`; one rendering is enough where only the text around message `at` differs.

        other: the pieces of a conversation that differs from this one in message `at` alone. Raises RenderingError.
        """
        whole = self._beginning(self._first_turn[weighted[-1]] + 1)
        ending = "".join(other.words) + other.rest
        is_long_enough = len(whole) >= len(other.before) + len(ending)
        if is_long_enough and whole.startswith(other.before) and whole.endswith(ending):
            return other._replace(after_call=whole[len(other.before) : len(whole) - len(ending)])
        return self.pieces(at, weighted)

    def with_other_results(
        self, recorded: Pieces, at: int, changed: Sequence[RecordedMessage], weighted: Sequence[int]
    ) -> list[Pieces] | None:
        """Return the pieces of the conversations in which message `at` is another: a call of it has another result.

        recorded: the pieces of the conversation as it is. changed: the other messages.

        Only the part around the message is rendered, alone behind a question. None where the template does not write
        the message as it is in the same way there as in the whole conversation.
        """
        turns = self._turns[self._first_turn[at] : self._first_turn[weighted[0]]]
        try:
            question = self._rendering.text(QUESTION)
            if self._after(question, turns) != recorded.after_call:
                return None
            others = []
            for message in changed:
                changed_turns = self._rendering.turns(message)
                after_call = self._after(question, [*changed_turns, *turns[len(changed_turns) :]])
                others.append(recorded._replace(after_call=after_call))
        except RenderingError:
            return None
        return others

    def _after(self, question: str, turns: Sequence[Turn]) -> str:
        """Return what the template writes of turns behind a question, with the beginning of the next message."""
        text = self._rendering.text([*QUESTION, *turns], generation=True)
        if not text.startswith(question):
            raise RenderingError("the template writes a question otherwise once others follow")
        return text[len(question) :]

    def _stable(self, turns: int, whole: str, generation: bool = False) -> str:
        """Return the text of the first turns, with which `whole` must begin. Raises RenderingError."""
        text = self._beginning(turns, generation)
        if not whole.startswith(text):
            raise RenderingError(
                f"the template {self._rendering.name} writes earlier messages otherwise once others follow"
            )
        return text

    def _rendered_beginning(self, turns: int, generation: bool = False) -> str:
        return self._rendering.text(self._turns[:turns], generation)


def rendering_of(wanted: str, encoding: "Encoding") -> Rendering:
    """Return the rendering that the settings name; of `auto` the first that fits: template, hermes, plain.

    Raises RenderingError where the model has no template, or one that does not write calls and results, or that takes
    too long or too much memory in a trial.
    """
    tokenizer, reason = encoding.tokenizer, "the model has no chat template"
    own = tokenizer.chat_template
    templates = {"template": own.get("tool_use") if isinstance(own, dict) else own, "hermes": HERMES, "plain": PLAIN}
    if wanted == "auto" and "<|im_start|>" not in tokenizer.get_vocab():
        del templates["hermes"]
    for name, template in templates.items():
        if template and wanted in ("auto", name):
            try:
                if name == "template":
                    _require_end(template, tokenizer)
                return _tried(Rendering(name, template, tokenizer), tokenizer)
            except RenderingError as error:
                reason = str(error)
    raise RenderingError(f'traces.rendering = "{wanted}": {reason}; set it to "hermes" or "plain"')


def _require_end(template: str, tokenizer: Any) -> None:
    """Render the model's template over TRIAL in another process. Raises RenderingError where it meets a limit there."""
    turns = [turn for _, turn in to_openai(TRIAL)]
    fault = template_fault(template, turns, {**tokenizer.special_tokens_map, **VARIABLES})
    if fault is not None:
        raise RenderingError(f"the chat template of the model {tokenizer.name_or_path} is not used: {fault}")


def _tried(rendering: Rendering, tokenizer: Any) -> Rendering:
    """Return a rendering that has written a conversation of two calls. Raises RenderingError."""
    pieces = [tokenizer.decode(piece) for piece in rendering.render(TRIAL, 1, [2, 3])]
    text = "".join(pieces)
    if not all(word in text for word in WRITTEN) or '"Benton"' not in pieces[2] or "17 and 23" not in pieces[4]:
        raise RenderingError(f"the template {rendering.name} does not write calls and their results")
    return rendering
