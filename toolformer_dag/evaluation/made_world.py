"""The embedded world's held-out questions as benchmarks, one per tool and set of wordings. Imports no torch."""

from typing import Literal

from toolformer_dag.embedded.questions import questions
from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.question import Question
from toolformer_dag.evaluation.rules import in_first_five_words, number_is_right

WITHHELD = {"wiki_search": frozenset({"QA"})}


def made_world(tool: str, n: int, seed: int, wordings: Literal["seen", "unseen"]) -> Benchmark:
    """`n` questions for the tool of that key, judged like the paper's mathematics or LAMA; search goes without QA."""
    asked = tuple(
        Question(one.prompt, (one.answer,), one.tool, one.date.isoformat() if one.date else "", one.wording)
        for one in questions(seed, tool, n, wordings)
    )
    rule = number_is_right if tool == "calculator" else in_first_five_words
    return Benchmark(f"{tool} ({wordings})", asked, rule, WITHHELD.get(tool, frozenset()))
