"""Conversations for training and others for the test, in three folds: every conversation is tested in one of them."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cleaning.recorded_answers import Conversation, conversations_with_calls, read_records
from benchmarks.cleaning.tool_conversations import tool_conversations

FOLDS = 3
MADE_SEED = 1  # draws the made conversations


@dataclass(frozen=True)
class Fold:
    """Numbers of the conversations that are trained on, and of those that are tested; both ascending."""

    training: Sequence[int]
    test: Sequence[int]


def all_conversations(data: Path | None) -> list[Conversation]:
    """Return the conversations with calls of the JSON and JSON lines files of a folder; without a folder made ones."""
    if data is None:
        return conversations_with_calls(tool_conversations(MADE_SEED))
    conversations: list[Conversation] = []
    for file in sorted(data.iterdir()):
        if file.suffix in (".json", ".jsonl"):
            conversations += conversations_with_calls(read_records(file))
    return conversations


def fold_of(conversations: Sequence[Conversation], seed: int) -> Fold:
    """Return the fold of a seed: of seeds 0, 1 and 2 each has another third of the conversations for the test.

    Conversations with the same first question stay together, so that no tested question was trained on.
    """
    numbers_by_question: dict[str, list[int]] = defaultdict(list)
    for number, messages in enumerate(conversations):
        numbers_by_question[messages[0].content.casefold()].append(number)
    thirds: list[list[int]] = [[] for _ in range(FOLDS)]
    questions = sorted(numbers_by_question)
    random.Random(5).shuffle(questions)
    for question in questions:
        smallest = min(thirds, key=len)
        smallest += numbers_by_question[question]
    test = sorted(thirds[seed % FOLDS])
    training = sorted(set(range(len(conversations))) - set(test))
    return Fold(training=training, test=test)
