"""Write recorded messages with a chat template, as text and as tokens of a model.

`rendering_choice` says which template is used; `written_conversation` cuts the text around a call.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from toolformer_dag.conversations.messages import RecordedMessage, iter_indexed_openai_messages
from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint

TemplateMessage = dict[str, Any]
"""A message as chat templates get it: `role`, `content`, perhaps `tool_calls`. A result is a message of its own."""
PLACEHOLDER = "\ue000"
"""A character that no template writes. In place of the assistant's words it shows what a template writes after them."""
MAX_CACHED_TEXTS = 4096
"""How many tokenized texts, such as results, are cached."""
CHARACTERS_PER_TOKEN = 16
"""How many characters are tokenized for each wanted token; most tokens have fewer."""
TEMPLATE_VARIABLES = {"date_string": "26 Jul 2024"}
"""What templates get besides the messages: a fixed date, since some write the date of today."""


class RenderingError(UserError):
    """Raised for a template that cannot write calls, or in whose text the assistant's words cannot be found."""


class Rendering:
    """A chat template with a tokenizer.

    Attributes:
        name: "template" (the model's own), "hermes" or "plain".
        template: its source, in Jinja.
        fingerprint: a hash of the source.
        text_after_answer: the text that the template writes after the words of the assistant, as "<|im_end|>\\n".
        encode_text: a function that returns the token ids of a text, without special tokens around them. It caches
            MAX_CACHED_TEXTS texts.
    """

    def __init__(self, name: str, template: str, tokenizer: Any) -> None:
        self.name = name
        self.template = template
        self.fingerprint = fingerprint({"template": template})
        self.encode_text = lru_cache(MAX_CACHED_TEXTS)(self._encode_text_uncached)
        self._tokenizer = tokenizer
        self._special_tokens = [str(token) for token in tokenizer.all_special_tokens]
        self.text_after_answer = self._find_text_after_answer()

    def _find_text_after_answer(self) -> str:
        """Find the text that the template writes after the words of the assistant, such as "<|im_end|>\\n".

        Raises:
            RenderingError: The template refuses a question and an answer.
        """
        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": PLACEHOLDER}
        text = self.render_text([question, answer])
        _, _, text_after_answer = text.partition(PLACEHOLDER)
        return text_after_answer

    def render_text(self, messages: Sequence[TemplateMessage], generation_prompt: bool = False) -> str:
        """Return messages as the template writes them, as text.

        Args:
            messages: The messages as templates get them.
            generation_prompt: Whether the text ends with the beginning of an answer, such as
                "<|im_start|>assistant\\n".

        Raises:
            RenderingError: The template refuses the messages.
        """
        options: dict[str, Any] = {"chat_template": self.template, "tokenize": False, **TEMPLATE_VARIABLES}
        if generation_prompt:
            options["add_generation_prompt"] = True

        try:
            return str(self._tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # templates raise what they like
            raise RenderingError(f"the template {self.name} refuses a conversation: {error}") from error

    def build_template_messages(self, message: RecordedMessage) -> list[TemplateMessage]:
        """Return a message as templates get it: its dict in OpenAI's form, then one for each result of its calls.

        Special tokens in a content are broken up, "<|im_end|>" as "< |im_end|>", so that what somebody wrote ends no
        message.
        """
        template_messages = []
        for _, openai_message in iter_indexed_openai_messages([message]):  # the index is always 0
            content = self._break_special_tokens(openai_message["content"])
            template_messages.append({**openai_message, "content": content})
        return template_messages

    def encode_last_tokens(self, text: str, token_count: int) -> tuple[int, ...]:
        """Return the ids of the last `token_count` tokens of a text, or of all if it has fewer.

        Only the end of a long text is tokenized, from a special token such as <|im_start|> on: tokenizers cut a text
        there first, so the tokens after it are the same as in the whole text.
        """
        character_count = token_count * CHARACTERS_PER_TOKEN  # a guess at how much text holds so many tokens
        while character_count < len(text):
            latest_start = len(text) - character_count
            start = self._find_last_special_token(text, end_index=latest_start)
            if start is None:
                break  # the whole text is tokenized

            ids_of_end = self._encode_text_uncached(text[start:])
            if len(ids_of_end) >= token_count:
                return _select_last_token_ids(ids_of_end, token_count)
            character_count *= 2  # there were too few tokens
        return _select_last_token_ids(self._encode_text_uncached(text), token_count)

    def _find_last_special_token(self, text: str, end_index: int) -> int | None:
        """Return where the last special token in `text[:end_index]` begins.

        Returns:
            The offset, or None if there is no special token, or none but one at the very beginning.
        """
        starts = [text.rfind(token, 0, end_index) for token in self._special_tokens]  # -1 if a token does not occur
        last_start = max(starts, default=-1)
        return last_start if last_start > 0 else None

    def _break_special_tokens(self, text: str) -> str:
        """Return a text with a space in each special token, as "< |im_end|>" for "<|im_end|>"."""
        for token in self._special_tokens:
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _encode_text_uncached(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without special tokens around them. Nothing is cached."""
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return tuple(encoded.input_ids)


def _select_last_token_ids(token_ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the last `count` ids, or all if there are fewer."""
    first_index = max(0, len(token_ids) - count)
    return token_ids[first_index:]
