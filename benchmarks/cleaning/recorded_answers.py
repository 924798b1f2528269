"""Calls whose result is followed by an answer, and which values of its result an answer repeats."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolformer_dag.conversations.messages import RecordedMessage, iter_indexed_openai_messages, replace_result
from toolformer_dag.conversations.reading import read_conversation
from toolformer_dag.traces.result_values import AFFIRMATION_WORDS, UNIT_KEYS, find_result_values

Conversation = tuple[RecordedMessage, ...]
LONGEST_VALUE = 60  # characters; a longer string is prose, which an answer rewords


@dataclass(frozen=True)
class RecordedAnswer:
    """A call that stands alone in its message and whose result is followed by an answer.

    `conversation`: its number. `turn`: number of the message with the call; the answer is the next one.
    """

    conversation: int
    turn: int
    messages: Conversation

    @property
    def place(self) -> tuple[int, int]:
        """Return the number of the conversation, and that of the message with the call."""
        return self.conversation, self.turn

    @property
    def tool(self) -> str:
        """Return the name of the tool."""
        return self.messages[self.turn].calls[0].tool

    @property
    def result(self) -> str:
        """Return the result of the call."""
        return self.messages[self.turn].calls[0].result or ""

    @property
    def answer(self) -> str:
        """Return what the assistant says next."""
        return self.messages[self.turn + 1].content

    @property
    def before(self) -> str:
        """Return what was said before the result: messages, and the arguments of the call."""
        said = [message.content for message in self.messages[: self.turn + 1]]
        return " ".join([*said, json.dumps(self.messages[self.turn].calls[0].arguments, ensure_ascii=False)])

    def repeated_values(self) -> list[str]:
        """Return the values of the result that the answer repeats and that nobody had said before."""
        repeated: list[str] = []
        for value in find_result_values(self.result):
            text = value.text.removesuffix(".0")
            says_nothing = text.casefold() in AFFIRMATION_WORDS or value.key.casefold() in UNIT_KEYS
            is_value = 0 < len(text) <= LONGEST_VALUE and not says_nothing
            if is_value and stands_in(self.answer, text) and not stands_in(self.before, text):
                repeated.append(text)
        return list(dict.fromkeys(repeated))

    def with_answer(self, answer: str) -> "RecordedAnswer":
        """Return the call followed by another answer."""
        changed = replace(self.messages[self.turn + 1], content=answer)
        return replace(self, messages=(*self.messages[: self.turn + 1], changed, *self.messages[self.turn + 2 :]))

    def with_result(self, result: str) -> "RecordedAnswer":
        """Return the call with another result."""
        return replace(self, messages=replace_result(self.messages, self.turn, 0, result))


def recorded_answers(conversations: Sequence[Conversation]) -> list[RecordedAnswer]:
    """Return the calls of all conversations that are followed by an answer."""
    answered: list[RecordedAnswer] = []
    for number, messages in enumerate(conversations):
        for turn, message in enumerate(messages[:-1]):
            following = messages[turn + 1]
            is_answered = following.role == "assistant" and not following.calls and bool(following.content)
            if len(message.calls) == 1 and message.calls[0].result is not None and is_answered:
                answered.append(RecordedAnswer(number, turn, messages))
    return answered


def pattern(value: str) -> re.Pattern[str]:
    """Return what matches a value that stands in a text as words of its own."""
    return re.compile(r"(?<![\w.])" + re.escape(value) + r"(?!\w)")


def stands_in(text: str, value: str) -> bool:
    """Return whether a value stands in a text as words of its own."""
    return pattern(value).search(text) is not None


def exchanged_words(text: str, values: Mapping[str, str]) -> str:
    """Return a text with values exchanged for others, the longest first."""
    if not values:
        return text
    longest_first = sorted(values, key=len, reverse=True)
    any_value = re.compile("|".join(pattern(value).pattern for value in longest_first))
    return any_value.sub(lambda match: values[match[0]], text)


def read_records(file: Path) -> list[dict[str, Any]]:
    """Read conversations from JSON or JSON lines; those in ShareGPT's form with a role `function_call` too."""
    text = file.read_text("utf-8")
    records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    return [_openai_record(record) for record in records]


def _openai_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with calls as OpenAI's API has them where a message with role `function_call` holds them."""
    said = record.get("conversations")
    if not said or not any(message["from"] == "function_call" for message in said):
        return dict(record)
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(said):
        if message["from"] == "function_call":
            function = json.loads(message["value"])
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            call = {"id": f"c{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif message["from"] == "observation":
            messages.append({"role": "tool", "tool_call_id": f"c{number - 1}", "content": message["value"]})
        else:
            messages.append({"role": roles[message["from"]], "content": message["value"]})
    return {"messages": messages}


def conversations_with_calls(records: Iterable[Mapping[str, Any]]) -> list[Conversation]:
    """Return the conversations in which a call is answered."""
    conversations = [read_conversation(record)[0] for record in records]
    return [messages for messages in conversations if recorded_answers([messages])]


def write_conversations(file: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations as JSON lines of OpenAI's messages."""
    with file.open("w", encoding="utf-8") as lines:
        for messages in conversations:
            record = {"messages": [message for _, message in iter_indexed_openai_messages(messages)]}
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
