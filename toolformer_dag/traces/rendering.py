"""Write recorded messages with a chat template, as text and as tokens of a model.

`rendering_choice` says which template is used; `written_conversation` cuts the text around a call.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from toolformer_dag.conversations.messages import RecordedMessage, to_openai
from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint

TemplateMessage = dict[str, Any]
"""A message as chat templates get it: `role`, `content`, perhaps `tool_calls`. A result is a message of its own."""
PLACEHOLDER = "\ue000"
"""A character that no template writes. In place of the assistant's words it shows what a template writes after them."""
REMEMBERED_TEXTS = 4096
"""How many tokenized texts, such as results, are cached."""
CHARACTERS_PER_TOKEN = 16
"""How many characters are tokenized for each wanted token; most tokens have fewer."""
VARIABLES = {"date_string": "26 Jul 2024"}
"""What templates get besides the messages: a fixed date, since some write the date of today."""


class RenderingError(UserError):
    """Raised for a template that cannot write calls, or in whose text the assistant's words cannot be found."""


class Rendering:
    """A chat template with a tokenizer.

    Attributes:
        name: "template" (the model's own), "hermes" or "plain".
        template: its source, in Jinja.
        fingerprint: a hash of the source.
        end: the text that the template writes after the words of the assistant, as "<|im_end|>\\n".
        ids: a function that returns the token ids of a text, without special tokens around them. It caches
            REMEMBERED_TEXTS texts.
    """

    def __init__(self, name: str, template: str, tokenizer: Any) -> None:
        self.name = name
        self.template = template
        self.fingerprint = fingerprint({"template": template})
        self.ids = lru_cache(REMEMBERED_TEXTS)(self._encode_text)
        self._tokenizer = tokenizer
        self._special_tokens = [str(token) for token in tokenizer.all_special_tokens]
        self.end = self._find_text_after_words()

    def _find_text_after_words(self) -> str:
        """Return the text that the template writes after the words of the assistant. Raises RenderingError."""
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": PLACEHOLDER}
        _, _, end = self.text([question, answer]).partition(PLACEHOLDER)
        return end

    def text(self, messages: Sequence[TemplateMessage], generation_prompt: bool = False) -> str:
        """Return messages as the template writes them, as text.

        generation_prompt: whether to end with the beginning of the next message of the assistant, as
        "<|im_start|>assistant\\n". Raises RenderingError if the template refuses the messages.
        """
        options: dict[str, Any] = {"chat_template": self.template, "tokenize": False, **VARIABLES}
        if generation_prompt:
            options["add_generation_prompt"] = True
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # templates raise what they like
            raise RenderingError(f"the template {self.name} refuses a conversation: {error}") from error

    def template_messages(self, message: RecordedMessage) -> list[TemplateMessage]:
        """Return a message as templates get it: its dict in OpenAI's form, then one for each result of its calls.

        Special tokens in a content are broken up, "<|im_end|>" as "< |im_end|>", so that what somebody wrote ends no
        message.
        """
        template_messages = []
        for _, openai_message in to_openai([message]):  # each comes with the index of `message`, which is 0
            content = self._without_special_tokens(openai_message["content"])
            template_messages.append({**openai_message, "content": content})
        return template_messages

    def encode_last_tokens(self, text: str, count: int) -> tuple[int, ...]:
        """Return the ids of the last `count` tokens of a text, or of all if it has fewer.

        Only the end of a long text is tokenized, from a special token such as <|im_start|> on: tokenizers cut a text
        there first, so the tokens after it are the same as in the whole text.
        """
        characters = count * CHARACTERS_PER_TOKEN  # a guess at how much text holds so many tokens
        while characters < len(text):
            latest_start = len(text) - characters
            start = self._find_last_special_token(text, before=latest_start)
            if start is None:
                break  # the whole text is tokenized
            ids_of_end = self._encode_text(text[start:])
            if len(ids_of_end) >= count:
                return _select_last_ids(ids_of_end, count)
            characters *= 2  # there were too few tokens
        return _select_last_ids(self._encode_text(text), count)

    def _find_last_special_token(self, text: str, before: int) -> int | None:
        """Return where the last special token in `text[:before]` begins; None if there is none."""
        starts = [text.rfind(token, 0, before) for token in self._special_tokens]
        start = max(starts, default=-1)
        return start if start > 0 else None

    def _without_special_tokens(self, text: str) -> str:
        """Return a text with a space in each special token, as "< |im_end|>" for "<|im_end|>"."""
        for token in self._special_tokens:
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without special tokens around them; nothing is cached."""
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _select_last_ids(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the last `count` ids, or all if there are fewer."""
    return ids[max(0, len(ids) - count) :]
