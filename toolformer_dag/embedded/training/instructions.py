"""The first lines of prompts P(x): the paper's (appendix A.2), the made world's, and others that say the same."""

import re
from functools import cache
from pathlib import Path
from random import Random

from toolformer_dag.embedded.folder import PROMPTS

NAMES = {
    "calculator": "Calculator",
    "calendar": "Calendar",
    "wiki_search": "WikiSearch",
    "question_answering": "QA",
    "machine_translation": "MT",
}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
PAPER_PROMPTS = Path(__file__).parents[2] / "tools"  # <tool>/prompt.txt
_OTHERS = (
    "Add calls to the {name} API:\n",
    "Add calls to the {name} API to the text. A call is written as [{name}({slot})].\n",
    "Write [{name}({slot})] where it helps to go on with the text.\n",
    "Here are texts, and the same texts with calls to {name}:\n",
)


def instruction(random: Random, tool: str) -> str:
    """One of the instructions of a tool, with its line end."""
    if random.random() < 0.7:
        return random.choice(_of_prompts(tool))
    slot = "" if tool == "calendar" else random.choice(("input", "text", "question"))
    return random.choice(_OTHERS).format(name=NAMES[tool], slot=slot)


def guessed_input(random: Random, tool: str, before: str) -> str | None:
    """An input made of the words before the place, where nothing better is known; None without two numbers for a sum.

    A sum of one number and itself is never shown: it would be a habit that outlives finetuning.
    """
    if tool == "calculator":
        return _guessed_sum(random, before)
    words = " ".join(before.split()[-random.randint(1, 4) :]).strip('"()[].,;:') or "this"
    return {
        "calendar": "",
        "machine_translation": words,
        "wiki_search": f'"{words}"',
        "question_answering": f'"What is {words}?"',
    }[tool]


def _guessed_sum(random: Random, before: str) -> str | None:
    numbers = list(dict.fromkeys(NUMBER.findall(before)))[-2:]
    return f"{numbers[0]} {random.choice('+-*/')} {numbers[1]}" if len(numbers) == 2 else None


@cache
def _of_prompts(tool: str) -> tuple[str, ...]:
    files = (PAPER_PROMPTS / tool / "prompt.txt", PROMPTS / f"{tool}.txt")
    return tuple(file.read_text("utf-8").partition("Input:")[0].strip() + "\n" for file in files)
